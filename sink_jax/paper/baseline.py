"""What the search for a baseline found: settings that show the paper's phenomena, and their cost.

The runs are those of configs/baseline.py, SETTING-KIND, and those of the budget `desk`, which is
the setting that was chosen, with other seeds. A criterion is met where a number lies beyond its
level and beyond what an untrained model, or random target positions, have (see evaluate/nulls.py).
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sink_jax.evaluate.nulls import uniform_importance
from sink_jax.paper.criteria import NO_SINK, SINK
from sink_jax.report.probe_record import ProbeRecord
from sink_jax.report.records import RunRecord

KINDS = ('softmax', 'sigmoid-normalized', 'sigmoid', 'k-bias')
DESK = 'desk'  # the budget that has the chosen setting
_DESK = {'default': 'softmax', **{kind: kind for kind in KINDS[1:]}}
# The name of a setting has its number of blocks in it, which tells it from trials of other files
# whose names end alike. Longer kinds come first: '-sigmoid' ends none of them.
_TRIAL = re.compile(rf'(.*?\d.*?)-({"|".join(KINDS)})')
_OTHER_TASK = 'backcopy'  # searched for massive activations alone
LARGE_SINK = 30  # percent of heads: between the paper's default, 18.18, and its 1B model, 45.11
LARGE_RATIO = 5  # hidden norm ratio; the paper's 1B model has about 23


@dataclasses.dataclass(frozen=True)
class Criterion:
  """What is wanted of one kind of attention. met: of the last probe of a run that is done."""

  key: str
  kind: str
  words: str
  met: Callable[[ProbeRecord], bool]


def _null(probe: ProbeRecord, key: str) -> float:
  """The larger of the untrained and the trained model's 99th percentiles; 0 where unknown."""
  return max(probe.nulls.get(key, 0.0), probe.last_nulls.get(key, 0.0))


def hidden_ratio(probe: ProbeRecord) -> float | None:
  """The largest hidden norm ratio of a block."""
  return probe.curves.hidden_ratio[-1]


CRITERIA = (
    Criterion('a', 'softmax', f'softmax: Sink_1 of {LARGE_SINK} % or more, and beyond its null',
              lambda probe: probe.sink_1 >= max(LARGE_SINK, _null(probe, 'sink_1'))),
    Criterion('b', 'softmax', f'softmax: a hidden norm ratio of {LARGE_RATIO} or more in some '
              'block, and beyond its null',
              lambda probe: (hidden_ratio(probe) or 0) >= max(
                  LARGE_RATIO, _null(probe, 'hidden_ratio'))),
    Criterion('c', 'sigmoid-normalized', f'normalised sigmoid: Sink_1 of {SINK} % or more, and '
              'beyond its null',
              lambda probe: probe.sink_1 >= max(SINK, _null(probe, 'sink_1'))),
    # A sigmoid that learned nothing gives every token half a weight: a sink stands out of the rest.
    Criterion('d', 'sigmoid', f'sigmoid without normalisation: Sink_1 below {NO_SINK} %, and no '
              "more raw weight on the first token than three times a row's mean",
              lambda probe: probe.sink_1 < NO_SINK and _raw_excess(probe) < 3),
    Criterion('e', 'k-bias', f'K bias: Sink_* of {SINK} % or more, and Sink_1 below {NO_SINK} %',
              lambda probe: (probe.sink_extra_key or 0) >= SINK and probe.sink_1 < NO_SINK),
)


def _raw_excess(probe: ProbeRecord) -> float:
  """Mean raw weight on the first token over the mean raw weight of a visible key.

  A row i of T has i keys, so that the mean weight of a key is the mean row's sum over (T + 1) / 2.
  """
  mean = probe.raw_row_mass / ((len(probe.sink) + 1) / 2)
  return probe.raw_mass_1 / mean if mean else 0.0


