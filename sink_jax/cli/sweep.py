"""Runs the trials of a config file that a person has chosen, or tells about them."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator, Mapping

import jax

from sink_jax.arguments import check_known
from sink_jax.cli.train import training_ends
from sink_jax.data.dataset import open_data
from sink_jax.io import compile_cache
from sink_jax.io.exit_code import exit_saved_until_training, stop_signals
from sink_jax.io.paths import AnyPath, is_local, to_path
from sink_jax.paper.all_claims import trials_of
from sink_jax.sweep import estimate
from sink_jax.sweep.batched import run_batched
from sink_jax.sweep.config_keys import parse_settings
from sink_jax.sweep.options import Options
from sink_jax.sweep.pool import SweepStopped, run_in_parallel
from sink_jax.sweep.runner import run_trial
from sink_jax.sweep.summary import (
  RemainingTime,
  as_markdown,
  keep_summary,
  other_trials,
  read_states,
)
from sink_jax.sweep.trials import FINAL_STATUSES, Trial, load_trials, select_shard
from sink_jax.sweep.undecided import read_second_look
from sink_jax.train.experiment import from_dict
from sink_jax.train.multihost import broadcast_from_process0, init_distributed, is_first
from sink_jax.train.stop_handler import StopHandler


def main(options: Options) -> int:
  """Runs the trials, or does what one of the other modes asks for; returns the exit code."""
  with training_ends(options.workdir):
    return run_sweep(options)


def run_sweep(options: Options) -> int:
  """Does the same, for callers in Python; the exit code is 1 where a trial failed.

  Raises:
    ValueError: the config file or a choice of trials cannot be used.
    Interrupted, SweepStopped, KeyboardInterrupt: a signal stopped it; what ran is saved.
  """
  table = _table(options)
  trials = _selected(table, options)
  # As given, or as the config file has it.
  budget = options.budget or next((trial.label.get('budget') for trial in trials.values()), None)
  if options.list:
    print('\n'.join(trials))
  elif options.dry_run:
    rules = next((trial.rules for trial in trials.values()), ())  # one budget has one table
    expected = estimate.estimate_sweep(trials, options.processes, options.estimate)
    print(estimate.as_text(expected, budget, rules))
  elif options.data_only:
    for name, trial in trials.items():
      # A trial that cannot be expressed at this budget has no config.
      if trial.config:
        data = open_data(from_dict(trial.config).data).summary()
        print(f'{name}: {data["source"]}: {data.get("unique_training_tokens", "endless")} '
              'training tokens', flush=True)
  elif options.status:
    assert options.workdir  # required of --status
    root = to_path(options.workdir)
    if is_local(root) and not root.is_dir():
      raise ValueError(f'--workdir={options.workdir}: there is no such folder.')
    print(as_markdown(read_states(trials, root), f'Sweep in {options.workdir}'), end='')
    if others := list(other_trials(trials, root)):
      more = f' and {len(others) - 10} more' if len(others) > 10 else ''
      print(f'\nNot among these trials, and in the folder: {", ".join(others[:10])}{more}')
  else:
    statuses = _trained(trials, table, options, budget)
    return 1 if statuses - set(FINAL_STATUSES) else 0  # diverging is a result
  return 0


def _table(options: Options) -> dict[str, Trial]:
  """Every trial of the config file, for all seeds."""
  of_file = {name: value for name in ('budget', 'protocol') if (value := getattr(options, name))}
  settings = parse_settings([*options.set, *options.config_words])
  load = lambda seeds: load_trials(options.config, of_file, seeds, settings)
  if not options.undecided:
    return load(list(options.seeds) or None)
  names, seeds = read_second_look(options.undecided, load(None))
  return {name: trial for name, trial in load(seeds).items()
          if (trial.label.get('trial') or trial.name) in names}


def _selected(table: Mapping[str, Trial], options: Options) -> dict[str, Trial]:
  """Those that --only, or --claims, and --shard leave."""
  # With --seeds a trial NAME becomes NAME-seed-0, NAME-seed-1, ...; NAME alone then means all of
  # them.
  names = {name: {name, trial.label.get('trial')} for name, trial in table.items()}
  known, only = set().union(*names.values()), set(options.only)
  if unknown := sorted(only - known):
    plain = dict.fromkeys(trial.label.get('trial') or name for name, trial in table.items())
    check_known(unknown[0], plain, '--only: unknown trial')
  if options.claims:
    try:
      needed = trials_of(options.claims)
    except ValueError as error:
      raise ValueError(f'--claims: {error}') from None
    if missing := [name for name in needed if name not in known]:
      raise ValueError(f'--claims={",".join(options.claims)} needs {missing[0]}, which '
                       f'{options.config} does not have; configs/desk.py has all trials of the '
                       'paper.')
    only = set(needed)
  trials = {name: trial for name, trial in table.items() if not only or names[name] & only}
  for name, trial in trials.items():
    if trial.problem:
      raise ValueError(trial.problem)
    if trial.overridden:
      raise ValueError(f'the config key {trial.overridden[0]} is set, and trial {name} is about '
                       'it: leave the setting out, or choose other trials with --only.')
  # Last, so that the parts of an array divide the chosen trials evenly among them.
  return select_shard(trials, options.shard)


def _make(root: AnyPath) -> None:
  try:
    root.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise ValueError(f'Cannot use {root} as a workdir: {error}. Choose another '
                     '--workdir.') from None


def _trained(trials: Mapping[str, Trial], table: Mapping[str, Trial], options: Options,
             budget: str | None) -> set[str]:
  """Prints an estimate, runs the trials, and prints how each ended; returns how they did.

  table: all trials of the config file, for the summary.
  """
  assert options.workdir  # required to run trials
  root = to_path(options.workdir)
  alone = options.processes > 1 or init_distributed()
  if alone:
    # Between trials there is nothing to save; training installs a handler that saves.
    for number in stop_signals():
      signal.signal(number, signal.default_int_handler)
    _make(root)  # a broadcast would take the device, which workers need
  else:
    exit_saved_until_training()  # at once: a shutdown of the job would wait for all processes
    broadcast_from_process0(lambda: _make(root), ValueError)
  if not (alone or is_first()):
    return {status for _, status in _outcomes(trials, root, options)}
  # Those that are done or have diverged end at once, and neither take time nor need a line.
  left = {state.name: trials[state.name] for state in read_states(trials, root)
          if state.status not in FINAL_STATUSES}
  remaining = RemainingTime(dict.fromkeys(left, 1.0), None)  # as if every trial took as long
  if options.estimate:
    expected = estimate.estimate_sweep(left, options.processes)
    print(estimate.headline(expected, budget), file=sys.stderr)
    remaining = RemainingTime(expected.work(), expected.seconds)
  statuses = {}
  with keep_summary(table, root, remaining, lines=options.processes > 1):
    for trial, status in _outcomes(trials, root, options):
      statuses[trial] = status
      remaining.finish(trial)
      if trial in left:
        print(f'[{len(statuses)}/{len(trials)}] {trial}: {status}  {remaining.as_text()}',
              file=sys.stderr, flush=True)
  for trial in trials:
    print(f'{trial}: {statuses[trial]}')
  return set(statuses.values())


def _outcomes(trials: Mapping[str, Trial], root: AnyPath,
              options: Options) -> Iterator[tuple[str, str]]:
  """Runs the trials; yields (name, status) as each ends."""
  if options.processes > 1:
    yield from run_in_parallel(trials, root, options.processes)
    return
  # After the branch of processes: this asks for the devices, which the workers need.
  compile_cache.enable()
  if options.batched:
    yield from run_batched(trials, root, options.width)
    return
  # In a job a signal to one process between trials stops all of them.
  with contextlib.nullcontext() if jax.process_count() == 1 else StopHandler() as stop:
    for name, trial in trials.items():
      if stop and stop.poll(wait=True):
        raise SweepStopped
      yield name, run_trial(trial, root)
