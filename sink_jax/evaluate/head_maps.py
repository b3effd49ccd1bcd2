"""Attention maps of every head, means over sequences."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Float

from sink_jax.evaluate.activations import not_finite
from sink_jax.models.record import Maps, RecordOptions, maps
from sink_jax.models.run import ModelInputs, Run

_LENGTH = 64  # positions of a map, as in the paper's probes; more is hard to read
_BUDGET = 2**24  # elements of maps that are recorded at a time


@dataclasses.dataclass(frozen=True, eq=False)
class HeadMaps:
  """Maps of N layers and H heads between T tokens, mean of `sequences` sequences."""

  raw: Float[np.ndarray, 'N H T T']  # the attention weights, queries then keys
  normalized: Float[np.ndarray, 'N H T T']  # the proxy scores; the same for softmax
  sequences: int
  blocks: tuple[int, ...]  # from 1

  @property
  def importance(self) -> Float[np.ndarray, 'N H']:
    """Importance of the first token, from the normalised maps."""
    return self.normalized[..., 0].mean(-1)

  @property
  def proxy(self) -> bool:
    """True if the proxy scores differ from the attention weights."""
    return not np.allclose(self.raw, self.normalized, atol=1e-4)


def strongest_and_weakest(importance_NxH: np.ndarray) -> list[tuple[int, int]]:
  """(n, h), from 0, of the two heads with the largest importance and the two with the smallest."""
  order = np.argsort(-importance_NxH, axis=None, kind='stable').tolist()
  chosen = dict.fromkeys([*order[:2], *order[-2:]])  # a small model has some of them twice
  return [divmod(i, importance_NxH.shape[1]) for i in chosen]


def head_maps(run: Run, tokens: ModelInputs) -> HeadMaps:
  """Records the model on tokens (S, T) in float32, the first 64 positions of each sequence."""
  tokens = np.asarray(tokens)[:, :_LENGTH]
  # bfloat16 would round every weight to two or three digits.
  config = dataclasses.replace(run.config, dtype='float32')
  run = dataclasses.replace(run, config=config)
  # Maps grow with the square of the length: as many sequences at a time as fit, and one at least.
  size = max(1, _BUDGET // (config.layers * config.heads * tokens.shape[1] ** 2))
  means = np.zeros(())  # of raw and normalised maps: all maps of all sequences would not fit
  for start in range(0, len(tokens), size):
    part = tokens[start : start + size]
    recorded: Maps = run.record(part, RecordOptions(attention=maps)).layers.attention
    sums = [np.asarray(x, np.float64).sum(1) for x in recorded]
    means = means + np.stack(sums) / len(tokens)
  finite_NxH = np.isfinite(means).all((0, 3, 4))
  blocks = tuple(layer + 1 for layer in config.attention_layers)
  if not finite_NxH.all():
    layer, head = np.argwhere(~finite_NxH)[0]
    what = f'the attention map of block {blocks[layer]}, head {head + 1}'
    raise not_finite(run, what, 'float32')
  return HeadMaps(means[0], means[1], len(tokens), blocks)
