"""What a training step takes beside one of softmax, as `sink_jax.benchmark trials` measured it.

It is no number of the runs: those were trained one after the other, several at a time, on machines
that did other things as well. The benchmark times both in turns in one process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from sink_jax.benchmark.records import TrialRow, document_from_json
from sink_jax.io.paths import AnyPath
from sink_jax.report.jsontext import from_json

FILE = 'step_times.json'  # in the folder of the runs
COMMAND = f'python -m sink_jax.benchmark trials --json=runs/remedies/{FILE}'
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
    """How the times were measured, or the command that measures them."""
    if not self.ratios:
      return f'Times of steps were not measured; {COMMAND} does.'
    pairs = max(found.pairs for found in self.ratios.values())
    return (f'Time of a step: over that of softmax, both timed in turns in one process ({pairs} '
            f'pairs: the median, and the quartiles in brackets; {self.measured}).')


def read_step_times(folder: AnyPath) -> StepTimes:
  """What the benchmark has written into a folder of runs; empty without its file.

  Raises:
    ValueError: the file is none that it writes.
  """
  path = folder / FILE
  if not path.exists():
    return StepTimes()
  try:
    document = document_from_json(from_json(path.read_text()))
    machine = document.machine
    # Rows that failed, or for which there was no time, have no ratio.
    times = {(row.task, row.variant): StepTime(row.ratio, row.ratio_low, row.ratio_high, row.pairs)
             for row in document.rows_of(TrialRow) if row.ratio is not None
             and row.ratio_low is not None and row.ratio_high is not None and row.pairs is not None}
    return StepTimes(times, f'{machine["hardware"]}; jax {machine["jax"]}; '
                            f'{machine["date"].split("T")[0]}; {machine["code"]}')
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise ValueError(f'{path} cannot be read: {error}. Remove it, or measure again: '
                     f'{COMMAND}') from None
