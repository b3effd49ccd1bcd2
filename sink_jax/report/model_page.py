"""A page about one model: what `python -m sink_jax evaluate` measured."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from sink_jax.evaluate.sink_report import table_rows
from sink_jax.io.files import read_text_limited
from sink_jax.io.paths import AnyPath, inside
from sink_jax.io.terminal import escaped, markdown_table
from sink_jax.report.markdown import joined, picture

NUMBERS = 'sink_report.json'
PICTURES = {
  'importance.png': 'Mean attention of all queries to the first token, by block and head.',
  'attention_maps.png': (
    'Attention of heads with the most and the least attention to the first token.'
  ),
  'norms.png': (
    'Norms of hidden states, keys and values: the first token, and the mean of the others.'
  ),
}


def read_page(folder: AnyPath) -> tuple[str, dict[str, bytes]]:
  """The page and the pictures, {name: PNG file}, of a folder that `evaluate` wrote.

  Raises:
    ValueError: it is not one, or holds a link that leads out of it.
  """
  there = [name for name in PICTURES if (folder / name).exists()]
  try:
    page = model_page(json.loads(read_text_limited(inside(folder, NUMBERS))), there)
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise ValueError(
      f'{folder} does not hold what python -m sink_jax evaluate writes ({error}): run it again.'
    ) from None
  return page, {name: inside(folder, name).read_bytes() for name in there}


def model_page(result: Mapping[str, Any], pictures: Collection[str]) -> str:
  """The page of what `evaluate` measured, as Markdown. pictures: names of its files."""
  protocol = result['protocol']
  rows = table_rows(result['summary'], protocol, result['epsilon'])
  cells = [map(escaped, row) for row in rows]
  shown = [picture(PICTURES[name], name, PICTURES[name]) for name in PICTURES if name in pictures]
  return joined(
    [
      f'# {escaped(protocol["run"] or "model")}',
      ' '.join(sentences(result)),
      markdown_table(('metric', 'value', 'meaning'), cells, left=(0, 2)),
      *shown,
    ]
  )


def sentences(result: Mapping[str, Any]) -> list[str]:
  """How many heads have a sink, and how the first token differs from the others."""
  summary, protocol = result['summary'], result['protocol']
  uniform = sum(1 / n for n in range(1, protocol['length'] + 1)) / protocol['length']
  heads, sequences = sum(map(len, result['importance_1'])), protocol['sequences']
  found = [
    f'In {summary["sink_1"]:.1f} % of {heads * sequences:,} pairs of a head and a sequence '
    f'({heads} heads, {sequences} sequences) the first token gets more than '
    f'{result["epsilon"]:g} of the attention; uniform causal attention would give it '
    f'{uniform:.2f}.'
  ]
  ratios = enumerate(summary['hidden_ratio'])  # of the embedding, then of blocks
  hidden = [(ratio, block) for block, ratio in ratios if block and ratio]
  of_values = zip(summary['value_ratio'], protocol['blocks'])
  values = [(ratio, block) for ratio, block in of_values if ratio]
  if hidden and values:
    (longest, at), (shortest, there) = max(hidden), min(values)
    found.append(
      f'Compared with the other tokens, its hidden state is {longest:.3g} times as long '
      f'after block {at}, and its value {shortest:.2g} times in block {there}.'
    )
  return found
