"""What is timed of an attention operation, and the programs that a back end makes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sink_jax.attention.spec import AttentionSpec


class Work(NamedTuple):
  """One attention operation: its shape is (B, H, T, Dh), dtype names the dtype of the inputs.

  calls: how many of them a program of JAX makes, one after the other, so that the time to
  start the program weighs less.
  """

  spec: AttentionSpec
  shape: tuple[int, int, int, int]
  dtype: str
  seed: int
  calls: int = 1


class Programs(NamedTuple):
  """Forward, and forward with backward: f(n) starts n programs and returns their seconds.

  A program makes `calls` calls. Bytes are the peak beside the inputs. They are None where the
  peak is not known before the program runs; `measured_bytes()` then runs the second one and
  returns what it needed, or None where the device does not say.
  """

  forward: Callable[[int], float]
  both: Callable[[int], float]
  forward_bytes: int | None = None
  both_bytes: int | None = None
  measured_bytes: Callable[[], int | None] | None = None
  calls: int = 1
