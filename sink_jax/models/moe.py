"""Mixtures of feed-forward networks (Jamba, gpt-oss)."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from sink_jax.models.config import Experts, ModelConfig
from sink_jax.models.layers import Linear, Weights, activate


class MixtureOfExperts(nn.Module):
  """The sum over the active experts e of weight_e FFN_e(x), with weights from a softmax router.

  All X experts run on all tokens, one after the other, and those that are not active get a weight of
  zero: exact, in the memory of one expert and the time of all, for evaluation.
  """

  config: ModelConfig
  experts: Experts

  @nn.compact
  def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
    config, experts = self.config, self.experts
    logits_BxTxX = Linear(experts.count, config, group='ffn', out_dtype=jnp.float32,
                          name='router')(x_BxTxD)
    top, active = jax.lax.top_k(logits_BxTxX, experts.active)
    if experts.renormalize:
      top = jax.nn.softmax(top, -1)
    else:
      # These do not sum to one: the shares of the experts that are not active are lost.
      top = jnp.take_along_axis(jax.nn.softmax(logits_BxTxX, -1), active, -1)
    # (B, T, active, X) summed over the active ones: a weight for each of the X experts.
    weights_BxTxX = jnp.sum(jax.nn.one_hot(active, experts.count) * top[..., None], -2)

    gated = config.ffn.endswith('glu')
    width, hidden = config.d_model, config.ffn_hidden
    sizes = {'w1': (width, hidden), 'w_out': (hidden, width)}
    if gated:
      sizes['w2'] = sizes['w1']
    weights = {name: Weights((experts.count, *size), config, 'ffn' in config.biases, name=name)()
               for name, size in sizes.items()}

    def add(total, expert):
      w, weight_BxT = expert
      linear = lambda name, x: x @ w[name][0].astype(x.dtype) + w[name][1].astype(x.dtype)
      h = activate(config.ffn, linear('w1', x_BxTxD), linear('w2', x_BxTxD) if gated else None)
      out = linear('w_out', h).astype(jnp.float32)
      return total + weight_BxT[..., None] * out, None

    # The scan takes one expert's matrices and weights at a time, and adds up in float32.
    total = jnp.zeros(x_BxTxD.shape, jnp.float32)
    total, _ = jax.lax.scan(add, total, (weights, jnp.moveaxis(weights_BxTxX, -1, 0)))
    return total.astype(x_BxTxD.dtype)
