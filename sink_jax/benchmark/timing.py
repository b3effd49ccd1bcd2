"""Timing of device work, progress with the time left, and why something did not run."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

_ENOUGH = 200  # repetitions, after which the median no longer moves
_SUFFIXES = ('ms', 'min_ms', 'spread_ms', 'repetitions', 'calls')  # of the fields of a Timing


class Timing(NamedTuple):
  """Milliseconds per call over so many repetitions of `calls` calls each.

  spread: the distance between the quartiles.
  """

  median: float
  min: float
  spread: float
  repetitions: int
  calls: int

  def of_each(self, parts: int) -> Timing:
    """The same times per part, where every call consists of so many equal parts."""
    return self._replace(median=self.median / parts, min=self.min / parts,
                         spread=self.spread / parts, calls=self.calls * parts)

  def named(self, name: str) -> dict[str, float]:
    """The fields as JSON entries of a row: name_ms, name_min_ms, name_spread_ms, ..."""
    return {f'{name}_{suffix}': value for suffix, value in zip(_SUFFIXES, self)}

  @classmethod
  def pop_named(cls, name: str, entries: dict[str, Any]) -> Timing:
    """The Timing of such entries, which are removed from the row."""
    return cls(*(entries.pop(f'{name}_{suffix}') for suffix in _SUFFIXES))


def measure(elapsed: Callable[[int], float], seconds: float, warmup: int = 3,
            batch_seconds: float = 0.02, most_calls: int = 50) -> Timing:
  """Times calls for about so many seconds.

  A call longer than `seconds` is warmed up once and timed once.

  Args:
    elapsed: makes n calls, waits for the last and returns the seconds that they took.
    warmup: calls that are not counted, the first of which may compile.
    batch_seconds, most_calls: short calls are timed in batches of about so many seconds and at
      most so many calls. A call is then queued while others run, and the time to start it does
      not count.
  """
  assert warmup > 0, 'the size of a batch is known from a call'
  spent = once = 0.0
  # `once` is the time of the last call, without the compilation of the first where there are
  # several.
  for _ in range(warmup):
    once = elapsed(1)
    spent += once
    if spent > seconds:
      break
  calls = max(1, min(most_calls, int(batch_seconds / max(once, 1e-9))))
  times, spent = [], 0.0
  # At least three repetitions, for a spread; one of a call that alone takes longer than asked.
  while spent < seconds and len(times) < _ENOUGH or len(times) < (3 if once < seconds else 1):
    took = elapsed(calls)
    times.append(took / calls)
    spent += took
  return summary(times, calls)


def summary(seconds_per_call: list[float], calls: int) -> Timing:
  """The Timing of repetitions that were measured elsewhere."""
  ms = sorted(1000 * x for x in seconds_per_call)
  low, _, high = statistics.quantiles(ms, n=4, method='inclusive') if len(ms) > 1 else ms * 3
  return Timing(statistics.median(ms), ms[0], high - low, len(ms), calls)


class Countdown:
  """Lines on stderr: the next case, the seconds since the start and about how many are left."""

  def __init__(self, total: int, limit: float | None = None):
    self._total, self._limit, self._done = total, limit, 0
    self._began = time.monotonic()

  def next(self, label: str) -> None:
    """Prints the line of the next case."""
    spent = time.monotonic() - self._began
    left = ''
    if self._done:
      estimate = spent / self._done * (self._total - self._done)
      # What does not begin before the limit does not run, so no more time than that is left.
      if self._limit is not None:
        estimate = min(estimate, max(0, self._limit - spent))
      left = f', about {estimate:.0f} s left'
    self._done += 1
    print(f'[{self._done}/{self._total}] {label}  ({spent:.0f} s{left})', file=sys.stderr,
          flush=True)

  def over(self) -> bool:
    """Whether the time is up; never without a limit."""
    return self._limit is not None and time.monotonic() - self._began > self._limit


def reason(error: Exception) -> str:
  """The reason why something did not run, in one line."""
  text = ' '.join(str(error).split())
  if 'RESOURCE_EXHAUSTED' in text or 'out of memory' in text.lower():
    return 'out of memory'
  if isinstance(error, NotImplementedError) and text:
    return text
  return f'{type(error).__name__}: {text[:300]}' if text else type(error).__name__
