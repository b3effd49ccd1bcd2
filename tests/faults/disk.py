"""A disk that is full, or cannot be written."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time

from tests.faults.jobs import EVERY, Job, compared, newest, state_of
from tests.faults.table import Tally

_SIZE = '16m'
_PATIENCE = 300  # seconds until a run has to have ended on a full disk
_NOT_HERE = 'needs root on Linux, which may mount a small file system'


class _NoMounts(RuntimeError):
  """This user, or this system, cannot mount file systems."""


def full(plan, tell=None):
  """Another file takes the room at a random moment, and goes again."""
  tally = Tally('disk-full', 'the disk fills up at a random moment',
                'exit code 1 and one message; the newest checkpoint is whole; with room again the '
                'same command resumes; ends bit for bit like a run left alone', tell)
  reference, random, rounds = plan.reference(), plan.random(tally.name), plan.fraction(10)
  try:
    with _small_disk(plan) as disk:
      made = 0
      for done in range(1, rounds + 1):
        workdir = disk / f'run-{made}'
        job = Job(workdir, steps=plan.steps, log=plan.workdir(tally.name, done) / 'log')
        if done % 4:
          job.await_steps()
        time.sleep(random.uniform(0, 1))
        phase, codes = job.phase(), _filled(job, disk / 'other')
        problem = _problem(job, codes)
        if problem:
          tally.fail(f'in {phase}: {problem}', None)
        elif codes == [0]:
          tally.count('had ended already')
        else:
          tally.count(f'1 in {phase}, resumed')
        if problem or newest(workdir) > 0.5 * plan.steps or done == rounds:
          job = Job(workdir, steps=plan.steps, log=plan.workdir(tally.name, done) / 'end.log')
          codes = job.wait()
          problem = (f'with room again: {codes}: {job.output()[-300:]}' if codes != [0] else
                     compared(workdir, reference, plan.steps))
          if problem:
            tally.fail(problem)
          made += 1
          subprocess.run(['rm', '-rf', str(workdir)], check=True)
        tally.progress(done, rounds)
  except _NoMounts:
    tally.skipped = _NOT_HERE
  tally.notes.append('the libraries that save print tracebacks of their own before our message.')
  return tally.as_row()


def read_only(plan, tell=None):
  """A workdir that cannot be written is refused before anything is computed."""
  tally = Tally('read-only', 'the workdir is read-only, or cannot be made',
                'exit code 1 and one line, before any compute', tell)
  job = Job(plan.workdir(tally.name) / 'run', steps=40)
  if job.wait() != [0]:
    raise RuntimeError(job.output())
  inside = plan.workdir(tally.name) / 'run' / 'config.json' / 'run'
  _refused(tally, inside, 'below a file', plan)
  try:
    with _small_disk(plan) as disk:
      _mount('-o', 'remount,ro', str(disk))
      _refused(tally, disk / 'run', 'read-only', plan)
  except _NoMounts:
    tally.notes.append(f'A read-only file system was not tried: it {_NOT_HERE}.')
  return tally.as_row()


def _refused(tally, workdir, what, plan):
  log = plan.scratch / 'logs'
  job = Job(workdir, steps=40, log=log / f'{what}.log')
  codes, said = job.wait(), job.output()
  lines = [line for line in said.splitlines() if line.startswith('error: ')]
  if codes != [1] or len(lines) != 1 or 'Cannot use' not in lines[0] or 'Traceback' in said \
      or ' loss ' in said:
    tally.fail(f'{what}: {codes}: {said[-300:]}')
  else:
    tally.count(f'{what}: refused')


def _problem(job, codes):
  said = job.output()
  if codes not in ([0], [1]):
    ended = 'did not end' if codes == [None] else f'ended with {codes}'
    return f'{ended}: {said[-300:]}'
  ours = [line for line in said.splitlines() if line.startswith('error: ')]
  if codes == [1] and len(ours) != 1:
    return f'{len(ours)} messages: {said[-600:]}'
  if newest(job.workdir):
    state_of(job.workdir, newest(job.workdir))
  if newest(job.workdir) < job.start:
    return f'checkpoint {job.start} was lost'
  if codes == [1] and job.steps() > newest(job.workdir) + 2 * EVERY:
    return f'it went on for {job.steps() - newest(job.workdir)} steps without saving'
  return ''


def _filled(job, path):
  """Takes all room, also what becomes free, until the job ends; gives it back."""
  deadline = time.monotonic() + _PATIENCE
  with open(path, 'wb', buffering=0) as file:
    size = 1 << 20
    while job.running() and time.monotonic() < deadline:
      try:
        file.write(bytes(size))
        size = 1 << 20
      except OSError:
        size = max(512, size // 2)
        if size == 512:
          time.sleep(0.005)
  codes = job.wait(1)
  os.unlink(path)
  return codes


@contextlib.contextmanager
def _small_disk(plan):
  disk = plan.scratch / 'disk'
  disk.mkdir(exist_ok=True)
  _mount('-t', 'tmpfs', '-o', f'size={_SIZE}', 'tmpfs', str(disk))
  try:
    yield disk
  finally:
    subprocess.run(['umount', str(disk)], check=True)


def _mount(*arguments):
  try:
    subprocess.run(['mount', *arguments], check=True, capture_output=True)
  except (OSError, subprocess.CalledProcessError):
    raise _NoMounts from None
