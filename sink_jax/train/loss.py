"""Training losses, in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sink_jax.attention.mask import Mask, Prefix


def token_losses(outputs, targets):
  """Loss of every position (B, T), float32.

  Cross-entropy in nats for logits (B, T, V) and integer targets (B, T); the squared
  error, summed over features, for float targets (B, T, F).
  """
  outputs = outputs.astype(jnp.float32)
  if jnp.issubdtype(targets.dtype, jnp.integer):
    chosen = jnp.take_along_axis(outputs, targets[..., None], -1)[..., 0]
    return jax.nn.logsumexp(outputs, -1) - chosen
  return jnp.sum((outputs - targets) ** 2, -1)


def training_weights(weights_BxT, mask: Mask):
  """Weights of the positions in the training loss.

  Under a prefix of length p the first p - 1 targets are dropped, so that x_{p+1} is
  the first to be predicted (Section 6). Validation keeps them, as the release does.
  """
  if not isinstance(mask, Prefix):
    return weights_BxT
  return weights_BxT * (jnp.arange(weights_BxT.shape[1]) >= mask.length - 1)
