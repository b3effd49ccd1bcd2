"""Config files: their trials, at a budget, for some seeds, with the settings of a command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags
from ml_collections.config_flags import config_path

from sink_jax.io.paths import import_file
from sink_jax.train.config import NotExpressible, from_dict, where_keys
from sink_jax.train.plugins import import_plugins, plugins_of

# Keys that do not make a trial a different one, so that a label need not name them: runs on other data are
# known by its hash, but for these.
_NEUTRAL = ('data.', 'init.source', 'model.vocab_size', 'microbatches', 'probe.every', 'seed', 'validation.')
_NOT_HASHED = ('data.interventions', 'data.max_tokens', 'data.valid_source')


@dataclasses.dataclass(frozen=True)
class Trial:
  """A run to make.

  name: of the trial, and of its folder. config: None where the budget has no counterpart of it.
  label: the label of the config, or what it would have been. reason: why there is no config.
  """

  name: str
  config: Mapping[str, Any] | None
  label: Mapping[str, str] = dataclasses.field(default_factory=dict)
  reason: str = ''


def read_config_file(path: str, settings: Mapping[str, str]) -> dict[str, Any]:
  """The config of FILE[:TRIAL], as ml_collections has it, with dotted keys set to texts.

  Raises:
    ValueError: names the file, or the key, and what is wrong with it.
  """
  file, _, name = path.partition(':')
  try:
    config = import_file(file).get_config(name)
  except Exception as error:  # a config file is a program: anything can be wrong with it
    kind = '' if isinstance(error, ValueError) else f'{type(error).__name__}: '
    raise ValueError(f'--config={path}: {kind}{error}') from None
  if not isinstance(config, ConfigDict):
    raise ValueError(f'--config={path}: get_config() returns no ConfigDict of ml_collections.')
  change_config(config, settings)
  return config.to_dict()


def load_trials(path: str | Path, options: Mapping[str, str] | None = None,
                seeds: Iterable[int] | None = None,
                settings: Mapping[str, str] | None = None) -> dict[str, Trial]:
  """Reads the trials of a config file, in its order, one for every seed.

  Args:
    path: the file, which has a table TRIALS and a function get_config.
    options: arguments of get_config, such as {'budget': 'desk', 'protocol': 'released'}.
    seeds: a trial is then called NAME-seed-N; by default the config's seed, and NAME.
    settings: dotted config keys and values as text, the same for all. Those that change the computation
      become a part of the label's budget: 'desk with steps=50'.

  Raises:
    ValueError: names the file, or the trial, and what is wrong with it.
  """
  settings, chosen = dict(settings or {}), list(seeds or [])
  if chosen and 'seed' in settings:
    raise ValueError('the config key seed and --seeds are both set: leave one of them out.')
  if one := str(path).partition(':')[2]:
    raise ValueError(f'--config={path}: a sweep takes the whole file; --only={one} chooses.')
  module = import_file(path)
  if not hasattr(module, 'TRIALS'):
    raise ValueError(f'{path} has no table TRIALS; run it with python -m sink_jax train')
  changes = ', '.join(f'{key}={value}' for key, value in settings.items()
                      if (not key.startswith(_NEUTRAL) or key in _NOT_HASHED) and key not in where_keys())
  trials: dict[str, Trial] = {}
  of_seeds = {f'-seed-{seed}': {'seed': seed} for seed in chosen} or {'': {}}
  for name in module.TRIALS:
    try:
      config = module.get_config(','.join(
          [name, *(f'{key}={value}' for key, value in (options or {}).items())]))
      change_config(config, settings)
      if config.label.budget and changes:
        config.label.budget += f' with {changes}'
      for suffix, seed in of_seeds.items():
        values = config.to_dict() | seed
        # Built here, so that errors come before anything is trained; a child process imports the plugins.
        values['plugins'] = plugins_of(values, from_dict(values))
        trials[name + suffix] = Trial(name + suffix, values, values['label'])
    except NotExpressible as error:  # its absence has a reason
      trials |= {name + suffix: Trial(name + suffix, None, error.label, str(error))
                 for suffix in of_seeds}
    except Exception as error:  # a config file is the user's program: anything can be wrong with it
      kind = '' if isinstance(error, ValueError) else f'{type(error).__name__}: '
      raise ValueError(f'{path}, trial {name}: {kind}{error}') from error
  return trials


def select_shard(trials: Mapping[str, Trial], shard: str) -> dict[str, Trial]:
  """Returns a part of the trials: for 'k/n', k from 1, every n-th one from the k-th on.

  Raises:
    ValueError: the text does not have that form.
  """
  part, _, parts = shard.partition('/')
  if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
    raise ValueError(f'--shard={shard}: write k/n with k from 1 to n, such as 2/8.')
  return dict(list(trials.items())[int(part) - 1::int(parts)])


def change_config(config: ConfigDict, changes: Mapping[str, str]) -> None:
  """Sets dotted keys of a config to texts, each read as the type that its key has; null is None.

  The files of its key `plugins` are imported: it is the config of the person who runs the command.

  Raises:
    ValueError: names the key that the config does not have, or that takes values of another type.
  """
  known = flags.FlagValues()
  words = ['', *(f'--config.{key}={text}' for key, text in changes.items() if text != 'null')]
  try:
    config_flags.DEFINE_config_dict('config', config, flag_values=known, sys_argv=words)
    known(words)
    for key in (key for key, text in changes.items() if text == 'null'):
      config_path.set_value(key, config, None)  # for which ml_collections has no spelling
  except (AttributeError, KeyError) as error:
    while isinstance(error.args[0], Exception):  # the KeyError of an AttributeError
      error = error.args[0]
    raise ValueError(f'the config has no such key: {error.args[0]} (`python -m sink_jax train '
                     '--help` lists all).') from None
  except (flags.Error, TypeError) as error:
    raise ValueError(str(error)) from None
  if files := config.get('plugins'):
    config.plugins = import_plugins(str(files))
