"""Small models with random parameters, which need no compiled initialisation, for tests."""

import math

import jax
import jax.numpy as jnp
import numpy as np

import sink_jax as sj
from sink_jax.models.sizes import parameter_shapes

TINY = dict(layers=2, d_model=16, heads=4, ffn_hidden=24, vocab_size=32, dtype='float32')


def tiny_config(**options):
  """`ModelConfig` of two small blocks, with other options."""
  return sj.ModelConfig(**TINY | options)


def tiny(**options):
  """A model with the config `tiny_config(**options)` and random parameters."""
  config = tiny_config(**options)
  return sj.Run(config, random_params(config))


def random_params(config, seed=0):
  """Kernels that preserve the size of their inputs, with their singular vectors; gains near one."""
  rng = np.random.default_rng(seed)

  def draw(path, leaf):
    x, name = rng.standard_normal(leaf.shape), path[-1].key
    if name.endswith('kernel') or name.startswith('feature_map'):  # matrices
      x /= math.sqrt(leaf.shape[-2])
    elif name.endswith('gain'):
      x = 1 + 0.3 * x
    return jnp.asarray(x, jnp.float32)

  return _with_vectors(jax.tree_util.tree_map_with_path(draw, parameter_shapes(config)))


def _with_vectors(params):
  if not isinstance(params, dict):
    return params
  if 'singular' in params:
    return params | {'singular': jnp.asarray(np.linalg.svd(params['kernel'])[0][..., 0])}
  return {name: _with_vectors(x) for name, x in params.items()}


def random_tokens(batch=2, length=9, vocab_size=TINY['vocab_size']):
  return np.random.default_rng(1).integers(0, vocab_size, (batch, length))


def next_token_losses(logits, tokens):
  """Losses (S, T - 1) in nats of tokens 2 to T, from logits (S, T or T - 1, V), in float64."""
  logits = np.asarray(logits, np.float64)[:, : tokens.shape[1] - 1]
  chosen = np.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
  largest = logits.max(-1)
  return largest + np.log(np.exp(logits - largest[..., None]).sum(-1)) - chosen
