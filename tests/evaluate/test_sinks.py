"""Sink metrics, worked by hand."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import sink_jax as sj
from sink_jax.foreign import as_array
from tests.train.runs import run_python

pytestmark = pytest.mark.typed

A = np.array(
  [
    [1.0, 0.0, 0.0],
    [0.5, 0.5, 0.0],
    [0.6, 0.3, 0.1],
  ]
)


@pytest.mark.parametrize('xp', [np, jnp])
def test_importance_by_hand(xp):
  alpha = sj.importance(xp.asarray(A))
  assert_allclose(alpha, [2.1 / 3, 0.8 / 2, 0.1 / 1], rtol=1e-6)
  assert isinstance(alpha, np.ndarray) == (xp is np)


def test_a_prefix_counts_all_rows():
  a = A.copy()
  a[0] = [0.7, 0.3, 0.0]  # the first token sees the second
  assert_allclose(sj.importance(a)[1], (0.3 + 0.5 + 0.3) / 2)


@pytest.mark.parametrize('xp', [np, jnp])
def test_the_threshold_comes_before_the_mean(xp):
  # Two sequences, one layer, two heads. Head 1 has 0.5 and 0.0. Their mean 0.25 is below 0.3, yet
  # the head is a sink in one of two sequences. Head 2 has 0.31 twice.
  importance = xp.asarray(
    [
      [[[0.5, 0.0], [0.31, 0.0]]],
      [[[0.0, 0.0], [0.31, 0.3]]],
    ]
  )
  assert_allclose(sj.sink_rate(importance), [0.75, 0.0])  # 0.3 is not above 0.3
  assert_allclose(sj.sink_rate(importance, epsilon=0.4), [0.25, 0.0])


class Tensor:
  """A stand-in for a PyTorch tensor that needs gradients and is on another device."""

  def __init__(self, values, dtype='', done=()):
    self.values, self.done = np.asarray(values), done
    self.dtype = dtype or f'torch.{self.values.dtype}'

  detach = lambda self: Tensor(self.values, self.dtype, (*self.done, 'detach'))
  float = lambda self: Tensor(self.values, 'torch.float32', self.done)
  cpu = lambda self: Tensor(self.values, self.dtype, (*self.done, 'cpu'))
  __iter__ = lambda self: map(Tensor, self.values)

  def numpy(self):
    assert self.done == ('detach', 'cpu')
    return self.values.astype(self.dtype.removeprefix('torch.'))  # NumPy has no bfloat16


def test_tensors_of_pytorch_are_maps():
  expected = sj.importance(A)
  assert_allclose(sj.importance(Tensor(A, 'torch.bfloat16')), expected, rtol=1e-6)

  # Ids stay whole numbers: float32 has none above 2^24 that are odd.
  assert as_array(Tensor([2**24 + 1]), 'tokens').tolist() == [2**24 + 1]


def test_maps_have_a_report_of_their_own():
  maps = np.tril(np.random.default_rng(0).random((3, 2, 4, 6, 6)))  # (N, S, H, T, T)
  maps /= maps.sum(-1, keepdims=True)
  report = sj.SinkReport.from_attentions(maps, name='mine')

  assert report.protocol['blocks'] == [1, 2, 3]
  expected = np.swapaxes(sj.importance(maps), 0, 1)
  assert_allclose(report.importance, expected, rtol=1e-6)
  assert report.summary()['sink_1'] == 100 * sj.sink_rate(expected)[0]
  assert 'mine' in repr(report)
  with pytest.raises(ValueError, match='only attention maps'):
    report.norm_ratio('hidden')


QK = np.random.default_rng(0).standard_normal((1, 3, 1, 2)).astype(np.float32)
HALF = np.full((1, 1, 1, 2), 0.5)


streaming = functools.partial(sj.streaming_importance, sj.AttentionSpec())


def first_masked(x):
  masked = np.ma.array(x)
  masked[(0,) * masked.ndim] = np.ma.masked
  return masked


@pytest.mark.untyped
@pytest.mark.parametrize(
  'call',
  [
    lambda x: sj.importance(x(A)),
    lambda x: sj.importance([x(A[None])] * 2),
    lambda x: sj.sink_rate(x(HALF)),
    lambda x: sj.emergence_step([0, 1], x([0.1, 0.2])),
    lambda x: sj.emergence_step(x([0, 1]), [0.1, 0.2]),
    lambda x: sj.SinkReport.from_attentions([x(A[None, None])]).importance,
    lambda x: sj.card_of(importance=x(np.repeat(HALF, 2, 0))).sentences,
    lambda x: sj.card_of(attentions=x(np.broadcast_to(A, (1, 2, 1, 3, 3)))).sentences,
    lambda x: sj.importance(A[None], mask=x([[1, 1, 1]])),
    lambda x: streaming(x(QK), QK).raw,
    lambda x: streaming(QK, QK, mask=x([[1, 1, 1]])).raw,
  ],
)
def test_arrays_are_taken_in_any_form_but_not_with_masked_entries(call):
  """NumPy's masked arrays would otherwise count with what lies under their mask."""
  expected = call(np.asarray)
  for form in (Tensor, np.ma.array):  # in the second nothing is masked
    assert_array_equal(call(form), expected)
  with pytest.raises(ValueError, match='masked entries'):
    call(first_masked)


