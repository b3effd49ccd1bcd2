"""The two kinds of elementary functions inside a tile, and where each is used."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.kernels import gpu_layout
from sink_jax.kernels.arithmetic import EXACT, LOG2E, MASKED, Approximate
from sink_jax.kernels.score_tile import ScoreTile
from tests.attention_specs import PAPER, random_inputs
from tests.compile.targets import lowered_text, struct
from tests.kernels import errors
from tests.kernels.test_flash import TILES, check_rows, use

TINY = 2.0**-126


def flushed(x):
  return jnp.where(jnp.abs(x) < TINY, 0, x)


# What the instructions of a GPU compute, for the interpreter: but for how often it rounds.
EMULATED = Approximate(
    exp2=lambda x: flushed(jnp.exp2(flushed(x))), reciprocal=lambda x: flushed(1 / flushed(x)),
    less_product=lambda z, x, y: z - x * y)


@pytest.fixture
def emulated(monkeypatch):
  use('gpu', monkeypatch)
  monkeypatch.setattr(gpu_layout, 'arithmetic', lambda dtype, interpret: EMULATED)


@pytest.fixture(scope='module')
def table():
  return errors.rows()


def test_errors_stay_within_their_bounds_over_the_whole_range(table):
  for row in table:
    assert row['of_bound'] <= 1, row
  # What a bfloat16 product sees next is rounded by 2^-9: nothing of this shows.
  assert all(row['absolute'] < 2**-16 for row in table)
  assert all(row['relative'] < 2**-15 for row in table if 'slope' not in row['what'])
  for row in table:
    if row['what'] == 'slope of sigmoid':  # the exact form loses the upper tail as well
      assert row['absolute'] < 2**-22 and (row['high'] > 1 or row['relative'] < 2**-16)


@pytest.mark.parametrize('largest', [-1e4, -100., 0., 3.4, 100., 1e4])
def test_a_masked_score_counts_for_exactly_nothing(largest):
  assert not any(errors.masked_weights(largest))


@pytest.mark.parametrize('power', [1, 2])
def test_rows_that_see_no_key_yet_stay_finite(power):
  """Products as large as MASKED are rounded by more than any exponent may be, up or down."""
  arithmetic = errors.modelled()
  spec = sj.AttentionSpec(normalizer=sj.PNorm(p=float(power)))
  s, signs = jnp.linspace(-5, 5, 4)[None, :], set()
  for head_dim in range(8, 257, 8):
    tile = ScoreTile(spec, head_dim, axis=1, arithmetic=arithmetic)
    scale = jnp.float32(tile.scale * LOG2E)
    signs.add(np.sign(arithmetic.less_product(MASKED * scale, MASKED, scale)))
    p, _, state = tile.update(tile.start((1, 1)), s, keep=jnp.zeros((1, 4), bool))
    assert not np.any(p) and not np.any(state[1:])
    factor, lse, *_ = tile.finish(state)  # a row without any key
    assert factor == 0 and lse < -1e28
    _, lse, power_lse, _ = tile.finish(tile.update(state, s)[2])
    np.testing.assert_allclose(lse, jax.nn.logsumexp(s * tile.scale), rtol=1e-6)
    np.testing.assert_allclose(power_lse, jax.nn.logsumexp(power * s * tile.scale), rtol=1e-6)
  assert signs >= {-1, 1}


def test_a_long_row_gains_nothing_while_its_maximum_stays():
  """Where a factor of one were off by a rounding, it would be so again in every tile."""
  tile = ScoreTile(sj.AttentionSpec(), 96, axis=1, arithmetic=errors.modelled())
  s = jnp.linspace(300, 1000, 8)[:, None] * jnp.array([.99, 1.])
  state = tile.start((8, 1))
  for _ in range(100):
    state = tile.update(state, s)[2]
  lse = tile.finish(state)[1]
  expected = jax.nn.logsumexp(s * tile.scale, -1, keepdims=True) + np.log(100)
  np.testing.assert_allclose(lse, expected, rtol=2**-22)


@pytest.mark.full
@pytest.mark.parametrize('name', [
    pytest.param(name, marks=() if name in (
        'window', 'p-norm softmax 1/2 (Figure 29)', 'normalized sigmoid (Table 15)', 'softpick')
                 else pytest.mark.full)
    for name in ['window', *TILES]])
def test_kernels_with_the_arithmetic_of_gpus(emulated, name):
  spec = sj.AttentionSpec(mask=sj.Window(size=3)) if name == 'window' else PAPER[name]
  # Scores far from zero.
  check_rows(spec, atol=2e-5, scale=10, batch=1, length=19, heads=2, kv_heads=1, head_dim=16)


@pytest.mark.parametrize('spec', [
    sj.AttentionSpec(mask=sj.Window(size=3)),
    pytest.param(sj.AttentionSpec('Sigmoid()'), marks=pytest.mark.full)],
    ids=['softmax', 'sigmoid'])
def test_importance_with_the_arithmetic_of_gpus(emulated, spec):
  q, k, _, params = random_inputs(spec, length=19, heads=2, head_dim=8)
  here, there = (sj.streaming_importance(spec, q, k, params, implementation=name).raw
                 for name in ('pallas', 'chunked'))
  np.testing.assert_allclose(here, there, rtol=1e-5, atol=1e-6)


def test_a_sigmoid_with_a_bias_has_the_short_form():
  s = jnp.linspace(-90, 30, 97)
  exact, slope = jax.jvp(sj.Sigmoid(bias=-4.), (s / 2,), (jnp.ones_like(s),))
  f, df = EMULATED.weights_and_slopes(sj.Sigmoid(bias=-4.), s, .5)
  # An exponent of up to 71 is off by its rounding.
  np.testing.assert_allclose(f, exact, rtol=71 * 2**-23, atol=2 * TINY)
  np.testing.assert_allclose(df, slope, rtol=71 * 2**-23, atol=2**-23)


@pytest.mark.parametrize('implementation', ['chunked', 'pallas'])
def test_keys_are_counted_without_a_power(implementation):
  x = struct(1, 64, 1, 64, dtype='float32')

  def takes_powers(normalizer):
    loss = lambda *x: sj.attend(sj.AttentionSpec('Relu()', normalizer), *x,
                                implementation=implementation).sum()
    return ' pow ' in str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(x, x, x))

  assert takes_powers('PNorm(p=2.5)') and not takes_powers('Count()')


def test_which_inputs_get_which_arithmetic():
  assert gpu_layout.arithmetic(jnp.bfloat16, interpret=True) is EXACT
  assert gpu_layout.arithmetic(jnp.float32, interpret=False) is EXACT
  assert isinstance(gpu_layout.arithmetic(jnp.bfloat16, interpret=False), Approximate)
  x = {dtype: struct(1, 64, 1, 64, dtype=dtype) for dtype in ('bfloat16', 'float32')}
  attend = lambda *x: sj.attend(sj.AttentionSpec('Sigmoid()'), *x, implementation='pallas')
  for (dtype, x), platform in itertools.product(x.items(), ('cuda', 'tpu')):
    text = lowered_text(platform, attend, x, x, x)
    short = dtype == 'bfloat16' and platform == 'cuda'
    assert [name in text for name in ('ex2.approx.ftz', 'rcp.approx.ftz')] == [short, short]


def test_a_new_similarity_runs_as_it_is_defined():
  class Doubled(sj.Sigmoid):
    def __call__(self, s):
      return 2 * super().__call__(s)

  s = jnp.linspace(-3, 3, 7)
  for similarity in (Doubled(), sj.EluPlusOne(), sj.Linear()):
    f, slope = jax.jvp(similarity, (s / 2,), (jnp.ones_like(s),))
    np.testing.assert_array_equal(EMULATED.weights(similarity, s, .5), f)
    for a, b in zip(EMULATED.weights_and_slopes(similarity, s, .5), (f, slope), strict=True):
      np.testing.assert_array_equal(a, b)
