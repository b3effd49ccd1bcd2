"""Many small trials on one device: those that share a program are trained together.

ROOT/FIRST.group.json holds the trials of a group in the order of their slots, and its width,
FIRST being the first of them that this process trains. A group that has begun keeps both,
whichever trials are left.
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
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from sink_jax.data.dataset import open_data
from sink_jax.io.files import SMALL, read_text_limited, write_atomically
from sink_jax.io.paths import to_path
from sink_jax.sweep.runner import concluded, run_trial
from sink_jax.sweep.trials import ENDED, Trial
from sink_jax.train.checksums import saved_steps
from sink_jax.train.experiment import differences
from sink_jax.train.group import Group, train_group
from sink_jax.train.optimizer import compiled_part
from sink_jax.train.prepare import PreparedRun, prepare_run
from sink_jax.train.run_dir import has_ended, in_use, read_status

# What trials of a group may differ in: what is computed beside the steps, and how long.
_FREE = ('seed', 'steps', 'log_every', 'checkpoint_every', 'checkpoints_kept', 'probe',
         'validation', 'mesh', 'label')
_FREE_OF_DATA = ('max_tokens', 'domain_weights', 'cache_dir')
_AHEAD = 6  # programs that are compiled before their turn comes, and kept until then


def run_batched(trials: Mapping[str, Trial], root,
                width: int | None = None) -> Iterator[tuple[str, str]]:
  """Runs trials in groups, on the one device there is; yields (name, status) as they end.

  Those whose program no other trial shares run as `run_trial` has it.

  Args:
    width: trials of a group, at most; None for as many as there are.

  Raises:
    ValueError: there are several devices. Interrupted: as `run_trial`.
  """
  if jax.device_count() > 1:  # a job of several processes has several, too
    raise ValueError(f'--batched trains groups of trials on one device, and {jax.device_count()} '
                     'are here: show it one, such as with CUDA_VISIBLE_DEVICES=0, or leave it out.')
  root = to_path(root)
  root.mkdir(parents=True, exist_ok=True)
  jobs = _jobs(trials, root)
  groups = _groups(jobs, root, width)
  with contextlib.closing(_compiled(groups)) as compiled:
    for group, problem in compiled:
      print(f'{len(group.runs)} trials in a group of {len(group.names)}: {", ".join(group.runs)}',
            file=sys.stderr, flush=True)
      begun = (lambda held: None) if groups[group] else functools.partial(_record, group, root)
      ended = dict.fromkeys(group.runs, problem) if problem else train_group(group, root, begun)
      for name, error in ended.items():
        yield name, concluded(trials[name], root, functools.partial(
            _raise, error, len(group.names), groups[group]))
  together = {name for group in groups for name in group.runs}
  for name, trial in trials.items():
    if name not in together:
      yield name, run_trial(trial, root)


def _raise(error, width, record, _):
  """Raises what ended a trial of a group; of its width, where that was too large.

  record: where the group has begun, the file that keeps its width.
  """
  if error is not None and 'RESOURCE_EXHAUSTED' in str(error):
    remedy = 'leave out --batched'
    if width > 2:
      remedy = f'begin with a smaller --width, such as {max(2, width // 2)}'
      remedy = f'remove {record} and {remedy}' if record else remedy
    raise RuntimeError(f'{error}\nA group of {width} does not fit: {remedy}.') from error
  if error is not None:
    raise error


def _jobs(trials, root):
  """{name: Job} of all trials that can be trained; what is wrong with others is said later."""
  opened = functools.cache(open_data)  # trials of the same data share what is made of it
  jobs = {}
  for name, trial in trials.items():
    try:
      if trial.config and not has_ended(root / name, trial.config):
        jobs[name] = prepare_run(trial.config, root / name, opened)
    except Exception:  # whatever it is, `run_trial` has it again
      continue
  return jobs


def _groups(jobs, root, width):
  """{Group: its record or None}: those that have begun with what is left of them, then others."""
  keys = {name: _shared(job) for name, job in jobs.items()}
  groups, placed = {}, set()
  for path, names in _records(root):
    left = [name for name in names if name in jobs and name not in placed]
    if (left and all(keys[name] == keys[left[0]] for name in left)
        and _has_begun(root, names)):
      groups[Group(names, {name: jobs[name] for name in left})] = path
      placed |= set(left)
      if width and width < len(names):
        print(f'--width={width} is for groups that begin: that of {path} keeps its width of '
              f'{len(names)}. Remove the file to begin another.', file=sys.stderr)
  found = collections.defaultdict(list)
  for name in jobs:
    if name not in placed:
      found[json.dumps(keys[name], sort_keys=True)].append(name)
  alone = []
  for names in found.values():
    for start in range(0, len(names), width or len(names)):
      part = names[start:start + (width or len(names))]
      if len(part) == 1:
        alone += part
        continue
      groups[Group(part, {name: jobs[name] for name in part})] = None
  if alone:
    print('Alone: ' + '; '.join(_why_alone(name, keys) for name in alone), file=sys.stderr)
  return groups


def _shared(job: PreparedRun) -> dict[str, Any]:
  """What the trials of a group have in common, as a config dict.

  Keys that are not known to be free are a part of it, and so is the content of the data.
  """
  config = {key: value for key, value in job.config.items() if key not in _FREE}
  data = {key: value for key, value in config['data'].items() if key not in _FREE_OF_DATA}
  optimizer = compiled_part(job.experiment.optimizer)
  return config | {'data': data | {'content': job.data_summary['content']},
                   'optimizer': dataclasses.asdict(optimizer) | {'rule': repr(optimizer.rule)}}


def _why_alone(name, keys):
  changes = [(len(lines), other, lines) for other in keys if other != name
             and (lines := differences(keys[other], keys[name]))]
  if not changes:
    return f'{name} (of its width no other is left)' if len(keys) > 1 else name
  _, other, lines = min(changes)
  return f'{name} (unlike {other}: {", ".join(lines)})'


def _record(group, root, held):
  """Records the slots of a group that begins; what others of its trials have not begun is void.

  held: the trials of which this process holds the workdirs.
  """
  for path, names in list(_records(root)):
    if set(names) & set(held) and not _has_begun(root, names, held):
      path.unlink()
  write_atomically(root / f'{held[0]}.group.json',
                   json.dumps({'width': len(group.names), 'trials': group.names}, indent=1))


def _records(root):
  """(path, slots) of all groups that are recorded."""
  for path in sorted(root.glob('*.group.json')):
    try:
      names = json.loads(read_text_limited(path, SMALL))['trials']
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
      continue
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
      yield path, names


def _has_begun(root, names, held=()):
  """Has a trial of a group saved a state, or ended, or does another process train it?"""
  return any(saved_steps(root / name) or read_status(root / name)['status'] in ENDED
             or name not in held and in_use(root / name) for name in names)


def _compiled(groups):
  """(group, None or why it did not compile), in order; the programs of the next are under way."""
  waiting = collections.deque(groups)
  compiling = collections.deque()
  pool = concurrent.futures.ThreadPoolExecutor(min(_AHEAD, os.cpu_count() or 1))
  try:
    while waiting or compiling:
      while waiting and len(compiling) < _AHEAD:
        group = waiting.popleft()
        compiling.append((group, pool.submit(group.compile)))
      group, compiled = compiling.popleft()
      yield group, compiled.exception()
  finally:  # who is asked to stop waits for no program that is not begun
    pool.shutdown(wait=False, cancel_futures=True)
