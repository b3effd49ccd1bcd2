"""Every variant of the paper in bfloat16: the kernels of this device against the T x T definition.

    JAX_PLATFORMS=cuda,cpu python -m pytest tests/kernels/test_device.py

On a CPU our kernels are interpreted, and a few small cases show that the test works.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.kernels.dispatch import unsupported
from tests.attention_specs import PAPER, random_inputs

ON_CPU = jax.default_backend() == 'cpu'
# A kernel rounds its weights to bfloat16, and the definition does not. This error is allowed in
# addition to twice the error of the definition with bfloat16 inputs.
TOLERANCE = 0.005
SPECS = PAPER | {'window 300': sj.AttentionSpec(mask=sj.Window(size=300))}
SIZES = [(16, 32), (16, 31)] if ON_CPU else list(itertools.product((64, 96, 128), (1024, 1023)))
SMALL = [
  'softmax',
  'normalized sigmoid (Table 15)',
  'k bias (Table 4)',
  'normalized identity (Table 15)',
]


def cases():
  """Each variant at one of the sizes, or at all of them with --full."""
  for (n, name), (m, size) in itertools.product(enumerate(SPECS), enumerate(SIZES)):
    few = name in SMALL if ON_CPU else True
    yield pytest.param(name, *size, marks=() if few and n % len(SIZES) == m else pytest.mark.full)


def inputs(spec, head_dim, length):
  """q, k, v, params and a cotangent. Odd lengths have half as many key heads."""
  q, k, v, params = random_inputs(
    spec, batch=2, length=length, heads=4, kv_heads=4 - length % 2 * 2, head_dim=head_dim
  )
  do = np.random.default_rng(1).standard_normal(q.shape)
  low = lambda *arrays: [jnp.asarray(x, jnp.bfloat16) for x in arrays]
  # Parameters, such as an extra key, are small compared with the tokens, as in a model.
  return *low(q, k, v), jax.tree.map(lambda x: jnp.float32(0.1 * x), params), *low(do)


def with_gradients(spec, implementation, arrays):
  @jax.jit
  def f(*arrays):
    *arrays, do = arrays
    out, pull = jax.vjp(lambda *x: sj.attend(spec, *x, implementation=implementation), *arrays)
    return out, pull(do.astype(out.dtype))

  return f(*arrays)


def errors(computed, true):
  """|computed - true| / |true| of the output and every gradient; of a zero gradient its norm."""

  def error(x, y):
    x, y = (np.asarray(a, np.float64) for a in (x, y))
    return np.linalg.norm(x - y) / (np.linalg.norm(y) or 1.0)

  pairs = zip(*map(jax.tree.leaves, (computed, true)), strict=True)
  return np.array([error(*pair) for pair in pairs])


@pytest.mark.parametrize('name, head_dim, length', list(cases()))
def test_values_and_gradients(name, head_dim, length):
  spec = SPECS[name]
  arrays = inputs(spec, head_dim, length)
  # The kernel gets the same rounded numbers, so that rounding the inputs does not count as an
  # error.
  exact = jax.tree.map(lambda x: x.astype(jnp.float32), arrays)
  with jax.default_matmul_precision('highest'):  # otherwise a GPU may round products to TF32
    true = with_gradients(spec, 'reference', exact)
    allowed = 2 * errors(with_gradients(spec, 'reference', arrays), true) + TOLERANCE
  for implementation in ('pallas', 'mosaic', 'cudnn', 'splash'):
    if not unsupported(implementation, spec, *arrays[:2]):
      found = with_gradients(spec, implementation, arrays)
      assert (errors(found, true) <= allowed).all(), implementation
      if implementation in ('pallas', 'mosaic'):  # libraries may add up in any order
        again = with_gradients(spec, implementation, arrays)
        assert all(map(np.array_equal, *map(jax.tree.leaves, (found, again))))
