"""Generation and scoring with a cache, against full forward passes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.data.tokenizer import Bytes
from sink_jax.models.config import Layer, Mamba
from sink_jax.models.decode import CachePolicy
from sink_jax.models.generate import Sampling, _read, stream_texts, text_losses
from tests.models.test_decode import decoded
from tests.random_params import random_params

CONFIG = sj.ModelConfig(
  layers=2, d_model=16, heads=2, ffn_hidden=24, vocab_size=32, dtype='float32'
)


@pytest.fixture(scope='module')
def run():
  return sj.Run(CONFIG, random_params(CONFIG))


def prompt(length=4, batch=2):
  return np.random.default_rng(3).integers(0, 32, (batch, length))


def model(**options):
  config = dataclasses.replace(CONFIG, **options)
  return sj.Run(config, random_params(config))


def stream(run, texts, length, **options):
  """The pieces of generated texts."""
  return list(stream_texts(run.config, run.params, texts, length, **options))


def losses(run, text, policy):
  return np.concatenate(list(text_losses(run.config, run.params, text, policy)), 1)


def greedy(run, text, count):
  """Appends the most likely token of a full forward pass, `count` times."""
  for _ in range(count):
    text = np.concatenate([text, np.argmax(run.logits(text)[:, -1], -1)[:, None]], 1)
  return text


def test_greedy_generation_is_the_argmax_of_forward_passes(run):
  text = greedy(run, prompt(), 9)
  np.testing.assert_array_equal(run.generate(prompt(), 9), text[:, 4:])
  pieces = stream(run, prompt(), 9, chunk=4)
  assert [list(map(len, piece)) for piece in pieces] == [[4, 4], [4, 4], [1, 1]]
  np.testing.assert_array_equal(np.concatenate(pieces, 1), text[:, 4:])


def test_samples_follow_the_models_distribution(run):
  text = np.repeat(prompt(batch=1), 4000, 0)
  found = run.generate(text, 1, temperature=0.7, seed=1)[:, 0]
  expected = np.asarray(jax.nn.softmax(run.logits(prompt(batch=1))[0, -1] / 0.7))
  shares = np.bincount(found, minlength=32) / 4000
  assert np.abs(shares - expected).max() < 4 * 0.5 / 4000**0.5  # at most four standard errors
  assert np.abs(np.roll(shares, 1) - expected).max() > 8 * 0.5 / 4000**0.5
  best = set(np.argsort(expected)[-3:].tolist())
  assert set(run.generate(text, 1, temperature=5.0, top_k=3)[:, 0].tolist()) == best


def test_a_seed_chooses_the_sample_and_the_size_of_pieces_does_not(run):
  options = [dict(seed=seed, chunk=chunk) for seed, chunk in ((5, 5), (5, 24), (6, 24))]
  texts = [np.concatenate(stream(run, prompt(), 24, temperature=1.0, **one), 1) for one in options]
  np.testing.assert_array_equal(texts[0], texts[1])
  assert (texts[1] != texts[2]).any()
  first, second, third = (texts[0][:, i : i + 5] for i in (0, 5, 10))
  assert (first != second).any() and (second != third).any()


TIES, SHARES = [1.0, 1.0, 2.0, 1.0], np.log([0.1, 0.4, 0.2, 0.3])


@pytest.mark.parametrize(
  'logits, options, kept',
  [
    *((TIES, options, {2}) for options in ((1e-40,), (1e-7,), (1e-3,), (1.0, 1))),
    (TIES, (100.0, 2), {0, 2}),
    (TIES, (1e30,), {0, 1, 2, 3}),
    # top_p keeps the fewest tokens whose shares reach it.
    (SHARES, (1.0, None, 1e-6), {1}),
    (SHARES, (1.0, None, 0.39), {1}),
    (SHARES, (1.0, None, 0.41), {1, 3}),
    (SHARES, (1.0, None, 0.69), {1, 3}),
    (SHARES, (1.0, None, 0.71), {1, 2, 3}),
    (SHARES, (1.0, None, 1.0), {0, 1, 2, 3}),
    # Shares are those among the top_k tokens: 4/7 and 3/7 for two.
    (SHARES, (1.0, 2, 0.56), {1}),
    (SHARES, (1.0, 2, 0.58), {1, 3}),
    (SHARES, (0.5, None, 0.5), {1}),
  ],
  ids=str,
)  # 16/30 at half the temperature
def test_tokens_that_are_sampled(logits, options, kept):
  """The set of tokens in a few hundred draws."""
  rows = jnp.tile(jnp.asarray(logits), (400, 1))
  drawn = Sampling(*options).sample(rows, jax.random.key(0), jnp.zeros(400, jnp.int32))
  assert {*np.asarray(drawn).tolist()} == kept


def test_a_text_ends_with_its_end_of_text(run):
  whole = run.generate(prompt(batch=3), 12)
  end = int(whole[0, 5])
  lengths = [list(row).index(end) + 1 if end in row else 12 for row in whole]
  ended = run.generate(prompt(batch=3), 12, eos_token_id=end, policy=CachePolicy(16))
  assert min(lengths) < max(lengths) == ended.shape[1]
  for row, expected, length in zip(ended, whole, lengths):
    np.testing.assert_array_equal(row[:length], expected[:length])
    assert (row[length:] == end).all()
  # Once all texts have ended, nothing more is generated, for any size of the pieces.
  ends = sorted({int(row[2]) for row in whole})
  stopped = stream(run, prompt(batch=3), 12, eos_token_id=ends, chunk=2)
  assert sum(max(map(len, piece)) for piece in stopped) <= 3


@pytest.mark.every(2)
@pytest.mark.parametrize(
  'options',
  [
    {},
    dict(policy=CachePolicy(8, 2)),
    dict(temperature=1.0, top_p=0.9, seed=3),
  ],
  ids=str,
)
def test_padding_changes_nothing(run, options):
  rng, lengths = np.random.default_rng(0), [3, 9, 1]
  texts = [rng.integers(0, 32, n) for n in lengths]
  tokens, mask = np.full((3, 9), 7), np.zeros((3, 9), int)
  for row, text in enumerate(texts):
    where = slice(0, len(text)) if row == 0 else slice(9 - len(text), 9)
    tokens[row, where], mask[row, where] = text, 1
  found = run.generate(tokens, 6, mask=mask, **options)
  assert found.shape == (3, 6)
  for row, text in enumerate(texts):  # a sample depends on the row of its text
    np.testing.assert_array_equal(found[row], run.generate([text] * 3, 6, **options)[row])
  ended = run.generate(tokens, 6, mask=mask, eos_token_id=int(found[1, 1]), **options)
  assert (ended[1, 1:] == found[1, 1]).all()
  # Without padding, a mask changes nothing.
  np.testing.assert_array_equal(
    run.generate(tokens, 6, **options), run.generate(tokens, 6, mask=np.ones((3, 9)), **options)
  )
  first = dataclasses.replace(run, first_token=5).generate(tokens, 6, mask=mask)
  np.testing.assert_array_equal(first[1], run.generate([[5, *texts[1]]], 6)[0])


@pytest.mark.every(3)
@pytest.mark.parametrize('policy', [CachePolicy(8, 2), CachePolicy(20), CachePolicy(40, 4, 'text')])
def test_a_prompt_longer_than_the_cache_is_read_in_pieces(run, policy):
  text = prompt(length=37)
  expected = np.argmax(decoded(run, jnp.asarray(text), policy, 1)[:, -1], -1)
  np.testing.assert_array_equal(run.generate(text, 1, policy=policy)[:, 0], expected)
  pieces = stream(run, [text[0], text[1, :30]], 4, policy=policy)
  np.testing.assert_array_equal(
    np.concatenate([piece[0] for piece in pieces]), run.generate(text, 4, policy=policy)[0]
  )


def test_words_in_and_words_out():
  bytes_ = Bytes().open()
  run = dataclasses.replace(model(vocab_size=258), read_tokenizer=lambda run: bytes_)
  texts = ['ab', 'a longer text']
  for text, words in zip(texts, run.generate_texts(texts, 8, eos_token_id=None)):
    assert words == bytes_.decode(run.generate([bytes_.encode(text)], 8)[0])
  whole = run.generate([bytes_.encode('ab')], 8)[0].tolist()
  stopped = run.generate_texts(texts, 8, eos_token_id=whole[3])
  assert stopped[0] == bytes_.decode(whole[: whole.index(whole[3])])
  for bad, options, message in (
    (['a', ''], {}, "bos='force'"),
    ('ab', {}, 'several'),
    (texts, dict(eos_token_id=258), 'eos_token_id'),
  ):
    with pytest.raises(ValueError, match=message):
      run.generate_texts(bad, 8, **options)


def test_a_prefix_is_read_at_once():
  run = model(attention=sj.AttentionSpec(mask='Prefix(length=4)'))
  text = greedy(run, prompt(length=4), 5)
  np.testing.assert_array_equal(run.generate(prompt(length=4), 5), text[:, 4:])
  with pytest.raises(ValueError, match='read at once; here these are 3'):
    run.generate(prompt(length=3), 5)
  with pytest.raises(ValueError, match='read at once; here these are 1'):
    losses(run, text, CachePolicy(9))
  run, given = model(attention=sj.AttentionSpec(mask='Prefix(length=9)')), prompt(length=12)
  together = run.generate(given[:2], 5, mask=np.arange(12) < [[9], [12]])
  np.testing.assert_array_equal(together[:1], run.generate(given[:1, :9], 5))


def test_a_cache_that_keeps_everything_scores_as_the_forward_pass(run):
  text = prompt(length=40)
  logits = np.asarray(run.logits(text), np.float64)
  log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  expected = -np.take_along_axis(log_p[:, :-1], text[:, 1:, None], -1)[..., 0]
  found = losses(run, text, CachePolicy(40))
  np.testing.assert_allclose(found, expected, atol=1e-5)
  windowed = losses(run, text, CachePolicy(8))
  np.testing.assert_allclose(windowed[:, :7], expected[:, :7], atol=1e-5)
  assert np.abs(windowed[:, 12:] - expected[:, 12:]).max() > 1e-3


def test_texts_are_scored_as_they_are_but_continued_after_the_first_token(run):
  text, policy = prompt(length=8), CachePolicy(12)
  begun = dataclasses.replace(run, first_token=5)
  with_token = np.pad(text, ((0, 0), (1, 0)), constant_values=5)
  for tokens in (text, with_token):
    np.testing.assert_array_equal(losses(begun, tokens, policy), losses(run, tokens, policy))
    np.testing.assert_array_equal(begun.generate(tokens, 3), run.generate(with_token, 3))
  np.testing.assert_array_equal(begun.begun([text[0], with_token[1]]), with_token)


def test_a_text_of_any_length_is_scored_by_one_program(run):
  text, policy = prompt(length=40), CachePolicy(18, 2)
  before = _read._cache_size()
  pieces = list(text_losses(run.config, run.params, text, policy))
  assert _read._cache_size() == before + 1
  assert [piece.shape for piece in pieces] == [(2, 32), (2, 7)]


MAMBA = Mamba(inner=20, state=3, conv=4, rank=2)
SCORED = [
  {},
  dict(attention=sj.AttentionSpec(position=sj.Rope(fraction=0.5))),
  dict(
    attention=sj.AttentionSpec(
      position=sj.Llama3Rope(
        factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=16
      )
    )
  ),
  dict(attention=sj.AttentionSpec(position='Nope()')),
  dict(attention=sj.AttentionSpec(position='Alibi()')),
  dict(attention=sj.AttentionSpec(qk_norm=sj.QKNorm(), kv_bias=sj.SinkLogit())),
  dict(attention=sj.AttentionSpec(kv_bias=sj.KBias())),
  dict(attention=sj.AttentionSpec('Sigmoid()', 'Unnormalized()')),
  dict(pattern=(Layer(mask=sj.Window(size=5)), Layer(position=sj.Nope()))),
  dict(pattern=(Layer(mask=sj.Window(size=20), position=sj.Rope(base=100.0)), Layer())),
  dict(sink_tokens=1, attention=sj.AttentionSpec(position='Alibi()', head='ElementGate()')),
  dict(
    attention=sj.AttentionSpec(kv_bias='KVBias()', value='ValueResidual()'),
    pattern=(Layer(), Layer(mamba=MAMBA)),
  ),
  dict(attention=sj.AttentionSpec(position='YarnRope(fraction=0.5)', feature_map='EluPlusOne()')),
]
POLICIES = [
  CachePolicy(9, 1),
  CachePolicy(9, 4),
  CachePolicy(9, 4, 'text'),
  CachePolicy(9),
  CachePolicy(40, 4),
  CachePolicy(64),
]


# With --full every policy, otherwise the first and the second alternately.
@pytest.mark.every(12)
@pytest.mark.parametrize(
  'options, policy',
  [
    pytest.param(options, policy, marks=() if m == n % 2 else pytest.mark.full)
    for n, options in enumerate(SCORED)
    for m, policy in enumerate(POLICIES)
    if policy.sinks or not options.get('sink_tokens')
  ],
  ids=str,
)
def test_tokens_scored_together_have_the_losses_of_one_after_another(options, policy):
  run, text = model(heads=4, kv_heads=2, **options), prompt(length=40)
  log_p = jax.nn.log_softmax(decoded(run, jnp.asarray(text), policy, 1)[:, :-1])
  expected = -np.take_along_axis(np.asarray(log_p), text[:, 1:, None], -1)[..., 0]
  # Both are float32 but sum in a different order. The largest measured difference is 2e-6.
  np.testing.assert_allclose(losses(run, text, policy), expected, rtol=1e-5, atol=1e-5)


LEARNED = sj.AttentionSpec(position='Learned(max_length=8)')
MASK = 'shape of the tokens, .2, 4., and in every row 1'


@pytest.mark.parametrize(
  'options, message',
  [
    (dict(length=0), 'length'),
    (dict(chunk=0), 'chunk'),
    (dict(temperature=-1.0), 'temperature'),
    (dict(top_k=33), 'top_k'),
    (dict(temperature=float('nan')), 'temperature'),
    (dict(temperature=float('inf')), 'temperature'),
    (dict(seed=-1), 'seed'),
    (dict(seed=2**40), 'seed'),
    (dict(top_k=0), 'top_k'),
    (dict(top_p=0.0), 'top_p'),
    (dict(top_p=1.1), 'top_p'),
    (dict(eos_token_id=32), 'eos_token_id'),
    (dict(mask=[[1, 0, 1, 1], [1, 1, 1, 1]]), MASK),
    (dict(mask=[[1, 1, 1, 1], [0, 0, 0, 0]]), MASK),
    (dict(mask=np.ones((2, 3))), MASK),
    (dict(mask=2 * np.ones((2, 4))), MASK),
    (dict(tokens=prompt() + 31), 'vocabulary has 32'),
    (dict(tokens=prompt()[0]), r'shape \(S, T\)'),
    (dict(tokens=np.zeros((2, 0), int)), 'T at least 1'),
    (dict(attention=LEARNED, length=5), '8 learned positions'),
    (dict(attention=LEARNED, length=5, sink_tokens=1), '8 learned positions'),
    *(
      (dict(sink_tokens=2, length=9, policy=CachePolicy(6, sinks)), 'give it sinks of at least 2')
      for sinks in (0, 1)
    ),
    (
      dict(vocab_size=0, input_features=2, output_features=2, tokens=np.zeros((2, 4, 2))),
      'no tokens',
    ),
  ],
  ids=str,
)
def test_what_cannot_be_generated(options, message):
  changed = {name: options[name] for name in vars(CONFIG).keys() & options.keys()}
  given = {name: value for name, value in options.items() if name not in changed}
  run = sj.Run(dataclasses.replace(CONFIG, **changed), {})
  with pytest.raises(ValueError, match=message):  # raised before anything runs
    run.generate(**dict(tokens=prompt(), length=2) | given)


@pytest.mark.parametrize(
  'options, length, policy',
  [
    # A cache that counts its positions never runs out of them.
    (dict(attention=LEARNED), 20, CachePolicy(8, 2)),
    *(
      (dict(attention=LEARNED, sink_tokens=1), 4, policy)
      for policy in (None, CachePolicy(9, 2), CachePolicy(9, 2, 'text'))
    ),
    (dict(attention=LEARNED, sink_tokens=1), 12, CachePolicy(9, 2)),
    (dict(sink_tokens=2), 9, CachePolicy(6, 2)),
  ],
  ids=str,
)
def test_all_positions_of_a_cache_can_be_used(options, length, policy):
  assert model(**options).generate(prompt(), length, policy=policy).shape == (2, length)
