"""A training run as a checkpoint that other programs load."""

from __future__ import annotations

from sink_jax.io.paths import to_local_path
from sink_jax.pretrained.export import export, write_object
from sink_jax.pretrained.load import load_run, run_encoder
from sink_jax.pretrained.tokenizer_files import write_tokenizer
from sink_jax.train.experiment import from_dict
from sink_jax.train.run_dir import read_config


def export_run(workdir, out, *, dtype: str = 'float32') -> list[str]:
  """Writes the run and, where possible, its tokenizer; returns what to tell, in lines.

  Raises:
    ValueError: no run, or one that has no counterpart. CheckpointError: no usable checkpoint.
  """
  out = to_local_path(out, '--out', 'transformers reads no other; copy it from there')
  data = from_dict(read_config(workdir)).data
  run = load_run(workdir)
  hf = export(run, out, dtype=dtype, context=data.context)
  lines = [f'{out / "config.json"}: {hf["model_type"]}, step {run.step}, {dtype}']
  try:
    encoder = run_encoder(workdir, data)
    ids = write_tokenizer(encoder, out, context=data.context, bos=data.bos,
                          first_token=run.first_token)
  except (ValueError, OSError) as error:
    return [*lines, f'No tokenizer written: {" ".join(str(error).split())}']
  write_object(out / 'config.json', hf | ids)
  return [*lines, f'{out / "tokenizer.json"}: {encoder.vocab_size} tokens']
