"""Parameters of a model without compiling its initialisation, for tests."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from sink_jax.models.sizes import parameter_shapes


def random_params(config, seed=0):
  """Kernels that preserve the size of their inputs, the kernels' singular vectors, and gains around one."""
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
