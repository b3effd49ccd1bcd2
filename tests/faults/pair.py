"""The same faults in jobs of two processes, of which one or both are hit."""

from __future__ import annotations

import re
import signal
import time

import numpy as np

from sink_jax.train.multihost import HEARTBEAT_SECONDS
from tests.faults.jobs import PATIENCE, Job, Place, distance, handles, last_row, newest, state_of
from tests.faults.table import Tally
from tests.train import runs

TWO = Place(processes=2, devices=2)
STARTUP_SECONDS = 300  # of processes that wait for each other
NOTICED_SECONDS = HEARTBEAT_SECONDS + 30
# The machine may be busy; every number that is checked has this on top.
_SLACK = 60
_TOLERANCE = 1e-6  # of losses; processes add gradients in another order than devices of one
_DRIFT = 1e-5  # of the parameters, after all steps
_EVERY = 10  # steps between saves: these runs are slow


def killed(plan, tell=None):
  """kill -9 of one of two, or of both: what is left ends, and a restart resumes."""
  tally = Tally('kill-pair', 'kill -9 of one of two processes, or both',
                f'the other ends within {NOTICED_SECONDS} s ({STARTUP_SECONDS} s during start-up), '
                f'with a message and a code of at least 128; resumes; at most {2 * _EVERY} steps '
                'lost; ends like one process', tell)
  seconds = []

  def judge(job, hit, phase, handled, codes, took):
    for index in {0, 1} - set(hit):
      if phase != 'start-up':
        seconds.append(took)
      limit = NOTICED_SECONDS if phase != 'start-up' else STARTUP_SECONDS
      if codes[index] is None or codes[index] < 128:
        return f'in {phase} the other one ended with {codes[index]}: {job.output(index)[-300:]}'
      if took > limit + _SLACK:
        return f'in {phase} the other one ended after {took:.0f} s'
      if len(_own_words(job, index)) < 20:
        return f'in {phase} the other one ended without a message'
    lost = last_row(job.workdir) - newest(job.workdir)
    if not -1 <= lost <= 2 * _EVERY:
      return f'{lost} steps lost in {phase}'
    who = 'both' if len(hit) == 2 else 'one'
    tally.count(f'{who} killed in {phase}, resumed', None if phase == 'start-up' else max(0, lost))

  row = _rounds(plan, tally, signal.SIGKILL, judge)
  if seconds:
    row['notes'].append(f'the other one noticed after {np.mean(seconds):.0f} s, at most '
                        f'{max(seconds):.0f} s.')
  return row


def stopped(plan, tell=None):
  """SIGTERM to one or both: they save the same step."""
  tally = Tally('sigterm-pair', 'SIGTERM to one of two processes, or both',
                'both end with 42, with the same step saved; no step lost; ends like one process',
                tell)
  tally.notes.append('a process that gets the signal before its training has begun ends with 42 at '
                     'once, as nothing is lost; one that did not get it then ends for its missing '
                     'peer, with a code of at least 128. Both mean "start it again".')

  def judge(job, hit, phase, handled, codes, took):
    if None in codes:
      return f'in {phase} ended with {codes}: {job.output(0)[-200:]} {job.output(1)[-200:]}'
    if phase == 'start-up':
      right = [code == 42 or code >= 128 for code in codes]
      if not all(right) or newest(job.workdir) != job.start:
        return f'in {phase} ended with {codes}: {job.output(0)[-200:]} {job.output(1)[-200:]}'
      return tally.count('42 and 42 in start-up' if codes == [42, 42] else
                         '42, and the other for its missing peer, in start-up')
    saved = {tuple(re.findall(r'Stopped and saved at step (\d+) of', job.output(i)))
             for i in (0, 1)}
    lost = last_row(job.workdir) - newest(job.workdir)
    if codes != [42, 42] or len(saved) != 1 or lost:
      return f'in {phase} ended with {codes}, saved {saved}, {lost} lost: {job.output()[-200:]}'
    tally.count(f'42 and 42 in {phase}', lost)

  return _rounds(plan, tally, signal.SIGTERM, judge)


def absent(plan, tell=None):
  """A process whose peer never comes."""
  tally = Tally('absent', 'one of two processes is never started',
                f'the other ends within {STARTUP_SECONDS} s, with a message', tell)
  if not plan.thorough:
    tally.skipped = 'takes minutes; made with --rounds=20 or more'
    return tally.as_row()
  for index in (0, 1):
    job = Job(plan.workdir(tally.name, index), TWO, only=index, steps=plan.steps)
    began = time.monotonic()
    code, = job.wait(STARTUP_SECONDS + 2 * _SLACK)
    took = time.monotonic() - began
    if code in (None, 0) or took > STARTUP_SECONDS + _SLACK or len(_own_words(job)) < 20:
      tally.fail(f'process {index} ended with {code} after {took:.0f} s: {job.output()[-300:]}',
                 job.workdir)
    else:
      tally.count(f'process {index} alone: ended with {code}')
      tally.notes.append(f'process {index} waited for {took:.0f} s, start-up included.')
    tally.progress(index + 1, 2)
  return tally.as_row()


def _rounds(plan, tally, number, judge):
  steps = plan.short
  reference = plan.reference(steps, Place(devices=4))
  random, made, ended = plan.random(tally.name), 0, []
  rounds = plan.fraction(10)
  for done in range(1, rounds + 1):
    workdir = plan.workdir(tally.name, made)
    job = Job(workdir, TWO, steps=steps, checkpoint_every=_EVERY)
    if done % 4:
      job.await_steps()
      time.sleep(random.uniform(0, 3))
    else:
      time.sleep(random.uniform(0, plan.window))
    hit = [(0,), (1,), (0, 1)][int(random.integers(3))]
    phase, handled = job.phase(), [handles(p) for p in job.processes]
    for index in hit:
      job.processes[index].send_signal(number)
    began = time.monotonic()
    codes = job.wait(PATIENCE)
    problem = judge(job, hit, phase, handled, codes, time.monotonic() - began)
    if codes == [0, 0]:
      tally.count('had ended already')
    elif problem:
      tally.fail(problem, workdir)
    if problem or newest(workdir) > 0.7 * steps or done == rounds:
      made += 1
      job = Job(workdir, TWO, steps=steps, checkpoint_every=_EVERY)
      ended += _ends_well(job, reference, steps, tally)
    tally.progress(done, rounds)
  if ended:
    tally.notes.append(f'{len(ended)} runs were brought to their end: their parameters are within '
                       f'{max(ended):.0e} of those of one process with as many devices.')
  return tally.as_row()


def _ends_well(job, reference, steps, tally):
  """[the distance of the parameters from the reference]; [] if the run is another one."""
  codes = job.wait()
  if codes != [0, 0] or newest(job.workdir) != steps:
    tally.fail(f'the undisturbed start ended with {codes}: {job.output()[-300:]}', job.workdir)
    return []
  ours, theirs = ([row['loss'] for row in runs.rows(workdir, 'train')]
                  for workdir in (job.workdir, reference))
  apart = distance(state_of(job.workdir, steps)['params'], state_of(reference, steps)['params'])
  if len(ours) != steps or not np.allclose(ours, theirs, rtol=_TOLERANCE) or apart > _DRIFT:
    tally.fail(f'it ended as another run: parameters {apart:.1e} apart', job.workdir)
    return []
  return [apart]


def _own_words(job, index=0):
  """What a process said, without the notes that every start makes."""
  return ''.join(line for line in job.output(index).splitlines()
                 if not re.match(r'\[Gloo\]|[IW]\d{4} ', line) and ' loss ' not in line)
