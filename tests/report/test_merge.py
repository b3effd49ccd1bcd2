"""Finished runs join the stored ones; a sweep on a new machine goes on from there."""

import shutil

import pandas as pd
import pytest

from sink_jax.report.runs import merged, no_runs, read_runs, table
from sink_jax.sweep.stored import not_stored
from sink_jax.sweep.trials import Trial
from sink_jax.train.config import from_dict
from sink_jax.train.workdir import read_config
from tests.commands import run_here
from tests.report.fake_runs import write_run


def equal(a, b):
  for one, other in zip(a, b):
    by = [name for name in ('run', 'metric', 'block', 'step') if name in one]
    one, other = (frame.sort_values(by, ignore_index=True) for frame in (one, other))
    pd.testing.assert_frame_equal(one, other, check_like=True)


def test_a_run_replaces_the_stored_one_of_its_seed_and_twice_is_once(tmp_path):
  for seed, rate in ((1, 10.0), (2, 20.0)):
    write_run(tmp_path / 'desk', seed=seed, sink_1=rate)

  write_run(tmp_path / 'desk', 'sigmoid', status='running')
  stored = tmp_path / 'stored'
  command = ('merge', f'--runs={tmp_path / "desk"}', f'--into={stored}')

  assert run_here(*command)[:2] == (0, f'2 runs in {stored}, 2 more than before.\n')

  before = [path.read_bytes() for path in sorted(stored.iterdir())]
  assert run_here(*command)[1] == f'2 runs in {stored}, 0 more than before.\n'
  assert [path.read_bytes() for path in sorted(stored.iterdir())] == before

  # Seed 2 again, from another folder.
  write_run(tmp_path / 'again', seed=2, sink_1=50.0)
  both = merged(read_runs(stored), read_runs(tmp_path / 'again'), 'again')
  rates = table(both).set_index('run').sink_1

  assert rates.to_dict() == pytest.approx({'desk/default-seed-1': 10, 'again/default-seed-2': 50})

  # Another trial under a name that is taken.
  write_run(tmp_path / 'x', seed=1, task='lm')
  with pytest.raises(ValueError, match='desk/default-seed-1'):
    merged(both, read_runs(tmp_path / 'x'), 'desk')


class Text:
  """Data whose content is known without reading it."""

  def __init__(self, content):
    self.content = content

  def summary(self):
    return {'content': self.content}


def test_a_lost_machine_changes_nothing(tmp_path, monkeypatch):
  trials = {}
  for seed in range(4):
    folder = write_run(tmp_path / 'runs', seed=seed, sink_1=10.0 * seed)
    experiment = from_dict(read_config(folder))
    trials[folder.name] = Trial(folder.name, experiment, experiment.label)

  new = read_runs(tmp_path / 'runs')
  nothing = no_runs()
  lost = tmp_path / 'lost' / 'runs'

  for seed in (0, 1):
    shutil.copytree(tmp_path / 'runs' / f'default-seed-{seed}', lost / f'default-seed-{seed}')

  stored = merged(nothing, read_runs(lost), 'runs')
  monkeypatch.setattr('sink_jax.sweep.stored.open_data', lambda config: Text('data'))
  left = not_stored(trials, stored)

  assert list(left) == ['default-seed-2', 'default-seed-3']

  other = tmp_path / 'other' / 'runs'
  for name in left:
    shutil.copytree(tmp_path / 'runs' / name, other / name)

  equal(merged(stored, read_runs(other), 'runs'), merged(nothing, new, 'runs'))
  # Another release of Python has another standard library.
  monkeypatch.setattr('sink_jax.sweep.stored.open_data', lambda config: Text('other'))

  with pytest.raises(ValueError, match='not that of the stored runs'):
    not_stored(trials, stored)

  assert not not_stored({name: trials[name] for name in trials if name not in left}, stored)
