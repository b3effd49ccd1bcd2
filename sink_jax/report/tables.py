"""The table of a group of runs, as rows of cells and as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from sink_jax.io.tables import number, text_table
from sink_jax.report.probe_record import ProbeRecord
from sink_jax.report.records import RunRecord

WIDTH = 100  # columns of a terminal
NEVER = 'did not emerge'  # may take three lines


@dataclasses.dataclass(frozen=True)
class Column:
  """A column: its heading, what it means, and the cell of a run ('-' where unknown).

  optional: left out where no run has it, such as runs without an extra key.
  """

  heading: str
  meaning: str
  cell: Callable[[RunRecord], str]
  optional: bool = False


def columns(runs: Sequence[RunRecord]) -> list[Column]:
  """The columns that a group of runs needs; the first names the variant."""
  shown = [Column('variant', 'Folder of the run.', _name)]
  # key=key binds the loop's key now; the cells are asked for after the loop, when `key` is the
  # last.
  shown += [Column(f'{key} loss', meaning, lambda run, key=key: number(
      (run.losses or {}).get(key), '.3f')) for key, meaning in _losses(runs)]
  shown += [
      Column('Sink_1 %', 'Share of heads whose importance of the first token exceeds epsilon.',
             _probed(lambda probe: probe.sink_1, '.1f', starred=True)),
      Column('Sink_* %', 'The same of the extra key or learned sink token: its mean weight over '
             'queries.', _probed(lambda probe: probe.sink_extra_key, '.1f'), optional=True),
      Column('Sink_* % (official)', 'The same as the official implementation counts it, with a '
             'dummy row of weight one.',
             _probed(lambda probe: probe.sink_extra_key_official, '.1f'), optional=True),
      Column('largest import.', 'Largest importance of the first token over heads.',
             _probed(lambda probe: probe.largest_importance, '.3f', starred=True)),
      Column('raw mass, first', 'Mean weight on the first token, as it multiplies the values.',
             _probed(lambda probe: probe.raw_mass_1, '.3f')),
      Column('raw mass, row', 'Mean total weight of a row between tokens; 1 for softmax without '
             'an extra key.', _probed(lambda probe: probe.raw_row_mass, '.3f')),
      Column('value ratio (block)', 'Norm of the value of the first token over the mean of the '
             'others: the smallest over blocks, and that block.', _ratio),
      Column('max / median', 'Largest entry of the hidden states over the median entry, in size: '
             'the largest ratio over blocks. Activations are massive beyond 100 and more.',
             _probed(lambda probe: probe.curves.max_over_median[-1], '.0f'), optional=True),
      Column('sink emerged', 'First probed step from which Sink_1 stays at or above 10 %.',
             _emerged),
  ]
  return [column for column in shown
          if not column.optional or any(column.cell(run) != '-' for run in runs)]


def rows(runs: Sequence[RunRecord], shown: Sequence[Column]) -> list[list[str]]:
  """The cells of every run."""
  return [[column.cell(run) for column in shown] for run in runs]


def as_text(runs: Sequence[RunRecord]) -> str:
  """The table for a terminal, at most 100 columns wide."""
  shown = columns(runs)
  return '\n'.join(text_table([column.heading for column in shown], rows(runs, shown),
                              width=WIDTH, wrapped=[NEVER]))


def _losses(runs: Sequence[RunRecord]) -> list[tuple[str, str]]:
  """(validation set, what its loss means) of all sets that some run has."""
  sets = dict.fromkeys(key for run in runs for key in run.shown_losses) or ['valid']
  return [(key, 'Validation loss at its last evaluation, nats per token.' if key == 'valid' else
           f"Validation loss on the task's {key} targets, nats.") for key in sets]


def _name(run: RunRecord) -> str:
  return run.name if run.status == 'done' else f'{run.name} ({run.status})'


def _probed(quantity: Callable[[ProbeRecord], float | None], form: str,
            starred: bool = False) -> Callable[[RunRecord], str]:
  """The cell of a quantity of the probe; starred: proxies are marked."""
  def cell(run: RunRecord) -> str:
    text = number(quantity(run.probe) if run.probe else None, form)
    return text + '*' if starred and text != '-' and run.proxy else text
  return cell


def _ratio(run: RunRecord) -> str:
  probe = run.probe
  return f'{probe.value_ratio:.2f} ({probe.value_ratio_block})' if probe else '-'


def _emerged(run: RunRecord) -> str:
  if run.probe is None:
    return '-'
  step = run.probe.emergence_step
  return NEVER if step is None else f'step {step}'
