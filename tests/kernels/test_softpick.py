"""Softpick: its tile against the definition in float64, and the rows that are special to it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.attention.spec import TransformedQK
from sink_jax.kernels.arithmetic import EXACT, Exact
from sink_jax.kernels.dispatch import attend_transformed
from sink_jax.kernels.rectified_tile import make_tile
from tests.kernels import errors
from tests.kernels.test_flash import use

SPEC = sj.AttentionSpec('Softpick()', 'AbsSum()', position='Nope()')
EPS, T, DH = 1e-6, 11, 8


@dataclasses.dataclass(frozen=True)
class Full(Exact):
  """exp(s) - 1 to the last bits of float64, where the kernels' series is good to float32's."""

  def less_one(self, s, scale, power, one):
    return jnp.expm1(s * scale) * one


def definition(s, v, keep):
  """Output and log Z of the formula of the paper, for automatic differentiation; s moderate."""
  f = jnp.where(keep, jnp.expm1(s), 0)
  scale = jnp.exp(jnp.maximum(jnp.where(keep, s, 0).max(-1, keepdims=True), 0))
  z = jnp.abs(f).sum(-1, keepdims=True) + EPS * jax.lax.stop_gradient(scale)
  return jnp.maximum(f, 0) / z @ v, jnp.log(z)[:, 0]


@pytest.mark.full
@pytest.mark.parametrize('shift', [0., -3., 12.])
def test_a_tile_is_the_definition_in_float64(shift):
  rng = np.random.default_rng(0)
  with jax.enable_x64(True):
    s, v, do, dlog = (jnp.asarray(rng.standard_normal(shape)) for shape in (
        (6, 12), (12, 5), (6, 5), (6,)))
    s, keep = 2 * s + shift, jnp.asarray(rng.random((6, 12)) < .8).at[2].set(False)
    tile = make_tile(SPEC, 4, axis=-1, arithmetic=Full(), sizes=True)
    state, out = tile.start((6, 1)), 0
    for part in range(0, 12, 4):  # scores are in the units of q.k
      at = slice(part, part + 4)
      p, factor, state = tile.update(state, s[:, at] / tile.scale, keep[:, at])
      out = out * factor + p @ v[at]
    factor, log, largest, sizes = tile.finish(state)
    (expected, expected_log), pull = jax.vjp(lambda s, v: definition(s, v, keep), s, v)
    assert out.dtype == jnp.float64
    weights = tile.weights(s / tile.scale, keep, log)
    for a, b in ((out * factor, expected), (log[:, 0], expected_log), (weights @ v, expected),
                 (sizes, weights.sum(-1, keepdims=True)),
                 (largest[:, 0], np.maximum(np.where(keep, s, 0).max(-1), 0))):
      np.testing.assert_allclose(a, b, rtol=2e-10, atol=2e-10)
    # `row_cotangents` makes the second row, in float32.
    rows = log, (dlog - (do * expected).sum(-1))[:, None]
    p, ds = tile.cotangent(s / tile.scale, keep, do @ v.T, rows)
    for a, b in zip((ds, p.T @ do), pull((do, dlog)), strict=True):
      np.testing.assert_allclose(a, b, rtol=2e-10, atol=2e-10)


@pytest.mark.parametrize('largest', [0., 5., 60.])
def test_no_score_loses_more_than_a_few_bits(largest):
  """exp(s) - 1, times exp(-largest): of all sizes, in all forms, relative to itself."""
  x = np.concatenate([np.geomspace(1e-7, 80, 2000), [1 / 32, 0]]).astype(np.float32)
  s = jnp.asarray(np.concatenate([x, -x]) / errors.SCALE, jnp.float32)
  s = s[np.float64(s) * errors.SCALE <= largest]
  truth = np.expm1(np.float64(s) * errors.SCALE) * np.exp(-largest)
  maximum = jnp.float32(largest / errors.SCALE)
  for arithmetic in (EXACT, *errors.MODELS):
    power = arithmetic.exp2(arithmetic.from_maximum(s, maximum, errors.SCALE))
    f = arithmetic.less_one(s, errors.SCALE, power, np.float32(np.exp(-largest)))
    np.testing.assert_array_equal(np.sign(f), np.sign(truth))
    # From 1/32 on, errors of exp(s - largest), 2^-22 and what the exponent was rounded by, are at
    # most 33 times as large in the difference.
    np.testing.assert_allclose(f, truth, rtol=33 * (2**-21 + 2**-23 * 1.5 * largest))


@pytest.fixture(scope='module', params=['reference', 'chunked', 'tpu', 'gpu'])
def attend(request):
  """Output, dk and dv of an implementation where every query has these scores; compiled once."""
  name = request.param if request.param in ('reference', 'chunked') else 'pallas'

  @jax.jit
  def run(scores, v, do):
    q = jnp.zeros((1, T, 1, DH)).at[..., 0].set(DH**.5)
    k = jnp.zeros((1, T, 1, DH)).at[0, :, 0, 0].set(scores)
    f = lambda k, v: attend_transformed(SPEC, TransformedQK(q, k), v, {}, implementation=name)
    out, pull = jax.vjp(f, k, v[None, :, None])
    dk, dv = pull(do[None, :, None])
    return out[0, :, 0], dk[0, :, 0, 0], dv[0, :, 0]

  with pytest.MonkeyPatch.context() as patch:
    if name == 'pallas':
      use(request.param, patch)
    yield run


def in_float64(s, v, do):
  """The same by the formulas, and the sizes of all terms of each sum.

  The gradient of a score is as the released kernels write it.
  """
  s, v, do = (np.asarray(x, np.float64) for x in (s, v, do))
  out, ds, dv = np.zeros_like(do), np.zeros_like(s), np.zeros_like(v)
  sizes = np.zeros_like(do), np.zeros_like(s), np.zeros_like(v)
  for i in range(T):
    seen = s[:i + 1]
    m = max(seen.max(), 0)
    z = np.abs(np.expm1(seen)).sum() * np.exp(-m) + EPS
    weights = np.maximum(np.expm1(seen), 0) * np.exp(-m) / z
    out[i] = weights @ v[:i + 1]
    dv[:i + 1] += weights[:, None] * do[i]
    power, dp, by_sum = np.exp(seen - m) / z, v[:i + 1] @ do[i], do[i] @ out[i]
    ds[:i + 1] += power * ((seen > 0) * dp - np.sign(seen) * by_sum)
    for size, new in zip(sizes, (weights @ np.abs(v[:i + 1]), power * (np.abs(dp) + np.abs(by_sum)),
                                 weights[:, None] * np.abs(do[i]))):
      size[i if size is sizes[0] else slice(i + 1)] += new
  return (out, ds, dv), sizes


def rows(shift=0., scale=1.):
  rng = np.random.default_rng(3)
  s, v, do = rng.standard_normal(T), *rng.standard_normal((2, T, DH))
  return [np.float32(x) for x in (scale * s + shift, v, do)]


@pytest.mark.parametrize('scale', [1., 30., 1e-4])
def test_scores_of_every_size_keep_four_digits(attend, scale):
  """Of 1e-4, whose exponential less one keeps three in float32, and where eps takes a share."""
  inputs = rows(scale=scale)
  for actual, expected, size in zip(attend(*inputs), *in_float64(*inputs), strict=True):
    np.testing.assert_array_less(np.abs(actual - expected), 5e-5 * size + 1e-30)


def test_large_scores_are_softmax(attend):
  for shift in (30., 300.):  # exp(300) is beyond float32
    s, v, do = rows(shift=shift)
    weights = np.tril(np.exp(np.float64(s) - shift))
    weights /= weights.sum(-1, keepdims=True)
    out, _, dv = attend(s, v, do)
    # Scores of 300 are rounded by 2^-16.
    np.testing.assert_allclose(out, weights @ v, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dv, weights.T @ do, rtol=1e-4, atol=1e-4)


def test_rows_without_a_positive_score_are_zero(attend):
  s, v, do = rows()
  for scores in (0 * s, -np.abs(s), -200 * np.abs(s)):
    for x in attend(scores, v, do):
      np.testing.assert_array_equal(x, 0)


@pytest.mark.full
@pytest.mark.parametrize('kv_bias', ['KVBias()', "KBias(value='first')", 'SinkLogit()'])
def test_an_extra_key_is_one_more_score(kv_bias):
  """Below zero, above all other scores, and where all scores are small: eps counts once."""
  spec = dataclasses.replace(SPEC, kv_bias=kv_bias)
  normal = np.random.default_rng(4).standard_normal
  q, k, v = (np.float32(normal((1, T, 2, DH))) for _ in range(3))
  params = jax.tree.map(lambda p: np.float32(normal(p.shape)), spec.params(sj.Dims(2, 2, DH)),
                        is_leaf=lambda x: isinstance(x, sj.Param))

  @jax.jit
  def results(scale, extra):
    own = {name: x * (1 if name == 'value' else extra) for name, x in params['kv_bias'].items()}
    inputs = scale * q, k, v, {'kv_bias': own}
    loss = lambda name: lambda *x: (sj.attend(spec, *x, implementation=name)**2).sum()
    both = [jax.value_and_grad(loss(name), (0, 1, 2, 3))(*inputs)
            for name in ('reference', 'chunked')]
    maps = sj.attention_map(spec, *inputs[:2], inputs[3])
    return both, maps

  for scale, extra in ((1, 1), (1, 40), (1e-4, 1e-4), (1e-4, 3)):
    (a, b), maps = results(scale, extra)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
      assert np.isfinite(x).all()
      np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5 * float(np.abs(x).max()))
    assert maps.min() >= 0 and maps.sum(-1).max() < 1 + 1e-6
