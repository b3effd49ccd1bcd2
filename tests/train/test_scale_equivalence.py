"""Scaling the normalisation equals scaling W_O or W_V and how they learn (Equations 29 to 42).

Take a model whose rows of attention sum to alpha, and a second model with an output projection (or
value projection) that starts alpha times as large. If only this projection has a different learning
rate, eps and weight decay, both are the same model at every step: W_hat = alpha W.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sink_jax as sj
from sink_jax.data.batches import Batch
from sink_jax.train.loss import summed_loss
from tests.random_params import random_params

STEPS, BATCH, LENGTH = 8, 4, 10
TINY = dict(
  layers=2,
  d_model=16,
  heads=4,
  ffn_hidden=24,
  vocab_size=11,
  dtype='float32',
  implementation='reference',
)  # the fastest to compile
RATE = {'sgd': 0.3, 'adamw': 0.01}
EPS, DECAY = 1e-2, 0.3  # gradients of W_O are 0.02 on average, so eps matters
# A weight of 0.7 rounds by 6e-8 of itself in each of 8 steps, and moves by 0.07 in all. That is an
# error of up to 5e-6 of the movement, and as much again where the gradients round.
LOSS, WEIGHTS = 1e-6, 3e-5


def optimizer(kind, rate, eps, decay):
  if kind == 'sgd':
    return optax.sgd(rate)
  return optax.adamw(rate, b1=0.9, b2=0.95, eps=eps, weight_decay=decay)


@functools.partial(jax.jit, static_argnums=(0, 1))
def trajectory(config, kind, params, own):
  """Losses (steps,) of a training run, and the parameters after it.

  own: learning rate, eps and weight decay of 'out', 'value' and the 'rest'.
  """
  group = lambda path: next((key.key for key in path if key.key in own), 'rest')
  labels = jax.tree_util.tree_map_with_path(lambda path, _: group(path), params)
  groups = optax.multi_transform({name: optimizer(kind, *own[name]) for name in own}, labels)
  tokens = jax.random.randint(jax.random.key(1), (STEPS, BATCH, LENGTH + 1), 0, 11)

  def step(state, tokens):
    params, memory = state
    ones = jnp.ones((BATCH, LENGTH))
    batch = Batch(tokens[:, :-1], tokens[:, 1:], ones)
    loss, grads = jax.value_and_grad(lambda p: summed_loss(config, p, batch, ones) / ones.size)(
      params
    )
    updates, memory = groups.update(grads, memory, params)
    return (optax.apply_updates(params, updates), memory), loss

  (last, _), losses = jax.lax.scan(step, (params, groups.init(params)), tokens)
  return losses, last


def pair(kind, name, alpha, own):
  """Largest differences: of losses, relative; of parameters, relative to how far they moved."""
  spec = lambda scale: sj.AttentionSpec(normalizer=sj.RowSum(scale=scale))
  config, scaled = (sj.ModelConfig(**TINY, attention=spec(s)) for s in (1.0, alpha))
  params = random_params(config)
  attention = params['blocks']['attention']
  larger = params | {
    'blocks': params['blocks']
    | {'attention': attention | {name: {'kernel': alpha * attention[name]['kernel']}}}
  }
  same = dict.fromkeys(('out', 'value', 'rest'), (RATE[kind], EPS, DECAY))
  wanted, last = trajectory(scaled, kind, params, same)
  losses, changed = trajectory(config, kind, larger, same | {name: own})
  assert len(losses) == STEPS and np.ptp(losses) > 0.1  # it trains
  scale = jax.tree.map(jnp.ones_like, params)  # alpha for the projection, one for the rest
  scale['blocks']['attention'][name]['kernel'] *= alpha
  off = jax.tree.map(
    lambda a, start, end, own: float(
      jnp.abs(a - own * end).max() / jnp.abs(own * (end - start)).max()
    ),
    changed,
    params,
    last,
    scale,
  )
  return np.abs(losses / wanted - 1).max(), max(jax.tree.leaves(off))


def equivalent(kind, alpha):
  """The learning rate, eps and weight decay that compensate for alpha."""
  if kind == 'sgd':
    return alpha**2 * RATE[kind], EPS, DECAY
  return alpha * RATE[kind], EPS / alpha, DECAY / alpha


@pytest.mark.parametrize('name, kind, alpha', [('out', 'sgd', 0.2), ('value', 'adamw', 2.0)])
def test_a_scale_is_another_start_and_learning_rate(name, kind, alpha):
  loss, weights = pair(kind, name, alpha, equivalent(kind, alpha))
  assert loss < LOSS and weights < WEIGHTS


@pytest.mark.parametrize('kind, kept', [('sgd', 0), ('adamw', 0), ('adamw', 1), ('adamw', 2)])
@pytest.mark.parametrize('name', ['out', 'value'])
def test_each_part_of_it_is_needed(name, kind, kept):
  # kept: which of learning rate, eps and weight decay stays at the value of the rest.
  own = list(equivalent(kind, 0.2))
  own[kept] = (RATE[kind], EPS, DECAY)[kept]
  loss, weights = pair(kind, name, 0.2, tuple(own))
  assert loss > 10 * LOSS and weights > 10 * WEIGHTS
