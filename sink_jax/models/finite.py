"""Where in a tree of parameters values are not finite."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sink_jax.models.arrays import ParamTree


def first_not_finite(params: ParamTree) -> str | None:
  """The first parameter with a value that is not finite, such as 'embed[5]'; None without one.

  The index is along the first axis, which in the blocks counts layers, from 0. The values stay on
  their devices.
  """
  for path, finite in jax.tree_util.tree_leaves_with_path(jax.device_get(_finite(params))):
    if not finite.all():
      name = '/'.join(str(getattr(key, 'key', key)) for key in path)
      return name + (f'[{finite.argmin()}]' if finite.ndim else '')
  return None


@jax.jit
def _finite(params):
  """Whether each entry along the first axis of each leaf is finite."""
  return jax.tree.map(lambda x: jnp.isfinite(x).all(tuple(range(1, x.ndim))), params)
