"""The one parser of command lines: from words to a dataclass of options, by tyro.

A command states its options once, as a frozen dataclass: its docstring is the help of the command,
and the comment beside a field, or `#:` above it, that of an option. tyro makes the help, and the
value of every option from words. What is here finds the words of an option in the many spellings
that people and scripts use (--name=value, --name value, -name, --no-name, --noname, --name=true,
a,b,c), and says in one line what is wrong with those that it cannot read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import os
import re
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from sink_jax.arguments import did_you_mean

HELP = ('-h', '-?', '--help', '-help', '--helpshort', '--helpfull')
_SWITCH = {'true': 'True', 't': 'True', '1': 'True', 'false': 'False', 'f': 'False', '0': 'False'}
# An unset variable of the shell would otherwise mean this folder, or nothing that a person meant.
_MAY_BE_EMPTY = ('only', 'prompt')  # and options whose default is the empty text
# No negative number, which is a value, nor '-', the name of a file.
_OPTION = re.compile(r'--?([A-Za-z][^=]*)(?:=(.*))?', re.DOTALL)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommandOptions:
  """What the options of every command know beside their values."""

  #: names of the options in the command line, whatever their values.
  given: tyro.conf.Suppress[frozenset[str]] = dataclasses.field(
      default=frozenset(), repr=False, compare=False)

  def unused(self, reason: str, *names: str) -> None:
    """Raises a ValueError if one of these options is given, which nothing would read."""
    for name in names:
      if name in self.given:
        raise ValueError(f'--{name} {reason}')

  def given_of(self, kind: type) -> dict[str, Any]:
    """Those that are given among the fields of a dataclass, from which these options derive."""
    return {field.name: getattr(self, field.name) for field in dataclasses.fields(kind)
            if field.name in self.given}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfigOptions(CommandOptions):
  """The options of a command that reads a config file and takes --config.KEY=VALUE."""

  config: str | None  # the file, and a word for it: FILE[:WORD].
  #: 'KEY=VALUE' of each --config.KEY=VALUE of the command line.
  config_words: tyro.conf.Suppress[tuple[str, ...]] = dataclasses.field(
      default=(), repr=False, compare=False)
  #: what the file makes with those words, once it is read.
  settings: tyro.conf.Suppress[dict[str, Any]] = dataclasses.field(
      default_factory=dict, repr=False, compare=False)


_Options = TypeVar('_Options')


class _Option(NamedTuple):
  """An option; `type` is that of its field without `| None`, which no command line has to spell."""

  field: str
  type: Any
  spec: PrimitiveConstructorSpec
  default: Any
  required: bool
  is_positional: bool
  is_repeated: bool
  is_list: bool


def parse(options: type[_Options], words: Sequence[str], program: str) -> _Options:
  """The options, a frozen dataclass, that words of a command line spell.

  Prints them, and ends the process with exit code 0, where --help is among the words; `program` is
  then how a person starts the command.

  Raises:
    ValueError: names the option that is unknown, missing or wrong, and the remedy.
  """
  known, about = _known(options), inspect.getdoc(options) or ''
  takes_config = hasattr(options, 'config_words')
  if set(words) & set(HELP):
    # What it does is printed as it is written: tyro would join its lines.
    print(about, _help(options, program), sep='\n\n')
    sys.exit(0)
  given, config_words = _spelled(words, known, takes_config)
  values: dict[str, Any] = {}
  for name, option in known.items():
    if name in given:
      part, _, field = option.field.rpartition('.')
      value = _value(name, option, given[name])
      if part:  # a field with a dataclass, which is its default but for what is given
        whole = values.get(part, getattr(options, part))
        field, value = part, dataclasses.replace(whole, **{field: value})
      values[field] = value
    elif option.required:
      example = re.search(r'^ +(python .*)', about, re.MULTILINE)
      raise ValueError(f'{"" if option.is_positional else "--"}{name} is missing'
                       + (f', as in: {example[1]}' if example else '; --help lists the options.'))
  if issubclass(options, CommandOptions):
    values['given'] = frozenset([*given, 'config'] if config_words else given)
  if takes_config:
    values['config_words'] = tuple(config_words)
  return options(**values)


def chosen(words: Sequence[str], program: str, commands: Mapping[str, str], about: str = '') -> str:
  """The command that the first word names, of those that these lines describe.

  Lists them, and ends the process, where the word asks for help or there is none.

  Raises:
    ValueError: there is no such command; names the nearest.
  """
  name = words[0] if words else ''
  if name in ('', *HELP):
    width = max(map(len, commands))
    lines = [f'  {name:<{width}}  {line}' for name, line in commands.items()]
    print(*filter(None, [about]), f'usage: {program} COMMAND [OPTIONS]', '', *lines, '',
          f'{program} COMMAND --help lists the options of a command.', sep='\n')
    sys.exit(0 if name else 2)
  if name not in commands:
    raise ValueError(f'there is no command {name!r}.{did_you_mean(name, commands)} It is one of '
                     f'{", ".join(commands)}.')
  return name


def _help(options: type, program: str) -> str:
  """The options with their types and defaults, as tyro prints them where colours have no use."""
  with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
    tyro.cli(options, args=['--help'], prog=program, description='', use_underscores=True,
             config=(tyro.conf.DisallowNone, tyro.conf.SuppressFixed,
                     tyro.conf.PositionalMetavarFromFieldName))
  # An empty default says nothing: the text of the option says what is done without it.
  text = re.sub(r"\(default:\s+(None|'')?\)", '', printed.getvalue())
  text = re.sub(r'\{(\[.*\])\}', r'\1', text)  # of a list that may be None
  # The list of an option has commas, and one in a place of its own has blanks.
  text = re.sub(r'(--\S+) \[(\w+) \[\2 \.\.\.\]\]', r'\1 \2,\2,...', text)
  text = re.sub(r'(--\S+) [{\[]((\w+)(?: \3)+)(?: \[\2( \.\.\.)\]\]|\})',
                lambda found: f'{found[1]} {found[2].replace(" ", ",")}{found[4] or ""}', text)
  for name, option in _known(options).items():
    if option.is_positional and option.required:
      text = text.replace(f'[{name.upper()}]', name.upper() + ' ...' * option.is_list)
  text = text.replace('\'"\'"\'', "'")  # a quote as shells need it
  return '\n'.join(filter(None, (line.rstrip() for line in text.splitlines())))


def _known(options: type, prefix: str = '') -> dict[str, _Option]:
  """The options by their names; those of a dataclass in a field are FIELD.NAME."""
  types_of, hints = (typing.get_type_hints(options, include_extras=marked)
                     for marked in (False, True))
  known = {}
  for field in dataclasses.fields(options):
    kind, marks = types_of[field.name], getattr(hints[field.name], '__metadata__', ())
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
      kind, = (one for one in typing.get_args(kind) if one is not types.NoneType)
    if dataclasses.is_dataclass(kind):
      known |= _known(typing.cast(type, kind), f'{prefix}{field.name}.')
      continue
    spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(kind, set()))
    # A field that no text makes, such as a function, is for callers in Python.
    if tyro.conf.Suppress not in marks and isinstance(spec, PrimitiveConstructorSpec):
      name = next((mark.name for mark in marks if getattr(mark, 'name', None)), field.name)
      required = field.default is field.default_factory is dataclasses.MISSING
      repeated = tyro.conf.UseAppendAction in marks
      known[prefix + name] = _Option(
          prefix + field.name, kind, spec, field.default, required,
          tyro.conf.Positional in marks, repeated,
          is_list=typing.get_origin(kind) is tuple and not repeated)
  return known


def _spelled(words: Sequence[str], known: Mapping[str, _Option],
             takes_config: bool) -> tuple[dict[str, list[str]], list[str]]:
  """The values of every option that the words give, and KEY=VALUE of --config.KEY=VALUE."""
  given: dict[str, list[str]] = {}
  config_words, positional, left = [], [], list(words)
  while left:
    word = left.pop(0)
    if word == '--':
      positional += left
      break
    option = _OPTION.fullmatch(word)
    if not option:
      positional.append(word)
    elif takes_config and (key := re.fullmatch(r'(no)?config\.(.+)', option[1])):
      value = 'false' if key[1] else option[2]
      if key[1] and option[2] is not None:
        raise ValueError(f'{word}: write --config.{key[2]}={option[2]} or --noconfig.{key[2]}.')
      if value is None:
        # Whether a key is a switch, which takes no further word, is known once the file is read;
        # a word that is no option can only be its value.
        value = left.pop(0) if left and not _OPTION.fullmatch(left[0]) else 'true'
      config_words.append(f'{key[2]}={value}')
    else:
      name, taken = _taken(option[1], option[2], left, known)
      if known[name].is_list and name in given:
        raise ValueError(f'--{name} is given twice: write all values after one, with commas.')
      # The last counts, except of an option that is meant to be repeated.
      given[name] = [*given.get(name, ()), *taken] if known[name].is_repeated else taken
  for name, option in known.items():
    if option.is_positional and positional:
      end = len(positional) if option.is_list else 1
      given[name], positional = positional[:end], positional[end:]
  if positional:
    raise ValueError(f'unexpected argument {positional[0]!r}; options are written --name=value.')
  return given, config_words


def _taken(text: str, value: str | None, left: list[str],
           known: Mapping[str, _Option]) -> tuple[str, list[str]]:
  """The name of the option that a person means, and its values: without one, words from `left`."""
  options = {name: option for name, option in known.items() if not option.is_positional}
  off = {no + name: name for no in ('no_', 'no') for name in options if known[name].type is bool}
  spelled = text.replace('-', '_')
  name = spelled if spelled in options else off.get(spelled)
  if name is None:
    close = did_you_mean(spelled, [*options, 'help'], '--{}')
    raise ValueError(f'there is no option --{text}.{close} --help lists the options.')
  if known[name].type is bool:
    if value is None:
      return name, [str(name == spelled)]
    if name != spelled or value.lower() not in _SWITCH:
      raise ValueError(f'--{text}={value}: write --{name} or --no{name}.')
    return name, [_SWITCH[value.lower()]]
  follows = _OPTION.fullmatch(left[0]) if left else None
  if value is None and (not left or follows and follows[1].replace('-', '_') in options):
    raise ValueError(f'--{name} is missing its value: write --{name}=VALUE.')
  taken = [left.pop(0) if value is None else value]
  if not known[name].is_list:
    return name, taken
  # Further words are of the list where the command has nothing else to do with them.
  if value is None and len(options) == len(known):
    while left and not _OPTION.fullmatch(left[0]):
      taken.append(left.pop(0))
  parts = [part.strip() for text in taken for part in text.split(',') if text]
  if not all(parts):
    raise ValueError(f'--{name}={",".join(taken)}: a value is missing beside a comma.')
  return name, parts


def _value(name: str, option: _Option, values: Sequence[str]) -> Any:
  """The value that words make, if the type of the option takes them."""
  text = f'--{name}={",".join(values)}'
  if name != 'prompt':  # shells replace the ~ of a word of its own alone
    values = [os.path.expanduser(value) if value.startswith('~/') else value for value in values]
  if not (any(values) or name in _MAY_BE_EMPTY or option.default == ''):
    raise ValueError(f'--{name}= is empty: write a value, or leave the option out.')
  if option.spec.choices and (wrong := sorted(set(values) - set(option.spec.choices))):
    choices = typing.get_args(option.type)  # in their own order
    raise ValueError(f'{text}: choose {", ".join(choices)}.{did_you_mean(wrong[0], choices)}')
  try:
    # tyro takes the first of too many words, and leaves the others.
    if isinstance(option.spec.nargs, int) and option.is_list and len(values) != option.spec.nargs:
      raise ValueError
    return option.spec.instance_from_str(list(values))
  except ValueError:
    raise ValueError(f'{text}: write {_wanted(option.type)}.') from None


def _wanted(kind: Any) -> str:
  """What values of a type are, for the error where some are not."""
  inner = typing.get_args(kind)
  if not inner:
    return 'a whole number' if kind is int else 'a number'
  if typing.get_origin(inner[0]) is tuple:
    return _wanted(inner[0])
  if Ellipsis in inner:
    return f'numbers, such as {"0.2,0.3" if float in inner else "1,3"}'
  return f'{len(inner)} numbers with commas between them'
