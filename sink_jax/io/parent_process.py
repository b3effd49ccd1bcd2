"""Child processes: they take signals over before slow imports, and end with their parent."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import threading
from typing import Any

from sink_jax.io.exit_code import exit_saved_until_training


def begin_child() -> None:
  """Lets this child end like a command that has nothing to save, and when its parent is gone."""
  exit_saved_until_training()
  end_with_parent()


def call(function: str, *arguments: Any) -> None:
  """Calls 'MODULE:FUNCTION' in a child, after `begin_child`.

  As the target of a process it needs no other import than this file: a signal that comes while
  the module of the function is imported, which may take seconds, already has its handler.
  """
  begin_child()
  module, name = function.split(':')
  body = getattr(importlib.import_module(module), name)
  body(*arguments)


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
