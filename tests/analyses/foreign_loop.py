"""A plain-JAX training loop that uses only the recorder: one layer, two heads, copies of random tokens."""

import jax
import jax.numpy as jnp

import sink_jax as sj
from sink_jax.analyses.recorder import record_attention, record_hidden


def forward(p, x):
  h = p['embed'][x] + p['position'][: x.shape[1]]
  q, k, v = jnp.einsum('btd,cdhe->cbthe', h, p['qkv'])
  scores = jnp.einsum('bihe,bjhe->bhij', q, k) / q.shape[-1] ** 0.5
  weights = jax.nn.softmax(jnp.where(jnp.tri(x.shape[1], dtype=bool), scores, -jnp.inf))
  h = h + jnp.einsum('bhij,bjhe,hed->bid', weights, v, p['out'])
  return h @ p['embed'].T, (q, k, h)


def loss(p, x):  # only the copied half counts
  logp = jax.nn.log_softmax(forward(p, x[:, :-1])[0])
  return -jnp.take_along_axis(logp, x[:, 1:, None], -1)[:, x.shape[1] // 2 - 1 :].mean()


step = jax.jit(lambda p, x: jax.tree.map(lambda w, g: w - 0.3 * g, p, jax.grad(loss)(p, x)))


@jax.jit
def record(p, x):
  q, k, h = forward(p, x)[1]
  return record_attention(q, k, spec=sj.AttentionSpec(position=sj.Nope())), record_hidden(h)


def train(steps, every=50, batch=16, half=16, width=64):
  shapes = dict(
    embed=(32, width), position=(2 * half, width), qkv=(3, width, 2, 32), out=(2, 32, width)
  )
  p = {
    name: 0.1 * jax.random.normal(jax.random.key(n), shapes[name]) for n, name in enumerate(shapes)
  }
  for i in range(steps):
    x = jnp.tile(jax.random.randint(jax.random.key(100 + i), (batch, half), 0, 32), 2)
    p = step(p, x)
    if i % every == 0:
      yield i, p, x, record(p, x[:4])
