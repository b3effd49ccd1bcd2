"""What a person can choose for every command: a dataclass each, with the help of the command.

The comment beside an option, or `#:` above it, is the help of that option. Nothing here takes long
to import, so that --help and errors do not wait for jax. The options of a sweep, of analyses and of
benchmarks are in those rooms, where functions take them as well.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from typing import Annotated, Literal

import tyro

from sink_jax.arguments import check_file, check_least
from sink_jax.benchmark.options import COMMANDS as BENCHMARKS
from sink_jax.cli import data_build
from sink_jax.cli.model_options import Analyses, Evaluate, Generate, LmEval
from sink_jax.cli.parser import CommandOptions, ConfigOptions
from sink_jax.plan.chips import SHARE
from sink_jax.sweep.options import Options as Sweep


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train(ConfigOptions):
  """Trains one model; the folder of a run that was stopped is resumed.

      python -m sink_jax train --config=configs/quickstart.py:text-softmax --workdir=runs/first

  Every key of the config can be set: --config.steps=100 --config.attention.similarity="Sigmoid()".
  Exit codes: 0 done; 42 stopped and saved, the same command resumes; 1 an error that starting again
  does not remove; anything from 127 on: died, the same command resumes.
  """

  config: str  # Config file, such as configs/base.py or configs/quickstart.py:text-sigmoid.
  workdir: str  # Folder of the run. A folder with the same config is resumed.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report(CommandOptions):
  """Compares runs, or puts them beside the paper.

      python -m sink_jax report --runs=runs --analyses=analyses --out=paper

  Runs of the paper's trials, and what `python -m sink_jax analyses` wrote about published models,
  give a report of the whole paper: its claims, tables and figures beside the numbers of the runs.
  Other runs give a comparison of all below the folder, side by side. Either writes index.html
  (self-contained), report.md, report.json and pictures, and prints its text.
  """

  runs: str | None = None  # folder of runs, such as the --workdir of a sweep.
  #: folders, and files NAME.json, that python -m sink_jax analyses wrote: for the paper's rows and
  #: figures of open models.
  analyses: tuple[str, ...] = ()
  out: str  # folder to write to.
  #: in a comparison: a folder that python -m sink_jax evaluate wrote, with which the page begins.
  evaluation: str | None = None
  #: in a comparison: load the checkpoints and draw maps; it does by default.
  maps: bool | None = None
  #: a report of the paper, a comparison of runs, what the search of configs/baseline.py found, the
  #: fine-tuning of configs/sft.py (Figure 30), the remedies of configs/remedies.py beside softmax,
  #: or the grafts of configs/graft.py beside training on and from scratch. By default that of the
  #: paper where a run is one of its trials at a budget or of the synthetic axis, there is no run
  #: yet, or --analyses is given.
  kind: Literal['paper', 'runs', 'baseline', 'fine-tuning', 'leaderboard', 'graft'] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export(CommandOptions):
  """Writes a trained run as a checkpoint that transformers loads.

      python -m sink_jax export --workdir=runs/quickstart/text-softmax --out=exported

  It has config.json, model.safetensors, and the tokenizer where that can be written. The class is
  the first that computes what the run does; the reason is printed, and --as names another. A run
  that has none is written by --as=custom, with PyTorch code that transformers loads with
  trust_remote_code=True; it is slow.
  """

  workdir: str  # Folder of the run.
  out: str  # Folder to write to.
  dtype: Literal['float32', 'bfloat16'] = 'float32'  # Of the weights.
  #: The class that it must be: llama, mistral, qwen3, granite_swa, qwen3_next, or custom, PyTorch
  #: code of its own; by default the first of transformers that can hold the run.
  target: Annotated[str | None, tyro.conf.arg(name='as')] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(ConfigOptions):
  """Predicts the memory and the speed of a run on TPUs; none is needed.

      python -m sink_jax plan --size=1b --topology=v5e:16x16 --fsdp=256 --remat=blocks

  The run is that of --config, or of configs/base.py, with the options in place of its values. The
  exit code is 1 where it does not fit the chips.
  """

  #: the run to plan, as of train: --config=configs/x.py:trial --config.KEY=VALUE. By default
  #: configs/base.py.
  config: str | None = None
  topology: str | None = None  # slice of TPUs, such as v5e:16x16, v5p:4x4x4, v6e:4x4 or v7x:4x4x4.
  #: of the model: tiny, 60m, 1b, 7b, 13b. It takes the place of a file's layers, heads and widths.
  size: str | None = None
  vocab: int | None = None  # of the model; by default the config's, or 50432.
  context: int | None = None  # tokens of a sequence.
  batch_size: int | None = None  # sequences of a step.
  microbatches: int | None = None  # parts of a batch, one after another.
  #: what the backward pass recomputes: none, save_matmuls, save_attention or blocks; by default the
  #: config's, or what a run chooses for these chips.
  remat: str | None = None
  #: blocks that are compiled one after another; by default the config's, or what a run chooses.
  unroll: int | None = None
  data: int | None = None  # devices that split the batch; -1: all that remain.
  fsdp: int | None = None  # devices that also split the parameters.
  tensor: int | None = None  # devices that split heads and hidden units.
  share: float = SHARE  # of the peak that matrix products reach: an assumption.
  #: measured seconds of a device alone with its part of a step, in place of the share of the peak.
  step_seconds: float | None = None
  json: str | None = None  # file for all of it.
  #: compile some meshes and remat policies, a minute or more each, and rank those that fit.
  search: bool = False
  #: instead: a folder for the plans of the sizes 60m to 13b on common slices, such as
  #: results/plan. An hour on two cores.
  table: str | None = None
  #: instead: a folder for the estimate from 8 to 4,096 chips, such as results/scaling.
  scaling: str | None = None

  def __post_init__(self):
    check_least(self, vocab=1, context=1, batch_size=1, microbatches=1, unroll=1, share=0.01)
    if self.step_seconds is not None and not 0 < self.step_seconds < math.inf:
      raise ValueError(f'--step_seconds={self.step_seconds:g} is no time: write seconds, such as '
                       '0.2.')
    if self.share > 1:
      raise ValueError(f'--share={self.share} must be at most 1.')
    for kept in ('table', 'scaling'):
      if getattr(self, kept) is not None:
        self.unused(f'is for the plan of one run: --{kept} takes no other option.',
                    *sorted(self.given - {kept}))
    if self.table or self.scaling:
      return
    if self.step_seconds is not None:
      self.unused('is not used where --step_seconds is given.', 'share')
      if self.search:
        raise ValueError('--step_seconds is of one run, and --search plans several: leave one of '
                         'them out.')
    if not self.topology:
      raise ValueError('--topology is missing, such as --topology=v5e:16x16.')
    # Before the minutes of compiling, after which the result would be lost.
    check_file(self, 'json')
    if self.json and not pathlib.Path(self.json).parent.is_dir():
      raise ValueError(f'--json={self.json}: its folder does not exist.')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Build(ConfigOptions, data_build.Options):
  __doc__ = data_build.Options.__doc__

  config: str | None = None  # Config file, such as configs/paper.py:default; by default configs/base.py.


ABOUT_BENCHMARKS = """\
Times attention, importance, the loss or a training step on this machine, beside baselines.

    python -m sink_jax benchmark attention --json=attention.json

Prints one table; the file of --json has every number.
"""

# In the order of a user's day: what each does, in a few words, and its options; `benchmark` is
# several. A command NAME is carried out by `main` of the module of that name, dots as underscores.
COMMANDS = {
    'train': ('trains one model', Train),
    'evaluate': ('probes a run or a published model for attention sinks', Evaluate),
    'generate': ('continues a text', Generate),
    'sweep': ('trains every trial of a config file', Sweep),
    'report': ('compares runs, or puts them beside the paper', Report),
    'analyses': ('carries out an analysis of the paper on models', Analyses),
    'lm_eval': ('scores a model on tasks of lm-evaluation-harness', LmEval),
    'export': ('writes a run as a checkpoint that transformers loads', Export),
    'plan': ('predicts the memory and the speed of a run on TPUs', Plan),
    'benchmark': ('times kernels and training steps on this machine', BENCHMARKS),
    'data_build': ('tokenizes and packs the text of a config ahead of a run', Build),
}
