"""The report of the leaderboard: HTML, Markdown, JSON and a picture, from the same records."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from typing import Any

from sink_jax.evaluate import plots
from sink_jax.io.files import write_atomically
from sink_jax.io.paths import AnyPath, to_path
from sink_jax.models.sizes import parameter_count
from sink_jax.paper.metrics import METRICS, metric_summary
from sink_jax.paper.spread import CONFIDENCE
from sink_jax.remedies.axes import AXES, COLUMNS, Axis
from sink_jax.remedies.findings import FINDINGS, compared
from sink_jax.remedies.standings import (
  NO_BASELINE,
  NOT_JUDGED,
  UNDECIDED,
  Standing,
  Task,
  Variant,
  groups,
  task_of,
)
from sink_jax.report import markup
from sink_jax.report.jsontext import finite, rounded, to_json
from sink_jax.report.records import RunRecord

TITLE = 'Remedies against attention sinks'
_UNITS = {'percent': 'points', 'ratio': 'in the logarithm', 'nats': 'nats (or squares)'}
_BYTES = 256  # any vocabulary does: parameters are shown as differences
_CAPTION = ('Differences from softmax by task and axis: a dot for the mean, a bar for its '
            'interval, the margin in grey. Filled dots have a verdict.')


def leaderboard(runs: Sequence[RunRecord], out: str | AnyPath) -> str:
  """Writes the report of the runs of configs/remedies.py, and returns its summary.

  Raises:
    ValueError: none of them is among the runs.
    OSError: `out` cannot be written.
  """
  tasks, out = [task_of(group) for group in groups(runs)], to_path(out)
  out.mkdir(parents=True, exist_ok=True)
  lines = [line for task in tasks for line in summary(task)]
  picture = _differences(tasks)
  markdown, page = ['# ' + TITLE, '', *(f'- {markup.escaped(line)}' for line in lines), ''], [
      '<article>', f'<h1>{TITLE}</h1>', _list(lines)]
  markdown += [markup.escaped(METHOD), '', f'![{_CAPTION}](differences.png)', '']
  page += [f'<p>{markup.text(METHOD)}</p>', markup.picture(picture, _CAPTION)]
  for task in tasks:
    markdown += [f'## {task.words}', '']
    page.append(f'<h2>{markup.text(task.words)}</h2>')
    for words, head, rows in (('', *_table(task)), *_rankings(task)):
      markdown += ([f'### {words}', ''] if words else []) + [*markup.markdown_table(head, rows), '']
      page += ([f'<h3>{markup.text(words)}</h3>'] if words else []) + [_html(head, rows)]
  head, rows = _findings(tasks)
  markdown += ['## What their papers report', '', *markup.markdown_table(head, rows), '']
  page += ['<h2>What their papers report</h2>', _html(head, rows), '</article>']
  write_atomically(out / 'differences.png', picture)
  write_atomically(out / 'report.json', to_json(rounded(finite(
      {'summary': lines, 'tasks': [_record(task) for task in tasks]}))))
  write_atomically(out / 'report.md', '\n'.join(markdown))
  write_atomically(out / 'index.html', markup.document(TITLE, page))
  return '\n'.join(lines)


METHOD = (
    'Each variant is trained with the seeds of softmax, and differences are paired by seed. A '
    f'difference counts where its interval, at {100 * CONFIDENCE:g} % divided among the variants '
    "of the task by Holm's method, lies beyond the margin: "
    + ', '.join(f'{axis.margin:g} {_UNITS[METRICS[axis.metric].unit]} of the {axis.heading}'
                for axis in AXES)
    + '. "No difference" means that the whole 90 % interval lies inside the margin. Variances are '
    'joined with those of the other variants. A star marks proxy scores, of rows that do not sum '
    'to one: a sink among them may have next to no weight, which the raw mass on the first token '
    'says. There is no total score.')


def summary(task: Task) -> list[str]:
  """What was found on a task, in sentences."""
  lines = []
  for axis in AXES:
    found: dict[str, list[str]] = {}
    for variant in task.variants:
      found.setdefault(variant.standings[axis.key].verdict, []).append(variant.name)
    start = f'{task.words}, {axis.heading}: softmax {_seeds(axis, task.softmax)}'
    if axis.key in task.closed:
      lines.append(f'{start}; {task.closed[axis.key]}, so that no variant is judged.')
      continue
    words = [f'{verdict} ({", ".join(names)})' for verdict, names in sorted(found.items())]
    power = task.power[axis.key]
    shown = '' if power is None else (
        f' The smallest difference that these seeds can show is {_difference(axis, power)}.')
    lines.append(f'{start}; {"; ".join(words) or "no other variant was run"}.{shown}')
  return lines


def _seeds(axis: Axis, variant: Variant) -> str:
  metric = metric_summary(axis.metric, [run for run in variant.runs if run.status == 'done'])
  return metric.text() if metric else variant.status


def _difference(axis: Axis, value: float) -> str:
  """A difference on the scale of the metric: points, nats, or the factor between two ratios."""
  if METRICS[axis.metric].unit == 'ratio':
    return f'x {math.exp(value):.2f}'
  return f'{value:+.3f}' if axis.key == 'loss' else f'{value:+.1f}'


def _interval(axis: Axis, standing: Standing) -> str:
  if standing.difference is None:
    return standing.reason
  words = _difference(axis, standing.difference)
  if standing.low is None or standing.high is None:
    return words
  return (f'{words} ({_difference(axis, standing.low)} to '
          f'{_difference(axis, standing.high)}, n = {standing.n})')


def _table(task: Task) -> tuple[list[str], list[list[str]]]:
  """All that was measured of every variant, softmax first."""
  head = ['variant', 'runs', *(axis.heading for axis in AXES), *COLUMNS,
          'parameters more than softmax']
  rows = []
  base = _parameters(task.softmax)
  for variant in (task.softmax, *task.variants):
    own = _parameters(variant)
    more = '-' if own is None or base is None else f'{own - base:,}'
    rows.append([variant.name, variant.status, *(_seeds(axis, variant) for axis in AXES),
                 *(_column(variant, name) for name in COLUMNS), more])
  return head, rows


def _column(variant: Variant, name: str) -> str:
  values = [value for run in variant.runs
            if run.status == 'done' and (value := COLUMNS[name](run)) is not None]
  if not values:
    return '-'
  return f'{sum(values) / len(values):.3g} ({min(values):.3g} to {max(values):.3g})'


def _parameters(variant: Variant) -> int | None:
  run = next((run for run in variant.runs if run.setup is not None), None)
  return None if run is None else parameter_count(
      run.known_setup.experiment.model_config(_BYTES))


def _rankings(task: Task) -> Iterator[tuple[str, list[str], list[list[str]]]]:
  """A table for every open axis: variants by their difference from softmax, with the verdicts."""
  for axis in AXES:
    if axis.key in task.closed:
      continue
    standings = [(variant, variant.standings[axis.key]) for variant in task.variants]
    known = [pair for pair in standings if pair[1].difference is not None]
    known.sort(key=lambda pair: pair[1].difference or 0.0, reverse=axis.small)
    rows = [[variant.name, _interval(axis, standing), standing.verdict, standing.reason]
            for variant, standing in (*known, *(p for p in standings if p not in known))]
    yield (f'{axis.heading}, by the difference from softmax',
           ['variant', 'difference (interval)', 'verdict', 'because'], rows)


def _findings(tasks: Sequence[Task]) -> tuple[list[str], list[list[str]]]:
  head = ['variant', 'source', 'scale', 'it reports', *(task.words for task in tasks)]
  rows = []
  for finding in FINDINGS:
    cells = []
    for task in tasks:
      found = compared(finding, task)
      cells.append('; '.join(f'{key}: {words}' for key, words in found.items()) or 'not run')
    rows.append([finding.variant, finding.source, finding.scale, finding.words, *cells])
  return head, rows


def _record(task: Task) -> dict[str, Any]:
  def of(variant: Variant) -> dict[str, Any]:
    standings = {key: {'values': list(it.values.values()), 'seeds': list(it.values),
                       'difference': it.difference, 'low': it.low, 'high': it.high, 'n': it.n,
                       'verdict': it.verdict, 'reason': it.reason}
                 for key, it in variant.standings.items()}
    return {'variant': variant.name, 'status': variant.status, 'axes': standings,
            'columns': {name: [COLUMNS[name](run) for run in variant.runs
                               if run.status == 'done'] for name in COLUMNS},
            'parameters': _parameters(variant)}
  return {'task': task.key, 'closed': dict(task.closed), 'power': dict(task.power),
          'variants': [of(variant) for variant in (task.softmax, *task.variants)]}


def _html(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  cells = lambda tag, row: ''.join(f'<{tag}>{markup.text(cell)}</{tag}>' for cell in row)
  return markup.table(f'<tr>{cells("th", head)}</tr>', (cells('td', row) for row in rows))


def _list(lines: Sequence[str]) -> str:
  return '<ul>' + ''.join(f'<li>{markup.text(line)}</li>' for line in lines) + '</ul>'


def _differences(tasks: Sequence[Task]) -> bytes:
  """A panel for every task and axis; closed ones say so."""
  most = max((len(task.variants) for task in tasks), default=1)
  figure, axes = plots.canvas(4.2 * len(AXES), max(2.2, 0.28 * most + 1.2) * len(tasks),
                              len(tasks), len(AXES))
  for task, row in zip(tasks, axes):
    names = [variant.name for variant in task.variants]
    for axis, ax in zip(AXES, row):
      plots.label(ax, f'{task.words}: {axis.heading}', 'difference from softmax', '')
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
      ax.set_yticks(range(len(names)), names if axis is AXES[0] else [''] * len(names), fontsize=8)
      ax.invert_yaxis()
  buffer = io.BytesIO()
  plots.save(figure, buffer)
  return buffer.getvalue()
