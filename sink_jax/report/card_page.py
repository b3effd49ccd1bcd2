"""The page of a sink card in Markdown: a section for each of its five analyses."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sink_jax.io.terminal import escaped, markdown_table
from sink_jax.report.markdown import bullets, digits_of_runs, joined, of_runs, picture

Row = Mapping[str, Any]
PARTS = {
  'signature': 'Where the sinks are',
  'marking': 'How the first token is marked',
  'edits': 'Whether they matter',
  'cache': 'What a cache has to keep',
  'quantisation': 'What quantisation does',
}
_BLOCKS = 5  # with the greatest damage


def page(
  name: str,
  sentences: Sequence[str],
  rows: Mapping[str, Sequence[Row]],
  pictures: Collection[str],
  command: str,
  inputs: Mapping[str, Sequence[Row]] | None = None,
) -> str:
  """The page in Markdown.

  Args:
    name: of the model.
    rows: {part: rows of its analysis}, of some of the `PARTS`.
    pictures: names of files next to the page: PART.png of some parts.
    command: what made the card; '' leaves it out.
    inputs: {part: how each of its models and texts was read}, as a `Result` has them.
  """
  parts = [f'# {escaped(name)}: sink card', bullets(map(escaped, sentences))]
  for part, of_part in rows.items():
    parts.append(f'## {PARTS[part]}')
    if (file := f'{part}.png') in pictures:
      parts.append(picture(PARTS[part], file))
    parts += _measured_on(inputs.get(part, ()) if inputs else ())
    parts += _SECTIONS[part](of_part)
  if command:
    parts.append(f'Made by `{command}`.')
  return joined(parts)


def _measured_on(models: Sequence[Row]) -> list[str]:
  """['Measured on 12 sequences of 64 tokens of each text: `Stdlib()`.'], where that is known."""
  texts = [text for model in models for text in model['inputs'] if 'source' in text]
  if not texts:
    return []
  sources = ', '.join(dict.fromkeys(f'`{text["source"]}`' for text in texts))
  of_each = f'{texts[0]["sequences"]} sequences of {texts[0]["length"]} tokens of'
  return [f'Measured on {of_each} {sources}{", each" * (len(texts) > 1)}.']


def _signature(rows: Sequence[Row]) -> list[str]:
  head = ['measure', *_text_column(rows), 'value', 'interval', 'no effect', 'random positions']
  head += ['untrained', 'shuffled', 'where', 'beyond']
  nulls = 'uniform', 'random_positions', 'untrained', 'shuffled'
  lines = []
  for row in _side_by_side(rows, 'measure', 'position'):
    if row['measure'] == 'importance':
      continue  # the picture shows them
    if row['beyond'] or row['position'] in (None, 1):
      value, interval = f'{row["value"]:.3g}', f'{row["low"]:.3g} to {row["high"]:.3g}'
      of_nulls = ['-' if row[null] is None else f'{row[null]:.3g}' for null in nulls]
      place = _place(row), _yes(row['beyond'])
      lines.append([row['measure'], *_text(row), value, interval, *of_nulls, *place])
  return [
    'Each measure stands next to its nulls: the closed form of no effect, random positions (99th '
    'percentile) and an untrained model. The same text with shuffled tokens is a control. '
    '*Beyond*: the 99 % interval over sequences exceeds the nulls, and reaches a size that '
    'matters (one head, an importance of 0.3, a factor of two, 100 medians); an entropy has no '
    'such null. Further positions are shown if they are beyond.',
    'The sink rate of position 1 is Sink\\_1; on other texts, such as the probe sequences of a '
    'run, it has another value.',
    markdown_table(head, lines, left=_places(head, 'measure', 'text', 'where', 'beyond')),
  ]


def _side_by_side(rows: Sequence[Row], *columns: str) -> list[Row]:
  """Rows of several texts, those that agree in some columns next to one another."""
  order: dict[tuple[Any, ...], int] = {}
  place = lambda row: order.setdefault(tuple(row[name] for name in columns), len(order))
  return sorted(rows, key=place)


def _text(row: Row) -> list[str]:
  """The cell with the name of a row's text, where there are several."""
  return [row['source_text']] if 'source_text' in row else []


def _text_column(rows: Sequence[Row]) -> list[str]:
  return ['text'] if any(map(_text, rows)) else []


def _places(head: Sequence[str], *columns: str) -> list[int]:
  """The numbers of the columns that have words, of those that a table has."""
  return [n for n, name in enumerate(head) if name in columns]


def _place(row: Row) -> str:
  """'block 3 head 2 position 1 ("The")'; '' for a measure of the model."""
  words = []
  for key in ('block', 'head', 'position', 'channel'):
    if row[key] is not None:
      words.append(f'{key} {row[key]}')
      if key == 'position' and row['text']:
        words.append(f'({escaped(json.dumps(row["text"], ensure_ascii=False))})')
  return ' '.join(words)


