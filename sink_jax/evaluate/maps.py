"""Attention maps of every head, averaged over sequences."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Float

from sink_jax.evaluate.finite import not_finite
from sink_jax.models.record import RecordOptions
from sink_jax.models.run import ModelInputs, Run

_LENGTH = 64  # positions, as in the paper's probes; a map of more is hard to read
_BUDGET = 2**24  # elements of one kind of map that are recorded at a time


@dataclasses.dataclass(frozen=True, eq=False)
class HeadMaps:
  """Maps of N layers and H heads between T tokens, mean of `sequences` sequences.

  raw: the attention weights, queries then keys. normalized: the proxy scores; the same for softmax.
  extra_key_weight: mean weight (N, H) of the extra key or the learned sink token, which the maps leave out;
  None without one. blocks: from 1.
  """

  raw: Float[np.ndarray, 'N H T T']
  normalized: Float[np.ndarray, 'N H T T']
  sequences: int
  extra_key_weight: Float[np.ndarray, 'N H'] | None
  blocks: tuple[int, ...]

  @property
  def importance(self) -> Float[np.ndarray, 'N H']:
    """Importance of the first token, from the normalised maps."""
    return self.normalized[..., 0].mean(-1)

  @property
  def proxy(self) -> bool:
    """Whether the proxy scores differ from the attention weights."""
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
  run = dataclasses.replace(run, config=(config := dataclasses.replace(run.config, dtype='float32')))
  # Maps grow with the square of the length: as many sequences at a time as fit, and one at least.
  size = max(1, _BUDGET // (config.layers * config.heads * tokens.shape[1] ** 2))
  sums = np.zeros(())  # of raw and normalised maps: all maps of all sequences would not fit
  for i in range(0, len(tokens), size):
    layers = run.record(tokens[i:i + size], RecordOptions(maps=True)).layers
    sums = sums + np.stack([np.asarray(x, np.float64).sum(1)
                            for x in (layers.maps_BxHxTxT, layers.proxy_maps_BxHxTxT)])
  if not (finite := np.isfinite(sums).all((0, 3, 4))).all():
    layer, head = np.argwhere(~finite)[0]
    block = config.attention_layers[layer] + 1
    raise not_finite(run, f'the attention map of block {block}, head {head + 1}', 'float32')
  raw, normalized = sums / len(tokens)
  # Normalised rows sum to one over all keys, so the extra key has what the tokens leave.
  extra_key = config.attention.kv_bias.has_extra_key or config.sink_tokens > 0
  weight = 1 - normalized.sum(-1).mean(-1) if extra_key else None
  return HeadMaps(raw, normalized, len(tokens), weight, tuple(n + 1 for n in config.attention_layers))
