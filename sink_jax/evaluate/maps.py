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


@dataclasses.dataclass(frozen=True)
class HeadMaps:
  """Maps of N layers and H heads between T tokens, mean of `sequences` sequences.

  raw: the attention weights (N, H, T, T), queries then keys. normalized: the proxy
  scores; the same for softmax. has_extra_key: whether there is an extra key or a learned sink
  token, which the maps leave out. blocks: the numbers of the N blocks, from 1.
  """

  raw: Float[np.ndarray, 'N H T T']
  normalized: Float[np.ndarray, 'N H T T']
  sequences: int
  has_extra_key: bool
  blocks: tuple[int, ...]

  @property
  def importance(self) -> Float[np.ndarray, 'N H']:
    """Importance of the first token (N, H), from the normalised maps."""
    return self.normalized[..., 0].mean(-1)

  @property
  def proxy(self) -> bool:
    """Whether the proxy scores differ from the attention weights."""
    return not np.allclose(self.raw, self.normalized, atol=1e-4)

  @property
  def extra_key_weight(self) -> Float[np.ndarray, 'N H'] | None:
    """Mean weight of the extra key or the learned sink token; None without one."""
    # Normalised rows sum to one over all keys, so it is what the tokens leave.
    return 1 - self.normalized.sum(-1).mean(-1) if self.has_extra_key else None

  def head(self, strongest: bool) -> tuple[int, int]:
    """(layer, head), from 0, with the largest or smallest importance of the first token."""
    best = np.argmax if strongest else np.argmin
    layer, head = np.unravel_index(best(self.importance), self.importance.shape)
    return int(layer), int(head)


def head_maps(run: Run, tokens: ModelInputs) -> HeadMaps:
  """Records the model on tokens (S, T) in float32, the first 64 positions of each sequence.

  Raises:
    ValueError: the maps are not finite; names the block and the head.
  """
  tokens = np.asarray(tokens)[:, :_LENGTH]
  # As a probe does by default: bfloat16 would round every weight to two or three digits.
  config = dataclasses.replace(run.config, dtype='float32')
  run = dataclasses.replace(run, config=config)
  # Maps grow with the square of the length, in every head of every block: so many sequences at a
  # time fit the budget, and one at least.
  size = max(1, _BUDGET // (config.layers * config.heads * tokens.shape[1] ** 2))
  total = lambda x: np.asarray(x, np.float64).sum(1)  # over sequences, after the layer axis
  # Sums, not maps, are kept of each batch: all maps of all sequences would not fit.
  # A zero of any shape: that of the maps is known with the first batch.
  raw = normalized = np.zeros(())
  for i in range(0, len(tokens), size):
    layers = run.record(tokens[i:i + size], RecordOptions(maps=True)).layers
    raw = raw + total(layers.maps_BxHxTxT)
    normalized = normalized + total(layers.proxy_maps_BxHxTxT)
  finite = np.isfinite(raw).all((2, 3)) & np.isfinite(normalized).all((2, 3))
  if not finite.all():
    layer, head = np.argwhere(~finite)[0]
    block = config.attention_layers[layer] + 1
    # The axis of layers counts blocks with attention; the message names the block itself.
    raise not_finite(run, f'the attention map of block {block}, head {head + 1}', 'float32')
  return HeadMaps(raw / len(tokens), normalized / len(tokens), len(tokens),
                  config.attention.kv_bias.has_extra_key or config.sink_tokens > 0,
                  tuple(layer + 1 for layer in config.attention_layers))
