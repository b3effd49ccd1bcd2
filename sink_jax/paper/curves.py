"""The figures of the paper drawn from runs: their panels and series as numbers, no picture yet."""

from __future__ import annotations

import dataclasses
import math
from operator import itemgetter

from sink_jax.io.terminal import number
from sink_jax.paper.collect import Group
from sink_jax.paper.metrics import ALONE, METRICS, metric_summary, window_size
from sink_jax.paper.numbers import PaperFigure
from sink_jax.paper.pictures import Panel, Picture, Points, Series, course, line, series, thinned

_POINTS = 200  # of a training loss: more could not be told apart
_FEW = 25  # where lines of several trials cross
_LOSS, _SINK = 'nats per token', 'Sink_1 in % of heads'


def figure_data(figure: PaperFigure, group: Group) -> Picture | None:
  """What a figure of the paper shows of a group's runs; None where there is nothing."""
  picture = _KINDS[figure.kind](figure, group)
  panels = [panel for panel in picture.panels if panel.series or panel.map_TxT is not None]
  if not panels:
    return None
  shown = {run for panel in panels for of in (panel, *panel.series) for run in of.runs}
  missing = []
  for trial in figure.trials:
    if not shown & {run.name for run in group.runs(trial)}:
      why, done = group.status(trial), group.done(trial)
      if done:
        # The map of a window of one token says nothing, whatever the model has learnt.
        alone = figure.kind == 'window map' and window_size(done[0]) == 1
        why = ALONE if alone else 'not measured'
      missing.append(f'{trial} ({why})')
  return dataclasses.replace(
      picture, file=f'{figure.key}-{group.key}.png', name=group.name, panels=panels,
      budget=group.budget, protocol=group.protocol, missing=missing)


# Each kind of figure makes a picture of runs; `figure_data` adds of which.
def _dynamics(figure: PaperFigure, group: Group) -> Picture:
  trial = figure.trials[0]
  runs, losses = group.measured(trial), course('train', 'loss')
  lines = [series('training loss', runs, lambda run: thinned(losses(run), _POINTS)),
           series('validation loss', runs, course('valid', 'valid')),
           series('Sink_1', runs, course('probe', 'sink_1'), 'right', dashed=True)]
  return Picture('', panels=[Panel(trial, 'step', _LOSS, [*filter(None, lines)], _SINK)])


def _learning_rates(figure: PaperFigure, group: Group) -> Picture:
  """The losses above, Sink_1 below, as long as the default run took."""
  default = group.measured('default')
  # The trials with small rates take more steps; the first ones are what is compared.
  end = default[0].known_setup.steps if default else math.inf
  until = lambda points: [(step, value) for step, value in points if step <= end]
  panels = []
  for title, y, points in (
      ('training loss, means over stretches', _LOSS,
       lambda run: thinned(until(course('train', 'loss')(run)), _FEW)),
      ('Sink_1', _SINK, lambda run: until(course('probe', 'sink_1')(run)))):
    lines = [series(trial, group.measured(trial), points) for trial in figure.trials]
    panels.append(Panel(title, 'step', y, [*filter(None, lines)]))
  note = f'Shown up to step {end:,}, the last of the default run.' if default else ''
  return Picture('', panels=panels, note=note, across=1)


def _sweep(figure: PaperFigure, group: Group) -> Picture:
  """Ends of runs, of those that are done, against what their trials vary."""
  # The figure on windows varies the mask, the others the amount of text.
  windows = figure.number == '6'
  x_of = window_size if windows else lambda run: run.known_setup.experiment.data.max_tokens
  lines = []
  for metric in ('valid_loss', 'sink_1', *([] if windows else ['train_loss'])):
    points = [(x_of(runs[0]), summary) for trial in figure.trials
              if (runs := group.done(trial)) and (summary := metric_summary(metric, runs))]
    # A line goes from left to right, in whatever order the trials are listed.
    points.sort(key=itemgetter(0))
    right = metric == 'sink_1'
    lines.append(line(METRICS[metric].name, [run for _, of in points for run in of.runs],
                      [(x, of.values) for x, of in points], 'right' if right else 'left', right))
  x = 'window in tokens' if windows else 'unique training tokens'
  return Picture('', panels=[Panel('', x, _LOSS, [*filter(None, lines)], _SINK, log='x')])


