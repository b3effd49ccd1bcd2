"""The loss of a model that is trained towards the logits of another one beside its targets.

    sum_bt w_bt (-log p(target_bt) + weight KL(p_source || p)),   p = softmax(h_bt W)

The divergence is that of knowledge distillation (Hinton et al. 2015, arXiv:1503.02531) at
temperature 1: in the direction of the source's distribution, whose gradient with respect to the
logits is p - p_source. As in `loss`, the positions are gone through in chunks and the gradients of
a chunk computed while its logits are there, of both models together here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sink_jax.attention.param import soft_cap
from sink_jax.data.batches import Batch
from sink_jax.kernels.dispatch import platform
from sink_jax.kernels.shard import shard_map_batch_heads
from sink_jax.models.config import ModelConfig
from sink_jax.models.layers import apply
from sink_jax.models.transformer import Transformer
from sink_jax.train.loss import (
  below_cap,
  chunk_loss,
  default_logits,
  over_chunks,
  positions_at_a_time,
  with_unembedding,
)


@dataclasses.dataclass(frozen=True)
class Distillation:
  """What a loss takes of another model.

  weight: of the divergence, in the objective. model: the source, as its logits are computed.
  """

  weight: float
  model: ModelConfig


def distilled_loss(config: ModelConfig, params: Mapping[str, Any], distillation: Distillation,
                   source: Mapping[str, Any], batch: Batch, weights_BxT: jax.Array | np.ndarray,
                   logits: int | None = None) -> tuple[jax.Array, dict[str, jax.Array]]:
  """(objective, {'loss': cross-entropy, 'kl': divergence}), weighted sums over positions, float32.

  The objective is the cross-entropy plus `weight` times the divergence, and the one of the three
  that has a gradient, with respect to the parameters of `config` alone.

  Args:
    source: the parameters of the other model.
    logits: see `loss.cross_entropy`; those of both models count.
  """
  def unembedded(model: ModelConfig, values: Mapping[str, Any]) -> tuple[jax.Array, jax.Array]:
    h = apply(Transformer(model), values, batch.tokens, unembed=False)
    return with_unembedding(model, values, h)

  results: Any = distilled_cross_entropy(  # custom_vjp forgets their type
      *unembedded(config, params),
      *map(jax.lax.stop_gradient, unembedded(distillation.model, source)),
      batch.targets, weights_BxT, distillation.weight, logits,
      (config.logit_cap, distillation.model.logit_cap))
  objective, loss, kl = results
  return objective, jax.lax.stop_gradient({'loss': loss, 'kl': kl})


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8))
def distilled_cross_entropy(
    h_BxTxD: jax.Array, kernel_DxV: jax.Array, source_BxTxE: jax.Array,
    source_kernel_ExV: jax.Array, targets_BxT: jax.Array, weights_BxT: jax.Array, weight: float,
    logits: int | None = None, caps: tuple[float, float] = (0.0, 0.0),
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
  """(objective, cross-entropy, divergence), see the head of this file.

  caps: of the logits of the model and of the source, see `loss.cross_entropy`.
  Only the first is differentiable, in h and W: cotangents of the others are ignored.
  """
  return _forward(h_BxTxD, kernel_DxV, source_BxTxE, source_kernel_ExV, targets_BxT, weights_BxT,
                  weight, logits, caps)[0]


def _forward(h_BxTxD: jax.Array, kernel_DxV: jax.Array, source_BxTxE: jax.Array,
             source_kernel_ExV: jax.Array, targets_BxT: jax.Array, weights_BxT: jax.Array,
             weight: float, logits: int | None, caps: tuple[float, float],
             ) -> tuple[tuple[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
  product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

  def share(h: jax.Array, source: jax.Array, targets: jax.Array, weights: jax.Array,
            kernel: jax.Array, source_kernel: jax.Array) -> tuple[jax.Array, ...]:
    def chunk(h: jax.Array, source: jax.Array, targets: jax.Array, weights: jax.Array,
              ) -> tuple[tuple[jax.Array, jax.Array, jax.Array], jax.Array]:
      loss, capped, lse = chunk_loss(h, targets, weights, kernel, caps[0])
      own = capped - lse[..., None]  # log p
      other = jax.nn.log_softmax(soft_cap(product('bte,ev->btv', source, source_kernel), caps[1]))
      p, p_source = jnp.exp(own), jnp.exp(other)
      kl = jnp.sum(jnp.sum(p_source * (other - own), -1) * weights)
      # d objective / d logits = w (p - one-hot + weight (p - p_source)), in the dtype of h for the
      # two products after it.
      chosen = jax.nn.one_hot(targets, own.shape[-1], dtype=jnp.float32)
      dlogits = (p - chosen + weight * (p - p_source)) * weights[..., None]
      dlogits = below_cap(dlogits, capped, caps[0]).astype(h.dtype)
      dh = product('btv,dv->btd', dlogits, kernel).astype(h.dtype)
      return (loss, kl, product('btd,btv->dv', h, dlogits)), dh

    # Logits of two models are there at once.
    most = max(1, (logits or default_logits(platform())) // 2)
    (loss, kl, dkernel), dh = over_chunks(chunk, positions_at_a_time(most, h, kernel), h, source,
                                          targets, weights)
    return loss, kl, dkernel, dh

  loss, kl, dkernel, dh = shard_map_batch_heads(
      'bhd bhe bh bh dv ev -> . . dv bhd', share, h_BxTxD, source_BxTxE, targets_BxT, weights_BxT,
      kernel_DxV.astype(h_BxTxD.dtype), source_kernel_ExV.astype(source_BxTxE.dtype))
  return (loss + weight * kl, loss, kl), (dh, dkernel)


def _backward(weight: float, logits: int | None, caps: tuple[float, float],
              gradients: tuple[jax.Array, jax.Array],
              cotangents: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[Any, ...]:
  (dh, dkernel), cotangent = gradients, cotangents[0]
  # None: the source is not trained, and targets and weights come from the data.
  return (dh * cotangent).astype(dh.dtype), dkernel * cotangent, None, None, None, None


distilled_cross_entropy.defvjp(_forward, _backward)
