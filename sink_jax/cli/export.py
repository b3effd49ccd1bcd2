"""Writes a run as a checkpoint that transformers loads."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

import tyro


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """Writes a trained run as a checkpoint that transformers loads.

      python -m sink_jax export --workdir=runs/quickstart/text-softmax --out=exported

  The class is the first that computes what the run does; --as names another. A run that no class
  can express is refused, with the name of the missing part. The tokenizer is written if possible.
  """

  workdir: str  # Folder of the run.
  out: str  # Folder to write to.
  plugins: str = ''  # Python files with components of the run, which are imported.
  dtype: Literal['float32', 'bfloat16'] = 'float32'  # Of the weights.
  #: The class: llama, mistral, qwen3 or granite_swa; by default the first.
  target: Annotated[str | None, tyro.conf.arg(name='as')] = None


def main(options: Options) -> None:
  """Exports the run, and prints what was written."""
  from sink_jax.train.export import export_workdir

  print(
    *export_workdir(
      options.workdir,
      options.out,
      dtype=options.dtype,
      target=options.target,
      plugins=options.plugins,
    ),
    sep='\n',
  )
