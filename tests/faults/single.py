"""kill -9 and SIGTERM at random moments of a run of one process."""

from __future__ import annotations

import re
import signal
import time

from tests.faults.jobs import EVERY, PATIENCE, Job, compared, handles, last_row, newest
from tests.faults.table import Tally


def killed(plan, tell=None):
  """kill -9, again and again, until the run has survived all rounds."""
  tally = Tally('kill', 'kill -9 of the process, at a random moment',
                f'resumes; at most {EVERY} steps lost and those made while a save was under way '
                f'({2 * EVERY}); ends bit for bit like a run left alone', tell)

  def judge(job, phase, handled, codes):
    if codes != [128 + signal.SIGKILL]:
      return tally.fail(f'exit code {codes} in {phase}', job.workdir)
    lost = last_row(job.workdir) - newest(job.workdir)
    if not -1 <= lost <= 2 * EVERY:  # a row is written with the step after it
      return tally.fail(f'{lost} steps lost in {phase}', job.workdir)
    # What an earlier start has lost is no loss of one that has not trained.
    tally.count(f'killed in {phase}', None if phase == 'start-up' else max(0, lost))

  return _rounds(plan, tally, signal.SIGKILL, judge)


def stopped(plan, tell=None):
  """SIGTERM: saves, and says so with its exit code."""
  tally = Tally('sigterm', 'SIGTERM to the process, at a random moment',
                'exit code 42; no step lost; ends bit for bit like a run left alone', tell)

  def judge(job, phase, handled, codes):
    if not handled and codes == [128 + signal.SIGTERM]:
      return tally.count('143: Python had not started yet', 0)
    if codes != [42]:
      return tally.fail(f'exit code {codes} in {phase}', job.workdir)
    told = re.search(r'Stopped and saved at step (\d+) of', job.output())
    lost = last_row(job.workdir) - newest(job.workdir)
    if lost or 'Traceback' in job.output() or told and int(told[1]) != newest(job.workdir):
      return tally.fail(f'{lost} steps lost in {phase}: {job.output()[-300:]}', job.workdir)
    tally.count(f'42 in {phase}', lost)

  tally.notes.append('A signal before Python can handle any ends the process with 143, which '
                     'means "start it again" as well.')
  return _rounds(plan, tally, signal.SIGTERM, judge)


def _rounds(plan, tally, number, judge):
  reference, random = plan.reference(), plan.random(tally.name)
  runs_made, ended = 0, 0
  for done in range(1, plan.rounds + 1):
    workdir = plan.workdir(tally.name, runs_made)
    failures = len(tally.failures)
    # Every fourth start finds nothing compiled.
    cold = {'SINK_JAX_COMPILE_CACHE': ''} if done % 4 == 0 else {}
    job = Job(workdir, steps=plan.steps, environment=cold)
    if done % 2:
      job.await_steps()
      time.sleep(random.uniform(0, 1.5))
    else:
      _sleep_while(job, random.uniform(0, plan.window))
    phase, handled, before = job.phase(), handles(job.processes[0]), job.steps()
    job.processes[0].send_signal(number)
    codes = job.wait()
    if job.resumed_from() not in (None, job.start) or 'is damaged' in job.output():
      tally.fail(f'resumed from {job.resumed_from()}, not {job.start}', workdir)
    elif codes == [0] and before > 0.8 * plan.steps:
      tally.count('had ended already')
    else:
      judge(job, phase, handled, codes)
    if newest(workdir) > 0.7 * plan.steps or done == plan.rounds:
      ended += _ends_well(Job(workdir, steps=plan.steps), plan, reference, tally)
      runs_made += 1
    elif len(tally.failures) > failures:
      runs_made += 1
    tally.progress(done, plan.rounds)
  tally.notes.append(f'{ended} runs were brought to their end and compared.')
  return tally.as_row()


def _sleep_while(job, seconds):
  deadline = time.monotonic() + seconds
  while time.monotonic() < deadline and job.running():
    time.sleep(min(0.05, max(0, deadline - time.monotonic())))


def _ends_well(job, plan, reference, tally):
  codes = job.wait(PATIENCE)
  problem = (f'the undisturbed start ended with {codes}: {job.output()[-300:]}' if codes != [0]
             else compared(job.workdir, reference, plan.steps))
  if problem:
    tally.fail(problem, job.workdir)
  return not problem
