"""Linear layers whose spectral norm is a parameter (sigmaReparam).

Zhai et al. 2023 (arXiv:2303.06296) write the kernel of a layer as gamma W / sigma(W), where
sigma(W) is the largest singular value and gamma a learned scalar that starts at 1: however large
W becomes, scores grow no faster than the gammas do, and attention keeps its entropy. Their
releases (apple/ml-sigma-reparam) do so in every linear layer of a block, for query, key and value
one by one or together, and in the last layer of the model, with one step of the power iteration in
each forward pass of training, from a vector that a buffer keeps; gamma starts at 1 in JAX, and at
sigma(W) in PyTorch. Here it is the layers of the blocks, one by one; gates of heads are no such
layers, and the unembedding stays as it is, since the loss multiplies by its kernel piece by piece.

The vector is a leaf of the parameters, beside its kernel: whatever saves, splits or copies a model
has it. It gets no gradient. Each update of training ends with `after_update`, which goes on with
the power iteration for the new kernels and writes the vectors, normalised, so that decay and the
update rule have no effect on them. A forward pass only reads it, and is the same function in
training, evaluation and decoding. A fixed vector would not do: from a random start it takes
hundreds of steps to reach the singular one, in every forward pass.

An update makes eight steps and not one, which costs no more than eight tokens do. The vector still
lags while another singular value overtakes the largest: sigma was then 1 % too small, and 3 % with
one step, where a model of width 16 learned at a rate of 1e-3 (at 3e-4, 0.1 % and 1 %).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

# The first vector is that of 2**10 steps. The largest singular values of random matrices are half a
# percent apart, so that a hundred steps can leave sigma as much too small.
_SQUARINGS = 10
_STEPS = 8  # after each update
VECTOR = 'singular'  # the name of the leaf


def reparametrised(kernel_IxO: jax.Array, gamma: jax.Array, vector_I: jax.Array) -> jax.Array:
  """gamma W / sigma(W), float32, with gradients for W and gamma."""
  # The derivative of |v W| at a fixed v is that of sigma where v is the left singular vector: how
  # the vector follows W is of second order.
  image_O = _product('i,io->o', jax.lax.stop_gradient(vector_I), kernel_IxO)
  return kernel_IxO * (gamma / jnp.linalg.norm(image_O))


def first_vector(key: jax.Array, kernel_IxO: jax.Array) -> jax.Array:
  """The left singular vector (I,) of the largest singular value, float32.

  key: not used; an initializer of Flax takes one.
  """
  def square(_: jax.Array, power_IxI: jax.Array) -> jax.Array:
    power_IxI = _product('ij,jk->ik', power_IxI, power_IxI)
    return power_IxI / jnp.linalg.norm(power_IxI)

  # (W W^T)^(2^n) tends to v v^T; its largest column has the most of v.
  gram_IxI = _product('io,jo->ij', kernel_IxO, kernel_IxO)
  power_IxI = jax.lax.fori_loop(0, _SQUARINGS, square, gram_IxI / jnp.linalg.norm(gram_IxI))
  vector_I = power_IxI[:, jnp.argmax(jnp.diag(power_IxI))]
  return vector_I / jnp.linalg.norm(vector_I)


def after_update(params: Mapping[Any, Any]) -> Mapping[Any, Any]:
  """The parameters with each vector some steps of the power iteration further, for its kernel."""
  if VECTOR in params:
    step = lambda _, vector_I: _power_step(params['kernel'], vector_I)
    return {**params, VECTOR: jax.lax.fori_loop(0, _STEPS, step, params[VECTOR])}
  return {name: after_update(x) if isinstance(x, Mapping) else x for name, x in params.items()}


def _power_step(kernel_IxO: jax.Array, vector_I: jax.Array) -> jax.Array:
  """W W^T v / |W W^T v|; both may have leading axes, such as that of the layers."""
  image_O = _product('...i,...io->...o', vector_I, kernel_IxO)
  vector_I = _product('...o,...io->...i', image_O, kernel_IxO)
  return vector_I / jnp.linalg.norm(vector_I, axis=-1, keepdims=True)


def _product(subscripts: str, *factors: jax.Array) -> jax.Array:
  # Accelerators round the factors of float32 products by default, and sigma scales the layer.
  return jnp.einsum(subscripts, *factors, precision=jax.lax.Precision.HIGHEST)
