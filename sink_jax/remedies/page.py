"""The report of the leaderboard: HTML, Markdown, JSON and a picture, from the same records."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from sink_jax.io.paths import AnyPath, to_path
from sink_jax.models.sizes import parameter_count
from sink_jax.paper.metrics import METRICS, metric_summary
from sink_jax.paper.spread import CONFIDENCE
from sink_jax.remedies.axes import AXES, COLUMNS, Axis
from sink_jax.remedies.findings import FINDINGS, compared
from sink_jax.remedies.overview import LEGEND, answer, counts, not_run, overall, verdicts
from sink_jax.remedies.picture import CAPTIONS, UNITS, differences, first_pictures
from sink_jax.remedies.standings import TASKS, Standing, Task, Variant, groups, task_of
from sink_jax.remedies.step_times import StepTimes
from sink_jax.report.jsontext import rounded, to_json
from sink_jax.report.markup import mean_and_range, upper
from sink_jax.report.parts import Parts
from sink_jax.report.records import RunRecord

TITLE = 'Remedies against attention sinks'
_BYTES = 256  # where the config names no vocabulary; any does, as differences are shown
_STEP = 'time of a step, times softmax'


def leaderboard(runs: Sequence[RunRecord], out: str | AnyPath,
                times: StepTimes = StepTimes()) -> str:
  """Writes the report of the runs of configs/remedies.py, and returns its summary.

  Args:
    times: of training steps, which are measured apart from runs.

  Raises:
    ValueError: none of them is among the runs.
    OSError: `out` cannot be written.
  """
  tasks = [task_of(group) for group in groups(runs)]
  answers, missing = [overall(tasks), *map(answer, tasks)], not_run(tasks)
  page = Parts(TITLE)
  page.paragraph(answers[0])
  page.table(*counts(tasks))
  for file, picture in first_pictures(tasks).items():
    page.picture(file, picture, CAPTIONS[file])
  page.heading('In detail')
  page.items(answers[1:])
  page.heading('Verdicts')
  page.table(*verdicts(tasks))
  page.paragraph(LEGEND)
  page.picture('differences.png', differences(tasks), CAPTIONS['differences.png'])
  page.heading('How they are reached')
  page.paragraph(METHOD)
  page.paragraph(times.sentence())
  for task in tasks:
    page.heading(task.words)
    page.items(sentences(task))
    page.table(*_table(task, times), (0, 1))
    for words, head, rows in _rankings(task):
      page.heading(words, 3)
      page.table(head, rows, (0, 2, 3))
  page.heading('What their papers report')
  page.table(*_findings(tasks), range(4 + len(tasks)))
  if missing:
    page.heading('Not run')
    for key, of in missing.items():
      page.paragraph(f'{TASKS[key]}, not run: {", ".join(of["variants"])}. To train them:')
      page.code(of['command'])
  page.write(to_path(out), to_json(rounded({
      'summary': answers, 'tasks': [_record(task, times) for task in tasks],
      'steps_timed': times.measured, 'not_run': missing})))
  return '\n'.join(answers)


METHOD = (
    'Each variant is trained with the seeds of softmax, and differences are paired by seed. A '
    f'difference counts where its interval, at {100 * CONFIDENCE:g} % divided among the variants '
    "of the task by Holm's method, lies beyond the margin: "
    + ', '.join(f'{axis.margin:g} {UNITS[METRICS[axis.metric].unit]} of the {axis.heading}'
                for axis in AXES)
    + '. "No difference" means that the whole 90 % interval lies inside the margin. Variances are '
    'joined with those of the other variants. A star marks proxy scores, of rows that do not sum '
    'to one: a sink among them may have next to no weight, which the raw mass on the first token '
    'says. There is no total score.')


def sentences(task: Task) -> list[str]:
  """What was found on a task, axis by axis, with every variant."""
  lines = []
  for axis in AXES:
    start = f'{upper(axis.heading)}: softmax {_seeds(axis, task.softmax)}'
    if axis.key in task.closed:
      lines.append(f'{start}; {task.closed[axis.key]}, so that no variant is judged.')
      continue
    words = [f'{verdict} ({", ".join(names)})'
             for verdict, names in sorted(task.by_verdict(axis).items())]
    power = task.power[axis.key]
    shown = '' if power is None else (
        f' The smallest difference that these seeds can show is {axis.text(power)}.')
    lines.append(f'{start}; {"; ".join(words) or "no other variant was run"}.{shown}')
  return lines


def _seeds(axis: Axis, variant: Variant) -> str:
  metric = metric_summary(axis.metric, variant.done)
  return metric.text if metric else variant.status


def _table(task: Task, times: StepTimes) -> tuple[list[str], list[list[str]]]:
  """All that was measured of every variant, softmax first."""
  head = ['variant', 'runs', *(axis.heading for axis in AXES), *COLUMNS,
          'parameters more than softmax', _STEP]
  rows = []
  base = _parameters(task.softmax)
  for variant in (task.softmax, *task.variants):
    own = _parameters(variant)
    more = '-' if own is None or base is None else f'{own - base:,}'
    rows.append([variant.name, variant.status, *(_seeds(axis, variant) for axis in AXES),
                 *(mean_and_range(list(map(of, variant.done)), '.3g') for of in COLUMNS.values()),
                 more, times.text(task.key, variant.name)])
  return head, rows


def _parameters(variant: Variant) -> int | None:
  run = next((run for run in variant.runs if run.setup is not None), None)
  if run is None:
    return None
  experiment = run.known_setup.experiment
  return parameter_count(experiment.model_config(experiment.model.vocab_size or _BYTES))


def _rankings(task: Task) -> Iterator[tuple[str, list[str], list[list[str]]]]:
  """A table for every open axis: variants by their difference from softmax, with the verdicts."""
  for axis in task.open_axes:
    standings = [(variant.name, variant.standings[axis.key]) for variant in task.variants]
    standings.sort(key=lambda pair: (pair[1].difference is None, (
        -1 if axis.small else 1) * (pair[1].difference or 0.0)))
    rows = [[name, it.text(), it.verdict, it.reason] for name, it in standings]
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


def standing_record(it: Standing) -> dict[str, Any]:
  """A standing as report.json has it."""
  return {'values': list(it.values.values()), 'seeds': list(it.values),
          'differences': list(it.differences.values()), 'difference': it.difference,
          'low': it.low, 'high': it.high, 'n': len(it.differences), 'verdict': it.verdict,
          'reason': it.reason}


def _record(task: Task, times: StepTimes) -> dict[str, Any]:
  def shown(variant: Variant) -> dict[str, Any]:
    standings = {key: standing_record(it) for key, it in variant.standings.items()}
    time = times.ratios.get((task.key, variant.name))
    return {'variant': variant.name, 'status': variant.status, 'axes': standings,
            'columns': {name: list(map(of, variant.done)) for name, of in COLUMNS.items()},
            'parameters': _parameters(variant),
            'step_time': None if time is None else dataclasses.asdict(time)}
  return {'task': task.key, 'sentences': sentences(task), 'closed': dict(task.closed),
          'power': dict(task.power),
          'variants': [shown(variant) for variant in (task.softmax, *task.variants)]}
