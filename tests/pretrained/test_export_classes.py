"""What the folder of an exported run holds: the class, its keys, and numbers that were folded."""

import numpy as np
import pytest

import sink_jax as sj
from sink_jax.pretrained.export import export_checkpoint
from sink_jax.pretrained.files import Checkpoint
from tests.pretrained import exported_cases

LAYER = 1


def doubles(tree, *names):
  """Leaves of the attention of one block, in float64."""
  return [np.asarray(tree['blocks']['attention'][name]['kernel']
                     if name in ('query', 'key', 'value', 'out') else
                     tree['blocks']['attention'][name], np.float64)[LAYER] for name in names]


class Folder:
  """An exported case: `hf`, `notes` and the stored tensors of one block's attention."""

  def __init__(self, case, folder):
    target, self.run = exported_cases.case_of(case)
    self.hf, notes = export_checkpoint(self.run, folder, context=64)
    assert self.hf['model_type'] == target
    self.notes, self.checkpoint = '\n'.join(notes), Checkpoint(folder)

  def stored(self, name):
    return self.checkpoint.read(f'model.layers.{LAYER}.self_attn.{name}')

  def params(self, *names):
    return doubles(self.run.params, *names)


@pytest.fixture
def export(tmp_path):
  return lambda case: Folder(case, tmp_path)


def assert_same(actual, expected):
  # A number that is computed in float64 and rounded once.
  np.testing.assert_allclose(actual, expected, rtol=1e-7, atol=0)


def test_another_eps_of_qk_norm_is_a_scale_of_queries_and_keys(export):
  folder = export('qk_norm_eps')
  query, key = folder.params('query', 'key')
  factor = np.sqrt(0.003 / 1e-6)
  assert_same(folder.stored('q_proj.weight'), factor * query.T)
  assert_same(folder.stored('k_proj.weight'), factor * key.T)
  assert 'attention.qk_norm = QKNorm(eps=1e-06): its eps becomes' in folder.notes
  assert 'Qwen3ForCausalLM: llama has no attention.qk_norm' in folder.notes


def test_factors_of_rows_and_values_are_those_of_matrices(export, tmp_path):
  folder = export('v_bias_shared')
  value, out, scale, vector = folder.params('value', 'out', 'value_scale', 'kv_bias_value')
  assert_same(folder.stored('v_proj.weight'), (value * np.repeat(scale, 8)).T)
  assert_same(folder.stored('o_proj.weight'), 0.5 * out.T)
  # The V bias has no weight, so the factor of the rows is not its own.
  bias = np.asarray(folder.run.params['blocks']['attention']['out']['bias'], np.float64)[LAYER]
  assert_same(folder.stored('o_proj.bias'), bias + np.tile(vector[0], 4) @ out)
  for name, width in (('q', 32), ('k', 16), ('v', 16)):
    np.testing.assert_array_equal(folder.stored(f'{name}_proj.bias'), np.zeros(width))
  assert folder.hf['attention_bias'] and folder.hf['mlp_bias']
  # The model that they make is the run.
  tokens = exported_cases.tokens_of(folder.run)
  expected = np.asarray(folder.run.logits(tokens))
  np.testing.assert_allclose(sj.load_pretrained(tmp_path).logits(tokens), expected,
                             rtol=0, atol=1e-6 * np.abs(expected).max())


def test_a_v_bias_of_each_head(export):
  folder = export('v_bias')
  out, vector = folder.params('out', 'kv_bias_value')
  assert_same(folder.stored('o_proj.bias'),
              sum(vector[h] @ out[8 * h:8 * h + 8] for h in range(4)))
  assert not folder.hf['mlp_bias']


def test_a_class_that_cannot_hold_the_run_is_named_with_one_that_can(tmp_path):
  _, run = exported_cases.case_of('qk_norm')
  with pytest.raises(ValueError, match=r'--as=llama cannot hold.*attention.qk_norm = QKNorm\(eps='
                                       r'0.003\).*NoQKNorm.*--as=qwen3 can'):
    export_checkpoint(run, tmp_path / 'out', target='llama')
  with pytest.raises(ValueError, match='--as=bert: no such class; choices: llama, mistral, qwen3'):
    export_checkpoint(run, tmp_path / 'out', target='bert')
  assert not (tmp_path / 'out').exists()
