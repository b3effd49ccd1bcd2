"""Training losses, in float32.

The logits of a batch are its largest array: 2^20 tokens of 50k ids are 200 GB in float32. The
cross-entropy therefore takes the positions in chunks, and computes the gradients of a chunk
while its logits exist; the backward pass only multiplies them by the cotangent.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sink_jax.attention import soft_cap, soft_cap_slope
from sink_jax.data.batches import Batch
from sink_jax.devices import platform
from sink_jax.kernels.shard import shard_map_batch_heads
from sink_jax.models.config import ModelConfig
from sink_jax.models.layers import apply
from sink_jax.models.transformer import Transformer


def summed_loss(
  config: ModelConfig,
  params: Mapping[str, Any],
  batch: Batch,
  weights_BxT: jax.Array | np.ndarray,
  logits: int | None = None,
) -> jax.Array:
  """Sum over positions of weight times loss, float32.

  The loss of a position is the cross-entropy in nats for integer targets (B, T), and the
  squared error summed over features for float targets (B, T, F).
  logits: see `cross_entropy`.
  """
  model = Transformer(config)
  if not jnp.issubdtype(batch.targets.dtype, jnp.integer):
    outputs_BxTxF = apply(model, params, batch.tokens)
    return jnp.sum((outputs_BxTxF - batch.targets) ** 2 * weights_BxT[..., None])
  h_BxTxD, *_ = apply(model, params, batch.tokens, method='hidden')
  kernel_DxV, bias_V = apply(model, params, method='unembedding')
  if bias_V is not None:  # the bias is one more row of W, rounded like W, with a 1 in h
    h_BxTxD = jnp.concatenate([h_BxTxD, jnp.ones_like(h_BxTxD[..., :1])], -1)
    kernel_DxV = jnp.concatenate([kernel_DxV, bias_V[None]])
  return cross_entropy(h_BxTxD, kernel_DxV, batch.targets, weights_BxT, logits, config.logit_cap)


def training_weights(
  weights_BxT: jax.Array | np.ndarray, config: ModelConfig
) -> jax.Array | np.ndarray:
  """Weights of the positions in the training loss.

  Under a prefix of length p the first p - 1 targets are dropped, so that x_{p+1} is
  the first to be predicted (Section 6). A learned sink token is part of the prefix.
  Validation keeps them, as the official implementation (sail-sg/Attention-Sink) does.
  """
  # The mask counts sink tokens among the prefix; they have no target to drop.
  dropped = (config.attention.mask.prefix or 1) - 1 - config.sink_tokens
  if dropped <= 0:
    return weights_BxT
  return weights_BxT * (jnp.arange(weights_BxT.shape[1]) >= dropped)


# Factors are in the dtype of h, and sums of products in float32, as matrix units have them.
_product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def cross_entropy(
  h_BxTxD: jax.Array,
  kernel_DxV: jax.Array,
  targets_BxT: jax.Array,
  weights_BxT: jax.Array,
  logits: int | None = None,
  cap: float = 0.0,
) -> jax.Array:
  """sum_bt w_bt (logsumexp(h_bt W) - h_bt W[:, target_bt]), without logits of all positions.

  Every device takes its share of the sequences, a few positions of each at a time; the devices of a
  tensor group, which all have h, take a share of its positions each. Differentiable in h and W:
  their gradients are computed along with the loss, so that no logits are computed twice.

  logits: the most at a time on a device; by default 2^28 on a GPU or TPU, else 2^26.
  cap: the logits become cap tanh(h W / cap); 0 for no cap.
  """
  # If no gradient is needed, the compiler drops the gradients that `_forward` computes.
  return _forward(h_BxTxD, kernel_DxV, targets_BxT, weights_BxT, logits, cap)[0]


def _forward(
  h_BxTxD: jax.Array,
  kernel_DxV: jax.Array,
  targets_BxT: jax.Array,
  weights_BxT: jax.Array,
  most_logits: int | None,
  cap: float,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  def share(
    h: jax.Array, targets: jax.Array, weights: jax.Array, kernel: jax.Array
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    (batch, length), vocabulary = targets.shape, kernel.shape[1]
    # Every chunk reads and writes the float32 gradient of the unembedding, so large chunks
    # save traffic where memory is large: 1 GiB of logits on GPUs and TPUs, else 256 MiB.
    most = most_logits or (2**28 if platform() in ('cuda', 'tpu') else 2**26)
    # One position of all local sequences, the smallest chunk, has B V logits.
    count = -(-length // max(1, most // (batch * vocabulary)))
    size = -(-length // count)
    # The axes of the positions of a chunk: on a CPU its products are taken on rows, see `linear`.
    axes, positions = ('n', (batch * size,)) if platform() == 'cpu' else ('bt', (batch, size))

    def split(x: jax.Array) -> jax.Array:
      # Positions of padding have weight 0.
      padding = ((0, 0), (0, count * size - length)) + ((0, 0),) * (x.ndim - 2)
      parts = jnp.pad(x, padding).reshape(batch, count, size, *x.shape[2:])
      return jnp.moveaxis(parts, 1, 0).reshape(count, *positions, *x.shape[2:])

    def chunk(
      sums: tuple[jax.Array, jax.Array],
      inputs: tuple[jax.Array, ...],
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
      h, targets, weights = inputs
      logits = soft_cap(_product(f'{axes}d,dv->{axes}v', h, kernel), cap)
      loss, dlogits = _loss_of_logits(logits, targets, weights, cap)
      dlogits = dlogits.astype(h.dtype)  # for the next two products
      dh = _product(f'{axes}v,dv->{axes}d', dlogits, kernel).astype(h.dtype)
      return (sums[0] + loss, sums[1] + _product(f'{axes}d,{axes}v->dv', h, dlogits)), dh

    zeros = jnp.zeros(()), jnp.zeros(kernel.shape, jnp.float32)
    (loss, dkernel), dh = jax.lax.scan(chunk, zeros, tuple(map(split, (h, targets, weights))))
    dh_CxBxSxD = dh.reshape(count, batch, size, h.shape[2])
    dh = jnp.moveaxis(dh_CxBxSxD, 0, 1).reshape(batch, count * size, h.shape[2])
    return loss, dkernel, dh[:, :length]

  # Here the letter 'h', which is split over 'tensor', stands for the positions.
  loss, dkernel, dh = shard_map_batch_heads(
    'bhd bh bh dv -> . dv bhd',
    share,
    h_BxTxD,
    targets_BxT,
    weights_BxT,
    kernel_DxV.astype(h_BxTxD.dtype),
  )
  return loss, (dh, dkernel.astype(kernel_DxV.dtype))


def _loss_of_logits(
  logits: jax.Array, targets: jax.Array, weights: jax.Array, cap: float
) -> tuple[jax.Array, jax.Array]:
  """The summed loss of capped logits (..., V), and its gradient by the logits before the cap."""
  # -log softmax(logits)[target] = lse - logits[target]; logsumexp subtracts the maximum, so that no
  # exp overflows.
  lse = jax.nn.logsumexp(logits, -1)
  chosen = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
  loss = jnp.sum((lse - chosen) * weights)
  # d loss / d logits = w (softmax - one-hot).
  one_hot = jax.nn.one_hot(targets, logits.shape[-1], dtype=jnp.float32)
  dlogits = (jnp.exp(logits - lse[..., None]) - one_hot) * weights[..., None]
  if cap:
    dlogits *= soft_cap_slope(logits, cap)
  return loss, dlogits


def _backward(
  most_logits: int | None, cap: float, gradients: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, None, None]:
  dh, dkernel = gradients
  # No gradient: targets and weights come from the data.
  return (dh * cotangent).astype(dh.dtype), dkernel * cotangent, None, None


cross_entropy.defvjp(_forward, _backward)
