"""The check of other people's attention with sinks: it accepts correct code and names errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sink_jax as sj


def attention(q, k, v, sinks, *, window=10**9, sink=True, cotangent=True, sums=jnp.float32):
  """Softmax with sinks as an outsider would write it, with selectable errors."""
  length, heads, head_dim = q.shape[1:]
  group = heads // k.shape[2]
  k, v = jnp.repeat(k, group, 2), jnp.repeat(v, group, 2)
  product = functools.partial(jnp.einsum, preferred_element_type=sums)
  s = product('bihd,bjhd->bhij', q, k) / np.sqrt(head_dim)
  i, j = jnp.ogrid[:length, :length]
  s = jnp.where((j <= i) & (i - j < window), s.astype(sums), -jnp.inf)
  lse = jax.nn.logsumexp(s, -1)
  p = jnp.exp(s - lse[..., None])
  if sums == jnp.bfloat16:
    out = rounded_sums(p, v)
  else:
    out = product('bhij,bjhd->bihd', p.astype(v.dtype), v)
  factor = jax.nn.sigmoid(lse - sinks[:, None])
  if not cotangent:
    factor = jax.lax.stop_gradient(factor)
  if sink:
    out = out * jnp.swapaxes(factor, 1, 2)[..., None]
  return out.astype(q.dtype)


def rounded_sums(p, v):
  """The product of weights and values, of which each partial sum is rounded."""

  def add(total, term):
    return total + jnp.einsum('bhi,bhd->bihd', *term), None

  terms = jnp.moveaxis(p, 3, 0), jnp.moveaxis(v, 1, 0)
  return jax.lax.scan(add, jnp.zeros_like(v), terms)[0]


def checked(f, **options):
  return sj.check_sink_gradients(jax.jit(f), length=64, **options)


@pytest.mark.parametrize(
  'dtype, window',
  [
    ('float32', dict(window=50)),
    ('bfloat16', {}),
  ],
)
def test_what_is_right_passes(dtype, window):
  found = checked(functools.partial(attention, **window), dtype=dtype, **window)
  assert found.ok, str(found)
  names = [row['array'] for row in found.rows]
  assert names == ['output', 'dq', 'dk', 'dv', 'd sinks']


def test_our_own_attention_passes():
  spec = sj.AttentionSpec(position='Nope()', kv_bias='SinkLogit()')

  def ours(q, k, v, sinks):
    return sj.attend(spec, q, k, v, {'kv_bias': {'logit': sinks}})

  assert checked(ours).ok


OF_SCORES = {'dq', 'dk', 'd sinks'}


@pytest.mark.parametrize(
  'dtype, error, words, wrong',
  [
    ('bfloat16', dict(sink=False), 'left out', OF_SCORES | {'output', 'dv'}),
    ('bfloat16', dict(cotangent=False), 'cotangent', OF_SCORES),
    ('float32', dict(cotangent=False), 'cotangent', OF_SCORES),
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
  def of_the_future(*inputs):
    out = attention(*inputs)
    return out + out[:, ::-1] * 0.5

  assert 'known reasons' in checked(of_the_future).findings[0]
  assert not checked(lambda *inputs: attention(*inputs) * jnp.nan).ok
  with pytest.raises(ValueError, match='shape'):
    checked(lambda q, k, v, sinks: q[:, :, :1])
