"""Exit code 42, and the signals that ask for it.

Commands call this before they import jax, which takes seconds: it imports nothing that takes long.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

EXIT_SAVED = 42  # the job was stopped and has saved: start it again
EXIT_UNSAVED = 128 + signal.SIGINT  # stopped before it had saved; it can be started again too


def stop_signals() -> list[signal.Signals]:
  """The signals that ask this process to stop: SIGTERM, Ctrl-C, and a terminal that goes away.

  A signal that was ignored when the process started stays ignored: SIGHUP under `nohup`, SIGINT of
  a background job and of the workers of a sweep, which the sweep stops itself.
  """
  asked = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
  return [number for number in asked if signal.getsignal(number) is not signal.SIG_IGN]


def exit_saved_until_training() -> None:
  """Lets a stop signal end the process with EXIT_SAVED, while it only prepares to train.

  Nothing is lost then, as with a job that has saved. It is called first of all, and again after the
  distributed runtime has started, which takes SIGTERM over.
  """
  for number in stop_signals():
    signal.signal(number, _exit_saved)


def _exit_saved(number: int, frame: FrameType | None) -> None:
  if number == signal.SIGINT:
    # Not print, whose buffer the signal may have interrupted.
    os.write(2, b'\nStopped; nothing was being trained. The same command continues from here.\n')
  os._exit(EXIT_SAVED)
