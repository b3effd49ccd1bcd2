"""Every implementation against three nested loops in float64: values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.attention.spec import SLOTS
from sink_jax.kernels.dispatch import IMPLEMENTATIONS
from sink_jax.slot import choices
from tests import attention_oracle as oracle
from tests.attention_specs import PAPER, pairwise_specs, product_specs, random_inputs

# Float32 rounding of sums of 7 to 20 terms of order one, relative to the largest entry.
TOLERANCE = 1e-5


def assert_close(actual, expected, what):
  scale = max(np.abs(expected).max(), 1e-3)
  error = np.abs(np.asarray(actual, np.float64) - expected).max() / scale
  assert error < TOLERANCE, f'{what}: relative error {error:.2e}'


def check_values(spec, **sizes):
  q, k, v, params = random_inputs(spec, **sizes)
  out, weights, proxy, slot = oracle.attention(spec, q, k, v, params)
  for implementation in IMPLEMENTATIONS:
    assert_close(sj.attend(spec, q, k, v, params, implementation=implementation), out,
                 f'{implementation} {spec}')
  assert_close(sj.attention_map(spec, q, k, params), weights, f'map {spec}')
  assert_close(sj.attention_map(spec, q, k, params, proxy=True), proxy, f'proxy {spec}')
  alpha = sj.streaming_importance(spec, q, k, params)
  assert_close(alpha.raw, sj.importance(weights), f'raw importance {spec}')
  assert_close(alpha.normalized, sj.importance(proxy), f'importance {spec}')
  if spec.kv_bias.has_slot:
    assert_close(alpha.bias_slot, slot.mean(-1), f'slot {spec}')
    assert_close(alpha.bias_slot_released, (1 + slot.sum(-1)) / (slot.shape[-1] + 1), f'{spec}')


def check_gradient(spec, implementation):
  """The directional derivative of a random projection, against central differences."""
  inputs = random_inputs(spec, length=5, heads=2)
  rng = np.random.default_rng(1)
  projection = rng.standard_normal(inputs[0].shape)
  direction = jax.tree.map(lambda x: rng.standard_normal(x.shape), inputs)

  def along(step):
    moved = jax.tree.map(lambda x, d: np.asarray(x, np.float64) + step * d, inputs, direction)
    return (oracle.attention(spec, *moved)[0] * projection).sum()

  expected = (along(1e-6) - along(-1e-6)) / 2e-6
  loss = lambda *args: jnp.sum(
      sj.attend(spec, *args, implementation=implementation) * projection)
  gradients = jax.grad(loss, argnums=(0, 1, 2, 3))(*inputs)
  products = jax.tree.leaves(jax.tree.map(lambda g, d: (g * d).sum(), gradients, direction))
  # Relative to the sum of the parts, which may cancel; differences are good to about 1e-8.
  scale = sum(abs(float(p)) for p in products) + 1e-3
  error = abs(sum(float(p) for p in products) - expected) / scale
  assert error < 5e-5, f'{implementation} {spec}: relative error {error:.2e}'


@pytest.mark.parametrize('name', PAPER)
def test_paper_variants(name):
  check_values(PAPER[name], length=20, heads=2)
  check_values(PAPER[name], batch=2, kv_heads=1)
  for implementation in IMPLEMENTATIONS:
    check_gradient(PAPER[name], implementation)


def test_every_pair_of_slot_values():
  specs, impossible = pairwise_specs()
  assert len(specs) > 50
  for spec in specs:
    check_values(spec)
    check_gradient(spec, 'chunked')
  # The pairs that no spec can hold are those that the documentation of AttentionSpec lists.
  names = {frozenset((type(x).__name__, type(y).__name__)) for _, x, _, y in impossible}
  assert names == {
      frozenset(('Exp', 'Unnormalized')), frozenset(('Exp', 'RowSum')),
      frozenset(('Unnormalized', 'KBias')), frozenset(('Unnormalized', 'SinkLogit'))}


@pytest.mark.full
@pytest.mark.parametrize('normalizer', choices(SLOTS['normalizer']))
@pytest.mark.parametrize('similarity', choices(SLOTS['similarity']))
def test_every_combination_of_slot_classes(similarity, normalizer):
  specs = list(product_specs(similarity, normalizer))
  if not specs:
    pytest.skip('refused, whatever the other slots are')
  for spec in specs:
    q, k, v, params = random_inputs(spec, length=5, heads=2)
    out = oracle.attention(spec, q, k, v, params)[0]
    for implementation in IMPLEMENTATIONS:
      assert_close(sj.attend(spec, q, k, v, params, implementation=implementation), out,
                   f'{implementation} {spec}')
    check_gradient(spec, 'chunked')
