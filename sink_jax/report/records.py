"""A training run as a typed record: what it is, how far it got, what was measured in it.

`read_runs` makes records of the files of a run; tables, sentences and figures read attributes of
them, and report.json has them as they are, but for what the files of the run have at length.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sink_jax.evaluate import plots
from sink_jax.io.paths import AnyPath
from sink_jax.models.record import GraftReport
from sink_jax.report.jsontext import UNWRITTEN
from sink_jax.report.probe_record import Curves, ProbeRecord
from sink_jax.train.config import Experiment, Label
from sink_jax.train.provenance import provenance

# {key: a number, or None where it was not finite or not measured, for every row}
Course = Mapping[str, Sequence[float | None]]


@dataclasses.dataclass(frozen=True)
class Origin:
  """Where, by which command and with which code a run was trained; None before it was started."""

  hardware: str | None  # and the version of jax, and the day
  command: str | None
  code: str | None


@dataclasses.dataclass(frozen=True)
class Setup:
  """What was to be trained, from a config that could be read.

  settings: dotted config keys and their values, but for the label, which changes nothing.
  attention: the operation in words. proxy: whether its rows do not sum to one, so that importance
  is of proxy scores. has_extra_key: whether there is an extra key or a learned sink token. source:
  the data in words. facts: what is known of the optimum of a synthetic task. tokens: how many are
  seen in all steps, with repetition. epsilon: the threshold of importance.
  """

  settings: dict[str, Any] = dataclasses.field(metadata=UNWRITTEN)
  experiment: Experiment = dataclasses.field(metadata=UNWRITTEN)
  attention: str
  proxy: bool
  has_extra_key: bool
  source: str
  synthetic: bool
  facts: Mapping[str, float]
  seed: int
  steps: int
  tokens: int
  epsilon: float


@dataclasses.dataclass(frozen=True)
class TextAmount:
  """How much training text there is, and how often a whole run passes over it.

  All are None for a synthetic task. content: a hash of the data, None in older runs as well.
  """

  unique_tokens: int | None = None
  epochs: float | None = None
  content: str | None = None


@dataclasses.dataclass(frozen=True)
class RunRecord:
  """One training run, as far as its files say.

  status: 'done', 'running', 'interrupted', 'diverged', 'failed', 'not expressible', 'not run' or
  'unreadable'; error, reason and loss explain it where they are known. step: the last one with a
  row of metrics or a status.
  train_course, valid_course: the metrics that are numbers, a list per key. analyses: the content of
  analyses.json. losses: {validation set: nats per token} at the last evaluation, or squared
  errors per token of a task with continuous targets.

  setup is None without a readable config, text before the data were opened, losses and probe
  before the first row of each, graft of a run that does not begin with one.
  """

  name: str
  folder: AnyPath = dataclasses.field(metadata=UNWRITTEN)
  label: Label
  status: str
  error: str | None
  reason: str | None
  loss: float | str | None
  origin: Origin
  step: int
  train_course: Course = dataclasses.field(metadata=UNWRITTEN)
  valid_course: Course = dataclasses.field(metadata=UNWRITTEN)
  analyses: Mapping[str, Mapping[str, Any]] = dataclasses.field(metadata=UNWRITTEN)
  setup: Setup | None = None
  text: TextAmount | None = None
  losses: Mapping[str, float | None] | None = None
  probe: ProbeRecord | None = None
  graft: GraftReport | None = None

  @property
  def readable(self) -> bool:
    """Whether the config is known and nothing else in the folder was found to be damaged."""
    return self.setup is not None and self.status != 'unreadable'

  @property
  def proxy(self) -> bool:
    return self.setup is not None and self.setup.proxy

  @property
  def known_setup(self) -> Setup:
    """The setup of a run that has one, as all probed and all comparable runs have."""
    assert self.setup is not None, f'the config of {self.name} is not known'
    return self.setup

  @property
  def shown_losses(self) -> list[str]:
    """The validation sets worth showing: a synthetic task's own, else all targets."""
    if self.losses is None:
      return []
    # A synthetic task has sets that mean something each; 'valid' is of all targets.
    named = [key for key in self.losses if key != 'valid']
    return named if named and self.known_setup.synthetic else ['valid']

  def plot(self, *, ax: Axes | None = None) -> Figure:
    """Draws Sink_1 of the first token, and Sink_* of an extra key, against the step.

    ax: Matplotlib axes to draw on; by default those of a new figure. Returns the figure.

    Raises:
      ValueError: the run was not probed.
    """
    curves = self._curves
    ax = ax or plots.new_axes(6.4, 3.8)
    ax.plot(curves.step, curves.sink_1, marker='o', markersize=3.5, label=plots.SINK_1)
    if any(value is not None for value in curves.sink_extra_key):
      ax.plot(curves.step, np.asarray(curves.sink_extra_key, float), linestyle='--',
              label=f'{plots.SINK_EXTRA_KEY}, extra key')
    ax.set_ylim(-4, 104)
    ax.legend(frameon=False)
    plots.label(ax, self.name + ('*' if self.proxy else ''), 'step', '% of heads')
    return plots.figure_of(ax)

  @property
  def _curves(self) -> Curves:
    if self.probe is None:
      raise ValueError(f'{self.name} has no rows of the probe (status: {self.status}).')
    return self.probe.curves


def made_by(runs: Collection[RunRecord]) -> dict[str, list[str]]:
  """How runs were trained, and how a report of them is made now; what runs share is named once."""
  known = lambda key: sorted({value for run in runs if (value := getattr(run.origin, key))}) or [
      'unknown']
  now = provenance()
  return {
      'trained by': known('command'), 'trained on': known('hardware'),
      'trained with': known('code'), 'reported by': [now['command']], 'date': [now['date']],
      'reported on': [f'{now["hardware"]}; jax {now["jax"]}; Python {now["python"]}'],
      'reported with': [now['code']]}


def differing_settings(runs: Sequence[RunRecord]
                       ) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
  """Dotted config keys: what all runs share, and {run name: what it has differently}."""
  flat = {run.name: run.known_setup.settings for run in runs}
  keys = dict.fromkeys(key for settings in flat.values() for key in settings)
  shared = {key: next(iter(flat.values())).get(key) for key in keys
            # As JSON, since lists cannot be in a set.
            if len({json.dumps(settings.get(key)) for settings in flat.values()}) == 1}
  return shared, {name: {key: value for key, value in settings.items() if key not in shared}
                  for name, settings in flat.items()}


def baseline_of(run: RunRecord, runs: Sequence[RunRecord]) -> RunRecord | None:
  """The softmax run that differs from this one only in attention, and there the least."""
  # A softmax run is itself what the others vary, and what a run without a config varies is not
  # known.
  if run.setup is None or run.setup.attention == 'softmax':
    return None
  # Any other difference, as in the seed or the data, would be mistaken for an effect of attention.
  mine, alike = run.setup.settings, []
  for other in runs:
    if other.setup is not None and other.setup.attention == 'softmax':
      its = other.setup.settings
      changed = [key for key in mine | its if mine.get(key) != its.get(key)]
      if all(key.startswith('attention.') or key == 'model.sink_tokens' for key in changed):
        alike.append((len(changed), other))
  # Softmax runs may differ in position or mask: sigmoid with ALiBi is set against softmax with
  # ALiBi, where there is one.
  return min(alike, key=lambda pair: pair[0])[1] if alike else None
