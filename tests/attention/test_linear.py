"""The product of a linear layer: on rows on a CPU, as einsum elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sink_jax.attention import linear

# Inputs and the kernel are exact in every dtype. Sums are float32 or the dtype's, and gradients are
# rounded to the dtype once: half a unit in the last place, and float32's own rounding.
ROUNDING = {'float32': 2e-6, 'bfloat16': 2**-8, 'float16': 2**-11}
CASES = [
  ((6,), 'float32'),
  ((2, 3, 4, 6), 'float32'),
  ((0, 6), 'float32'),
  ((5, 6), 'bfloat16'),
  ((5, 6), 'float16'),
]


@pytest.mark.parametrize('platform', ['cpu', 'tpu'])
@pytest.mark.parametrize('shape, dtype', CASES)
def test_product_and_gradients_equal_float64(monkeypatch, platform, shape, dtype):
  monkeypatch.setattr('sink_jax.attention.platform', lambda: platform)
  random = np.random.default_rng(0)
  draw = lambda *shape: random.integers(-4, 5, shape) / 4
  x, kernel = draw(*shape), draw(6, 3)
  cotangent = draw(*shape[:-1], 3)
  given = [jnp.asarray(array, dtype) for array in (x, kernel)]
  out, pull = jax.vjp(lambda *arrays: linear(*arrays, jnp.float32), *given)
  dx, dkernel = pull(jnp.asarray(cotangent, jnp.float32))
  for ours, right in (
    (out, x @ kernel),
    (dx, cotangent @ kernel.T),
    (dkernel, x.reshape(-1, 6).T @ cotangent.reshape(-1, 3)),
  ):
    assert ours.shape == right.shape
    found = np.asarray(ours, np.float64)
    np.testing.assert_allclose(found, right, rtol=ROUNDING[dtype], atol=1e-7)
  assert out.dtype == jnp.float32
  assert dx.dtype == dkernel.dtype == linear(*given).dtype == dtype
