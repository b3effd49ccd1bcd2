"""How commands begin and end: options, config files, --help, and errors in one line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from absl import app, flags

from sink_jax.cli import entry
from sink_jax.io.paths import importable_configs
from sink_jax.train.old_keys import hint


def answer_help(name: str) -> None:
  """Prints the options of a command and ends it with exit code 0 where --help asks for them.

  It is called when the options are defined, before the imports that take seconds.

  name: `__name__` of the module, which answers if it is the command that was started.
  """
  asked = [argument for argument in sys.argv[1:] if argument in entry.HELP]
  if name == entry.running and asked:
    known = flags.FLAGS
    options = known.get_help() if '--helpfull' in asked else known.module_help(name)
    print(f'{sys.modules[name].__doc__}\nflags:\n{options}')
    sys.exit(0)


def run(main: Callable[[Sequence[str]], None], config: str | None = None) -> None:
  """Parses the options and calls main; options that cannot be read are an error of one line.

  config: file that stands in for --config where that is not given.
  """
  def parse(arguments):
    try:
      return _parsed(arguments, config)
    except ValueError as error:
      stop(error)

  app.run(main, flags_parser=parse)


def stop(error: BaseException | str) -> NoReturn:
  """Ends the command with exit code 1 and one line that says why."""
  sys.exit('error: ' + ' '.join(str(error).split()))


def no_arguments(argv: Sequence[str]) -> None:
  """Raises a ValueError if there is anything but options behind the name of the program."""
  if len(argv) > 1:
    raise ValueError(f'unexpected argument {argv[1]!r}; options are written --name=value.')


def unused(reason: str, *options: flags.FlagHolder) -> None:
  """Raises a ValueError if one of these options is given, which nothing would read."""
  for option in options:
    if flags.FLAGS[option.name].present:
      raise ValueError(f'--{option.name} {reason}')


def config_argument(arguments: Sequence[str]) -> str | None:
  """The value of --config in a command line, FILE or FILE:TRIAL; None where it is not given."""
  for i, argument in enumerate(arguments):
    name, equals, value = argument.partition('=')
    if name in ('--config', '-config'):
      # --config FILE, as two arguments.
      return value if equals else next(iter(arguments[i + 1:]), '')
  return None


def _parsed(arguments, config):
  given = config_argument(arguments)
  # As if the person had written it: absl reads a config file while it reads the arguments.
  if given is None and config:
    given = config
    arguments = [arguments[0], f'--config={config}', *arguments[1:]]
  if given is None:
    # A command that has no --config reads its arguments as they are; one that requires it has put a
    # validator on it, whose message would not show an example.
    if 'config' in flags.FLAGS and flags.FLAGS['config'].validators:
      raise ValueError('--config is missing, such as --config=configs/quickstart.py:text-softmax.')
    return _read(arguments)
  path = given.partition(':')[0]
  # Checked here, where the error can be one line that names the file.
  if not Path(path).is_file():
    raise ValueError(f'--config={given}: there is no file {path}.')
  try:
    with importable_configs(path):
      others = _read(arguments)
      # A config that met an OSError raises it when it is first touched.
      getattr(flags.FLAGS['config'].value, 'to_dict', None)
      return others
  except ValueError:
    raise
  except Exception as error:  # a config file is somebody's program: anything can be wrong with it
    options = (argument.lstrip('-').partition('=')[0] for argument in arguments)
    config_keys = [name.removeprefix('config.') for name in options if name.startswith('config.')]
    if config_keys and isinstance(error, (AttributeError, KeyError, TypeError)):
      while error.args and isinstance(error.args[0], Exception):
        error = error.args[0]
      named = str(error.args[0] if error.args else error).rstrip('.')
      raise ValueError(
          f'--config has no such key: {named}. configs/base.py lists all; a budget and a protocol '
          'are parts of the name: --config=configs/window.py:window-32,budget=smoke'
          + ''.join(dict.fromkeys(map(hint, config_keys)))) from None
    raise ValueError(f'--config={given}: {type(error).__name__}: {error}') from None


def _read(arguments):
  try:
    return flags.FLAGS(arguments)
  except flags.Error as error:  # of a config file: with a traceback, which ends with the reason
    raise ValueError(str(error).strip().splitlines()[-1].removeprefix('ValueError: ')) from None
