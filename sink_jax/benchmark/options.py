"""The options of every benchmark, with the help of each in its comment.

A size that is None, or an empty tuple, has one default on a GPU or TPU and another on a CPU, which
`commands` fills in. The name `none` alone stands for no name.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import tyro

from sink_jax.arguments import check_file, check_least

TOLERANCE = 0.005
# Fields of the classes below that count something.
_COUNTS = ('shape', 'length', 'heads', 'head_dim', 'keys', 'tokens', 'd_model', 'vocab', 'batch',
           'steps', 'unroll', 'trials', 'head_dims', 'lengths')
Dtype = Literal['bfloat16', 'float32']


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
  """What every command that measures has."""

  seed: int = 0  # of the random inputs.
  limit: float | None = None  # seconds after which nothing new begins.

  def __post_init__(self):
    if not 0 <= self.seed < 2**31:
      raise ValueError(f'--seed={self.seed} is not between 0 and 2**31 - 1.')
    for name in ('limit', 'seconds'):
      value = getattr(self, name, None)
      if value is not None and not value > 0:
        raise ValueError(f'--{name}={value:g} is not greater than 0.')
    check_least(self, **{name: 1 for name in _COUNTS if hasattr(self, name)})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved(Measured):
  """What a command that prints one table has."""

  json: str | None = None  # a file for the result.

  def __post_init__(self):
    super().__post_init__()
    check_file(self, 'json')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timed(Saved):
  """What a command that times functions has."""

  seconds: float = 0.5  # to spend on each number.
  dtype: Dtype | None = None  # of the inputs; by default bfloat16 on a GPU or TPU, else float32.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention(Timed):
  """Every variant of attention, forward and backward."""

  #: B,H,T,Dh of each; by default 8,8,2048,64 8,8,2048,96 8,16,2048,128 1,8,32768,128 on a GPU or
  #: TPU, else 1,8,2048,96.
  shape: tuple[tuple[int, int, int, int], ...] = ()
  variants: tuple[str, ...] = ('all',)  # such as softmax,sigmoid; another name lists them.
  rivals: tuple[str, ...] = ('all',)  # none, or names such as cudnn,torch-flash.
  #: of this package: pallas, linear, chunked; by default all, on a CPU not pallas.
  implementations: tuple[str, ...] = ()
  sweep: bool = False  # instead: time block sizes of the GPU kernels at these shapes.

  def __post_init__(self):
    super().__post_init__()
    if self.sweep and (self.rivals != ('all',) or self.implementations or self.dtype):
      raise ValueError('--rivals, --implementations and --dtype are for the comparison; --sweep '
                       'times block sizes of the kernels of this package in bfloat16.')
    if self.sweep and (len(self.variants) != 1 or self.variants == ('none',)):
      raise ValueError('--sweep takes one variant: --variants=softmax.')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Importance(Timed):
  """Importance of every key in memory linear in T."""

  #: of each; by default 4096,16384,65536,131072, on a CPU 2048,4096,8192,16384.
  length: tuple[int, ...] = ()
  heads: int | None = None  # by default 8, on a CPU 1.
  head_dim: tuple[int, ...] = ()  # by default 128,64, on a CPU 64.
  keys: int = 4  # of the shortcut.
  variant: str = 'softmax'  # another name lists them.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss(Timed):
  """Cross-entropy with gradients, in chunks and with all logits."""

  tokens: tuple[int, int] | None = None  # B,T; by default 8,2048, on a CPU 2,256.
  d_model: int | None = None  # by default 768, on a CPU 256.
  vocab: int | None = None  # by default 50432, on a CPU 8192.


@dataclasses.dataclass(frozen=True)
class Components:
  """Config strings of the attention, such as Sigmoid()."""

  similarity: str | None = None
  normalizer: str | None = None
  feature_map: str | None = None
  position: str | None = None
  mask: str | None = None
  kv_bias: str | None = None
  qk_norm: str | None = None
  temperature: str | None = None
  value: str | None = None
  head: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainStep(Saved):
  """Training steps of a model with AdamW: tokens/s and MFU."""

  size: str | None = None  # tiny, 60m, 1b, 7b, 13b; by default 60m, on a CPU tiny.
  batch: tuple[int, ...] = ()  # sequences of each; by default 8,16,32, on a CPU 4.
  length: int | None = None  # by default 2048, on a CPU 256.
  vocab: int | None = None  # by default 50432, on a CPU 512.
  steps: int = 10  # to time.
  dtype: Dtype | None = None  # of activations.
  #: of attention; "default" is what this machine chooses by itself.
  implementation: tuple[str, ...] = ('default',)
  #: what is recomputed when backpropagating; by default as a run chooses.
  remat: Literal['none', 'save_matmuls', 'save_attention', 'blocks'] | None = None
  #: blocks that are compiled one after another; by default as a run chooses.
  unroll: int | None = None
  attention: Components = Components()  # config strings of its parts, such as Sigmoid().


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group(Saved):
  """Steps of several small trials, one after the other and as a group."""

  trials: tuple[int, ...] = (6,)  # widths of groups.
  size: str = 'tiny'  # tiny, 60m, 1b, 7b, 13b.
  batch: int = 32  # sequences of a trial.
  length: int = 64  # tokens of each.
  vocab: int = 258  # of the model.
  steps: int = 10  # of a timing, at most 50.
  dtype: Dtype | None = None  # of activations.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trials(Saved):
  """Steps of the trials of a config file, in turns with those of softmax."""

  config: str = 'configs/remedies.py'  # a file with trials TASK-VARIANT, from where it is called.
  #: trials, or first words of several: trigger,desk-sigmoid; by default all.
  only: tuple[str, ...] = ()
  seconds: float = 0.3  # of every timing, nine of which make a number.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tolerated(Measured):
  """What commands that check correctness have."""

  tolerance: float = TOLERANCE  # allowed beside twice the error of the definition in bfloat16.

  def __post_init__(self):
    super().__post_init__()
    # -1 lets every case fail, to see that a failure is noticed.
    if not -1 <= self.tolerance < math.inf:
      raise ValueError(f'--tolerance={self.tolerance:g} is not a number from 0 on.')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Correctness(Tolerated, Saved):
  """Every variant of the paper against its T x T definition."""

  variants: tuple[str, ...] = ('all',)  # names as in the table.
  head_dims: tuple[int, ...] = ()  # by default 64,96,128, on a CPU 16.
  lengths: tuple[int, ...] = ()  # by default 1024,1023, on a CPU 32,31.
  share: str = '0/1'  # N/M: run every M-th problem only, from the N-th.

  def __post_init__(self):
    super().__post_init__()
    self.part  # refuses a share that is none

  @property
  def part(self) -> tuple[int, int]:
    """(N, M) of the share."""
    number, _, count = self.share.partition('/')
    if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
      raise ValueError(f'--share={self.share} is not as 0/4 to 3/4.')
    return int(number), int(count)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check(Tolerated):
  """All of it on one GPU within eight minutes; launch/gpu_hour.sh runs it."""

  out: tyro.conf.Positional[str] = 'results/gpu_check'  # folder of report.json and report.md.
  limit: float | None = None  # seconds for all of it; by default 480.
  smoke: bool = False  # tiny shapes: does it run to the end?
  #: correctness, train_60m, saved_60m, attention, train_1b, loss, importance, sweep; with --smoke
  #: neither saved_60m nor train_1b.
  parts: tuple[str, ...] = ('all',)

  def __post_init__(self):
    super().__post_init__()
    if not {'all', 'correctness'} & set(self.parts) and self.tolerance != TOLERANCE:
      raise ValueError('--tolerance is for the part correctness, which is not among --parts.')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Show:
  """The tables of JSON files again."""

  files: tyro.conf.Positional[tuple[str, ...]]  # that the other commands wrote.


COMMANDS = {'attention': Attention, 'importance': Importance, 'loss': Loss,
            'train_step': TrainStep, 'group': Group, 'trials': Trials, 'correctness': Correctness,
            'check': Check, 'show': Show}
