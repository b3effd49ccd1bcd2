"""Runs as tables: what is read from workdirs and stored files, and what is computed from it."""

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import sink_jax as sj
from sink_jax.report.one_run import describe_attention
from sink_jax.report.runs import Runs, read_runs, table, write_runs
from sink_jax.train.config import Experiment, changed
from tests.report.fake_runs import probe, write_run
from tests.train.runs import run_python

RESULTS = Path(__file__).parents[2] / 'results'


def test_the_package_needs_no_pandas():
  code = 'import sys, sink_jax; sink_jax.sink_rate; assert "pandas" not in sys.modules'
  run_python('-c', code)


def test_nothing_run(tmp_path):
  runs = sj.read_runs(tmp_path)
  assert runs.metrics.empty
  assert runs.runs.empty
  assert table(runs).empty

  with pytest.raises(ValueError, match='no folder'):
    read_runs(tmp_path / 'missing')


def test_a_run_is_read_at_its_numbers(tmp_path):
  write_run(
    tmp_path / 'text',
    'k-bias',
    seed=3,
    sink_1=40.0,
    last={'sink_bias_slot': 60.0},
    config={'attention.kv_bias': 'KBias()', 'attention.mask': 'Prefix(length=2)', 'log_every': 7},
  )
  runs = read_runs(tmp_path)
  row = table(runs).iloc[0]

  assert (row.run, row.trial, row.seed, row.heads) == ('text/k-bias-seed-3', 'k-bias', 3, 8)
  assert (row.sink_1, row.sink_star, row.untrained_sink_1) == (40, 60, 0)
  assert (row.emergence_step, row.lead_1, row.lead_2, row.largest_sink) == (30, 38.5, -38.5, 40)
  assert (row.prefix_sink, row.least_entropy, row.value_ratio) == (41.5, 0.5, 0.4)
  assert row.prefix_first == 100 * 40 / 41.5
  assert math.isnan(row.window)
  # The largest activation is 160 medians, in block 1. The first token is 3 / 1.3 times as long as
  # the untrained model's.
  assert row.massive == 1.6
  assert row.hidden_ratio == 3.0
  assert row.massive_before_norm == 3.0
  assert (row.valid_loss, row.converges, row.tokens, row.epochs) == (3.0, 1, 100 * 512 * 64, 3.2768)
  assert row.train_loss == pytest.approx(2.9)
  assert row.overfitting == pytest.approx(0.1)

  settings = json.loads(row.settings)
  assert settings['attention.kv_bias'] == 'KBias()'
  assert 'log_every' not in settings

  of = lambda metric, step: (
    runs.metrics.query('metric == @metric and step == @step').set_index('block').value
  )
  assert of('hidden_ratio', 100)[[0, 1, 2]].tolist() == [1.1, 2.0, 3.0]
  assert of('hidden_before_norm_ratio', 100)[[1, 2]].tolist() == [2.0, 3.0]
  assert of('beyond_100', 100)[[0, 1, 2]].tolist() == [0, 1, 0]
  assert of('value_ratio', 50).tolist() == [0.4]


def test_massive_activations_need_both_parts_of_the_rule(tmp_path):
  longer = {'hidden_ratio': [1.0, 13.0, 1.0]}  # ten times the untrained model's ratio
  larger = {'activation_max': [1.0, 80.0, 1.0]}  # 1,600 medians

  for seed, last in enumerate(
    (
      {**longer, 'activation_max': [1.0, 4.0, 1.0]},
      {**larger, 'hidden_ratio': [1.0, 1.2, 1.2]},
      longer | larger,
    )
  ):
    write_run(tmp_path, seed=seed, last=last)

  assert (table(read_runs(tmp_path)).massive > 1).tolist() == [False, False, True]


def test_half_run_diverged_not_begun_and_of_other_data(tmp_path):
  write_run(tmp_path, 'half', status='interrupted', content='other')
  write_run(tmp_path, 'gone', status='diverged', reason='the loss is not finite')
  (tmp_path / 'refused').mkdir()
  (tmp_path / 'refused/status.json').write_text(
    json.dumps(
      {
        'status': 'not expressible',
        'reason': 'no head',
        'label': {'trial': 'heads-1', 'task': 'paper'},
      }
    )
  )
  rows = table(read_runs(tmp_path)).set_index('run')
  half, gone, refused = (rows.loc[run] for run in ('half-seed-0', 'gone-seed-0', 'refused'))

  assert (half.status, half.step, half.steps, half.sink_1) == ('interrupted', 50, 100, 12.5)
  assert (half.content, gone.content) == ('other', 'data')
  assert (gone.converges, gone.reason) == (0, 'the loss is not finite')
  assert math.isnan(half.converges)
  assert (refused.trial, refused.valid) == ('heads-1', 'not expressible')
  assert math.isnan(refused.sink_1)


@pytest.mark.parametrize(
  'damage, status',
  [
    (lambda text: text[:-30], 'done'),  # a kill left the last line unfinished
    (lambda text: text + 'not JSON\n', 'done'),
    (lambda text: text.replace('"sink_1":', '"sink":', 1), 'unreadable'),
    (lambda text: text.replace('[1.1, 2.0, 3.0]', '7'), 'unreadable'),
  ],
)
def test_damaged_metrics_end_no_report(damage, status, tmp_path):
  write_run(tmp_path, seed=1)
  file = write_run(tmp_path) / 'metrics.jsonl'
  file.write_text(damage(file.read_text()))
  rows = table(read_runs(tmp_path))

  assert rows.status.tolist() == [status, 'done']
  assert (status == 'done') == rows.reason.isna()[0]


