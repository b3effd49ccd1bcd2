"""Reading config.json: a key that is missing or not supported is refused by name and value.

No key that would change a result may go unread: a family says which ones it leaves unread, and why.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sink_jax.attention.mask import Causal, Mask, Window
from sink_jax.attention.position import Llama3Rope, Position, Rope, YarnRope
from sink_jax.attention.spec import AttentionSpec
from sink_jax.models.config import Experts, Layer

_log = logging.getLogger('sink_jax')
T = TypeVar('T')
Json = dict[str, Any]
FULL, SLIDING = 'full_attention', 'sliding_attention'
_NEEDED: Any = object()
# Keys that a rotary encoding may have next to its type and base.
_ROPES = {
  'default': (),
  'linear': ('factor',),
  'llama3': ('factor', 'low_freq_factor', 'high_freq_factor', 'original_max_position_embeddings'),
  'yarn': (
    'factor',
    'beta_fast',
    'beta_slow',
    'original_max_position_embeddings',
    'attention_factor',
    'mscale',
    'mscale_all_dim',
    'truncate',
  ),
}


def take(
  hf: Json,
  key: str,
  kind: type | tuple,
  default: Any = _NEEDED,
  *,
  above: float = -math.inf,
  why: str = '',
) -> Any:
  """A value of config.json.

  Args:
    kind: bool; float, for a finite number; int, for a positive integer, or None if the file has
      null; or a tuple of the supported values, the first of which is the default.
    default: the family's default in transformers; without one the file must have the key.
    above: the number must be larger than this.
    why: the reason why only these values are supported.

  Raises:
    ValueError: the value is missing or not supported; names the key.
  """
  value = hf.get(key)
  if isinstance(kind, tuple):
    value = kind[0] if value is None else value
    # 1 == True in Python, so types are compared, too; in a list, as a value may be unhashable.
    if (isinstance(value, bool), value) not in [(isinstance(x, bool), x) for x in kind]:
      raise unsupported(key, value, f'supported: {", ".join(map(repr, kind))}{why and f" ({why})"}')
    return value
  if value is None:
    if default is _NEEDED:
      raise ValueError(f'there is no {key}, without which the model is not defined.')
    return None if kind is int and key in hf else default
  if kind is float:  # JSON has integers of any length; NaN fails the comparison
    if type(value) not in (int, float) or not abs(value) < 1e300 or value <= above:
      raise ValueError(
        f'{key} = {value!r} must be a finite number'
        + (f' above {above}.' if math.isfinite(above) else '.')
      )
    return float(value)
  # `type`, since to isinstance the JSON value true is an integer.
  if type(value) is not kind or kind is int and value < 1:
    raise ValueError(
      f'{key} = {value!r} must be {"a positive integer" if kind is int else "true or false"}.'
    )
  return value


def unsupported(key: str, value: Any, reason: str) -> ValueError:
  """The error for a key whose value this importer does not support."""
  return ValueError(f'{key} = {value!r} is not supported: {reason}.')


def check_not_quantized(hf: Json) -> None:
  """Raises a ValueError if the checkpoint holds quantised weights."""
  if quantization := hf.get('quantization_config'):
    raise unsupported(
      'quantization_config',
      quantization,
      'the weights of this family are read as '
      'float32, float16 or bfloat16; use the checkpoint it was quantised from',
    )


def head_dim(hf: Json, default: int | None = None) -> int | None:
  """The size of a head if it differs from the width over the number of heads, else None."""
  width, heads = take(hf, 'hidden_size', int), take(hf, 'num_attention_heads', int)
  size = take(hf, 'head_dim', int, default)
  if size is None and width % heads:
    raise ValueError(
      f'num_attention_heads = {heads} does not divide hidden_size = {width}, and there '
      'is no head_dim.'
    )
  # None for the usual size, so that equal models have equal configs.
  return None if size is None or size * heads == width else size


def rotary_parameters(hf: Json) -> Json:
  """The entries of config.json about the rotary encoding, without base and fraction; or {}."""
  for key in ('rope_scaling', 'rope_parameters'):
    if (entries := hf.get(key)) and not isinstance(entries, dict):
      raise unsupported(key, entries, 'it must be an object')
    if entries:
      return dict(entries)  # a copy, from which keys are taken
  return {}


def rope(hf: Json, *, base: float = 10000.0, fraction: float | None = None) -> Rope:
  """The rotation of queries and keys that config.json describes.

  Reads `rope_parameters` ({rope_type, rope_theta, ...}) or the older pair `rope_theta` and
  `rope_scaling` ({type or rope_type, factor, ...}). All families pair channel c of a head with
  c + Dh / 2, as transformers stores them, so no weight is reordered.

  Args:
    base: the family's default.
    fraction: share of a head's channels that the family rotates if config.json has none;
      None if it always rotates all of them.
  """
  rotary = rotary_parameters(hf)
  older = rotary.pop('type', None)  # some files have both names
  kind = take({'rope_type': rotary.pop('rope_type', None) or older}, 'rope_type', tuple(_ROPES))
  base = take(rotary, 'rope_theta', float, take(hf, 'rope_theta', float, base))
  share = take(hf, 'partial_rotary_factor', float, 1.0 if fraction is None else fraction)
  share = take(rotary, 'partial_rotary_factor', float, share)
  if share != 1 and (fraction is None or kind not in ('default', 'linear')):
    raise unsupported('partial_rotary_factor', share, 'this model rotates all channels of a head')
  _remark_unread(kind, rotary)
  if kind == 'default':
    return Rope(base=base, fraction=share)
  if kind == 'linear':
    return Rope(base=base, fraction=share, factor=take(rotary, 'factor', float))
  # A length at the top level takes precedence over the one among the parameters, as in
  # transformers.
  key = 'original_max_position_embeddings'
  length = take(rotary if hf.get(key) is None else hf, key, int, None)
  length = length or take(hf, 'max_position_embeddings', int)
  if kind == 'llama3':
    return Llama3Rope(
      base=base,
      factor=take(rotary, 'factor', float),
      original_length=length,
      low_frequency_factor=take(rotary, 'low_freq_factor', float),
      high_frequency_factor=take(rotary, 'high_freq_factor', float),
    )
  # As in transformers: the context that config.json allows over the one before YaRN.
  factor = take(rotary, 'factor', float, None)
  factor = take(hf, 'max_position_embeddings', int) / length if factor is None else factor
  # The factor on the logits that the YaRN paper recommends, as transformers computes it.
  scale = lambda m: 0.1 * m * math.log(factor) + 1 if factor > 1 else 1.0
  m, m_all = take(rotary, 'mscale', float, 0.0), take(rotary, 'mscale_all_dim', float, 0.0)
  return YarnRope(  # a beta of 0 counts as none, as in transformers
    base=base,
    factor=factor,
    original_length=length,
    beta_fast=take(rotary, 'beta_fast', float, 32.0) or 32.0,
    beta_slow=take(rotary, 'beta_slow', float, 1.0) or 1.0,
    attention_factor=take(
      rotary, 'attention_factor', float, scale(m) / scale(m_all) if m and m_all else scale(1)
    ),
    truncate=take(rotary, 'truncate', bool, True),
  )


def _remark_unread(kind: str, rotary: Json) -> None:
  """Logs a remark on each key that a rotary encoding of this type does not have.

  transformers 5.23 warns of such a key and does not read it (`_check_received_keys` of
  modeling_rope_utils.py). An object has the settings of a kind of layers, which would be lost.
  """
  known = (*_ROPES[kind], 'rope_theta', 'partial_rotary_factor')
  for key, value in rotary.items():
    if value is None or key in known:
      continue
    if isinstance(value, dict):
      raise unsupported(key, value, 'all layers of this model have the same rotary encoding')
    _log.warning(
      'config.json: %s = %.60s is ignored, as in transformers: a rotary encoding of '
      'type %r has no such parameter.',
      key,
      value,
      kind,
    )


def rope_by_kind(hf: Json, full: float, sliding: float) -> tuple[Rope, Rope]:
  """The rotations of layers with full attention, and of those with a window.

  full, sliding: the default base of each. In the older form a scaling applies only to full
  attention.
  """
  given = hf.get('rope_parameters')
  if given is None:
    return rope(hf, base=full), Rope(base=sliding)
  if (
    not isinstance(given, dict)
    or set(given) != {FULL, SLIDING}
    or not all(isinstance(each, dict) for each in given.values())
  ):
    raise unsupported(
      'rope_parameters', given, f'it must hold an object for each of {FULL}, {SLIDING}'
    )
  take(hf, 'rope_scaling', (None,), why='rope_parameters holds the scaling')
  of = lambda kind, base: rope(hf | {'rope_parameters': given[kind], 'rope_theta': None}, base=base)
  return of(FULL, full), of(SLIDING, sliding)


def masks(hf: Json, slides: Callable[[int], bool], window: int | None) -> list[Mask]:
  """The mask of every layer by `layer_types`; without it, `slides` says which have a window."""
  layers, kinds = take(hf, 'num_hidden_layers', int), hf.get('layer_types')
  kinds = [SLIDING if slides(i) else FULL for i in range(layers)] if kinds is None else kinds
  if not isinstance(kinds, list) or len(kinds) != layers:
    raise unsupported(
      'layer_types', kinds, f'it must be a list of num_hidden_layers = {layers} kinds'
    )
  if other := [kind for kind in kinds if kind not in (FULL, SLIDING)]:
    raise unsupported('layer_types', other[0], f'supported: {FULL}, {SLIDING}')
  if SLIDING in kinds and window is None:
    raise unsupported('sliding_window', None, 'layer_types has sliding layers, which need its size')
  return [Causal() if kind == FULL or window is None else Window(size=window) for kind in kinds]


def one_mask(hf: Json, default: int | None) -> Mask:
  """The mask of a family whose layers are all alike: a window if there is a `sliding_window`."""
  window = take(hf, 'sliding_window', int, default)
  kinds = [FULL if window is None else SLIDING] * take(hf, 'num_hidden_layers', int)
  # Models with another list also have this model_type; transformers would ignore the list.
  if hf.get('layer_types') not in (None, kinds):
    raise unsupported(
      'layer_types',
      hf['layer_types'],
      f'all layers of this family are alike, here {kinds[0]} by sliding_window',
    )
  return Causal() if window is None else Window(size=window)


def blocks(
  masks: Sequence[Mask],
  positions: Position | Sequence[Position],
  experts: Experts | None = None,
  **components: Any,
) -> dict[str, Any]:
  """`attention` and `pattern` of a ModelConfig, by mask and position of every layer."""
  positions = [positions] * len(masks) if isinstance(positions, Position) else positions
  period = shortest_period(list(zip(masks, positions, strict=True)))
  mask, position = period[0]
  return dict(
    attention=AttentionSpec(mask=mask, position=position, **components),
    pattern=tuple(
      Layer(mask=None if m == mask else m, position=None if p == position else p, experts=experts)
      for m, p in period
    ),
  )


def shortest_period(items: Sequence[T]) -> tuple[T, ...]:
  """The shortest tuple that gives all items when it is repeated."""
  items = tuple(items)
  # Only complete repetitions, since the scan over periods of blocks has no remainder. All items
  # together always qualify, so `next` finds one.
  return next(
    items[:n]
    for n in range(1, len(items) + 1)
    if len(items) % n == 0 and items[:n] * (len(items) // n) == items
  )
