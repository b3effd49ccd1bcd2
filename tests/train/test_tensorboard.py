"""TensorBoard's files of a run that was killed and started again, as TensorBoard reads them."""

import itertools
import time

import numpy as np
import pytest
from etils import epath

import sink_jax as sj
from sink_jax.models.transformer import init_params
from sink_jax.train.metrics import MetricsWriter, read_metrics
from sink_jax.train.tensorboard import Board
from tests.train import tensorboard_files

CONFIG = sj.ModelConfig(layers=2, d_model=8, heads=2, ffn_hidden=8, vocab_size=11, dtype='float32')


def shown(folder):
  return tensorboard_files.shown(path.read_bytes() for path in sorted(folder.iterdir()))


def begin(workdir, start, steps):
  """A start of a run that is killed after these steps: nothing is closed."""
  metrics = MetricsWriter(workdir, start)
  for step in steps:
    metrics.write('train', step, {'loss': 1.0})
  metrics.flush()
  return metrics


def test_a_run_killed_before_its_first_checkpoint_shows_every_step_once(tmp_path,
                                                                                monkeypatch):
  clock = itertools.count(time.time(), 10)
  monkeypatch.setattr(time, 'time', lambda: next(clock))  # not within a second
  begin(tmp_path, 0, [0, 1, 2])
  begin(tmp_path, 0, [0, 1]).close()
  assert shown(tmp_path / 'tensorboard') == {'train/loss': [0, 1]}


def test_a_resumed_run_shows_every_step_once(tmp_path):
  begin(tmp_path, 0, [0, 1, 2, 3])
  begin(tmp_path, 2, [3, 4])  # within the same second: another file
  begin(tmp_path, 4, [5]).close()
  assert shown(tmp_path / 'tensorboard') == {'train/loss': [0, 1, 2, 3, 4, 5]}
  assert len(list((tmp_path / 'tensorboard').iterdir())) == 3


def test_where_files_cannot_grow_each_flush_copies_the_whole(tmp_path):
  there = epath.Path(tmp_path)  # to the code a folder of an object store
  board = Board(there, 0)
  board.write('loss', 1.0, 0)
  assert not list(tmp_path.iterdir())
  for step in (1, 2):
    board.flush()
    assert shown(tmp_path) == {'loss': list(range(step))}
    board.write('loss', 1.0, step)
  board.close()
  assert shown(tmp_path) == {'loss': [0, 1]} and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize('value', [float('nan'), float('inf'), None, 'text', [1.0]])
def test_what_is_no_finite_number_is_not_drawn(tmp_path, value):
  metrics = MetricsWriter(tmp_path)
  metrics.write('train', 1, {'loss': value})
  metrics.close()
  assert shown(tmp_path / 'tensorboard') == {}


def test_lists_by_block_and_nulls_of_a_probe_stay_in_the_metrics_alone(tmp_path):
  params = init_params(CONFIG, 0)
  tokens = np.random.default_rng(0).integers(0, 11, (2, 5))
  summary = sj.probe(sj.Run(CONFIG, params), tokens).summary()
  metrics = MetricsWriter(tmp_path)
  metrics.write('probe', 0, summary)
  metrics.close()
  curves = shown(tmp_path / 'tensorboard')
  # The lists of activations as the ratios of norms: their entries are blocks, and no curve.
  assert set(curves) == {f'probe/{key}' for key in (
      'sink_1', 'largest_importance', 'mean_importance', 'raw_mass_1', 'largest_raw_mass_1',
      'raw_row_mass', 'dormant_heads')}
  row, = read_metrics(tmp_path)
  assert len(row['activation_max']) == CONFIG.layers + 1 and row['null_p99'].keys() == {
      'sink_1', 'hidden_ratio'}
  assert {key: row[key] for key in summary} == summary
