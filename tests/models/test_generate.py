"""Generation with a cache, against full forward passes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.data.tokenizer import Bytes
from sink_jax.models.decode import CachePolicy
from sink_jax.models.generate import Sampling, _read, stream_texts, text_losses
from tests.models.test_decode import read_one_by_one
from tests.random_params import random_tokens, tiny

PROMPT = random_tokens(2, 4)


@pytest.fixture(scope='module')
def run():
  return tiny(kv_heads=2)


def stream(run, texts, length, **options):
  """The pieces of generated texts."""
  return list(stream_texts(run.config, run.params, texts, length, **options))


def joined(pieces):
  """The new tokens of each text."""
  return [np.concatenate(of_text).tolist() for of_text in zip(*pieces)]


def greedy(run, texts, count):
  """The most likely next tokens, by a forward pass for each; later tokens do not change it."""
  rows = np.arange(len(texts))
  ends = np.array([len(text) for text in texts])
  padded = np.zeros((len(texts), max(ends) + count), int)
  for row, text in zip(padded, texts):
    row[: len(text)] = text
  for at in range(count):
    logits = np.asarray(run.logits(padded))
    last = logits[rows, ends + at - 1]
    padded[rows, ends + at] = last.argmax(-1)
  return [row[end : end + count].tolist() for row, end in zip(padded, ends)]


def test_greedy_generation_is_the_argmax_of_forward_passes(run):
  expected = greedy(run, PROMPT, 9)
  assert run.generate(PROMPT, 9).tolist() == expected
  pieces = stream(run, PROMPT, 9, chunk=4)
  lengths = [[len(tokens) for tokens in piece] for piece in pieces]
  assert lengths == [[4, 4], [4, 4], [1, 1]]
  assert joined(pieces) == expected


def test_samples_follow_the_models_distribution(run):
  texts = np.repeat(PROMPT[:1], 4000, 0)
  found = run.generate(texts, 1, temperature=0.7, seed=1)[:, 0]
  shares = np.bincount(found, minlength=32) / 4000
  logits = run.logits(PROMPT)[0, -1]
  expected = np.asarray(jax.nn.softmax(logits / 0.7))
  error = 0.5 / 4000**0.5  # at most, of a share
  assert np.abs(shares - expected).max() < 4 * error
  assert np.abs(np.roll(shares, 1) - expected).max() > 8 * error


def test_a_seed_chooses_the_sample_and_the_size_of_pieces_does_not(run):
  def sample(**options):
    return joined(stream(run, PROMPT, 9, temperature=1.0, **options))

  texts = sample(seed=5)
  assert texts == sample(seed=5, chunk=4)
  assert texts != sample(seed=6)
  first, *_ = texts
  assert first[:3] != first[3:6] != first[6:]


TIES = [1.0, 1.0, 2.0, 1.0]
SHARES = np.log([0.1, 0.4, 0.2, 0.3])


@pytest.mark.parametrize(
  'logits, options, kept',
  [
    (TIES, (1e-40,), {2}),
    (TIES, (1e-3,), {2}),
    (TIES, (1.0, 1), {2}),
    (TIES, (100.0, 2), {0, 2}),
    (TIES, (1e30,), {0, 1, 2, 3}),
    # top_p keeps the fewest tokens whose shares reach it.
    (SHARES, (1.0, None, 1e-6), {1}),
    (SHARES, (1.0, None, 0.39), {1}),
    (SHARES, (1.0, None, 0.41), {1, 3}),
    (SHARES, (1.0, None, 0.71), {1, 2, 3}),
    (SHARES, (1.0, None, 1.0), {0, 1, 2, 3}),
    # Shares are those among the top_k tokens: 4/7 and 3/7 for two.
    (SHARES, (1.0, 2, 0.56), {1}),
    (SHARES, (1.0, 2, 0.58), {1, 3}),
    (SHARES, (0.5, None, 0.5), {1}),  # 16/30 at half the temperature
  ],
  ids=str,
)
def test_tokens_that_are_sampled(logits, options, kept):
  """The set of tokens in a few hundred draws."""
  rows = jnp.tile(jnp.asarray(logits), (400, 1))
  key, numbers = jax.random.key(0), jnp.zeros(400, jnp.int32)
  drawn = Sampling(*options).sample(rows, key, numbers)
  assert {*np.asarray(drawn).tolist()} == kept


def test_a_text_ends_with_its_end_of_text(run):
  whole = run.generate(PROMPT, 9)
  end = int(whole[0, 5])
  lengths = [row.index(end) + 1 if end in row else 9 for row in whole.tolist()]
  ended = run.generate(PROMPT, 9, eos_token_id=end)
  assert min(lengths) < max(lengths) == ended.shape[1]
  for row, expected, length in zip(ended, whole, lengths):
    np.testing.assert_array_equal(row[:length], expected[:length])
    assert (row[length:] == end).all()


def test_nothing_is_generated_once_all_texts_have_ended(run):
  ends = {row[2] for row in run.generate(PROMPT, 9).tolist()}
  [piece] = stream(run, PROMPT, 9, eos_token_id=sorted(ends), chunk=4)
  assert max(map(len, piece)) <= 3


TEXTS = random_tokens(3, 9)
RAGGED = [TEXTS[0, :3], TEXTS[1], TEXTS[2, :1]]


@pytest.mark.parametrize(
  'options',
  [
    dict(policy=CachePolicy(8, 2)),
    dict(temperature=1.0, top_p=0.9, seed=3),
  ],
  ids=str,
)
def test_texts_of_different_lengths_continue_as_each_by_itself(run, options):
  found = joined(stream(run, RAGGED[:2], 6, **options))
  for row, text in enumerate(RAGGED[:2]):  # a sample depends on the row of its text
    alone = run.generate([text] * 2, 6, **options)
    assert found[row] == alone[row].tolist()


def padded():
  """The tokens and the mask of RAGGED, padded on the right and on the left."""
  tokens = TEXTS.copy()
  tokens[2, -1] = TEXTS[2, 0]
  mask = np.ones((3, 9), int)
  mask[0, 3:] = mask[2, :-1] = 0
  return tokens, mask


def test_padding_changes_nothing(run):
  tokens, mask = padded()
  found = run.generate(tokens, 6, mask=mask)
  assert found.tolist() == greedy(run, RAGGED, 6)
  end = int(found[1, 1])
  ended = run.generate(tokens, 6, mask=mask, eos_token_id=end)
  assert (ended[1, 1:] == end).all()
  begun = dataclasses.replace(run, first_token=5)
  first = begun.generate(tokens, 6, mask=mask)
  expected = greedy(run, [[5, *text] for text in RAGGED], 6)
  assert first.tolist() == expected


@pytest.mark.parametrize(
  'policy',
  [
    CachePolicy(8, 2),
    CachePolicy(20),
  ],
  ids=str,
)
def test_a_prompt_longer_than_the_cache_is_read_in_pieces(run, policy):
  texts = random_tokens(2, 37)
  found = run.generate(texts, 4, policy=policy)
  (logits, _), _ = read_one_by_one(run, texts, policy)
  np.testing.assert_array_equal(found[:, 0], np.argmax(logits, -1))
  # Next to a shorter one it continues in the same way.
  ragged = [texts[0], texts[1, :30]]
  first, _ = joined(stream(run, ragged, 4, policy=policy))
  assert first == found[0].tolist()


WORDS = ['ab', 'a longer text']


@pytest.fixture(scope='module')
def reader():
  """A model that reads bytes."""
  bytes_ = Bytes().open()
  return dataclasses.replace(tiny(vocab_size=258), read_tokenizer=lambda run: bytes_)


def test_words_in_and_words_out(reader):
  tokenizer = reader.tokenizer
  continued = greedy(reader, [tokenizer.encode(text) for text in WORDS], 8)
  found = reader.generate_texts(WORDS, 8, eos_token_id=None)
  assert found == [tokenizer.decode(tokens) for tokens in continued]
  whole, end = continued[0], continued[0][3]
  stopped = reader.generate_texts(WORDS, 8, eos_token_id=end)
  assert stopped[0] == tokenizer.decode(whole[: whole.index(end)])


@pytest.mark.parametrize(
  'texts, options, message',
  [
    (['a', ''], {}, "bos='force'"),
    ('ab', {}, 'several'),
    (WORDS, dict(eos_token_id=258), 'eos_token_id'),
  ],
)
def test_words_that_cannot_be_continued(reader, texts, options, message):
  with pytest.raises(ValueError, match=message):
    reader.generate_texts(texts, 8, **options)


def test_a_prefix_is_read_at_once():
  run = tiny(attention=sj.AttentionSpec(mask='Prefix(length=9)'))
  long = random_tokens(2, 12)
  texts = [long[0, :9], long[1]]
  assert joined(stream(run, texts, 5)) == greedy(run, texts, 5)
  with pytest.raises(ValueError, match='read at once; here these are 3'):
    run.generate(long[:, :3], 7)
  with pytest.raises(ValueError, match='read at once; here these are 1'):
    list(text_losses(run.config, run.params, long, CachePolicy(12)))


def test_texts_are_continued_after_the_first_token(run):
  begun = dataclasses.replace(run, first_token=5)
  text = [5, *PROMPT[1]]
  found = begun.begun([PROMPT[1], text])
  assert [tokens.tolist() for tokens in found] == [text, text]


def test_a_text_of_any_length_is_scored_by_one_program(run):
  text, policy = random_tokens(2, 40), CachePolicy(18, 2)
  before = _read._cache_size()
  pieces = list(text_losses(run.config, run.params, text, policy))
  assert _read._cache_size() == before + 1
  first, last = pieces
  assert first.shape == (2, 32) and last.shape == (2, 7)
