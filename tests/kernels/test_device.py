"""Every variant of the paper in bfloat16: the kernels of this device against the T x T definition.

    JAX_PLATFORMS=cuda,cpu python -m pytest tests/kernels/test_device.py

On a CPU our kernels are interpreted, and a small case shows that the test works.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.kernels.dispatch import unsupported
from tests.attention_checks import with_gradients
from tests.attention_specs import PAPER, random_inputs

# A kernel rounds its weights to bfloat16, and the definition does not. This error is allowed in
# addition to twice the error of the definition with bfloat16 inputs.
TOLERANCE = 0.005
SPECS = PAPER | {'window 300': sj.AttentionSpec(mask=sj.Window(size=300))}
SIZES = list(itertools.product((64, 96, 128), (1024, 1023)))


def cases():
  """Each variant at one of the sizes; with --full at all of them, which takes a GPU minutes."""
  if jax.default_backend() == 'cpu':
    yield 'k bias (Table 4)', 16, 31
    return
  for (n, name), (m, size) in itertools.product(enumerate(SPECS), enumerate(SIZES)):
    yield pytest.param(name, *size, marks=() if n % len(SIZES) == m else pytest.mark.full)


def inputs(spec, head_dim, length):
  """q, k, v and params. Odd lengths have half as many key heads."""
  sizes = dict(batch=2, length=length, heads=4, kv_heads=4 - length % 2 * 2, head_dim=head_dim)
  *qkv, params = random_inputs(spec, **sizes)
  # Parameters, such as an extra key, are small compared with the tokens, as in a model.
  small = jax.tree.map(lambda x: jnp.float32(0.1 * x), params)
  return *(jnp.asarray(x, jnp.bfloat16) for x in qkv), small


def program(spec, implementation):
  """The output and the gradients of all inputs."""
  attend = functools.partial(sj.attend, spec, implementation=implementation)
  return jax.jit(functools.partial(with_gradients, attend))


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
  definition = program(spec, 'reference')
  with jax.default_matmul_precision('highest'):  # otherwise a GPU may round products to TF32
    true = definition(*exact)
    allowed = 2 * errors(definition(*arrays), true) + TOLERANCE
  for implementation in ('pallas', 'mosaic', 'cudnn', 'splash'):
    if not unsupported(implementation, spec, *arrays[:2]):
      run = program(spec, implementation)
      found = run(*arrays)
      assert (errors(found, true) <= allowed).all(), implementation
      if implementation in ('pallas', 'mosaic'):  # libraries may add up in any order
        assert all(map(np.array_equal, *map(jax.tree.leaves, (found, run(*arrays)))))
