"""A training loop in plain JAX that uses only the recorder: one layer learns to copy tokens."""

import jax
import jax.numpy as jnp

import sink_jax as sj
from sink_jax.analyses.recorder import record_attention, record_hidden

HALF = 16  # tokens, which are copied
SPEC = sj.AttentionSpec(position=sj.Nope())


def init(width=64):
  shapes = {
    'embed': (32, width),
    'position': (2 * HALF, width),
    'qkv': (3, width, 2, 32),
    'out': (2, 32, width),
  }
  draw = lambda n, shape: 0.1 * jax.random.normal(jax.random.key(n), shape)
  return {name: draw(n, shape) for n, (name, shape) in enumerate(shapes.items())}


def forward(p, x):
  h = p['embed'][x] + p['position'][: x.shape[1]]
  q, k, v = jnp.einsum('btd,cdhe->cbthe', h, p['qkv'])
  scores = jnp.einsum('bihe,bjhe->bhij', q, k) / q.shape[-1] ** 0.5
  causal = jnp.tri(x.shape[1], dtype=bool)
  weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
  o = jnp.einsum('bhij,bjhd->bihd', weights, v)
  h = h + jnp.einsum('bihe,hed->bid', o, p['out'])
  return h @ p['embed'].T, (q, k, h)


def loss(p, x):
  logits, _ = forward(p, x[:, :-1])
  logp = jax.nn.log_softmax(logits)
  chosen = jnp.take_along_axis(logp, x[:, 1:, None], -1)
  return -chosen[:, HALF - 1 :].mean()  # only of the copy


@jax.jit
def step(p, x):
  gradients = jax.grad(loss)(p, x)
  return jax.tree.map(lambda w, g: w - 0.3 * g, p, gradients)


@jax.jit
def record(p, x):
  _, (q, k, h) = forward(p, x)
  return record_attention(q, k, spec=SPEC), record_hidden(h)


def train(steps, every=50, batch=16):
  """Yields (step, parameters, tokens, what was recorded) at every 50th step."""
  p = init()
  for i in range(steps):
    half = jax.random.randint(jax.random.key(100 + i), (batch, HALF), 0, 32)
    x = jnp.tile(half, 2)
    p = step(p, x)
    if i % every == 0:
      yield i, p, x, record(p, x[:4])
