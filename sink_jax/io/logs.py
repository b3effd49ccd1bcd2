"""Where the messages of a command go."""

from __future__ import annotations

import logging

import absl.flags
import absl.logging


def quiet_logs() -> None:
  """Sends messages of this package to stderr with their time, and those of libraries nowhere.

  Only their errors are left.
  """
  absl.flags.FLAGS.mark_as_parsed()  # else the first message comes with a warning about them
  absl.logging.use_absl_handler()
  absl.logging.set_verbosity(absl.logging.ERROR)
  logging.getLogger('sink_jax').setLevel(logging.INFO)
