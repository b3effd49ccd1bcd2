"""What a person sees of a sweep: a line for each trial that runs, and a remark on idle cores."""

import io
import json
import sys
import time

from sink_jax.sweep import summary
from sink_jax.sweep.trials import Trial
from tests.train import runs


class Terminal(io.StringIO):
  """A stderr on which tqdm draws bars."""

  def isatty(self):
    return True


def test_each_running_trial_has_a_line_until_it_ends(tmp_path, monkeypatch):
  trials = {name: Trial(name, runs.config(steps=200)) for name in ('one', 'two', 'three')}
  for step, name in ((40, 'one'), (80, 'two')):
    (tmp_path / name).mkdir()
    rows = [
      {'kind': 'probe', 'step': step, 'sink_1': 12.5},
      {'kind': 'train', 'step': step, 'loss': 2.25},
    ]
    (tmp_path / name / 'metrics.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
  monkeypatch.setattr(sys, 'stderr', terminal := Terminal())
  monkeypatch.setattr(summary, '_READ_EVERY', 0)
  bars = summary.Bars(trials, tmp_path)
  bars.show({0: 'one', 1: 'two', 2: 'three'})  # the third has written nothing yet
  drawn = terminal.getvalue()
  assert '40/200' in drawn and '80/200' in drawn and 'three' not in drawn
  with open(tmp_path / 'two' / 'metrics.jsonl', 'a') as file:
    file.write(json.dumps({'kind': 'train', 'step': 120, 'loss': 1.5}) + '\n')
  time.sleep(0.15)  # tqdm draws at most ten times a second
  bars.show({0: 'one', 1: 'two'})
  bars.show({1: 'two'})
  bars.close()
  for part in ('120/200', 'loss 1.500  Sink_1 12.5'):
    assert part in terminal.getvalue()


def test_small_models_one_after_another_leave_cores_idle(monkeypatch):
  monkeypatch.setattr(summary, 'cores', lambda: 2)
  trials = {name: Trial(name, runs.config(steps=100)) for name in 'abc'}
  costs = lambda per_step: dict.fromkeys('abc', 100 * per_step)
  assert '--processes=2' in summary.idle_cores(trials, costs(1e9))
  assert not summary.idle_cores(trials, costs(1e12))  # each step keeps all cores at work
  assert not summary.idle_cores(trials, {'a': 1e9})  # one trial is left
  monkeypatch.setattr(summary, 'cores', lambda: 1)
  assert not summary.idle_cores(trials, costs(1e9))
