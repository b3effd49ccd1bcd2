"""The first screen of the leaderboard: an answer in sentences, and a table of all verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sink_jax.remedies.axes import AXES, Axis
from sink_jax.remedies.standings import (
  MOVES,
  NO_BASELINE,
  NOT_JUDGED,
  REMOVES,
  SAME,
  TASKS,
  UNDECIDED,
  Task,
)
from sink_jax.remedies.trials import SOFTMAX, VARIANTS, command, variants_of
from sink_jax.report.markup import listed

_SEEDS = range(5)  # of a task without a run of softmax, whose seeds are taken otherwise
# Verdicts in a word or a sign, for a table of all of them.
_SHORT = {MOVES: 'moves', SAME: 'same', UNDECIDED: '?', NOT_JUDGED: '-', NO_BASELINE: '-'}
LEGEND = (
    'Moves: from the first token to an extra key. Same: no difference, with the whole 90 % '
    'interval inside the margin. ?: undecided. -: cannot be judged, for the reason that the table '
    'of the task has. Axes on which softmax has nothing to remedy have no column.')
_EFFECTS = (REMOVES, MOVES, 'reduces', 'adds', 'better', 'worse')
_WORDS = {'better': 'lower with', 'worse': 'higher with', MOVES: 'moved to an extra key by',
          REMOVES: 'removed by', 'reduces': 'reduced by', 'adds': 'increased by'}
_SUBJECT = {'concentration': 'The sink on the first token', 'drain': 'Value drain',
            'massive': 'The massive activation', 'loss': 'The loss'}


def overall(tasks: Sequence[Task]) -> str:
  """Which variants lessen the sink on the first token, on how many tasks, and at what cost."""
  found, any_judged = [], False
  for name in VARIANTS:
    standings = [variant.standings for task in tasks for variant in task.variants
                 if variant.name == name]
    judged = [of for of in standings
              if of['concentration'].verdict not in (NOT_JUDGED, NO_BASELINE)]
    any_judged |= bool(judged)
    lessened = [of for of in judged if of['concentration'].verdict in (REMOVES, MOVES, 'reduces')]
    if lessened:
      # A loss that is higher on another task is not the price of it.
      worse = any(of['loss'].verdict == 'worse' for of in lessened)
      cost = ' (with a higher loss)' if worse else ''
      found.append(f'{name} on {len(lessened)} of {len(judged)}{cost}')
  if not any_judged:
    return 'No variant could be judged yet on whether it lessens the sink on the first token.'
  if not found:
    return 'No variant was found to lessen the sink on the first token.'
  return ('The sink on the first token is removed, moved to an extra key or reduced, of the tasks '
          f'on which that could be judged, by {listed(found)}.')


def answer(task: Task) -> str:
  """What was found on a task: the verdicts by name, and the others by number."""
  known = variants_of(task.key)
  softmax = len(task.softmax.standings['loss'].values)
  begun = sum(variant.name in known for variant in task.variants)
  lines = [f'{task.words}: {begun} of {len(known)} variants were begun, with {softmax} '
           f'seed{"" if softmax == 1 else "s"} of softmax.']
  lines += [_of_axis(axis, task) for axis in task.open_axes if task.variants]
  if task.closed:
    why = ', '.join(f'{axis.heading} ({task.closed[axis.key]})' for axis in AXES
                    if axis.key in task.closed)
    lines.append(f'Not judged: {why}.')
  return ' '.join(lines)


def _of_axis(axis: Axis, task: Task) -> str:
  """'The loss is higher with relu (20 without a difference, 9 undecided).'"""
  names = task.by_verdict(axis)
  found = [f'{_WORDS[verdict]} {listed(names[verdict])}' for verdict in _EFFECTS
           if verdict in names]
  rest = [f'{len(names[verdict])} {words}' for verdict, words in (
      (SAME, 'without a difference'), (UNDECIDED, 'undecided'), (NOT_JUDGED, 'not judged'))
          if verdict in names]
  others = f' ({", ".join(rest)})' if rest else ''
  return f'{_SUBJECT[axis.key]} is {", ".join(found) or "changed by none"}{others}.'


def verdicts(tasks: Sequence[Task]) -> tuple[list[str], list[list[str]]]:
  """A row for every variant, and a column for every axis of a task that softmax leaves open."""
  columns = [(task, axis) for task in tasks for axis in task.open_axes]
  head = ['variant', *(f'{task.words}: {axis.heading}' for task, axis in columns)]
  others = {variant.name for task in tasks for variant in task.variants} - {*VARIANTS}
  rows = []
  for name in (*VARIANTS, *sorted(others)):
    cells = [short_verdict(name, task, axis) for task, axis in columns]
    if set(cells) - {'not run', ''}:
      rows.append([name, *cells])
  return head, rows


def counts(tasks: Sequence[Task]) -> tuple[list[str], list[list[str]]]:
  """How many variants have each verdict, with a row for every axis that softmax leaves open."""
  columns = {'less': (REMOVES, MOVES, 'reduces', 'better'), 'more': ('adds', 'worse'),
             'the same': (SAME,), 'undecided': (UNDECIDED,), 'not judged': (NOT_JUDGED,)}
  rows = []
  for task in tasks:
    for axis in task.open_axes if task.variants else ():
      names = task.by_verdict(axis)
      rows.append([f'{task.words}: {axis.heading}', *(
          str(sum(len(names.get(verdict, ())) for verdict in of)) for of in columns.values())])
  return ['compared with softmax', *columns], rows


def short_verdict(name: str, task: Task, axis: Axis) -> str:
  """A verdict in a word or a sign; '' of a variant that the task cannot have."""
  variant = next((variant for variant in task.variants if variant.name == name), None)
  if variant is None:
    return 'not run' if name in variants_of(task.key) else ''
  verdict = variant.standings[axis.key].verdict
  return _SHORT.get(verdict, verdict)


def not_run(tasks: Sequence[Task]) -> dict[str, dict[str, Any]]:
  """{task: the variants of which there is no run, and the command that trains them}.

  Softmax is one of them, whose seeds the command has; tasks without any are left out.
  """
  found = {task.key: (task.softmax, *task.variants) for task in tasks}
  missing = {}
  for key in TASKS:
    there = {variant.name: variant for variant in found.get(key, ()) if variant.runs}
    names = [name for name in (SOFTMAX, *variants_of(key)) if name not in there]
    seeds = sorted({run.setup.seed for run in there[SOFTMAX].runs if run.setup}
                   ) if SOFTMAX in there else []
    if names:
      missing[key] = {'variants': names, 'command': command(key, names, seeds or _SEEDS)}
  return missing
