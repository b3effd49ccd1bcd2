"""What the runs of configs/sft.py say of Figure 30: stability, and how alike two models behave.

The paper fine-tunes its 1B models with softmax and with sigmoid attention without normalisation,
and finds that the two "behave similarly" in training loss and gradient norm, and that sigmoid has
"no issues of training stability" (Appendix C); it gives no criterion. Here a run has an issue at a
step that meets one of the four in `CRITERIA`. They count for something where they find the planted
run unstable, which is softmax with 1,000 times the learning rate; and the paper's sentence is about
1B models, so that smaller budgets show the same curves without a verdict on it.

A robust deviation is for normal noise its standard deviation. A step with fewer than 50 before it
is judged by the first criterion alone. The second and the third are relative to what the run did
just before, so that one that is bad from its first steps on has no step that stands out: the
planted run, whose loss more than doubled within the warm-up and stayed there, was found by neither.
The fourth was added then. Of noise alone, normal and without a trend, about one run of 300 steps in
a hundred has a loss beyond the third, and none in a thousand a median beyond the fourth.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from sink_jax.paper.collect import Group, unlike
from sink_jax.paper.spread import Spread
from sink_jax.report.records import RunRecord

SOFTMAX, SIGMOID, PLANTED = 'sft-softmax', 'sft-sigmoid', 'sft-unstable'
TRIALS = {SOFTMAX: 'softmax', SIGMOID: 'sigmoid without normalisation',
          PLANTED: 'planted unstable run'}
COMMAND = 'python -m sink_jax sweep --config=configs/sft.py'
_PART = 0.1  # of the steps, whose mean loss is that of the beginning or of the end
# Settings in which the runs of a page may differ: where they begin, what they are about.
_RATE = 'optimizer.learning_rate'  # of the planted run
_VARIED = ('attention.', 'init.source', 'data.tokenizer')

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
Issues = dict[str, list[int]]  # {key of CRITERIA: the steps, from 1, that have that issue}
# What the probe measures of the sink, by the key of `Curves`, with its heading in words.
SIGNS = {'sink_1': 'Sink_1', 'hidden_ratio': 'largest hidden norm ratio',
         'value_ratio': 'least value norm ratio'}
Signs = Mapping[str, float | None]


@dataclasses.dataclass(frozen=True)
class TunedRun:
  """A run of configs/sft.py.

  step, steps: how far it is, and how many it is to have. problem: why it is not judged, or ''.
  issues: None where it is not. first_loss, last_loss: means over the first and the last tenth of
  the steps; median_gradient: after the warm-up. before, after: what the first and the last probe
  have, by the keys of SIGNS; None where there is none. proxy: whether its rows of attention do not
  sum to one. loss, grad_norm: of step 1, 2, ...
  """

  name: str
  trial: str
  seed: int
  status: str
  step: int
  steps: int
  warmup: int
  problem: str
  issues: Issues | None
  first_loss: float | None
  last_loss: float | None
  median_gradient: float | None
  before: Signs | None
  after: Signs | None
  proxy: bool
  loss: Sequence[float | None]
  grad_norm: Sequence[float | None]

  @property
  def ended(self) -> bool:
    return self.status in ('done', 'diverged')

  @property
  def unstable(self) -> list[int]:
    """The steps with an issue, whichever it is."""
    return sorted({step for steps in (self.issues or {}).values() for step in steps})

  @property
  def judged(self) -> int:
    """How many of its steps are judged by all criteria, or are not finite."""
    not_finite = self.issues['not_finite'] if self.issues else []
    return len({*judged_steps(len(self.loss), self.warmup), *not_finite})


@dataclasses.dataclass(frozen=True)
class Measure:
  """A quantity in which the two models are compared. of: on the scale of differences.

  margin: within which a difference is none; written before any two runs were compared.
  """

  words: str
  margin: float
  of: Callable[[TunedRun], float | None]
  ratio: bool = False

  def text(self, value: float) -> str:
    """A difference, or the factor between two: 'x 1.20'."""
    return f'x {math.exp(value):.2f}' if self.ratio else f'{value:+.3f}'


MEASURES = {
    'last_loss': Measure('the training loss of the last tenth', 0.1, lambda run: run.last_loss),
    'fall': Measure('its fall from the first tenth', 0.1, lambda run: (
        None if run.first_loss is None or run.last_loss is None
        else run.first_loss - run.last_loss)),
    'gradient': Measure('the median gradient norm after the warm-up', math.log(1.5), lambda run: (
        math.log(run.median_gradient) if run.median_gradient else None), ratio=True),
}


@dataclasses.dataclass(frozen=True)
class Difference:
  """Sigmoid minus softmax in a measure: seed by seed, its interval, and what follows of it."""

  measure: str
  seeds: Sequence[int]
  values: Sequence[float]
  mean: float
  low: float | None
  high: float | None
  verdict: str


@dataclasses.dataclass(frozen=True)
class Tuning:
  """The runs of a budget and protocol.

  rules: the budget whose rules apply. mixed: in what the runs must not differ, and do.
  trained: with what code and on what machines.
  """

  name: str
  rules: str
  protocol: str
  runs: Sequence[TunedRun]
  differences: Sequence[Difference]
  mixed: Sequence[str]
  trained: Sequence[str]

  def of(self, trial: str) -> list[TunedRun]:
    return [run for run in self.runs if run.trial == trial]

  @property
  def able(self) -> bool | None:
    """Whether the criteria find the planted run unstable; None before one has ended."""
    planted = [run for run in self.of(PLANTED) if run.ended and run.issues is not None]
    return all(run.unstable for run in planted) if planted else None


def is_fine_tuned(run: RunRecord) -> bool:
  """Whether it is a run of configs/sft.py."""
  return bool(run.label.budget) and run.label.trial in TRIALS


def tuning_of(group: Group) -> Tuning:
  """What a group's runs say; a run without a readable config says nothing."""
  records = [run for trial in TRIALS for run in group.readable(trial)]
  runs = [_tuned(run) for run in records]
  # The planted run has a rate of its own.
  mixed = list(dict.fromkeys(words for run in records for words in unlike(
      run.label.trial, run, records[0],
      (*_VARIED, _RATE) if run.label.trial == PLANTED else _VARIED)))
  differences = [] if mixed else [found for key in MEASURES if (found := difference(key, runs))]
  trained = {f'{run.origin.code or "unknown code"}, '
             f'on {run.origin.hardware or "an unknown machine"}' for run in records}
  return Tuning(group.name, group.rules, group.protocol, runs, differences, mixed, sorted(trained))


