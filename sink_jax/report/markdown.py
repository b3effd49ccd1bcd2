"""Parts of pages in Markdown: folded parts, pictures, numbers of several seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd


def joined(sections: Iterable[str]) -> str:
  """A page of the sections that are not empty."""
  return '\n\n'.join(filter(None, sections)) + '\n'


def bullets(lines: Iterable[str]) -> str:
  return '\n'.join(f'- {line}' for line in lines)


def details(title: str, text: str) -> str:
  """A text behind a click on its title."""
  return f'<details><summary>{title}</summary>\n\n{text}\n\n</details>'


def picture(title: str, name: str, words: str = '') -> str:
  """A picture by the name of its file, and what it shows."""
  image = f'![{title}]({name})'
  return f'{image}\n\n*{words}*' if words else image


def plural(count: float, noun: str) -> str:
  """'1 run', '2 runs'."""
  return f'{count:.0f} {noun}{"" if count == 1 else "s"}'


def spread(values: Sequence[float] | pd.Series, digits: int = 1, count: bool = True) -> str:
  """'27.0 (23.5 to 33.9), n = 5': the mean, least and largest of what is known; '-' for nothing."""
  known = [value for value in values if not math.isnan(value)]
  finite = [value for value in known if not math.isinf(value)]
  if not finite:
    return '-'
  form = f',.{digits}f'
  words = f'{np.mean(finite):{form}}'
  if len(finite) > 1:
    words += f' ({min(finite):{form}} to {max(finite):{form}})'
  if len(finite) < len(known):  # a step of emergence is infinite if no sink emerges
    return f'{words} in {len(finite)} of {len(known)} seeds'
  return words + f', n = {len(finite)}' * count


def of_runs(mean: float, least: float | None, most: float | None, digits: int = 2) -> str:
  """'+0.08': the mean of runs with the digits that they share, at most `digits`.

  It is within noise if it is smaller than the range of the runs, from `least` to `most`; None:
  there was one run.
  """
  if least is None or most is None:
    return f'{mean:+.{digits}f}'
  words = f'{mean:+.{digits_of_runs(least, most, digits)}f}'
  return f'{words}, within noise' if abs(mean) < most - least else words


def digits_of_runs(least: float | None, most: float | None, digits: int = 2) -> int:
  """The decimals of a mean of four runs: up to its standard error, a quarter of the range."""
  if least is None or most is None or least == most:
    return digits
  return min(digits, max(0, -math.floor(math.log10((most - least) / 4))))


def value(number: float, digits: int = 1) -> str:
  """One number; '-' if it is not known, or infinite."""
  return spread([number], digits, count=False)
