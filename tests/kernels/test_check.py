"""The check of other people's attention with sinks: it accepts correct code and names errors."""

import functools

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
    terms = jnp.moveaxis(p, 3, 0), jnp.moveaxis(v, 1, 0)
    out, _ = jax.lax.scan(add, jnp.zeros_like(q), terms)
  else:
    out = jnp.einsum('bhij,bjhd->bihd', p.astype(v.dtype), v, preferred_element_type=sums)
  factor = jax.nn.sigmoid(lse - sinks[:, None])
  if not cotangent:
    factor = jax.lax.stop_gradient(factor)
  out = out * jnp.swapaxes(factor, 1, 2)[..., None] if sink else out
  return out.astype(q.dtype)


def checked(f, **options):
  return sj.check_sink_gradients(jax.jit(f), length=64, **options)


@pytest.mark.parametrize('dtype, window', [('float32', 50), ('bfloat16', None)])
def test_what_is_right_passes(dtype, window):
  windowed = functools.partial(attention, window=window)
  found = checked(windowed, dtype=dtype, window=window)
  assert found.ok, str(found)
  assert [row['array'] for row in found.rows] == ['output', 'dq', 'dk', 'dv', 'd sinks']


def test_our_own_attention_passes():
  spec = sj.AttentionSpec(position=sj.Nope(), kv_bias=sj.SinkLogit())
  ours = lambda q, k, v, sinks: sj.attend(spec, q, k, v, {'kv_bias': {'logit': sinks}})
  assert checked(ours).ok


@pytest.mark.parametrize(
  'dtype, error, words, wrong',
  [
    ('bfloat16', dict(sink=False), 'left out', {'output', 'dq', 'dk', 'dv', 'd sinks'}),
    ('bfloat16', dict(cotangent=False), 'cotangent', {'dq', 'dk', 'd sinks'}),
    ('float32', dict(cotangent=False), 'cotangent', {'dq', 'dk', 'd sinks'}),
  ],
)
def test_a_dropped_sink_and_a_dropped_cotangent_are_named(dtype, error, words, wrong):
  found = checked(functools.partial(attention, **error), dtype=dtype)
  assert words in found.findings[0] and words in str(found)
  assert {row['array'] for row in found.rows if not row['ok']} == wrong


def test_sums_in_bfloat16_are_named():
  found = checked(functools.partial(attention, sums=jnp.bfloat16))
  assert '16 bits' in found.findings[0], str(found)


def test_other_errors_and_nan_are_wrong():
  future = checked(lambda *x: attention(*x) + attention(*x)[:, ::-1] * 0.5)
  assert 'known reasons' in future.findings[0]
  assert not checked(lambda *x: attention(*x) * jnp.nan).ok
  with pytest.raises(ValueError, match='shape'):
    checked(lambda q, k, v, s: q[:, :, :1])
