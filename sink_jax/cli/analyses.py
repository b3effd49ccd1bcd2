"""python -m sink_jax.analyses lengths --checkpoint=Pythia-14M,GPT2 --out=analyses

Carries out one analysis of published models, or of runs trained with sink_jax, and writes NAME.json
and NAME.png. A model that fails does not stop the others: NAME.json lists it as 'failed', and the
exit status is 1. `python -m sink_jax.analyses --list` names all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from absl import flags

from sink_jax.cli import command

_LIST = flags.DEFINE_bool('list', False, 'Print the names of the analyses and stop.')
_CHECKPOINT = flags.DEFINE_list(
    'checkpoint', [], "Published models, separated by commas: folders, names such as Pythia-14M, "
    "or 'owner/name' on the Hugging Face hub.")
_WORKDIR = flags.DEFINE_list('workdir', [], 'Runs trained with sink_jax, separated by commas.')
_OUT = flags.DEFINE_string('out', None, 'Folder to write to.')
_INPUTS = flags.DEFINE_string('inputs', None, 'natural, random or repeat.')
_SOURCE = flags.DEFINE_string(
    'source', None, "Of natural inputs: a folder of .txt files, a .jsonl file, or a source such as "
    "Jsonl(path='pile.jsonl', domain_field='meta.pile_set_name'). Default: the documentation in "
    "the Python standard library.")
_SEQUENCES = flags.DEFINE_integer('sequences', None, 'How many; 100 unless --list says otherwise.')
_LENGTH = flags.DEFINE_integer('length', None, 'Tokens of each; 64 unless --list says otherwise.')
_LENGTHS = flags.DEFINE_list('lengths', None, 'Of a sweep over lengths, such as 16,64,256.')
_EPSILONS = flags.DEFINE_list('epsilons', None, 'Thresholds of the sink rate, such as 0.2,0.3.')
_BOS = flags.DEFINE_string(
    'bos', None, 'none, tokenizer (what the tokenizer itself adds; the default with text) or '
    'force (one BOS, whatever it does).')
_SEED = flags.DEFINE_integer('seed', None, 'Of tokens drawn at random.')
_LAYERS = flags.DEFINE_list('layers', None, 'Blocks to look at, from 1, such as 1,3.')
_HEADS = flags.DEFINE_list('heads', None, 'Heads to look at, from 1.')
_POSITIONS = flags.DEFINE_list('positions', None, 'Positions t to replace or swap, from 2.')
_DTYPE = flags.DEFINE_string('dtype', None, 'Of parameters and activations: float32, bfloat16.')
_BATCH_SIZE = flags.DEFINE_integer('batch_size', None, 'Sequences at a time. Default: what fits.')
_CACHE_SIZE = flags.DEFINE_integer('cache_size', None, 'Tokens that a cache keeps.')
_SINKS = flags.DEFINE_integer('sinks', None, 'How many of them are the first tokens of the text.')
_FSDP = flags.DEFINE_integer('fsdp', None, 'Devices to split the parameters over. Default: 1.')
_HELLASWAG = flags.DEFINE_string('hellaswag', None, 'A .jsonl with it. Default: download.')
_LIMIT = flags.DEFINE_integer('limit', None, 'Questions of HellaSwag to ask. Default: all.')

command.answer_help(__name__)  # the imports below take seconds

import jax

from sink_jax.analyses import registry, runner
from sink_jax.cli.analyse_models import analyse_models
from sink_jax.io import compile_cache
from sink_jax.train.checkpoint import CheckpointError
from sink_jax.train.loop import quiet_logs


def main(argv: Sequence[str]) -> None:
  """Carries out the analysis; one line instead of a traceback for what cannot be done."""
  quiet_logs()
  try:
    if _LIST.value:
      print(registry.as_text())
      return
    if len(argv) != 2:
      raise ValueError('name one analysis, such as: python -m sink_jax.analyses lengths '
                       '--checkpoint=Pythia-14M --out=analyses. --list names all.')
    # Options that cannot be read are refused before the cache of compiled programs asks for
    # devices.
    given = _given()
    compile_cache.enable()
    text, paths, failures = analyse_models(argv[1], _CHECKPOINT.value, _WORKDIR.value, _OUT.value,
                                         say=_say, **given)
  except (ValueError, CheckpointError, OSError) as error:
    command.stop(error)
  except jax.errors.JaxRuntimeError as error:  # of a model that is the only one
    command.stop(f'{runner.in_one_line(error)}. Where the memory of the device is full: '
                 '--batch_size=1, fewer tokens, --dtype=bfloat16, or --fsdp over several devices.')
  print(text, *paths, sep='\n')
  if failures:
    sys.exit('\n'.join(f'error: {failure["model"]}: {failure["error"]}' for failure in failures))


def _given() -> dict[str, Any]:
  """The options of the command line as fields of `Options`."""
  # People count blocks and heads from 1, as the paper does; the program counts from 0. None, where
  # the flag is not given, stays None.
  from_1 = lambda flag: (numbers := _numbers(flag, int)) and tuple(i - 1 for i in numbers)
  return {'inputs': _INPUTS.value, 'source': _SOURCE.value, 'sequences': _SEQUENCES.value,
          'length': _LENGTH.value, 'lengths': _numbers(_LENGTHS, int),
          'epsilons': _numbers(_EPSILONS, float), 'bos': _BOS.value, 'seed': _SEED.value,
          'layers': from_1(_LAYERS), 'heads': from_1(_HEADS),
          'positions': _numbers(_POSITIONS, int), 'dtype': _DTYPE.value,
          'cache_size': _CACHE_SIZE.value, 'sinks': _SINKS.value, 'fsdp': _FSDP.value,
          'batch_size': _BATCH_SIZE.value, 'hellaswag': _HELLASWAG.value, 'limit': _LIMIT.value}


def _numbers(flag: flags.FlagHolder, kind: type) -> tuple | None:
  """A list of numbers; None where the flag is not given."""
  texts = flag.value
  if texts is None:
    return None
  try:
    return tuple(kind(text) for text in texts)
  except ValueError:
    example = '0.2,0.3' if kind is float else '1,3'
    raise ValueError(f'--{flag.name}={",".join(texts)}: write numbers, such as '
                     f'{example}.') from None


def _say(line: str) -> None:
  # On stderr, so that stdout holds the table and the names of the files alone.
  print(line, file=sys.stderr, flush=True)


def start() -> None:
  command.run(main)
