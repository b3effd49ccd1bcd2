"""What a training step takes beside one of softmax, as `sink_jax.benchmark trials` measured it.

It is no number of the runs: those were trained one after the other, several at a time, on machines
that did other things as well. The benchmark times both in turns in one process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

FILE = 'step_times.json'  # in the folder of the runs
COMMAND = f'python -m sink_jax.benchmark trials --json=runs/remedies/{FILE}'
NOT_MEASURED = 'not measured'


@dataclasses.dataclass(frozen=True)
class StepTime:
  """Time of a step over that of softmax: the median of pairs of timings, and their quartiles."""

  ratio: float
  low: float
  high: float
  pairs: int

  def text(self) -> str:
    return f'{self.ratio:.2f} ({self.low:.2f} to {self.high:.2f})'


@dataclasses.dataclass(frozen=True)
class StepTimes:
  """The step times of trials by (task, variant); measured: on what, when and with which code."""

  ratios: Mapping[tuple[str, str], StepTime] = dataclasses.field(default_factory=dict)
  measured: str = ''

  def text(self, task: str, variant: str) -> str:
    """'1.04 (1.02 to 1.07)', or that it was not measured."""
    found = self.ratios.get((task, variant))
    return found.text() if found else NOT_MEASURED

  def sentence(self) -> str:
    """How the times were measured, or the command that measures them."""
    if not self.ratios:
      return f'Times of steps were not measured; {COMMAND} does.'
    pairs = max(found.pairs for found in self.ratios.values())
    return (f'Time of a step: over that of softmax, both timed in turns in one process ({pairs} '
            f'pairs: the median, and the quartiles in brackets; {self.measured}).')
