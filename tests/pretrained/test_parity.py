"""Imported checkpoints compute the same as transformers.

The stored fixtures have the results of transformers. `launch/test.sh --parity` also makes fresh
fixtures, with other weights and tokens, by the transformers that it installs next to the
environment.
"""

import dataclasses
import functools
import os
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from safetensors.numpy import load_file, save_file

import sink_jax as sj
from sink_jax.models.edits import edit_tree, edited_logits
from sink_jax.models.record import states
from tests.pretrained import test_export
from tests.train.runs import run_python

FIXTURES = Path(__file__).parent / 'fixtures'
CASES = sorted(path.name for path in FIXTURES.iterdir())
PACKAGES = os.environ.get('PARITY_PACKAGES')
with_transformers = pytest.mark.skipif(not PACKAGES, reason='needs transformers: run with --parity')
EPSILON = 0.3

# Relative to the largest entry. Measured, float32 against float32: at most 2e-6 without experts,
# 6e-6 with them. Fresh weights of Jamba once gave 1.7e-5. The float32 numbers of transformers
# differ as much from its float64 numbers.
TOLERANCE = 3e-5


def assert_close(actual, expected, what, tolerance):
  actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
  assert actual.shape == expected.shape, what
  error = np.abs(actual - expected).max() / np.abs(expected).max()
  assert error < tolerance, f'{what}: {error:.1e}'


def compare(folder, run=None, tolerance=TOLERANCE, of_maps=None, of_importance=None):
  """Compares every number of expected.safetensors, and the metrics of its maps in float64."""
  expected, run = load_file(folder / 'expected.safetensors'), run or sj.load_pretrained(folder)
  if run.config.unembedding:
    compare_logits(expected, run, tolerance)
  compare_layers(expected, run, tolerance, of_maps or tolerance)
  compare_probe(expected, run, tolerance, of_importance or tolerance)


def numbered(expected, name):
  """The arrays name.0, name.1, ..."""
  count = sum(key.startswith(f'{name}.') for key in expected)
  return [expected[f'{name}.{i}'] for i in range(count)]


def compare_logits(expected, run, tolerance=TOLERANCE):
  assert_close(run.logits(expected['tokens']), expected['logits'], 'logits', tolerance)


def compare_layers(expected, run, tolerance=TOLERANCE, of_maps=TOLERANCE):
  record = run.record(expected['tokens'], sj.RecordOptions(attention=sj.maps, hidden=states))
  embedded, *hidden = numbered(expected, 'hidden_states')
  hidden[-1] = expected['last_block']  # transformers returns the last one after the final norm
  assert_close(record.embedding, embedded, 'embeddings', tolerance)
  for block, (ours, theirs) in enumerate(zip(record.layers.hidden, hidden, strict=True)):
    assert_close(ours, theirs, f'hidden state of block {block}', tolerance)
  maps = record.layers.attention.weights_BxHxTxT, numbered(expected, 'attentions')
  for layer, (ours, theirs) in enumerate(zip(*maps, strict=True)):
    assert_close(ours, theirs, f'attention {layer}', of_maps)


def compare_probe(expected, run, tolerance=TOLERANCE, of_importance=TOLERANCE):
  report, length = sj.probe(run, expected['tokens']), expected['tokens'].shape[1]
  maps_SxNxHxTxT = np.stack(numbered(expected, 'attentions'), 1).astype(np.float64)
  alpha = maps_SxNxHxTxT.sum(-2) / (length - np.arange(length))
  assert_allclose(sj.importance(maps_SxNxHxTxT), alpha, atol=1e-6)
  assert_close(report.importance, alpha, 'importance', of_importance)
  assert_close(report.raw_importance, alpha, 'raw importance', of_importance)
  rates = (alpha > EPSILON).mean((0, 1, 2))
  assert_allclose(report.sink_rates(EPSILON), rates, rtol=1e-6)
  slot = 1 - maps_SxNxHxTxT.sum(-1).mean(-1)
  if report.extra_key is None:
    assert np.abs(slot).max() < tolerance  # the maps contain all weights
  else:
    assert_close(report.extra_key, slot, 'sink logit', tolerance)


# Each differs from others of its family in something that one line of the importer reads, and any
# mistake there changes the logits.
VARIATIONS = (
  'falcon_grouped',
  'falcon_sequential',
  'gemma2_uncapped',
  'gemma3_new',
  'gpt2_inverse_layer',
  'gpt2_unscaled',
  'gpt_neox_sequential',
  'gpt_oss',
  'granite',
  'jamba_biases',
  'llama_linear',
  'llama_llama3',
  'llama_yarn',
  'mixtral_fused',
  'olmo3_plain',
  'opt_post_norm',
  'qwen3_window',
  'smollm3_listed',
)
PROBED = 'gpt_oss_mxfp4', 'jamba', 'llama'  # a sink logit, blocks without attention, neither


@pytest.mark.parametrize('case', CASES)
def test_stored_fixtures(case):
  expected = load_file(FIXTURES / case / 'expected.safetensors')
  run = sj.load_pretrained(FIXTURES / case)
  compare_logits(expected, run)
  if case not in VARIATIONS:
    compare_layers(expected, run)
  if case in PROBED:
    compare_probe(expected, run)


def test_a_model_that_sees_images_may_have_newer_names(tmp_path):
  folder = FIXTURES / 'gemma3_images'
  tensors = {
    re.sub('^language_model.model', 'model.language_model', name): x
    for name, x in load_file(folder / 'model.safetensors').items()
  }
  tensors = {re.sub('^(vision|multi)', r'model.\1', name): x for name, x in tensors.items()}
  assert not any(name.startswith('language_model') for name in tensors)
  save_file(tensors, tmp_path / 'model.safetensors', {'format': 'pt'})
  shutil.copy(folder / 'config.json', tmp_path)
  tokens = load_file(folder / 'expected.safetensors')['tokens']
  assert_array_equal(
    sj.load_pretrained(tmp_path).logits(tokens), sj.load_pretrained(folder).logits(tokens)
  )


