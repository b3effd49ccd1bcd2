"""What the page on fine-tuning says, in sentences, of the values of `tuning` alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from sink_jax.paper.tuning import (
  FULL,
  MEASURES,
  PLANTED,
  SIGMOID,
  SIGNS,
  SOFTMAX,
  TRIALS,
  TunedRun,
  Tuning,
)
from sink_jax.report.markup import upper

TOO_SMALL = "too small to test the paper's sentence, which is about 1B models"
UNABLE = 'no verdict: the criteria are not able to tell'
STABLE, UNSTABLE = 'no stability issue by these criteria', 'a stability issue'


def verdict(tuning: Tuning) -> str:
  """The verdict on "no stability issue", in words."""
  models = [run for trial in (SOFTMAX, SIGMOID) for run in tuning.of(trial)]
  if tuning.rules != FULL:
    return TOO_SMALL
  if tuning.mixed:
    return f'no verdict: the runs differ in {", ".join(tuning.mixed)}'
  if absent := [trial for trial in (SOFTMAX, SIGMOID) if not tuning.of(trial)]:
    return f'no verdict: not run: {", ".join(absent)}'
  if open_ := [run for run in models if not run.ended or run.issues is None]:
    return f'no verdict: {"; ".join(map(_where, open_))}'
  if tuning.able is None:
    return f'{UNABLE}, since {PLANTED} has not been run to its end'
  if not tuning.able:
    return UNABLE
  unstable = [_named(run) for run in tuning.of(SIGMOID) if run.issues and run.issues.steps]
  return f'{UNSTABLE}: {", ".join(unstable)}' if unstable else STABLE


def sentences(tuning: Tuning) -> list[str]:
  """What was found, all of it from the values of the `Tuning`."""
  judged = {trial: [run for run in tuning.of(trial) if run.issues] for trial in TRIALS}
  steps = [f'{TRIALS[trial]} {sum(len(run.issues.steps) for run in runs if run.issues)} of '
           f'{sum(run.judged for run in runs):,}' for trial, runs in judged.items() if runs]
  lines = [f'{tuning.name}: {verdict(tuning)}. Steps with an issue, of those judged: '
           f'{", ".join(steps) or "none judged"}.', _control(tuning)]
  if tuning.mixed:
    lines.append(f'The runs differ in more than they are about: {", ".join(tuning.mixed)}. They '
                 'are not compared.')
  if left := [run for run in tuning.runs if not run.ended or run.problem]:
    lines.append(f'Not at their last step, or not judged: {"; ".join(map(_where, left))}.')
  for trial in (SOFTMAX, SIGMOID):
    runs, words = judged[trial], upper(TRIALS[trial])
    seeds = f'seed{"s" if len(runs) > 1 else ""} {", ".join(str(run.seed) for run in runs)}'
    lines.append(f'{words}, {seeds}: {_issues(runs)}.' if runs else f'{words}: nothing to judge.')
  for of in tuning.differences:
    measure = MEASURES[of.measure]
    interval = 'no interval' if of.low is None or of.high is None else (
        f'{measure.text(of.low)} to {measure.text(of.high)}')
    lines.append(f'Sigmoid against softmax, {measure.words}: {measure.text(of.mean)} ({interval}, '
                 f'n = {len(of.values)}): {of.verdict}.')
  if not tuning.differences:
    lines.append('Whether the two models behave alike is open: no seed of both is done.')
  return lines + [line for trial in (SOFTMAX, SIGMOID) if (line := _signs(tuning.of(trial)))]


def _control(tuning: Tuning) -> str:
  runs = tuning.of(PLANTED)
  if tuning.able is None:
    return (f'{PLANTED}, softmax with 1,000 times the learning rate, has not been run to its end: '
            'nothing shows that the criteria find an unstable run.')
  if tuning.able:
    return f'The criteria find the planted unstable run: {_issues(runs)}.'
  return (f'The criteria do not find the planted unstable run, whose loss goes from '
          f'{_range([run.first_loss for run in runs])} in the first tenth of its steps to '
          f'{_range([run.last_loss for run in runs])} in the last: {_issues(runs)}. They are not '
          'able to tell, and there is no verdict.')


def _issues(runs: Sequence[TunedRun]) -> str:
  """'0 values not finite, 1 gradient norm and 0 losses too large, ... in 750 judged steps'."""
  def count(key: str, one: str, several: str) -> str:
    n = sum(len(getattr(run.issues, key)) for run in runs if run.issues)
    return f'{n} {one if n == 1 else several}'
  return (f'{count("not_finite", "value", "values")} not finite, '
          f'{count("gradient", "gradient norm", "gradient norms")} and '
          f'{count("loss", "loss", "losses")} too large, {count("level", "median", "medians")} too '
          f'far above the first loss, in {sum(run.judged for run in runs):,} judged steps')


def _signs(runs: Sequence[TunedRun]) -> str:
  """What became of the sink, of the runs that were probed before and after; '' without one."""
  pairs = [(run.before, run.after) for run in runs if run.before and run.after]
  if not pairs:
    return ''
  star = '*' if any(run.proxy for run in runs) else ''
  words = [f'{f"{name}{star} in %" if key == "sink_1" else name} '
           f'{_range([before[key] for before, _ in pairs])} before and '
           f'{_range([after[key] for _, after in pairs])} after' for key, name in SIGNS.items()]
  return f'{upper(TRIALS[runs[0].trial])} (n = {len(pairs)}): {"; ".join(words)}.'


def _range(values: Sequence[float | None]) -> str:
  """'3.05 (3.01 to 3.09)': the mean, and the least and the largest of several."""
  known = [value for value in values if value is not None]
  if not known:
    return '-'
  mean = f'{statistics.fmean(known):.2f}'
  return mean if len(known) == 1 else f'{mean} ({min(known):.2f} to {max(known):.2f})'


def _named(run: TunedRun) -> str:
  return f'{run.trial}, seed {run.seed}'


def _where(run: TunedRun) -> str:
  return f'{_named(run)} ({run.problem or f"{run.status} at step {run.step:,} of {run.steps:,}"})'
