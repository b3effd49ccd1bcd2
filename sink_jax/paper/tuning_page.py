"""The page on fine-tuning, and Figure 30: curves, issues, and what becomes of the sink.

Its sentences are made of the values of `tuning` alone, so that a reader of report.json can make
every one of them again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from sink_jax.io.paths import AnyPath, to_path
from sink_jax.io.terminal import number
from sink_jax.paper import drawing, tuning
from sink_jax.paper.collect import Group, groups_of
from sink_jax.paper.pictures import Panel, Picture, Points, course, seed_panel, thinned
from sink_jax.paper.spread import CONFIDENCE
from sink_jax.paper.tuning import CRITERIA, MEASURES, PLANTED, SIGMOID, TRIALS, TunedRun, Tuning
from sink_jax.report.jsontext import finite, rounded, to_json
from sink_jax.report.markup import mean_and_range, upper
from sink_jax.report.parts import Parts
from sink_jax.report.records import RunRecord

_COURSES = ('Training loss and gradient norm: every step of each seed as a thin line, and means '
            'over seeds and stretches of steps.')
_CAPTIONS = {
    'loss.png': 'Training loss of both models and of the planted unstable run, for each budget and '
                'protocol: every seed as a thin line, and means over seeds and stretches of steps.',
    'sink.png': 'Sink_1 of the same runs while they are fine-tuned, every seed as a thin line; of '
                'sigmoid by proxy scores, as its rows do not sum to one.'}
# What is drawn: the label of its axis, and the points of a run.
_LOSS = 'training loss in nats per token', course('train', 'loss')
_GRADIENT = 'gradient norm', course('train', 'grad_norm')
_SINK = 'Sink_1 in % of heads', course('probe', 'sink_1')
_POINTS = 30  # of a mean: with one for each step it would hide the seeds
_METHOD = (
    f'An issue of stability is {CRITERIA["not_finite"]}; {CRITERIA["gradient"]}; '
    f'{CRITERIA["loss"]}; or, {CRITERIA["level"]}. They have to find a planted unstable run, '
    'softmax with 1,000 times the learning rate and the same data, before they say anything of the '
    'others. The last one was added when the others, which look at single steps, had not found '
    'that run at the budget desk. Of noise alone about one run of 300 steps in a hundred has a '
    'loss that is too large. Sigmoid is compared with softmax seed by seed: "similar" where the '
    'whole 90 % interval of the mean difference lies within the margin, "different" where the '
    f'{100 * CONFIDENCE:g} % interval, divided among the {len(MEASURES)} measures, lies beyond it, '
    'else "undecided". Margins, written before any two runs were compared: '
    f'{MEASURES["last_loss"].margin:g} nats of a loss, a factor of '
    f'{math.exp(MEASURES["gradient"].margin):.1f} of a gradient norm. A star marks proxy scores, '
    'of rows that do not sum to one.')
_HEAD = ('run', 'seed', 'status', 'not finite', 'gradient norms too large', 'losses too large',
         'medians too far above the first loss', 'first loss', 'last loss', 'median gradient norm',
         'Sink_1 %', 'hidden ratio', 'value ratio')
_MODELS = (tuning.SOFTMAX, SIGMOID)
_FULL = 'full'  # the budget that has the paper's models


def tuning_report(runs: Sequence[RunRecord], out: str | AnyPath) -> str:
  """Writes index.html, report.md, report.json and PNGs, and returns the sentences.

  Raises:
    ValueError: none of the runs is of configs/sft.py.
    OSError: `out` cannot be written.
  """
  groups = groups_of(runs, tuning.is_fine_tuned)
  if not groups:
    raise ValueError('no run of configs/sft.py is there. To train them: '
                     f'{tuning.COMMAND} --budget=desk --seeds=1,2,3 --workdir=runs/sft/paper')
  # Of numbers as report.json has them, so that a reader of it can make every sentence again.
  tunings = [rounded(finite(tuning.tuning_of(group))) for group in groups]
  words = [sentences(found) for found in tunings]
  page = Parts('Fine-tuning (Figure 30)')
  page.paragraphs([upper(first) for first, *_ in words])
  page.table(['runs', 'verdict', *(measure.words for measure in MEASURES.values())], [
      [found.name, verdict(found), *({of.measure: of.verdict for of in found.differences}.get(
          key, '-') for key in MEASURES)] for found in tunings], range(2 + len(MEASURES)))
  for file, of in (('loss.png', _LOSS), ('sink.png', _SINK)):
    if panels := [panel for group in groups
                  if (panel := _panel(group, [*TRIALS], group.name, *of)).series]:
      page.picture(file, drawing.panels(Picture(file, panels=panels)), _CAPTIONS[file])
  for group, found, (_, *details) in zip(groups, tunings, words):
    page.heading(found.name)
    page.items(details)
    planted = _courses(group, 'unstable', (PLANTED,),
                       f'{TRIALS[PLANTED].capitalize()}, {group.name}')
    for picture in (*tuned_pictures([group]), *planted):
      page.picture(picture.file, drawing.panels(picture), f'{picture.name}. {_COURSES}')
    page.table(_HEAD, [_row(run) for run in found.runs], (0, 2))
    page.paragraph(f'Trained with {"; ".join(found.trained)}.')
    if missing := [trial for trial in TRIALS if not found.of(trial)]:
      page.paragraph(f'Not run: {", ".join(missing)}. To train them:')
      page.code(f'{tuning.COMMAND} --budget={found.rules} --protocol={found.protocol} '
                f'--only={",".join(missing)} --workdir=runs/sft/{found.protocol}')
  page.heading('How it is judged')
  page.paragraph(_METHOD)
  page.write(to_path(out), to_json({'criteria': CRITERIA, 'tuned': [
      vars(found) | {'verdict': verdict(found), 'sentences': lines}
      for found, lines in zip(tunings, words)]}))
  return '\n'.join(line for lines in words for line in lines)


def tuned_pictures(groups: Iterable[Group]) -> list[Picture]:
  """Figure 30 of every group that has something to draw: loss and gradient norm of both models."""
  return [picture for group in groups
          for picture in _courses(group, 'figure-30', _MODELS, group.name)]


def _courses(group: Group, key: str, trials: Sequence[str], name: str) -> list[Picture]:
  """Loss and gradient norm of trials, a panel each; nothing where none of them has a step."""
  panels = [_panel(group, trials, '', *of) for of in (_LOSS, _GRADIENT)]
  drawn = {line.name for panel in panels for line in panel.series}
  if not drawn:
    return []
  missing = [f'{trial} ({group.status(trial)})' for trial in trials if TRIALS[trial] not in drawn]
  return [Picture(file=f'{key}-{group.key}.png', name=name, missing=missing, panels=panels,
                  budget=group.budget, protocol=group.protocol, across=2)]


def _panel(group: Group, trials: Iterable[str], title: str, y: str, points: Points) -> Panel:
  """The courses of trials, and their means over as many steps in every run, however far it is."""
  def means(run: RunRecord) -> Sequence[tuple[float, float]]:
    known = points(run)
    return thinned(known, math.ceil(_POINTS * known[-1][0] / run.known_setup.steps) or 1)
  return seed_panel(title, y, {TRIALS[trial]: group.readable(trial) for trial in trials}, points,
                    means)


def _row(run: TunedRun) -> list[str]:
  counts = [str(len(run.issues[key])) if run.issues else '-' for key in CRITERIA]
  sign = lambda probe, key: number(probe and probe[key], '.2f')
  signs = [f'{sign(run.before, key)} to {sign(run.after, key)}' for key in tuning.SIGNS]
  signs[0] += '*' if run.proxy else ''
  return [TRIALS[run.trial], str(run.seed), f'{run.status}, step {run.step:,}', *counts,
          *(number(value, '.3f')
            for value in (run.first_loss, run.last_loss, run.median_gradient)), *signs]


def verdict(found: Tuning) -> str:
  """The verdict on "no stability issue", in words."""
  if found.rules != _FULL:
    return "too small to test the paper's sentence, which is about 1B models"
  if found.mixed:
    return f'no verdict: the runs differ in {", ".join(found.mixed)}'
  if absent := [trial for trial in _MODELS if not found.of(trial)]:
    return f'no verdict: not run: {", ".join(absent)}'
  if open_ := [run for trial in _MODELS for run in found.of(trial)
               if not run.ended or run.issues is None]:
    return f'no verdict: {"; ".join(map(_where, open_))}'
  if not found.able:
    return 'no verdict: the criteria are not able to tell' + (
        f', since {PLANTED} has not been run to its end' if found.able is None else '')
  unstable = [_named(run) for run in found.of(SIGMOID) if run.unstable]
  return (f'a stability issue: {", ".join(unstable)}' if unstable
          else 'no stability issue by these criteria')


def sentences(found: Tuning) -> list[str]:
  """What was found, all of it from the values of the `Tuning`."""
  judged = {trial: [run for run in found.of(trial) if run.issues] for trial in TRIALS}
  steps = [f'{TRIALS[trial]} {sum(len(run.unstable) for run in runs)} of '
           f'{sum(run.judged for run in runs):,}' for trial, runs in judged.items() if runs]
  lines = [f'{found.name}: {verdict(found)}. Steps with an issue, of those judged: '
           f'{", ".join(steps) or "none judged"}.', _control(found)]
  if found.mixed:
    lines.append(f'The runs differ in more than they are about: {", ".join(found.mixed)}. They '
                 'are not compared.')
  if left := [run for run in found.runs if not run.ended or run.problem]:
    lines.append(f'Not at their last step, or not judged: {"; ".join(map(_where, left))}.')
  for trial in _MODELS:
    seeds, words = ', '.join(str(run.seed) for run in judged[trial]), upper(TRIALS[trial])
    lines.append(f'{words}, seed{"s" if len(judged[trial]) > 1 else ""} {seeds}: '
                 f'{_issues(judged[trial])}.' if seeds else f'{words}: nothing to judge.')
  for of in found.differences:
    measure = MEASURES[of.measure]
    interval = 'no interval' if of.low is None or of.high is None else (
        f'{measure.text(of.low)} to {measure.text(of.high)}')
    lines.append(f'Sigmoid against softmax, {measure.words}: {measure.text(of.mean)} ({interval}, '
                 f'n = {len(of.values)}): {of.verdict}.')
  if not found.differences:
    lines.append('Whether the two models behave alike is open: no seed of both is done.')
  return lines + [line for trial in _MODELS for line in _signs(found.of(trial))]


def _control(found: Tuning) -> str:
  runs = found.of(PLANTED)
  mean = lambda key: mean_and_range([getattr(run, key) for run in runs], '.2f')
  if found.able is None:
    return (f'{PLANTED}, softmax with 1,000 times the learning rate, has not been run to its end: '
            'nothing shows that the criteria find an unstable run.')
  if found.able:
    return f'The criteria find the planted unstable run: {_issues(runs)}.'
  return (f'The criteria do not find the planted unstable run, whose loss goes from '
          f'{mean("first_loss")} in the first tenth of its steps to {mean("last_loss")} in the '
          f'last: {_issues(runs)}. They are not able to tell, and there is no verdict.')


def _issues(runs: Sequence[TunedRun]) -> str:
  """'0 values not finite, 1 gradient norm and 0 losses too large, ... in 750 judged steps'."""
  def count(key: str, one: str, ending: str = 's') -> str:
    n = sum(len(run.issues[key]) for run in runs if run.issues)
    return f'{n} {one}{ending if n != 1 else ""}'
  return (f'{count("not_finite", "value")} not finite, {count("gradient", "gradient norm")} and '
          f'{count("loss", "loss", "es")} too large, {count("level", "median")} too far above the '
          f'first loss, in {sum(run.judged for run in runs):,} judged steps')


def _signs(runs: Sequence[TunedRun]) -> list[str]:
  """What became of the sink, of the runs that were probed before and after, in a line if any."""
  pairs = [(run.before, run.after) for run in runs if run.before and run.after]
  if not pairs:
    return []
  mean = lambda key, i: mean_and_range([pair[i][key] for pair in pairs], '.2f')
  star = '*' if any(run.proxy for run in runs) else ''
  words = [f'{f"{name}{star} in %" if key == "sink_1" else name} '
           f'{mean(key, 0)} before and {mean(key, 1)} after'
           for key, name in tuning.SIGNS.items()]
  return [f'{upper(TRIALS[runs[0].trial])} (n = {len(pairs)}): {"; ".join(words)}.']


def _named(run: TunedRun) -> str:
  return f'{run.trial}, seed {run.seed}'


def _where(run: TunedRun) -> str:
  return f'{_named(run)} ({run.problem or f"{run.status} at step {run.step:,} of {run.steps:,}"})'
