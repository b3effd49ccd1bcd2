"""Placeholders: names in braces that stand in a config until it becomes a run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sink_jax.data.tokenizer import Bytes, HuggingFace

_FIELD = re.compile(r'\{[^{}]*\}')


def filled_in(config: Mapping[str, Any]) -> dict[str, Any]:
  """The config of a run: `init.source` and `data.tokenizer` without placeholders.

  A run of every seed can so begin with a model of that seed: `{seed}` is the run's seed, in both
  keys, and `{source}` in `data.tokenizer` is `init.source`, beside whose parameters a run has its
  tokenizer. Where `data.tokenizer` is the default, the bytes, and a tokenizer of another kind lies
  in the folder of `init.source`, that takes its place. A config without `init.source` stays as it
  is, braces included.

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
    tokenizer = _filled('data.tokenizer', tokenizer, known | {'{source}': source})
    if tokenizer == repr(Bytes()):
      tokenizer = _of_source(source) or tokenizer
    filled['data'] = {**data, 'tokenizer': tokenizer}
  return filled


def _of_source(source: str) -> str | None:
  """The tokenizer in the folder of a source, in the words of a config; None for bytes."""
  tokenizer = HuggingFace(path=source)
  try:
    encoder = tokenizer.open()
  except (ValueError, OSError):  # none, such as of a name on the hub, or one that needs options
    return None
  letters = ''.join(map(chr, range(32, 127)))
  same = encoder.encode(letters) == Bytes().open().encode(letters)
  return None if same else f'HuggingFace(path={source!r})'


def _filled(option: str, text: str, known: Mapping[str, str]) -> str:
  def value(field: re.Match[str]) -> str:
    if field[0] not in known:
      raise ValueError(f'{option} = {text!r}: {field[0]} stands for nothing; what can be written '
                       f'there in braces: {", ".join(known)}.')
    return known[field[0]]
  return _FIELD.sub(value, text)
