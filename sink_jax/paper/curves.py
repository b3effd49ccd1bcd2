"""The figures of the paper drawn from runs: their panels and series as numbers, no picture yet."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sink_jax.paper.collect import Group
from sink_jax.paper.metrics import ALONE, METRICS, metric_summary, window_size
from sink_jax.paper.numbers import PaperFigure
from sink_jax.paper.pictures import Panel, Picture, Series
from sink_jax.report.probe_record import NormRatios
from sink_jax.report.records import RunRecord

_POINTS = 200  # of a training loss: more could not be told apart
_FEW = 25  # where lines of several trials cross
_EMBEDDING = 'block (0: the embedding)'
_LOSS, _SINK = 'nats per token', 'Sink_1 in % of heads'
_LONGEST_MAP = 256  # tokens of a map that a page can carry
_Point = tuple[float | None, float | None]
_Points = Callable[[RunRecord], Sequence[_Point]]  # of a run


def figure_data(figure: PaperFigure, group: Group) -> Picture | None:
  """What a figure of the paper shows of a group's runs; None where there is nothing."""
  picture = _KINDS[figure.kind](figure, group)
  panels = [panel for panel in picture.panels if panel.series or panel.map_TxT is not None]
  if not panels:
    return None
  shown = {run for panel in panels for of in (panel, *panel.series) for run in of.runs}
  absent = [trial for trial in figure.trials
            if not shown & {run.name for run in group.runs(trial)}]
  return dataclasses.replace(
      picture, file=f'{figure.key}-{group.key}.png', name=group.name, panels=panels,
      budget=group.budget, protocol=group.protocol,
      missing=[f'{trial} ({_why_absent(figure, group, trial)})' for trial in absent])


def _why_absent(figure: PaperFigure, group: Group, trial: str) -> str:
  done = group.done(trial)
  if not done:
    return group.status(trial)
  # The map of a window of one token says nothing, whatever the model has learnt.
  alone = figure.kind == 'window map' and any(_window(run).get('size') == 1 for run in done[:1])
  return ALONE if alone else 'not measured'


def series(name: str, runs: Iterable[RunRecord], points_of: _Points, axis: str = 'left',
           dashed: bool = False) -> Series | None:
  """The mean over runs where all of them have a point; None where there is no such point."""
  runs = list(runs)
  # Seeds that diverged or are under way have fewer points: a mean over some seeds would jump
  # where one of them ends.
  courses = [{x: y for x, y in points_of(run) if x is not None and y is not None} for run in runs]
  shared = [x for x in courses[0] if all(x in course for course in courses)] if courses else []
  if not shared:
    return None
  values = [[course[x] for course in courses] for x in shared]
  return Series(name, [run.name for run in runs], shared, [statistics.fmean(v) for v in values],
                [min(v) for v in values], [max(v) for v in values], axis, dashed)


def _panel(title: str, x: str, y: str, lines: Iterable[Series | None], right: str = '',
           log: str = '') -> Panel:
  return Panel(title, x, y, [line for line in lines if line], right, log)


def _picture(*panels: Panel, note: str = '', across: int | None = None) -> Picture:
  """What a kind of figure makes of runs; `figure_data` adds of which."""
  return Picture('', panels=panels, note=note, across=across)


def _dynamics(figure: PaperFigure, group: Group) -> Picture:
  trial = figure.trials[0]
  runs = group.measured(trial)
  lines = [series('training loss', runs, _train_points),
           series('validation loss', runs, _valid_points),
           series('Sink_1', runs, sink_points, 'right', dashed=True)]
  return _picture(_panel(trial, 'step', _LOSS, lines, _SINK))


def _learning_rates(figure: PaperFigure, group: Group) -> Picture:
  """The losses above, Sink_1 below, as long as the default run took."""
  courses, rates = [], []
  default = group.measured('default')
  # The trials with small rates take more steps; the first ones are what is compared.
  end = default[0].known_setup.steps if default else math.inf
  until = lambda points: [point for point in points if point[0] <= end]
  for trial in figure.trials:
    runs = group.measured(trial)
    courses.append(series(trial, runs, lambda run: thinned(until(logged(run)), _FEW)))
    rates.append(series(trial, runs, lambda run: until(sink_points(run))))
  panels = [_panel('training loss, means over stretches', 'step', _LOSS, courses),
            _panel('Sink_1', 'step', _SINK, rates)]
  note = f'Shown up to step {end:,}, the last of the default run.' if default else ''
  return _picture(*panels, note=note, across=1)


def _sweep(figure: PaperFigure, group: Group) -> Picture:
  """Ends of runs, of those that are done, against what their trials vary."""
  windows = figure.number == '6'
  # The figure on windows varies the mask, the others the amount of text.
  x_of = window_size if windows else _max_tokens
  metrics = [('valid_loss', 'left'), ('sink_1', 'right')]
  metrics += [] if windows else [('train_loss', 'left')]
  lines = []
  for metric, axis in metrics:
    points = []
    for trial in figure.trials:
      runs = group.done(trial)
      if runs and (summary := metric_summary(metric, runs)):
        points.append((x_of(runs[0]), summary))
    # A line goes from left to right, in whatever order the trials are listed.
    points.sort(key=lambda point: point[0])
    if points:
      lines.append(Series(
          METRICS[metric].heading.removesuffix(' %'),
          [run for _, summary in points for run in summary.runs],
          [x for x, _ in points], [summary.mean for _, summary in points],
          [summary.least for _, summary in points],
          [summary.largest for _, summary in points], axis, dashed=axis == 'right'))
  x = 'window in tokens' if windows else 'unique training tokens'
  return _picture(_panel('', x, _LOSS, lines, _SINK, log='x'))


