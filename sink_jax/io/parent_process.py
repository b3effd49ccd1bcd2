"""Helper processes that end with the process that started them."""

from __future__ import annotations

import multiprocessing
import os
import threading


def end_with_parent() -> None:
  """Lets this process, which multiprocessing started, end when its parent is gone.

  The parent may be killed in a way that tells nobody (kill -9, no memory left).
  """
  threading.Thread(target=_wait, daemon=True).start()


def _wait():
  multiprocessing.parent_process().join()
  os._exit(1)
