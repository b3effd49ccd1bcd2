"""Generation and scoring with a cache, against whole forward passes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.models import generate
from sink_jax.models.generate import stream, text_losses
from sink_jax.models.kv_cache import CachePolicy
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


def test_extreme_temperatures_and_ties():
  logits = jnp.asarray([[1.0, 1.0, 2.0, 1.0]] * 200)
  sample = lambda temperature, k=None: set(
      np.asarray(generate._sample(logits, temperature, k, jax.random.key(0))).tolist())
  assert sample(1e-40) == sample(1e-7) == sample(1e-3) == sample(1.0, 1) == {2}
  assert sample(100.0, 2) == {0, 2} and sample(1e30) == {0, 1, 2, 3}


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


def test_a_text_of_any_length_is_scored_by_one_program(run, monkeypatch):
  monkeypatch.setattr(generate, '_SCORED', 16)
  text, policy = prompt(length=40), CachePolicy(9, 2)
  before = generate._score._cache_size()
  pieces = list(text_losses(run, text, policy))
  assert generate._score._cache_size() == before + 1
  assert [piece.shape for piece in pieces] == [(2, 16), (2, 16), (2, 7)]
  monkeypatch.setattr(generate, '_SCORED', 512)
  np.testing.assert_allclose(np.concatenate(pieces, 1), next(text_losses(run, text, policy)),
                             atol=1e-5)


def test_memory_does_not_grow_with_the_text(run):
  from sink_jax.models.generate import _begin, _score

  policy = CachePolicy(16, 4)
  state = _begin(CONFIG, None, policy, run.params, prompt(1))
  temporary = []
  for length in (256, 1024):
    compiled = _score.lower(CONFIG, None, policy, run.params, state, prompt(length)).compile()
    temporary.append(compiled.memory_analysis().temp_size_in_bytes)
  # Losses and tokens of the text, 4 bytes each for two sequences, and nothing else.
  assert temporary[1] - temporary[0] <= 4 * 2 * 4 * (1024 - 256)


def test_bad_input_is_refused_before_anything_runs(run):
  for options, message in ((dict(length=0), 'length'), (dict(temperature=-1.0), 'temperature'),
                           (dict(temperature=float('nan')), 'temperature'),
                           (dict(temperature=float('inf')), 'temperature'),
                           (dict(seed=-1), 'seed'), (dict(seed=2**40), 'seed'),
                           (dict(top_k=0), 'top_k'), (dict(top_k=33), 'top_k')):
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
