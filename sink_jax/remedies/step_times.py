"""What a training step takes compared with one of softmax, as a file next to the runs has it.

The file is of a benchmark that timed both in turns in one process, last in the package at commit 804d5da: the
runs themselves were trained several at a time, on machines that did other things as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from sink_jax.io.paths import AnyPath
from sink_jax.report.jsontext import from_json

FILE = 'step_times.json'  # in the folder of the runs
NOT_MEASURED = 'not measured'


@dataclasses.dataclass(frozen=True)
class StepTime:
  """Time of a step over that of softmax: the median of pairs of timings, and their quartiles."""

  ratio: float
  low: float
  high: float
  pairs: int

  def text(self) -> str:
    return f'{self.ratio:.2f} ({self.low:.2f} to {self.high:.2f})'


@dataclasses.dataclass(frozen=True)
class StepTimes:
  """The step times of trials by (task, variant); measured: on what, when and with which code."""

  ratios: Mapping[tuple[str, str], StepTime] = dataclasses.field(default_factory=dict)
  measured: str = ''

  def text(self, task: str, variant: str) -> str:
    """'1.04 (1.02 to 1.07)', or that it was not measured."""
    found = self.ratios.get((task, variant))
    return found.text() if found else NOT_MEASURED

  def sentence(self) -> str:
    """How the times were measured."""
    if not self.ratios:
      return 'Times of steps were not measured.'
    pairs = max(found.pairs for found in self.ratios.values())
    return (f'Time of a step: over that of softmax, both timed in turns in one process ({pairs} '
            f'pairs: the median, and the quartiles in brackets; {self.measured}).')


def read_step_times(folder: AnyPath) -> StepTimes:
  """The step times in a folder of runs; empty without the file."""
  if not (folder / FILE).exists():
    return StepTimes()
  content = from_json((folder / FILE).read_text())
  times = {(row['task'], row['variant']): StepTime(row['ratio'], row['ratio_low'], row['ratio_high'],
                                                   row['pairs'])
           for row in content['rows'] if row.get('ratio') is not None}
  machine = content['machine']
  return StepTimes(times, f'{machine["hardware"]}; jax {machine["jax"]}; '
                          f'{machine["date"].split("T")[0]}; {machine["code"]}')
