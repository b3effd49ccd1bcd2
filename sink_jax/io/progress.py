"""What a person sees of long work: how far it is, what it counts, and the time left."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

_SECONDS_BETWEEN_LINES = 10


class Progress:
  """A bar on a terminal; elsewhere a line every ten seconds, and one at the end of steps.

  Args:
    name: what the work is called.
    total: the bytes or steps that there are; 0 where that is not known.
    start: those that an earlier process has done; they do not count for the speed.
    unit: 'B' or 'step'.
    enabled: whether anything is shown.
  """

  def __init__(self, name: str, total: int = 0, start: int = 0, unit: str = 'B',
               enabled: bool = True):
    terminal = sys.stderr.isatty()
    self._bar = tqdm(desc=name, total=total or None, initial=start, unit=unit,
                     unit_scale=unit == 'B', dynamic_ncols=True,
                     disable=not (enabled and terminal))
    self._name, self._total, self._start, self._done = name, total, start, start
    self._lines, self._bytes = enabled and not terminal, unit == 'B'
    self._began = self._last = time.monotonic()

  def update(self, done: int, **shown: int | str) -> None:
    """Shows that this much is done, with named numbers or texts beside it."""
    text = ''.join(f'  {k} {v if isinstance(v, str) else format(v, ",")}'
                   for k, v in shown.items())
    self._bar.set_postfix_str(text.strip(), refresh=False)  # `update` draws both, if it is time
    # tqdm counts what was added, and callers know how much there is altogether.
    self._bar.update(done - self._done)
    self._done = done
    now = time.monotonic()
    ended = not self._bytes and done == self._total
    if self._lines and (ended or now - self._last > _SECONDS_BETWEEN_LINES):
      self._last = now
      print(f'{self._name}: {self._amount()}{text}{self._left(now - self._began)}',
            file=sys.stderr, flush=True)

  def close(self) -> None:
    """Ends the bar, and leaves it on the terminal."""
    self._bar.close()

  def __enter__(self) -> Progress:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def _amount(self) -> str:
    if not self._bytes:
      return f'{self._done}/{self._total}'
    of = f' of {self._total / 1e6:.0f}' if self._total else ''
    return f'{self._done / 1e6:.0f}{of} MB'

  def _left(self, seconds: float) -> str:
    """The speed of bytes, and the time left, as far as they are known."""
    # What an earlier process has done took none of these seconds.
    rate = (self._done - self._start) / seconds
    speed = f'  {rate / 1e6:.2f} MB/s' if self._bytes else ''
    if not (rate and self._total):
      return speed
    return f'{speed}  {max(0, self._total - self._done) / rate:.0f} s left'
