"""What the leaderboard compares: four axes, each judged on its own, and further columns.

Concentration of attention, drain of the first token's values, massive activations of its hidden
states and the loss move separately (Sun et al. 2603.05498, Owen et al. 2503.22329), so there is no
total score. The margins were written before any run: a difference within one is no difference.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from sink_jax.paper.criteria import MASSIVE, NO_SINK, SINK
from sink_jax.paper.events import DRAINED
from sink_jax.paper.metrics import METRICS, probed
from sink_jax.report.probe_record import largest
from sink_jax.report.records import RunRecord


@dataclasses.dataclass(frozen=True)
class Axis:
  """One thing that a remedy may change.

  Attributes:
    key: its name in report.json.
    heading: of its column.
    metric: the key of `METRICS` that measures it.
    margin: the difference from softmax that does not count yet, on the scale of the metric: points
      of rates, logarithms of ratios, nats.
    present: the level beyond which softmax has it, or the null of the metric where that is more;
      None for the loss, which needs none.
    absent: the level beyond which a remedy has removed it.
    small: whether it is a small number that shows it, as of drained values.
    less, more: what a remedy does whose number is smaller, or larger, than that of softmax.
  """

  key: str
  heading: str
  metric: str
  margin: float
  less: str
  more: str
  present: float | None = None
  absent: float | None = None
  small: bool = False

  def text(self, value: float) -> str:
    """A difference on the scale of the metric: points, nats, or the factor between two ratios."""
    if METRICS[self.metric].unit == 'ratio':
      return f'x {math.exp(value):.2f}'
    return f'{value:+.3f}' if self.key == 'loss' else f'{value:+.1f}'


AXES = (
    Axis('concentration', 'Sink_1 %', 'sink_1', 5.0, 'reduces', 'adds', SINK, NO_SINK),
    Axis('drain', 'least value ratio', 'value_ratio', 0.1, 'adds', 'reduces', DRAINED, DRAINED,
         small=True),
    Axis('massive', 'largest hidden ratio', 'massive', 0.1, 'reduces', 'adds', MASSIVE, MASSIVE),
    Axis('loss', 'valid loss', 'valid_loss', 0.02, 'better', 'worse'),
)
EXTRA_KEY = 'sink_star'  # the metric of the mass that goes to an extra key or a sink token


def null_level(axis: Axis, softmax: Sequence[RunRecord]) -> float:
  """The 99th percentile of the axis where there is nothing to find; the largest of the seeds'."""
  key = METRICS[axis.metric].null
  return max((of[key] for run in softmax if run.probe
              for of in (run.probe.nulls, run.probe.last_nulls) if key in of), default=-math.inf)


# Columns that are shown without a verdict.
COLUMNS: dict[str, Callable[[RunRecord], float | None]] = {
    'Sink_* %': METRICS[EXTRA_KEY].of,
    'raw mass on token 1': probed(lambda probe: probe.raw_mass_1),
    'dormant heads %': probed(lambda probe: probe.dormant_heads),
    'max / median': probed(lambda probe: probe.curves.max_over_median[-1]),
    'kurtosis': probed(lambda probe: largest(
        block.kurtosis_moment for block in probe.activations)),
}
