"""Runs that go on where they did not begin: other processes, another mesh, another jax."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np

from tests.faults.jobs import Job, Place, distance, newest, state_of
from tests.faults.table import Tally
from tests.train import runs

_TOLERANCE = 1e-6  # of the losses: sums in another order
_DRIFT = 1e-5  # of the parameters, after all steps
_PROMISED = f'resumes; losses within {_TOLERANCE:.0e} and parameters within {_DRIFT:.0e} of a run '
_PROMISED += 'left alone on one device'


def processes(plan, tell=None):
  """From two processes to one, and back."""
  tally = Tally('processes', 'saved by 2 processes with 2 devices, resumed by 1 with 4; and the '
                'reverse', _PROMISED, tell)
  two, one = Place(2, 2), Place(1, 4)
  return _moves(plan, tally, [(two, one), (one, two)])


def mesh(plan, tell=None):
  """From one layout of the parameters to another."""
  tally = Tally('mesh', 'saved on another mesh (data, fsdp, tensor) than it is resumed on',
                _PROMISED, tell)
  data, mixed = Place(devices=4), Place(devices=4, mesh='data=1,fsdp=2,tensor=2')
  alone, across = Place(), Place(2, 2, 'data=2,fsdp=2')
  return _moves(plan, tally, [(data, mixed), (mixed, data), (mixed, alone), (data, across)])


def versions(plan, tell=None):
  """From one version of jax to another, and back."""
  tally = Tally('jax', 'saved with one version of jax, resumed with another', _PROMISED, tell)
  if not plan.other_python:
    tally.skipped = 'no other Python was given: --other_python=PATH'
    return tally.as_row()
  if not Path(plan.other_python).exists():
    raise SystemExit(f'--other_python={plan.other_python}: there is no such file.')
  other = Place(python=plan.other_python)
  version = subprocess.run([other.python, '-c', 'import jax; print(jax.__version__)'],
                           capture_output=True, text=True, check=True).stdout.strip()
  here = Place(python=sys.executable)
  tally.notes.append(f'between {jax.__version__} and {version}.')
  return _moves(plan, tally, [(here, other), (other, here)])


def _moves(plan, tally, pairs):
  steps = plan.short
  reference, random = plan.reference(steps), plan.random(tally.name)
  rounds = plan.fraction(100) if plan.thorough else 1
  for done in range(rounds * len(pairs)):
    before, after = pairs[done % len(pairs)]
    workdir = plan.workdir(tally.name, done)
    first = Job(workdir, before, steps=steps)
    first.await_steps(int(random.integers(1, steps // 3)))
    for process in first.processes:
      process.send_signal(signal.SIGTERM)
    codes = first.wait()
    problem = '' if set(codes) == {42} else f'the first start ended with {codes}'
    if not problem:
      saved = newest(workdir)
      second = Job(workdir, after, steps=steps)
      codes = second.wait()
      problem = _differs(second, codes, saved, steps, reference)
    name = f'{_named(before)} -> {_named(after)}'
    tally.fail(f'{name}: {problem}', workdir) if problem else tally.count(name, 0)
    tally.progress(done + 1, rounds * len(pairs))
  return tally.as_row()


def _differs(job, codes, saved, steps, reference):
  if set(codes) != {0} or job.resumed_from() != saved:
    return f'ended with {codes}, resumed from {job.resumed_from()}: {job.output()[-300:]}'
  ours, theirs = ([row['loss'] for row in runs.rows(workdir, 'train')]
                  for workdir in (job.workdir, reference))
  apart = distance(state_of(job.workdir, steps)['params'], state_of(reference, steps)['params'])
  if len(ours) != steps or not np.allclose(ours, theirs, rtol=_TOLERANCE) or apart > _DRIFT:
    return f'another run: parameters {apart:.1e} apart'
  return ''


def _named(place):
  if place.python != sys.executable:
    return 'other jax'
  parts = f'{place.processes}x{place.devices}'
  return f'{parts} ({place.mesh})' if place.mesh else parts

