"""The pictures of the leaderboard: all verdicts, rates of all seeds, differences from softmax."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from matplotlib.colors import to_rgba

from sink_jax.evaluate import plots
from sink_jax.paper.drawing import SeedRows, seed_rows
from sink_jax.paper.metrics import METRICS, metric_summary
from sink_jax.remedies.axes import AXES, EXTRA_KEY
from sink_jax.remedies.overview import short_verdict, verdicts
from sink_jax.remedies.standings import NO_BASELINE, NOT_JUDGED, UNDECIDED, Task
from sink_jax.report.images import png

UNITS = {'percent': 'points', 'ratio': 'in the logarithm', 'nats': 'nats (or squares)'}
CAPTIONS = {
    'verdicts.png': 'Verdicts of each variant beside softmax, by axis and task: green where it '
                    'lessens what softmax has, orange where it adds to it, grey where there is no '
                    'difference, ? where that is undecided, - where it cannot be judged; empty '
                    'where it was not run.',
    'rates.png': 'Sink rates of each variant, a mark for each seed: softmax, then from the weakest '
                 'sink on the first token to the strongest; dotted: the mean of softmax. A star '
                 'marks proxy scores, of rows that do not sum to one.',
    'differences.png': 'Differences from softmax by task and axis: a dot for the mean, a bar for '
                       'its interval, the margin in grey. Filled dots have a verdict. A loss is in '
                       'squares where a task has no tokens.'}
_LESS, _MORE = plots.COLOURS[2], plots.COLOURS[1]
# {verdict in a word or a sign: the colour of its cell and how much of it}; others stay white.
_CELLS = {'removes': (_LESS, 0.75), 'moves': (_LESS, 0.5), 'reduces': (_LESS, 0.3),
          'better': (_LESS, 0.5), 'adds': (_MORE, 0.6), 'worse': (_MORE, 0.6),
          'same': ('#888888', 0.3)}
_ROW = 0.19  # inches


def first_pictures(tasks: Sequence[Task]) -> dict[str, bytes]:
  """{file: PNG} of what the page shows first: verdicts, where there are any, and rates."""
  names = [name for name, *_ in verdicts(tasks)[1]]
  return ({'verdicts.png': _verdicts(tasks, names)} if names else {}) | {
      'rates.png': png(seed_rows([_rates(task) for task in tasks], _ROW))}


def _verdicts(tasks: Sequence[Task], names: Sequence[str]) -> bytes:
  """A panel for each axis that a task has open, with a column for each task."""
  shown = [axis for axis in AXES if any(axis in task.open_axes for task in tasks)]
  figure, axes = plots.canvas((1.6 + 0.68 * len(tasks)) * len(shown), 0.9 + _ROW * len(names),
                              columns=len(shown))
  for ax, axis in zip(axes[0], shown):
    cells = [[short_verdict(name, task, axis) for task in tasks] for name in names]
    ax.imshow([[to_rgba(*_CELLS.get(cell, ('white', 1.0))) for cell in row] for row in cells],
              aspect='auto')
    for y, row in enumerate(cells):
      for x, cell in enumerate(row):
        ax.text(x, y, '' if cell == 'not run' else cell, ha='center', va='center', fontsize=8)
    plots.label(ax, plots.mathematical(axis.heading), '', '')
    ax.set_xticks(range(len(tasks)), [task.words.replace('-', '-\n').replace(' ', '\n')
                                      for task in tasks])
    ax.set_yticks(range(len(names)), names)
    ax.tick_params(length=0, labelsize=8)
  return png(figure)


def _rates(task: Task) -> SeedRows:
  """Sink_1 and Sink_* of all variants of a task."""
  first, extra = 'Sink_1, first token', 'Sink_*, extra key'
  rates = lambda key, variant: of.values if (of := metric_summary(key, variant.done)) else ()
  found = [(variant, rates('sink_1', variant)) for variant in (task.softmax, *task.variants)]
  order = lambda pair: (pair[0] is not task.softmax, statistics.fmean(pair[1]))
  rows = {variant.name + '*' * any(run.proxy for run in variant.runs):
          {first: of, extra: rates(EXTRA_KEY, variant)}
          for variant, of in sorted((pair for pair in found if pair[1]), key=order)}
  softmax = found[0][1]
  return SeedRows(task.words, rows, {first: statistics.fmean(softmax)} if softmax else {})


def differences(tasks: Sequence[Task]) -> bytes:
  """A panel for every task and axis; closed ones say so."""
  # All lines of all tasks lie equally far apart.
  heights = [0.22 * max(len(task.variants), 3) + 1.0 for task in tasks for _ in AXES[::2]]
  figure, axes = plots.canvas(9.6, sum(heights), len(heights), 2)
  axes[0, 0].get_gridspec().set_height_ratios(heights)
  for task, row in zip(tasks, axes.reshape(len(tasks), len(AXES))):
    names = [variant.name for variant in task.variants]
    for axis, ax in zip(AXES, row):
      unit = UNITS[METRICS[axis.metric].unit]
      closed = ' (not judged)' if axis.key in task.closed else ''
      heading = plots.mathematical(axis.heading) + closed
      plots.label(ax, f'{task.words}\n{heading}', f'difference, {unit}', '')
      ax.axvspan(-axis.margin, axis.margin, color='0.9')
      ax.axvline(0, color='0.4', linewidth=0.8)
      for i, variant in enumerate(task.variants):
        it = variant.standings[axis.key]
        if it.difference is None:
          continue
        open_ = it.verdict in (UNDECIDED, NO_BASELINE, NOT_JUDGED)
        if it.low is not None and it.high is not None:
          ax.plot([it.low, it.high], [i, i], color=plots.COLOURS[0], linewidth=1)
        ax.plot([it.difference], [i], 'o', markersize=4, color=plots.COLOURS[0],
                markerfacecolor='white' if open_ else plots.COLOURS[0])
      ax.set_yticks(range(len(names)), names, fontsize=8)
      ax.set_ylim(max(1, len(names)) - 0.5, -0.5)  # also where the first or last has no difference
  return png(figure)
