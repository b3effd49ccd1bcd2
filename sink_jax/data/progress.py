"""What a person sees of long work on data: documents, tokens, MB/s, time left."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

_SECONDS_BETWEEN_LINES = 10


class Progress:
  """A bar on a terminal, and a line every ten seconds elsewhere.

  Args:
    name: of the work.
    total: bytes there are; 0 where nobody knows.
    start: bytes that an earlier process has done.
  """

  def __init__(self, name: str, total: int = 0, start: int = 0):
    terminal = sys.stderr.isatty()
    self._bar = tqdm(desc=name, total=total or None, initial=start, unit='B', unit_scale=True,
                     dynamic_ncols=True, disable=not terminal)
    self._name, self._total, self._start, self._done = name, total, start, start
    self._lines = not terminal
    self._began = self._last = time.monotonic()

  def update(self, done: int, **counted: int) -> None:
    """Shows that `done` bytes are behind us, and how many documents, tokens ... they held."""
    text = '  '.join(f'{count:,} {what}' for what, count in counted.items())
    self._bar.set_postfix_str(text, refresh=False)
    self._bar.update(done - self._done)
    self._done = done
    now = time.monotonic()
    if self._lines and now - self._last > _SECONDS_BETWEEN_LINES:
      self._last = now
      print(f'{self._name}: {text}{self._rate(now - self._began)}', file=sys.stderr, flush=True)

  def close(self) -> None:
    self._bar.close()

  def __enter__(self) -> Progress:
    return self

  def __exit__(self, *_) -> None:
    self.close()

  def _rate(self, seconds):
    rate = (self._done - self._start) / seconds
    if not rate:
      return ''
    if not self._total:
      return f'  {rate / 1e6:.2f} MB/s'
    left = max(0, self._total - self._done)
    return (f'  {self._done / 1e6:.0f} of {self._total / 1e6:.0f} MB  {rate / 1e6:.2f} MB/s'
            f'  {left / rate:.0f} s left')
