"""Decoding with a cache, against the forward pass and against StreamingLLM's procedure."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.models.config import Experts, Layer, Mamba
from sink_jax.models.decode import EMPTY, CachePolicy, check_policy
from sink_jax.models.layers import apply
from sink_jax.models.generate import _begin
from sink_jax.models.transformer import Transformer
from tests.random_params import random_params

T = 11
TINY = dict(
  layers=2, d_model=16, heads=4, kv_heads=2, ffn_hidden=24, vocab_size=32, dtype='float32'
)
MAMBA = Mamba(inner=20, state=3, conv=4, rank=2)


def model(**options):
  config = sj.ModelConfig(**TINY | options)
  return sj.Run(config, random_params(config))


def tokens(length=T, batch=2):
  return jnp.asarray(np.random.default_rng(1).integers(0, 32, (batch, length)))


@functools.partial(jax.jit, static_argnums=(0, 3))
def extend(config, params, inputs, policy, state):
  """Logits (B, L, V) after the new tokens (B, L), and the state."""
  positions = policy.next_positions(state.tokens_read, inputs.shape[1])
  h, _, state = apply(Transformer(config), params, inputs, None, state, positions, method='hidden')
  return apply(Transformer(config), params, h, method='logits'), state


def decoded(run, inputs, policy, first):
  """Logits (B, T - first + 1, V) after tokens first..T. The first ones are read at once."""
  logits, state = _begin(run.config, None, policy, run.params, inputs[:, :first])
  found = [logits[:, None]]
  for t in range(first, inputs.shape[1]):
    logits, state = extend(run.config, run.params, inputs[:, t : t + 1], policy, state)
    found.append(logits)
  return np.concatenate(found, 1)


@pytest.mark.every(8)
@pytest.mark.parametrize(
  'options',
  [
    {},
    dict(attention=sj.AttentionSpec(position='Rope(fraction=0.5)', qk_norm='QKNorm()')),
    dict(
      attention=sj.AttentionSpec(mask='Window(size=4)', position='YarnRope()', head='ElementGate()')
    ),
    dict(
      attention=sj.AttentionSpec(
        kv_bias='SinkLogit()', position='Alibi()', head="ElementGate(source='value')"
      )
    ),
    dict(attention=sj.AttentionSpec(normalizer='Clipped()', kv_bias='ZeroSink()')),
    dict(
      attention=sj.AttentionSpec(kv_bias='KVBias()', position='Learned(max_length=16)'),
      norm='layernorm',
      biases=('qkv', 'out', 'ffn'),
      tied=True,
    ),
    dict(attention=sj.AttentionSpec('Sigmoid()', 'Unnormalized()', position='Sinusoidal()')),
    dict(attention=sj.AttentionSpec('Softpick()', 'AbsSum()', kv_bias='KVBias()')),
    dict(attention=sj.AttentionSpec(kv_bias='PseudoMask(context=9)', position='Nope()')),
    dict(attention=sj.AttentionSpec('Relu()', 'Count()', kv_bias='KVBias()')),
    dict(attention=sj.AttentionSpec(kv_bias='VBias()', position='Relative()')),
    dict(
      attention=sj.AttentionSpec(
        mask='Prefix(length=3)', temperature='LogLength()', value='ValueScale()', kv_bias='KBias()'
      )
    ),
    dict(sink_tokens=1, attention=sj.AttentionSpec(head='Exclusive()')),
    dict(sink_tokens=3),
    dict(sink_tokens=1, attention=sj.AttentionSpec(position='Learned(max_length=16)')),
    dict(norm_location='post', embedding_dim=8, attention=sj.AttentionSpec(head='HeadNorm()')),
    dict(parallel_residual=True),
    dict(norm='dyt', norm_location='sandwich', linear='sigma_reparam'),
    dict(norm_location='protected', attention=sj.AttentionSpec(qk_norm='QKNorm()')),
    dict(
      norm_location='after',
      logit_cap=2.0,
      attention=sj.AttentionSpec('CappedExp(cap=1.5)', qk_norm='ProjectionQKNorm()'),
    ),
    dict(
      layers=4,
      attention=sj.AttentionSpec(position='Nope()'),
      pattern=(Layer(mamba=MAMBA), Layer(experts=Experts(4, 2))),
    ),
    dict(
      layers=4,
      attention=sj.AttentionSpec(value='ValueResidual()'),
      pattern=(Layer(), Layer(mamba=MAMBA)),
    ),
    dict(
      layers=4,
      attention=sj.AttentionSpec(kv_bias='SinkLogit()'),
      ffn='clamped_swiglu',
      pattern=(Layer(mask=sj.Window(3), experts=Experts(3, 2, True)), Layer(position=sj.Nope())),
    ),
  ],
  ids=str,
)
@pytest.mark.parametrize('first', [pytest.param(1, marks=pytest.mark.full), 5])
def test_decoding_equals_the_forward_pass(options, first):
  run = model(**options)
  expected = np.asarray(run.logits(tokens()))[:, first - 1 :]
  # Cached keys are already rotated by text positions, as in all generation without a limit.
  found = decoded(run, tokens(), CachePolicy(T + 3, positions='text'), first)
  np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.typed
@pytest.mark.parametrize(
  'temperature, mask', [('Fixed()', 'Causal()'), ('LogLength()', 'Window(size=4)')]
)
def test_a_sliding_window_that_forgets_is_the_window_mask(temperature, mask):
  """With no sinks and one layer, the cache holds and counts just the keys that the mask shows."""
  run = model(layers=1, attention=sj.AttentionSpec(temperature=temperature, mask=mask))
  windowed = dataclasses.replace(
    run,
    config=dataclasses.replace(
      run.config, attention=sj.AttentionSpec(temperature=temperature, mask=sj.Window(4))
    ),
  )
  expected = np.asarray(windowed.logits(tokens()))
  for positions in ('text', 'cache'):  # the distances are the same
    found = decoded(run, tokens(), CachePolicy(4, positions=positions), 1)
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())


def streaming_llm(run, inputs, size, sinks, positions):
  """One layer by hand: each query rebuilds its cache from the tokens that are still in it."""
  p, config = run.params, run.config
  own = jax.tree.map(lambda x: x[0], p['blocks'])
  ln = lambda x, gain: x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * gain
  out = []
  h = np.asarray(p['embed'])[inputs]
  x = ln(h, own['norm1']['gain'])
  q, k, v = (x @ own['attention'][n]['kernel'] for n in ('query', 'key', 'value'))
  for t in range(inputs.shape[1]):
    kept = [s for s in range(t + 1) if s < sinks or s > t - (size - sinks) or t < size]
    where = np.array(kept) if positions == 'text' else np.arange(len(kept))
    heads = lambda z, n: jnp.asarray(z).reshape(*z.shape[:-1], n, config.dims.head_dim)
    spec = config.attention
    features = lambda x, at: spec.feature_map.features(spec.position.rotate(x, at), {})
    keys, query = features(heads(k[:, kept], 2), where), features(heads(q[:, [t]], 4), where[-1:])
    s = np.einsum('blhd,bthd->bhlt', query, np.repeat(keys, 2, 2)) / 2
    if config.attention.position.has_bias:
      slopes = config.attention.position.slopes(4)[:, None, None]
      s = s + slopes * np.asarray(config.attention.position.distance_bias(where[-1] - where))
    a = np.exp(s - s.max(-1, keepdims=True))
    a /= a.sum(-1, keepdims=True)
    o = np.einsum('bhlt,bthd->blhd', a, np.repeat(heads(v[:, kept], 2), 2, 2))
    y = h[:, t] + o.reshape(len(h), -1) @ own['attention']['out']['kernel']
    z = ln(y, own['norm2']['gain'])
    gate = z @ own['ffn']['w1']['kernel']
    y = (
      y
      + (gate / (1 + np.exp(-gate)) * (z @ own['ffn']['w2']['kernel']))
      @ (own['ffn']['w_out']['kernel'])
    )
    out.append(ln(y, p['final_norm']['gain']) @ p['unembed']['kernel'])
  return np.stack(out, 1)


@pytest.mark.every(4)
@pytest.mark.parametrize(
  'attention',
  [
    dict(position='Rope()'),
    dict(position='Alibi()'),
    dict(position='Relative()'),
    dict(feature_map='EluPlusOne()'),
  ],
  ids=str,
)
@pytest.mark.parametrize('positions', ['cache', 'text'])
@pytest.mark.parametrize(
  'size,sinks,first',
  [
    (5, 2, 1),
    *(pytest.param(*sizes, marks=pytest.mark.full) for sizes in ((5, 2, 5), (6, 0, 3), (4, 3, 1))),
  ],
)
def test_sinks_and_window_are_those_of_streaming_llm(attention, positions, size, sinks, first):
  run = model(layers=1, attention=sj.AttentionSpec(**attention))
  expected = streaming_llm(run, np.asarray(tokens()), size, sinks, positions)[:, first - 1 :]
  found = decoded(run, tokens(), CachePolicy(size, sinks, positions), first)
  np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())


def test_positions_in_the_cache_do_not_know_how_long_the_text_is():
  run, policy = model(layers=1), CachePolicy(5, 2)
  _, state = _begin(run.config, None, policy, run.params, tokens()[:, :5])
  # Stands for many laps of the ring. After a full number of laps, the entries are where they were.
  late = state._replace(tokens_read=state.tokens_read + 300_000_000 * policy.recent)
  for t in range(5, T):
    logits, state = extend(run.config, run.params, tokens()[:, t : t + 1], policy, state)
    found, late = extend(run.config, run.params, tokens()[:, t : t + 1], policy, late)
    np.testing.assert_array_equal(found, logits)


LOG = sj.AttentionSpec(temperature='LogLength()')
PSEUDO = sj.AttentionSpec(kv_bias='PseudoMask(context=9)')


@pytest.mark.parametrize(
  'attention, policy, words',
  [
    (LOG, CachePolicy(5, 2, 'text'), None),
    (LOG, CachePolicy(T), None),
    (LOG, CachePolicy(5, 2), "positions='text', or a size of at least 11"),
    # If the cache holds the window, both have the same keys.
    (dataclasses.replace(LOG, mask='Window(size=5)'), CachePolicy(5, 2), None),
    (PSEUDO, CachePolicy(8, 2), "positions='text', or a size of at least 9"),
    (PSEUDO, CachePolicy(8, 2, 'text'), None),
    (PSEUDO, CachePolicy(9, 2), None),
  ],
  ids=str,
)
def test_what_depends_on_the_length_of_the_text_needs_its_positions(attention, policy, words):
  with pytest.raises(ValueError, match=words) if words else contextlib.nullcontext():
    check_policy(model(attention=attention).config, policy, T)


@pytest.mark.every(3)
@pytest.mark.parametrize(
  'policy',
  [
    CachePolicy(5, 2),
    CachePolicy(5, 2, 'text'),
    CachePolicy(7, 3, 'text'),
    CachePolicy(4),
  ],
)
def test_positions_are_those_of_the_tokens_in_the_cache(policy):
  held = {}  # entry: token
  for read in range(17):
    for count in range(1, policy.recent + 1):
      positions = policy.next_positions(read, count)
      tokens_E = [*(held.get(entry) for entry in range(policy.size)), *range(read, read + count)]
      for i, token in enumerate(range(read, read + count)):
        kept = [
          t
          for t in range(token + 1)
          if t < policy.sinks or t > token - policy.recent or token < policy.size
        ]
        expected = {t: t if policy.positions == 'text' else n for n, t in enumerate(kept)}
        found = {t: int(at) for t, at in zip(tokens_E, positions.keys_LxE[i]) if at != EMPTY}
        assert found == expected and positions.queries_L[i] == expected[token]
      if policy.positions == 'text':
        np.testing.assert_array_equal(positions.kept_L, positions.queries_L)
    held[int(positions.entries_L[0])] = read


def test_bad_policies_are_refused():
  for options in (
    dict(size=0),
    dict(size=4, sinks=4),
    dict(size=4, sinks=-1),
    dict(size=4, positions='absolute'),
  ):
    with pytest.raises(ValueError, match='CachePolicy'):
      CachePolicy(**options)
