"""A page about one published model: what `evaluate` measured, in sentences, a table and pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sink_jax.evaluate.sink_report import table_rows
from sink_jax.io.files import read_text_limited
from sink_jax.io.paths import AnyPath
from sink_jax.report.parts import Parts

REPORT = 'sink_report.json'
PICTURES = {
    'importance.png': 'Importance of the first token: its mean attention over queries, for every '
    'head of every block.',
    'token_map.png': 'Attention of the head that gives the first token most, on one text: rows are '
    'queries, columns are keys.',
    'norms.png': 'Length of the hidden states, keys and values of the first token, and the mean of the '
    'other tokens.'}


def add_model(parts: Parts, folder: AnyPath) -> None:
  """Adds what `evaluate` wrote into a folder, below a heading with the name of the model.

  Raises:
    ValueError: the folder does not hold an evaluation.
  """
  try:
    result = json.loads(read_text_limited(folder / REPORT))
    parts.heading(result['protocol']['run'])
    parts.paragraph(' '.join(sentences(result)))
    rows = table_rows(result['summary'], result['protocol'], result['epsilon'])
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise ValueError(f'{folder} does not hold what python -m sink_jax evaluate writes ({error}): '
                     'run it again.') from None
  for name, caption in PICTURES.items():
    if (folder / name).exists():
      parts.picture(name, (folder / name).read_bytes(), caption)
  parts.table(['metric', 'value', 'meaning'], rows, left=(0, 2))


def sentences(result: Mapping[str, Any]) -> list[str]:
  """Two sentences: how many heads have a sink, and what is special about the first token."""
  summary, protocol, epsilon = result['summary'], result['protocol'], result['epsilon']
  heads = sum(map(len, result['importance_1']))
  found = [f'{summary["sink_1"]:.1f} % of {heads} heads give the first token more than '
           f'{epsilon:g} of their attention; attention that is uniform over the keys would give it '
           f'{_uniform(protocol["length"]):.2f}.']
  hidden = [(ratio, block) for block, ratio in enumerate(summary['hidden_ratio']) if ratio]
  values = [(ratio, block) for ratio, block in zip(summary['value_ratio'], protocol['blocks'])
            if ratio]
  if hidden and values:
    (longest, at), (shortest, there) = max(hidden), min(values)
    found.append(f'Compared with the other tokens, its hidden state is {longest:.3g} times as long '
                 f'after block {at}, and its value {shortest:.2g} times in block {there}.')
  return found


def _uniform(length: int) -> float:
  """Mean weight of the first token where every query attends equally to all keys that it sees."""
  return sum(1 / n for n in range(1, length + 1)) / length
