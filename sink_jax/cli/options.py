"""What a person can choose for every command: a dataclass each, with the help of the command.

The comment beside an option, or `#:` above it, is the help of that option. Nothing here takes long
to import, so that --help and errors do not wait for jax. The options of a sweep, of analyses and of
benchmarks are in those rooms, where functions take them as well.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

import tyro

from sink_jax.arguments import check_file, check_least
from sink_jax.benchmark.options import COMMANDS as BENCHMARKS
from sink_jax.cli import plan
from sink_jax.cli.model_options import Analyses, Evaluate, Generate, LmEval
from sink_jax.cli.parser import CommandOptions, ConfigOptions
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
class Plan(plan.Options, ConfigOptions):
  __doc__ = plan.Options.__doc__

  config: str | None = None  # the run to plan, as of train; by default configs/base.py.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Build(CommandOptions):
  """Tokenizes and packs a corpus once, into a cache of fixed-length chunks.

      python -m sink_jax data.build --source="Stdlib(split='content')" --context=64
      python -m sink_jax data.build --verify FOLDER

  The same command resumes a build that was stopped. Exit code 42: stopped by SIGTERM, to be started
  again; 1: no space, a damaged file, or wrong options or input.
  """

  #: such as TextFolder(path='texts') or Jsonl(path='pile.jsonl'); another name lists them.
  source: str = "Stdlib(split='content')"
  #: a source of its own for validation; then nothing of --source is held out.
  valid_source: str = ''
  tokenizer: str = 'Bytes()'  # such as HuggingFace(path='tokenizer.json'); another name lists them.
  context: int = 64  # tokens the model sees.
  bos: bool = False  # put BOS before each document.
  eos: bool = True  # put EOS after each document.
  valid_fraction: float = 0.05  # share of the documents held out.
  #: the folder of caches, or gs://bucket/folder, to which a finished one is copied; by default
  #: $SINK_JAX_CACHE, else ~/.cache/sink_jax.
  cache_dir: str = ''
  workers: int = 0  # processes that tokenize; 0: this one, with the threads of the tokenizer.
  #: build nothing, compare the files of this folder of a cache with their digests.
  verify: str | None = None

  def __post_init__(self):
    check_least(self, context=1, workers=0)
    if self.verify:
      self.unused('is not used: --verify builds nothing.', *sorted(self.given - {'verify'}))
    if self.valid_source:
      self.unused('is not used: with --valid_source nothing of --source is held out.',
                  'valid_fraction')
    if not 0 < self.valid_fraction < 1:
      raise ValueError(f'--valid_fraction={self.valid_fraction} must be between 0 and 1.')


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuildTfds(CommandOptions):
  """Prepares a dataset of TensorFlow Datasets as ArrayRecord, without TensorFlow.

      python -m sink_jax data.build_tfds --name=lm1b --data_dir=DIR
      python -m sink_jax data.build_tfds --name=mine --data_dir=DIR --source="Jsonl(path='...')"

  Tfds(name='...', data_dir='DIR') then reads it.
  """

  name: str  # dataset, dataset/config or dataset:version; a name of your own with --source.
  data_dir: str = ''  # where datasets are; by default $TFDS_DATA_DIR, else ~/tensorflow_datasets.
  #: make it of the documents of a source instead, such as Jsonl(path='...'); another name lists
  #: them.
  source: str = ''


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
    'data.build': ('tokenizes and packs a corpus ahead of a run', Build),
    'data.build_tfds': ('prepares a corpus of TensorFlow Datasets without TensorFlow', BuildTfds),
}
