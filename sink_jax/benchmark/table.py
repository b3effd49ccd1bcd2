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
from sink_jax.io.tables import markdown_table, text_table

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
  rows = list(_cells(document))
  lines = text_table([column.title for column in document.columns], rows, _left(document))
  # An empty line where the first column changes, such as from one shape to the next.
  for i in range(len(rows) - 1, 0, -1):
    if rows[i][0] != rows[i - 1][0]:
      lines.insert(2 + i, '')
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
  return '\n'.join(markdown_table([column.title for column in document.columns],
                                  list(_cells(document)), _left(document)))


def _left(document: Document) -> list[int]:
  """The columns of words: numbers have a format."""
  return [i for i, column in enumerate(document.columns) if not column.format]


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
