"""Runs the chosen trials of a config file, or prints their names, costs or progress."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import itertools
import os
import signal
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from sink_jax.arguments import check_known, check_least
from sink_jax.cli.train import training_ends
from sink_jax.io.terminal import say

if TYPE_CHECKING:
  from sink_jax.io.paths import AnyPath
  from sink_jax.sweep.trials import Trial


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """Trains every trial of a config file, each in its own folder of the workdir.

  python -m sink_jax sweep --config=configs/paper.py --budget=desk --workdir=runs/desk

  --config.KEY=VALUE sets a key of all trials. A trial that is done or has diverged is skipped and
  an interrupted one continues; one that fails is recorded and tried again next time, and the rest
  go on. WORKDIR/summary.md says how far all of them are, every half a minute; --status prints it
  for the trials that the options choose.
  """

  config: str  # config file with a table TRIALS.
  workdir: str | None = None  # folder of the sweep; a trial goes to WORKDIR/TRIAL.
  budget: str | None = None  # of the configs of the paper: desk, tenth or full.
  protocol: str | None = None  # of the configs of the paper: paper, or released, as its code has.
  seeds: tuple[int, ...] = ()  # such as 0,1,2: a trial for each.
  only: tuple[str, ...] = ()  # trials to run, such as default or window-*; by default all.
  shard: str = '1/1'  # k/n: the k-th of n parts, for jobs in an array.
  #: trials at a time on this machine, for small ones; 0: one for each core. On TPUs only 1 works.
  processes: int = 1
  done: str | None = None  # folder of stored rows, see merge: trials that it has are left out.
  list: bool = False  # print the names of the trials and stop.
  dry_run: bool = False  # check every trial, print what it costs and stop.
  remote: bool = False  # with --dry_run: other machines run the trials and need their data.
  status: bool = False  # print how far every trial is and stop.

  def __post_init__(self):
    check_least(self, processes=0)
    if self.processes != 1 and os.environ.get('JAX_NUM_PROCESSES', '1') != '1':
      raise ValueError(
        f'--processes={self.processes}: the processes of a job train each trial '
        'together. Leave it out, or start no job.'
      )
    if self.remote and not self.dry_run:
      raise ValueError('--remote is for --dry_run.')
    if not self.workdir and not (self.list or self.dry_run):
      raise ValueError('--workdir is needed: the folder of the trials.')


def main(options: Options, settings: Mapping[str, str]) -> int:
  """Runs the trials, or does what one of the other modes asks for.

  The exit code is 1 where a trial failed; diverging is a result.
  """
  from sink_jax.io.paths import to_path
  from sink_jax.sweep.summary import as_markdown, dry_run
  from sink_jax.train.workdir import FINAL_STATUSES

  with training_ends(options.workdir):
    trials = _trials(options, settings)
    if options.list:
      print('\n'.join(trials))
    elif options.dry_run:
      for trial in trials.values():
        if options.remote and trial.experiment:
          trial.experiment.data.check_remote()
      print(dry_run(trials))
    elif options.status:
      assert options.workdir
      print(as_markdown(trials, to_path(options.workdir), f'Sweep in {options.workdir}'), end='')
    else:
      return 1 if _trained(trials, options) - {*FINAL_STATUSES} else 0
  return 0


def _trials(options: Options, settings: Mapping[str, str]) -> dict[str, Trial]:
  """The trials of the config file that --only and --shard choose."""
  from sink_jax.report.runs import read_runs
  from sink_jax.sweep.stored import not_stored
  from sink_jax.sweep.trials import load_trials, select_shard

  of_file = {name: value for name in ('budget', 'protocol') if (value := getattr(options, name))}
  table = load_trials(options.config, of_file, options.seeds, settings)
  # With --seeds a trial NAME becomes NAME-seed-0, NAME-seed-1, ...; NAME then means all of them.
  names = {name: (trial.label.trial or name, name) for name, trial in table.items()}
  chosen = dict.fromkeys(table if not options.only else ())
  for pattern in options.only:
    found = [
      name
      for name, texts in names.items()
      if any(fnmatch.fnmatchcase(text, pattern) for text in texts)
    ]
    if not found:
      check_known(
        pattern, dict.fromkeys(itertools.chain(*names.values())), f'{options.config}: unknown trial'
      )
    chosen |= dict.fromkeys(found)
  selected = {name: trial for name, trial in table.items() if name in chosen}
  if options.done:
    count, selected = len(selected), not_stored(selected, read_runs(options.done))
    say(f'{count - len(selected)} of {count} trials are stored in {options.done}.')
  # Last, so that the parts of an array divide the chosen trials evenly among them.
  return select_shard(selected, options.shard)


def _trained(trials: Mapping[str, Trial], options: Options) -> set[str]:
  """Runs the trials, and prints how each ended; returns their statuses."""
  import jax

  from sink_jax.devices import cores
  from sink_jax.io.process import exit_saved_until_training, stop_signals
  from sink_jax.io.paths import to_path
  from sink_jax.sweep.pool import run_in_parallel
  from sink_jax.sweep.summary import cost_of, idle_cores, keep_summary, remaining
  from sink_jax.train.multihost import init_distributed, is_first
  from sink_jax.train.workdir import FINAL_STATUSES, read_status

  assert options.workdir
  root = to_path(options.workdir)
  if options.processes != 1:
    jax.config.update('jax_platforms', 'cpu')  # this process leaves the devices to the others
    for number in stop_signals():
      signal.signal(number, signal.default_int_handler)
    at_a_time = min(options.processes or cores(), len(trials))
    outcomes = run_in_parallel(trials, root, max(1, at_a_time))
  else:
    init_distributed()
    exit_saved_until_training()  # again: the distributed runtime takes SIGTERM over
    outcomes = _one_by_one(trials, root)
    if not is_first():
      return {status for _, status in outcomes}
  root.mkdir(parents=True, exist_ok=True)
  # Those that are done or have diverged end at once, and neither take time nor need a line.
  costs = {name: 0.0 for name in trials if read_status(root / name)['status'] not in FINAL_STATUSES}
  for name in costs:
    with contextlib.suppress(ValueError):  # such as a source that is missing: the trial records it
      if experiment := trials[name].experiment:
        costs[name] = cost_of(experiment).flops
  if options.processes == 1 and jax.process_count() == 1 and (remark := idle_cores(trials, costs)):
    say(remark)
  statuses, began = {}, time.monotonic()
  part = '' if options.shard == '1/1' else f'-{options.shard.replace("/", "-of-")}'
  with keep_summary(trials, root / f'summary{part}.md'):
    for trial, status in outcomes:
      statuses[trial] = status
      if trial in costs:
        left = remaining(costs, statuses, time.monotonic() - began)
        say(f'[{len(statuses)}/{len(trials)}] {trial}: {status}  {left}')
  print('\n'.join(f'{trial}: {statuses[trial]}' for trial in trials))
  say(
    f'done: {len(trials)} trials in {root}; next: python -m sink_jax report --runs={root} '
    '--out=report'
  )
  return set(statuses.values())


def _one_by_one(trials: Mapping[str, Trial], root: AnyPath) -> Iterator[tuple[str, str]]:
  """Runs the trials in this process; yields (name, status) as each ends."""
  import jax

  from sink_jax.devices import keep_freed_memory, refuse_silent_cpu
  from sink_jax.io import compile_cache
  from sink_jax.sweep.pool import SweepStopped
  from sink_jax.sweep.runner import run_trial
  from sink_jax.train.multihost import StopHandler

  refuse_silent_cpu()
  compile_cache.enable()
  keep_freed_memory()
  # In a job a signal to one process between trials stops all of them.
  with contextlib.nullcontext() if jax.process_count() == 1 else StopHandler() as stop:
    for name, trial in trials.items():
      if stop and stop.poll(wait=True).stop:
        raise SweepStopped
      yield name, run_trial(trial, root)
