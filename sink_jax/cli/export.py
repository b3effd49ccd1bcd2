"""python -m sink_jax.export --workdir=runs/quickstart/text-softmax --out=exported

Writes a trained run as a checkpoint that transformers loads: config.json, model.safetensors, and
its tokenizer where that can be written. The class is the first that computes what the run does;
the reason is printed, and --as names another. A run that has none is written by --as=custom, with
PyTorch code that transformers loads with trust_remote_code=True; it is slow.
"""

from __future__ import annotations

from collections.abc import Sequence

from absl import flags

from sink_jax.cli import command

_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of the run.')
_OUT = flags.DEFINE_string('out', None, 'Folder to write to.')
_DTYPE = flags.DEFINE_enum('dtype', 'float32', ['float32', 'bfloat16'], 'Of the weights.')
_AS = flags.DEFINE_string(
    'as', None, 'The class that it must be: llama, mistral, qwen3, granite_swa, qwen3_next, or '
    'custom: PyTorch code of its own. By default the first of transformers that can hold the run.')

command.answer_help(__name__)  # the imports below take seconds

from sink_jax.pretrained.export import export_workdir
from sink_jax.train.checkpoint import CheckpointError
from sink_jax.train.loop import quiet_logs


def main(argv: Sequence[str]) -> None:
  """Exports the run; a reason instead of a traceback where that cannot be done."""
  quiet_logs()
  try:
    command.no_arguments(argv)
    assert _WORKDIR.value is not None and _OUT.value is not None  # absl requires both
    for line in export_workdir(_WORKDIR.value, _OUT.value, dtype=_DTYPE.value,
                               target=_AS.value):
      print(line)
  except (ValueError, CheckpointError, OSError) as error:
    command.stop(error)


def start() -> None:
  # In `start`: another program that imports this module does not have to give these flags.
  flags.mark_flags_as_required(['workdir', 'out'])
  command.run(main)
