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
SIZES = dict(batch=2, heads=4, kv_heads=2)


def assert_close(actual, expected, what, operands=0.0):
  # XSA under Window(size=1) takes a difference of equal vectors. The result is only their rounding
  # error. Relative to that, any error is large, so errors are compared with the operands.
  scale = max(np.abs(expected).max(), np.abs(operands).max(), 1e-3)
  difference = np.asarray(actual, np.float64) - expected
  error = np.abs(difference).max() / scale
  assert error < TOLERANCE, f'{what}: relative error {error:.2e}'


def check_values(spec, **sizes):
  """The definition's output and maps against the oracle; not compiled, as every spec differs."""
  inputs = q, k, _, params, *_ = random_inputs(spec, **sizes)
  expected = oracle.attention(spec, *inputs)
  out = attend(spec, *inputs, implementation='reference')
  assert_close(out, expected.out, spec, expected.operands)
  for proxy, what in ((False, 'weights'), (True, 'proxy')):
    found = sj.attention_map(spec, q, k, params, proxy=proxy)
    assert_close(found, getattr(expected, what), f'{what} {spec}')


def check_gradient(spec, implementation, importance=False, **sizes):
  """Output and gradient of an implementation against the oracle, and the importance of keys."""
  inputs = random_inputs(spec, **sizes)
  expected = oracle.attention(spec, *inputs)
  projection, direction, derivative = random_derivative(spec, inputs)

  @jax.jit
  def found(*inputs):
    f = functools.partial(attend, spec, implementation=implementation)
    out, pull = jax.vjp(f, *inputs)
    gradients = pull(jnp.asarray(projection, out.dtype))
    if not importance:
      return out, gradients, None
    q, k, _, params, *_ = inputs
    return out, gradients, sj.streaming_importance(spec, q, k, params, entropy=True)

  out, gradients, measured = found(*inputs)
  assert_close(out, expected.out, f'{implementation} {spec}', expected.operands)
  assert_derivative(gradients, direction, derivative, f'{implementation} {spec}')
  if importance:
    assert_importance(measured, expected, spec)


def assert_importance(found, expected, spec):
  """Importance against means over the oracle's maps."""
  weights, proxy, extra = expected.weights, expected.proxy, expected.extra_proxy
  length = weights.shape[-1]
  # ReLU may give a first token no weight at all, as if it were padding; the mask says otherwise.
  mask = np.ones((len(weights), length), int)
  raw = sj.importance(weights, raw=True, mask=mask)
  assert_close(found.raw, raw, f'raw importance {spec}')
  assert_close(found.normalized, sj.importance(proxy, mask=mask), f'importance {spec}')
  if spec.kv_bias.has_extra_key:
    released = (1 + extra.sum(-1)) / (length + 1)
    assert_close(found.extra_key, extra.mean(-1), f'extra key {spec}')
    assert_close(found.extra_key_released, released, f'extra key as released {spec}')
    proxy = np.concatenate([extra[..., None], proxy], -1)
  tokens = np.arange(length)
  keep = np.asarray(spec.mask.keep(tokens[:, None], tokens))
  keys = keep.sum(-1) + spec.kv_bias.has_extra_key
  uniform = np.log(keys).mean()
  terms = proxy * np.log(np.maximum(proxy, 1e-300))
  entropy = -terms.sum(-1).mean(-1)
  # A query that sees one key has uniform attention.
  relative = entropy / uniform if uniform else np.ones_like(entropy)
  assert_close(found.entropy, relative, f'entropy {spec}')


def with_gradients(f, *inputs):
  """f(*inputs), and the gradients of all inputs for a random cotangent."""
  out, pull = jax.vjp(f, *inputs)
  normal = np.random.default_rng(9).standard_normal
  # Rounded to bfloat16, so that functions of any dtype get the same numbers.
  draw = lambda x: jnp.asarray(normal(x.shape), jnp.bfloat16).astype(x.dtype)
  return out, pull(jax.tree.map(draw, out))


def worst_error(found, expected):
  """The largest error, over the size of its array plus a tenth of the largest one.

  Arrays may vanish, such as gradients of scores if a query sees one key: what is left is rounding.
  """
  exact = lambda tree: [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]
  pairs = [*zip(exact(found), exact(expected), strict=True)]
  sizes = np.array([abs(y).max() for _, y in pairs])
  errors = np.array([abs(x - y).max() for x, y in pairs])
  # NumPy's maximum, unlike Python's, is NaN if an error is.
  return np.max(errors / (sizes + 0.1 * sizes.max()))


def error_of(f, spec, *inputs):
  """`worst_error` of an implementation f; the definition reads the same numbers in float32."""
  definition = functools.partial(sj.attend, spec, implementation='reference')

  @jax.jit
  def both(*inputs):
    float32 = lambda x: jnp.asarray(x, jnp.float32)
    exact = jax.tree.map(float32, inputs)
    return with_gradients(f, *inputs), with_gradients(definition, *exact)

  return worst_error(*both(*inputs))


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
      move = lambda x, d: np.asarray(x, np.float64) + step * d
      found = oracle.attention(spec, *jax.tree.map(move, inputs, direction))
      of = lambda x: (x * projection).sum()
      return np.array([of(found.out), of(found.operands)])

    whole, half = ((along(step) - along(-step)) / (2 * step) for step in (1e-6, 5e-7))
    if abs(whole[0] - half[0]) < 1e-5 * abs(whole[0]) + 1e-6:
      return projection, direction, whole
  raise AssertionError(f'{spec}: a kink lies on the inputs themselves; draw others')


def assert_derivative(gradients, direction, expected, what):
  product = lambda gradient, direction: float((gradient * direction).sum())
  products = jax.tree.leaves(jax.tree.map(product, gradients, direction))
  # The error is relative to the sum of the parts, which may cancel, or to the operands of the last
  # difference, see `assert_close`. Differences are accurate to about 1e-8.
  scale = max(sum(map(abs, products)), abs(expected[1])) + 1e-3
  error = abs(sum(products) - expected[0]) / scale
  assert error < 5e-5, f'{what}: relative error {error:.2e}'
