"""python -m sink_jax.sweep --config=configs/paper.py --budget=smoke --workdir=runs/smoke

Runs every trial of a config file, each in its own folder of the workdir. A trial that is
done or has diverged is skipped and an interrupted one continues; one that fails is
recorded and tried again next time, and the rest go on. WORKDIR/summary.md shows at any time how
far all of them are; --status prints the same.
"""

from __future__ import annotations

from sink_jax.io.exit_code import EXIT_SAVED, EXIT_UNSAVED, exit_saved_until_training, stop_signals

exit_saved_until_training()  # the imports below take seconds

import os
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence, Set

from absl import flags

from sink_jax.cli import command

_CONFIG = flags.DEFINE_string('config', None, 'Config file with a table TRIALS.')
_WORKDIR = flags.DEFINE_string(
    'workdir', None, 'Folder of the sweep; a trial goes to WORKDIR/TRIAL.')
_BUDGET = flags.DEFINE_string(
    'budget', None, 'Of the configs of the paper: smoke, desk, tenth, quarter or full.')
_PROTOCOL = flags.DEFINE_string(
    'protocol', None, 'Of the configs of the paper: paper, or released, as its code has it.')
_SEEDS = flags.DEFINE_list('seeds', None, 'Seeds, such as 0,1,2: a trial for each.')
_SET = flags.DEFINE_multi_string(
    'set', [], 'A config key for all trials, such as --set=data.max_tokens=100000; repeatable.')
_ONLY = flags.DEFINE_list(
    'only', [], 'Names of the trials to run, separated by commas; all if empty.')
_CLAIMS = flags.DEFINE_list(
    'claims', [], 'Claims of the paper, such as emergence,key-biases: the trials that these need.')
_UNDECIDED = flags.DEFINE_string(
    'undecided', None, 'A report.json of the paper: two more seeds of the trials whose claims it '
    'left undecided, once.')
_SHARD = flags.DEFINE_string('shard', '1/1', 'k/n: the k-th of n parts, for jobs in an array.')
_PROCESSES = flags.DEFINE_integer(
    'processes', 1, 'Trials at a time on this machine, for small ones. On TPUs only 1 works.')
_ESTIMATE = flags.DEFINE_bool(
    'estimate', True, 'Measure these devices first, and say how long it will be. --noestimate '
    'saves ten to twenty seconds on a GPU.')
_BATCHED = flags.DEFINE_bool(
    'batched', False, 'Train trials that share a program together, for small ones on one device.')
_WIDTH = flags.DEFINE_integer(
    'width', None, 'With --batched: trials that are trained together, at most, for want of memory.')
_LIST = flags.DEFINE_bool('list', False, 'Print the names of the trials and stop.')
_DRY_RUN = flags.DEFINE_bool('dry_run', False, 'Print what every trial costs and stop.')
_STATUS = flags.DEFINE_bool('status', False, 'Print how far every trial is and stop.')
_DATA_ONLY = flags.DEFINE_bool(
    'data_only', False, 'Tokenize and pack the text of the trials where it is not yet, and stop.')

command.answer_help(__name__)  # the imports below take seconds

import jax

from sink_jax.data.dataset import open_data
from sink_jax.io import compile_cache
from sink_jax.io.paths import AnyPath, to_path
from sink_jax.paper.all_claims import trials_of
from sink_jax.sweep import estimate
from sink_jax.sweep.batched import run_batched
from sink_jax.sweep.pool import SweepStopped, run_in_parallel
from sink_jax.sweep.runner import run_trial
from sink_jax.sweep.summary import RemainingTime, as_markdown, keep_summary, read_states
from sink_jax.sweep.trials import FINAL_STATUSES, Trial, load_trials, parse_settings, select_shard
from sink_jax.sweep.undecided import read_second_look
from sink_jax.train.experiment import from_dict
from sink_jax.train.loop import quiet_logs
from sink_jax.train.multihost import broadcast_from_process0, fail, init_distributed, is_first
from sink_jax.train.outcome import Interrupted
from sink_jax.train.stop_handler import StopHandler, Unsaved


