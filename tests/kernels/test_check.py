"""The check of other people's attention with sinks: it accepts correct code and names errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sink_jax as sj


def attention(q, k, v, sinks, *, window=None, sink=True, cotangent=True, sums=jnp.float32):
  """Softmax with sinks as an outsider would write it, with selectable errors."""
  k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], 2) for x in (k, v))
  i, j = jnp.ogrid[: q.shape[1], : q.shape[1]]
  s = jnp.einsum('bihd,bjhd->bhij', q, k, preferred_element_type=sums) / np.sqrt(q.shape[-1])
  s = jnp.where((j <= i) & (i - j < (window or 10**9)), s.astype(sums), -jnp.inf)
  lse = jax.nn.logsumexp(s, -1)
  p = jnp.exp(s - lse[..., None])
  if sums == jnp.bfloat16:  # rounds each partial sum
    add = lambda total, x: (total + jnp.einsum('bhi,bhd->bihd', x[0], x[1]), None)
    out = jax.lax.scan(add, jnp.zeros_like(q), (jnp.moveaxis(p, 3, 0), jnp.moveaxis(v, 1, 0)))[0]
  else:
    out = jnp.einsum('bhij,bjhd->bihd', p.astype(v.dtype), v, preferred_element_type=sums)
  factor = jax.nn.sigmoid(lse - sinks[:, None])
  if not cotangent:
    factor = jax.lax.stop_gradient(factor)
  return (out * jnp.swapaxes(factor, 1, 2)[..., None] if sink else out).astype(q.dtype)


@pytest.mark.every(3)
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('window', [None, 50])
def test_what_is_right_passes(dtype, window):
  windowed = lambda *x: attention(*x, window=window)
  found = sj.check_sink_gradients(windowed, dtype=dtype, window=window, length=256)
  assert found.ok, str(found)
  assert [row['array'] for row in found.rows] == ['output', 'dq', 'dk', 'dv', 'd sinks']


def test_our_own_attention_passes():
  spec = sj.AttentionSpec(position=sj.Nope(), kv_bias=sj.SinkLogit())
  ours = lambda q, k, v, sinks: sj.attend(spec, q, k, v, {'kv_bias': {'logit': sinks}})
  assert sj.check_sink_gradients(ours).ok


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize(
  'error, words, wrong',
  [
    (dict(sink=False), 'left out', {'output', 'dq', 'dk', 'dv', 'd sinks'}),
    (dict(cotangent=False), 'cotangent', {'dq', 'dk', 'd sinks'}),
  ],
)
def test_a_dropped_sink_and_a_dropped_cotangent_are_named(dtype, error, words, wrong):
  found = sj.check_sink_gradients(lambda *x: attention(*x, **error), dtype=dtype, length=256)
  assert not found.ok and words in found.findings[0] and words in str(found)
  assert {row['array'] for row in found.rows if not row['ok']} == wrong


def test_sums_in_bfloat16_are_named():
  found = sj.check_sink_gradients(lambda *x: attention(*x, sums=jnp.bfloat16), length=128)
  assert not found.ok and '16 bits' in found.findings[0], str(found)


def test_other_errors_and_nan_are_wrong():
  reads_future = lambda *x: attention(*x) + attention(*x)[:, ::-1] * 0.5
  future = sj.check_sink_gradients(reads_future, length=64)
  nan = sj.check_sink_gradients(lambda *x: attention(*x) * jnp.nan, length=64)
  assert not future.ok and not nan.ok and 'known reasons' in future.findings[0]
  with pytest.raises(ValueError, match='shape'):
    sj.check_sink_gradients(lambda q, k, v, s: q[:, :, :1], length=64)
