"""Keys of a config that a command line changes, in ml_collections' syntax: --config.KEY=VALUE."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from absl import flags
from ml_collections import ConfigDict, config_flags

from sink_jax.arguments import did_you_mean
from sink_jax.train.old_keys import hint

# What is no key but a part of a config's name, with an example of it.
_OF_NAMES = {'budget': 'smoke', 'protocol': 'released'}
_WANTED = {bool: 'true or false', int: 'a whole number', float: 'a number'}


def parse_settings(texts: Iterable[str]) -> dict[str, str]:
  """Parses settings: ['data.context=64', ...] becomes {'data.context': '64', ...}.

  Raises:
    ValueError: a text has no '=' or no key, or a key is given twice.
  """
  settings = {}
  for text in texts:
    key, equals, value = text.partition('=')
    if not equals or not key.strip():
      raise ValueError(f'--set={text}: write key=value, such as --set=data.context=64.')
    if key.strip() in settings:
      raise ValueError(f'the config key {key.strip()} is set twice.')
    settings[key.strip()] = value.strip()
  return settings


def change_config(config: ConfigDict, changes: Mapping[str, str]) -> None:
  """Sets dotted keys of a config to texts, each read as the type that its key has.

  null empties a key, for which ml_collections has no spelling.

  Raises:
    ValueError: names the key that the config does not have, that takes values of another type, or
      that has no effect.
  """
  for key, text in changes.items():
    *sections, last = key.split('.')
    holder = config
    for section in sections:
      holder = holder.get(section) if isinstance(holder, ConfigDict) else None
    if not isinstance(holder, ConfigDict) or last not in holder:
      meant = did_you_mean(last, holder if isinstance(holder, ConfigDict) else (),
                           '.'.join([*sections, '{}']))
      named = (f'; the {key} follows the trial, as in --config=configs/window.py:window-32,{key}='
               f'{_OF_NAMES[key]}, and is --{key} of a sweep' if key in _OF_NAMES else '')
      raise ValueError(f'the config has no such key: {key!r}.{meant} configs/base.py lists '
                       f'all{named}{hint(key)}')
    # A section as a whole would lose the keys that a text leaves out.
    if isinstance(section := holder[last], ConfigDict):
      raise ValueError(f'{key!r} is a section of the config: set its keys, such as '
                       f'{key}.{next(iter(section))}.')
    if text == 'null':
      holder[last] = None
      continue
    empty, word, known = holder[last] is None, f'--config.{key}={text}', flags.FlagValues()
    try:
      config_flags.DEFINE_config_dict('config', config, flag_values=known, sys_argv=['', word])
      known(['', word])
    except flags.Error as error:
      wanted = _WANTED.get(holder.get_type(last))
      told = f'it takes {wanted}{", or null" * empty}' if wanted else error
      raise ValueError(f'{key}={text}: {told}.') from None
  init, optimizer = config.get('init'), config.get('optimizer')
  if 'model.size' in changes and isinstance(init, ConfigDict) and init.get('source'):
    raise ValueError('model.size has no effect beside init.source: the sizes are those of the '
                     'source. Leave it out.')
  if 'optimizer.final_fraction' in changes and isinstance(optimizer, ConfigDict) and (
      optimizer.get('schedule') == 'constant'):
    raise ValueError('optimizer.final_fraction has no effect with optimizer.schedule = constant: '
                     'leave it out.')
