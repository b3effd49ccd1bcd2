"""What a person chooses for a sweep, with the help of each option in its comment."""

from __future__ import annotations

import dataclasses
import os

import tyro

from sink_jax.arguments import check_least

_MODES = ('list', 'dry_run', 'status', 'data_only')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """Trains every trial of a config file, each in its own folder of the workdir.

      python -m sink_jax sweep --config=configs/paper.py --budget=smoke --workdir=runs/smoke

  A trial that is done or has diverged is skipped and an interrupted one continues; one that fails
  is recorded and tried again next time, and the rest go on. WORKDIR/summary.md says how far
  all of them are, every half a minute; --status prints it for the trials that the options choose.
  """

  config: str  # config file with a table TRIALS.
  workdir: str | None = None  # folder of the sweep; a trial goes to WORKDIR/TRIAL.
  budget: str | None = None  # of the configs of the paper: smoke, desk, tenth, quarter or full.
  #: of the configs of the paper: paper, or released, as its code has it.
  protocol: str | None = None
  seeds: tuple[int, ...] = ()  # such as 0,1,2: a trial for each.
  #: a config key for all trials, such as --set=data.max_tokens=100000, which is the same as
  #: --config.data.max_tokens=100000.
  set: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
  only: tuple[str, ...] = ()  # names of the trials to run; by default all.
  #: claims of the paper, such as emergence,key-biases: the trials that these need.
  claims: tuple[str, ...] = ()
  #: a report.json of the paper: two more seeds of the trials whose claims it left undecided, once.
  undecided: str | None = None
  shard: str = '1/1'  # k/n: the k-th of n parts, for jobs in an array.
  processes: int = 1  # trials at a time on this machine, for small ones. On TPUs only 1 works.
  #: measure these devices first, and say how long it will be. --noestimate saves ten to twenty
  #: seconds on a GPU.
  estimate: bool = True
  batched: bool = False  # train trials that share a program together, for small ones on one device.
  #: with --batched: trials that are trained together, at most, for want of memory.
  width: int | None = None
  list: bool = False  # print the names of the trials and stop.
  dry_run: bool = False  # print what every trial costs and stop.
  status: bool = False  # print how far every trial is and stop.
  data_only: bool = False  # tokenize and pack the text of the trials where it is not yet, and stop.

  #: 'KEY=VALUE' of each --config.KEY=VALUE of the command line.
  config_words: tyro.conf.Suppress[tuple[str, ...]] = ()

  def __post_init__(self):
    # Each mode is added to the command that runs the trials, whose other options may stay.
    first, second, *_ = [*(mode for mode in _MODES if getattr(self, mode)), None, None]
    if second:
      raise ValueError(f'--{first} and --{second} exclude each other.')
    # A seed is in the name of a trial and of its folder, so each can be there once.
    if any(not 0 <= seed < 2**31 or self.seeds.count(seed) > 1 for seed in self.seeds):
      raise ValueError(f'--seeds={",".join(map(str, self.seeds))}: write different numbers from 0 '
                       'to 2**31 - 1.')
    check_least(self, processes=1, width=2)
    job = os.environ.get('JAX_NUM_PROCESSES', '1') != '1'
    if self.processes > 1 and job:
      raise ValueError(f'--processes={self.processes}: the processes of a job train a trial '
                       'together, one after the other. Leave it out, or start no job.')
    if self.width is not None and not self.batched:
      raise ValueError(f'--width={self.width} goes with --batched.')
    if self.batched and (self.processes > 1 or job):
      raise ValueError('--batched trains in one process: leave out --processes, and start no job.')
    if self.undecided and (self.seeds or self.only or self.claims):
      raise ValueError('--undecided names trials and seeds itself: leave out --seeds, --only and '
                       '--claims.')
    if self.only and self.claims:
      raise ValueError('--only and --claims both choose trials: leave one of them out.')
    if not self.workdir and not any(getattr(self, mode) for mode in _MODES if mode != 'status'):
      needs = 'with --status' if self.status else 'to run trials'
      raise ValueError(f'--workdir is needed {needs}.')
