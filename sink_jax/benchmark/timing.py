"""Times programs alternately, so that their ratios are of one process and the same conditions."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from sink_jax.devices import platform

ROUNDS = 10


class Program(NamedTuple):
  """`call` starts the work, `wait` returns when its result is there; `repeats`: operations in a call."""

  call: Callable[[], Any]
  wait: Callable[[Any], Any] = jax.block_until_ready
  repeats: int = 1


def interval(values: list[float]) -> tuple[float, float | None, float | None]:
  """The median, and the second smallest and second largest of ten rounds; of fewer rounds None.

  The interval contains the median of the distribution with a probability of 98 %: 1 - 2 (1 + 10) / 2^10.
  """
  ordered = sorted(values)
  low, high = (ordered[1], ordered[-2]) if len(ordered) == ROUNDS else (None, None)
  return statistics.median(ordered), low, high


def compare(programs: Mapping[Any, Program], seconds: float) -> tuple[dict[Any, list[float]], dict[Any, str]]:
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
      times[name].append(_elapsed(programs[name], count) / count / programs[name].repeats)
  return times, failed


def _elapsed(program: Program, calls: int) -> float:
  """Seconds of `calls` calls. They are queued, except on a CPU, which would run them in parallel."""
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
  return text[:300] if isinstance(error, (NotImplementedError, MemoryError)) and text else (
      f'{type(error).__name__}: {text[:300]}')
