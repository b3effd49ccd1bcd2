"""Linear layers whose spectral norm is a parameter (sigmaReparam).

Zhai et al. 2023 (arXiv:2303.06296) write the kernel of a layer as gamma W / sigma(W), where
sigma(W) is the largest singular value and gamma a learned scalar that starts at 1: scores grow no
faster than the gammas do, and attention keeps its entropy. Their releases (apple/ml-sigma-reparam)
do so in every linear layer of a block and in the last layer of the model, with one step of the power
iteration in each forward pass of training; gamma starts at 1 in JAX, and at sigma(W) in PyTorch.
Here it is the linear layers of the blocks, one by one, without the kernels of heads' gates.

The singular vector is a leaf of the parameters, next to its kernel: whatever saves, splits or
copies a model has it. It gets no gradient. Each update of training ends with `after_update`, which
computes the vectors of the new kernels, so that decay and the update rule have no effect on them,
and does so afresh: a vector that follows by steps of the power iteration lags while another
singular value overtakes the largest. A forward pass only reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

# (W W^T)^(2^n) has the powers 2^(n+1) of the singular values: two have to be as near as 1e-4 for the
# smaller to have a part in the vector. In 300 steps of configs/remedies.py:bigram-sigma-reparam
# sigma was at most 0.005 % too small.
_SQUARINGS = 13
VECTOR = 'singular'  # the name of the leaf


def reparametrised(kernel_IxO: jax.Array, gamma: jax.Array, vector_I: jax.Array) -> jax.Array:
  """gamma W / sigma(W), float32, with gradients for W and gamma."""
  # The derivative of |v W| at a fixed v is that of sigma where v is the left singular vector: how
  # the vector follows W is of second order.
  image_O = _product('i,io->o', jax.lax.stop_gradient(vector_I), kernel_IxO)
  return kernel_IxO * (gamma / jnp.linalg.norm(image_O))


def singular_vector(kernel_IxO: jax.Array) -> jax.Array:
  """The left singular vector (I,) of the largest singular value, float32."""
  if kernel_IxO.shape[0] > kernel_IxO.shape[1]:  # the product of fewer rows is the smaller
    vector_I = _product('io,o->i', kernel_IxO, singular_vector(kernel_IxO.T))
    return vector_I / jnp.linalg.norm(vector_I)

  def square(_: int, power_IxI: jax.Array) -> jax.Array:
    power_IxI = _product('ij,jk->ik', power_IxI, power_IxI)
    return power_IxI / jnp.linalg.norm(power_IxI)

  # (W W^T)^(2^n) tends to v v^T; its largest column has the most of v.
  gram_IxI = _product('io,jo->ij', kernel_IxO, kernel_IxO)
  power_IxI = jax.lax.fori_loop(0, _SQUARINGS, square, gram_IxI / jnp.linalg.norm(gram_IxI))
  vector_I = power_IxI[:, jnp.argmax(jnp.diag(power_IxI))]
  return vector_I / jnp.linalg.norm(vector_I)


def after_update(params: Mapping[Any, Any]) -> Mapping[Any, Any]:
  """The parameters with the singular vectors of their kernels, which may have leading axes."""
  if VECTOR in params:
    vectors = jnp.vectorize(singular_vector, signature='(i,o)->(i)')
    return {**params, VECTOR: vectors(params['kernel'])}
  return {name: after_update(x) if isinstance(x, Mapping) else x for name, x in params.items()}


def _product(subscripts: str, *factors: jax.Array) -> jax.Array:
  # Accelerators round the factors of float32 products by default, and sigma scales the layer.
  return jnp.einsum(subscripts, *factors, precision=jax.lax.Precision.HIGHEST)
