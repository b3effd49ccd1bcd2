"""Trains many small trials on one device: those that share a program are trained together.

A group of trials is one compiled program whose arrays have an axis for the members. A member is an
index of that axis, and the width is the length of the axis. ROOT/FIRST.group.json records the
members of a group in their order ('trials') and its width, FIRST being the first of them that this
process trains. A group that has begun keeps both, whichever of its trials are left: XLA may round
differently in a program of another width, and a trial that is resumed must go on bit by bit.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import os
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from sink_jax.data.dataset import open_data
from sink_jax.io.files import SMALL, read_text_limited, write_atomically
from sink_jax.io.paths import AnyPath, to_path
from sink_jax.pretrained.source import open_source
from sink_jax.sweep.runner import finish_trial, run_trial
from sink_jax.sweep.trials import FINAL_STATUSES, Trial
from sink_jax.train.checksums import saved_steps
from sink_jax.train.experiment import differences
from sink_jax.train.group import Group, train_group
from sink_jax.train.optimizer import compiled_part
from sink_jax.train.prepare import PreparedRun, prepare_run
from sink_jax.train.run_dir import has_ended, in_use, read_status

# What the trials of a group may differ in: the seed, which is an argument of the program, what is
# computed beside the steps, and how many steps there are.
_FREE = ('seed', 'steps', 'log_every', 'checkpoint_every', 'checkpoints_kept', 'probe',
         'validation', 'mesh', 'label')
_FREE_OF_DATA = ('max_tokens', 'domain_weights', 'cache_dir')
_AHEAD = 6  # groups whose programs are compiled before their turn comes, and kept until then


def run_batched(trials: Mapping[str, Trial], root: str | AnyPath,
                width: int | None = None) -> Iterator[tuple[str, str]]:
  """Runs trials in groups, on the one device there is; yields (name, status) as they end.

  Trials whose program no other trial shares run afterwards, as `run_trial` runs them, and so do
  those with `init.distill`.

  Args:
    trials: by name.
    root: the folder of the sweep; a trial goes to ROOT/NAME.
    width: trials of a group at most; None for as many as there are.

  Raises:
    ValueError: there are several devices.
    Interrupted: the process was asked to stop; the states are saved.
  """
  if jax.device_count() > 1:  # a job of several processes has several, too
    raise ValueError(f'--batched trains groups of trials on one device, and {jax.device_count()} '
                     'are here: show it one, such as with CUDA_VISIBLE_DEVICES=0, or leave it out.')
  folder = to_path(root)
  folder.mkdir(parents=True, exist_ok=True)
  jobs = _jobs(trials, folder)
  groups = _groups(jobs, folder, width)
  together = {name for group in groups for name in group.runs}
  yield from _run_groups(groups, trials, folder)
  for name, trial in trials.items():
    if name not in together:
      yield name, run_trial(trial, folder)


def _run_groups(groups: dict[Group, AnyPath | None], trials: Mapping[str, Trial],
                root: AnyPath) -> Iterator[tuple[str, str]]:
  """Trains the groups one after the other, and takes each of them out of `groups`.

  A group holds its programs and its table of the corpus, which may be GiB, so nothing keeps one
  that has ended.
  """
  with contextlib.closing(_compiled(groups)) as compiled:
    for group, problem in compiled:
      print(f'{len(group.runs)} trials in a group of {len(group.names)}: {", ".join(group.runs)}',
            file=sys.stderr, flush=True)
      record = groups.pop(group)
      # A new group is recorded when the workdirs of its trials are locked, not before.
      begun = (lambda held: None) if record else functools.partial(_record, group, root)
      ended = dict.fromkeys(group.runs, problem) if problem else train_group(group, root, begun)
      for name, error in ended.items():
        yield name, finish_trial(trials[name], root, functools.partial(
            _raise, error, len(group.names), record))


def _raise(error: BaseException | None, width: int, record: AnyPath | None, *_: Any) -> None:
  """Raises the error that ended a trial of a group; where memory was short, with a remedy.

  Args:
    error: None where the trial is done.
    width: of the group.
    record: the file that keeps the width, where the group has begun.
  """
  if error is not None and 'RESOURCE_EXHAUSTED' in str(error):
    remedy = 'leave out --batched'
    if width > 2:
      remedy = f'begin with a smaller --width, such as {max(2, width // 2)}'
      remedy = f'remove {record} and {remedy}' if record else remedy
    raise RuntimeError(f'{error}\nA group of {width} does not fit: {remedy}.') from error
  if error is not None:
    raise error


def _jobs(trials: Mapping[str, Trial], root: AnyPath) -> dict[str, PreparedRun]:
  """Prepares all trials that have steps left and can be trained."""
  opened = functools.cache(open_data)  # trials of the same data share what is made of it
  jobs = {}
  for name, trial in trials.items():
    try:
      if trial.config and not has_ended(root / name, trial.config):
        job = prepare_run(trial.config, root / name, opened, open_source)
        if job.experiment.init.distill:
          print(f'Alone: {name} (a group reads no second model, which init.distill is about)',
                file=sys.stderr)
          continue
        jobs[name] = job
    except Exception:  # `run_trial` meets the same error, and reports it
      continue
  return jobs


def _groups(jobs: Mapping[str, PreparedRun], root: AnyPath,
            width: int | None) -> dict[Group, AnyPath | None]:
  """Divides jobs into groups: {group: its record, None of a group that has not begun}.

  Groups that have begun come first, with the trials that are left of them.
  """
  keys = {name: _program_key(job) for name, job in jobs.items()}
  groups, in_a_group = {}, set()
  for path, names in _records(root):
    left = [name for name in names if name in jobs and name not in in_a_group]
    # A recorded group goes on only where those that are left of it still share a program, and where
    # it has begun: otherwise nothing binds its trials to that width.
    if (left and all(keys[name] == keys[left[0]] for name in left)
        and _has_begun(root, names)):
      groups[Group(names, {name: jobs[name] for name in left})] = path
      in_a_group |= set(left)
      if width and width < len(names):
        print(f'--width={width} is for groups that begin: that of {path} keeps its width of '
              f'{len(names)}. Remove the file to begin another.', file=sys.stderr)
  by_program = collections.defaultdict(list)
  for name in jobs:
    if name not in in_a_group:
      # A dict cannot be a key; its text can, with the keys in order.
      by_program[json.dumps(keys[name], sort_keys=True)].append(name)
  alone = []
  for names in by_program.values():
    for start in range(0, len(names), width or len(names)):
      part = names[start:start + (width or len(names))]
      if len(part) == 1:
        alone += part
        continue
      groups[Group(part, {name: jobs[name] for name in part})] = None
  if alone:
    print('Alone: ' + '; '.join(_why_alone(name, keys) for name in alone), file=sys.stderr)
  return groups


def _program_key(job: PreparedRun) -> dict[str, Any]:
  """What the trials of a group have in common, as a config dict.

  Keys that are not known to be free are a part of it, and so is the content of the data: a key that
  is added to the configs later separates trials until it is listed as free.
  """
  config = {key: value for key, value in job.config.items() if key not in _FREE}
  data = {key: value for key, value in config['data'].items() if key not in _FREE_OF_DATA}
  optimizer = compiled_part(job.experiment.optimizer)
  return config | {'data': data | {'content': job.data_summary['content']},
                   'optimizer': dataclasses.asdict(optimizer) | {'rule': repr(optimizer.rule)}}


def _why_alone(name: str, keys: Mapping[str, dict[str, Any]]) -> str:
  """Names a trial and in what it differs from the one that is most like it."""
  changes = [(len(lines), other, lines) for other in keys if other != name
             and (lines := differences(keys[other], keys[name]))]
  if not changes:
    return f'{name} (of its width no other is left)' if len(keys) > 1 else name
  _, other, lines = min(changes)
  return f'{name} (unlike {other}: {", ".join(lines)})'


def _record(group: Group, root: AnyPath, held: Sequence[str]) -> None:
  """Records the members of a group that begins.

  Older records of the same trials are removed where none of their trials has begun.

  Args:
    group: the group.
    root: the folder of the sweep.
    held: the trials whose workdirs this process holds. Another sweep may train the others, and
      have a record of its own; the name of the first of these cannot be that of its file.
  """
  for path, names in list(_records(root)):
    if set(names) & set(held) and not _has_begun(root, names, held):
      # Such a record is left over from a sweep that ended before any of these trials had saved a
      # state, and the new record is about to take its place.
      path.unlink()
  write_atomically(root / f'{held[0]}.group.json',
                   json.dumps({'width': len(group.names), 'trials': group.names}, indent=1))


def _records(root: AnyPath) -> Iterator[tuple[AnyPath, list[str]]]:
  """Yields (path, names of the members) of all recorded groups; damaged files are passed over."""
  for path in sorted(root.glob('*.group.json')):
    try:
      names = json.loads(read_text_limited(path, SMALL))['trials']
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
      continue
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
      yield path, names


def _has_begun(root: AnyPath, names: Iterable[str], held: Sequence[str] = ()) -> bool:
  """Whether a trial of a group has saved a state or ended, or another process trains it."""
  return any(saved_steps(root / name) or read_status(root / name)['status'] in FINAL_STATUSES
             or name not in held and in_use(root / name) for name in names)


def _compiled(
    groups: Iterable[Group]) -> Generator[tuple[Group, BaseException | None], None, None]:
  """Yields (group, None or the error of its compilation), in order.

  The next groups are compiled in threads meanwhile, which wait for XLA without the interpreter's
  lock, while the device trains.
  """
  waiting = collections.deque(groups)
  compiling = collections.deque()
  pool = concurrent.futures.ThreadPoolExecutor(min(_AHEAD, os.cpu_count() or 1))
  try:
    while waiting or compiling:
      # No more than these at a time, since a compiled group also holds its table of the corpus.
      while waiting and len(compiling) < _AHEAD:
        group = waiting.popleft()
        compiling.append((group, pool.submit(group.compile)))
      group, compiled = compiling.popleft()
      yield group, compiled.exception()
  finally:  # a sweep that is asked to stop does not wait for programs that nobody has begun
    pool.shutdown(wait=False, cancel_futures=True)
