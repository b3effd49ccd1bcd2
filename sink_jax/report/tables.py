"""The table of a group of runs, as rows of cells; and as text and Markdown."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable

from sink_jax.report import markup
from sink_jax.report.records import shown_losses

WIDTH = 100  # columns of a terminal


@dataclasses.dataclass(frozen=True)
class Column:
  """A column: its heading, what it means, and the cell of a run ('-' where unknown)."""

  heading: str
  meaning: str
  cell: Callable[[dict], str]


def columns(runs: list[dict]) -> list[Column]:
  """The columns that a group of runs needs; the first names the variant."""
  found = [Column('variant', 'Folder of the run.', _name)]
  found += [Column(f'{key} loss', meaning, lambda run, key=key: _number(
      run.get('losses', {}).get(key), '.3f')) for key, meaning in _losses(runs)]
  found.append(Column(
      'Sink_1 %', 'Share of heads whose importance of the first token exceeds epsilon.',
      _measured('sink_1', '.1f', starred=True)))
  if any(run.get('sink_bias_slot') is not None for run in runs):
    found += [
        Column('Sink_* %', 'The same of the bias slot or learned sink token: its mean weight over '
               'queries.', _measured('sink_bias_slot', '.1f')),
        Column('Sink_* % (release)', "The same as the paper's release counts it, with a dummy row "
               'of weight one.', _measured('sink_bias_slot_released', '.1f'))]
  return found + [
      Column('largest import.', 'Largest importance of the first token over heads.',
             _measured('largest_importance', '.3f', starred=True)),
      Column('raw mass, first', 'Mean weight on the first token, as it multiplies the values.',
             _measured('raw_mass_1', '.3f')),
      Column('raw mass, row', 'Mean total weight of a row between tokens; 1 for softmax without '
             'a bias slot.', _measured('raw_row_mass', '.3f')),
      Column('value ratio (block)', 'Norm of the value of the first token over the mean of the '
             'others: the smallest over blocks, and that block.', _ratio),
      Column('sink emerged', 'First probed step from which Sink_1 stays at or above 10 %.', _emerged),
  ]


def rows(runs: list[dict], shown: list[Column]) -> list[list[str]]:
  return [[column.cell(run) for column in shown] for run in runs]


def as_text(runs: list[dict]) -> str:
  """The table for a terminal, at most 100 columns wide."""
  shown = columns(runs)
  cells = rows(runs, shown)
  widths = [max(max(map(len, column.heading.split())), *(_widest(row[i]) for row in cells))
            for i, column in enumerate(shown)][1:]
  room = WIDTH - sum(widths) - 2 * len(widths)
  names = max(len(row[0]) for row in cells)
  widths = [max(12, min(room, names)), *widths]
  lines = _line([column.heading for column in shown], widths)
  lines.append('  '.join('-' * width for width in widths))
  for row in cells:
    lines += _line(row, widths)
  return '\n'.join(lines)


def as_markdown(runs: list[dict]) -> str:
  shown = columns(runs)
  return '\n'.join(markup.markdown_table([column.heading for column in shown], rows(runs, shown)))


def _losses(runs):
  sets = dict.fromkeys(key for run in runs for key in shown_losses(run)) or ['valid']
  return [(key, 'Validation loss at its last evaluation, nats per token.' if key == 'valid' else
           f"Validation loss on the task's {key} targets, nats.") for key in sets]


def _name(run):
  if run['status'] == 'done':
    return run['name']
  return f'{run["name"]} ({run["status"]})'


def _number(value, form):
  return '-' if value is None else format(value, form)


def _measured(key, form, starred=False):
  def cell(run):
    text = _number(run.get(key), form)
    return text + '*' if starred and text != '-' and run['proxy'] else text
  return cell


def _ratio(run):
  if 'value_ratio' not in run:
    return '-'
  return f'{run["value_ratio"]:.2f} ({run["value_ratio_block"]})'


def _emerged(run):
  if 'probe_step' not in run:
    return '-'
  return 'did not emerge' if run['emergence_step'] is None else f'step {run["emergence_step"]}'


def _widest(cell):
  """Width of a cell: words may go below one another, numbers stay together."""
  return max(map(len, cell.split())) if cell.startswith('did') else len(cell)


def _line(cells, widths):
  """The lines of one row; the first column to the left, the others to the right."""
  parts = [textwrap.wrap(cell, width) or [''] for cell, width in zip(cells, widths)]
  height = max(map(len, parts))
  parts = [part + [''] * (height - len(part)) for part in parts]
  return ['  '.join(part.ljust(width) if i == 0 else part.rjust(width)
                    for i, (part, width) in enumerate(zip(line, widths))).rstrip()
          for line in zip(*parts)]
