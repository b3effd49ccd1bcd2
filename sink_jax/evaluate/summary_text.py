"""The summary of a probe as a few lines of text, and as a table of a notebook."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sink_jax.evaluate.activations import BEYOND
from sink_jax.evaluate.limits import limit_note
from sink_jax.io.tables import html_table, text_table

_HEAD = ('metric', 'value', 'meaning')


def as_text(summary: Mapping[str, Any], protocol: Mapping[str, Any], epsilon: float) -> str:
  """The lines of a summary for a terminal; the arguments are as in sink_report.json."""
  rows = table_rows(summary, protocol, epsilon)
  return '\n'.join([_title(protocol), *text_table(_HEAD, rows, left=(0, 2)),
                    *_notes(protocol, epsilon)])


def as_html(summary: Mapping[str, Any], protocol: Mapping[str, Any], epsilon: float) -> str:
  """The same as HTML."""
  rows = [(_title(protocol), '', ''), *table_rows(summary, protocol, epsilon),
          *((note, '', '') for note in _notes(protocol, epsilon))]
  return html_table(_HEAD, rows)


def _title(protocol: Mapping[str, Any]) -> str:
  step = '' if protocol.get('step') is None else f', step {protocol["step"]}'
  dtype = f', {protocol["dtype"]}' if 'dtype' in protocol else ''
  return (f'{protocol.get("run") or "model"}{step}: {protocol["sequences"]} sequences of '
          f'{protocol["length"]} tokens{dtype}')


def table_rows(summary: Mapping[str, Any], protocol: Mapping[str, Any],
               epsilon: float) -> list[tuple[str, str, str]]:
  """Name, value and meaning of each number that is shown."""
  star = '*' if _proxy(protocol) else ''
  rows = [('Sink_1', f'{summary["sink_1"]:.1f} %{star}',
           f'of heads give the first token more than {epsilon:g}')]
  if summary['sink_bias_slot'] is not None:  # takes the sink of the first token over (Table 4)
    rows.append(('Sink_*', f'{summary["sink_bias_slot"]:.1f} %', 'the extra key; '
                 f'{summary["sink_bias_slot_released"]:.1f} % as the official implementation, '
                 'sail-sg/Attention-Sink, counts'))
  rows += [(f'{which} importance', f'{summary[f"{which}_importance"]:.3f}{star}',
            'of the first token, over heads') for which in ('largest', 'mean')]
  rows.append(('raw mass', f'{summary["raw_mass_1"]:.3f}',
               f'on the first token, of {summary["raw_row_mass"]:.3f} in a row'))
  # A ratio is None where the others have no norm; with all of them None there is no line.
  if pairs := _known(summary.get('value_ratio', ()), protocol.get('blocks', ())):
    rows.append(('value norm ratio', f'{min(pairs)[0]:.2f}',
                 f'first token to the others, smallest in block {min(pairs)[1]}'))
  if pairs := _known(summary.get('hidden_ratio', ())[1:], range(1, 1 + 2**30)):
    ratio, block = max(pairs)
    rows.append(('hidden norm ratio', f'{ratio:.2f}' if ratio < 100 else f'{ratio:,.0f}',
                 f'first token to the others, largest in block {block}'))
  if 'activation_max' in summary:
    rows += _activation(summary)
  return rows


def _activation(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
  """The row of the activation that exceeds the median of its block most; none without medians."""
  columns = ('activation_max', 'activation_median', 'activation_position', 'activation_channel')
  blocks = list(zip(*(summary[name] for name in columns)))  # the first is the embedding
  times = [largest / median if largest is not None and median else 0
           for largest, median, *_ in blocks]
  peak = times.index(max(times))
  largest, _, token, channel = blocks[peak]
  if not times[peak]:
    return []
  # The neighbours in which the same entry is massive, too.
  same = lambda i: times[i] > BEYOND[0] and blocks[i][2:] == (token, channel)
  first = last = peak
  while first > 1 and same(first - 1):
    first -= 1
  while last + 1 < len(blocks) and same(last + 1):
    last += 1
  where = (f'blocks {first} to {last}' if first < last else
           f'block {peak}' if peak else 'the embedding')
  rule = '' if times[peak] > BEYOND[0] else f' (massive: above {BEYOND[0]})'
  return [('largest activation', f'{largest:,.0f}' if largest >= 100 else f'{largest:.3g}',
           f'{times[peak]:,.0f} times the median{rule}: channel {channel:g} of token {token:g}, '
           f'{where}')]


def _notes(protocol: Mapping[str, Any], epsilon: float) -> list[str]:
  notes = ['* of proxy scores: the rows of this attention do not sum to one'] * _proxy(protocol)
  limits = protocol.get('first_token_limits', ())  # of maps alone the mask is not known
  return notes + list(filter(None, [limit_note(limits, protocol['length'], epsilon)]))


def _proxy(protocol: Mapping[str, Any]) -> bool:
  return protocol['scores'] != 'attention weights'


def _known(ratios: Any, blocks: Any) -> list[tuple[float, int]]:
  return [(ratio, block) for ratio, block in zip(ratios, blocks) if ratio is not None]
