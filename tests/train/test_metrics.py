"""Metrics of a run that was killed and started again, as TensorBoard and others read them."""

import itertools
import math
import struct
import sys
import time
from unittest import mock

import pytest
from etils import epath
from tensorboardX.proto.event_pb2 import Event, SessionLog

from sink_jax.train.metrics import Clock, Metrics, read_metrics


def shown(files):
  """{tag: [step, ...]} of event files in order; a start drops its step and later ones."""
  points = {}
  for data in files:
    while data:
      (size,) = struct.unpack_from('<Q', data)
      event, data = Event.FromString(data[12 : 12 + size]), data[16 + size :]
      if event.HasField('session_log') and event.session_log.status == SessionLog.START:
        points = {tag: [s for s in steps if s < event.step] for tag, steps in points.items()}
      for value in event.summary.value:
        points.setdefault(value.tag, []).append(event.step)
  return points


def board(workdir):
  return shown(path.read_bytes() for path in sorted((workdir / 'tensorboard').iterdir()))


def begin(workdir, start, steps):
  """A start of a run that is killed after these steps, so nothing is closed."""
  metrics = Metrics(workdir)
  metrics.resume(start)
  for step in steps:
    metrics.write('train', step, {'loss': 1.0})
  metrics.flush()
  return metrics


@pytest.mark.parametrize(
  'starts, steps',
  [
    ([(0, [0, 1, 2]), (0, [0, 1])], [0, 1]),  # killed before its first checkpoint
    ([(0, [0, 1, 2, 3]), (2, [3, 4]), (4, [5])], [0, 1, 2, 3, 4, 5]),
  ],
)
def test_a_resumed_run_shows_every_step_once(tmp_path, starts, steps):
  for start, written in starts:  # starts in the same second need separate files
    with open(tmp_path / 'metrics.jsonl', 'a') as file:
      file.write('{"kind": "train", "step": 4, "lo')  # killed in the middle of a line
    metrics = begin(tmp_path, start, written)
  metrics.close()
  assert board(tmp_path) == {'train/loss': steps}
  assert [row['step'] for row in read_metrics(tmp_path)] == steps
  assert len(list((tmp_path / 'tensorboard').iterdir())) == len(starts)


def test_where_files_cannot_grow_each_flush_copies_the_whole(tmp_path):
  (tmp_path / 'tensorboard').mkdir()
  metrics = Metrics(epath.Path(tmp_path))  # the code sees a folder of an object store
  metrics.resume(0)
  for step in (1, 2):
    metrics.write('train', step, {'loss': 1.0})
    metrics.flush()
    assert board(tmp_path) == {'train/loss': list(range(1, step + 1))}
    assert len(read_metrics(tmp_path)) == step
  metrics.write('train', 3, {'loss': 1.0})
  assert len(read_metrics(tmp_path)) == 2
  metrics.close()
  assert len(read_metrics(tmp_path)) == 3


def test_weights_and_biases_gets_the_same_points(tmp_path, monkeypatch):
  wandb = mock.MagicMock()
  monkeypatch.setitem(sys.modules, 'wandb', wandb)
  metrics = Metrics(tmp_path, 'sinks', {'steps': 3})
  metrics.resume(0)
  others = dict(words='x', list=[1.0], nan=math.nan, inf=math.inf, none=None, table={})
  metrics.write('train', 1, {'loss': 1.0} | others)  # plots need finite numbers
  metrics.close()
  assert board(tmp_path) == {'train/loss': [1]}
  options, run = wandb.init.call_args.kwargs, wandb.init.return_value
  assert options['project'] == 'sinks' and options['resume'] == 'allow'
  run.log.assert_called_once_with({'train/loss': 1.0}, step=1)
  run.finish.assert_called_once_with()


def test_the_clock_counts_what_a_step_is_spent_on(monkeypatch):
  now = itertools.count(0.0, 1.0)
  monkeypatch.setattr(time, 'perf_counter', lambda: next(now))
  clock = Clock(tokens_per_step=100, flops_per_token=2.0)
  assert clock.read()[0] == {'tokens_per_second': 'n/a', 'mfu': 'n/a'}
  clock.step()  # at 0 seconds; the first step compiles
  for part in ('data', 'probe', 'save'):
    with clock.spent_on(part):  # each takes a second, with one in between
      pass
  clock.step()
  speed, parts = clock.read()
  # 7 seconds since the first step. The probe and the save took two of them.
  assert speed == {'tokens_per_second': 100 / 5, 'mfu': 'n/a'}
  assert parts == {'data_seconds': 1, 'probe_seconds': 1, 'save_seconds': 1, 'step_seconds': 5}
