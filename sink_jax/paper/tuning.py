"""What the runs of configs/sft.py say of Figure 30: stability, and how alike two models behave.

The paper fine-tunes its 1B models with softmax and with sigmoid attention without normalisation,
and finds that the two "behave similarly" in training loss and gradient norm, and that sigmoid has
"no issues of training stability". `stability` has the criteria. They count for something where they
find the planted run unstable, which is softmax with 1,000 times the learning rate; and the paper's
sentence is about 1B models, so that smaller budgets show the same curves without a verdict on it.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from sink_jax.paper.collect import Group, groups_of, unlike
from sink_jax.paper.spread import Spread
from sink_jax.paper.stability import Issues, issues, judged_steps
from sink_jax.report.records import Course, RunRecord

SOFTMAX, SIGMOID, PLANTED = 'sft-softmax', 'sft-sigmoid', 'sft-unstable'
TRIALS = {SOFTMAX: 'softmax', SIGMOID: 'sigmoid without normalisation',
          PLANTED: 'planted unstable run'}
COMMAND = 'python -m sink_jax.sweep --config=configs/sft.py'
_ENDED = ('done', 'diverged')
FULL = 'full'  # the budget that has the paper's models
_PART = 0.1  # of the steps, whose mean loss is that of the beginning or of the end
SIMILAR, DIFFERENT, UNDECIDED = 'similar', 'different', 'undecided'
# Settings in which the runs of a page may differ: where they begin, what they are about.
_VARIED = ('attention.', 'init.source', 'init.step', 'init.hash', 'data.tokenizer')
_RATE = 'optimizer.learning_rate'  # of the planted run
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
    return self.status in _ENDED

  @property
  def judged(self) -> int:
    """How many of its steps are judged by all criteria, or are not finite."""
    return len({*judged_steps(len(self.loss), self.warmup),
                *(self.issues.not_finite if self.issues else ())})


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


def _fall(run: TunedRun) -> float | None:
  if run.first_loss is None or run.last_loss is None:
    return None
  return run.first_loss - run.last_loss


MEASURES = {
    'last_loss': Measure('the training loss of the last tenth', 0.1, lambda run: run.last_loss),
    'fall': Measure('its fall from the first tenth', 0.1, _fall),
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
  def missing(self) -> list[str]:
    return [trial for trial in TRIALS if not self.of(trial)]

  @property
  def able(self) -> bool | None:
    """Whether the criteria find the planted run unstable; None before one has ended."""
    planted = [run for run in self.of(PLANTED) if run.ended and run.issues is not None]
    return all(run.issues.steps for run in planted if run.issues) if planted else None


def is_fine_tuned(run: RunRecord) -> bool:
  """Whether it is a run of configs/sft.py."""
  return bool(run.label.budget) and run.label.trial in TRIALS


def tuned_groups(runs: Iterable[RunRecord]) -> list[Group]:
  """The runs of configs/sft.py by budget and protocol, the paper's first; [] where none is."""
  return groups_of(runs, is_fine_tuned)


def tuning_of(group: Group) -> Tuning:
  """What a group's runs say; a run without a readable config says nothing."""
  records = [run for trial in TRIALS for run in group.runs(trial) if run.readable]
  runs = [_tuned(run) for run in records]
  by_trial = {trial: {run.seed: run for run in runs if run.trial == trial and run.status == 'done'
                      and not run.problem} for trial in (SOFTMAX, SIGMOID)}
  mixed = _mixed(records)
  differences = [] if mixed else [
      found for key in MEASURES
      if (found := difference(key, by_trial[SOFTMAX], by_trial[SIGMOID]))]
  trained = {f'{run.origin.code or "unknown code"}, '
             f'on {run.origin.hardware or "an unknown machine"}' for run in records}
  return Tuning(group.name, group.rules, group.protocol, runs, differences, mixed, sorted(trained))


def difference(key: str, softmax: Mapping[int, TunedRun], sigmoid: Mapping[int, TunedRun]
               ) -> Difference | None:
  """Sigmoid minus softmax of the seeds that both have; None where there is none."""
  measure = MEASURES[key]
  pairs = {seed: (measure.of(sigmoid[seed]), measure.of(softmax[seed]))
           for seed in sorted(softmax.keys() & sigmoid.keys())}
  values = {seed: a - b for seed, (a, b) in pairs.items() if a is not None and b is not None}
  if not values:
    return None
  # Two trials alone: there are no others whose spread could be joined with theirs.
  spread, of = Spread({}, {}), ('train_loss', (SOFTMAX, SIGMOID), list(values.values()))
  it, margin = spread.interval(*of, parts=len(MEASURES)), measure.margin
  verdict = SIMILAR if spread.negligible(*of, margin) else (
      DIFFERENT if it.above(margin) or it.below(-margin) else UNDECIDED)
  return Difference(key, list(values), list(values.values()), it.mean, it.low, it.high, verdict)


def _mixed(records: Sequence[RunRecord]) -> list[str]:
  """In what runs are unlike the first and may not be; the planted run has a rate of its own."""
  return list(dict.fromkeys(words for run in records for words in unlike(
      run.label.trial, run, records[0],
      (*_VARIED, _RATE) if run.label.trial == PLANTED else _VARIED)))


def _tuned(run: RunRecord) -> TunedRun:
  setup, course = run.known_setup, run.train_course
  experiment, problem = setup.experiment, _problem(run, course)
  warmup = experiment.optimizer.warmup_steps
  loss, grad_norm = ([] if problem else list(course.get(key, ())) for key in ('loss', 'grad_norm'))
  found = None if problem else issues(loss, grad_norm, warmup)
  if found and run.status == 'diverged':
    # Of a step that is not finite no row is written; the status has it.
    found = dataclasses.replace(found, not_finite=[*found.not_finite, run.step])
  part = max(1, round(_PART * setup.steps))
  last, late = (loss[-part:], grad_norm[warmup:]) if len(loss) == setup.steps else ([], [])
  before, after = _ends(run)
  return TunedRun(
      run.name, run.label.trial, setup.seed, run.status, run.step, setup.steps, warmup, problem,
      found, _of_known(statistics.fmean, loss[:part]), _of_known(statistics.fmean, last),
      _of_known(statistics.median, late), before, after, run.proxy, loss, grad_norm)


def _problem(run: RunRecord, course: Course) -> str:
  steps = list(course.get('step', ()))
  if run.metrics_note:
    return run.metrics_note
  short = run.status == 'done' and len(steps) < run.known_setup.steps
  if short or steps != list(range(1, len(steps) + 1)) or len(steps) != len(
      course.get('grad_norm', ())):
    return (f'it has {len(steps):,} rows of training for {run.step:,} steps: every step is judged, '
            'which takes log_every=1')
  return '' if steps else 'no step has been logged'


def _of_known(quantity: Callable[[list[float]], float], values: Sequence[float | None]
              ) -> float | None:
  """A mean or median of the values that are finite; None where none is."""
  known = [value for value in values if value is not None]
  return quantity(known) if known else None


def _ends(run: RunRecord) -> tuple[Signs | None, Signs | None]:
  """What the first and the last row of the probe have; None for either where it is not there."""
  if run.probe is None:
    return None, None
  curves = run.probe.curves
  of = lambda i: {key: getattr(curves, key)[i] for key in SIGNS}
  return (of(0) if curves.step[0] == 0 else None, of(-1) if curves.step[-1] > 0 else None)
