"""Config strings, and the properties that single components promise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.attention.mask import Mask
from sink_jax.attention.position import Position
from sink_jax.attention.similarity import Similarity
from sink_jax.attention.spec import COMPONENTS
from sink_jax.component import Component, from_string, registry
from tests.attention_specs import PAPER, slot_values
from tests.attention_variants import alibi_slope, t5_bucket

VALUES = [(slot, x) for slot, values in slot_values().items() for x in values]


@pytest.mark.parametrize('slot, value', VALUES, ids=lambda x: repr(x))
def test_the_repr_of_a_slot_builds_it_again(slot, value):
  assert from_string(COMPONENTS[slot], repr(value)) == value
  assert hash(from_string(COMPONENTS[slot], repr(value))) == hash(value)


def test_a_spec_is_rebuilt_from_its_strings():
  for spec in PAPER.values():
    assert sj.AttentionSpec(**spec.strings()) == spec


def test_numbers_are_read_as_their_field_says():
  assert from_string(Similarity, 'Exp') == sj.Exp()
  assert from_string(Position, 'Rope(base=500000)') == sj.Rope(base=500000.0)
  assert isinstance(from_string(Position, 'Rope(base=500000)').base, float)


def test_a_new_slot_class_is_a_choice_at_once():
  class Everything(Mask):
    def keep(self, i, j):
      return j == j

  try:
    assert from_string(Mask, 'Everything()') == Everything()
    with pytest.raises(NotImplementedError, match=r'needs a method visible\(i, keys\)'):
      x = np.zeros((1, 4, 1, 2), np.float32)
      spec = sj.AttentionSpec(mask=Everything(), temperature='LogLength(learned=False)')
      sj.attend(spec, x, x, x)
  finally:
    del Everything, spec
    import gc

    gc.collect()
  assert 'Everything' not in registry(Mask)


def test_a_later_class_replaces_one_of_its_name_but_none_of_the_package():
  class Base(Component):
    abstract = True

  def choice(module):
    return type('Choice', (Base,), {'__module__': module})

  first, again = choice('mine'), choice('mine')
  assert first is not again and registry(Base) == {'Choice': again}

  ours, theirs = choice('sink_jax.rooms'), choice('mine')
  with pytest.raises(ValueError, match='mine defines Choice'):
    registry(Base)
  assert ours is not theirs


@pytest.mark.parametrize(
  'eps, expected',
  [
    (0.0, True),
    (1e-8, True),
    (1e-3, False),
    (1.0, False),
  ],
)
def test_rows_sum_to_one_unless_eps_takes_a_share(eps, expected):
  spec = sj.AttentionSpec('Sigmoid()', sj.RowSum(eps=eps))
  zeros = np.zeros((1, 4, 1, 2), np.float32)
  sums = np.asarray(sj.attention_map(spec, zeros, zeros).sum(-1))
  assert spec.rows_sum_to_one == np.allclose(sums, 1, atol=1e-5) == expected


def test_alibi_slopes():
  halves = [2.0**-h for h in range(1, 9)]
  np.testing.assert_allclose(sj.Alibi().slopes(8), halves)
  of_six = [alibi_slope(h, 6) for h in range(6)]
  np.testing.assert_allclose(sj.Alibi().slopes(6), of_six)


def test_relative_buckets_are_those_of_t5():
  d = np.arange(300)
  expected = [t5_bucket(int(x)) for x in d]
  np.testing.assert_array_equal(sj.Relative().distance_bias(d), expected)
  decreasing = sj.Relative(decreasing=True).distance_bias(d)
  np.testing.assert_array_equal(decreasing, np.negative(expected))
  assert [expected[i] for i in (15, 16, 127, 299)] == [15, 16, 31, 31]


def test_sinusoidal_is_equation_5():
  p = np.asarray(sj.Sinusoidal().embedding(np.arange(9), 6, {}))
  t, i = 5, 3  # position, 1-based frequency
  omega = 1 / 10000 ** (2 * (i - 1) / 6)
  angle = omega * t
  np.testing.assert_allclose(p[t, 4:6], [np.sin(angle), np.cos(angle)], rtol=1e-6)
  np.testing.assert_allclose(p[0], [0, 1] * 3)


@pytest.mark.parametrize(
  'mask',
  [
    sj.Causal(),
    sj.Window(size=1),
    sj.Window(size=4),
    sj.Prefix(length=1),
    sj.Prefix(length=6),
    sj.Prefix(length=99),
  ],
)
def test_key_ranges_are_the_smallest_that_hold_every_visible_key(mask):
  length = 12
  tokens = np.arange(length)
  keep = np.asarray(mask.keep(tokens[:, None], tokens))
  for first in range(length):
    for last in range(first, length):
      visible = np.flatnonzero(keep[first : last + 1].any(0))
      assert mask.key_range(first, last, length) == (visible[0], visible[-1] + 1)
  np.testing.assert_array_equal(mask.visible(tokens, length), keep.sum(1))


def test_exclusive_attention_survives_small_values():
  head, ones = sj.Exclusive(), jnp.ones((1, 4))
  loss = lambda v: head.output(ones, v, None, {}).sum()
  slope = jax.jit(jax.grad(loss))
  for size in (0.0, 1e-13, 1e-10, 1e-8, 1e-6):
    assert np.isfinite(slope(jnp.full((1, 4), size))).all()
  assert loss(0 * ones) == 4  # a zero value removes nothing
