"""Matrices stay in the 16 bits of their files, and results are those of float32."""

import dataclasses
import json

import jax
import ml_dtypes
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

import sink_jax as sj
from sink_jax.pretrained import parameters
from tests.pretrained import tiny

# Without those whose checkpoints have several forms of the same tensors.
FAMILIES = {
  name: folder
  for name, folder in tiny.first_fixtures().items()
  if name not in ('gemma3', 'mixtral')
}
# Softmax with windows, experts with a sink logit; every family goes through the same methods.
RECORDED = 'gemma2', 'gpt_oss'


@pytest.fixture(autouse=True)
def on_an_accelerator(monkeypatch):
  monkeypatch.setattr(parameters, 'platform', lambda: 'cuda')


def rounded(folder, config, dtype):
  """A checkpoint of the config with random weights of a dtype; quantised tensors stay."""
  arrays = {
    name: x.astype(dtype) if x.dtype == np.float32 else x
    for name, x in tiny.tensors(config).items()
  }
  tiny.write(folder, config, arrays)
  return sj.load_pretrained(folder)


def widened(run):
  return dataclasses.replace(run, params=jax.tree.map(lambda x: x.astype('float32'), run.params))


@pytest.mark.parametrize('family', FAMILIES)
def test_matrices_are_held_as_stored_and_results_are_equal(family, tmp_path):
  config = json.loads((FAMILIES[family] / 'config.json').read_text())
  run = rounded(tmp_path, config, ml_dtypes.bfloat16)
  plain = widened(run)
  held = {path[-1] for path, x in flatten_dict(run.params).items() if x.dtype == 'bfloat16'}
  assert held and held <= {'kernel', 'embed'}
  assert run.config.dtype == 'float32'
  tokens = np.random.default_rng(0).integers(0, run.config.vocab_size, (2, 9))
  np.testing.assert_array_equal(run.logits(tokens), plain.logits(tokens))
  if family in RECORDED:
    jax.tree.map(np.testing.assert_array_equal, run.record(tokens), plain.record(tokens))
    np.testing.assert_array_equal(run.generate(tokens, 4), plain.generate(tokens, 4))


def test_half_precision_of_other_kinds(tmp_path):
  kinds = lambda run: {path[-1]: str(x.dtype) for path, x in flatten_dict(run.params).items()}
  half = kinds(rounded(tmp_path / 'f16', tiny.LLAMA, np.float16))
  assert half['kernel'] == half['embed'] == 'float16' and half['gain'] == 'float32'
  full = rounded(tmp_path / 'f32', tiny.LLAMA, np.float32)
  assert set(kinds(full).values()) == {'float32'}
  asked = sj.load_pretrained(tmp_path / 'f16', dtype='bfloat16')
  assert set(kinds(asked).values()) == {'bfloat16'}


def test_a_cpu_holds_float32(tmp_path, monkeypatch):
  monkeypatch.setattr(parameters, 'platform', lambda: 'cpu')
  run = rounded(tmp_path, tiny.LLAMA, ml_dtypes.bfloat16)
  assert {x.dtype for x in jax.tree.leaves(run.params)} == {np.dtype('float32')}
