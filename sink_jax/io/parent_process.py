"""Helper processes that end with the process that started them."""

from __future__ import annotations

import multiprocessing
import os
import threading


def end_with_parent() -> None:
  """Lets this process, which multiprocessing started, end when its parent is gone.

  The parent may be killed without a chance to end its workers (kill -9, no memory left).
  """
  threading.Thread(target=_wait, daemon=True).start()


def _wait() -> None:
  parent = multiprocessing.parent_process()
  assert parent is not None, 'only a process that multiprocessing started has a parent to wait for'
  parent.join()
  os._exit(1)  # `sys.exit` would end this thread alone
