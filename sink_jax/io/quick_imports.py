"""Imports of large packages without the garbage collector, by what starts a process."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
  """Spares the imports in the block the garbage collector, which would find next to nothing there.

  It goes through all objects again whenever there are a quarter more of them, a fifth of the time
  of a short command; what an import makes stays to the end. So it leaves alone, later as well, what
  is there after the first such block of a process.
  """
  gc.disable()
  try:
    yield
  finally:
    _freeze()
    gc.enable()


@functools.cache  # once: what a later block leaves may be garbage
def _freeze() -> None:
  gc.freeze()
