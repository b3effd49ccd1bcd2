"""Output for people: tables, formatted numbers, progress, messages."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import absl.flags
import absl.logging
from tqdm import tqdm

_SPECIAL = re.compile(r'[\\`*_|<\[\]]|&(?=#?\w+;)')


def escaped(words: object) -> str:
  """Text as one line of Markdown, with everything escaped that would be markup."""
  return _SPECIAL.sub(r'\\\g<0>', ' '.join(str(words).split()))


def code(words: object) -> str:
  """Text as code of Markdown, in one line and without backquotes, which would end it."""
  text = ' '.join(str(words).split()).replace('`', "'")
  return f'`{text}`'


def short(number: float) -> str:
  """Three significant digits, but all before the point: 1228800 -> '1.23 M'."""
  for size, letter in ((1e9, 'B'), (1e6, 'M'), (1e3, 'k')):
    if number >= 0.9995 * size:  # which prints as 1
      return f'{number / size:.{max(3, len(str(int(number / size))))}g} {letter}'
  return f'{number:.0f}'


def markdown_table(
  head: Sequence[str], rows: Iterable[Iterable[object]], left: Collection[int] = (0,)
) -> str:
  """A table in Markdown. rows: cells in Markdown; left: indices of the left-aligned columns."""
  rule = ['---' if i in left else '---:' for i in range(len(head))]
  return '\n'.join(_line(cells) for cells in (map(escaped, head), rule, *rows))


def _line(cells: Iterable[object]) -> str:
  return '|' + ''.join(f' {cell} |' if cell != '' else ' |' for cell in cells)


def text_table(
  head: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int] = (0,)
) -> list[str]:
  """The lines of a table for a terminal; left: indices of the left-aligned columns."""
  widths = [max(1, *map(len, column)) for column in zip(head, *rows)]

  def line(cells: Sequence[str]) -> str:
    aligned = [
      cell.ljust(width) if i in left else cell.rjust(width)
      for i, (cell, width) in enumerate(zip(cells, widths))
    ]
    return '  '.join(aligned).rstrip()

  return [line(head), '  '.join('-' * width for width in widths), *map(line, rows)]


class Progress:
  """A bar on a terminal, elsewhere a line every ten seconds; `total` is 0 where it is not known.

  place: the line of one of several bars, from 0; it is cleared at the end. None for a single bar,
  which stays.
  """

  def __init__(
    self,
    name: str,
    total: int = 0,
    start: int = 0,
    unit: str = 'B',
    enabled: bool = True,
    place: int | None = None,
  ):
    on_terminal: dict[str, Any] = dict(position=place, leave=place is None)
    lines: dict[str, Any] = (
      on_terminal
      if sys.stderr.isatty()
      else dict(
        file=_Lines(),
        mininterval=10,
        miniters=1,
        delay=1e-9,
        bar_format='{desc}: {n_fmt}/{total_fmt}{postfix} [{elapsed}<{remaining}, {rate_fmt}]',
      )
    )
    self._bar = tqdm(
      desc=name,
      total=total or None,
      initial=start,
      unit=unit,
      unit_scale=unit == 'B',
      disable=not enabled,
      dynamic_ncols=True,
      **lines,
    )

  def update(self, done: int, **shown: int | str) -> None:
    """Shows that this much is done, with named numbers or texts next to it."""
    texts = [
      f'{name} {value if isinstance(value, str) else format(value, ",")}'
      for name, value in shown.items()
    ]
    self._bar.set_postfix_str('  '.join(texts), refresh=False)
    self._bar.update(done - self._bar.n)  # tqdm counts what was added

  def close(self) -> None:
    self._bar.close()


def say(line: str) -> None:
  """Prints a line on stderr, above the bars that are there; stdout holds only results."""
  tqdm.write(line, file=sys.stderr)
  sys.stderr.flush()


class _Lines:
  """A stream on which tqdm begins a new line instead of overwriting the last."""

  def write(self, text: str) -> None:
    if text.strip():
      print(text.strip(), file=sys.stderr, flush=True)

  def flush(self) -> None: ...


def quiet_logs() -> None:
  """Sends this package's messages to stderr with their time; of other libraries only errors."""
  absl.flags.FLAGS.mark_as_parsed()  # else the first message comes with a warning about them
  absl.logging.use_absl_handler()
  absl.logging.set_verbosity(absl.logging.ERROR)
  logging.getLogger('sink_jax').setLevel(logging.INFO)
  logging.getLogger('jax').setLevel(logging.WARNING)  # such as that it falls back to the CPU