def _marking(rows: Sequence[Row]) -> list[str]:
  head = ['block', 'adds', 'norm', 'others', 'along', 'random positions', 'in all texts']
  lines = []
  for row in rows:
    if row['part'] == 'addition':
      numbers = (row[key] for key in ('norm', 'norm_others', 'along', 'along_random'))
      left = ['-', '-']
      if 'left' in row:
        controls = f'{row["control_low"]:.1f} to {row["control_high"]:.1f}'
        left = [f'{row["left"]:.1f} ({controls})', _yes(row['marks'])]
      exceeds = _yes(row['exceeds'])
      lines.append([row['block'], row['what'], *(f'{x:.3g}' for x in numbers), exceeds, *left])
  states = [row for row in rows if row['part'] == 'state']
  keys = [row for row in rows if row['part'] == 'key']
  return [
    'What each sub-layer adds to the hidden state of the first token and of the others: the norm, '
    'and the component along the direction that the first token has in the middle of the model, '
    'next to the 99th percentile at random positions. *Without*: Sink\\_1 in % if that is left '
    'out at the first token (at a random position).',
    markdown_table([*head, 'without', 'marks'], lines, left=(1, 6, 8)),
    'After each block, the component of the first token along this direction, and the mean '
    'cosine between texts that begin with different tokens.',
    markdown_table(
      ['block', 'along', 'others', 'cosine', 'random positions'],
      [
        [row['block'], *(_short(row, key) for key in ('along', 'along_others'))]
        + [_short(row, key) for key in ('cosine', 'cosine_random')]
        for row in states
      ],
      left=(),
    ),
    'The cosine of the first key with the mean query, and of the other keys.',
    markdown_table(
      ['block', 'heads with a sink', 'first key', 'other keys', 'first key in other heads'],
      [
        [row['block'], row['heads']]
        + [_short(row, key) for key in ('cosine', 'cosine_others', 'cosine_without_sink')]
        for row in keys
      ],
      left=(),
    ),
  ]


def _short(row: Row, key: str) -> str:
  """A number that may be missing."""
  return '-' if row.get(key) is None else f'{row[key]:.3g}'


def _edits(rows: Sequence[Row]) -> list[str]:
  head = ['edit', *_text_column(rows), 'targets', 'change', 'interval', 'controls', 'their range']
  head += ['of the same size', 'beyond']
  lines = []
  losses: dict[str, str] = {}
  for row in _side_by_side(rows, 'edit'):
    numbers = ['-'] * 6
    if 'change' in row:
      controls = f'{row["control_low"]:+.3f} to {row["control_high"]:+.3f}'
      matched = f'{row["matched"]:+.3f}' if 'matched' in row else '-'
      numbers = [*_change(row), row['controls'], controls, matched, _yes(row['beyond'])]
      text = ''.join(f' ({name})' for name in _text(row))
      losses[text] = f'{row["baseline"]:.3f}{text}'
    lines.append([row['edit'], *_text(row), row['targets'], *numbers])
  equal_chances = [row['equal_chances'] for row in rows if 'change' in row]
  return [
    f'The loss without an edit, in nats a token: {", ".join(losses.values())}. Equal chances of '
    f'all tokens have {equal_chances[0]:.3f}.'
    if equal_chances
    else '',
    'Changes of the loss in nats, 99 % intervals over sequences, next to the same edit of as many '
    'random targets, and of targets of the same size.',
    markdown_table(head, lines, left=_places(head, 'edit', 'text', 'targets', 'beyond')),
  ]


def _cache(rows: Sequence[Row]) -> list[str]:
  advice, lines = [], []
  for row in rows:
    if row['part'] == 'advice' and 'policy' in row:
      advice.append(f'here: `{row["policy"]}`')
      if 'kvpress' in row:
        advice.append(f'kvpress, for a prompt of {row["length"]} tokens: `{row["kvpress"]}`')
      if 'llama_cpp' in row:
        advice.append(f'llama.cpp, for a prompt that is shorter than -c: `{row["llama_cpp"]}`')
    elif row['part'] == 'cache':
      numbers = ['-', '-', '-', '-', f'not tried: {row.get("reason")}']
      if 'change' in row:
        more = '-'
        if 'more' in row:
          more = f'{row["more"]:+.2f} ({row["more_low"]:+.2f} to {row["more_high"]:+.2f})'
        memory = f'{row["bytes"] / 1e6:.3g} of {row["full_bytes"] / 1e6:.3g} MB'
        numbers = [memory, *_change(row, digits=2), more, _safe(row)]
      kept = f'{100 * row["kept"]:.1f} %'
      lines.append([row['first'], row['recent'], row['positions'], kept, *numbers])
  head = ['first', 'recent', 'positions', 'attention kept', 'of 16 bits']
  head += ['change of the loss %', 'interval', 'beside 4 first tokens %', 'safe']
  return [
    bullets(advice),
    'card.json lists the heads that stream (`serving`).',
    f'{_changes_of_caches(rows)} Keys keep their positions in the text, or are renumbered in the '
    'cache. *Safe*: the interval ends at 1 % or below on both halves; *no*: it begins above. The '
    'smallest cache that is within 1 % on the first half is tried on the second, and a larger one '
    '*on one half* only.',
    markdown_table(head, lines, left=(2, 8)),
  ]


