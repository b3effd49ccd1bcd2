"""The one parser of command lines: from words to a dataclass of options, by tyro.

A command states its options once, as the fields of a frozen dataclass, whose docstrings are the
help. tyro makes the help and the values. What is here turns the many spellings that people and
scripts use (--name=value, --name value, -name, --no-name, --noname, --name=true, a,b,c) into
the one of tyro, and says in one line what is wrong with those that it cannot.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from sink_jax.arguments import nearest

HELP = ('-h', '-?', '--help', '-help', '--helpshort', '--helpfull')
_SWITCH = {'true': True, 't': True, '1': True, 'false': False, 'f': False, '0': False}
# As `Positional[str]` and `UseAppendAction[tuple[str, ...]]` leave them in the metadata of a type.
_MARKS: tuple[Any, ...] = tyro.conf.Positional[str], tyro.conf.UseAppendAction[tuple[str, ...]]
_POSITIONAL, _REPEATED = (mark.__metadata__[0] for mark in _MARKS)

_NO_OPTION: Any = dict(init=False, repr=False, compare=False)  # a field that the parser fills in


@dataclasses.dataclass(frozen=True)
class CommandOptions:
  """What the options of every command know beside their values.

  Attributes:
    given: names of the options in the command line, whatever their values.
  """

  given: frozenset[str] = dataclasses.field(default=frozenset(), **_NO_OPTION)


@dataclasses.dataclass(frozen=True)
class ConfigOptions(CommandOptions):
  """The options of a command that reads a config file and takes --config.KEY=VALUE.

  Attributes:
    config_words: those words of the command line, as they were written.
  """

  config_words: tuple[str, ...] = dataclasses.field(default=(), **_NO_OPTION)


_Options = TypeVar('_Options')


class _Option(NamedTuple):
  """An option; `type` is that of its field without `| None`, which no command line has to spell."""

  type: Any
  spec: PrimitiveConstructorSpec
  required: bool
  marks: tuple

  @property
  def is_list(self) -> bool:
    return typing.get_origin(self.type) is tuple and _REPEATED not in self.marks

  @property
  def is_positional(self) -> bool:
    return _POSITIONAL in self.marks


def parse(options: type[_Options], words: Sequence[str], program: str, about: str) -> _Options:
  """The options that words of a command line spell.

  Prints them, and ends the process with exit code 0, where --help is among the words.

  Args:
    options: a frozen dataclass.
    words: the command line behind the name of the command.
    program: how a person starts the command, for its help.
    about: what it does, for its help.

  Raises:
    ValueError: names the option that is unknown, missing or wrong, and the remedy.
  """
  known = _known(options)
  # `about` is printed as it is written: tyro would join its lines.
  read = lambda arguments: tyro.cli(
      options, args=arguments, prog=program, description='', use_underscores=True,
      config=(tyro.conf.DisallowNone, tyro.conf.SuppressFixed,
              tyro.conf.PositionalMetavarFromFieldName))
  if set(words) & set(HELP):
    print(about.strip(), _help(read), sep='\n\n')
    sys.exit(0)
  values, config_words = _spelled(words, known, issubclass(options, ConfigOptions))
  for name, option in known.items():
    if name in values:
      _check(name, option, values[name])
    elif option.required:
      example = re.search(r'^ +(python .*)', about, re.MULTILINE)
      raise ValueError(f'{"" if option.is_positional else "--"}{name} is missing'
                       + (f', as in: {example[1]}' if example else '; --help lists the options.'))
  arguments, positional = [], []
  for name, option in known.items():
    if name in values:
      words = [*values[name]] if option.is_positional else _canonical(name, option, values[name])
      (positional if option.is_positional else arguments).extend(words)
  # Without '--' a list would take those that follow it for its own.
  arguments += ['--', *positional] if positional else []
  try:
    # A dataclass may refuse a value that has the right type. tyro prints that as a box.
    with contextlib.redirect_stderr(io.StringIO()) as printed:
      made = read(arguments)
  except SystemExit as end:
    raise ValueError(str(end.__context__ or printed.getvalue())) from None
  # No arguments of the constructor, and frozen.
  if isinstance(made, CommandOptions):
    object.__setattr__(made, 'given', frozenset(values))
  if isinstance(made, ConfigOptions):
    object.__setattr__(made, 'config_words', tuple(config_words))
  return made


def listing(program: str, commands: Mapping[str, str]) -> str:
  """The help of a program of several commands: the name of each, and what it does."""
  width = max(map(len, commands))
  lines = [f'  {name:<{width}}  {line}' for name, line in commands.items()]
  return '\n'.join([f'usage: {program} COMMAND [OPTIONS]', '', *lines, '',
                    f'{program} COMMAND --help lists the options of a command.'])


def chosen(name: str, commands: Mapping[str, Any]) -> str:
  """The name, if it is one of these commands.

  Raises:
    ValueError: it is not; names the nearest.
  """
  if name not in commands:
    close = nearest(name, commands)
    hint = f'did you mean {close}? ' if close and name else ''
    raise ValueError(f'there is no command {name!r}: {hint}It is one of {", ".join(commands)}.')
  return name


def _help(read: Callable[[list[str]], object]) -> str:
  """The options with their types and defaults, as tyro prints them where colours have no use."""
  with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
    read(['--help'])
  # An empty default says nothing: the text of the option says what is done without it.
  text = re.sub(r"\(default:\s+(None|'')?\)", '', printed.getvalue())
  text = re.sub(r'\{(\[.*\])\}', r'\1', text)  # of a list that may be None
  text = text.replace('\'"\'"\'', "'")  # a quote as shells need it
  return '\n'.join(filter(None, (line.rstrip() for line in text.splitlines())))


def _known(options: type, prefix: str = '') -> dict[str, _Option]:
  """The options by their names; those of a dataclass in a field are FIELD.NAME."""
  hints, known = typing.get_type_hints(options, include_extras=True), {}
  for field in dataclasses.fields(options):
    hint = hints[field.name]
    kind, marks = getattr(hint, '__origin__', hint), getattr(hint, '__metadata__', ())
    kind = kind if marks else hint
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
      kind, = (one for one in typing.get_args(kind) if one is not types.NoneType)
    if dataclasses.is_dataclass(kind):
      known |= _known(typing.cast(type, kind), f'{prefix}{field.name}.')
      continue
    spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(kind, set()))
    # A field that no text makes, such as a function, is for callers in Python.
    if field.init and isinstance(spec, PrimitiveConstructorSpec):
      name = next((mark.name for mark in marks if getattr(mark, 'name', None)), field.name)
      required = field.default is field.default_factory is dataclasses.MISSING
      known[prefix + name] = _Option(kind, spec, required, marks)
  return known


def _spelled(words: Sequence[str], known: Mapping[str, _Option],
             takes_config: bool) -> tuple[dict[str, list[str]], list[str]]:
  """The values of every option that the words give, and the words of the form --config.KEY=VALUE.

  Raises:
    ValueError: there is no such option, or it lacks its value.
  """
  values: dict[str, list[str]] = {}
  config_words, positional, left = [], [], list(words)
  places = [name for name, option in known.items() if option.is_positional]
  while left:
    word = left.pop(0)
    # A negative number is a value, here of a positional argument, and '-' a file of that name.
    if not re.match(r'--?[A-Za-z]', word):
      rest, left = ([word], left) if word != '--' else (left, [])
      positional += rest
      continue
    name, equals, value = word.lstrip('-').partition('=')
    following = lambda: bool(left) and not re.match(r'--?[A-Za-z]', left[0])
    if takes_config and name.removeprefix('no').startswith('config.'):
      # Whether a key is a switch, which takes no further word, is known once the file is read;
      # a word that is no option can only be its value.
      config_words += [word, *([left.pop(0)] if not equals and following() else [])]
      continue
    name, switched = _name(name, known)
    option = known[name]
    if option.type is bool:
      if equals and (switched is False or value.lower() not in _SWITCH):
        raise ValueError(f'--{name}={value}: write --{name} or --no{name}.')
      values[name] = [str(_SWITCH[value.lower()] if equals else switched is not False)]
      continue
    if not equals and not left:
      raise ValueError(f'--{name} is missing its value: write --{name}=VALUE.')
    taken = [value if equals else left.pop(0)]
    # Further words are of the list where the command has nothing else to do with them.
    while option.is_list and not equals and not places and following():
      taken.append(left.pop(0))
    if option.is_list:
      taken = [part.strip() for text in taken for part in text.split(',') if text]
    # The last counts, except of an option that is meant to be repeated.
    values[name] = [*values.get(name, ()), *taken] if _REPEATED in option.marks else taken
  for name in places:
    if positional:
      many = known[name].is_list
      values[name], positional = (positional, []) if many else (positional[:1], positional[1:])
  if positional:
    raise ValueError(f'unexpected argument {positional[0]!r}; options are written --name=value.')
  return values, config_words


def _name(text: str, known: Mapping[str, _Option]) -> tuple[str, bool | None]:
  """The option that a person means, and False where it is switched off.

  Raises:
    ValueError: there is none; names the nearest.
  """
  options = {name: option for name, option in known.items() if not option.is_positional}
  name = text.replace('-', '_')
  if name in options:
    return name, None
  for prefix in ('no_', 'no'):
    positive = name.removeprefix(prefix)
    if name.startswith(prefix) and positive in options and options[positive].type is bool:
      return positive, False
  close = nearest(name, options)
  hint = f' Did you mean --{close}?' if close else ''
  raise ValueError(f'there is no option --{text}.{hint} --help lists the options.')


def _check(name: str, option: _Option, values: Sequence[str]) -> None:
  """Raises a ValueError that names the option if its type does not take the values."""
  text = f'--{name}={",".join(values)}'
  if option.spec.choices and option.type is not bool:
    for value in values:
      if value not in option.spec.choices:
        choices = [str(choice) for choice in typing.get_args(option.type)]
        close = nearest(value, choices) if value else None
        hint = f' Did you mean {close}?' if close else ''
        raise ValueError(f'{text}: choose {", ".join(choices)}.{hint}')
  numbers = typing.get_args(option.type)
  try:
    # A fixed number of words, such as two of tuple[int, int], is compared here: tyro takes the
    # first and leaves the others.
    if isinstance(option.spec.nargs, int) and len(values) != option.spec.nargs and option.is_list:
      raise ValueError
    option.spec.instance_from_str(list(values) if option.is_list else [values[-1]])
  except ValueError:
    if not option.is_list:
      what = 'a whole number' if option.type is int else 'a number'
    elif typing.get_origin(numbers[0]) is tuple:
      what = f'{len(typing.get_args(numbers[0]))} numbers with commas between them'
    elif Ellipsis in numbers:
      what = f'numbers, such as {"0.2,0.3" if float in numbers else "1,3"}'
    else:
      what = f'{len(numbers)} numbers with a comma between them'
    raise ValueError(f'{text}: write {what}.') from None


def _canonical(name: str, option: _Option, values: Sequence[str]) -> list[str]:
  """The words by which tyro reads the values."""
  if option.type is bool:
    return [f'--{name}' if values == ['True'] else f'--no_{name}']
  if option.is_list:
    return [f'--{name}', *values]
  return [f'--{name}={value}' for value in values]
