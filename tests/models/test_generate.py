"""Generation with a cache, against full forward passes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.data.tokenizer import Bytes
from sink_jax.models.decode import CachePolicy
from sink_jax.models.generate import Sampling, _begin, _read, stream_texts, text_losses
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
  rows, ends = np.arange(len(texts)), np.array([len(text) for text in texts])
  padded = np.zeros((len(texts), max(ends) + count), int)
  for row, text in zip(padded, texts):
    row[: len(text)] = text
  for at in range(count):
    logits = np.asarray(run.logits(padded))[rows, ends + at - 1]
    padded[rows, ends + at] = logits.argmax(-1)
  return [row[end : end + count].tolist() for row, end in zip(padded, ends)]


def test_greedy_generation_is_the_argmax_of_forward_passes(run):
  expected = greedy(run, PROMPT, 9)
  assert run.generate(PROMPT, 9).tolist() == expected
  pieces = stream(run, PROMPT, 9, chunk=4)
  assert [list(map(len, piece)) for piece in pieces] == [[4, 4], [4, 4], [1, 1]]
  assert joined(pieces) == expected


def test_samples_follow_the_models_distribution(run):
  text = np.repeat(PROMPT[:1], 4000, 0)
  found = run.generate(text, 1, temperature=0.7, seed=1)[:, 0]
  expected = np.asarray(jax.nn.softmax(run.logits(PROMPT)[0, -1] / 0.7))
  shares = np.bincount(found, minlength=32) / 4000
  assert np.abs(shares - expected).max() < 4 * 0.5 / 4000**0.5  # at most four standard errors
  assert np.abs(np.roll(shares, 1) - expected).max() > 8 * 0.5 / 4000**0.5


def test_a_seed_chooses_the_sample_and_the_size_of_pieces_does_not(run):
  sample = lambda **options: joined(stream(run, PROMPT, 9, temperature=1.0, **options))
  text = sample(seed=5)
  assert text == sample(seed=5, chunk=4) != sample(seed=6)
  assert text[0][:3] != text[0][3:6] != text[0][6:]


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
    (SHARES, (0.5, None, 0.5), {1}),  # 16/30 at half the temperature
  ],
  ids=str,
)
def test_tokens_that_are_sampled(logits, options, kept):
  """The set of tokens in a few hundred draws."""
  rows = jnp.tile(jnp.asarray(logits), (400, 1))
  drawn = Sampling(*options).sample(rows, jax.random.key(0), jnp.zeros(400, jnp.int32))
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
  # Once all texts have ended, nothing more is generated.
  ends = sorted({int(row[2]) for row in whole})
  stopped = stream(run, PROMPT, 9, eos_token_id=ends, chunk=4)
  assert len(stopped) == 1 and max(map(len, stopped[0])) <= 3


RAGGED = [row[:length] for row, length in zip(random_tokens(3, 9), (3, 9, 1))]


@pytest.mark.parametrize(
  'options',
  [dict(policy=CachePolicy(8, 2)), dict(temperature=1.0, top_p=0.9, seed=3)],
  ids=str,
)
def test_texts_of_different_lengths_continue_as_each_by_itself(run, options):
  found = joined(stream(run, RAGGED[:2], 6, **options))
  for row, text in enumerate(RAGGED[:2]):  # a sample depends on the row of its text
    assert found[row] == run.generate([text] * 2, 6, **options)[row].tolist()


def test_padding_changes_nothing(run):
  tokens, mask = np.full((3, 9), 7), np.zeros((3, 9), int)
  for row, text in enumerate(RAGGED):
    where = slice(0, 3) if row == 0 else slice(9 - len(text), 9)
    tokens[row, where], mask[row, where] = text, 1
  found = run.generate(tokens, 6, mask=mask)
  assert found.tolist() == greedy(run, RAGGED, 6)
  ended = run.generate(tokens, 6, mask=mask, eos_token_id=int(found[1, 1]))
  assert (ended[1, 1:] == found[1, 1]).all()
  # Without padding, a mask changes nothing.
  assert run.generate(PROMPT, 9, mask=np.ones((2, 4))).tolist() == greedy(run, PROMPT, 9)
  first = dataclasses.replace(run, first_token=5).generate(tokens, 6, mask=mask)
  assert first[1].tolist() == greedy(run, [[5, *RAGGED[1]]] * 3, 6)[1]


@pytest.mark.parametrize('policy', [CachePolicy(8, 2), CachePolicy(20)], ids=str)
def test_a_prompt_longer_than_the_cache_is_read_in_pieces(run, policy):
  text, model = random_tokens(2, 37), (run.config, None, policy, run.params)
  counts = np.full(2, 37)
  begun = _begin(*model, text[:, :1])
  (logits, _), _ = _read(*model, None, 1, begun, jax.random.key(0), 1, text[:, 1:], counts)
  expected = run.generate(text, 4, policy=policy)
  np.testing.assert_array_equal(expected[:, 0], np.argmax(logits, -1))
  found = joined(stream(run, [text[0], text[1, :30]], 4, policy=policy))
  assert found[0] == expected[0].tolist()


def test_words_in_and_words_out():
  bytes_ = Bytes().open()
  run = dataclasses.replace(tiny(vocab_size=258), read_tokenizer=lambda run: bytes_)
  texts = ['ab', 'a longer text']
  continued = greedy(run, [bytes_.encode(text) for text in texts], 8)
  found = run.generate_texts(texts, 8, eos_token_id=None)
  assert found == [bytes_.decode(tokens) for tokens in continued]
  whole, end = continued[0], continued[0][3]
  stopped = run.generate_texts(texts, 8, eos_token_id=end)
  assert stopped[0] == bytes_.decode(whole[: whole.index(end)])
  for bad, options, message in (
    (['a', ''], {}, "bos='force'"),
    ('ab', {}, 'several'),
    (texts, dict(eos_token_id=258), 'eos_token_id'),
  ):
    with pytest.raises(ValueError, match=message):
      run.generate_texts(bad, 8, **options)


def test_a_prefix_is_read_at_once():
  run = tiny(attention=sj.AttentionSpec(mask='Prefix(length=9)'))
  texts = [row[:length] for row, length in zip(random_tokens(2, 12), (9, 12))]
  assert joined(stream(run, texts, 5)) == greedy(run, texts, 5)
  with pytest.raises(ValueError, match='read at once; here these are 3'):
    run.generate(random_tokens(2, 3), 7)
  with pytest.raises(ValueError, match='read at once; here these are 1'):
    list(text_losses(run.config, run.params, random_tokens(2, 12), CachePolicy(12)))


def test_texts_are_continued_after_the_first_token(run):
  begun, text = dataclasses.replace(run, first_token=5), [5, *PROMPT[1]]
  found = begun.begun([PROMPT[1], text])
  assert [tokens.tolist() for tokens in found] == [text, text]


def test_a_text_of_any_length_is_scored_by_one_program(run):
  text, policy = random_tokens(2, 40), CachePolicy(18, 2)
  before = _read._cache_size()
  pieces = list(text_losses(run.config, run.params, text, policy))
  assert _read._cache_size() == before + 1
  assert [piece.shape for piece in pieces] == [(2, 32), (2, 7)]


def test_learned_positions_count_no_sink_tokens():
  spec = sj.AttentionSpec(position='Learned(max_length=8)')
  run = tiny(attention=spec, sink_tokens=1)
  assert run.generate(PROMPT, 4).tolist() == greedy(run, PROMPT, 4)