def test_a_damaged_config_or_status_ends_no_report(tmp_path):
  (write_run(tmp_path) / 'config.json').write_text('{')
  (write_run(tmp_path, seed=1) / 'status.json').write_text('{"status": "done", "hardware": "cpu"}')
  rows = table(read_runs(tmp_path))

  assert rows.valid.tolist() == ['unreadable'] * 2
  assert 'config.json' in rows.reason[0]


def test_the_last_probe_of_finite_activations_counts(tmp_path):
  workdir = write_run(tmp_path, status='diverged')
  with (workdir / 'metrics.jsonl').open('a') as file:
    for row in (
      probe(60, 99.0, value_ratio=[0.5, None]),
      probe(70, 99.0, largest_importance=math.nan),
      {'kind': 'valid', 'step': 60, 'valid': math.nan},
    ):
      file.write(json.dumps(row) + '\n')

  row = table(read_runs(tmp_path)).iloc[0]
  assert row.sink_1 == 12.5
  assert math.isnan(row.valid_loss)


def test_a_long_training_curve_is_thinned_to_means(tmp_path):
  losses = np.random.default_rng(0).uniform(size=2000)
  (write_run(tmp_path, steps=20_000) / 'metrics.jsonl').write_text(
    ''.join(
      json.dumps({'kind': 'train', 'step': 10 * i, 'loss': loss}) + '\n'
      for i, loss in enumerate(losses, 1)
    )
  )
  runs = read_runs(tmp_path)
  curve = runs.metrics.loc[runs.metrics.metric == 'train_loss']

  assert len(curve) == 100
  assert curve.step.max() == 20_000
  np.testing.assert_allclose(curve.sort_values('step').value, losses.reshape(100, 20).mean(1))
  np.testing.assert_allclose(table(runs).train_loss, losses[-200:].mean())


def test_analyses_of_a_run(tmp_path):
  (write_run(tmp_path) / 'analyses.json').write_text(
    json.dumps(
      {
        'removed': {'sink_1': 7.0, 'valid_loss': 3.5, 'valid_loss_before': 3.0, 'what': 'K bias'},
        'window': {
          'absolute_first': 0.1,
          'absolute_uniform': 0.05,
          'relative_first': None,
          'uniform': 0.0,
        },
      }
    )
  )
  row = table(read_runs(tmp_path)).iloc[0]

  assert (row.removed_sink_1, row.removed_loss, row.window_absolute) == (7.0, 0.5, 2.0)
  assert math.isnan(row.window_relative)
  assert math.isnan(row.prefix_share)


def test_stored_runs_are_the_runs(tmp_path):
  write_run(tmp_path / 'runs')
  write_run(tmp_path / 'runs', 'gone', status='diverged')
  runs = read_runs(tmp_path / 'runs')
  runs.metrics.loc[0, 'value'] = math.pi
  write_runs(runs, tmp_path / 'a')
  stored = read_runs(tmp_path / 'a')
  write_runs(stored, tmp_path / 'b')

  for name in ('metrics.csv.gz', 'runs.csv.gz'):
    assert (tmp_path / 'a' / name).read_bytes() == (tmp_path / 'b' / name).read_bytes()

  keys = ['run', 'metric', 'block', 'step']
  pd.testing.assert_frame_equal(
    stored.metrics, runs.metrics.sort_values(keys, ignore_index=True), rtol=1e-5
  )
  pd.testing.assert_frame_equal(stored.runs, runs.runs.sort_values('run', ignore_index=True))

  write_run(tmp_path / 'a/more', seed=5)  # workdirs next to the files
  assert read_runs(tmp_path / 'a').runs.run.tolist() == [
    'more/default-seed-5',
    'default-seed-0',
    'gone-seed-0',
  ]


def test_the_stored_table():
  assert sum((RESULTS / f'{name}.csv.gz').stat().st_size for name in Runs._fields) < 4e6

  rows = table(read_runs(RESULTS))
  assert rows.run.is_unique
  assert set(rows.task) >= {
    'paper',
    'graft',
    'grid',
    'synthetic',
    'quickstart',
  }


@pytest.mark.parametrize(
  'changes, words',
  [
    ({}, 'softmax'),
    ({'attention.similarity': 'CappedExp(cap=50.0)'}, 'softmax of scores capped at 50'),
    ({'attention.normalizer': 'PNorm(p=2.0)'}, 'exp, PNorm(p=2.0)'),
    ({'attention.normalizer': 'Clipped(low=-0.1)'}, 'softmax, Clipped(low=-0.1, high=1.0)'),
    (
      {
        'attention.similarity': 'Sigmoid()',
        'attention.normalizer': 'RowSum(eps=1e-08)',
        'attention.kv_bias': 'KBias(shared=True)',
      },
      'sigmoid with normalisation, KBias(shared=True',
    ),
    (
      {
        'attention.similarity': 'Sigmoid()',
        'attention.normalizer': 'Unnormalized()',
        'attention.head': 'HeadGate()',
      },
      'sigmoid without normalisation, head gate',
    ),
    ({'attention.similarity': 'Softpick()', 'attention.normalizer': 'AbsSum()'}, 'softpick'),
    (
      {'attention.feature_map': 'Mlp()', 'model.sink_tokens': 1},
      'softmax, feature map Mlp(), a learned',
    ),
  ],
)
def test_attention_in_words(changes, words):
  assert describe_attention(changed(Experiment(), changes)).startswith(words)
