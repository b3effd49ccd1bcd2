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
  vector = jnp.float32(np.linalg.svd(kernel)[0][:, 0])

  def own(kernel, gamma):
    return jnp.sum(weights * reparametrised(kernel, gamma, vector))

  def plain(kernel, gamma):
    return gamma * np.sum(weights * kernel) / np.linalg.norm(kernel, 2)

  slopes = jax.jit(jax.grad(own, (0, 1)))
  found, by_gamma = slopes(jnp.float32(kernel), jnp.float32(1.5))
  expected = []
  for step in 1e-6 * np.eye(12).reshape(12, 3, 4):
    difference = plain(kernel + step, 1.5) - plain(kernel - step, 1.5)
    expected.append(difference / 2e-6)
  np.testing.assert_allclose(np.ravel(found), expected, atol=2e-6)
  np.testing.assert_allclose(by_gamma, plain(kernel, 1.0), rtol=1e-6)


@pytest.mark.parametrize('shape', [(96, 256), (256, 96)])
def test_the_vector_is_the_singular_one(shape):
  # Random matrices, such as the initial kernels, have small gaps between singular values.
  rng = np.random.default_rng(0)
  kernel = rng.uniform(-1, 1, shape).astype(np.float32)
  vector = np.asarray(jax.jit(singular_vector)(kernel), np.float64)
  ratio = np.linalg.norm(vector @ kernel) / np.linalg.norm(kernel, 2)
  assert abs(ratio - 1) < 2e-4


def test_the_vector_is_that_of_the_new_kernel_when_another_value_overtakes():
  rng, update = np.random.default_rng(0), jax.jit(after_update)
  left, _ = np.linalg.qr(rng.standard_normal((2, 24, 24)))
  right, _ = np.linalg.qr(rng.standard_normal((2, 24, 24)))
  for gap in (1e-3, 1e-2, 0.3):
    values = np.r_[1, 1 + gap, np.linspace(0.9, 0.1, 22)]
    kernels = np.float32(left * values @ right)
    params = {'layer': {'kernel': kernels, 'singular': np.float32(left[:, :, 0])}}
    vectors = np.asarray(update(params)['layer']['singular'], np.float64)
    found = np.linalg.norm(vectors[:, None] @ kernels, axis=-1)[:, 0]
    np.testing.assert_allclose(found, 1 + gap, rtol=3e-4)
