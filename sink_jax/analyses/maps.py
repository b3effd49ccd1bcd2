"""Attention maps of single heads."""

from __future__ import annotations

from functools import partial

import numpy as np

from sink_jax.analyses.models import Model
from sink_jax.analyses.pictures import Row, heat_maps
from sink_jax.analyses.runner import Heads, analysis, chosen_heads
from sink_jax.evaluate.plots import head_maps

_DIGITS = 4  # decimals of a map's numbers in a file
_HEADS = 12  # of a picture


@analysis('Figures 25, 26', partial(heat_maps, columns=('map', 'raw_map'), title='{averaged}'), sequences=10)
def maps(model: Model, *, heads: Heads = ()) -> list[Row]:
  """Attention maps of four heads, means over sequences; --sequences=1 shows one.

  A map has at most 64 tokens, in float32. Its rows sum to one; where attention itself has other rows,
  raw_map holds the weights that multiply the values.
  """
  found = head_maps(model.run, model.inputs().tokens)
  chosen = chosen_heads(model, found.importance, heads)
  if len(chosen) > _HEADS:
    raise ValueError(f'--heads: {len(chosen)} heads; a picture holds {_HEADS}.')
  rounded = lambda map_TxT: np.round(map_TxT, _DIGITS).tolist()
  return [{'block': model.blocks[n], 'head': h + 1, 'importance': float(found.importance[n, h]),
           'averaged': averaged(found.sequences), 'map': rounded(found.normalized[n, h]),
           **({'raw_map': rounded(found.raw[n, h])} if found.proxy else {})} for n, h in chosen]


def averaged(sequences: int) -> str:
  """What maps of sequences are, in words."""
  return 'one sequence' if sequences == 1 else f'mean of {sequences} sequences'
