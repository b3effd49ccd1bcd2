"""python -m sink_jax.export --workdir=runs/quickstart/text-softmax --out=exported

Writes a trained run as a checkpoint that transformers loads (LLaMA, or Mistral with a
window): config.json, model.safetensors, and its tokenizer where that can be written.
"""

from __future__ import annotations


from absl import flags

from sink_jax import command

_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of the run.')
_OUT = flags.DEFINE_string('out', None, 'Folder to write to.')
_DTYPE = flags.DEFINE_enum('dtype', 'float32', ['float32', 'bfloat16'], 'Of the weights.')

command.answer_help(__name__)  # the imports below take seconds

from sink_jax.load import load_run, run_encoder
from sink_jax.pretrained.export import export, write_object
from sink_jax.pretrained.tokenizer_files import write_tokenizer
from sink_jax.train.checkpoint import CheckpointError
from sink_jax.train.experiment import from_dict
from sink_jax.train.loop import quiet_logs
from sink_jax.train.storage import local_folder
from sink_jax.train.workdir import read_config


def main(argv):
  """Exports the run; a reason instead of a traceback where that cannot be done."""
  quiet_logs()
  try:
    command.no_arguments(argv)
    for line in export_run(_WORKDIR.value, _OUT.value, dtype=_DTYPE.value):
      print(line)
  except (ValueError, CheckpointError, OSError) as error:
    command.stop(error)


def export_run(workdir, out, *, dtype: str = 'float32') -> list[str]:
  """Writes the run and, where possible, its tokenizer; returns what to tell, in lines.

  Raises:
    ValueError: no run, or one that has no counterpart. CheckpointError: no usable checkpoint.
  """
  out = local_folder(out, '--out', 'transformers reads no other; copy it from there')
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


if __name__ == '__main__':
  flags.mark_flags_as_required(['workdir', 'out'])
  command.run(main)