@dataclasses.dataclass(frozen=True)
class Found:
  """A run of the search. seconds: of training, by the median of its throughput; None if unknown."""

  setting: str
  kind: str
  seed: int
  run: RunRecord
  seconds: float | None

  @property
  def met(self) -> Mapping[str, bool]:
    """Which criteria of its kind it meets; none before it is done."""
    probe = self.run.probe
    if self.run.status != 'done' or probe is None:
      return {}
    return {criterion.key: criterion.met(probe) for criterion in CRITERIA
            if criterion.kind == self.kind
            and (criterion.key == 'b' or not self.setting.startswith(_OTHER_TASK))}

  def as_dict(self) -> dict[str, Any]:
    return {'setting': self.setting, 'kind': self.kind, 'seed': self.seed,
            'status': self.run.status, 'steps': self.run.step, 'training_seconds': self.seconds,
            'met': dict(self.met), 'trained_on': self.run.origin.hardware,
            'trained_by': self.run.origin.command, 'trained_with': self.run.origin.code,
            **self.numbers}

  @functools.cached_property
  def numbers(self) -> dict[str, Any]:
    """What the search looks at, from the last rows of metrics; the loss alone without a probe."""
    loss, probe = {'valid_loss': (self.run.losses or {}).get('valid')}, self.run.probe
    if probe is None:
      return loss
    largest = max(probe.activations, key=lambda block: block.max_over_median or 0, default=None)
    return loss | {
        'sink_1': probe.sink_1, 'sink_star': probe.sink_extra_key,
        'largest_importance': probe.largest_importance,
        'uniform_importance': uniform_importance(len(probe.sink)), 'raw_mass_1': probe.raw_mass_1,
        'raw_row_mass': probe.raw_row_mass, 'value_ratio': probe.value_ratio,
        'hidden_ratio': hidden_ratio(probe),
        'largest_hidden_ratio_ever': max((r for r in probe.curves.hidden_ratio if r), default=None),
        'max_over_median': largest and largest.max_over_median,
        'kurtosis_moment': largest and largest.kurtosis_moment,
        'massive_block': largest and largest.block, 'massive_channel': largest and largest.channel,
        'null_untrained': dict(probe.nulls), 'null_trained': dict(probe.last_nulls)}


def find(runs: Iterable[RunRecord]) -> list[Found]:
  """The runs of the search among others, by setting, kind and seed.

  Raises:
    ValueError: there is none; with the command that makes them.
  """
  found = []
  for run in runs:
    named = _named(run)
    if named and run.setup is not None:
      found.append(Found(*named, run.setup.seed, run, _seconds(run)))
  if not found:
    raise ValueError('no run of configs/baseline.py, nor one of the budget desk, is there. To '
                     'train them: python -m sink_jax.sweep --config=configs/baseline.py '
                     '--workdir=runs/baseline')
  return sorted(found, key=lambda it: (it.setting == DESK, it.setting, KINDS.index(it.kind),
                                       it.seed))


def _named(run: RunRecord) -> tuple[str, str] | None:
  """(setting, kind) of a run of the search; None for any other."""
  if (run.label.budget, run.label.protocol) == (DESK, 'paper'):
    kind = _DESK.get(run.label.trial)
    return (DESK, kind) if kind else None
  match = None if run.label.budget else _TRIAL.fullmatch(run.label.trial)
  return (match[1], match[2]) if match else None


def _seconds(run: RunRecord) -> float | None:
  rates = sorted(rate for rate in run.train_course.get('tokens_per_second', ()) if rate)
  if not rates or run.setup is None:
    return None
  return run.setup.tokens * run.step / run.setup.steps / rates[len(rates) // 2]


def settings_met(found: Sequence[Found]) -> dict[str, dict[str, tuple[int, int]]]:
  """{criterion: {setting: (seeds that meet it, seeds that are done)}} of the settings asked for."""
  counts: dict[str, dict[str, tuple[int, int]]] = {criterion.key: {} for criterion in CRITERIA}
  for it in found:
    for key, met in it.met.items():
      yes, n = counts[key].get(it.setting, (0, 0))
      counts[key][it.setting] = yes + met, n + 1
  return counts
