"""Parameters of a model without compiling its initialisation, for tests."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from sink_jax.models.sizes import parameter_shapes


def random_params(config, seed=0):
  """Kernels that keep the size of their inputs, unit embeddings, gains around one."""
  rng = np.random.default_rng(seed)

  def draw(path, leaf):
    x, name = rng.standard_normal(leaf.shape), path[-1].key
    if name.endswith('kernel'):
      x /= math.sqrt(leaf.shape[-2])
    elif name.endswith('gain'):
      x = 1 + 0.3 * x
    return jnp.asarray(x, jnp.float32)

  return jax.tree_util.tree_map_with_path(draw, parameter_shapes(config))