RAW = lambda masses: sj.importance(masses, raw=True)


def broadcast(*shape):
  return np.broadcast_to(A, (*shape, 3, 3))


def changed(array, where, value):
  array = np.array(array, np.float32)
  array[where] = value
  return array


# Valid maps of two sequences, three blocks and four heads, with one weight changed.
maps = functools.partial(changed, broadcast(2, 3, 4), (1, 0, 3, 2, 1))
rates = functools.partial(changed, np.full((2, 3, 4, 3), 0.25), (1, 0, 3, 2))


TAKE_IMPORTANCE = r'take sink_rate\(importance\(maps\)\)'
REFUSALS = {  # by function: words of the error, and the arguments
  sj.importance: [
    ('eager', (None, None)),
    (r'\(\.\.\., T, T\)', np.zeros((3, 4))),
    (r'of shape \(0, 3, 3\)', np.zeros((0, 3, 3))),
    ('real numbers', [[1j]]),
    ('^attention is a list of parts with different shapes', [A, A[:2, :2]]),
    (r'^attention\[1\] has shape \(1, 2, 2\)', [A[None], A[None, :2, :2]]),
  ],
  lambda: sj.importance(A[None], mask=[[1], [1, 1]]): [
    ('^mask is a list',),
  ],
  jax.jit(sj.importance): [
    (r'\(\.\.\., T, T\)', jnp.zeros((2, 3))),
  ],
  sj.sink_rate: [
    (TAKE_IMPORTANCE, broadcast(2, 5, 4)),
    (TAKE_IMPORTANCE, broadcast(1, 2)),
    (r'importance\(\[map\]\)', sj.importance(broadcast(2, 4))),
    ('^importance is a list', [HALF[0], HALF[0, 0]]),
    (r'\(S, N, H, T\)', np.zeros((3, 4))),
    ('epsilon=0: .*between 0 and 1', HALF, 0),
    ('epsilon=1: .*between 0 and 1', HALF, 1),
    ('epsilon=nan: .*between 0 and 1', HALF, float('nan')),
  ],
  jax.jit(sj.sink_rate, static_argnums=1): [
    ('epsilon=30', HALF, 30),
  ],
  sj.SinkReport.from_attentions: [
    (r'a list: \[map\]', broadcast(2, 4)),
    (r'\(S, H, T, T\) of each', np.zeros((2, 5, 3, 3))),
    ('eager', (None, None)),
    ('attentions', []),
    (r'\[1\] has shape', [np.ones((1, h, 1, 1)) for h in (2, 3)]),
  ],
  sj.emergence_step: [
    ('^steps is a list', [[0], [1, 2]], [0.1, 0.2]),
    ('with finite', [0, 1], [0.2, np.nan]),
    ('equally long', [0, 1, 2], [0.2, 0.3]),
  ],
}


