"""Tables of texts, as Markdown and for a terminal, and the words in them.

Every table that the package prints or writes is laid out here.
"""

from __future__ import annotations

import importlib
import re
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

_SPECIAL = re.compile(r'[\\`*_|<\[\]]|&(?=#?\w+;)')


class Markdown(str):
  """A text that is Markdown already; any other text is words, in which nothing is markup."""


def escaped(words: object) -> Markdown:
  """Words as Markdown on one line: nothing in them is markup."""
  if isinstance(words, Markdown):
    return words
  return Markdown(_SPECIAL.sub(r'\\\g<0>', ' '.join(str(words).split())))


def number(value: float | None, form: str, unknown: str = '-') -> str:
  """A number in the form of `format`, or what stands in place of None."""
  return unknown if value is None else format(value, form)


def short(number: float, digits: int = 3) -> str:
  """1228800 -> '1.23 M'; digits: at most so many, but all of those before the point."""
  for size, letter in ((1e9, 'B'), (1e6, 'M'), (1e3, 'k')):
    if number >= size:
      return f'{number / size:.{max(digits, len(str(int(number / size))))}g} {letter}'
  return f'{number:.0f}'


def markdown_table(head: Sequence[object], rows: Iterable[Sequence[object]],
                   left: Collection[int] = (0,)) -> list[str]:
  """The lines of a table in Markdown, whose cells are words or `Markdown`.

  left: the columns of words, which begin at the left; numbers end at the right.
  """
  rule = [Markdown('---' if i in left else '---:') for i in range(len(head))]
  # A bar would end its cell even within code, where a backslash before one is lost.
  cell = lambda words: re.sub(r'(?<!\\)\|', r'\\|', escaped(words))
  return [f'| {" | ".join(map(cell, line))} |' for line in (head, rule, *rows)]


def html_table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
  """A table of words for a notebook."""
  from markdown_it import MarkdownIt  # for pages and notebooks alone

  lines = markdown_table(head, rows)
  return MarkdownIt('commonmark', {'html': False}).enable('table').render('\n'.join(lines))


def data_frame(columns: Mapping[str, Any]) -> Any:
  """The `pandas.DataFrame` of columns by name.

  Raises:
    ImportError: pandas is not installed.
  """
  try:
    pandas = importlib.import_module('pandas')
  except ImportError:
    raise ImportError('to_pandas needs pandas, which sink_jax itself does without: pip install '
                      'pandas.') from None
  return pandas.DataFrame(dict(columns))


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]],
               left: Collection[int] = (0,), width: int | None = None,
               wrapped: Collection[str] = ()) -> list[str]:
  """The lines of a table for a terminal.

  Args:
    head: headings, which are wrapped between words where `width` is given.
    rows: cells.
    left: the columns of words, as in `markdown_table`.
    width: letters of a line; the first column is wrapped to what the others leave. None wraps
      nothing.
    wrapped: cells of words, which may be wrapped as headings are; numbers stay together.
  """
  least = lambda words: max(map(len, words.split()), default=0)
  if width is None:
    widths = [max(map(len, column)) for column in zip(head, *rows)]
  else:
    widths = [max(least(name), *(least(row[i]) if row[i] in wrapped else len(row[i])
                                 for row in rows)) for i, name in enumerate(head)][1:]
    # The first column has twelve letters even where the numbers take the whole line, which is then
    # longer.
    room = width - sum(widths) - 2 * len(widths)
    widths = [max(12, min(room, max(len(row[0]) for row in rows))), *widths]

  def lines(cells: Sequence[str]) -> list[str]:
    parts = [[cell] if width is None else textwrap.wrap(cell, space) or ['']
             for cell, space in zip(cells, widths)]
    height = max(map(len, parts))
    parts = [part + [''] * (height - len(part)) for part in parts]
    return ['  '.join(part.ljust(space) if i in left else part.rjust(space)
                      for i, (part, space) in enumerate(zip(line, widths))).rstrip()
            for line in zip(*parts)]

  return [*lines(head), '  '.join('-' * space for space in widths).rstrip(),
          *(line for row in rows for line in lines(row))]
