"""What the rows share: how often, which seed, where, and runs that were left alone."""

from __future__ import annotations

import dataclasses
import time
import zlib
from pathlib import Path

import numpy as np

from tests.faults.jobs import EVERY, Job, Place


@dataclasses.dataclass
class Plan:
  """Settings of one making of the table.

  rounds: of the rows that kill one process; others make a part or a multiple of it.
  """

  scratch: Path
  rounds: int = 200
  seed: int = 0
  steps: int = 3000
  other_python: str = ''

  def __post_init__(self):
    self._references = {}
    self.window = 30.0  # seconds until a run has saved twice, and half as much again

  @property
  def short(self) -> int:
    """Steps of runs on several devices, which take turns on the few cores of a test machine."""
    return self.steps // 15

  @property
  def thorough(self) -> bool:
    return self.rounds >= 20

  def fraction(self, divisor: int) -> int:
    return max(2, self.rounds // divisor)

  def random(self, name: str) -> np.random.Generator:
    return np.random.default_rng([self.seed, zlib.crc32(name.encode())])

  def workdir(self, name: str, index: int = 0) -> Path:
    return self.scratch / name / f'run-{index}'

  def reference(self, steps: int | None = None, place: Place = Place()) -> Path:
    """The workdir of a run that nothing happened to."""
    steps = steps or self.steps
    key = steps, place
    if key not in self._references:
      workdir = self.scratch / 'reference' / f'run-{len(self._references)}'
      job, began = Job(workdir, place, steps=steps), time.monotonic()
      job.await_steps(2 * EVERY)
      if not self._references:  # the first has compiled; later starts read what it stored
        self.window = 1.5 * (time.monotonic() - began)
      codes = job.wait()
      if any(codes):
        raise RuntimeError(f'A run that was left alone ended with {codes}: {job.output()}')
      self._references[key] = workdir
    return self._references[key]
