"""A training loop in plain JAX that knows nothing of sink_jax but its recorder: copies of random tokens."""

import functools

import jax
import jax.numpy as jnp

from sink_jax.analyses.recorder import record_attention, record_hidden
from sink_jax.attention.spec import AttentionSpec

def forward(p, x):  # one layer, two heads
  h = p['embed'][x] + p['position'][:x.shape[1]]
  q, k, v = jnp.einsum('btd,cdhe->cbthe', h, p['qkv'])
  scores = jnp.einsum('bihe,bjhe->bhij', q, k) / q.shape[-1]**0.5
  weights = jax.nn.softmax(jnp.where(jnp.tri(x.shape[1], dtype=bool), scores, -jnp.inf))
  h = h + jnp.einsum('bhij,bjhe,hed->bid', weights, v, p['out'])
  return h @ p['embed'].T, (q, k, h)

def loss(p, x):
  logp = jax.nn.log_softmax(forward(p, x[:, :-1])[0])
  return -jnp.take_along_axis(logp, x[:, 1:, None], -1)[:, x.shape[1] // 2 - 1:].mean()  # of the copy

@functools.partial(jax.jit, static_argnums=(2, 3))
def step(p, key, batch, half):
  x = jnp.tile(jax.random.randint(key, (batch, half), 0, p['embed'].shape[0]), 2)
  return x, jax.tree.map(lambda p, g: p - 0.3 * g, p, jax.grad(loss)(p, x))

@jax.jit
def record(p, x):
  q, k, h = forward(p, x)[1]
  return record_attention(q, k, spec=AttentionSpec(position='Nope()')), record_hidden(h)

def train(steps, every=50, batch=16, half=16, vocabulary=32, width=64):
  shapes = dict(embed=(vocabulary, width), position=(2 * half, width), qkv=(3, width, 2, 32),
                out=(2, 32, width))
  keys = jax.random.split(jax.random.key(0), steps)
  p = {name: 0.1 * jax.random.normal(key, shapes[name]) for name, key in zip(shapes, keys)}
  for i, key in enumerate(keys):
    x, p = step(p, key, batch, half)
    if i % every == 0:
      yield i, p, x, record(p, x)