def _ratios(figure: PaperFigure, group: Group) -> Picture:
  # {trial: (name of a line, key of `NormRatios`, first block that has one)}
  named = {'sink-token': [('sink-token: the token itself', 'sink_token', 0)]}
  # A post-norm model has its massive activations before the norm only. Beside it the default is
  # named by what differs.
  if 'post-norm' in figure.trials:
    named |= {'default': [('default, pre-norm', 'hidden', 0)],
              'post-norm': [('post-norm, after the norm', 'hidden', 0),
                            ('post-norm, before the norm', 'hidden_before_norm', 1)]}
  lines = [series(name, group.done(trial), _ratio_points(key, first), dashed=first > 0)
           for trial in figure.trials
           for name, key, first in named.get(trial, [(trial, 'hidden', 0)])]
  return Picture('', panels=[Panel('', 'block (0: the embedding)', 'hidden norm ratio',
                                   [*filter(None, lines)], log='y')])


def _ratio_points(key: str, first: int) -> Points:
  """Points (block, ratio); first: the number of the first block that has a ratio."""
  return lambda run: [(block, ratio) for block, ratio in enumerate(
      (run.probe.ratios[key] if run.probe else None) or (), first) if ratio is not None]


def _prefix(figure: PaperFigure, group: Group) -> Picture:
  """A panel per prefix length; single sequences of its first run."""
  panels = []
  for trial in figure.trials:
    for run in group.done(trial)[:1]:
      analysis = run.analyses.get('prefix', {})
      lines = [series(f'sequence {i}', [run], lambda _, rates=rates: list(enumerate(rates, 1)))
               for i, rates in enumerate(analysis.get('sequences') or (), 1)]
      panels.append(Panel(f'{trial}: prefix of {analysis.get("length")}', 'position k',
                          'Sink_k in % of heads', [*filter(None, lines)]))
  return Picture('', panels=panels)


def _window_map(figure: PaperFigure, group: Group) -> Picture:
  """One map, of the window model with the strongest sink; and the two tokens in all of them."""
  # One run per window: the maps of seeds cannot be averaged in a picture. A window of one token is
  # left out: every query sees itself alone, whatever it has learnt.
  analysed = sorted(((window, run) for trial in figure.trials for run in group.done(trial)[:1]
                     if (window := run.analyses.get('window', {})) and window['size'] > 1),
                    key=lambda pair: pair[0]['size'])
  if not analysed:
    return Picture('')
  panels = []
  if mapped := [(window, run) for window, run in analysed if window.get('map')]:
    window, run = max(mapped, key=lambda pair: (
        pair[1].probe.sink_1 if pair[1].probe else 0, pair[0]['size']))
    weight = lambda key: number(window.get(key), '.3f', '?')
    panels.append(Panel(f'window of {window["size"]}: {weight("absolute_first")} on token 1,\n'
                        f'{weight("relative_first")} on the first of the window', 'key', 'query',
                        [], map_TxT=window['map'], runs=[run.name]))
  sizes, names = [window['size'] for window, _ in analysed], [run.name for _, run in analysed]
  lines = []
  for key, name, dashed in (
      ('absolute_first', 'to token 1, where it is seen', False),
      ('relative_first', 'to the first token of the window, after it', False),
      ('absolute_uniform', 'to token 1, if queries saw all keys alike', True),
      ('uniform', 'to the first token of the window, likewise', True)):
    weights = [window.get(key) for window, _ in analysed]
    lines.append(Series(name, names, sizes, weights, weights, weights, dashed=dashed))
  panels.append(Panel('mean attention', 'window in tokens', 'attention weight', lines, log='xy'))
  return Picture('', panels=panels)


_KINDS = {'dynamics': _dynamics, 'learning rates': _learning_rates, 'sweep': _sweep,
          'ratios': _ratios, 'prefix': _prefix, 'window map': _window_map}
