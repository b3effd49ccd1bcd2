"""The table of a group of runs, column by column."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from sink_jax.io.tables import number
from sink_jax.report.probe_record import ProbeRecord
from sink_jax.report.records import RunRecord

NEVER = 'did not emerge'  # may take three lines of a terminal
# Heading, meaning and cell of what the probe measured.
_PROBED: Sequence[tuple[str, str, Callable[[ProbeRecord], str]]] = (
    ('Sink_1 %', 'Share of heads whose importance of the first token exceeds epsilon.',
     lambda probe: number(probe.sink_1, '.1f')),
    ('Sink_* %', 'The same of the extra key or learned sink token: its mean weight over queries.',
     lambda probe: number(probe.sink_extra_key, '.1f')),
    ('Sink_* % (official)',
     'The same as the official implementation counts it, with a dummy row of weight one.',
     lambda probe: number(probe.sink_extra_key_official, '.1f')),
    ('largest import.', 'Largest importance of the first token over heads.',
     lambda probe: number(probe.largest_importance, '.3f')),
    ('raw mass, first', 'Mean weight on the first token, as it multiplies the values.',
     lambda probe: number(probe.raw_mass_1, '.3f')),
    ('raw mass, row',
     'Mean total weight of a row between tokens; 1 for softmax without an extra key.',
     lambda probe: number(probe.raw_row_mass, '.3f')),
    ('value ratio (block)', 'Norm of the value of the first token over the mean of the others: the '
     'smallest over blocks, and that block.',
     lambda probe: f'{probe.value_ratio:.2f} ({probe.value_ratio_block})'),
    ('max / median', 'Largest entry of the hidden states over the median entry, in size: the '
     'largest ratio over blocks. Activations are massive beyond 100 and more.',
     lambda probe: number(probe.curves.max_over_median[-1], '.0f')),
    ('sink emerged', 'First probed step from which Sink_1 stays at or above 10 %.',
     lambda probe: NEVER if probe.emergence_step is None else f'step {probe.emergence_step}'))
# Left out where no run has them, such as runs without an extra key.
_OPTIONAL = ('Sink_* %', 'Sink_* % (official)', 'max / median')
_STARRED = ('Sink_1 %', 'largest import.')  # of proxy scores where rows do not sum to one


class Column(NamedTuple):
  """A column: its heading, what it means, and the cells of the runs ('-' where unknown)."""

  heading: str
  meaning: str
  cells: Sequence[str]


def columns(runs: Sequence[RunRecord]) -> list[Column]:
  """The columns that a group of runs needs; the first names the variant."""
  shown = [Column('variant', 'Folder of the run.', [
      run.name if run.status == 'done' else f'{run.name} ({run.status})' for run in runs])]
  for key in dict.fromkeys(key for run in runs for key in run.shown_losses) or ['valid']:
    meaning = ('Validation loss at its last evaluation, nats per token.' if key == 'valid' else
               f"Validation loss on the task's {key} targets, nats.")
    shown.append(Column(f'{key} loss', meaning, [
        number((run.losses or {}).get(key), '.3f') for run in runs]))
  for heading, meaning, cell in _PROBED:
    cells = [cell(run.probe) if run.probe else '-' for run in runs]
    if heading in _STARRED:
      cells = [words + '*' if run.proxy and words != '-' else words
               for run, words in zip(runs, cells)]
    if heading not in _OPTIONAL or set(cells) != {'-'}:
      shown.append(Column(heading, meaning, cells))
  return shown
