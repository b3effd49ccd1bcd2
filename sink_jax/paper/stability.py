"""Criteria for a stable training run, on the loss and the gradient norm of every step.

The paper says that a model has "no issues of training stability" (Appendix C, Figure 30) and gives
no criterion. Here a run has an issue at a step

  - whose loss or gradient norm is not finite;
  - after the warm-up, whose gradient norm is above 10 times the median of the 50 steps before;
  - after the warm-up, whose loss is more than 5 robust deviations above the median of the 50 steps
    before; a robust deviation is 1.4826 times the median distance from that median, which for
    normal noise is the standard deviation;
  - after the warm-up, before which that median itself is more than 5 of these deviations above the
    loss of the first step, which is taken before any update.

A step with fewer than 50 before it is judged by the first alone. The second and the third are
relative to what the run did just before, so that one that is bad from its first steps on has no
step that stands out: a planted run with 1,000 times the learning rate, whose loss more than doubled
within the warm-up and stayed there, was found by neither. The fourth was added then. Of noise
alone, normal and without a trend, about one run of 300 steps in a hundred has a loss beyond the
third, and none in a thousand a median beyond the fourth.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

WINDOW = 50  # steps before, whose median a step is compared with
LARGEST_GRADIENT = 10  # medians
LARGEST_LOSS = 5  # robust deviations above the median; of the median above the first loss
_NORMAL = 1.4826  # standard deviations of normal noise in its median absolute deviation

CRITERIA = {
    'not_finite': 'a loss or gradient norm that is not finite',
    'gradient': f'after the warm-up, a gradient norm above {LARGEST_GRADIENT} times the median of '
                f'the {WINDOW} steps before',
    'loss': f'after the warm-up, a loss more than {LARGEST_LOSS} robust deviations ({_NORMAL} '
            f'times the median absolute deviation) above the median of the {WINDOW} steps before',
    'level': f'after the warm-up, that median more than {LARGEST_LOSS} of these deviations above '
             'the loss of the first step, which is taken before any update',
}


@dataclasses.dataclass(frozen=True)
class Issues:
  """The steps, from 1, that do not meet each of the criteria."""

  not_finite: Sequence[int] = ()
  gradient: Sequence[int] = ()
  loss: Sequence[int] = ()
  level: Sequence[int] = ()

  @property
  def steps(self) -> list[int]:
    """The steps with an issue, whichever it is."""
    return sorted({*self.not_finite, *self.gradient, *self.loss, *self.level})


def issues(loss: Sequence[float | None], grad_norm: Sequence[float | None], warmup: int) -> Issues:
  """What the criteria find in a run.

  Args:
    loss, grad_norm: of step 1, 2, ... without a gap; None where they were not finite.
    warmup: steps of it.
  """
  judged = judged_steps(len(loss), warmup)
  return Issues([i for i, pair in enumerate(zip(loss, grad_norm, strict=True), 1) if None in pair],
                [step for step in judged if _large_gradient(_before(grad_norm, step))],
                [step for step in judged if _large_loss(_before(loss, step))],
                [step for step in judged if _high_level(_before(loss, step), loss[0])])


def judged_steps(steps: int, warmup: int) -> range:
  """The steps of a run that all criteria judge."""
  return range(max(warmup, WINDOW) + 1, steps + 1)


def _before(values: Sequence[float | None], step: int) -> tuple[float, list[float]] | None:
  """The value of a step and those of the window before it; None where one of them is missing.

  A run with a value that is not finite has an issue already.
  """
  value, window = values[step - 1], values[step - 1 - WINDOW:step - 1]
  known = [x for x in window if x is not None]
  return None if value is None or len(known) < WINDOW else (value, known)


def _large_gradient(pair: tuple[float, list[float]] | None) -> bool:
  return pair is not None and pair[0] > LARGEST_GRADIENT * statistics.median(pair[1])


def _large_loss(pair: tuple[float, list[float]] | None) -> bool:
  if pair is None:
    return False
  middle, allowed = _middle_and_allowed(pair[1])
  return pair[0] > middle + allowed


def _high_level(pair: tuple[float, list[float]] | None, first: float | None) -> bool:
  if pair is None or first is None:
    return False
  middle, allowed = _middle_and_allowed(pair[1])
  return middle > first + allowed


def _middle_and_allowed(window: Sequence[float]) -> tuple[float, float]:
  """The median of a window, and the distance that is more than noise of its size."""
  middle = statistics.median(window)
  deviation = _NORMAL * statistics.median(abs(x - middle) for x in window)
  return middle, LARGEST_LOSS * deviation
