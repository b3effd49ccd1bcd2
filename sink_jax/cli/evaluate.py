"""python -m sink_jax.evaluate --workdir=runs/quickstart/text-softmax
python -m sink_jax.evaluate --checkpoint=Pythia-160M --out=pythia

Probes a model for attention sinks: a run trained here on the probe inputs stored with it, or a
published model on text, random tokens or one repeated token. Writes sink_report.json and
pictures (importance per head, attention maps, norm ratios, and the training curves of a run).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from absl import flags

from sink_jax.cli import command
from sink_jax.data.inputs import BOS, KINDS

_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of a run.')
_CHECKPOINT = flags.DEFINE_string(
    'checkpoint', None, "A published model instead: its folder, a name such as Pythia-160M, or "
    "'owner/name' on the Hugging Face hub.")
_OUT = flags.DEFINE_string(
    'out', None, 'Folder to write to; a published model needs one. Default: WORKDIR/evaluation.')
_SEQUENCES = flags.DEFINE_integer(
    'sequences', None, 'Sequences. Default: all stored with the run; 100 for a published model.')
_LENGTH = flags.DEFINE_integer(
    'length', None, 'Tokens of each. Default: all stored with the run; 64 for a published model.')
_INPUTS = flags.DEFINE_enum('inputs', None, list(KINDS), 'Of a published model. Default: natural.')
_SOURCE = flags.DEFINE_string(
    'source', None, 'Its text: a folder, a file, or a source as in the configs. Default: the '
    'documentation in the Python standard library.')
_BOS = flags.DEFINE_enum(
    'bos', None, list(BOS), 'Whether its inputs begin with BOS: never, as its tokenizer does it '
    '(the default with text), or always.')
_SEED = flags.DEFINE_integer('seed', None, 'Of its random and repeated tokens.')
_FSDP = flags.DEFINE_integer('fsdp', None, 'Devices to split its parameters over. Default: 1.')
_EPSILON = flags.DEFINE_float('epsilon', None,
                              "Threshold of the sink rate. Default: the run's own.")
_DTYPE = flags.DEFINE_enum('dtype', None, ['float32', 'bfloat16'],
                           "Activations of the probe. Default: the run's own.")

command.answer_help(__name__)  # the imports below take seconds

from sink_jax.analyses.options import INPUTS, Options, check_given
from sink_jax.cli.evaluate_models import as_text, evaluate_pretrained, evaluate_run
from sink_jax.io import compile_cache
from sink_jax.io.paths import AnyPath
from sink_jax.train.checkpoint import CheckpointError
from sink_jax.train.loop import quiet_logs


def main(argv: Sequence[str]) -> None:
  """Probes the model, writes the report, and prints its summary."""
  quiet_logs()
  try:
    command.no_arguments(argv)
    result, paths = _evaluate()
  except (ValueError, CheckpointError, OSError) as error:
    command.stop(error)
  print(as_text(result))
  print('\n'.join(str(path) for path in paths))


def _evaluate() -> tuple[dict[str, Any], list[AnyPath]]:
  if (_WORKDIR.value is None) == (_CHECKPOINT.value is None):
    raise ValueError('name a model: either --workdir or --checkpoint.')
  # What a person leaves out has to stay out, so that `check_given` sees the options that were
  # given.
  given: dict[str, Any] = {flag.name: flag.value for flag in (_INPUTS, _SOURCE, _BOS, _SEED, _FSDP)
           if flag.value is not None}
  if _WORKDIR.value is not None:
    if given:
      raise ValueError(f'--{next(iter(given))} is for published models: a run is probed on the '
                       'inputs stored with it. Other inputs: python -m sink_jax.analyses.')
    compile_cache.enable()
    return evaluate_run(_WORKDIR.value, _OUT.value, sequences=_SEQUENCES.value,
                        length=_LENGTH.value, epsilon=_EPSILON.value, dtype=_DTYPE.value)
  if not _OUT.value:
    raise ValueError('--out is needed: the folder to write to.')
  for flag in (_SEQUENCES, _LENGTH, _DTYPE):
    if flag.value is not None:
      given[flag.name] = flag.value
  if _EPSILON.value is not None:
    given['epsilons'] = (_EPSILON.value,)
  check_given(given, (*INPUTS, 'epsilons', 'dtype', 'fsdp'), 'a probe of a published model',
              given.get('inputs', 'natural'))
  compile_cache.enable()
  assert _CHECKPOINT.value is not None  # one of the two models is given
  return evaluate_pretrained(_CHECKPOINT.value, _OUT.value, Options(**given))


def start() -> None:
  command.run(main)
