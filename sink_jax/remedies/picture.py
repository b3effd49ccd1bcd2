"""The picture of the leaderboard: differences from softmax with their intervals."""

from __future__ import annotations

from collections.abc import Sequence

from sink_jax.evaluate import plots
from sink_jax.paper.metrics import METRICS
from sink_jax.remedies.axes import AXES
from sink_jax.remedies.standings import NO_BASELINE, NOT_JUDGED, UNDECIDED, Task
from sink_jax.report.images import png

UNITS = {'percent': 'points', 'ratio': 'in the logarithm', 'nats': 'nats (or squares)'}
CAPTION = ('Differences from softmax by task and axis: a dot for the mean, a bar for its '
           'interval, the margin in grey. Filled dots have a verdict. A loss is in squares where a '
           'task has no tokens.')


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
      ax.set_ylim(len(names) - 0.5, -0.5)  # also where the first or last has no difference
  return png(figure)
