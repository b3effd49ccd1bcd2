"""A run as a checkpoint that transformers loads, with its tokenizer."""

from __future__ import annotations

import os

from sink_jax.data.tokenizer import TextTokenizer
from sink_jax.io.paths import expanded, to_path
from sink_jax.pretrained.export import export_checkpoint, write_tokenizer
from sink_jax.pretrained.files import write_json
from sink_jax.train.load import load_run
from sink_jax.train.workdir import read_experiment


def export_workdir(
  workdir: str | os.PathLike,
  out: str | os.PathLike,
  *,
  dtype: str = 'float32',
  target: str | None = None,
  plugins: str = '',
) -> list[str]:
  """Writes the model of a run and, where possible, its tokenizer; returns lines to print.

  Args:
    dtype, target: see `export_checkpoint`. plugins: see `load_run`.

  Raises:
    ValueError: there is no run, or it has no counterpart in transformers.
    CheckpointError: it has no usable checkpoint.
  """
  if '://' in os.fspath(out):
    raise ValueError(f'--out={out} must be a folder on a disk: transformers reads no other.')
  folder = expanded(out).absolute()
  run = load_run(workdir, plugins=plugins)
  context = read_experiment(to_path(workdir)).data.context
  hf = export_checkpoint(run, folder, dtype=dtype, context=context, target=target)
  line = f'{folder / "config.json"}: {hf["architectures"][0]}, step {run.step}, {dtype}'
  try:
    assert isinstance(tokenizer := run.tokenizer, TextTokenizer)
    write_json(folder / 'config.json', hf | write_tokenizer(tokenizer, folder, context))
  except (ValueError, OSError) as error:  # the weights are of use without it
    return [line, f'No tokenizer written: {" ".join(str(error).split())}']
  return [line, f'{folder / "tokenizer.json"}: {tokenizer.vocab_size} tokens']
