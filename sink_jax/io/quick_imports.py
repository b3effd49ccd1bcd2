"""Imports of large packages without the garbage collector, by what starts a process."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
  """Turns the garbage collector off for the imports in the block, and on again after them.

  The collector goes through all objects whenever there are a quarter more of them, though hardly
  any that an import makes can be freed: that took a fifth of the time of a short command. What is
  there after the first block of a process is left out of later collections too.
  """
  gc.disable()
  try:
    yield
  finally:
    _freeze()
    gc.enable()


@functools.cache  # once: after a command in the same process there may be garbage
def _freeze() -> None:
  """Leaves all objects that are there out of later collections."""
  gc.freeze()
