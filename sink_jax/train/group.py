"""Training a group of trials that share a program: one loop, and a workdir for each.

A member of a group is a trial, which `loop.train` would train alone with the same batches, rates
and events; only its steps are computed along with those of the others, as slices of larger arrays,
and equal those of the trial alone to rounding. Every member resumes from its own newest
checkpoint: it is inactive until the group has come to that step, and again when it has ended or
diverged, while the program and its width stay. So no bit depends on which members are left, or on
where the group was stopped.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import SupportsFloat

import jax
import numpy as np

from sink_jax.data.batches import Batch
from sink_jax.io.paths import AnyPath, to_path
from sink_jax.io.progress import Progress
from sink_jax.models.sizes import flops_per_token
from sink_jax.train.group_steps import (
  GroupInputs,
  compiled_group_steps,
  compiled_stack_and_slice,
  empty_inputs,
)
from sink_jax.train.optimizer import Rates, learning_rates
from sink_jax.train.outcome import Interrupted
from sink_jax.train.prepare import PreparedRun
from sink_jax.train.recorder import Evaluation, Recorder, open_recorder
from sink_jax.train.run_dir import PATIENCE, WorkdirLocked
from sink_jax.train.sharding import replicated
from sink_jax.train.step import TrainState, init_state
from sink_jax.train.stop_handler import StopHandler
from sink_jax.train.throughput import Throughput, measured_matmul_rate

_SECONDS = 5  # of a call, about, so that a stop signal need not wait longer


class Group:
  """Trials by their index in a group, and the program that trains them.

  names: of all members, in order. runs: {name: PreparedRun} of those to be trained, at least one.
  They must share a program: the same model, optimizer but for `Rates`, shape of the batches and
  micro-batches.
  """

  def __init__(self, names: Sequence[str], runs: Mapping[str, PreparedRun]):
    self.names, self.runs = tuple(names), dict(runs)
    self.any_run = next(iter(self.runs.values()))

  def compile(self) -> None:
    """Compiles all programs and reads the corpus; takes long, and can be done in a thread."""
    run, width = self.any_run, len(self.names)
    self.corpus = None
    self.program = compiled_group_steps(run, width, self.corpus)
    self.stack, self.slice = compiled_stack_and_slice(run, width)
    state = init_state(run.model, run.experiment.optimizer, run.experiment.seed, run.mesh)
    Evaluation(run, name='').compile(state.params)


def train_group(group: Group, root: str | AnyPath, on_begin: Callable[[list[str]], None],
                show_progress: bool = True) -> dict[str, BaseException | None]:
  """Trains the members of a compiled group in ROOT/NAME; returns how each ended.

  That is None for one that is done, or what `loop.train` would have raised. What is wrong with
  one member, such as its workdir, ends that member alone.

  Args:
    on_begin: is called before the first step, with the names of the members that have steps left,
      while their workdirs are locked.

  Raises:
    Interrupted: the process was asked to stop; all states are saved.
  """
  members = [_Member(index, name, group.runs[name])
             for index, name in enumerate(group.names) if name in group.runs]
  with StopHandler() as stop, contextlib.ExitStack() as closing:
    try:
      states = _open_workdirs(group, members, to_path(root))
      if running := [member for member in members if member.running]:
        on_begin([member.name for member in running])
        _train_members(group, running, states, stop, closing, show_progress)
    # What no `attempt` has caught concerns the whole group, and ends all members that are still
    # running. Errors of the program are returned as theirs; a request to end the process is passed
    # on.
    except BaseException as error:
      for member in members:
        member.end(error)
      if not isinstance(error, Exception):
        raise
  stopped = [member.error for member in members if isinstance(member.error, Interrupted)]
  if stopped:
    raise stopped[0]
  return {member.name: member.error for member in members}


def _open_workdirs(group: Group, members: Sequence[_Member], root: AnyPath) -> TrainState | None:
  """Opens the workdirs; returns the states of all members, (G, ...), or None where all are done.

  A member that is done has the state of another one in its place, and stays inactive.
  """
  states = {}

  # One deadline for all: were it counted for each member, a group whose workdirs are all held would
  # wait as many times as it has members.
  until = time.monotonic() + PATIENCE
  for member in members:
    state = member.begin(root / member.name, len(group.names), until)
    if state is not None:
      states[member.index] = state
  if not states:
    return None
  some_state = next(iter(states.values()))
  return group.stack(*(states.get(index, some_state) for index in range(len(group.names))))


def _train_members(group: Group, members: Sequence[_Member], states: TrainState | None,
                   stop: StopHandler, closing: contextlib.ExitStack, show_progress: bool) -> None:
  """Takes all members from their checkpoints to their ends, or to where the group has to stop."""
  run, running = group.any_run, lambda: [m for m in members if m.running]
  corpus = None if group.corpus is None else jax.device_put(group.corpus, replicated(run.mesh))
  supply = _InputSupply(group)
  progress = closing.enter_context(Progress(
      f'{group.names[0]} and others', max(m.steps for m in members),
      min(m.start for m in members), unit='step', enabled=show_progress))
  # The group begins where the member that is furthest behind does; the others join at their steps.
  at = min(m.start for m in members)
  for member in members:
    with member.attempt():
      if stop.poll(wait=True):
        raise Interrupted(member.start, member.steps)
      if member.start == 0:
        member.recorder.begin(group.slice(states, np.int32(member.index)))
  most = 1  # until it is known how long a step takes
  while running():
    left = running()
    count = _steps_until_due(left, at, min(most, supply.steps))
    inputs = supply.inputs(left, at, count)
    began = time.perf_counter()
    states, metrics = group.program(states, corpus, inputs, np.int32(count))
    # The call above returns at once: the host makes the next inputs while the device is at work.
    supply.prepare(left, at + count)
    metrics = jax.device_get(metrics)
    seconds = (time.perf_counter() - began) / count
    most, at = max(1, int(_SECONDS / seconds)), at + count
    stopping = stop.poll()
    for member in left:
      with member.attempt():
        # The arrays have a row for each step that a call could take; those after `count` hold
        # zeros.
        of_member = {key: x[:count, member.index] for key, x in metrics.items()}
        member.report(at - count, of_member, seconds)
        # A member that joins at a later step has the state of its checkpoint still, and nothing to
        # save.
        if member.start < at and (stopping or member.recorder.due(at)):
          state = group.slice(states, np.int32(member.index))
          member.settle(at, state, of_member['loss'][-1], stopping)
        elif stopping:
          raise Interrupted(member.start, member.steps)
    progress.update(at, trials=len(left),
                    **{'tokens/s': f'{run.tokens_per_step * len(left) / seconds:,.0f}'})


def _steps_until_due(members: Sequence[_Member], at: int, most: int) -> int:
  """Steps until one of the members needs its state, at most so many."""
  for count in range(1, most):
    if any(m.start < at + count and m.recorder.due(at + count) for m in members):
      return count
  return most


class _Member:
  """A trial of the group: what is open of its workdir, and how it ended.

  index: its place on the group's leading axis.
  """

  recorder: Recorder
  start: int  # the step that it resumes from

  def __init__(self, index: int, name: str, run: PreparedRun):
    self.index, self.name, self.run = index, name, run
    # Running from here on, so that an error that comes before `begin` ends the member, too.
    self.steps, self.running = run.experiment.steps, True
    self.error: BaseException | None = None
    optimizer = run.experiment.optimizer
    self.learning_rate = learning_rates(optimizer, self.steps)
    self.weight_decay = optimizer.weight_decay
    self._open = contextlib.ExitStack()

  def begin(self, workdir: str | AnyPath, width: int, until: float) -> TrainState | None:
    """Opens the workdir; returns the state, or None where nothing is left to do.

    until: when to stop waiting for another process that
    has the workdir, `time.monotonic`.
    """
    with self.attempt():
      self.recorder = self._open_recorder(workdir, until)
      state = self.recorder.restore()
      self.start = self.recorder.start
      if self.recorder.has_finished():
        self.end()
        return None
      self._open.enter_context(self.recorder.recording(width))
      if self.start == self.steps:  # killed after its last save, before its status was written
        self.end()
        return None
      model, context = self.run.model, self.run.experiment.data.context
      self._clock = Throughput(self.run.tokens_per_step, flops_per_token(model, context),
                               _matmul_rate(model.dtype))
      return state
    return None

  def _open_recorder(self, workdir: str | AnyPath, until: float) -> Recorder:
    while True:
      try:
        return self._open.enter_context(open_recorder(self.run, workdir, self.name))
      except WorkdirLocked:
        if time.monotonic() > until:
          raise
        time.sleep(0.5)

  def report(self, before: int, metrics: Mapping[str, np.ndarray], seconds: float) -> None:
    """Checks and logs the metrics of the steps after `before`."""
    # Steps up to its own start belong to other members: this one was inactive in them.
    for step in range(max(before, self.start) + 1, before + len(metrics['loss']) + 1):
      row = {key: float(x[step - before - 1]) for key, x in metrics.items()}
      # Members are computed side by side, so that each of them takes the time of the whole step.
      self._clock.timed(seconds)
      self.recorder.check(step, row)
      if self.recorder.logs(step):
        self.recorder.log(step, row, self.learning_rate(step - 1), self._clock.read())
    self.recorder.poll()

  def settle(self, step: int, state: TrainState, loss: SupportsFloat, stopping: bool) -> None:
    """Evaluates and saves what is due; ends the member after its last step."""
    self.recorder.settle(step, state, loss, saving=stopping)
    if step == self.steps:
      self.end()
    elif stopping:
      raise Interrupted(step, self.steps)

  @contextlib.contextmanager
  def attempt(self) -> Iterator[None]:
    """A context in which any error ends this member alone."""
    try:
      yield
    except Exception as error:
      self.end(error)

  def end(self, error: BaseException | None = None) -> None:
    """Closes the workdir, with the status that the error makes, unless that is done."""
    if not self.running:
      return
    self.running, self.error = False, error
    try:
      # Raised inside the contexts that are open, the error leaves the same status behind as in a
      # run alone, see `recorded_outcome`. Closing may fail, too: that is then how the member ended.
      with self._open:
        if error is not None:
          raise error
    except BaseException as raised:
      self.error = raised


class _InputSupply:
  """The inputs of the steps; members with the same seed and data share what is made."""

  def __init__(self, group: Group):
    self._empty = functools.partial(empty_inputs, group.any_run, len(group.names), group.corpus)
    self._from_table = group.corpus is not None
    self.steps = len(self._empty().active)
    self._made = {}  # {(data, seed): {step: rows or batch}}

  def inputs(self, members: Sequence[_Member], at: int, count: int) -> GroupInputs:
    """Inputs whose first `count` steps are those after step `at`."""
    inputs = self._empty()
    for member in members:
      for i in range(max(0, member.start - at), count):
        # Arrays are filled in place, and `tree.map` only pairs them with their parts of a batch.
        put = lambda array, x, at=(i, member.index): array.__setitem__(at, x)
        jax.tree.map(put, inputs.data, self._data(member.run, at + i))
        jax.tree.map(put, inputs.rates, Rates(member.learning_rate(at + i), member.weight_decay))
        inputs.active[i, member.index] = True
    return inputs

  def prepare(self, members: Sequence[_Member], at: int) -> None:
    """Makes what the next call may need, and forgets what came before it."""
    for made in self._made.values():
      for step in [step for step in made if step < at]:
        del made[step]
    for member in members:
      for step in range(max(at, member.start), min(at + self.steps, member.steps)):
        self._data(member.run, step)

  def _data(self, run: PreparedRun, step: int) -> np.ndarray | Batch:
    data, seed = run.data, run.experiment.seed
    # Members that share data and seed are often at the same step, where one batch serves them all.
    made = self._made.setdefault((data, seed), {})
    if step not in made:
      made[step] = data.batch(step, run.experiment.batch_size, seed)
    return made[step]


@functools.cache
def _matmul_rate(dtype: str) -> float | None:
  # Kept for all members of all groups: the measurement takes about half a second.
  return measured_matmul_rate(dtype)
