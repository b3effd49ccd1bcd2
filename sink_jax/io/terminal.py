"""Output for people: tables for Markdown and for a terminal, formatted numbers, progress, messages."""

from __future__ import annotations

import itertools
import logging
import re
import sys
import textwrap
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import absl.flags
import absl.logging
from tqdm import tqdm

_SPECIAL = re.compile(r'[\\`*_|<\[\]]|&(?=#?\w+;)')


class Markdown(str):
  """Text that is Markdown already; any other text is escaped."""


def escaped(words: object) -> Markdown:
  """Text as one line of Markdown, with everything escaped that would be markup."""
  if isinstance(words, Markdown):
    return words
  return Markdown(_SPECIAL.sub(r'\\\g<0>', ' '.join(str(words).split())))


def number(value: float | None, form: str, unknown: str = '-') -> str:
  """A number in the form of `format`; `unknown` for None."""
  return unknown if value is None else format(value, form)


def short(number: float, digits: int = 3) -> str:
  """1228800 -> '1.23 M'; digits: significant ones, but at least those before the point."""
  for size, letter in ((1e9, 'B'), (1e6, 'M'), (1e3, 'k')):
    if number >= size:
      return f'{number / size:.{max(digits, len(str(int(number / size))))}g} {letter}'
  return f'{number:.0f}'


def markdown_table(head: Sequence[object], rows: Iterable[Sequence[object]],
                   left: Collection[int] = (0,)) -> list[str]:
  """The lines of a table in Markdown; left: indices of the left-aligned columns."""
  rule = [Markdown('---' if i in left else '---:') for i in range(len(head))]
  # A bar would end its cell even within code, where a backslash before one is lost.
  cell = lambda words: re.sub(r'(?<!\\)\|', r'\\|', escaped(words))
  return [f'| {" | ".join(map(cell, line))} |' for line in (head, rule, *rows)]


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int] = (0,),
               width: int | None = None, wrapped: Collection[str] = ()) -> list[str]:
  """The lines of a table for a terminal; left: indices of the left-aligned columns.

  width: letters of a line; headings, the first column and the cells `wrapped` are wrapped to fit it.
  """
  widths = [max(1, *map(len, column)) for column in zip(head, *rows)]
  if width is not None:
    longest_word = lambda words: max(map(len, words.split()), default=1)
    least = lambda cell: longest_word(cell) if cell in wrapped else len(cell)
    widths[1:] = [max(longest_word(name), *map(least, cells)) for name, *cells in [*zip(head, *rows)][1:]]
    # At least twelve letters, even if the line then exceeds the width.
    widths[0] = max(12, min(widths[0], width - sum(widths[1:]) - 2 * len(widths[1:])))

  def lines(cells: Sequence[str]) -> list[str]:
    parts = [textwrap.wrap(cell, space) or [''] for cell, space in zip(cells, widths)]
    return ['  '.join(part.ljust(space) if i in left else part.rjust(space)
                      for i, (part, space) in enumerate(zip(line, widths))).rstrip()
            for line in itertools.zip_longest(*parts, fillvalue='')]

  rule = '  '.join('-' * space for space in widths)
  return [*lines(head), rule, *(line for row in rows for line in lines(row))]


class Progress:
  """A bar on a terminal, elsewhere a line every ten seconds; `total` is 0 where it is not known."""

  def __init__(self, name: str, total: int = 0, start: int = 0, unit: str = 'B', enabled: bool = True):
    lines: dict[str, Any] = {} if sys.stderr.isatty() else dict(
        file=_Lines(), mininterval=10, miniters=1, delay=1e-9,
        bar_format='{desc}: {n_fmt}/{total_fmt}{postfix} [{elapsed}<{remaining}, {rate_fmt}]')
    self._bar = tqdm(desc=name, total=total or None, initial=start, unit=unit, unit_scale=unit == 'B',
                     disable=not enabled, dynamic_ncols=True, **lines)

  def update(self, done: int, **shown: int | str) -> None:
    """Shows that this much is done, with named numbers or texts next to it."""
    self._bar.set_postfix_str('  '.join(f'{k} {v if isinstance(v, str) else format(v, ",")}'
                                        for k, v in shown.items()), refresh=False)
    self._bar.update(done - self._bar.n)  # tqdm counts what was added

  def close(self) -> None:
    self._bar.close()


class _Lines:
  """A stream on which tqdm begins a new line instead of overwriting the last."""

  def write(self, text: str) -> None:
    if text.strip():
      print(text.strip(), file=sys.stderr, flush=True)

  def flush(self) -> None: ...


def quiet_logs() -> None:
  """Sends this package's messages to stderr with their time; libraries report only errors."""
  absl.flags.FLAGS.mark_as_parsed()  # else the first message comes with a warning about them
  absl.logging.use_absl_handler()
  absl.logging.set_verbosity(absl.logging.ERROR)
  logging.getLogger('sink_jax').setLevel(logging.INFO)
