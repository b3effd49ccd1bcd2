"""Imported checkpoints compute what transformers computes with them.

The stored fixtures say what that is. `launch/test.sh --parity` also makes fresh ones, with
other weights and tokens, by the transformers that it has installed beside the environment.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import sink_jax as sj
from tests.pretrained import test_export

FIXTURES = Path(__file__).parent / 'fixtures'
CASES = sorted(path.name for path in FIXTURES.iterdir())
PACKAGES = os.environ.get('PARITY_PACKAGES')
EPSILON = 0.3

# Relative to the largest entry. Measured, float32 against float32: at most 2e-6 without
# experts, 6e-6 with them; fresh weights of Jamba once had 1.7e-5. The float32 numbers of
# transformers are as far from its float64 ones.
TOLERANCE = 3e-5


def error(actual, expected):
  actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
  assert actual.shape == expected.shape
  return np.abs(actual - expected).max() / np.abs(expected).max()


def assert_close(actual, expected, what):
  assert error(actual, expected) < TOLERANCE, f'{what}: {error(actual, expected):.1e}'


def numbered(expected, name):
  found = [key for key in expected if key.startswith(name + '.')]
  return [expected[f'{name}.{i}'] for i in range(len(found))]


def compare(folder):
  """Every number of expected.safetensors, and the metrics of its attention maps."""
  expected = load_file(folder / 'expected.safetensors')
  run, tokens = sj.load_pretrained(folder), expected['tokens']
  assert_close(run.logits(tokens), expected['logits'], 'logits')

  record = run.record(tokens, sj.RecordOptions(maps=True, hidden=True))
  embedded, *hidden = numbered(expected, 'hidden_states')
  hidden[-1] = expected['last_block']  # transformers returns it after the final norm
  assert_close(record.embedding_BxTxD, embedded, 'embeddings')
  assert len(record.layers.hidden_BxTxD) == len(hidden)
  for layer, (ours, theirs) in enumerate(zip(record.layers.hidden_BxTxD, hidden)):
    assert_close(ours, theirs, f'hidden state of block {layer}')

  maps = np.stack(numbered(expected, 'attentions')).astype(np.float64)
  assert len(record.layers.maps_BxHxTxT) == len(maps)
  for layer, (ours, theirs) in enumerate(zip(record.layers.maps_BxHxTxT, maps)):
    assert_close(ours, theirs, f'attention {layer}')
  compare_metrics(sj.probe(run, tokens), maps)


def compare_metrics(report, maps_NxSxHxTxT):
  """Importance and sink rates by their definitions, in float64."""
  length = maps_NxSxHxTxT.shape[-1]
  alpha = maps_NxSxHxTxT.sum(-2).swapaxes(0, 1) / (length - np.arange(length))
  assert_close(report.importance, alpha, 'importance')
  assert_close(report.raw_importance, alpha, 'raw importance')
  np.testing.assert_allclose(report.sink_rates(EPSILON), (alpha > EPSILON).mean((0, 1, 2)),
                             rtol=1e-6)
  slot = 1 - maps_NxSxHxTxT.sum(-1).mean(-1).swapaxes(0, 1)
  if report.bias_slot is None:
    assert np.abs(slot).max() < TOLERANCE  # no weight is missing from the maps
  else:
    assert_close(report.bias_slot, slot, 'sink logit')


# These differ from others of their family in what one line of the importer reads.
VARIATIONS = ('falcon_grouped', 'falcon_sequential', 'gemma2_uncapped', 'gemma3_new',
              'gpt2_inverse_layer', 'gpt_neox_sequential', 'granite', 'jamba_biases',
              'llama_linear', 'mixtral_fused', 'olmo3_plain', 'opt_post_norm', 'smollm3_listed')


@pytest.mark.every(2)
@pytest.mark.parametrize('case', [
    pytest.param(case, marks=pytest.mark.full if case in VARIATIONS else ()) for case in CASES])
def test_stored_fixtures(case):
  compare(FIXTURES / case)


def test_a_model_that_sees_images_may_have_newer_names(tmp_path):
  folder = FIXTURES / 'gemma3_images'
  tensors = {re.sub('^language_model.model', 'model.language_model', name): x
             for name, x in load_file(folder / 'model.safetensors').items()}
  tensors = {re.sub('^(vision|multi)', r'model.\1', name): x for name, x in tensors.items()}
  assert not any(name.startswith('language_model') for name in tensors)
  save_file(tensors, tmp_path / 'model.safetensors', {'format': 'pt'})
  shutil.copy(folder / 'config.json', tmp_path)
  tokens = load_file(folder / 'expected.safetensors')['tokens']
  np.testing.assert_array_equal(sj.load_pretrained(tmp_path).logits(tokens),
                                sj.load_pretrained(folder).logits(tokens))


@pytest.mark.full
@pytest.mark.parametrize('case', CASES)
def test_bfloat16_is_near(case):
  """What must be float32 for it is: norms, softmax, routers, the recurrence of Mamba."""
  expected = load_file(FIXTURES / case / 'expected.safetensors')
  run = sj.load_pretrained(FIXTURES / case, dtype='bfloat16')
  logits = np.asarray(run.logits(expected['tokens']), np.float64)
  # The median: a few tokens of Mamba models make much of a rounding. At most 0.03 was measured.
  difference = np.median(np.abs(logits - expected['logits']))
  assert difference < 0.05 * np.abs(expected['logits']).mean(), difference


@pytest.fixture(scope='module')
def fresh(tmp_path_factory):
  folder = tmp_path_factory.mktemp('fresh')
  subprocess.run([sys.executable, Path(__file__).with_name('make_fixtures.py'),
                  f'--out={folder}', '--seed=1'], env=os.environ | {'PYTHONPATH': PACKAGES},
                 check=True)
  return folder


@pytest.mark.skipif(not PACKAGES, reason='needs transformers: run with --parity')
@pytest.mark.parametrize('case', CASES)
def test_fresh_fixtures(case, fresh):
  assert sorted(path.name for path in fresh.iterdir()) == CASES
  compare(fresh / case)


@pytest.fixture(scope='module')
def exported(tmp_path_factory):
  folder = tmp_path_factory.mktemp('exported')
  for case in test_export.CASES:
    test_export.export_checkpoint(test_export.run_of(case), folder / case, context=64)
    np.save(folder / case / 'tokens.npy', test_export.TOKENS)
  subprocess.run([sys.executable, Path(__file__).with_name('run_exported.py'),
                  *sorted(folder.iterdir())], check=True, env=os.environ | {'PYTHONPATH': PACKAGES})
  return folder


@pytest.mark.skipif(not PACKAGES, reason='needs transformers: run with --parity')
@pytest.mark.parametrize('case', test_export.CASES)
def test_transformers_computes_what_an_exported_run_does(case, exported):
  folder, run, tokens = exported / case, test_export.run_of(case), test_export.TOKENS
  expected = load_file(folder / 'expected.safetensors')
  embedded, *hidden = numbered(expected, 'hidden_states')
  hidden[-1] = expected['last_block']
  record = run.record(tokens, sj.RecordOptions(hidden=True))
  pairs = [(run.logits(tokens), expected['logits']), (record.embedding_BxTxD, embedded),
           *zip(record.layers.hidden_BxTxD, hidden, strict=True)]
  errors = [error(ours, theirs) for ours, theirs in pairs]
  # Measured with sink logits: at most 5e-7, float32 against float32.
  assert max(errors) < 1e-5, errors
  np.testing.assert_array_equal(run.generate(tokens, 32), np.load(folder / 'generated.npy'))
