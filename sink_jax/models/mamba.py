"""The Mamba mixer (Gu and Dao 2023), as in Jamba."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from sink_jax.models.config import Mamba, ModelConfig
from sink_jax.models.decode import MambaCache
from sink_jax.models.layers import Linear, Norm, Weights


class MambaMixer(nn.Module):
  """A selective state space model in place of attention.

  state_t = exp(dt_t A) state_{t-1} + dt_t B_t x_t and y_t = C_t state_t + D x_t per channel,
  with dt, B and C made from x_t. The recurrence runs token after token, in float32.

  I counts inner channels, S the states of a channel, K the taps of the convolution.
  """

  config: ModelConfig
  sizes: Mamba

  @nn.compact
  def __call__(self, x_BxTxD: jax.Array, cache: MambaCache | None = None,
               ) -> tuple[jax.Array, MambaCache | None]:
    """The output (B, T, D), and the cache after these tokens, which continue its texts, if any."""
    config, sizes = self.config, self.sizes
    batch, length, _ = x_BxTxD.shape
    linear = lambda features, name, group: Linear(features, config, group=group, name=name)
    x, gate = jnp.split(linear(2 * sizes.inner, 'in', 'mamba')(x_BxTxD), 2, -1)

    # The last tap is for the token itself.
    taps_KxI, bias_I = Weights((sizes.conv, sizes.inner), config, name='conv')()
    before = (jnp.zeros((batch, sizes.conv - 1, sizes.inner), x.dtype) if cache is None
              else cache.inputs_BxKxI.astype(x.dtype))
    # The K - 1 inputs before these tokens, or zeros, make the convolution causal.
    inputs = jnp.concatenate([before, x], 1)
    x = sum((inputs[:, i:i + length] * taps_KxI[i].astype(x.dtype) for i in range(sizes.conv)),
            start=jnp.zeros((), x.dtype))
    x_BxTxI = jax.nn.silu(x + bias_I.astype(x.dtype))

    parts = jnp.split(linear(sizes.rank + 2 * sizes.state, 'x', '')(x_BxTxI),
                      (sizes.rank, sizes.rank + sizes.state), -1)
    # These norms are Jamba's addition: Mamba itself has none.
    dt, b_BxTxS, c_BxTxS = (Norm(config, name=f'{name}_norm')(part)
                            for name, part in zip(('dt', 'b', 'c'), parts))
    dt_BxTxI = jax.nn.softplus(Linear(sizes.inner, config, group='dt', name='dt')(dt).astype(
        jnp.float32))
    a_log = self.param('a_log', _log_integers, (sizes.inner, sizes.state), jnp.float32)
    d_I = self.param('d', nn.initializers.ones, (sizes.inner,), jnp.float32)
    # The parameter is log(-A), so that A stays negative in training and every state decays.
    a_IxS = -jnp.exp(a_log.astype(jnp.float32))

    def step(state_BxIxS, token):
      x_BxI, dt_BxI, b_BxS, c_BxS = token
      drive = (dt_BxI * x_BxI)[..., None] * b_BxS[:, None, :]
      state = jnp.exp(dt_BxI[..., None] * a_IxS) * state_BxIxS + drive
      return state, jnp.einsum('bis,bs->bi', state, c_BxS)

    # `jax.lax.scan` runs over the first axis, so time goes there. The state is summed in float32:
    # its decays are close to one, and bfloat16 would round them.
    tokens = [jnp.swapaxes(z.astype(jnp.float32), 0, 1)
              for z in (x_BxTxI, dt_BxTxI, b_BxTxS, c_BxTxS)]
    state = (jnp.zeros((batch, sizes.inner, sizes.state)) if cache is None
             else cache.state_BxIxS)
    state, y_TxBxI = jax.lax.scan(step, state, tuple(tokens))
    y = jnp.swapaxes(y_TxBxI, 0, 1) + d_I.astype(jnp.float32) * x_BxTxI.astype(jnp.float32)
    y = y * jax.nn.silu(gate.astype(jnp.float32))
    out = linear(config.d_model, 'out', 'mamba')(y.astype(gate.dtype))
    if cache is None:
      return out, None
    # Of the K - 1 + T inputs, the last K - 1 are those that the next token's convolution reads.
    return out, MambaCache(inputs[:, length:], state)


def _log_integers(key: jax.Array, shape: tuple[int, int], dtype: DTypeLike) -> jax.Array:
  """An initializer: log(1), log(2), ... log(S) in every channel, whatever the key."""
  return jnp.broadcast_to(jnp.log(jnp.arange(1, shape[1] + 1, dtype=dtype)), shape)