@pytest.mark.parametrize(
  'case, name',
  [('gpt_neox', 'embed_out.weight'), ('jamba', 'lm_head.weight'), ('gpt_oss', 'lm_head.weight')],
)
def test_a_model_may_lack_its_unembedding(case, name, tmp_path):
  whole = sj.load_pretrained(FIXTURES / case).params
  shutil.copytree(FIXTURES / case, tmp_path, dirs_exist_ok=True)
  tensors = load_file(tmp_path / 'model.safetensors')
  del tensors[name]
  save_file(tensors, tmp_path / 'model.safetensors', {'format': 'pt'})
  run = sj.load_pretrained(tmp_path)
  assert not run.config.unembedding
  del whole['unembed']
  jax.tree.map(assert_array_equal, run.params, whole)


@pytest.mark.parametrize('case', ['gpt_oss', 'jamba'])
def test_bfloat16_is_near(case):
  """Routers and the recurrence of Mamba are in float32."""
  expected = load_file(FIXTURES / case / 'expected.safetensors')
  run = sj.load_pretrained(FIXTURES / case, dtype='bfloat16')
  logits = np.asarray(run.logits(expected['tokens']), np.float64)
  # The median, because a rounding has a large effect on a few tokens of Mamba models. At most 0.03
  # was measured.
  difference = np.median(np.abs(logits - expected['logits']))
  assert difference < 0.05 * np.abs(expected['logits']).mean(), difference


def make(*arguments, script='make_fixtures.py'):
  """Runs a script of this folder with the installed transformers."""
  run_python(Path(__file__).with_name(script), *arguments, PYTHONPATH=PACKAGES)


@pytest.fixture(scope='module')
def fresh(tmp_path_factory):
  folder = tmp_path_factory.mktemp('fresh')
  make(f'--out={folder}', '--seed=1')
  return folder


@with_transformers
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
  make(*sorted(folder.iterdir()))
  return folder


@with_transformers
@pytest.mark.parametrize('case', test_export.CASES)
def test_transformers_computes_what_an_exported_run_does(case, exported):
  run = test_export.run_of(case)
  # Measured with sink logits: at most 5e-7, float32 against float32.
  compare(exported / case, run, 1e-5)
  generated = np.load(exported / case / 'generated.npy')
  assert_array_equal(run.generate(test_export.TOKENS, 32), generated)


@pytest.fixture(scope='module')
def padded(tmp_path_factory):
  folder = tmp_path_factory.mktemp('padded')
  make(folder, script='make_padded.py')
  return folder


@with_transformers
@pytest.mark.parametrize('side', ['left', 'right'])
@pytest.mark.parametrize('case', ['llama', 'mistral'])
def test_a_padded_batch_is_measured_text_by_text(case, side, padded):
  arrays = np.load(padded / case / 'arrays.npz')
  mask = arrays[f'{side}.mask']
  lengths = mask.sum(1)
  layers = list(arrays[f'{side}.attentions'].swapaxes(0, 1))
  # Float32 sums of at most 12 numbers that are at most 1.
  close = functools.partial(assert_allclose, rtol=1e-6, atol=1e-6)
  report = sj.SinkReport.from_attentions(layers, mask=mask)
  run = sj.load_pretrained(padded / case)
  probe = sj.probe(run, arrays[f'{side}.tokens'], mask=mask)
  for s, n in enumerate(lengths):
    maps_NxHxTxT = arrays[f'{s}.attentions'][0].astype(np.float64)
    alpha = maps_NxHxTxT.sum(-2) / np.arange(n, 0, -1)
    close(report.importance[s, ..., :n], alpha)
    assert_close(probe.importance[s, ..., :n], alpha, 'importance of a probe', TOLERANCE)
    for name in ('keys', 'values'):
      norms = np.linalg.norm(arrays[f'{s}.{name}'][0], axis=-1)
      assert_close(probe.norms[name[:-1]][s, ..., :n], norms, name, TOLERANCE)
  if side == 'left':
    with pytest.raises(ValueError, match='padding on its left'):
      sj.SinkReport.from_attentions(layers)
  else:
    close(
      sj.importance(layers, mask=np.arange(mask.shape[1]) < lengths[:, None]).swapaxes(0, 1),
      report.importance,
    )
  # The window of Mistral is shorter than the longest text, which has no padding.
  sj.SinkReport.from_attentions([maps[:1] for maps in layers])


@pytest.fixture(scope='module')
def edited(tmp_path_factory):
  folder = tmp_path_factory.mktemp('edited')
  make(folder, script='make_edited.py')
  return folder


@with_transformers
@pytest.mark.parametrize('edit', ['none', 'keys', 'values', 'heads', 'caps', 'caps of some', 'all'])
@pytest.mark.parametrize('case', ['llama', 'gemma3'])
def test_edits_are_those_of_transformers(case, edit, edited):
  stored, run = np.load(edited / f'{case}.npz'), sj.load_pretrained(FIXTURES / case)
  prefix = f'{edit}.'
  arrays = {key.removeprefix(prefix): stored[key] for key in stored if key.startswith(prefix)}
  expected, tokens = arrays.pop('logits'), stored['tokens']
  config = dataclasses.replace(run.config, implementation='chunked')
  batch, length = tokens.shape

  tree = edit_tree(config, batch=batch, length=length, **arrays)
  logits = edited_logits(config, None, run.params, tree, tokens)

  assert_close(logits, expected, edit, TOLERANCE)