def main(argv: Sequence[str]) -> None:
  """Runs the trials, or does what one of the other modes asks for."""
  quiet_logs()
  try:
    command.no_arguments(argv)
    _check_modes()
    table = _table()
    trials = _selected(table)
    if _LIST.value:
      print('\n'.join(trials))
    elif _DRY_RUN.value:
      rules = next((trial.rules for trial in trials.values()), ())  # one budget has one table
      print(estimate.as_text(estimate.estimate_sweep(trials, _PROCESSES.value), _budget(trials),
                             rules))
    elif _DATA_ONLY.value:
      _open_data(trials)
    elif not _WORKDIR.value:
      raise ValueError('--workdir is needed to run trials.')
    elif _STATUS.value:
      root = to_path(_WORKDIR.value)
      print(as_markdown(read_states(trials, root), f'Sweep in {_WORKDIR.value}'), end='')
    else:
      alone, root = _begun(), to_path(_WORKDIR.value)
      if alone:  # a broadcast would take the device, which workers need
        _make(root)
      else:
        broadcast_from_process0(lambda: _make(root), ValueError)
      _run(trials, table, root, alone or is_first())
  except Unsaved as error:
    print(error, file=sys.stderr, flush=True)
    # After three signals, without waiting for threads that save.
    os._exit(EXIT_UNSAVED)
  except (Interrupted, SweepStopped, KeyboardInterrupt):
    print('Stopped and saved; the same command resumes.', file=sys.stderr)
    sys.exit(EXIT_SAVED)
  except ValueError as error:
    # All processes of a job have raised it, since all have the same options.
    fail(f'error: {error}')
  except Exception:
    fail(traceback.format_exc(), alone=True)


def _check_modes() -> None:
  """Checks that at most one mode is asked for."""
  # Each is added to the command that runs the trials, whose other options may stay.
  modes = [mode for mode in (_LIST, _DRY_RUN, _STATUS, _DATA_ONLY) if mode.value]
  if len(modes) > 1:
    raise ValueError(f'--{modes[0].name} and --{modes[1].name} exclude each other.')


def _table() -> dict[str, Trial]:
  """Every trial of the config file, for all seeds."""
  options = {'budget': _BUDGET.value, 'protocol': _PROTOCOL.value}
  given = _SEEDS.value or []
  try:
    seeds = [int(seed) for seed in given]
  except ValueError:
    raise ValueError(f'--seeds={",".join(given)}: write numbers, such as 0,1,2.') from None
  # A seed is in the name of a trial and of its folder, so each can be there once.
  if seeds and (len(set(seeds)) < len(seeds) or not 0 <= min(seeds) <= max(seeds) < 2**31):
    raise ValueError(f'--seeds={",".join(given)}: write different numbers from 0 to 2**31 - 1.')
  if _PROCESSES.value < 1:
    raise ValueError(f'--processes={_PROCESSES.value} must be at least 1.')
  if _PROCESSES.value > 1 and os.environ.get('JAX_NUM_PROCESSES', '1') != '1':
    raise ValueError(f'--processes={_PROCESSES.value}: the processes of a job train a trial '
                     'together, one after the other. Leave it out, or start no job.')
  _check_batched()
  if _UNDECIDED.value and (seeds or _ONLY.value or _CLAIMS.value):
    raise ValueError('--undecided names trials and seeds itself: leave out --seeds, --only and '
                     '--claims.')
  config = _CONFIG.value
  assert config is not None  # absl requires the option
  load = lambda seeds: load_trials(config, {k: v for k, v in options.items() if v}, seeds,
                                   parse_settings(_SET.value))
  if not _UNDECIDED.value:
    return load(seeds or None)
  names, seeds = read_second_look(_UNDECIDED.value, load(None))
  return {name: trial for name, trial in load(seeds).items()
          if (trial.label.get('trial') or trial.name) in names}


def _check_batched() -> None:
  if _WIDTH.value is not None and not (_BATCHED.value and _WIDTH.value > 1):
    raise ValueError(f'--width={_WIDTH.value} must be at least 2, and goes with --batched.')
  if _BATCHED.value and (_PROCESSES.value > 1 or os.environ.get('JAX_NUM_PROCESSES', '1') != '1'):
    raise ValueError('--batched trains in one process: leave out --processes, and start no job.')


def _selected(table: Mapping[str, Trial]) -> dict[str, Trial]:
  """Those that --only, or --claims, and --shard leave."""
  # With --seeds a trial NAME becomes NAME-seed-0, NAME-seed-1, ...; NAME alone then means all of
  # them.
  names = lambda name, trial: {name, trial.label.get('trial')}
  known = set().union(*(names(*item) for item in table.items()))
  if _ONLY.value and _CLAIMS.value:
    raise ValueError('--only and --claims both choose trials: leave one of them out.')
  only = set(_ONLY.value) or _of_claims(known)
  unknown = sorted(set(_ONLY.value) - known)
  if unknown:
    raise ValueError(f'--only: unknown trial {unknown[0]!r}. Choices: {", ".join(table)}.')
  trials = {name: trial for name, trial in table.items()
            if not only or names(name, trial) & only}
  for name, trial in trials.items():
    if trial.overridden:
      raise ValueError(f'--set={trial.overridden[0]}: trial {name} is about it. Leave that out, or '
                       'choose other trials with --only.')
  # Last, so that the parts of an array divide the chosen trials evenly among them.
  return select_shard(trials, _SHARD.value)


