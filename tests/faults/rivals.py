"""Two jobs on one workdir."""

from __future__ import annotations

import os
import signal
import time

from tests.faults.jobs import PATIENCE, Job, last_row, newest
from tests.faults.table import Tally
from tests.train import runs

_LONG = 1_000_000  # steps; these runs are stopped


def seen(plan, tell=None):
  """On one machine the second is refused."""
  tally = Tally('rival', 'a second job on the same workdir, on one machine',
                'refused in one line with exit code 1; the first goes on', tell)
  rounds = plan.fraction(50)
  for done in range(rounds):
    workdir = plan.workdir(tally.name, done)
    first = Job(workdir, steps=_LONG)
    first.await_steps()
    second = Job(workdir, steps=_LONG, log=workdir.with_name(f'second-{done}.log'))
    codes, said = second.wait(), second.output()
    before = last_row(workdir)
    goes_on = _until(lambda: last_row(workdir) > before or not first.running())
    first.processes[0].send_signal(signal.SIGTERM)
    if codes != [1] or said.count('error: Another process') != 1 or 'Traceback' in said:
      tally.fail(f'the second ended with {codes}: {said[-300:]}', workdir)
    elif first.wait() != [42] or not goes_on:
      tally.fail(f'the first did not go on: {first.output()[-300:]}', workdir)
    else:
      tally.count('second refused, first goes on')
    first.end()
    tally.progress(done + 1, rounds)
  return tally.as_row()


def unseen(plan, tell=None):
  """Where locks do not hold, the first one ends at its next save."""
  tally = Tally('rival-unseen', 'a second job where locks do not hold, as on some network disks',
                'the first ends at its next save, with a message; it saves nothing after the '
                'second has begun; the second goes on', tell)
  random, rounds = plan.random(tally.name), plan.fraction(20)
  for done in range(rounds):
    workdir = plan.workdir(tally.name, done)
    first = Job(workdir, steps=_LONG)
    first.await_steps()
    time.sleep(random.uniform(0, 0.5))
    (workdir / 'lock').unlink()  # the second locks another file, as if it saw no lock
    problem = _taken_over(first, workdir, done)
    tally.fail(problem, workdir) if problem else tally.count('first ended, second went on')
    tally.progress(done + 1, rounds)
  return tally.as_row()


def _taken_over(first, workdir, done):
  owner = (workdir / 'owner').read_text()
  second = Job(workdir, steps=_LONG, log=workdir.with_name(f'second-{done}.log'))
  try:
    _until(lambda: (workdir / 'owner').read_text() != owner or not second.running(), 0.002)
    os.kill(second.processes[0].pid, signal.SIGSTOP)  # so that what is written is the first's
    latest = last_row(workdir)
    codes, said = first.wait(), first.output()
    if codes != [1] or 'Another job' not in said or 'Traceback' in said:
      return f'the first ended with {codes}: {said[-300:]}'
    if newest(workdir) > latest:
      return f'the first saved step {newest(workdir)} after the second had begun, at {latest}'
    os.kill(second.processes[0].pid, signal.SIGCONT)
    if not second.await_steps():
      return f'the second did not train: {second.output()[-300:]}'
    time.sleep(0.5)
    second.processes[0].send_signal(signal.SIGTERM)
    if second.wait() != [42]:
      return f'the second did not stop as asked: {second.output()[-300:]}'
    steps = [row['step'] for row in runs.rows(workdir, 'train')]
    if steps != list(range(1, newest(workdir) + 1)):
      return 'the metrics have gaps, or rows of both'
  finally:
    first.end()
    second.end()
  return ''


def _until(holds, pause=0.02):
  deadline = time.monotonic() + PATIENCE
  while time.monotonic() < deadline:
    if holds():
      return True
    time.sleep(pause)
  return False
