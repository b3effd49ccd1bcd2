"""Checks of attention, values and gradients: against the oracle, and against the definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import sink_jax as sj
from tests import attention_oracle as oracle
from tests.attention_specs import attend, random_inputs

# Float32 rounding of sums of 7 to 20 terms of order one, relative to the largest entry.
TOLERANCE = 1e-5


def assert_close(actual, expected, what, operands=0.0):
  # XSA under Window(size=1) takes a difference of equal vectors. The result is only their rounding
  # error. Relative to that, any error is large, so errors are compared with the operands.
  scale = max(np.abs(expected).max(), np.abs(operands).max(), 1e-3)
  error = np.abs(np.asarray(actual, np.float64) - expected).max() / scale
  assert error < TOLERANCE, f'{what}: relative error {error:.2e}'


def check_values(spec, implementations, **sizes):
  """Compares the outputs of each implementation, the maps and the importance with the oracle."""
  inputs = random_inputs(spec, **sizes)
  out, weights, proxy, slot, operands = oracle.attention(spec, *inputs)
  for implementation in implementations:
    assert_close(
      attend(spec, *inputs, implementation=implementation),
      out,
      f'{implementation} {spec}',
      operands,
    )
  q, k, _, params, *_ = inputs
  assert_close(sj.attention_map(spec, q, k, params), weights, f'map {spec}')
  assert_close(sj.attention_map(spec, q, k, params, proxy=True), proxy, f'proxy {spec}')
  assert_importance(
    sj.streaming_importance(spec, q, k, params, entropy=True), weights, proxy, slot, spec
  )


def assert_importance(alpha, weights, proxy, slot, spec):
  # ReLU may give a first token no weight at all, as if it were padding; the lengths say otherwise.
  lengths = np.full(len(weights), weights.shape[-1])
  raw = sj.importance(weights, raw=True, lengths=lengths)
  assert_close(alpha.raw, raw, f'raw importance {spec}')
  assert_close(alpha.normalized, sj.importance(proxy, lengths=lengths), f'importance {spec}')
  if spec.kv_bias.has_extra_key:
    assert_close(alpha.extra_key, slot.mean(-1), f'slot {spec}')
    assert_close(alpha.extra_key_released, (1 + slot.sum(-1)) / (slot.shape[-1] + 1), f'{spec}')
    proxy = np.concatenate([slot[..., None], proxy], -1)
  tokens = np.arange(weights.shape[-1])
  seen = np.asarray(spec.mask.keep(tokens[:, None], tokens)).sum(-1) + spec.kv_bias.has_extra_key
  entropy = -(proxy * np.log(np.maximum(proxy, 1e-300))).sum(-1).mean(-1)
  uniform = np.log(seen).mean()
  assert_close(
    alpha.entropy, entropy / uniform if uniform else np.ones_like(entropy), f'entropy {spec}'
  )


def with_gradients(f, *inputs):
  """f(*inputs), and the gradients of all inputs for a random cotangent, in one program."""

  def run(*inputs):
    out, pull = jax.vjp(f, *inputs)
    normal = np.random.default_rng(9).standard_normal
    # Rounded to bfloat16, so that functions of any dtype get the same numbers.
    draw = lambda x: jnp.asarray(normal(x.shape), jnp.bfloat16).astype(x.dtype)
    return out, pull(jax.tree.map(draw, out))

  return jax.jit(run)(*inputs)


def worst_error(found, expected):
  """The largest error, over the size of its array plus a tenth of the largest one.

  Arrays may vanish, such as gradients of scores if a query sees one key: what is left is rounding.
  """
  arrays = (
    [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)] for tree in (found, expected)
  )
  pairs = list(zip(*arrays, strict=True))
  largest = np.max([abs(y).max() for _, y in pairs])
  # NumPy's maximum, unlike Python's, is NaN if an error is.
  return np.max([abs(x - y).max() / (abs(y).max() + 0.1 * largest) for x, y in pairs])


def error_of(f, spec, *inputs):
  """`worst_error` of an implementation f; the definition reads the same numbers in float32."""
  exact = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), inputs)
  definition = functools.partial(sj.attend, spec, implementation='reference')
  return worst_error(with_gradients(f, *inputs), with_gradients(definition, *exact))


def random_derivative(spec, inputs):
  """(projection of the output, direction of the inputs, derivative by central differences).

  The last entry has two numbers: the derivative, and that of the operands, see `oracle.Attention`.

  If a kink lies within the step (relu, a floor, a clip), the differences over the step and over
  half of it disagree by far more than their errors of about 1e-8. Then another direction is drawn.
  """
  for seed in range(1, 9):
    rng = np.random.default_rng(seed)
    projection = rng.standard_normal(inputs[0].shape)
    direction = jax.tree.map(lambda x: rng.standard_normal(x.shape), inputs)

    def along(step):
      moved = jax.tree.map(lambda x, d: np.asarray(x, np.float64) + step * d, inputs, direction)
      found = oracle.attention(spec, *moved)
      return np.array([(x * projection).sum() for x in (found.out, found.operands)])

    whole, half = ((along(step) - along(-step)) / (2 * step) for step in (1e-6, 5e-7))
    if abs(whole[0] - half[0]) < 1e-5 * abs(whole[0]) + 1e-6:
      return projection, direction, whole
  raise AssertionError(f'{spec}: a kink lies on the inputs themselves; draw others')


def assert_derivative(gradients, direction, expected, what):
  products = jax.tree.leaves(jax.tree.map(lambda g, d: (g * d).sum(), gradients, direction))
  # The error is relative to the sum of the parts, which may cancel, or to the operands of the last
  # difference, see `assert_close`. Differences are accurate to about 1e-8.
  scale = max(sum(abs(float(p)) for p in products), abs(expected[1])) + 1e-3
  error = abs(sum(float(p) for p in products) - expected[0]) / scale
  assert error < 5e-5, f'{what}: relative error {error:.2e}'


def check_gradient(spec, implementation):
  """Compares the directional derivative of a random projection with central differences."""
  inputs = random_inputs(spec, length=5, heads=2)
  projection, direction, expected = random_derivative(spec, inputs)
  loss = lambda *args: jnp.sum(attend(spec, *args, implementation=implementation) * projection)
  gradients = jax.jit(jax.grad(loss, argnums=tuple(range(len(inputs)))))(*inputs)
  assert_derivative(gradients, direction, expected, f'{implementation} {spec}')


def check_at_once(spec, implementation, **sizes):
  """Checks output and gradient in one compiled function, for implementations that compile slowly."""
  inputs = random_inputs(spec, **sizes)
  projection, direction, expected = random_derivative(spec, inputs)
  out, *_, operands = oracle.attention(spec, *inputs)

  @jax.jit
  def run(*inputs):
    loss = lambda *x: (lambda o: (jnp.sum(o * projection), o))(
      attend(spec, *x, implementation=implementation)
    )
    (_, o), gradients = jax.value_and_grad(loss, argnums=tuple(range(len(inputs))), has_aux=True)(
      *inputs
    )
    return o, gradients

  o, gradients = run(*inputs)
  assert_close(o, out, f'{implementation} {spec}', operands)
  assert_derivative(gradients, direction, expected, f'{implementation} {spec}')


PLAIN = ('reference', 'chunked')  # without kernels; they run every spec
