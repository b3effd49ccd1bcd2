"""Rotary position encodings as config.json writes them, in its old form and its new one.

Checkpoints differ in how the channels of a head are paired for the rotation: channel c with
c + 1, or c with c + Dh / 2. All families here have the second, as transformers stores them (the
original LLaMA files have the first), and so have the models, so no weight is reordered.
"""

from __future__ import annotations

import math
from typing import Any

from sink_jax.attention.position import Llama3Rope, Position, Rope, YarnRope
from sink_jax.pretrained.keys import flag, number, refused, size

_REASONS = {
    'dynamic': 'its frequencies depend on the length of the input',
    'longrope': 'its frequencies depend on the length of the input',
    'proportional': 'some channels of its heads are never rotated',
}
# What else may stand beside the type and the base; another key would change the angles.
_TAKES = {
    'default': set(),
    'linear': {'factor'},
    'llama3': {'factor', 'low_freq_factor', 'high_freq_factor',
               'original_max_position_embeddings'},
    'yarn': {'factor', 'beta_fast', 'beta_slow', 'original_max_position_embeddings',
             'attention_factor', 'mscale', 'mscale_all_dim', 'truncate'},
}


def rope(hf: dict[str, Any], *, base: float = 10000.0, fraction: float | None = None) -> Position:
  """The rotation of queries and keys that config.json describes.

  Reads `rope_parameters` ({rope_type, rope_theta, ...}) or the older pair `rope_theta` and
  `rope_scaling` ({type or rope_type, factor, ...}).

  Args:
    base: of the family, where config.json has none.
    fraction: share of a head's channels that the family rotates where config.json does not
      say; None where it always rotates all of them.

  Raises:
    ValueError: another type, a key the type does not have, or a partial rotation where the
      family has none.
  """
  rotary = rotary_parameters(hf)
  # Older files call it 'type', and some write both.
  kind = rotary.pop('rope_type', None) or rotary.pop('type', None) or 'default'
  rotary.pop('type', None)
  if not isinstance(kind, str) or kind not in _TAKES:
    raise refused('rope_type', kind, _REASONS.get(str(kind), f'choices: {", ".join(_TAKES)}'))
  base = number(rotary, 'rope_theta', number(hf, 'rope_theta', base))
  share = number(rotary, 'partial_rotary_factor',
                 number(hf, 'partial_rotary_factor', 1.0 if fraction is None else fraction))
  # The Llama3Rope and YarnRope made below get no fraction.
  if share != 1 and (fraction is None or kind not in ('default', 'linear')):
    raise refused('partial_rotary_factor', share, 'this model rotates all channels of a head')
  extra = {k: v for k, v in rotary.items() if v is not None and k not in
           _TAKES[kind] | {'rope_theta', 'partial_rotary_factor'}}
  if extra:
    key, value = next(iter(extra.items()))
    raise refused(key, value, f'a rotary encoding of type {kind!r} has no such parameter')
  if kind == 'default':
    return Rope(base=base, fraction=share)
  if kind == 'linear':
    return Rope(base=base, fraction=share, factor=_needed(rotary, kind, 'factor'))
  if kind == 'llama3':
    return Llama3Rope(
        base=base, factor=_needed(rotary, kind, 'factor'),
        low_frequency_factor=_needed(rotary, kind, 'low_freq_factor'),
        high_frequency_factor=_needed(rotary, kind, 'high_freq_factor'),
        original_length=_original_length(hf, rotary))
  return _yarn(hf, rotary, base)


def rotary_parameters(hf: dict[str, Any]) -> dict:
  """The entries of config.json about the rotary encoding beside base and fraction; {} if none.

  Raises:
    ValueError: they are no object.
  """
  for key in ('rope_scaling', 'rope_parameters'):
    entries = hf.get(key)
    if entries is not None and not isinstance(entries, dict):
      raise ValueError(f'config.json: {key} = {entries!r} must be an object.')
    if entries:
      return dict(entries)  # a copy, from which keys are taken
  return {}


def _yarn(hf: dict[str, Any], rotary: dict[str, Any], base: float) -> YarnRope:
  length = _original_length(hf, rotary)
  # As in transformers: the context that config.json allows over the one before YaRN.
  if rotary.get('factor') is None:
    factor = size(hf, 'max_position_embeddings') / length
  else:
    factor = _needed(rotary, 'yarn', 'factor')
  # The factor on the logits that the YaRN paper recommends, as transformers computes it.
  scale = lambda m: 0.1 * m * math.log(factor) + 1 if factor > 1 else 1.0
  m, m_all = number(rotary, 'mscale', 0), number(rotary, 'mscale_all_dim', 0)
  attention = scale(m) / scale(m_all) if m and m_all else scale(1)
  return YarnRope(  # a beta of 0 counts as none, as in transformers
      base=base, factor=factor, beta_fast=number(rotary, 'beta_fast', 32) or 32.0,
      beta_slow=number(rotary, 'beta_slow', 1) or 1.0, original_length=length,
      attention_factor=number(rotary, 'attention_factor', attention),
      truncate=flag(rotary, 'truncate', True))


def _needed(rotary: dict[str, Any], kind: str, key: str) -> float:
  if rotary.get(key) is None:
    raise ValueError(f'config.json: a rotary encoding of type {kind!r} needs the number {key}.')
  return number(rotary, key, 0)


def _original_length(hf: dict[str, Any], rotary: dict[str, Any]) -> int:
  # A length at the top level goes before the one among the parameters, as in transformers.
  for entries in (hf, rotary):
    if entries.get('original_max_position_embeddings') is not None:
      return size(entries, 'original_max_position_embeddings')
  return size(hf, 'max_position_embeddings')
