"""The trials of a config file, at a budget, for some seeds."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sink_jax.io.paths import importable_configs
from sink_jax.train.experiment import RESUMABLE, NotExpressible, from_dict
from sink_jax.train.old_keys import hint

ENDED = ('done', 'diverged', 'not expressible')  # statuses of trials that nothing is left to do for
# Keys that change neither the model nor its training; which data there was is told elsewhere.
_NEUTRAL = (*RESUMABLE, 'data.source', 'data.valid_source', 'data.tokenizer', 'data.domain_weights',
            'model.vocab_size', 'model.implementation', 'model.remat', 'model.unroll',
            'loss_logits', 'microbatches', 'gradient_reduction',
            'probe.every', 'validation.every', 'validation.batches')


@dataclasses.dataclass(frozen=True)
class Trial:
  """A run to make: its folder's name and its config dict.

  config: None where the budget has no counterpart of it; `reason` then says why.
  label: that of the config, or what it would have been.
  spoiled: keys of `settings` that the trial itself is about.
  """

  name: str
  config: Mapping[str, Any] | None
  label: Mapping[str, str] = dataclasses.field(default_factory=dict)
  reason: str = ''
  spoiled: tuple[str, ...] = ()


def load_trials(path, options: Mapping[str, str] | None = None, seeds: Iterable[int] | None = None,
                settings: Mapping[str, str] | None = None) -> dict[str, Trial]:
  """{name: trial} of a config file, in its order, a trial for every seed.

  Args:
    options: of the file's own, such as {'budget': 'smoke', 'protocol': 'released'}.
    seeds: a trial is then called NAME-seed-N; by default the config's seed, and NAME.
    settings: dotted config keys and values as text, the same for all. What changes the
      computation becomes a part of the label's budget: 'smoke with steps=50'.

  Raises:
    ValueError: no such file, no table TRIALS in it, or a trial that cannot be built.
  """
  path, options = Path(path), dict(options or {})
  if not path.is_file():
    raise ValueError(f'Config file {path} does not exist.')
  module, settings = _load(path), dict(settings or {})
  told = ', '.join(f'{k}={v}' for k, v in settings.items() if k not in _NEUTRAL)
  swept = {key for key in settings
           if len({repr(changes.get(key)) for changes in module.TRIALS.values()}) > 1}
  trials = {}
  for name in module.TRIALS:
    try:
      config = module.get_config(','.join([name, *(f'{k}={v}' for k, v in options.items())]))
      for key, value in settings.items():
        _set(config, key, value)
      if config.label.budget and told:
        config.label.budget += f' with {told}'
      config = config.to_dict()
      from_dict(config)
    except NotExpressible as error:
      trials |= _for_seeds(Trial(name, None, error.label, str(error)), seeds)
      continue
    except Exception as error:  # it is somebody's program: anything can be wrong with it
      raise ValueError(f'{path}, trial {name}: {type(error).__name__}: {error}') from error
    spoiled = tuple(key for key in settings if key in swept and key in module.TRIALS[name])
    trials |= _for_seeds(Trial(name, config, config['label'], spoiled=spoiled), seeds)
  return trials


def sharded(trials: Mapping[str, Trial], shard: str) -> dict[str, Trial]:
  """The k-th of n parts of the trials, 'k/n', k from 1: every n-th one.

  Raises:
    ValueError: not of that form.
  """
  part, _, parts = shard.partition('/')
  if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
    raise ValueError(f'--shard={shard}: write k/n with k from 1 to n, such as 2/8.')
  names = list(trials)[int(part) - 1::int(parts)]
  return {name: trials[name] for name in names}


def parse_settings(texts: Iterable[str]) -> dict[str, str]:
  """['data.context=64', ...] -> {'data.context': '64', ...}."""
  settings = {}
  for text in texts:
    key, equals, value = text.partition('=')
    if not equals or not key.strip():
      raise ValueError(f'--set={text}: write key=value, such as --set=data.context=64.')
    if key.strip() in settings:
      raise ValueError(f'--set={key.strip()} is given twice.')
    settings[key.strip()] = value.strip()
  return settings


def _load(path):
  """The module of a config file, which may import others beside it as configs.NAME."""
  try:
    with importable_configs(path):
      spec = importlib.util.spec_from_file_location(f'configs.{path.stem}', path)
      module = importlib.util.module_from_spec(spec)
      spec.loader.exec_module(module)
  except Exception as error:  # as above
    raise ValueError(f'Cannot use {path}: {type(error).__name__}: {error}.') from error
  if not hasattr(module, 'TRIALS'):
    raise ValueError(f'{path} has no table TRIALS; run it with python -m sink_jax.train')
  return module


def _for_seeds(trial, seeds):
  if seeds is None:
    return {trial.name: trial}
  named = {}
  for seed in seeds:
    name = f'{trial.name}-seed-{seed}'
    config = trial.config and dict(trial.config, seed=seed)
    named[name] = dataclasses.replace(trial, name=name, config=config)
  return named


def _set(config, key, text):
  """Sets one dotted key of a ConfigDict, with the type that it has."""
  section, _, last = key.rpartition('.')
  try:
    owner = config[section] if section else config
    if not hasattr(owner, 'keys') or last not in owner:
      raise KeyError(key)
    value = text if isinstance(owner[last], str) else json.loads(text)
    config.update_from_flattened_dict({key: value})
  except (KeyError, AttributeError):
    raise ValueError(f'--set: unknown config key {key}; configs/base.py lists all keys'
                     f'{hint(key)}') from None
  except json.JSONDecodeError:
    if owner[last] is not None:
      raise ValueError(f'--set={key}={text}: {owner[last]!r} is a {type(owner[last]).__name__}, '
                       'so it takes a number, true, false or null') from None
    config.update_from_flattened_dict({key: text})
