"""Times programs alternately on this machine, and prints their rows as a table.

Alternately, so that ratios are of one process and the same conditions.
"""

from __future__ import annotations

import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from sink_jax.devices import platform
from sink_jax.io.terminal import text_table
from sink_jax.train.memory import device_memory, memory
from sink_jax.train.provenance import provenance

ROUNDS = 10

# Key of a row, heading, format; without a format it is a column of words.
Column = tuple[str, str, str]
# Columns of every table.
FLOOR: list[Column] = [
  ('tflops', 'TFLOP/s', '.3g'),
  ('floor_ms', 'floor ms', '.3f'),
  ('bound', 'of', ''),
  ('vs_floor', 'x floor', '.2f'),
]
NOTES = (
  'ms: median of ten rounds, in which the rows of a group are timed alternately. from, to: '
  '98 % interval of the median of the ratios of the rounds. x floor: over the time that the '
  'FLOPs or the bytes, the longer one, take at the rates above. MB: peak memory next to the '
  'inputs.'
)


class Program(NamedTuple):
  """A compiled program.

  call: starts the work. wait: returns when its result is there. repeats: operations in a call.
  """

  call: Callable[[], Any]
  wait: Callable[[Any], Any] = jax.block_until_ready
  repeats: int = 1


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


def time_group(cases: Sequence[Case], seconds: float, rates: Rates) -> list[dict[str, Any]]:
  """Times cases alternately, `seconds` for each, and returns their rows."""
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
    cases[number].row.update(_times(cases[number], rounds, rates, base))
  return [case.row for case in cases]


def _times(
  case: Case,
  rounds: list[float],
  rates: Rates,
  base: list[float] | None,
) -> dict[str, Any]:
  """The columns of times, from the seconds of the rounds of a case and of the baseline."""
  ms, low, high = interval([1000 * seconds for seconds in rounds])
  floors = {'FLOPs': 1000 * case.flops / rates.flops, 'bytes': 1000 * case.bytes / rates.bytes}
  bound = max(floors, key=lambda name: (floors[name], name))
  columns = {
    'ms': ms,
    'ms_low': low,
    'ms_high': high,
    'tflops': case.flops / ms / 1e9,
    'floor_ms': floors[bound],
    'bound': bound,
    'vs_floor': ms / floors[bound],
  }
  if base:
    ratios = interval([mine / its for mine, its in zip(rounds, base)])
    columns |= zip(('ratio', 'ratio_low', 'ratio_high'), ratios)
  return columns


def interval(values: list[float]) -> tuple[float, float | None, float | None]:
  """The median, and the second smallest and second largest of ten rounds; of fewer rounds None.

  The interval contains the median of the distribution with a probability of 98 %:
  1 - 2 (1 + 10) / 2^10.
  """
  ordered = sorted(values)
  low, high = (ordered[1], ordered[-2]) if len(ordered) == ROUNDS else (None, None)
  return statistics.median(ordered), low, high


def compare(
  programs: Mapping[Any, Program],
  seconds: float,
) -> tuple[dict[Any, list[float]], dict[Any, str]]:
  """Times every program once in every round.

  Args:
    seconds: about how long to time each program. A program whose call takes longer is timed once.

  Returns:
    {name: seconds per operation of every round}, and {name: the reason why it does not run}.
  """
  times: dict[Any, list[float]] = {}
  failed: dict[Any, str] = {}
  calls: dict[Any, int] = {}
  for name, program in programs.items():
    try:
      _elapsed(program, 1)  # includes what is done once: PyTorch compiles, memory is mapped
      once = _elapsed(program, 1)
    except Exception as error:  # libraries raise any type
      failed[name] = reason(error)
      continue
    times[name] = [once / program.repeats] if once > seconds else []
    if not times[name]:
      calls[name] = max(1, min(50, int(seconds / ROUNDS / once)))
  for _ in range(ROUNDS):
    for name, count in calls.items():
      program = programs[name]
      times[name].append(_elapsed(program, count) / count / program.repeats)
  return times, failed


