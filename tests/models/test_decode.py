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
    value='ValueResidual()',
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
    return model(text), model(jnp.concatenate([first, rest], 1), method='logits')

  expected, found = both(run.params, text)
  np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())


def losses(run, text, policy):
  return np.concatenate(list(text_losses(run.config, run.params, text, policy)), 1)


def test_a_bounded_cache_is_the_forward_pass_of_what_it_keeps():
  """StreamingLLM: one layer sees the kept tokens as if they were the whole text."""
  spec = attention(position='YarnRope()', feature_map='EluPlusOne()')
  run, text, policy = tiny(layers=1, kv_heads=2, **spec), random_tokens(1, 17), CachePolicy(5, 2)
  kept = [[0, 1, t - 2, t - 1, t] for t in range(4, 16)]
  windows = np.take(text[0], [[*tokens, tokens[-1] + 1] for tokens in kept])
  expected = next_token_losses(run.logits(windows[:, :-1]), windows)[:, -1]
  np.testing.assert_allclose(losses(run, text, policy)[0, 4:], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.typed
def test_a_sliding_window_that_forgets_is_the_window_mask():
  """With no sinks and one layer, the cache holds and counts just the keys that the mask shows."""
  text, mask = random_tokens(length=11), sj.Window(size=4)
  run = tiny(layers=1, kv_heads=2, **attention(temperature='LogLength()', mask=mask))
  expected = next_token_losses(run.logits(text), text)
  for positions in ('text', 'cache'):  # the distances are the same
    found = losses(run, text, CachePolicy(4, positions=positions))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
  'name, policy', [('features', CachePolicy(9, 4)), ('gpt-oss', CachePolicy(9, 4, 'text'))]
)
def test_tokens_read_together_have_the_losses_of_one_after_another(name, policy):
  run, text = variant(name), random_tokens(length=40)
  model, counts = (run.config, None, policy, run.params), np.full(2, 40)
  begun = _begin(*model, text[:, :1])
  _, expected = _read(*model, None, 1, begun, jax.random.key(0), 1, text[:, 1:], counts)
  # Both are float32 but sum in a different order. The largest measured difference is 2e-6.
  np.testing.assert_allclose(losses(run, text, policy), expected, rtol=1e-5, atol=1e-5)


def test_positions_in_the_cache_do_not_know_how_long_the_text_is():
  run, policy, text = tiny(kv_heads=2), CachePolicy(5, 2), random_tokens(length=11)

  @jax.jit
  def read(state, token):
    positions = policy.next_positions(state.tokens_read, 1)
    model = functools.partial(apply, Transformer(run.config), run.params)
    h, _, state = model(token, None, state, positions, method='hidden')
    return h, state

  _, state = _begin(run.config, None, policy, run.params, text[:, :5])
  # Stands for many laps of the ring. After a full number of laps, the entries are where they were.
  late = state._replace(tokens_read=state.tokens_read + 300_000_000 * policy.recent)
  for t in range(5, 11):
    h, state = read(state, text[:, t : t + 1])
    found, late = read(late, text[:, t : t + 1])
    np.testing.assert_array_equal(found, h)


@pytest.mark.parametrize(
  'policy',
  [CachePolicy(5, 2), CachePolicy(5, 2, 'text'), CachePolicy(7, 3, 'text'), CachePolicy(4)],
  ids=str,
)
def test_positions_are_those_of_the_tokens_in_the_cache(policy):
  next_positions = jax.jit(policy.next_positions, static_argnums=1)
  held = {}  # entry: token
  for read in range(17):
    for count in range(1, policy.recent + 1):
      positions = jax.device_get(next_positions(read, count))
      new = range(read, read + count)
      tokens_E = [*(held.get(entry) for entry in range(policy.size)), *new]
      for i, token in enumerate(new):
        recent = token - policy.recent
        kept = [
          t for t in range(token + 1) if t < policy.sinks or t > recent or token < policy.size
        ]
        expected = {t: t if policy.positions == 'text' else n for n, t in enumerate(kept)}
        keys = zip(tokens_E, positions.keys_LxE[i])
        assert {token: at for token, at in keys if at != EMPTY} == expected
        assert positions.queries_L[i] == expected[token]
      if policy.positions == 'text':
        np.testing.assert_array_equal(positions.kept_L, positions.queries_L)
    held[int(positions.entries_L[0])] = read
