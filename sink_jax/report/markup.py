"""Pieces of a report in Markdown, the same for every kind of report."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence

from sink_jax.io.terminal import Markdown, escaped


def line(*parts: object) -> Markdown:
  """Words and pieces of Markdown, one after the other."""
  return Markdown(''.join(map(_spaced, parts)))


def joined(parts: Iterable[object], between: str = ', ') -> Markdown:
  """Words and pieces of Markdown with words between them."""
  return Markdown(between.join(map(escaped, parts)))


def bold(words: object) -> Markdown:
  return Markdown(f'**{escaped(words)}**')


def code(words: object) -> Markdown:
  """Words in a fixed-width font."""
  words = ' '.join(str(words).split())
  # More backticks than there are in a row within; blanks part them from those at an end.
  ticks = '`' * (1 + max(map(len, re.findall('`+', words)), default=0))
  blank = ' ' if words[:1] == '`' or words[-1:] == '`' else ''
  return Markdown(f'{ticks}{blank}{words}{blank}{ticks}')


def link(words: object, heading: str) -> Markdown:
  """Words that lead to a heading of the same document."""
  return Markdown(f'[{escaped(words)}](#{anchor(heading)})')


def anchor(heading: str) -> str:
  """The anchor of a heading, as GitHub makes it; of several equal ones, of the first."""
  return re.sub(r'[^\w\- ]', '', heading.lower()).replace(' ', '-')


def upper(words: str) -> str:
  """The words with a capital at their beginning."""
  return words[:1].upper() + words[1:]


def listed(names: Sequence[str]) -> str:
  """'a', 'a and b', 'a, b and c'."""
  return names[0] if len(names) == 1 else f'{", ".join(names[:-1])} and {names[-1]}'


def mean_and_range(values: Sequence[float | None], form: str) -> str:
  """'3.05 (3.01 to 3.09)': the mean, and the least and the largest of several; '-' of none."""
  known = [value for value in values if value is not None]
  if not known:
    return '-'
  mean = format(statistics.fmean(known), form)
  return mean if len(known) == 1 else f'{mean} ({min(known):{form}} to {max(known):{form}})'


def _spaced(words: object) -> str:
  """As `escaped`, with the blanks at both ends, which part it from what is beside it."""
  if isinstance(words, Markdown):
    return words
  plain = str(words)
  start, end = (' ' if plain[i:][:1].isspace() else '' for i in (0, -1))
  return f'{start}{escaped(plain)}{end}' if plain.strip() else plain[:1]
