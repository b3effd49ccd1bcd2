"""Criteria for a stable training run, on the loss and the gradient norm of every step.

The paper says that a model has "no issues of training stability" (Appendix C, Figure 30) and gives
no criterion. Here a run has an issue at a step that meets one of the four in `CRITERIA`. A robust
deviation is for normal noise its standard deviation.

A step with fewer than 50 before it is judged by the first alone. The second and the third are
relative to what the run did just before, so that one that is bad from its first steps on has no
step that stands out: a planted run with 1,000 times the learning rate, whose loss more than doubled
within the warm-up and stayed there, was found by neither. The fourth was added then. Of noise
alone, normal and without a trend, about one run of 300 steps in a hundred has a loss beyond the
third, and none in a thousand a median beyond the fourth.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

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
  values_2xT = np.array([loss, grad_norm], float)  # None becomes nan, which no comparison meets
  steps_S = np.array(judged_steps(len(loss), warmup), int)
  now_2xS = values_2xT[:, steps_S - 1]
  before_2xSxW = values_2xT[:, steps_S[:, None] + np.arange(-WINDOW - 1, -1)]
  middle_2xS = np.median(before_2xSxW, -1)
  # The distance from the median of the losses that is more than noise of its size.
  allowed_S = LARGEST_LOSS * _NORMAL * np.median(
      abs(before_2xSxW[0] - middle_2xS[0][:, None]), -1)
  high_S = (middle_2xS[0] > values_2xT[0, :1] + allowed_S) & ~np.isnan(now_2xS[0])
  at = lambda judged_S: steps_S[judged_S].tolist()
  return Issues((np.flatnonzero(np.isnan(values_2xT).any(0)) + 1).tolist(),
                at(now_2xS[1] > LARGEST_GRADIENT * middle_2xS[1]),
                at(now_2xS[0] > middle_2xS[0] + allowed_S), at(high_S))


def judged_steps(steps: int, warmup: int) -> range:
  """The steps of a run that all criteria judge."""
  return range(max(warmup, WINDOW) + 1, steps + 1)
