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

from sink_jax.paper.collect import FREE, Group, seed_and_name
from sink_jax.paper.spread import Within, half_width
from sink_jax.paper.stability import Issues, issues, judged_steps
from sink_jax.report.records import Course, RunRecord, differing_settings

SOFTMAX, SIGMOID, PLANTED = 'sft-softmax', 'sft-sigmoid', 'sft-unstable'
TRIALS = {SOFTMAX: 'softmax', SIGMOID: 'sigmoid without normalisation',
          PLANTED: 'planted unstable run'}
COMMAND = 'python -m sink_jax.sweep --config=configs/sft.py'
_ENDED = ('done', 'diverged')
FULL = 'full'  # the budget that has the paper's models
_PART = 0.1  # of the steps, whose mean loss is that of the beginning or of the end
SIMILAR, DIFFERENT, UNDECIDED = 'similar', 'different', 'undecided'
_ALIKE = 0.9  # confidence of the interval that has to lie within the margin
# Settings in which the runs of a page may differ: where they begin, what they are about.
_VARIED = ('attention.', 'init.source', 'init.step', 'init.hash', 'data.tokenizer')
_RATE = 'optimizer.learning_rate'  # of the planted run

@dataclasses.dataclass(frozen=True)
class Signs:
  """What the probe measured: Sink_1 in percent, the largest hidden and the least value ratio."""

  sink_1: float | None
  hidden_ratio: float | None
  value_ratio: float | None


@dataclasses.dataclass(frozen=True)
class TunedRun:
  """A run of configs/sft.py.

  step, steps: how far it is, and how many it is to have. problem: why it is not judged, or ''.
  issues: None where it is not. first_loss, last_loss: means over the first and the last tenth of
  the steps; median_gradient: after the warm-up. before, after: None without two probes. proxy:
  whether its rows of attention do not sum to one. loss, grad_norm: of step 1, 2, ...
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

  rules: the budget whose rules apply. mixed: settings in which the runs must not differ, and do.
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
  """Is it a run of configs/sft.py?"""
  return bool(run.label.budget) and run.label.trial in TRIALS


def tuned_groups(runs: Iterable[RunRecord]) -> list[Group]:
  """The runs of configs/sft.py by budget and protocol, the paper's first; [] where none is."""
  found: dict[tuple[str, str], dict[str, list[RunRecord]]] = {}
  for run in filter(is_fine_tuned, runs):
    key = run.label.budget, run.label.protocol or 'paper'
    found.setdefault(key, {}).setdefault(run.label.trial, []).append(run)
  return [Group(*key, {trial: tuple(sorted(trials[trial], key=seed_and_name))
                       for trial in TRIALS if trial in trials})
          for key, trials in sorted(found.items(), key=lambda item: _rank(*item[0]))]


def _rank(budget: str, protocol: str) -> tuple[bool, str, bool, str]:
  return not budget.startswith(FULL), budget, protocol != 'paper', protocol


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
  listed = list(values.values())
  n, mean = len(listed), statistics.fmean(listed)
  own = Within((n - 1) * statistics.variance(listed) if n > 1 else 0.0, n - 1)
  # Two trials alone: there are no others whose spread could be joined with theirs.
  half = half_width(Within(), own, n, len(MEASURES))
  inner = half_width(Within(), own, n, 1, _ALIKE)
  verdict = UNDECIDED
  if inner is not None and abs(mean) + inner < measure.margin:
    verdict = SIMILAR
  elif half is not None and abs(mean) - half > measure.margin:
    verdict = DIFFERENT
  ends = (None, None) if half is None else (mean - half, mean + half)
  return Difference(key, list(values), listed, mean, *ends, verdict)


def _mixed(records: Sequence[RunRecord]) -> list[str]:
  """Settings in which runs differ that may not; the planted run has a learning rate of its own."""
  keys = set()
  for allowed, runs in ((), [run for run in records if run.label.trial != PLANTED]), (
      (_RATE,), records):
    _, different = differing_settings(runs) if runs else ({}, {})
    keys |= {key for own in different.values() for key in own
             if key not in (*FREE, *allowed) and not key.startswith(_VARIED)}
  contents = {run.text.content for run in records if run.text and run.text.content}
  return [*sorted(keys), *(['the content of their data'] if len(contents) > 1 else [])]


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
  whole = len(loss) == setup.steps
  before, after = _ends(run)
  return TunedRun(
      run.name, run.label.trial, setup.seed, run.status, run.step, setup.steps, warmup, problem,
      found, _mean(loss[:part]), _mean(loss[-part:]) if whole else None,
      _median(grad_norm[warmup:]) if whole else None, before, after, run.proxy, loss, grad_norm)


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


def _mean(values: Sequence[float | None]) -> float | None:
  known = [value for value in values if value is not None]
  return statistics.fmean(known) if known else None


def _median(values: Sequence[float | None]) -> float | None:
  known = [value for value in values if value is not None]
  return statistics.median(known) if known else None


def _ends(run: RunRecord) -> tuple[Signs | None, Signs | None]:
  """What the first and the last row of the probe have; None for either where it is not there."""
  if run.probe is None:
    return None, None
  curves = run.probe.curves
  of = lambda i: Signs(curves.sink_1[i], curves.hidden_ratio[i], curves.value_ratio[i])
  return (of(0) if curves.step[0] == 0 else None, of(-1) if curves.step[-1] > 0 else None)
