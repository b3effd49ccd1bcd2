"""Signals that stop a process, and children that end with their parent.

Imports nothing that takes long.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import threading
from types import FrameType
from typing import Any

EXIT_SAVED = 42  # the job was stopped and has saved: start it again
# The share of a GPU's memory that JAX takes; the second name is deprecated, and both are an error.
GPU_MEMORY = ('XLA_CLIENT_MEM_FRACTION', 'XLA_PYTHON_CLIENT_MEM_FRACTION')
EXIT_UNSAVED = 128 + signal.SIGINT  # stopped before it had saved; it can be started again too


def use_most_of_a_gpu() -> None:
  """Lets JAX take 92 % of a GPU's memory instead of 75 %, unless the user has said how much.

  It has to be called before jax is imported.
  """
  if not any(map(os.environ.get, GPU_MEMORY)):
    os.environ[GPU_MEMORY[0]] = '0.92'


def stop_signals() -> list[signal.Signals]:
  """The signals that stop this process: SIGTERM, SIGINT, SIGHUP, except those that it ignores."""
  # SIGHUP is ignored under `nohup`, SIGINT by background jobs and by the workers of a sweep.
  asked = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
  return [number for number in asked if signal.getsignal(number) is not signal.SIG_IGN]


def exit_saved_until_training() -> None:
  """Lets a stop signal end the process with EXIT_SAVED: before it trains, nothing is lost."""
  for number in stop_signals():
    signal.signal(number, _exit_saved)


def _exit_saved(number: int, frame: FrameType | None) -> None:
  if number == signal.SIGINT:
    # Not print, whose buffer the signal may have interrupted.
    os.write(2, b'\nStopped; nothing was being trained. The same command continues from here.\n')
  os._exit(EXIT_SAVED)


def call(function: str, *arguments: Any) -> None:
  """Calls 'MODULE:FUNCTION' in a child, which ends with its parent or, at a signal, as saved."""
  exit_saved_until_training()  # before the import, which may take seconds
  end_with_parent()
  module, name = function.split(':')
  getattr(importlib.import_module(module), name)(*arguments)


def end_with_parent() -> None:
  """Lets this child of multiprocessing end when its parent is gone, for example by kill -9."""

  def wait() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # `sys.exit` would end only this thread

  threading.Thread(target=wait, daemon=True).start()
