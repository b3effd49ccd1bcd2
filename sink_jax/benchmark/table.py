"""The table that is printed of a benchmark's document, as text and as Markdown.

A row without a number under a column shows a dash; the last column has the reason in `failed`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sink_jax.benchmark.records import Column, Document
from sink_jax.io.files import write_atomically

_NOTE = 110  # letters of a reason that the table shows; the document has all of it


def write_json(entries: dict[str, Any], path: str | os.PathLike) -> None:
  """Writes a JSON file as a whole: a reader, or a killed writer, leaves no half of it.

  Raises:
    ValueError: a number is not finite, which JSON cannot hold.
  """
  path = Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  write_atomically(path, json.dumps(entries, indent=1, allow_nan=False) + '\n')


def render(document: Document) -> str:
  """The table as text, with the machine above and the notes below."""
  cells = [[column.title for column in document.columns], *_cells(document)]
  widths = [max(len(row[n]) for row in cells) for n in range(len(cells[0]))]
  left = [not column.format for column in document.columns]
  lines = []
  for number, row in enumerate(cells):
    if number == 1:
      # The rule ends before the last column, whose reasons are long.
      lines.append('-' * (sum(widths[:-1]) + 2 * len(widths) - 4))
    # An empty line where the first column changes, such as from one shape to the next.
    elif number > 1 and row[0] != cells[number - 1][0]:
      lines.append('')
    lines.append('  '.join(x.ljust(w) if is_left else x.rjust(w)
                           for x, w, is_left in zip(row, widths, left)).rstrip())
  lines += [''] + [f'* {note}' for note in document.notes]
  if not document.complete:
    lines.append('* NOT COMPLETE: the run was cut short.')
  return '\n'.join([heading(document), '', *lines])


def heading(document: Document) -> str:
  """Two lines: which benchmark, on which hardware, when, and by which command."""
  machine = document.machine
  return (f'{document.command} on {machine["hardware"]}, jax {machine["jax"]}, '
          f'{machine["date"]}\n{machine["command"]}')


def markdown(document: Document) -> str:
  """The table alone in Markdown."""
  rows = [[column.title for column in document.columns],
          ['---:' if column.format else '---' for column in document.columns], *_cells(document)]
  return '\n'.join('| ' + ' | '.join(x.replace('|', '\\|') for x in row) + ' |' for row in rows)


def _cells(document: Document) -> Iterator[list[str]]:
  for row in document.rows:
    entries = row.to_json()
    yield [_cell(entries, column) for column in document.columns]


def _cell(entries: dict[str, Any], column: Column) -> str:
  if column.key == 'note':
    note = str(entries.get('failed') or entries.get('note') or '')
    return note if len(note) <= _NOTE else note[:_NOTE - 3] + '...'
  value = entries.get(column.key)
  if value is None:
    return '-'
  return format(value, column.format) if column.format else str(value)
