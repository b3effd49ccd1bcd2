"""Kernels with a separate spectral norm: gradients, and the singular vector computed at the start.

The layers' outputs are compared in test_transformer.py, and their training in test_step.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sink_jax.models.layers import after_update, reparametrised, singular_vector


def test_gradients_are_those_of_the_spectral_norm():
  rng = np.random.default_rng(0)
  kernel, weights = rng.standard_normal((2, 3, 4))
  vector = np.linalg.svd(kernel)[0][:, 0]
  value = lambda w, gamma: np.sum(weights * gamma * w / np.linalg.norm(w, 2))
  own = lambda w, gamma: jnp.sum(weights * reparametrised(w, gamma, jnp.float32(vector)))
  slopes = jax.jit(jax.grad(own, (0, 1)))
  found, by_gamma = slopes(jnp.float32(kernel), jnp.float32(1.5))
  steps = 1e-6 * np.eye(12).reshape(12, 3, 4)
  expected = [(value(kernel + d, 1.5) - value(kernel - d, 1.5)) / 2e-6 for d in steps]
  np.testing.assert_allclose(np.ravel(found), expected, atol=2e-6)
  np.testing.assert_allclose(by_gamma, value(kernel, 1.0), rtol=1e-6)


@pytest.mark.parametrize('shape', [(96, 256), (256, 96)])
def test_the_vector_is_the_singular_one(shape):
  # Random matrices, such as the initial kernels, have small gaps between singular values.
  kernel = np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)
  vector = np.asarray(jax.jit(singular_vector)(kernel), np.float64)
  assert abs(np.linalg.norm(vector @ kernel) / np.linalg.norm(kernel, 2) - 1) < 2e-4


def test_the_vector_is_that_of_the_new_kernel_when_another_value_overtakes():
  orthogonal = lambda seed: np.linalg.qr(np.random.default_rng(seed).standard_normal((2, 24, 24)))[
    0
  ]
  left, right, update = orthogonal(0), orthogonal(1), jax.jit(after_update)
  for gap in (1e-3, 1e-2, 0.3):
    values = np.r_[1, 1 + gap, np.linspace(0.9, 0.1, 22)]
    kernels = np.float32(np.einsum('lij,j,ljk->lik', left, values, right))
    params = {'layer': {'kernel': kernels, 'singular': np.float32(left[:, :, 0])}}
    vectors = np.asarray(update(params)['layer']['singular'], np.float64)
    found = np.linalg.norm(np.einsum('li,lio->lo', vectors, kernels), axis=-1)
    np.testing.assert_allclose(found, 1 + gap, rtol=3e-4)
