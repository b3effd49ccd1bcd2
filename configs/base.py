"""The defaults of every experiment, the paper's (Section 4), and tables of changes to them.

The keys are the fields of `sink_jax.train.config.Experiment`; `python -m sink_jax train --help`
lists them with their meanings.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

from ml_collections import ConfigDict

from sink_jax.arguments import check_known
from sink_jax.component import Component
from sink_jax.train.config import Experiment, as_config_dict, changed

Trials: TypeAlias = Mapping[str, Mapping[str, Any]]  # {trial: {dotted key: value}}


def get_config(name: str = '') -> ConfigDict:
  """The defaults; this file has no trials to name."""
  if name:
    raise ValueError(f'configs/base.py has no trials, so none that is called {name!r}.')
  return as_config_dict(Experiment())


def attention(**components: Component) -> dict[str, Component]:
  """Changes of the components of attention, by their dotted keys."""
  return {f'attention.{name}': value for name, value in components.items()}


def trial(trials: Trials, name: str, task: str = '') -> ConfigDict:
  """The config of one trial of a table; see `experiment`."""
  return as_config_dict(experiment(trials, name, task))


def experiment(
  trials: Trials, name: str, task: str = '', default: Experiment = Experiment()
) -> Experiment:
  """One trial of a table: the default with the trial's changes.

  Args:
    task: the label by which reports choose the runs to compare.

  Raises:
    ValueError: no trial is named, or an unknown one; lists the choices.
  """
  if not name:
    raise ValueError(
      f'Name a trial of the config file, as in --config=FILE:TRIAL. Choices: {", ".join(trials)}.'
    )
  check_known(name, trials, 'Unknown trial')
  return changed(default, {**trials[name], 'label.trial': name, 'label.task': task})
