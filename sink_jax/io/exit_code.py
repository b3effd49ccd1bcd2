"""Exit code 42, and the signals that ask for it; imports nothing that takes long."""

from __future__ import annotations

import os
import signal

EXIT_SAVED = 42  # of a stopped job: "saved, start me again"
EXIT_UNSAVED = 128 + signal.SIGINT  # dead before it had saved; starting it again resumes as well


def stop_signals() -> list[signal.Signals]:
  """The signals that ask this process to stop: SIGTERM, Ctrl-C, and a terminal that goes away.

  One that was ignored when the process started stays ignored: SIGHUP under `nohup`, SIGINT of
  a background job and of the workers of a sweep, which are told to stop by the sweep.
  """
  asked = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
  return [number for number in asked if signal.getsignal(number) is not signal.SIG_IGN]


def exit_saved_until_training() -> None:
  """Lets them end a process that only prepares like one that has saved: nothing is lost.

  Called first of all, and again after the distributed runtime, which takes SIGTERM over.
  """
  for number in stop_signals():
    signal.signal(number, _exit_saved)


def _exit_saved(number, frame):
  if number == signal.SIGINT:
    os.write(2, b'\nStopped; nothing was being trained. The same command goes on from here.\n')
  os._exit(EXIT_SAVED)
