"""The masks of a model's layers, as config.json writes them: which layers see a window only."""

from __future__ import annotations

from typing import Any

from sink_jax.attention.mask import Causal, Mask, Window
from sink_jax.pretrained.keys import refused, size
from sink_jax.pretrained.stored_tensors import shortest_period


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
