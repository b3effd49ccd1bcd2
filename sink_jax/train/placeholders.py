"""Placeholders: names in braces that stand in a config until it becomes a run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_FIELD = re.compile(r'\{[^{}]*\}')


def filled_in(config: Mapping[str, Any]) -> dict[str, Any]:
  """The config of a run: `init.source` and `data.tokenizer` without placeholders.

  A run of every seed can so begin with a model of that seed: `{seed}` is the run's seed, in both
  keys, and `{source}` in `data.tokenizer` is `init.source`, beside whose parameters a run has its
  tokenizer. A config without `init.source` stays as it is, braces included.

  Args:
    config: nested, of any age: a section that it lacks has no placeholder.

  Raises:
    ValueError: another name in braces; names the option and what can stand there.
  """
  init, data = config.get('init'), config.get('data')
  source = init.get('source') if isinstance(init, Mapping) else None
  if not isinstance(init, Mapping) or not isinstance(source, str) or not source:
    return dict(config)  # a source that is no text is refused where it is read
  known = {'{seed}': str(config.get('seed'))}
  source = _filled('init.source', source, known)
  filled = dict(config, init={**init, 'source': source})
  if isinstance(data, Mapping) and isinstance(tokenizer := data.get('tokenizer'), str):
    filled['data'] = {**data, 'tokenizer': _filled(
        'data.tokenizer', tokenizer, known | {'{source}': source})}
  return filled


def _filled(option: str, text: str, known: Mapping[str, str]) -> str:
  def value(field: re.Match[str]) -> str:
    if field[0] not in known:
      raise ValueError(f'{option} = {text!r}: {field[0]} stands for nothing; what can be written '
                       f'there in braces: {", ".join(known)}.')
    return known[field[0]]
  return _FIELD.sub(value, text)
