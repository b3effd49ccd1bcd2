"""Parameters that are no numbers: which, of a tree of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def first_not_finite(params) -> str | None:
  """The first parameter with a value that is not finite, such as 'embed[5]'; None without one.

  The index is along the first axis, which in the blocks counts layers, from 0.
  """
  named = jax.tree_util.tree_leaves_with_path(params)
  finite = np.asarray(_finite([x for _, x in named]))
  if finite.all():
    return None
  path, x = named[finite.argmin()]
  name = '/'.join(str(getattr(key, 'key', key)) for key in path)
  if not x.ndim:
    return name
  return f'{name}[{int(jnp.isfinite(x).all(tuple(range(1, x.ndim))).argmin())}]'


@jax.jit
def _finite(leaves):
  return jnp.stack([jnp.isfinite(x).all() for x in leaves])
