"""The figures of the paper as numbers of our runs: panels, series, and what is missing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence

from sink_jax.paper.collect import Group
from sink_jax.paper.metrics import ALONE, METRICS, summary, window_size
from sink_jax.report.records import NormRatios, RunRecord

_POINTS = 200  # of a training loss: more could not be told apart
_FEW = 25  # where lines of several trials cross
_EMBEDDING = 'block (0: the embedding)'
_LOSS, _SINK = 'nats per token', 'Sink_1 in % of heads'
_LONGEST_MAP = 256  # tokens of a map that a page can carry
_Point = tuple[float | None, float | None]
_Points = Callable[[RunRecord], Sequence[_Point]]  # of a run


def figure_data(figure: dict, group: Group) -> dict | None:
  """What a figure of the paper shows of a group's runs; None where there is nothing.

  Returns:
    {budget, protocol, panels, missing}, and where it applies note (for the caption) and across
    (how many panels stand beside one another). A panel: title, x, y and right (labels of axes),
    log (axes that are logarithmic), series, and in one case a map. A series: name, runs, x,
    y, low and high (over seeds), axis ('left' or 'right') and dashed.
  """
  panels, missing, *extra = _KINDS[figure['kind']](figure, group)
  panels = [panel for panel in panels if panel['series'] or 'map' in panel]
  if not panels:
    return None
  return {**(extra[0] if extra else {}),
          'budget': group.budget, 'protocol': group.protocol, 'panels': panels,
          'missing': [f'{trial} ({group.status(trial) if words is None else words})'
                      for trial, words in missing.items()]}


def series(name: str, runs: Iterable[RunRecord], points_of: _Points,
           axis: str = 'left', dashed: bool = False) -> dict | None:
  """The mean over runs where all of them have a point; None where there is no such point."""
  runs = list(runs)
  courses = [dict(point for point in points_of(run) if None not in point) for run in runs]
  shared = [x for x in courses[0] if all(x in course for course in courses)] if courses else []
  if not shared:
    return None
  values = [[course[x] for course in courses] for x in shared]
  return {'name': name, 'runs': [run.name for run in runs], 'x': shared,
          'y': [statistics.fmean(v) for v in values], 'low': [min(v) for v in values],
          'high': [max(v) for v in values], 'axis': axis, 'dashed': dashed}


def _panel(title, x, y, found, right='', log=''):
  return {'title': title, 'x': x, 'y': y, 'right': right, 'log': log,
          'series': [one for one in found if one]}


def _absent(group, trials, drawn):
  """{trial: None, or why it is not there though it was run}."""
  return {trial: 'not measured' if group.done(trial) else None
          for trial in trials if trial not in drawn}


def _dynamics(figure, group):
  trial = figure['trials'][0]
  runs = group.measured(trial)
  found = [series('training loss', runs, _train_points),
           series('validation loss', runs, _valid_points),
           series('Sink_1', runs, _sink_points, 'right', dashed=True)]
  drawn = [trial] if any(found) else []
  return ([_panel(trial, 'step', _LOSS, found, _SINK)],
          _absent(group, figure['trials'], drawn))


def _learning_rates(figure, group):
  """The losses above, Sink_1 below, as long as the default run took."""
  losses, rates, drawn = [], [], []
  default = group.measured('default')
  end = default[0].known_setup.steps if default else math.inf
  until = lambda points: [point for point in points if point[0] <= end]
  for trial in figure['trials']:
    runs = group.measured(trial)
    pair = [series(trial, runs, lambda run: _thinned(until(_losses(run)), _FEW)),
            series(trial, runs, lambda run: until(_sink_points(run)))]
    losses, rates = losses + pair[:1], rates + pair[1:]
    drawn += [trial] if any(pair) else []
  panels = [_panel('training loss, means over stretches', 'step', _LOSS, losses),
            _panel('Sink_1', 'step', _SINK, rates)]
  extra = {'across': 1}
  if default:
    extra['note'] = f'Shown up to step {end:,}, the last of the default run.'
  return panels, _absent(group, figure['trials'], drawn), extra


def _sweep(figure, group):
  """Ends of runs, of those that are done, against what their trials vary."""
  windows = figure['number'] == '6'
  x_of = window_size if windows else _max_tokens
  measures = [('valid_loss', 'left'), ('sink_1', 'right')]
  measures += [] if windows else [('train_loss', 'left')]
  found, drawn = [], set()
  for measure, axis in measures:
    points = [(x_of(runs[0]), value) for trial in figure['trials']
              if (runs := group.done(trial)) and (value := summary(measure, runs))]
    points.sort(key=lambda point: point[0])
    drawn |= {trial for trial in figure['trials'] if summary(measure, group.done(trial))}
    if points:
      found.append({
          'name': METRICS[measure].heading.removesuffix(' %'),
          'runs': [run for _, value in points for run in value.runs],
          'x': [x for x, _ in points], 'y': [value.mean for _, value in points],
          'low': [min(value.values) for _, value in points],
          'high': [max(value.values) for _, value in points],
          'axis': axis, 'dashed': axis == 'right'})
  x = 'window in tokens' if windows else 'unique training tokens'
  return ([_panel('', x, _LOSS, found, _SINK, log='x')],
          _absent(group, figure['trials'], drawn))


def _ratios(figure, group):
  found, drawn = [], []
  for trial in figure['trials']:
    runs = group.done(trial)
    if trial == 'post-norm' and figure['number'] == '7':
      parts = [series('post-norm, after the norm', runs, _ratio_points(lambda ratios: ratios.hidden)),
               series('post-norm, before the norm', runs,
                      _ratio_points(lambda ratios: ratios.hidden_before_norm, 1), dashed=True)]
    elif trial == 'sink-token':
      parts = [series('sink-token: the token itself', runs, _ratio_points(lambda ratios: ratios.sink_token))]
    else:
      name = 'default, pre-norm' if 'post-norm' in figure['trials'] else trial
      parts = [series(name, runs, _ratio_points(lambda ratios: ratios.hidden))]
    found += parts
    drawn += [trial] if any(parts) else []
  return ([_panel('', _EMBEDDING, 'hidden norm ratio', found, log='y')],
          _absent(group, figure['trials'], drawn))


def _prefix(figure, group):
  """A panel per prefix length; single sequences of its first run."""
  panels, drawn = [], []
  for trial in figure['trials']:
    for run in group.done(trial)[:1]:
      seen = run.analyses.get('prefix') or {}
      lines = [{'name': f'sequence {i}', 'runs': [run.name],
                'x': list(range(1, len(rates) + 1)), 'y': rates, 'low': rates, 'high': rates,
                'axis': 'left', 'dashed': False}
               for i, rates in enumerate(seen.get('sequences') or (), 1)]
      panels.append(_panel(f'{trial}: prefix of {seen.get("length")}', 'position k',
                           'Sink_k in % of heads', lines))
      drawn += [trial] if lines else []
  return panels, _absent(group, figure['trials'], drawn)


def _window_map(figure, group):
  """One map, of the window model with the strongest sink; and the two tokens in all of them."""
  seen = {trial: run for trial in figure['trials'] for run in group.done(trial)[:1]
          if run.analyses.get('window')}
  alone = [trial for trial, run in seen.items() if run.analyses['window']['size'] == 1]
  rows = sorted(((run.analyses['window'], run) for trial, run in seen.items()
                 if trial not in alone), key=lambda row: row[0]['size'])
  of = lambda key, name, dashed=False: {
      'name': name, 'runs': [run.name for _, run in rows],
      'x': [window['size'] for window, _ in rows], 'y': [window.get(key) for window, _ in rows],
      'low': [window.get(key) for window, _ in rows],
      'high': [window.get(key) for window, _ in rows], 'axis': 'left', 'dashed': dashed}
  panels = []
  mapped = [row for row in rows if row[0].get('map') and len(row[0]['map']) <= _LONGEST_MAP]
  if mapped:
    window, run = max(mapped, key=lambda row: (row[1].probe.sink_1 if row[1].probe else 0, row[0]['size']))
    title = (f'window of {window["size"]}: {_weight(window, "absolute_first")} on token 1,\n'
             f'{_weight(window, "relative_first")} on the first of the window')
    panels.append(_panel(title, 'key', 'query', []) | {'map': window['map'], 'runs': [run.name]})
  if rows:
    panels.append(_panel('mean attention', 'window in tokens', 'attention weight', [
        of('absolute_first', 'to token 1, where it is seen'),
        of('relative_first', 'to the first token of the window, after it'),
        of('absolute_uniform', 'to token 1, if queries saw all keys alike', dashed=True),
        of('uniform', 'to the first token of the window, likewise', dashed=True)], log='xy'))
  return panels, _absent(group, figure['trials'], seen) | dict.fromkeys(alone, ALONE)


def _weight(window, key):
  return f'{window[key]:.3f}' if isinstance(window.get(key), (int, float)) else '?'


def _max_tokens(run: RunRecord) -> int:
  return run.known_setup.experiment.data.max_tokens


def _valid_points(run: RunRecord) -> list[_Point]:
  return list(zip(run.valid_course.get('step', ()), run.valid_course.get('valid', ())))


def _losses(run: RunRecord) -> list[tuple[float, float]]:
  """(step, training loss) of the logged steps whose loss is finite."""
  return [(step, loss) for step, loss in zip(run.train_course.get('step', ()),
                                             run.train_course.get('loss', ()))
          if step is not None and loss is not None]


def _train_points(run: RunRecord) -> list[tuple[float, float]]:
  return _thinned(_losses(run), _POINTS)


def _thinned(points, most):
  """Means over stretches of steps, so that there are at most so many of them."""
  size = -(-len(points) // most) or 1
  stretches = [points[i:i + size] for i in range(0, len(points), size)]
  return [(stretch[-1][0], statistics.fmean(loss for _, loss in stretch)) for stretch in stretches]


def _sink_points(run: RunRecord) -> list[tuple[int, float]]:
  return list(zip(run.probe.curves.step, run.probe.curves.sink_1)) if run.probe else []


def _ratio_points(of: Callable[[NormRatios], Sequence[float | None] | None], first: int = 0
                  ) -> _Points:
  """Points (block, ratio); first: the number of the first block that has a ratio."""
  return lambda run: list(enumerate((of(run.probe.ratios) if run.probe else None) or (), first))


_KINDS = {'dynamics': _dynamics, 'learning rates': _learning_rates, 'sweep': _sweep,
          'ratios': _ratios, 'prefix': _prefix, 'window map': _window_map}
