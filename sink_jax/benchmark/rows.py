"""Times the cases of a benchmark, and prints their rows as a table."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from sink_jax.benchmark.timing import Program, compare, interval, reason
from sink_jax.io.terminal import text_table

Column = tuple[str, str, str]  # key of a row, heading, format; without a format it is a column of words
# Columns of every table.
FLOOR: list[Column] = [('tflops', 'TFLOP/s', '.3g'), ('floor_ms', 'floor ms', '.3f'), ('bound', 'of', ''),
                       ('vs_floor', 'x floor', '.2f')]
NOTES = ('ms: median of ten rounds, in which the rows of a group are timed alternately. from, to: 98 % '
         'interval of the median of the ratios of the rounds. x floor: over the time that the FLOPs or '
         'the bytes, the longer one, take at the rates above. MB: peak memory next to the inputs.')


class Rates(NamedTuple):
  """FLOP/s and bytes/s that one device reached in this process."""

  flops: float
  bytes: float


class Case(NamedTuple):
  """A timed program, which becomes a row.

  row: its first values; times are added, or in `failed` the reason why there are none.
  prepare: compiles it; may add to the row, and raise.
  flops, bytes: of one operation on one device.
  base: whether it may be the baseline; the first such case that runs is the baseline.
  """

  row: dict[str, Any]
  prepare: Callable[[], Program]
  flops: float
  bytes: float
  base: bool = False


def ratio_columns(heading: str) -> list[Column]:
  """The columns of a ratio and its interval."""
  return [('ratio', heading, '.2f'), ('ratio_low', 'from', '.2f'), ('ratio_high', 'to', '.2f')]


def time_group(cases: Sequence[Case], seconds: float, rates: Rates) -> None:
  """Times cases alternately and fills their rows; seconds: for each."""
  programs = {}
  for number, case in enumerate(cases):
    words = ' '.join(map(str, list(case.row.values())[:4]))
    print(f'compiling {number + 1} of {len(cases)}: {words}', file=sys.stderr, flush=True)
    try:
      programs[number] = case.prepare()
    except Exception as error:  # libraries raise any type; most often memory is short
      case.row['failed'] = reason(error)
  times, failed = compare(programs, seconds)
  for number, why in failed.items():
    cases[number].row['failed'] = why
  base = next((times[number] for number in times if cases[number].base), None)
  for number, rounds in times.items():
    row, _, flops, bytes_, _ = cases[number]
    ms, low, high = interval([1000 * one for one in rounds])
    floor, bound = max((1000 * flops / rates.flops, 'FLOPs'),
                       (1000 * bytes_ / rates.bytes, 'bytes'))
    row |= {'ms': ms, 'ms_low': low, 'ms_high': high, 'tflops': flops / ms / 1e9,
            'floor_ms': floor, 'bound': bound, 'vs_floor': ms / floor}
    if base:
      ratios = [mine / its for mine, its in zip(rounds, base)]
      row |= zip(('ratio', 'ratio_low', 'ratio_high'), interval(ratios))


def print_table(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]], machine: Mapping[str, Any],
                notes: str) -> None:
  """Prints the machine, the rows and the notes; a missing value is a dash, or empty in the last column."""
  lacks = ['-'] * (len(columns) - 1) + ['']
  cells = [[lack if row.get(key) is None else format(row[key], form)
            for (key, _, form), lack in zip(columns, lacks)] for row in rows]
  left = [i for i, (_, _, form) in enumerate(columns) if not form]
  print(f'{machine["hardware"]}, jax {machine["jax"]}, {machine["date"]}: {machine["matmul_tflops"]:.4g} '
        f'TFLOP/s in {machine["dtype"]} products, {machine["memory_gb_per_second"]:.4g} GB/s\n')
  print('\n'.join([*text_table([heading for _, heading, _ in columns], cells, left), '', notes, NOTES]))
