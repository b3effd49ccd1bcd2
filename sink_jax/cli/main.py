"""The one entry of every command: `python -m sink_jax COMMAND` and `sink-jax COMMAND`.

A command is a module of this folder with a dataclass `Options` (its docstring and the comments
at its fields are the help, which tyro prints) and a function `main`, which returns the exit code.
`main` takes the options and, where it names them, `experiment` (of the option `config`, FILE or
FILE:TRIAL, with --config.KEY=VALUE), `settings` (only the latter) and `given` (names of the
options in the command line). Modules import jax inside `main`: --help and errors need not wait.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import importlib
import inspect
import io
import os
import re
import sys
import typing
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import tyro

from sink_jax.arguments import check_known
from sink_jax.io.process import exit_saved_until_training, use_most_of_a_gpu
from sink_jax.io.terminal import quiet_logs

# In the order of a user's day.
COMMANDS = {
  'train': 'trains one model',
  'evaluate': 'probes a run or a published model for attention sinks',
  'card': 'says where the sinks of a model are, whether they matter, and what to do',
  'generate': 'continues a text',
  'sweep': 'trains every trial of a config file',
  'report': 'compares runs, or puts them next to the paper',
  'merge': 'adds the rows of finished runs to stored ones',
  'analyses': 'carries out an analysis of the paper on models',
  'export': 'writes a run as a checkpoint that transformers loads',
  'plan': 'predicts the memory and the speed of a run on TPUs or GPUs',
  'benchmark': 'times kernels and training steps on this machine',
  'data_build': 'tokenizes and packs a corpus ahead of a run',
}
_HELP = ('-h', '--help')
_BASE = os.path.join(os.path.dirname(__file__), '..', '..', 'configs', 'base.py')


def main() -> NoReturn:
  """Runs the command that the first argument names, and ends the process with its exit code."""
  # Imports and tracing make many objects, and hardly any that can be freed.
  gc.set_threshold(50_000)
  name, words = (sys.argv[1] if len(sys.argv) > 1 else ''), sys.argv[2:]
  if name in ('train', 'sweep'):
    exit_saved_until_training()  # within milliseconds: imports of jax take seconds
  with contextlib.suppress(OSError):  # of a stderr without a file
    faulthandler.enable()  # a crash in compiled code says where it was
  use_most_of_a_gpu()
  run(name, words)


def run(name: str, words: Sequence[str]) -> NoReturn:
  """Runs a command and ends the process: with its exit code, or 1 and one line that says why."""
  if name in ('', *_HELP):
    print(
      'usage: python -m sink_jax COMMAND [OPTIONS]',
      '',
      *(f'  {key:<11} {line}' for key, line in COMMANDS.items()),
      '',
      'python -m sink_jax COMMAND --help lists the options of a command.',
      sep='\n',
    )
    sys.exit(0 if name else 2)
  try:
    check_known(name, COMMANDS, 'there is no command')
    module = importlib.import_module(f'sink_jax.cli.{name}')
    options, extras = parse(name, words)
    quiet_logs()
    sys.exit(module.main(options, **extras))
  except BrokenPipeError:  # of `| head`
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(1)
  except (ValueError, OSError, MemoryError) as error:
    stop(error)
  except KeyboardInterrupt:
    sys.exit(130)
  except RuntimeError as error:
    if memory_is_full(error):
      stop(
        f'{str(error)[:500]}. Where the memory of the device is full, these help: '
        '--batch_size=1, fewer tokens, --dtype=bfloat16, --fsdp over several devices.'
      )
    if not type(error).__module__.startswith('sink_jax.'):  # perhaps a defect: with its traceback
      raise
    stop(error)


def parse(name: str, words: Sequence[str]) -> tuple[Any, dict[str, Any]]:
  """The options of a command line, and what else `main` of the command takes.

  Raises:
    ValueError: an option or a config key is wrong; names it.
  """
  module = importlib.import_module(f'sink_jax.cli.{name}')
  takes, settings = inspect.signature(module.main).parameters, {}
  if 'experiment' in takes or 'settings' in takes:
    settings = _settings(word for word in words if word.startswith('--config.'))
    words = [word for word in words if not word.startswith('--config.')]
  if 'experiment' in takes and set(words) & set(_HELP):
    from sink_jax.train.config import keys_as_text

    print(f'Keys of --config.KEY=VALUE with their defaults:\n{keys_as_text()}\n')
  kind = module.options_of(words) if hasattr(module, 'options_of') else module.Options
  with contextlib.redirect_stderr(io.StringIO()) as said:
    try:
      options = tyro.cli(
        kind,
        args=_split(kind, words),
        use_underscores=True,
        prog=f'python -m sink_jax {name}',
        config=(tyro.conf.DisallowNone,),
      )
    except SystemExit as end:
      if end.code:  # what is wrong, in a box: here it is one line
        # Without the borders of the box, and without tyro's words about our own errors.
        frame = r'[\u2500-\u257f]|-{3,}|Value error\W+Error parsing (?!--)\S+:'
        raise ValueError(re.sub(frame, ' ', said.getvalue())) from None
      raise
  extras: dict[str, Any] = {}
  if 'given' in takes:
    extras['given'] = {
      word[2:].partition('=')[0].replace('-', '_') for word in words if word.startswith('--')
    }
  if 'settings' in takes:
    extras['settings'] = settings
  if 'experiment' in takes:
    from sink_jax.sweep.trials import read_config_file

    extras['experiment'] = read_config_file(options.config or _BASE, settings)
  return options, extras


def stop(error: BaseException | str) -> NoReturn:
  """Ends the command with exit code 1 and one line that says why."""
  sys.exit('error: ' + ' '.join(str(error).split()))


def memory_is_full(error: BaseException) -> bool:
  """True if it is jax's error for a device whose memory is full."""
  # Its message lists all of the memory, and begins with INTERNAL where the device is a CPU.
  return isinstance(error, RuntimeError) and (
    'RESOURCE_EXHAUSTED' in str(error) or 'Out of memory' in str(error)
  )


def _settings(words: Iterable[str]) -> dict[str, str]:
  """{KEY: VALUE} of words --config.KEY=VALUE."""
  settings = {}
  for word in words:
    key, equals, value = word.removeprefix('--config.').partition('=')
    if not equals:
      raise ValueError(f'{word}: write --config.KEY=VALUE.')
    settings[key] = value
  return settings


def _split(options: Any, words: Sequence[str]) -> list[str]:
  """The words with --name=a,b of lists as tyro has them: --name a b."""
  kinds = typing.get_args(options) or [options]
  kinds = [
    typing.get_args(kind)[0] if typing.get_args(kind) else kind for kind in kinds
  ]  # Annotated
  lists = {
    f'--{field.name}'
    for kind in kinds
    for field in dataclasses.fields(kind)
    if 'tuple[' in str(field.type)
  }
  split = []
  for word in words:
    name, equals, value = word.partition('=')
    split += [name, *value.split(',')] if equals and name in lists else [word]
  return split
