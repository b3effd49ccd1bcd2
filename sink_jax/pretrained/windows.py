"""The masks of a model's layers, as config.json writes them: which layers see a window only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sink_jax.attention.mask import Causal, Mask, Window
from sink_jax.attention.position import Position
from sink_jax.models.config import Layer
from sink_jax.pretrained import keys
from sink_jax.pretrained.keys import refused, size
from sink_jax.pretrained.rope import rope
from sink_jax.pretrained.stored_tensors import shortest_period

PositionOf = Callable[[bool], Position]  # whether a layer has a window -> its positions


def masks(hf: dict[str, Any], kinds: list[str], window: int | None) -> tuple[Mask, ...]:
  """The masks of one period of the layers.

  Args:
    kinds: the kind of every layer where config.json has no `layer_types`: 'full_attention' or
      'sliding_attention'.
    window: keys that a sliding layer sees, the query's own included.

  Raises:
    ValueError: another kind of layer, a list of another length, or a window without size.
  """
  listed = hf.get('layer_types')
  kinds = kinds if listed is None else listed
  if not isinstance(kinds, list):
    raise ValueError(f'config.json: layer_types = {kinds!r} must be a list.')
  if len(kinds) != size(hf, 'num_hidden_layers'):
    raise ValueError(f'config.json: layer_types names {len(kinds)} layers, num_hidden_layers = '
                     f'{hf["num_hidden_layers"]}.')
  for kind in kinds:
    if kind not in ('full_attention', 'sliding_attention'):
      raise refused('layer_types', kind, 'supported: full_attention, sliding_attention')
  if 'sliding_attention' in kinds and window is None:
    raise refused('sliding_window', None, 'layer_types has sliding layers, which need its size')
  # Only the period is kept: the model is a scan over repeated periods of layers.
  return shortest_period([Causal() if kind == 'full_attention' or window is None
                          else Window(size=window) for kind in kinds])


def one_mask(hf: dict[str, Any], default: int | None) -> Mask:
  """The mask of a family whose layers are all alike: a window where there is a `sliding_window`.

  Args:
    default: the family's window, where config.json has none; None for causal attention.

  Raises:
    ValueError: a window without size, or `layer_types` of another kind.
  """
  window = keys.optional_size(hf, 'sliding_window', default)
  kind = 'full_attention' if window is None else 'sliding_attention'
  kinds = [kind] * size(hf, 'num_hidden_layers')
  # Models with a list of other kinds carry this name, too; transformers would not read it.
  if hf.get('layer_types') not in (None, kinds):
    raise refused('layer_types', hf['layer_types'], 'all layers of this family are alike, '
                  f'here {kind} by sliding_window')
  # All layers are alike, so the shortest period is one layer long.
  mask, = masks(hf, kinds, window)
  return mask


def masks_of_qwen(hf: dict[str, Any]) -> tuple[Mask, ...]:
  """The masks of one period of Qwen2 and Qwen3: a window from one layer on, if there is any.

  Raises:
    ValueError: as `masks`.
  """
  layers, window = size(hf, 'num_hidden_layers'), None
  if keys.flag(hf, 'use_sliding_window', False):
    window = keys.optional_size(hf, 'sliding_window', 4096)
  # The layers before this one see everything; without a window all of them do.
  first = keys.number(hf, 'max_window_layers', 28) if window else layers
  return masks(hf, ['sliding_attention' if i >= first else 'full_attention'
                    for i in range(layers)], window)


def pattern(period: tuple[Mask, ...]) -> tuple[Layer, ...]:
  """The `ModelConfig.pattern` of a period of masks, the first of which is the attention's."""
  return (Layer(),) if len(period) == 1 else tuple(Layer(mask=mask) for mask in period)


def patterned(layers: int, period: tuple[Mask, ...], positions: PositionOf | Sequence[Position],
              ) -> tuple[Mask, Position, tuple[Layer, ...]]:
  """Mask and position of the first layer, and the `ModelConfig.pattern` of one period of layers.

  Args:
    period: of masks.
    positions: of every layer; or what gives them, by whether a layer has a window.
  """
  masks = period * (layers // len(period))
  if callable(positions):
    positions = [positions(isinstance(mask, Window)) for mask in masks]
  both = shortest_period(list(zip(masks, positions, strict=True)))
  mask, position = both[0]
  return mask, position, tuple(Layer(mask=None if m == mask else m,
                                     position=None if p == position else p) for m, p in both)


def positions_by_kind(hf: dict[str, Any], full: float, sliding: float) -> PositionOf:
  """The positions that `rope_parameters` gives for each kind of layer.

  Args:
    full, sliding: the base of each kind, where its parameters have none.

  Raises:
    ValueError: it is not an object for each kind, or `rope_scaling` stands beside it.
  """
  given = hf['rope_parameters']
  kinds = {'full_attention': full, 'sliding_attention': sliding}
  if not isinstance(given, dict) or set(given) != set(kinds) or not all(
      isinstance(each, dict) for each in given.values()):
    raise refused('rope_parameters', given, f'it must hold an object for each of {", ".join(kinds)}')
  keys.only(hf, 'rope_scaling', None, why='rope_parameters holds the scaling')
  of_full, of_sliding = (rope({**hf, 'rope_parameters': given[kind], 'rope_theta': None}, base=base)
                         for kind, base in kinds.items())
  return lambda slides: of_sliding if slides else of_full