def difference(key: str, runs: Iterable[TunedRun]) -> Difference | None:
  """Sigmoid minus softmax of the seeds of which both are done; None where there is none."""
  measure = MEASURES[key]
  known = {(run.trial, run.seed): value for run in runs
           if run.status == 'done' and (value := measure.of(run)) is not None}
  values = {seed: value - known[SOFTMAX, seed] for (trial, seed), value in sorted(known.items())
            if trial == SIGMOID and (SOFTMAX, seed) in known}
  if not values:
    return None
  # Two trials alone: there are no others whose spread could be joined with theirs.
  spread, of = Spread({}, {}), ('train_loss', (SOFTMAX, SIGMOID), list(values.values()))
  it, margin = spread.interval(*of, parts=len(MEASURES)), measure.margin
  verdict = 'similar' if spread.negligible(*of, margin) else (
      'different' if it.above(margin) or it.below(-margin) else 'undecided')
  return Difference(key, list(values), list(values.values()), it.mean, it.low, it.high, verdict)


def _tuned(run: RunRecord) -> TunedRun:
  setup, problem = run.known_setup, _problem(run)
  warmup = setup.experiment.optimizer.warmup_steps
  loss, grad_norm = ([] if problem else list(run.train_course.get(key, ()))
                     for key in ('loss', 'grad_norm'))
  found = None if problem else issues(loss, grad_norm, warmup)
  if found and run.status == 'diverged':
    # Of a step that is not finite no row is written; the status has it.
    found['not_finite'].append(run.step)
  part, whole = max(1, round(_PART * setup.steps)), len(loss) == setup.steps
  # What the first and the last row of the probe have.
  curves = run.probe.curves if run.probe else None
  signs = lambda i: {key: getattr(curves, key)[i] for key in SIGNS}
  return TunedRun(
      run.name, run.label.trial, setup.seed, run.status, run.step, setup.steps, warmup, problem,
      found, _of_known(statistics.fmean, loss[:part]),
      _of_known(statistics.fmean, loss[-part:] if whole else ()),
      _of_known(statistics.median, grad_norm[warmup:] if whole else ()),
      signs(0) if curves and curves.step[0] == 0 else None,
      signs(-1) if curves and curves.step[-1] > 0 else None, run.proxy, loss, grad_norm)


def _problem(run: RunRecord) -> str:
  """Why a run is not judged, or ''."""
  steps = list(run.train_course.get('step', ()))
  short = run.status == 'done' and len(steps) < run.known_setup.steps
  if short or steps != list(range(1, len(steps) + 1)) or len(steps) != len(
      run.train_course.get('grad_norm', ())):
    return (f'it has {len(steps):,} rows of training for {run.step:,} steps: every step is judged, '
            'which takes log_every=1')
  return '' if steps else 'no step has been logged'


def _of_known(quantity: Callable[[list[float]], float], values: Sequence[float | None]
              ) -> float | None:
  """A mean or median of the values that are finite; None where none is."""
  known = [value for value in values if value is not None]
  return quantity(known) if known else None


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
  return {'not_finite': (np.flatnonzero(np.isnan(values_2xT).any(0)) + 1).tolist(),
          'gradient': at(now_2xS[1] > LARGEST_GRADIENT * middle_2xS[1]),
          'loss': at(now_2xS[0] > middle_2xS[0] + allowed_S), 'level': at(high_S)}


def judged_steps(steps: int, warmup: int) -> range:
  """The steps of a run that all criteria judge."""
  return range(max(warmup, WINDOW) + 1, steps + 1)
