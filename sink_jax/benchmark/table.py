"""A benchmark's result as a JSON document, and the table that is made of it.

A document holds everything the table shows: `render(json.load(file))` prints it again. A
row without a number under a column shows a dash; `failed` says why, in the last column.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sink_jax.io.files import write_atomically

_NOTE = 110  # letters of a reason that the table shows; the document has all of it


def column(key: str, title: str, form: str = '') -> dict[str, str]:
  """A column: the key of its numbers in the rows, its title, how they are formatted."""
  return {'key': key, 'title': title, 'format': form}


def document(command: str, machine: dict[str, Any], options: dict[str, Any],
             columns: Sequence[dict[str, str]], rows: Sequence[dict[str, Any]],
             notes: Sequence[str], complete: bool = True) -> dict[str, Any]:
  """What a command found, ready for JSON."""
  return {'command': command, 'machine': machine, 'options': options, 'complete': complete,
          'columns': list(columns), 'rows': list(rows), 'notes': list(notes)}


def write(result: dict[str, Any], path) -> None:
  """Writes JSON in one go: a reader, or a killed writer, leaves no half of it."""
  path = Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  write_atomically(path, json.dumps(result, indent=1, allow_nan=False) + '\n')


def render(result: dict[str, Any]) -> str:
  """The table as text, with the machine above and the notes below."""
  cells = [[c['title'] for c in result['columns']], *map(list, _cells(result))]
  widths = [max(len(row[n]) for row in cells) for n in range(len(cells[0]))]
  left = [not c['format'] for c in result['columns']]
  lines = []
  for number, row in enumerate(cells):
    if number == 1:
      lines.append('-' * (sum(widths[:-1]) + 2 * len(widths) - 4))
    elif number > 1 and row[0] != cells[number - 1][0]:
      lines.append('')
    lines.append('  '.join(x.ljust(w) if is_left else x.rjust(w)
                           for x, w, is_left in zip(row, widths, left)).rstrip())
  lines += [''] + [f'* {note}' for note in result['notes']]
  if not result['complete']:
    lines.append('* NOT COMPLETE: the run was cut short.')
  return '\n'.join([heading(result), '', *lines])


def heading(result: dict[str, Any]) -> str:
  """Which benchmark, where, when and with what."""
  machine = result['machine']
  return (f'{result["command"]} on {machine["hardware"]}, jax {machine["jax"]}, '
          f'{machine["date"]}\n{machine["command"]}')


def markdown(result: dict[str, Any]) -> str:
  """The table alone in Markdown."""
  rows = [[c['title'] for c in result['columns']],
          ['---:' if c['format'] else '---' for c in result['columns']], *_cells(result)]
  return '\n'.join('| ' + ' | '.join(x.replace('|', '\\|') for x in row) + ' |' for row in rows)


def _cells(result):
  for row in result['rows']:
    yield [_cell(row, c) for c in result['columns']]


def _cell(row, column):
  if column['key'] == 'note':
    note = str(row.get('failed') or row.get('note') or '')
    return note if len(note) <= _NOTE else note[:_NOTE - 3] + '...'
  value = row.get(column['key'])
  if value is None:
    return '-'
  return format(value, column['format']) if column['format'] else str(value)