def _of_claims(known: Set[str | None]) -> set[str]:
  """Names of the trials that --claims needs; all of them are in the table."""
  if not _CLAIMS.value:
    return set()
  try:
    needed = trials_of(_CLAIMS.value)
  except ValueError as error:
    raise ValueError(f'--claims: {error}') from None
  if missing := [name for name in needed if name not in known]:
    raise ValueError(f'--claims={",".join(_CLAIMS.value)} needs {missing[0]}, which '
                     f'{_CONFIG.value} does not have; configs/desk.py has all trials of the paper.')
  return set(needed)


def _budget(trials: Mapping[str, Trial]) -> str | None:
  """The budget of the trials: as given, or as their config file has it."""
  return _BUDGET.value or next((trial.label.get('budget') for trial in trials.values()), None)


def _open_data(trials: Mapping[str, Trial]) -> None:
  """Builds the caches of all trials; those of a config are built once."""
  for name, trial in trials.items():
    # A trial that cannot be expressed at this budget has no config.
    if trial.config:
      data = open_data(from_dict(trial.config).data).summary()
      print(f'{name}: {data["source"]}: {data.get("unique_training_tokens", "endless")} training '
            'tokens', flush=True)


def _begun() -> bool:
  """Joins the job, and settles what signals do; returns whether this process is alone in it."""
  alone = _PROCESSES.value > 1 or init_distributed()
  # Between trials there is nothing to save; training installs a handler that saves.
  if alone:
    for number in stop_signals():
      signal.signal(number, signal.default_int_handler)
  else:
    exit_saved_until_training()  # at once: a shutdown of the job would wait for all processes
  return alone


def _make(root: AnyPath) -> None:
  try:
    root.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise ValueError(f'Cannot use {root} as a workdir: {error}. Choose another '
                     '--workdir.') from None


def _run(trials: Mapping[str, Trial], table: Mapping[str, Trial], root: AnyPath,
         first: bool) -> None:
  """Prints an estimate, runs the trials, and prints how each ended.

  Args:
    trials: those that this sweep runs.
    table: all trials of the config file, for the summary.
    root: the folder of the sweep.
    first: whether this process of the job is the one that prints.
  """
  statuses = {}
  if first:
    # Those that are done or have diverged end at once, and neither take time nor need a line.
    left = {state.name: trials[state.name] for state in read_states(trials, root)
            if state.status not in FINAL_STATUSES}
    if _ESTIMATE.value:
      expected = estimate.estimate_sweep(left, _PROCESSES.value)
      print(estimate.headline(expected, _budget(trials)), file=sys.stderr)
      remaining = RemainingTime(expected.work(), expected.seconds)
    else:
      remaining = RemainingTime(dict.fromkeys(left, 1.0), None)  # as if every trial took as long
    with keep_summary(table, root, remaining, lines=_PROCESSES.value > 1):
      for trial, status in _outcomes(trials, root):
        statuses[trial] = status
        remaining.finish(trial)
        if trial in left:
          print(f'[{len(statuses)}/{len(trials)}] {trial}: {status}  {remaining.as_text()}',
                file=sys.stderr, flush=True)
    for trial in trials:
      print(f'{trial}: {statuses[trial]}')
  else:
    statuses = dict(_outcomes(trials, root))
  if set(statuses.values()) - set(FINAL_STATUSES):  # diverging is a result
    sys.exit(1)


def _outcomes(trials: Mapping[str, Trial], root: AnyPath) -> Iterator[tuple[str, str]]:
  """Runs the trials; yields (name, status) as each ends."""
  if _PROCESSES.value > 1:
    yield from run_in_parallel(trials, root, _PROCESSES.value)
    return
  # After the branch of processes: this asks for the devices, which the workers need.
  compile_cache.enable()
  if _BATCHED.value:
    yield from run_batched(trials, root, _WIDTH.value)
  elif jax.process_count() == 1:
    for name, trial in trials.items():
      yield name, run_trial(trial, root)
  else:
    with StopHandler() as stop:  # a signal to one process between trials stops all of them
      for name, trial in trials.items():
        if stop.poll(wait=True):
          raise SweepStopped
        yield name, run_trial(trial, root)


def start() -> None:
  flags.mark_flag_as_required('config')
  command.run(main)