@pytest.mark.untyped
@pytest.mark.parametrize(
  'function, words, arguments',
  [
    (function, words, arguments)
    for function, rows in REFUSALS.items()
    for words, *arguments in rows
  ],
)
def test_what_is_refused(function, words, arguments):
  with pytest.raises(ValueError, match=words):
    function(*arguments)


@pytest.mark.parametrize('xp', [np, jnp])
@pytest.mark.parametrize('dtype', [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_summed_in_float32(xp, dtype):
  # One head, each row of which gives 0.4 to the first of 4096 tokens.
  maps = np.zeros((1, 1, 1, 4096, 4096), dtype)
  maps[..., 0] = 0.4
  maps[..., 0, 0] = 1
  alpha = sj.importance(xp.asarray(maps))

  assert alpha.dtype.itemsize >= 4
  assert alpha[0, 0, 0, 0] == pytest.approx(0.4, abs=2e-3)
  assert sj.sink_rate(alpha, 0.3)[0] == 1

  # The dtype of an importance does not round epsilon either: in bfloat16 it would be 0.3008.
  near = xp.full((1, 1, 1, 1), 0.3008, dtype)
  assert sj.sink_rate(near)[0] == 1


def test_float64_stays_and_whole_numbers_are_weights():
  assert sj.importance(A).dtype == np.float64
  for dtype in (bool, int, np.uint8):
    for xp in (np, jnp):
      alpha = sj.importance(xp.eye(3, dtype=dtype))
      assert_allclose(alpha, [1 / 3, 1 / 2, 1])


@pytest.mark.filterwarnings('ignore:overflow')
@pytest.mark.parametrize('xp', [np, jnp])
@pytest.mark.parametrize(
  'metric, given, words',
  [
    (sj.importance, maps(np.nan), r'row \[1, 0, 3, 2\] \(from 0\) is nan'),
    (sj.importance, maps(-0.25), r'row \[1, 0, 3, 2\].* is 0.45: .* finite and not negative'),
    (sj.importance, maps(0.32), r'is 1.02.*raw=True'),
    (RAW, maps(-np.inf), r'key \[1, 0, 3, 1\] .* is -inf'),
    (RAW, np.full((2, 2), 3e38, np.float32), 'key .* is inf'),
    (sj.sink_rate, rates(np.nan), r'importance \[1, 0, 3, 2\] \(from 0\) is nan'),
    (sj.sink_rate, rates(-0.1), 'is -0.1: it must be between 0 and'),
    (sj.sink_rate, rates(7.7), 'is 7.7'),
  ],
)
def test_the_first_number_that_attention_cannot_have_is_named(xp, metric, given, words):
  with pytest.raises(ValueError, match=words):
    metric(xp.asarray(given))


@pytest.mark.parametrize('xp', [np, jnp])
def test_unnormalised_masses_have_an_importance_too(xp):
  masses = xp.asarray([[7.7, 0.0], [-1.0, 3.0]])
  assert_allclose(RAW(masses), [3.35, 3.0], rtol=1e-6)
  rounded = xp.asarray([[1.0, 0.0], [0.505, 0.5]])  # softmax in bfloat16
  assert sj.importance(rounded).shape == (2,)


def test_the_bound_of_an_importance_is_reached_under_a_prefix():
  prefix = np.zeros((1, 1, 1, 5, 5))

  # All five rows look at the last token, with coarse rounding, and hardly at the first. If they
  # gave it exactly 0, it would be padding.
  prefix[..., 4], prefix[..., 0] = 1.01 - 1e-9, 1e-9
  alpha = sj.importance(prefix)

  assert alpha[0, 0, 0, 4] == pytest.approx(5 * 1.01)
  assert sj.sink_rate(alpha)[4] == 1
  with pytest.raises(ValueError, match=r'\[0, 0, 0, 4\]'):
    sj.sink_rate(alpha * 1.01)

  # An array may hold only the first keys of a longer text. Their true bound is lower than the bound
  # from their number, so none is refused.
  first = np.ones((1, 1, 1, 2))
  assert sj.sink_rate(first).tolist() == [1, 1]


def test_importances_of_as_many_keys_as_heads_are_not_maps():
  assert sj.sink_rate(np.ones((3, 2, 1, 1))).tolist() == [1]  # of one head, one key is kept
  random = np.random.default_rng(0).random((3, 2, 4, 4)) / 4
  expected = (random > 0.1).mean((0, 1, 2))
  assert_allclose(sj.sink_rate(random, 0.1), expected)


@pytest.mark.parametrize('xp', [np, jnp])
@pytest.mark.parametrize('which', [0, 1])
def test_a_query_or_key_that_is_not_finite_is_named(xp, which):
  given = list(np.ones((2, 2, 4, 2, 8), np.float32))
  given[which][1, 2, 0, 5] = np.nan
  with pytest.raises(ValueError, match=rf'{("queries", "keys")[which]} \[1, 2, 0, 5\] .* is nan'):
    streaming(*map(xp.asarray, given))


def test_the_values_of_tracers_pass():
  rate = jax.jit(lambda maps, epsilon: sj.sink_rate(sj.importance(maps), epsilon))
  maps = jnp.full((1, 1, 1, 2, 2), jnp.nan)
  assert rate(maps, 0.3).shape == (2,)


def test_counts_of_many_heads_are_exact():
  alpha = np.broadcast_to(np.float32(0.5), (2**25, 1, 1, 1))  # adding ones in float32 stops at 2^24
  assert sj.sink_rate(alpha) == 1


@pytest.mark.parametrize(
  'rate, expected',
  [
    ([0, 0, 0], None),
    ([0.2, 0.3, 0.4], 0),
    ([0, 0.2, 0.05, 0.1, 0.5], 60),
    ([0.5, 0.5, 0.0], None),
    ([], None),
    ([0, 0, 0.1], 40),
  ],
)
def test_emergence_is_the_step_from_which_the_rate_stays(rate, expected):
  steps = range(0, 20 * len(rate), 20)
  assert sj.emergence_step(steps, rate, level=0.1) == expected


def test_metrics_need_numpy_and_jax_and_attention_jaxtyping():
  code = """
import sys
absent = 'flax ml_collections optax orbax grain tensorflow_datasets jaxtyping'
for name in absent.split():
  sys.modules[name] = None
import jax, numpy as np
rooms = lambda: {name.partition('.')[0] for name in sys.modules} - set(sys.stdlib_module_names)
before = rooms()
import sink_jax as sj
print(sj.sink_rate(sj.importance([np.eye(3)[None, None]], mask=[[1, 1, 1]])))
assert rooms() - before == {'sink_jax'}, rooms() - before
del sys.modules['jaxtyping']
x = np.ones((1, 4, 2, 8), np.float32)
print(sj.attend(sj.AttentionSpec(), x, x, x).shape)
print(sj.streaming_importance(sj.AttentionSpec(), x, x).raw.shape)
"""
  run_python('-c', code)


def test_sink_positions_are_those_of_the_largest_rates():
  alpha_SxNxHxT = np.full((2, 1, 4, 12), 0.05)
  report = sj.SinkReport(alpha_SxNxHxT, alpha_SxNxHxT, None, None, {}, None, {})
  assert report.sink_positions().tolist() == [1]  # no head has a sink
  alpha_SxNxHxT[:, :, :4, 1] = 0.5
  alpha_SxNxHxT[:, :, 0, [0, 9]] = 0.4  # position 1 has a quarter of the rate, position 10 is late
  assert report.sink_positions().tolist() == [2]
  alpha_SxNxHxT[:, :, :2, 4] = 0.4
  assert report.sink_positions().tolist() == [2, 5]
