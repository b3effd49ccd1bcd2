"""Decoding with a cache, against forward passes of the same tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.models.config import Experts, Layer, Mamba
from sink_jax.models.decode import EMPTY, CachePolicy, empty_state
from sink_jax.models.generate import _begin, _read, text_losses
from sink_jax.models.layers import apply
from sink_jax.models.transformer import Transformer
from tests.random_params import next_token_losses, random_tokens, tiny

MAMBA = Mamba(inner=20, state=3, conv=4, rank=2)


def attention(**components):
  return dict(attention=sj.AttentionSpec(**components))


# Together they have what the cache holds, or reads, in a way of its own: rotated keys, features,
# biases by positions, values, extra keys, sink tokens, gates of the input, states of mixers, and
# blocks that differ.
VARIANTS = {
  'features': attention(
    similarity='Softpick()',
    normalizer='AbsSum()',
    position='YarnRope(fraction=0.5)',
    feature_map='EluPlusOne()',
    qk_norm='QKNorm()',
    kv_bias='KBias()',
  )
  | dict(parallel_residual=True),
  'alibi': attention(
    similarity='CappedExp(cap=1.5)',
    position='Alibi()',
    kv_bias='SinkLogit()',
    qk_norm='ProjectionQKNorm()',
    head="ElementGate(source='value')",
  )
  | dict(norm_location='after', biases=('qkv', 'out', 'ffn'), tied=True, logit_cap=2.0),
  'relative': attention(
    normalizer='Clipped()', position='Relative()', kv_bias='PseudoMask(context=9)'
  ),
  'prefix and sink tokens': attention(
    mask='Prefix(length=5)',
    position='Learned(max_length=16)',
    temperature='LogLength()',
    value='ValueScale()',
    head='Exclusive()',
  )
  | dict(sink_tokens=3, norm='dyt', norm_location='sandwich'),
  'jamba': attention(
    similarity='Sigmoid()',
    normalizer='Unnormalized()',
    position='Sinusoidal()',
    kv_bias='VBias()',
    value='ValueScale()',
    head='HeadNorm()',
  )
  | dict(layers=4, pattern=(Layer(experts=Experts(4, 2)), Layer(mamba=MAMBA))),
  'gpt-oss': attention(position='Llama3Rope()', kv_bias='SinkLogit()', head='ElementGate()')
  | dict(
    norm_location='post',
    embedding_dim=8,
    ffn='clamped_swiglu',
    pattern=(Layer(mask=sj.Window(3), experts=Experts(3, 2, True)), Layer(position=sj.Nope())),
  ),
}


def variant(name):
  return tiny(**dict(kv_heads=2) | VARIANTS[name])


@pytest.mark.parametrize('name', VARIANTS)
def test_a_cache_of_everything_equals_the_forward_pass(name):
  run, text = variant(name), random_tokens(length=11)
  # Cached keys are rotated by text positions, as in all generation without a limit.
  policy = CachePolicy(14, positions='text')

  @jax.jit
  def both(params, text):
    model = functools.partial(apply, Transformer(run.config), params)
    state = empty_state(run.config, policy, len(text))
    begun = policy.first_positions(5 + run.config.sink_tokens)
    first, _, state = model(text[:, :5], None, state, begun, method='hidden')
    later = policy.next_positions(state.tokens_read, 6)
    rest, _, _ = model(text[:, 5:], None, state, later, method='hidden')
    hidden = jnp.concatenate([first, rest], 1)
    return model(text), model(hidden, method='logits')

  expected, found = both(run.params, text)
  np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())


def losses(run, text, policy):
  pieces = text_losses(run.config, run.params, text, policy)
  return np.concatenate(list(pieces), 1)


@pytest.mark.parametrize(
  'components',
  [
    dict(position='YarnRope()', feature_map='EluPlusOne()'),
    dict(position='Alibi()'),
  ],
  ids=str,
)
def test_a_bounded_cache_is_the_forward_pass_of_what_it_keeps(components):
  """StreamingLLM: one layer sees the kept tokens as if they were the whole text."""
  run = tiny(layers=1, kv_heads=2, **attention(**components))
  policy = CachePolicy(5, sinks=2)
  text = random_tokens(1, 17)
  # Two sinks, three recent tokens, and the one to predict.
  windows = [text[0, [0, 1, t - 2, t - 1, t, t + 1]] for t in range(4, 16)]
  windows = np.stack(windows)
  expected = next_token_losses(run.logits(windows[:, :-1]), windows)[:, -1]
  found = losses(run, text, policy)[0, 4:]
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.typed
def test_a_sliding_window_that_forgets_is_the_window_mask():
  """With no sinks and one layer, the cache holds and counts just the keys that the mask shows."""
  spec = attention(temperature='LogLength()', mask='Window(size=4)')
  run, text = tiny(layers=1, kv_heads=2, **spec), random_tokens(length=11)
  expected = next_token_losses(run.logits(text), text)
  for positions in ('text', 'cache'):  # the distances are the same
    found = losses(run, text, CachePolicy(4, positions=positions))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
  'name, policy',
  [('features', CachePolicy(9, 4)), ('gpt-oss', CachePolicy(9, 4, 'text'))],
)
def test_tokens_read_together_have_the_losses_of_one_after_another(name, policy):
  run, text = variant(name), random_tokens(length=40)
  _, expected = read_one_by_one(run, text, policy)
  # Both are float32 but sum in a different order. The largest measured difference is 2e-6.
  found = losses(run, text, policy)
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def read_one_by_one(run, text, policy):
  """((logits after the text, state), losses) of one token after another."""
  model, counts = (run.config, None, policy, run.params), np.full(len(text), text.shape[1])
  begun, key = _begin(*model, text[:, :1]), jax.random.key(0)
  return _read(*model, None, 1, begun, key, 1, text[:, 1:], counts)


def test_positions_in_the_cache_do_not_know_how_long_the_text_is():
  run, policy = tiny(kv_heads=2), CachePolicy(5, 2)
  text = random_tokens(length=11)

  @jax.jit
  def read(state, token):
    positions = policy.next_positions(state.tokens_read, 1)
    model = functools.partial(apply, Transformer(run.config), run.params)
    h, _, state = model(token, None, state, positions, method='hidden')
    return h, state

  _, state = _begin(run.config, None, policy, run.params, text[:, :5])
  # Stands for many laps of the ring. After a full number of laps, the entries are where they were.
  many = 300_000_000 * policy.recent
  late = state._replace(tokens_read=state.tokens_read + many)
  for token in np.split(text[:, 5:], 6, axis=1):
    h, state = read(state, token)
    found, late = read(late, token)
    np.testing.assert_array_equal(found, h)


@pytest.mark.parametrize(
  'policy',
  [
    CachePolicy(5, 2),
    CachePolicy(5, 2, 'text'),
    CachePolicy(7, 3, 'text'),
    CachePolicy(4),
  ],
  ids=str,
)
def test_positions_are_those_of_the_tokens_in_the_cache(policy):
  next_positions = jax.jit(policy.next_positions, static_argnums=1)
  held = [None] * policy.size  # the token in each entry
  for read in range(17):
    for count in range(1, policy.recent + 1):
      positions = jax.device_get(next_positions(read, count))
      tokens_E = [*held, *range(read, read + count)]
      for i in range(count):
        expected = kept_positions(policy, read + i)
        keys = zip(tokens_E, positions.keys_LxE[i])
        assert {token: at for token, at in keys if at != EMPTY} == expected
        assert positions.queries_L[i] == expected[read + i]
      if policy.positions == 'text':
        np.testing.assert_array_equal(positions.kept_L, positions.queries_L)
    held[positions.entries_L[0]] = read


def kept_positions(policy, newest):
  """{token in the cache: its position} when the newest token has been written."""
  kept = range(newest + 1)
  if newest >= policy.size:
    kept = [*kept[: policy.sinks], *kept[newest + 1 - policy.recent :]]
  places = kept if policy.positions == 'text' else range(len(kept))
  return dict(zip(kept, places))