def _elapsed(program: Program, calls: int) -> float:
  """Seconds of `calls` calls, queued, except on a CPU, which would run them in parallel."""
  one_by_one = platform() == 'cpu'
  began = time.perf_counter()
  for _ in range(calls):
    out = program.call()
    if one_by_one:
      program.wait(out)
  program.wait(out)
  return time.perf_counter() - began


def reason(error: Exception) -> str:
  """Why something did not run, in one line."""
  text = ' '.join(str(error).split())
  if 'RESOURCE_EXHAUSTED' in text or 'CUDA out of memory' in text:
    return 'out of memory'
  if isinstance(error, (NotImplementedError, MemoryError)) and text:
    return text[:300]
  return f'{type(error).__name__}: {text[:300]}'


def accelerated() -> bool:
  """True if there is a GPU or TPU for which sink_jax has kernels."""
  return platform() in ('cuda', 'tpu')


def random(seed: int, shape: Sequence[int], dtype: DTypeLike) -> jax.Array:
  """Standard normal numbers."""
  return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def compiled(row: dict[str, Any], f: Callable[..., Any], *arrays: Any, repeats: int = 1) -> Program:
  """Compiles a function for some arrays; adds to the row the megabytes that it needs besides these.

  repeats: operations that f makes.

  Raises:
    MemoryError: the program and its arrays exceed the device, or half of the memory of a host.
      Starting such a program can end the process.
  """
  program = jax.jit(f).lower(*arrays).compile()
  needed = memory(program)
  row['mb'] = (needed.temporaries + needed.outputs) / 1e6
  limit = device_memory() or os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') // 2
  if needed.total > limit:
    raise MemoryError(f'out of memory: needs {needed.total / 1e9:.0f} of {limit / 1e9:.0f} GB')
  return Program(functools.partial(program, *arrays), repeats=repeats)


def measured_rates(dtype: str, seconds: float) -> Rates:
  """The rates of a large matrix product, and of reading and writing a large array.

  seconds: for each of the two measurements.
  """
  size, count = (8192, 2**28) if accelerated() else (1024, 2**24)
  # Random numbers: GPUs draw less power on zeros, and run faster than on data.
  a, x = random(0, (size, size), dtype), random(1, (count,), 'float32')
  product, moved = jax.jit(jnp.matmul), jax.jit(lambda x: x + 1)
  programs = {'product': Program(lambda: product(a, a)), 'moved': Program(lambda: moved(x))}
  times, _ = compare(programs, seconds)
  return Rates(2 * size**3 / min(times['product']), 8 * count / min(times['moved']))


def describe(rates: Rates, dtype: str) -> dict[str, Any]:
  """Hardware, versions, date, command and code, with the rates as numbers that JSON can hold."""
  device = jax.devices()[0]
  return provenance() | {
    'device_kind': device.device_kind,
    'platform_version': ' '.join(device.client.platform_version.split()),
    'matmul_tflops': rates.flops / 1e12,
    'memory_gb_per_second': rates.bytes / 1e9,
    'dtype': dtype,
  }


def print_table(
  columns: Sequence[Column],
  rows: Sequence[Mapping[str, Any]],
  machine: Mapping[str, Any],
  notes: str,
) -> None:
  """Prints the machine, the rows and the notes.

  A missing value is a dash, or empty in the last column.
  """
  *_, (last, _, _) = columns

  def cell(row: Mapping[str, Any], key: str, form: str) -> str:
    if row.get(key) is None:
      return '' if key == last else '-'
    return format(row[key], form)

  cells = [[cell(row, key, form) for key, _, form in columns] for row in rows]
  left = [i for i, (_, _, form) in enumerate(columns) if not form]
  print(
    f'{machine["hardware"]}, jax {machine["jax"]}, {machine["date"]}: '
    f'{machine["matmul_tflops"]:.4g} TFLOP/s in {machine["dtype"]} products, '
    f'{machine["memory_gb_per_second"]:.4g} GB/s\n'
  )
  headings = [heading for _, heading, _ in columns]
  print('\n'.join([*text_table(headings, cells, left), '', notes, NOTES]))
