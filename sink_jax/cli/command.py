"""How commands begin and end: their options, config files, and errors in one line.

A command is its options, in the table of `options`, and a module of its name with `main`, which
takes them and returns the exit code. That module is imported once the options are known to be good:
it may import jax, which takes seconds.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from sink_jax.cli import parser
from sink_jax.cli.options import ABOUT_BENCHMARKS, COMMANDS
from sink_jax.cli.parser import ConfigOptions
from sink_jax.io.logs import quiet_logs
from sink_jax.io.paths import importable_configs
from sink_jax.io.quick_imports import quick_imports

_BASE = str(Path(__file__).parents[2] / 'configs' / 'base.py')


def run(name: str, words: Sequence[str]) -> NoReturn:
  """Runs a command and ends the process: with its exit code, or 1 and one line that says why."""
  options = None
  try:
    with quick_imports():
      options = options_of(name, words)
      quiet_logs()
      if isinstance(options, ConfigOptions):
        options = dataclasses.replace(options, settings=read_config(options))
      module = importlib.import_module(f'sink_jax.cli.{name.replace(".", "_")}')
    # These take the config as an argument of its own.
    config = (options.settings,) if name == 'plan' else ()
    sys.exit(module.main(options, *config))
  except BrokenPipeError:  # of `| head`
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(1)
  except OSError as error:
    stop(_about_file(error, options))
  except (ValueError, MemoryError) as error:
    stop(error)
  except KeyboardInterrupt:
    sys.exit(130)
  except RuntimeError as error:
    if memory_is_full(error):
      stop(f'{str(error)[:500]}. Where the memory of the device is full, what the command has of '
           'these helps: --batch_size=1, fewer tokens, --dtype=bfloat16, --fsdp over several '
           'devices.')
    # A damaged checkpoint, say. What another package raises may be a defect: with its traceback.
    if not type(error).__module__.startswith('sink_jax.'):
      raise
    stop(error)


def memory_is_full(error: BaseException) -> bool:
  """Whether it is the error by which jax says that the memory of a device is full."""
  # Its message lists all of the memory, and begins with INTERNAL where the device is a CPU.
  return isinstance(error, RuntimeError) and (
      'RESOURCE_EXHAUSTED' in str(error) or 'Out of memory' in str(error))


def options_of(name: str, words: Sequence[str]) -> Any:
  """The options that a command line gives a command; see `parser.parse`."""
  program = 'python -m sink_jax'
  name = parser.chosen([name], program, {key: line for key, (line, _) in COMMANDS.items()})
  program, options = f'{program} {name}', COMMANDS[name][1]
  if isinstance(options, Mapping):
    lines = {key: inspect.getdoc(one) or '' for key, one in options.items()}
    first = parser.chosen(words, program, lines, ABOUT_BENCHMARKS)
    program, options, words = f'{program} {first}', options[first], words[1:]
  return parser.parse(options, words, program)


def _about_file(error: OSError, options: Any) -> str:
  """What the system says of a file, with the option that names it or a folder above it."""
  if not isinstance(error.filename, str) or not error.strerror:
    return str(error)
  file = os.path.abspath(error.filename)
  for name, path in vars(options).items() if options else ():
    if isinstance(path, str) and path and f'{file}/'.startswith(
        f'{os.path.abspath(os.path.expanduser(path))}/'):
      inside = '' if error.filename == path else f'{error.filename}: '
      return f'--{name}={path}: {inside}{error.strerror}.'
  return f'{error.filename}: {error.strerror}.'


def stop(error: BaseException | str) -> NoReturn:
  """Ends the command with exit code 1 and one line that says why."""
  sys.exit('error: ' + ' '.join(str(error).split()))


def say(line: str) -> None:
  """Prints a line of progress: on stderr, so that stdout holds the result alone."""
  print(line, file=sys.stderr, flush=True)


def read_config(options: ConfigOptions) -> dict[str, Any]:
  """The config of --config=FILE[:WORD] with --config.KEY=VALUE, in ml_collections' syntax.

  It is configs/base.py where no file is named.

  Raises:
    ValueError: names the file, or the key, and what is wrong with it.
  """
  from absl import flags
  from ml_collections import ConfigDict, config_flags

  from sink_jax.sweep.config_keys import change_config, parse_settings

  path = _BASE if options.config is None else options.config
  file = path.partition(':')[0]
  # Checked here, where the error can be one line that names the file.
  if not Path(file).is_file():
    raise ValueError(f'--config={path}: there is no file {file}.')
  words = ['command', f'--config={path}']
  known = flags.FlagValues()
  config_flags.DEFINE_config_file('config', None, '', flag_values=known, sys_argv=words)
  try:
    with importable_configs(file):
      known(words)
      # A config that met an OSError raises it when it is first touched.
      value: Any = known['config'].value
      getattr(value, 'keys', None)
  except flags.Error as error:  # of a config file: with a traceback, which ends with the reason
    reason = str(error).strip().splitlines()[-1]
    raise ValueError(f'--config={path}: {reason.removeprefix("ValueError: ")}') from None
  except ValueError as error:
    raise ValueError(f'--config={path}: {error}') from None
  except (Exception, SystemExit) as error:  # a config file is a program: anything can be wrong
    raise ValueError(f'--config={path}: {type(error).__name__}: {error}') from None
  if not isinstance(value, ConfigDict):
    raise ValueError(f'--config={path}: get_config() returns no ConfigDict of ml_collections.')
  change_config(value, parse_settings(options.config_words))
  return value.to_dict()
