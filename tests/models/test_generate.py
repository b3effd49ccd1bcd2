"""Generation and scoring with a cache, against whole forward passes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.data.tokenizer import Bytes
from sink_jax.models import generate
from sink_jax.models.config import Layer
from sink_jax.models.decode import CachePolicy
from sink_jax.models.generate import Sampling, stream, stream_texts, text_losses
from tests.models.test_decode import decoded
from tests.random_params import random_params

CONFIG = sj.ModelConfig(layers=2, d_model=16, heads=2, ffn_hidden=24, vocab_size=32,
                        dtype='float32')


@pytest.fixture(scope='module')
def run():
  return sj.Run(CONFIG, random_params(CONFIG))


def prompt(length=4, batch=2):
  return np.random.default_rng(3).integers(0, 32, (batch, length))


def test_greedy_generation_is_the_argmax_of_forward_passes(run):
  text = prompt()
  for _ in range(9):
    following = np.argmax(run.logits(text)[:, -1], -1)
    text = np.concatenate([text, following[:, None]], 1)
  np.testing.assert_array_equal(run.generate(prompt(), 9), text[:, 4:])
  pieces = list(stream(run, prompt(), 9, chunk=4))
  assert [p.shape for p in pieces] == [(2, 4), (2, 4), (2, 1)]
  np.testing.assert_array_equal(np.concatenate(pieces, 1), text[:, 4:])


def test_samples_follow_the_models_distribution(run):
  text = np.repeat(prompt(batch=1), 4000, 0)
  found = run.generate(text, 1, temperature=0.7, seed=1)[:, 0]
  expected = np.asarray(jax.nn.softmax(run.logits(prompt(batch=1))[0, -1] / 0.7))
  shares = np.bincount(found, minlength=32) / 4000
  assert np.abs(shares - expected).max() < 4 * 0.5 / 4000**0.5  # four standard errors at most
  assert np.abs(np.roll(shares, 1) - expected).max() > 8 * 0.5 / 4000**0.5
  best = set(np.argsort(expected)[-3:].tolist())
  assert set(run.generate(text, 1, temperature=5.0, top_k=3)[:, 0].tolist()) == best


def test_seeds_choose_the_sample(run):
  text = run.generate(prompt(), 20, temperature=1.0, seed=5)
  np.testing.assert_array_equal(text, run.generate(prompt(), 20, temperature=1.0, seed=5))
  assert (text != run.generate(prompt(), 20, temperature=1.0, seed=6)).any()


def test_the_size_of_the_pieces_changes_no_sample(run):
  text = [np.concatenate(list(stream(run, prompt(), 24, temperature=1.0, seed=5, chunk=chunk)), 1)
          for chunk in (5, 24)]
  np.testing.assert_array_equal(*text)
  first, second, third = (text[0][:, i:i + 5] for i in (0, 5, 10))
  assert (first != second).any() and (second != third).any()


def sampled(logits_V, *options):
  """All tokens that a few hundred draws give."""
  rows = jnp.tile(jnp.asarray(logits_V), (400, 1))
  return set(np.asarray(Sampling(*options).sample(
      rows, jax.random.key(0), jnp.zeros(400, jnp.int32))).tolist())


def test_extreme_temperatures_and_ties():
  for options in ((1e-40,), (1e-7,), (1e-3,), (1.0, 1)):
    assert sampled([1.0, 1.0, 2.0, 1.0], *options) == {2}
  assert sampled([1.0, 1.0, 2.0, 1.0], 100.0, 2) == {0, 2}
  assert sampled([1.0, 1.0, 2.0, 1.0], 1e30) == {0, 1, 2, 3}


@pytest.mark.parametrize('options, kept', [
    ((1.0, None, 1e-6), {1}), ((1.0, None, 0.39), {1}), ((1.0, None, 0.41), {1, 3}),
    ((1.0, None, 0.69), {1, 3}), ((1.0, None, 0.71), {1, 2, 3}), ((1.0, None, 1.0), {0, 1, 2, 3}),
    # Shares are those among the top_k: 4/7 and 3/7 of two.
    ((1.0, 2, 0.56), {1}), ((1.0, 2, 0.58), {1, 3}),
    ((0.5, None, 0.5), {1})])  # 16/30 at half the temperature
def test_top_p_keeps_the_fewest_tokens_that_sum_to_it(options, kept):
  assert sampled(np.log([0.1, 0.4, 0.2, 0.3]), *options) == kept


def test_a_text_ends_with_its_end_of_text(run):
  whole = run.generate(prompt(batch=3), 12)
  end = int(whole[0, 5])
  lengths = [list(row).index(end) + 1 if end in row else 12 for row in whole]
  ended = run.generate(prompt(batch=3), 12, eos_token_id=end, policy=CachePolicy(16))
  assert min(lengths) < max(lengths) == ended.shape[1]
  for row, expected, length in zip(ended, whole, lengths):
    np.testing.assert_array_equal(row[:length], expected[:length])
    assert (row[length:] == end).all()
  # Nothing more is made once all have ended, whatever the pieces.
  ends = sorted({int(row[2]) for row in whole})
  stopped = list(stream(run, prompt(batch=3), 12, eos_token_id=ends, chunk=2))
  assert [piece.shape[1] for piece in stopped] in ([2, 1], [2], [1])


@pytest.mark.every(2)
@pytest.mark.parametrize('options', [{}, dict(policy=CachePolicy(8, 2)),
                                     dict(temperature=1.0, top_p=0.9, seed=3)], ids=str)
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
  # A batch without padding is the same with and without a mask.
  np.testing.assert_array_equal(run.generate(tokens, 6, **options),
                                run.generate(tokens, 6, mask=np.ones((3, 9)), **options))
  first = dataclasses.replace(run, first_token=5).generate(tokens, 6, mask=mask)
  np.testing.assert_array_equal(first[1], run.generate([[5, *texts[1]]], 6)[0])


@pytest.mark.every(3)
@pytest.mark.parametrize('policy', [CachePolicy(8, 2), CachePolicy(20), CachePolicy(40, 4, 'text')])
def test_a_prompt_longer_than_the_cache_is_read_in_pieces(run, policy):
  text = prompt(length=37)
  expected = np.argmax(decoded(run, jnp.asarray(text), policy, 1)[:, -1], -1)
  np.testing.assert_array_equal(run.generate(text, 1, policy=policy)[:, 0], expected)
  pieces = stream_texts(run, [text[0], text[1, :30]], 4, policy=policy)
  np.testing.assert_array_equal(np.concatenate([piece[0] for piece in pieces]),
                                run.generate(text, 4, policy=policy)[0])


def test_words_in_and_words_out():
  config = dataclasses.replace(CONFIG, vocab_size=258)
  bytes_ = Bytes().open()
  run = sj.Run(config, random_params(config), read_tokenizer=lambda run: bytes_)
  texts = ['ab', 'a longer text']
  found = run.generate_texts(texts, 8, eos_token_id=None)
  for text, words in zip(texts, found):
    following = run.generate([bytes_.encode(text)], 8)[0]
    assert words == bytes_.decode(following)
  whole = run.generate([bytes_.encode('ab')], 8)[0].tolist()
  stopped = run.generate_texts(texts, 8, eos_token_id=whole[3])
  assert stopped[0] == bytes_.decode(whole[:whole.index(whole[3])])
  with pytest.raises(ValueError, match="bos='force'"):
    run.generate_texts(['a', ''], 8)
  with pytest.raises(ValueError, match='several'):
    run.generate_texts('ab', 8)
  with pytest.raises(ValueError, match='eos_token_id'):
    run.generate_texts(texts, 8, eos_token_id=258)


def test_a_prefix_is_read_at_once():
  config = dataclasses.replace(CONFIG, attention=sj.AttentionSpec(mask='Prefix(length=4)'))
  run = sj.Run(config, random_params(config))
  text = prompt(length=4)
  for _ in range(5):
    text = np.concatenate([text, np.argmax(run.logits(text)[:, -1], -1)[:, None]], 1)
  np.testing.assert_array_equal(run.generate(prompt(length=4), 5), text[:, 4:])
  with pytest.raises(ValueError, match='read at once; here these are 3'):
    run.generate(prompt(length=3), 5)
  with pytest.raises(ValueError, match='read at once; here these are 1'):
    text_losses(run, text, CachePolicy(9))


def test_a_cache_that_keeps_everything_scores_as_the_forward_pass(run):
  text = prompt(length=40)
  logits = np.asarray(run.logits(text), np.float64)
  log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  expected = -np.take_along_axis(log_p[:, :-1], text[:, 1:, None], -1)[..., 0]
  found = np.concatenate(list(text_losses(run, text, CachePolicy(40))), 1)
  np.testing.assert_allclose(found, expected, atol=1e-5)
  windowed = np.concatenate(list(text_losses(run, text, CachePolicy(8))), 1)
  np.testing.assert_allclose(windowed[:, :7], expected[:, :7], atol=1e-5)
  assert np.abs(windowed[:, 12:] - expected[:, 12:]).max() > 1e-3


def test_texts_are_scored_as_they_are_but_continued_after_the_first_token(run):
  text, policy = prompt(length=8), CachePolicy(12)
  begun = dataclasses.replace(run, first_token=5)
  with_token = np.pad(text, ((0, 0), (1, 0)), constant_values=5)
  losses = lambda run, text: np.concatenate(list(text_losses(run, text, policy)), 1)
  np.testing.assert_array_equal(losses(begun, text), losses(run, text))
  np.testing.assert_array_equal(losses(begun, with_token), losses(run, with_token))
  np.testing.assert_array_equal(begun.generate(text, 3), run.generate(with_token, 3))


def test_a_text_of_any_length_is_scored_by_one_program(run):
  text, policy = prompt(length=40), CachePolicy(18, 2)
  before = generate._read._cache_size()
  pieces = list(text_losses(run, text, policy))
  assert generate._read._cache_size() == before + 1
  assert [piece.shape for piece in pieces] == [(2, 32), (2, 7)]


SCORED = [
    (dict(position=sj.Rope()), [{}]), (dict(position=sj.Rope(fraction=0.5)), [{}]),
    (dict(position=sj.Llama3Rope(factor=8.0, low_frequency_factor=1.0,
                                 high_frequency_factor=4.0, original_length=16)), [{}]),
    (dict(position=sj.Nope()), [{}]), (dict(position=sj.Alibi()), [{}]),
    (dict(qk_norm=sj.QKNorm(), kv_bias=sj.SinkLogit()), [{}]), (dict(kv_bias=sj.KBias()), [{}]),
    (dict(similarity=sj.Sigmoid(), normalizer=sj.Unnormalized()), [{}]),
    (dict(), [dict(mask=sj.Window(size=5)), dict(position=sj.Nope())]),
    (dict(), [dict(mask=sj.Window(size=20), position=sj.Rope(base=100.0)), {}])]
POLICIES = [CachePolicy(9), CachePolicy(9, 4), CachePolicy(9, 4, 'text'), CachePolicy(9, 1),
            CachePolicy(40, 4), CachePolicy(64)]


# With --full every policy, otherwise the first and the second by turns.
@pytest.mark.every(12)
@pytest.mark.parametrize('options, layers, policy', [
    pytest.param(*scored, policy, marks=() if m == n % 2 else pytest.mark.full)
    for n, scored in enumerate(SCORED) for m, policy in enumerate(POLICIES)], ids=str)
def test_tokens_scored_together_have_the_losses_of_one_after_another(options, layers, policy):
  config = dataclasses.replace(
      CONFIG, heads=4, kv_heads=2, attention=sj.AttentionSpec(**options),
      pattern=tuple(Layer(**layer) for layer in layers))
  model, text = sj.Run(config, random_params(config)), prompt(length=40)
  together = np.concatenate(list(text_losses(model, text, policy)), 1)
  log_p = jax.nn.log_softmax(decoded(model, jnp.asarray(text), policy, 1)[:, :-1])
  expected = -np.take_along_axis(np.asarray(log_p), text[:, 1:, None], -1)[..., 0]
  # Float32 against float32, in sums of another order; measured: at most 2e-6.
  np.testing.assert_allclose(together, expected, rtol=1e-5, atol=1e-5)


def test_bad_input_is_refused_before_anything_runs(run):
  shape = 'in the shape of the tokens'
  for options, message in (
      (dict(length=0), 'length'), (dict(temperature=-1.0), 'temperature'), (dict(top_k=33), 'top_k'),
      (dict(temperature=float('nan')), 'temperature'), (dict(temperature=float('inf')), 'temperature'),
      (dict(seed=-1), 'seed'), (dict(seed=2**40), 'seed'), (dict(top_k=0), 'top_k'),
      (dict(top_p=0.0), 'top_p'), (dict(top_p=1.1), 'top_p'), (dict(eos_token_id=32), 'eos_token_id'),
      (dict(mask=[[1, 0, 1, 1], [1, 1, 1, 1]]), 'row 0 of mask must'),
      (dict(mask=[[1, 1, 1, 1], [0, 0, 0, 0]]), 'row 1 of mask must'),
      (dict(mask=np.ones((2, 3))), shape), (dict(mask=2 * np.ones((2, 4))), '1 for a token and 0')):
    with pytest.raises(ValueError, match=message):
      run.generate(prompt(), **dict(length=2) | options)
  with pytest.raises(ValueError, match='vocabulary has 32'):
    run.generate(prompt() + 31, 2)
  with pytest.raises(ValueError, match=r'shape \(S, T\)'):
    run.generate(prompt()[0], 2)
  learned = sj.ModelConfig(**{**vars(CONFIG), 'attention': sj.AttentionSpec(
      position='Learned(max_length=8)')})
  with pytest.raises(ValueError, match='8 learned positions'):
    sj.Run(learned, random_params(learned)).generate(prompt(), 5)
  # A cache that counts its own positions never runs out of them.
  text = sj.Run(learned, random_params(learned)).generate(prompt(), 20, policy=CachePolicy(8, 2))
  assert text.shape == (2, 20)


def test_all_learned_positions_can_be_used_with_a_sink_token():
  config = sj.ModelConfig(**{**vars(CONFIG), 'sink_tokens': 1, 'attention': sj.AttentionSpec(
      position='Learned(max_length=8)')})
  run = sj.Run(config, random_params(config))
  for policy in (None, CachePolicy(9, 2), CachePolicy(9, 2, 'text')):
    assert run.generate(prompt(), 4, policy=policy).shape == (2, 4)
  with pytest.raises(ValueError, match='8 learned positions'):
    run.generate(prompt(), 5)
  assert run.generate(prompt(), 12, policy=CachePolicy(9, 2)).shape == (2, 12)


def test_a_learned_sink_token_is_never_dropped():
  config = sj.ModelConfig(**{**vars(CONFIG), 'sink_tokens': 2})
  run = sj.Run(config, random_params(config))
  for sinks in (0, 1):
    with pytest.raises(ValueError, match='a learned sink token: give it sinks of at least 2'):
      run.generate(prompt(), 9, policy=CachePolicy(6, sinks))
  assert run.generate(prompt(), 9, policy=CachePolicy(6, 2)).shape == (2, 9)