def _safe(row: Row) -> str:
  """Whether a cache is safe, in a word."""
  if row['safe'] is None:
    return 'on one half'
  if row['safe']:
    return 'yes'
  return 'no' if row['low'] > 1 else 'undecided'


def _changes_of_caches(rows: Sequence[Row]) -> str:
  """What the changes are relative to, and on how many documents."""
  tried = next((row for row in rows if 'full' in row), None)
  if tried is None:
    return ''
  # Each half counts its documents from 1, and the first half is not the smaller one.
  documents = max(row['document'] for row in rows if row['part'] == 'document')
  return (
    f'Changes in per cent of the loss with the full cache, {tried["full"]:.3f} nats, on '
    f'{documents} documents, the first half.'
  )


def _quantisation(rows: Sequence[Row]) -> list[str]:
  head = ['what', 'quantiser', 'bytes a token', 'spared', 'change', 'interval', 'runs']
  head += ['recovered', 'verdict']
  lines, flags = [], {}
  baseline = next(row['baseline'] for row in rows if 'baseline' in row)
  for row in rows:
    if row['part'] != 'all':
      continue
    flags[row['quantiser']] = f'{row["quantiser"]}: {row["tool"]}, `{row["flag"]}`'
    memory = '-'
    if 'bytes_per_token' in row:
      memory = f'{row["bytes_per_token"]:,.0f} of {row["bytes_of_16_bits"]:,.0f}'
    case = [row['what'], row['quantiser'], memory]
    if 'reason' in row:
      lines.append([*case, '-', '-', '-', '-', '-', row['reason']])
      continue
    spared = f'{row["spared"]} ({row["positions"] or "-"})'
    mean = of_runs(row['change'], row['least'], row['most'], 3)
    digits = digits_of_runs(row['least'], row['most'], 3)
    runs = '1' if row['least'] is None else f'{row["least"]:+.3f} to {row["most"]:+.3f}'
    recovered = '-'
    if 'recovered' in row:
      recovered = of_runs(row['recovered'], row['recovered_least'], row['recovered_most'], digits=3)
      recovered += f' ({row["recovered_low"]:+.3f} to {row["recovered_high"]:+.3f})'
    numbers = [mean, _change(row, digits)[1], runs, recovered, row['verdict']]
    lines.append([*case, spared, *numbers])
  modules, blocks = _most_damaging(rows, 'module'), _most_damaging(rows, 'block')
  return [
    'Changes of the loss in nats. Weights keep the values of the checkpoint. A scale of a tensor '
    'is that of a whole sequence, as when a prompt is read. Spared tokens keep their values, and '
    '*recovered* compares the same runs. *Runs*: the range of four runs with relative noise of '
    '1e-6 on the embeddings; a difference that is smaller is *within noise*. Rows with 1 have one '
    'run, whose last digits another machine may not give. *Safe*: the interval ends at 1 % of the '
    f'loss or below, {0.01 * baseline:.3f} of {baseline:.3f} nats; *unsafe*: it begins above. '
    '*Destroyed*: the perplexity is at least tenfold.',
    'Bytes are those of the keys and values of a token in all blocks, and of 16 bits.',
    markdown_table(head, lines, left=(0, 1, 3, 8)),
    bullets(flags.values()),
    'Modules that carry the damage, one at a time at int8 per tensor: '
    f'{", ".join(modules)}. Blocks: {", ".join(blocks[:_BLOCKS])}.',
  ]


def _most_damaging(rows: Sequence[Row], part: str) -> list[str]:
  """'`q_proj` +0.12', from the greatest change of the loss on.

  part: 'module' or 'block', by its name in transformers where it has one.
  """
  of_part = [row for row in rows if row['part'] == part]
  of_part.sort(key=lambda row: row['change'], reverse=True)
  named = lambda row: f'`{row["transformers"]}`' if row['transformers'] else row[part]
  return [f'{named(row)} {row["change"]:+.2f}' for row in of_part]


def _change(row: Row, digits: int = 3) -> tuple[str, str]:
  """A change of the loss, and its interval."""
  form = f'+.{digits}f'
  return f'{row["change"]:{form}}', f'{row["low"]:{form}} to {row["high"]:{form}}'


def _yes(holds: bool | None) -> str:
  return {True: 'yes', False: 'no', None: '-'}[holds]


_SECTIONS = {
  'signature': _signature,
  'marking': _marking,
  'edits': _edits,
  'cache': _cache,
  'quantisation': _quantisation,
}
