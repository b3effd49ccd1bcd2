"""Reads the trials of a config file, at a budget, for some seeds."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from sink_jax.io.paths import importable_configs
from sink_jax.sweep.config_keys import change_config
from sink_jax.train.experiment import RESUMABLE, NotExpressible, from_dict
from sink_jax.train.placeholders import filled_in

FINAL_STATUSES = ('done', 'diverged', 'not expressible')  # nothing is left to do for such a trial
# Keys that change neither the model nor its training, so that a label need not name them. The data
# of a run are recorded with the run, and so is the source that it begins with.
_NEUTRAL = (*RESUMABLE, 'data.source', 'data.valid_source', 'data.tokenizer', 'data.domain_weights',
            'init.source', 'model.vocab_size', 'model.implementation', 'model.remat',
            'model.unroll', 'loss_logits', 'microbatches', 'gradient_reduction',
            'probe.every', 'validation.every', 'validation.batches')


@dataclasses.dataclass(frozen=True)
class Trial:
  """A run to make.

  Attributes:
    name: of the trial, and of its folder.
    config: its config dict; None where the budget has no counterpart of it.
    label: the label of the config, or what it would have been.
    reason: why there is no config; '' where there is one.
    overridden: keys of the settings that the table of trials sets for this trial, so that with
      the settings it would not be the trial of that name.
    problem: why the settings leave it without a config; '' where they do not.
    rules: what its budget changes, in words, where the config file has rules of its own; () where
      those of `paper.budgets` hold.
  """

  name: str
  config: Mapping[str, Any] | None
  label: Mapping[str, str] = dataclasses.field(default_factory=dict)
  reason: str = ''
  overridden: tuple[str, ...] = ()
  problem: str = ''
  rules: tuple[str, ...] = ()


def load_trials(path: str | Path, options: Mapping[str, str] | None = None,
                seeds: Iterable[int] | None = None,
                settings: Mapping[str, str] | None = None) -> dict[str, Trial]:
  """Reads the trials of a config file, in its order, one for every seed.

  Args:
    path: the file, which has a table TRIALS and a function get_config, and a table RULES of what
      each budget changes where it does not leave that to `budget.config`.
    options: what get_config takes, such as {'budget': 'smoke', 'protocol': 'released'}.
    seeds: a trial is then called NAME-seed-N; by default the config's seed, and NAME.
    settings: dotted config keys and values as text, the same for all. What changes the
      computation becomes a part of the label's budget: 'smoke with steps=50'. Where a trial cannot
      be built with them, its `problem` says why.

  Returns:
    {name: trial}.

  Raises:
    ValueError: no such file, no table TRIALS in it, a trial that cannot be built, or none with the
      settings, or a seed among them beside `seeds`.
  """
  path, options = Path(path), dict(options or {})
  if seeds is not None and 'seed' in (settings or {}):
    raise ValueError('the config key seed is set, and the seeds are chosen: leave one of them out.')
  if not path.is_file():
    trial = str(path).partition(':')[2]
    raise ValueError(f'Config file {path} does not exist.' + (
        f' Trials are chosen by --only={trial}.' if trial else ''))
  module, settings = _load(path), dict(settings or {})
  changes_of_all = ', '.join(f'{k}={v}' for k, v in settings.items() if k not in _NEUTRAL)
  swept = {key for key in settings  # what the trials of the table differ in
           if len({repr(changes.get(key)) for changes in module.TRIALS.values()}) > 1}
  trials = {}
  for name in module.TRIALS:
    try:
      config = module.get_config(','.join([name, *(f'{k}={v}' for k, v in options.items())]))
      rules = tuple(getattr(module, 'RULES', {}).get(config.label.budget, ()))
      change_config(config, settings)
      if config.label.budget and changes_of_all:
        config.label.budget += f' with {changes_of_all}'
      config = config.to_dict()
      from_dict(filled_in(config))  # of any seed; what is wrong with it is wrong for all
    except NotExpressible as error:
      # The trial stays in the table with its reason, so that its absence from the results is
      # explained.
      trials |= _for_seeds(Trial(name, None, error.label, str(error)), seeds)
      continue
    except Exception as error:  # a config file is the user's program: anything can be wrong with it
      kind = '' if isinstance(error, ValueError) else f'{type(error).__name__}: '
      problem = f'{path}, trial {name}: {kind}{error}'
      if not settings:
        raise ValueError(problem) from error
      trials |= _for_seeds(Trial(name, None, problem=problem), seeds)
      continue
    # A setting of a key that all trials have alike changes all of them alike. Of a key in which
    # they differ, it would make this trial another one under its name.
    overridden = tuple(key for key in settings if key in swept and key in module.TRIALS[name])
    trials |= _for_seeds(Trial(name, config, config['label'], '', overridden, rules=rules), seeds)
  problems = [trial.problem for trial in trials.values()]
  if problems and all(problems):
    raise ValueError(problems[0])
  return trials


def select_shard(trials: Mapping[str, Trial], shard: str) -> dict[str, Trial]:
  """Returns a part of the trials: for 'k/n', k from 1, every n-th one from the k-th on.

  Raises:
    ValueError: the text does not have that form.
  """
  part, _, parts = shard.partition('/')
  if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
    raise ValueError(f'--shard={shard}: write k/n with k from 1 to n, such as 2/8.')
  names = list(trials)[int(part) - 1::int(parts)]
  return {name: trials[name] for name in names}


def _load(path: Path) -> ModuleType:
  """Imports a config file, which may import others beside it as configs.NAME."""
  try:
    with importable_configs(path):
      spec = importlib.util.spec_from_file_location(f'configs.{path.stem}', path)
      if spec is None or spec.loader is None:
        raise ImportError('its name does not end in .py')
      module = importlib.util.module_from_spec(spec)
      spec.loader.exec_module(module)
  except Exception as error:  # as above
    raise ValueError(f'Cannot use {path}: {type(error).__name__}: {error}.') from error
  if not hasattr(module, 'TRIALS'):
    raise ValueError(f'{path} has no table TRIALS; run it with python -m sink_jax.train')
  return module


def _for_seeds(trial: Trial, seeds: Iterable[int] | None) -> dict[str, Trial]:
  """The trial, or one like it for every seed, by name."""
  of = lambda config: config and filled_in(config)
  if seeds is None:
    return {trial.name: dataclasses.replace(trial, config=of(trial.config))}
  named = {}
  for seed in seeds:
    name = f'{trial.name}-seed-{seed}'
    config = of(trial.config and dict(trial.config, seed=seed))
    named[name] = dataclasses.replace(trial, name=name, config=config)
  return named
