"""Which runs are evidence: uniform importance by brute force, and runs that are not evidence."""

import numpy as np
import pytest

import sink_jax as sj
from sink_jax.report.runs import read_runs, table
from sink_jax.report.validity import uniform_importance
from tests.report.fake_runs import DEAD, UNIFORM, write_run

SPECS = [
  {},
  {'mask': 'Window(size=5)'},
  {'mask': 'Prefix(length=4)'},
  {'kv_bias': 'KBias()'},
  {'mask': 'Window(size=3)', 'kv_bias': 'SinkLogit()'},
]


@pytest.mark.parametrize('sink_tokens', [0, 2])
@pytest.mark.parametrize('components', SPECS)
def test_uniform_importance_is_that_of_the_map(components, sink_tokens):
  spec = sj.AttentionSpec(**components)
  length = 9
  total = sink_tokens + length
  seen = np.array([[bool(spec.mask.keep(i, j)) for j in range(total)] for i in range(total)])
  rows = seen / (seen.sum(1, keepdims=True) + spec.kv_bias.has_extra_key)
  first = rows[sink_tokens:, sink_tokens].mean()

  np.testing.assert_allclose(uniform_importance(spec, length, sink_tokens), first, rtol=1e-6)


@pytest.mark.parametrize(
  'last, valid, known',
  [
    ({}, '', True),
    (DEAD, 'dead', True),
    # One of eight heads attends, so uniform attention in the others does not make the run dead.
    ({**DEAD, 'entropy_ratio': [[1.0] * 4, [1.0, 1.0, 1.0, 0.98]]}, '', True),
    ({**DEAD, 'entropy_ratio': None}, 'dead', False),
    ({**DEAD, 'entropy_ratio': None, 'largest_importance': 1.02 * UNIFORM}, '', False),
    ({**DEAD, 'entropy_ratio': None, 'mean_importance': 0.98 * UNIFORM}, '', False),
  ],
)
def test_dead_attention_is_uniform_in_every_head(last, valid, known, tmp_path):
  write_run(tmp_path, last=last)
  row = table(read_runs(tmp_path)).iloc[0]
  assert (row.valid, row.known) == (valid, known)


def test_a_dead_run_in_a_good_trial_is_found(tmp_path):
  for seed in range(5):
    write_run(tmp_path, seed=seed, last=DEAD if seed == 3 else {})
  found = table(read_runs(tmp_path)).set_index('seed').valid
  assert found.to_dict() == {0: '', 1: '', 2: '', 3: 'dead', 4: ''}


@pytest.mark.parametrize(
  'key, loss, valid',
  [
    ('unigram_loss', 3.0, ''),
    ('unigram_loss', 3.2, 'no better than unigram'),
    ('loss_of_zero', 3.2, 'no better than unigram'),
    ('', 3.2, ''),
  ],
)
def test_a_loss_of_a_unigram_model_is_no_evidence(key, loss, valid, tmp_path):
  # The training loss of the last tenth is 0.1 below the validation loss.
  write_run(tmp_path, loss=loss, data={key: 3.05} if key else {})
  assert table(read_runs(tmp_path)).valid.tolist() == [valid]


def test_overfitting_is_no_reason(tmp_path):
  workdir = write_run(tmp_path, loss=2.0, data={'unigram_loss': 3.0})
  with (workdir / 'metrics.jsonl').open('a') as file:
    file.write('{"kind": "valid", "step": 100, "valid": 7.0}\n')

  row = table(read_runs(tmp_path)).iloc[0]
  assert (row.valid_loss, row.valid) == (7.0, '')


@pytest.mark.parametrize(
  'status, valid',
  [
    ('running', 'not finished'),
    ('interrupted', 'not finished'),
    ('diverged', 'diverged'),
    ('failed', 'failed'),
  ],
)
def test_a_run_that_did_not_finish_says_so(status, valid, tmp_path):
  write_run(tmp_path, status=status, last=DEAD)
  assert table(read_runs(tmp_path)).valid.tolist() == [valid]
