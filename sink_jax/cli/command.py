"""How commands begin and end: their options, config files, and errors in one line.

A command is a module with `Options`, a frozen dataclass, and `main`, which takes one. A command of
several has a table `COMMANDS` of such dataclasses by their names in place of `Options`. What takes
seconds to import, such as jax, is imported by `main`, so that --help and errors do not wait for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from sink_jax.cli import parser
from sink_jax.cli.parser import CommandOptions, ConfigOptions
from sink_jax.io.exit_code import EXIT_SAVED, EXIT_UNSAVED
from sink_jax.io.logs import quiet_logs
from sink_jax.io.paths import importable_configs
from sink_jax.train.old_keys import hint


def run(module: Any, words: Sequence[str], name: str) -> NoReturn:
  """Runs a command and ends the process: with its exit code, or 1 and one line that says why.

  Args:
    module: the command, or a namespace with what a module of a command has.
    words: the command line behind the name of the command.
    name: of the command.
  """
  try:
    options = options_of(module, words, name)
    quiet_logs()
    sys.exit(module.main(options))
  except (ValueError, OSError, MemoryError) as error:
    stop(error)
  except KeyboardInterrupt:
    sys.exit(130)
  except RuntimeError as error:
    # So jax says that the memory of a device is full, in a message that lists all of it.
    if 'RESOURCE_EXHAUSTED' in str(error):
      stop(f'{str(error)[:500]}. Where the memory of the device is full, what the command has of '
           'these helps: --batch_size=1, fewer tokens, --dtype=bfloat16, --fsdp over several '
           'devices.')
    # A damaged checkpoint, say. What another package raises may be a defect: with its traceback.
    if not type(error).__module__.startswith('sink_jax.'):
      raise
    stop(error)


def options_of(module: Any, words: Sequence[str], name: str) -> Any:
  """The options that a command line gives a command; see `parser.parse`."""
  program, about = f'python -m sink_jax {name}', module.__doc__ or ''
  if not hasattr(module, 'COMMANDS'):
    return parser.parse(module.Options, words, program, about)
  lines = {key: options.__doc__.partition('\n')[0] for key, options in module.COMMANDS.items()}
  first = parser.chosen(words, program, lines, about)
  return parser.parse(module.COMMANDS[first], words[1:], f'{program} {first}', lines[first])


@contextlib.contextmanager
def training_ends(workdir: str | None) -> Iterator[None]:
  """Ends the process as the training in the block ends: every way has its exit code.

  workdir: the folder of the run, or of the sweep; None where nothing is trained.
  """
  from sink_jax.train.checkpoint import CheckpointError
  from sink_jax.train.multihost import fail
  from sink_jax.train.outcome import Diverged, Interrupted
  from sink_jax.train.stop_handler import Unsaved

  try:
    yield
  except Unsaved as error:  # a KeyboardInterrupt, too
    print(error, file=sys.stderr, flush=True)
    os._exit(EXIT_UNSAVED)  # after three signals, without waiting for threads that save
  except (Interrupted, KeyboardInterrupt) as ended:  # Ctrl-C between the trials of a sweep
    print(str(ended) or 'Stopped and saved; the same command resumes.', file=sys.stderr)
    sys.exit(EXIT_SAVED)
  except (ValueError, Diverged) as error:  # all processes of a job have raised it
    fail(f'error: {error}')
  except CheckpointError as error:
    # One process alone may have met it, with its part of a checkpoint.
    fail(f'error: {error}', alone=True)
  except OSError as error:  # a full disk, a lost mount
    fail(f'error: {error}. Checkpoints that were complete are kept in {workdir}; once this is '
         'solved, the same command resumes.' if workdir else f'error: {error}', alone=True)
  except Exception:
    fail(traceback.format_exc(), alone=True)


def stop(error: BaseException | str) -> NoReturn:
  """Ends the command with exit code 1 and one line that says why."""
  sys.exit('error: ' + ' '.join(str(error).split()))


def given_of(options: CommandOptions, kind: type) -> dict[str, Any]:
  """The fields of a dataclass that a person has given; those of `options` derive from it."""
  return {field.name: getattr(options, field.name) for field in dataclasses.fields(kind)
          if field.name in options.given}


def say(line: str) -> None:
  """Prints a line of progress: on stderr, so that stdout holds the result alone."""
  print(line, file=sys.stderr, flush=True)


def read_config(path: str, options: ConfigOptions) -> dict[str, Any]:
  """The config of --config=FILE[:ARGUMENT] with --config.KEY=VALUE, in ml_collections' syntax.

  Raises:
    ValueError: names the file, or the key, and what is wrong with it.
  """
  from absl import flags
  from ml_collections import config_flags

  file = path.partition(':')[0]
  # Checked here, where the error can be one line that names the file.
  if not Path(file).is_file():
    raise ValueError(f'--config={path}: there is no file {file}.')
  words = ['command', f'--config={path}', *options.config_words]
  known = flags.FlagValues()
  config_flags.DEFINE_config_file('config', None, '', flag_values=known, sys_argv=words)
  try:
    with importable_configs(file):
      _, *others = known(words)
      # A config that met an OSError raises it when it is first touched.
      value: Any = known['config'].value
      config = value.to_dict()
  except flags.Error as error:  # of a config file: with a traceback, which ends with the reason
    reason = str(error).strip().splitlines()[-1]
    raise ValueError(reason.removeprefix('ValueError: ')) from None
  except ValueError:
    raise
  except Exception as error:  # a config file is somebody's program: anything can be wrong with it
    keys = [word.lstrip('-').partition('=')[0].removeprefix('config.')
            for word in options.config_words]
    if keys and isinstance(error, (AttributeError, KeyError, TypeError)):
      while error.args and isinstance(error.args[0], Exception):
        error = error.args[0]
      named = str(error.args[0] if error.args else error).rstrip('.')
      raise ValueError(
          f'--config has no such key: {named}. configs/base.py lists all; a budget and a protocol '
          'are parts of the name: --config=configs/window.py:window-32,budget=smoke'
          + ''.join(dict.fromkeys(map(hint, keys)))) from None
    raise ValueError(f'--config={path}: {type(error).__name__}: {error}') from None
  if others:
    raise ValueError(f'unexpected argument {others[0]!r}; options are written --name=value.')
  return config