def _ratios(figure: PaperFigure, group: Group) -> Picture:
  lines = []
  hidden = lambda ratios: ratios['hidden']
  for trial in figure.trials:
    runs = group.done(trial)
    # Figure 7 has both lines, as a post-norm model has its massive activations before the norm
    # only.
    if trial == 'post-norm' and figure.number == '7':
      lines += [series('post-norm, after the norm', runs, _ratio_points(hidden)),
                series('post-norm, before the norm', runs,
                       _ratio_points(lambda ratios: ratios['hidden_before_norm'], 1), dashed=True)]
    elif trial == 'sink-token':
      lines.append(series('sink-token: the token itself', runs,
                          _ratio_points(lambda ratios: ratios['sink_token'])))
    else:
      # Beside a post-norm model the default is named by what differs.
      name = 'default, pre-norm' if 'post-norm' in figure.trials else trial
      lines.append(series(name, runs, _ratio_points(hidden)))
  return _picture(_panel('', _EMBEDDING, 'hidden norm ratio', lines, log='y'))


def _prefix(figure: PaperFigure, group: Group) -> Picture:
  """A panel per prefix length; single sequences of its first run."""
  panels = []
  for trial in figure.trials:
    for run in group.done(trial)[:1]:
      analysis = run.analyses.get('prefix') or {}
      lines = [series(f'sequence {i}', [run], lambda _, rates=rates: list(enumerate(rates, 1)))
               for i, rates in enumerate(analysis.get('sequences') or (), 1)]
      panels.append(_panel(f'{trial}: prefix of {analysis.get("length")}', 'position k',
                           'Sink_k in % of heads', lines))
  return _picture(*panels)


def _window_map(figure: PaperFigure, group: Group) -> Picture:
  """One map, of the window model with the strongest sink; and the two tokens in all of them."""
  # One run per window: the maps of seeds cannot be averaged in a picture. A window of one token is
  # left out: every query sees itself alone, whatever it has learnt.
  analysed = sorted(((window, run) for trial in figure.trials for run in group.done(trial)[:1]
                     if (window := _window(run)) and window['size'] > 1),
                    key=lambda pair: pair[0]['size'])
  sizes, names = [window['size'] for window, _ in analysed], [run.name for _, run in analysed]

  def line(key: str, name: str, dashed: bool = False) -> Series:
    weights = [window.get(key) for window, _ in analysed]
    return Series(name, names, sizes, weights, weights, weights, dashed=dashed)

  panels = []
  mapped = [pair for pair in analysed
            if pair[0].get('map') and len(pair[0]['map']) <= _LONGEST_MAP]
  if mapped:
    window, run = max(mapped, key=lambda pair: (
        pair[1].probe.sink_1 if pair[1].probe else 0, pair[0]['size']))
    title = (f'window of {window["size"]}: {_weight(window, "absolute_first")} on token 1,\n'
             f'{_weight(window, "relative_first")} on the first of the window')
    panels.append(Panel(title, 'key', 'query', [], map_TxT=window['map'], runs=[run.name]))
  if analysed:
    panels.append(_panel('mean attention', 'window in tokens', 'attention weight', [
        line('absolute_first', 'to token 1, where it is seen'),
        line('relative_first', 'to the first token of the window, after it'),
        line('absolute_uniform', 'to token 1, if queries saw all keys alike', dashed=True),
        line('uniform', 'to the first token of the window, likewise', dashed=True)], log='xy'))
  return _picture(*panels)


def _window(run: RunRecord) -> Mapping[str, Any]:
  return run.analyses.get('window') or {}


def _weight(window: Mapping[str, Any], key: str) -> str:
  return f'{window[key]:.3f}' if isinstance(window.get(key), (int, float)) else '?'


def _max_tokens(run: RunRecord) -> int:
  return run.known_setup.experiment.data.max_tokens


def _valid_points(run: RunRecord) -> list[_Point]:
  return list(zip(run.valid_course.get('step', ()), run.valid_course.get('valid', ())))


def logged(run: RunRecord, key: str = 'loss') -> list[tuple[float, float]]:
  """(step, value) of the steps that logged a finite value, of the training loss or another key."""
  return [(step, value) for step, value in zip(run.train_course.get('step', ()),
                                               run.train_course.get(key, ()))
          if step is not None and value is not None]


def _train_points(run: RunRecord) -> list[tuple[float, float]]:
  return thinned(logged(run), _POINTS)


def thinned(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
  """Means over stretches of steps, so that there are at most so many of them."""
  # Every stretch stands at its last step, so that the curve ends where the run does.
  size = -(-len(points) // most) or 1
  stretches = [points[i:i + size] for i in range(0, len(points), size)]
  return [(stretch[-1][0], statistics.fmean(loss for _, loss in stretch)) for stretch in stretches]


def sink_points(run: RunRecord) -> list[tuple[int, float]]:
  return list(zip(run.probe.curves.step, run.probe.curves.sink_1)) if run.probe else []


def _ratio_points(of: Callable[[NormRatios], Sequence[float | None] | None], first: int = 0
                  ) -> _Points:
  """Points (block, ratio); first: the number of the first block that has a ratio."""
  return lambda run: list(enumerate((of(run.probe.ratios) if run.probe else None) or (), first))


_KINDS = {'dynamics': _dynamics, 'learning rates': _learning_rates, 'sweep': _sweep,
          'ratios': _ratios, 'prefix': _prefix, 'window map': _window_map}
