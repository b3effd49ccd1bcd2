"""Training a group of trials that share a program: one loop, and a workdir for each.

A trial of a group is what `loop.train` trains, with the same batches, rates and events; only its
steps are computed along with those of the others, as slices of larger arrays, and equal those of
the trial alone to rounding. Every trial goes on from its own newest checkpoint: its slot rests
until the group has come to that step, and again when it has ended or diverged, while the program
and its width stay. So no bit depends on which trials are left, or on where the group was stopped.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from sink_jax.io.paths import to_path
from sink_jax.io.progress import Progress
from sink_jax.models.sizes import flops_per_token
from sink_jax.train.group_steps import compiled_group_steps, compiled_stack_and_slice, empty_inputs
from sink_jax.train.optimizer import learning_rates
from sink_jax.train.outcome import Interrupted
from sink_jax.train.recorder import Evaluation, held
from sink_jax.train.run_dir import PATIENCE, WorkdirLocked
from sink_jax.train.sharding import replicated
from sink_jax.train.step import init_state
from sink_jax.train.stop_handler import StopHandler
from sink_jax.train.throughput import Throughput, measured_matmul_rate

_SECONDS = 5  # of a call, about, so that a stop signal need not wait longer


class Group:
  """Trials by slot, and the program that trains them.

  names: of all slots, in order. jobs: {name: `loop.Job`} of those to be trained, at least one.
  They must share a program: the same model, optimiser but for `Rates`, shape of the batches and
  micro-batches, and the same `Dataset.training_table`.
  """

  def __init__(self, names: Sequence[str], jobs: Mapping[str, Any]):
    self.names, self.jobs = tuple(names), dict(jobs)
    self.any_job = next(iter(self.jobs.values()))

  def compile(self) -> None:
    """Compiles all programs and reads the corpus; takes long, and can be done in a thread."""
    job, width = self.any_job, len(self.names)
    self.corpus = job.data.training_table()
    self.program = compiled_group_steps(job, width, self.corpus)
    self.stack, self.slice = compiled_stack_and_slice(job, width)
    state = init_state(job.model, job.experiment.optimizer, job.experiment.seed, job.mesh)
    Evaluation(job.experiment, job.model, job.data, job.mesh, job.probe_tokens, '').compile(
        state.params)


def train_group(group: Group, root, begun: Callable[[list[str]], None],
                show_progress: bool = True) -> dict[str, Exception | None]:
  """Trains the trials of a compiled group in ROOT/NAME; says how each ended.

  That is None for one that is done, or what `loop.train` would have raised. What is wrong with
  one trial, such as its workdir, ends that trial alone.

  Args:
    begun: is called before the first step, with the names of the trials that have steps left,
      while their workdirs are held.

  Raises:
    Interrupted: the process was asked to stop; all states are saved.
  """
  members = [_Member(slot, name, group.jobs[name])
             for slot, name in enumerate(group.names) if name in group.jobs]
  with StopHandler() as stop, contextlib.ExitStack() as closing:
    try:
      states = _begun(group, members, to_path(root))
      if running := [member for member in members if member.running]:
        begun([member.name for member in running])
        _go_on(group, running, states, stop, closing, show_progress)
    except BaseException as error:
      for member in members:
        member.end(error)
      if not isinstance(error, Exception):
        raise
  stopped = [member.error for member in members if isinstance(member.error, Interrupted)]
  if stopped:
    raise stopped[0]
  return {member.name: member.error for member in members}


def _begun(group, members, root):
  """Opens the workdirs; returns the states of all slots, (G, ...), or None where none has work.

  A slot without work holds the state of another one, and rests.
  """
  checked, states = {}, {}  # the files of the data are checked once for all that read them
  until = time.monotonic() + PATIENCE
  for member in members:
    data = member.job.data
    if data not in checked:
      checked[data] = data.check_files()
    state = member.begin(root / member.name, len(group.names), checked[data], until)
    if state is not None:
      states[member.slot] = state
  if not states:
    return None
  some = next(iter(states.values()))
  return group.stack(*(states.get(slot, some) for slot in range(len(group.names))))


def _go_on(group, members, stacked, stop, closing, show_progress):
  """Takes all members from where they are to their ends, or to where the group has to stop."""
  job, running = group.any_job, lambda: [m for m in members if m.running]
  corpus = None if group.corpus is None else jax.device_put(group.corpus, replicated(job.mesh))
  supply = _Supply(group)
  progress = closing.enter_context(Progress(
      f'{group.names[0]} and others', max(m.steps for m in members),
      min(m.start for m in members), unit='step', enabled=show_progress))
  at = min(m.start for m in members)
  for member in members:
    with member.attempt():
      if stop.poll(wait=True):
        raise Interrupted(member.start, member.steps)
      if member.start == 0:
        member.recorder.begin(group.slice(stacked, np.int32(member.slot)))
  most = 1  # until it is known how long a step takes
  while running():
    left = running()
    count = _count(left, at, min(most, supply.steps))
    inputs = supply.inputs(left, at, count)
    began = time.perf_counter()
    stacked, values = group.program(stacked, corpus, inputs, np.int32(count))
    supply.prepare(left, at + count)  # while the device is at work
    values = jax.device_get(values)
    seconds = (time.perf_counter() - began) / count
    most, at = max(1, int(_SECONDS / seconds)), at + count
    stopping = stop.poll()
    for member in left:
      with member.attempt():
        mine = {key: x[:count, member.slot] for key, x in values.items()}
        member.report(at - count, mine, seconds)
        if member.start < at and (stopping or member.recorder.due(at)):
          state = group.slice(stacked, np.int32(member.slot))
          member.settle(at, state, mine['loss'][-1], stopping)
        elif stopping:
          raise Interrupted(member.start, member.steps)
    tokens = job.experiment.batch_size * job.experiment.data.context * len(left)
    progress.update(at, trials=len(left), **{'tokens/s': f'{tokens / seconds:,.0f}'})


def _count(members, at, most):
  """Steps until one of the members needs its state, at most so many."""
  for count in range(1, most):
    if any(m.start < at + count and m.recorder.due(at + count) for m in members):
      return count
  return most


class _Member:
  """A trial in its slot: what is open of its workdir, and how it ended."""

  def __init__(self, slot, name, job):
    self.slot, self.name, self.job = slot, name, job
    self.steps, self.running, self.error = job.experiment.steps, False, None
    optimizer = job.experiment.optimizer
    self.learning_rate = learning_rates(optimizer, self.steps)
    self.weight_decay = optimizer.weight_decay
    self._open = contextlib.ExitStack()

  def begin(self, workdir, width, intact, until):
    """Opens the workdir; returns the state, or None where nothing is left to do.

    until: when to stop waiting for another process that holds the workdir, `time.monotonic`.
    """
    self.running = True
    with self.attempt():
      self.recorder = self._held(workdir, intact, until)
      state = self.recorder.restored()
      self.start = self.recorder.start
      if self.recorder.has_finished():
        self.end()
        return None
      self._open.enter_context(self.recorder.recording(width))
      if self.start == self.steps:  # killed after its last save, before its status said so
        self.end()
        return None
      experiment, model = self.job.experiment, self.job.model
      self._clock = Throughput(experiment.batch_size * experiment.data.context,
                               flops_per_token(model, experiment.data.context),
                               _matmul_rate(model.dtype))
      return state
    return None

  def _held(self, workdir, intact, until):
    while True:
      try:
        return self._open.enter_context(held(self.job, workdir, self.name, lambda: intact))
      except WorkdirLocked:
        if time.monotonic() > until:
          raise
        time.sleep(0.5)

  def report(self, before, values, seconds):
    """Checks and logs the metrics of the steps after `before`."""
    for step in range(max(before, self.start) + 1, before + len(values['loss']) + 1):
      row = {key: float(x[step - before - 1]) for key, x in values.items()}
      self._clock.timed(seconds)
      self.recorder.check(step, row)
      if self.recorder.logs(step):
        self.recorder.log(step, row, self.learning_rate(step - 1), self._clock.read())
    self.recorder.poll()

  def settle(self, step, state, loss, stopping):
    """Evaluates and saves what is due; ends the trial after its last step."""
    self.recorder.settle(step, state, loss, saving=stopping)
    if step == self.steps:
      self.end()
    elif stopping:
      raise Interrupted(step, self.steps)

  @contextlib.contextmanager
  def attempt(self):
    """A context of which any error ends this trial alone."""
    try:
      yield
    except Exception as error:
      self.end(error)

  def end(self, error=None):
    """Closes the workdir, with the status that the error makes, unless that is done."""
    if not self.running:
      return
    self.running, self.error = False, error
    try:
      with self._open:
        if error is not None:
          raise error
    except BaseException as raised:
      self.error = raised


class _Supply:
  """The inputs of the steps; trials of a seed that read the same data share what is made."""

  def __init__(self, group):
    self._empty = functools.partial(empty_inputs, group.any_job, len(group.names), group.corpus)
    self._from_table = group.corpus is not None
    self.steps = len(self._empty().active)
    self._made = {}  # {(data, seed): {step: rows or batch}}

  def inputs(self, members, at, count):
    """Inputs whose first `count` steps are those after step `at`."""
    inputs = self._empty()
    for member in members:
      for i in range(max(0, member.start - at), count):
        put = lambda array, x, at=(i, member.slot): array.__setitem__(at, x)
        jax.tree.map(put, inputs.given, self._given(member.job, at + i))
        inputs.rates.learning_rate[i, member.slot] = member.learning_rate(at + i)
        inputs.rates.weight_decay[i, member.slot] = member.weight_decay
        inputs.active[i, member.slot] = True
    return inputs

  def prepare(self, members, at):
    """Makes what the next call may need, and forgets what came before it."""
    for made in self._made.values():
      for step in [step for step in made if step < at]:
        del made[step]
    for member in members:
      for step in range(max(at, member.start), min(at + self.steps, member.steps)):
        self._given(member.job, step)

  def _given(self, job, step):
    data, seed = job.data, job.experiment.seed
    made = self._made.setdefault((data, seed), {})
    if step not in made:
      make = data.table_rows if self._from_table else data.batch
      made[step] = make(step, job.experiment.batch_size, seed)
    return made[step]


@functools.cache
def _matmul_rate(dtype):
  return measured_matmul_rate(dtype)
