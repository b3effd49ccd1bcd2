"""Config files: their trials, at a budget, for some seeds, with the settings of a command line."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType

from absl import flags
from ml_collections import ConfigDict, config_flags
from ml_collections.config_flags import config_path

from sink_jax.arguments import check_known
from sink_jax.io.paths import import_file
from sink_jax.train.config import Experiment, Label, NotExpressible, from_dict, where_keys
from sink_jax.train.plugins import import_plugins

# Keys that need no place in the label of a trial, since runs on other data are known by their hash
# ...
_NEUTRAL = (
  'data.',
  'init.source',
  'model.vocab_size',
  'microbatches',
  'probe.every',
  'seed',
  'validation.',
)
# ... and those of them that the hash does not cover.
_NOT_HASHED = ('data.interventions', 'data.max_tokens', 'data.valid_source')


@dataclasses.dataclass(frozen=True)
class Trial:
  """A run to make.

  name: of the trial, and of its folder. experiment: None where the budget has no counterpart of
  it. label: of the experiment, or what it would have been. reason: why there is no experiment.
  """

  name: str
  experiment: Experiment | None
  label: Label = Label()
  reason: str = ''


def read_config_file(path: str, settings: Mapping[str, str]) -> Experiment:
  """The experiment of FILE[:TRIAL[,budget=BUDGET][,protocol=PROTOCOL]], with dotted keys set to
  texts.

  Raises:
    ValueError: names the file, or the key, and what is wrong with it.
  """
  file, _, argument = path.partition(':')
  name, *words = argument.split(',')
  options = {key: value for key, _, value in (word.partition('=') for word in words)}
  try:
    module = import_file(file)
    config = _config(module, name, options)
  except Exception as error:  # a config file is a program: anything can be wrong with it
    raise ValueError(f'--config={path}: {_in_a_line(error)}') from None
  return _experiment(config, settings)


def load_trials(
  path: str | Path,
  options: Mapping[str, str] | None = None,
  seeds: Iterable[int] | None = None,
  settings: Mapping[str, str] | None = None,
) -> dict[str, Trial]:
  """Reads the trials of a config file, in its order, one for every seed.

  Args:
    path: the file, which has a table TRIALS and a function get_config.
    options: arguments of get_config, such as {'budget': 'desk', 'protocol': 'released'}.
    seeds: a trial is then called NAME-seed-N; by default the config's seed, and NAME.
    settings: dotted config keys and values as text, the same for all. Those that change the
      computation become a part of the label's budget: 'desk with steps=50'.

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
  trials: dict[str, Trial] = {}
  for name in module.TRIALS:
    try:
      experiment = _labelled(_experiment(_config(module, name, options or {}), settings), settings)
      for seed in chosen or [experiment.seed]:
        seeded = dataclasses.replace(experiment, seed=seed)
        full = f'{name}-seed-{seed}' if chosen else name
        trials[full] = Trial(full, seeded, seeded.label)
    except NotExpressible as error:  # its absence has a reason
      for full in [f'{name}-seed-{seed}' for seed in chosen] or [name]:
        trials[full] = Trial(full, None, error.label or Label(), str(error))
    except Exception as error:  # a config file is the user's program: anything can be wrong with it
      raise ValueError(f'{path}, trial {name}: {_in_a_line(error)}') from error
  return trials


def _config(module: ModuleType, name: str, options: Mapping[str, str]) -> ConfigDict:
  """The config of a trial, as the file has it."""
  _, *known = inspect.signature(module.get_config).parameters
  for option in options:
    check_known(option, known, 'the trials of this file have no option')
  config = module.get_config(name, **options)
  if not isinstance(config, ConfigDict):
    raise ValueError('get_config() returns no ConfigDict of ml_collections.')
  return config


def _experiment(config: ConfigDict, settings: Mapping[str, str]) -> Experiment:
  """The typed config, with dotted keys set to texts.

  The files of its key `plugins` are imported: it is the config of the person who runs the command.
  """
  _change(config, settings)
  if files := config.get('plugins'):
    config.plugins = import_plugins(str(files))
  return from_dict(config.to_dict())


def _labelled(experiment: Experiment, settings: Mapping[str, str]) -> Experiment:
  """The experiment, of whose budget the label names the settings that make it another one."""
  neutral = lambda key: key.startswith(_NEUTRAL) and key not in _NOT_HASHED
  told = [
    f'{key}={value}'
    for key, value in settings.items()
    if not neutral(key) and key not in where_keys()
  ]
  if not (told and experiment.label.budget):
    return experiment
  budget = f'{experiment.label.budget} with {", ".join(told)}'
  return dataclasses.replace(experiment, label=dataclasses.replace(experiment.label, budget=budget))


def _in_a_line(error: Exception) -> str:
  """An error of a config file: a mistake in it, or a defect, with its kind."""
  return str(error) if isinstance(error, ValueError) else f'{type(error).__name__}: {error}'


def select_shard(trials: Mapping[str, Trial], shard: str) -> dict[str, Trial]:
  """Returns a part of the trials: for 'k/n', k from 1, every n-th one from the k-th on.

  Raises:
    ValueError: the text does not have that form.
  """
  part, _, parts = shard.partition('/')
  if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
    raise ValueError(f'--shard={shard}: write k/n with k from 1 to n, such as 2/8.')
  return dict(list(trials.items())[int(part) - 1 :: int(parts)])


def _change(config: ConfigDict, changes: Mapping[str, str]) -> None:
  """Sets dotted keys of a config to texts, each read as the type that its key has; null is None.

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
    raise ValueError(
      f'the config has no such key: {error.args[0]} (`python -m sink_jax train --help` lists all).'
    ) from None
  except (flags.Error, TypeError) as error:
    raise ValueError(str(error)) from None
