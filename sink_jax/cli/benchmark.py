"""`benchmark`: times kernels and training steps on this measure."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
from pathlib import Path
from typing import Annotated, Literal

import tyro

from sink_jax.arguments import check_least

# PyTorch may have to share the device with JAX, which would take most of its memory at once.
os.environ.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timed:
  """Options of every benchmark. A size that is not given depends on the device."""

  seconds: float = 0.5  # to spend on each number.
  #: by default bfloat16 on a GPU or TPU, else float32.
  dtype: Literal['bfloat16', 'float32'] | None = None
  json: str | None = None  # a file for all numbers.

  def __post_init__(self):
    if self.json and os.path.isdir(self.json):
      raise ValueError(f'--json={self.json} is a folder: name a file.')
    sizes = 'shape', 'length', 'vocab', 'batch'
    check_least(self, **{name: 1 for name in vars(self) if name in sizes})


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimedAttention(Timed):
  """Every variant of attention, forward and backward, compared with other libraries."""

  #: B H T Dh of each; by default 8 8 2048 64 8 8 2048 96 8 16 2048 128 1 8 32768 128 on a GPU or
  #: TPU, else 1 8 2048 96.
  shape: tuple[tuple[int, int, int, int], ...] = ()
  variants: tuple[str, ...] = ()  # such as softmax sigmoid; by default all.
  #: such as pallas chunked cudnn torch-flash xla; by default all that run here.
  implementations: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimedImportance(Timed):
  """Importance of every key in memory linear in T."""

  length: tuple[int, ...] = ()  # by default 4096 16384 65536 131072, on a CPU 2048 4096 8192 16384.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss(Timed):
  """Cross-entropy with gradients, in chunks and with all logits."""

  #: B T D V; by default 8 2048 768 50432, on a CPU 2 256 256 8192.
  shape: tuple[int, int, int, int] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainStep(Timed):
  """Training steps of a model with AdamW: tokens/s and the share of this machine's rate."""

  size: str | None = None  # tiny, 60m, 1b, 7b, 13b; by default 60m, on a CPU tiny.
  batch: tuple[int, ...] = ()  # sequences of each; by default 8 16 32, on a CPU 4.
  length: int | None = None  # by default 2048, on a CPU 256.
  vocab: int | None = None  # by default 50432, on a CPU 512.
  #: of attention; the first is what others are compared with.
  implementation: tuple[str, ...] = ('default',)
  #: what backpropagation recomputes.
  remat: Literal['none', 'save_matmuls', 'save_attention', 'blocks'] = 'none'


Options = (
  Annotated[TimedAttention, tyro.conf.subcommand('attention')]
  | Annotated[TimedImportance, tyro.conf.subcommand('importance')]
  | Loss
  | TrainStep
)


def main(options: Options) -> None:
  """Runs one benchmark, prints its table and writes its JSON."""
  from sink_jax.benchmark import measure
  from sink_jax.devices import keep_freed_memory, refuse_silent_cpu
  from sink_jax.io import compile_cache
  from sink_jax.io.files import write_atomically

  refuse_silent_cpu()
  compile_cache.enable()
  keep_freed_memory()
  names = {
    TimedAttention: 'attention',
    TimedImportance: 'importance',
    Loss: 'loss',
    TrainStep: 'train_step',
  }
  name = names[type(options)]
  settings = {key: value for key, value in vars(options).items() if key != 'json'}
  settings['dtype'] = options.dtype or ('bfloat16' if measure.accelerated() else 'float32')
  module = importlib.import_module(f'sink_jax.benchmark.{name}')
  rates = measure.measured_rates(settings['dtype'], options.seconds)
  measured = module.run(rates, **settings)
  where = measure.describe(rates, settings['dtype'])
  if options.json:
    Path(options.json).parent.mkdir(parents=True, exist_ok=True)
    content = {'machine': where, 'options': {'benchmark': name} | settings, 'rows': measured}
    write_atomically(Path(options.json), json.dumps(content, indent=1, allow_nan=False))
  measure.print_table(module.COLUMNS, measured, where, module.NOTES)
