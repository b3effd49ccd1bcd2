"""What a person sees of a running job."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

_SECONDS_BETWEEN_LINES = 10


class Progress:
  """A progress bar on a terminal, and a line every ten seconds elsewhere.

  Each shows steps done, time left and the latest numbers given to `update`.
  """

  def __init__(self, total: int, start: int, name: str, enabled: bool = True):
    self._bar = tqdm(total=total, initial=start, desc=name, unit='step', dynamic_ncols=True,
                     disable=not (enabled and sys.stderr.isatty()))
    self._lines = enabled and not sys.stderr.isatty()
    self._name, self._total, self._start = name, total, start
    self._began = self._last = time.monotonic()

  def update(self, step: int, **shown: str) -> None:
    """Shows that `step` updates are done, with the given numbers as text."""
    text = '  '.join(f'{k} {v}' for k, v in shown.items())
    self._bar.set_postfix_str(text, refresh=False)
    self._bar.update(step - self._bar.n)
    now = time.monotonic()
    if self._lines and (now - self._last > _SECONDS_BETWEEN_LINES or step == self._total):
      self._last = now
      rate = (step - self._start) / (now - self._began)
      left = (self._total - step) / rate if rate else 0
      print(f'{self._name}: {step}/{self._total}  {text}  {left:.0f} s left',
            file=sys.stderr, flush=True)

  def close(self) -> None:
    self._bar.close()
