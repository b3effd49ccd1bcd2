"""Writes a trained run as a checkpoint that transformers loads.

    python -m sink_jax export --workdir=runs/quickstart/text-softmax --out=exported

It has config.json, model.safetensors, and the tokenizer where that can be written. The class is the
first that computes what the run does; the reason is printed, and --as names another.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

import tyro

from sink_jax.cli import command, parser


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(parser.CommandOptions):
  """The options of an export."""

  workdir: str
  """Folder of the run."""
  out: str
  """Folder to write to."""
  dtype: Literal['float32', 'bfloat16'] = 'float32'
  """Of the weights."""
  target: Annotated[str | None, tyro.conf.arg(name='as')] = None
  """The class that it must be, such as qwen3; by default the first that can hold the run."""


def main(options: Options) -> None:
  """Exports the run, and prints what was written and why."""
  from sink_jax.pretrained.export import export_workdir

  command.quiet_logs()
  for line in export_workdir(options.workdir, options.out, dtype=options.dtype,
                             target=options.target):
    print(line)
