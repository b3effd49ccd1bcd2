"""Perplexity of long texts by cache, against whole forward passes."""

import math

import numpy as np
import pytest

import sink_jax as sj
from sink_jax.analyses import streaming
from sink_jax.data.sources import TextFolder
from sink_jax.data.tokenizer import Bytes, TextTokenizer
from sink_jax.evaluate.inputs import long_text
from tests.random_params import random_params

CONFIG = sj.ModelConfig(layers=1, d_model=16, heads=2, ffn_hidden=16, vocab_size=32,
                        dtype='float32')


def tokens(length=40):
  return np.random.default_rng(2).integers(0, 32, (2, length))


def test_every_cache_is_scored_and_the_whole_one_is_the_forward_pass(tmp_path):
  run = sj.Run(CONFIG, random_params(CONFIG), 'tiny')
  result = sj.analyse('streaming', run, tokens(), cache_size=8, sinks=2, plot=tmp_path / 'x.png')
  assert list(result['caches']) == [
      'last 8', 'first 2 and last 6', 'first 2 and last 6, text positions', 'all tokens']
  logits = np.asarray(run.logits(tokens()), np.float64)
  log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  losses = -np.take_along_axis(log_p[:, :-1], tokens()[:, 1:, None], -1)[..., 0].mean(0)
  whole = result['caches']['all tokens']
  assert math.isclose(whole['perplexity'], math.exp(losses.mean()), rel_tol=1e-5)
  assert math.isclose(whole['late'], math.exp(losses[-9:].mean()), rel_tol=1e-5)
  ends = np.asarray(whole['tokens']) - 1  # the first token has no loss
  assert len(ends) == 32 and ends[-1] == 39
  np.testing.assert_allclose(whole['curve'], [math.exp(losses[i:n].mean()) for i, n in zip(
      [0, *ends], ends)], rtol=1e-5)
  # Up to the size of the cache nothing was dropped.
  for cache in result['caches'].values():
    np.testing.assert_allclose(cache['curve'][:5], whole['curve'][:5], rtol=1e-5)
  assert len({round(cache['perplexity'], 4) for cache in result['caches'].values()}) == 4
  assert result['caches']['last 8']['bytes'] == 2 * 2 * 8 * 16 * 4 + 4
  assert (tmp_path / 'x.png').stat().st_size > 5000


def test_the_padding_of_the_last_piece_is_no_loss_of_speed(monkeypatch):
  widths, clock = (512, 512, 1), iter(range(3))  # of pieces; seconds, one for each
  monkeypatch.setattr(streaming, 'text_losses', lambda run, tokens, policy: (
      np.ones((2, n)) for n in widths))
  monkeypatch.setattr(streaming.time, 'perf_counter', lambda: next(clock))
  losses, rate = streaming._timed(None, None, None, lambda done: None)
  assert losses.shape == (1025,) and rate == 2 * 512


def test_caches_that_a_model_cannot_have_are_left_out():
  learned = sj.ModelConfig(**{**vars(CONFIG), 'attention': sj.AttentionSpec(
      position='Learned(max_length=16)')})
  run = sj.Run(learned, random_params(learned))
  measure = lambda **options: sj.analyse('streaming', run, tokens(), **options)
  result = measure(cache_size=8, sinks=2)
  assert list(result['caches']) == ['last 8', 'first 2 and last 6']
  assert list(result['skipped']) == [
      'first 2 and last 6, text positions', 'all tokens']
  assert '16 learned positions' in result['skipped']['all tokens']
  assert [row[2] for row in streaming.rows([result])[3:]] == ['cannot', 'cannot']
  with pytest.raises(ValueError, match='--cache_size=20'):
    measure(cache_size=20, sinks=2)
  with pytest.raises(ValueError, match='sinks'):
    measure(cache_size=8, sinks=8)


def test_long_texts_are_documents_one_after_the_other(tmp_path, monkeypatch):
  for name, text in (('a', 'first one\n'), ('b', 'the second'), ('c', 'third')):
    (tmp_path / f'{name}.txt').write_text(text)
  tokenizer, source = Bytes().open(), TextFolder(str(tmp_path))
  inputs = long_text(tokenizer.beginning_with(0), source, sequences=2, length=11)
  whole = tokenizer.encode('first one\n\nthe second\n\nthird\n\n')
  np.testing.assert_array_equal(inputs.tokens, [[0, *whole[:10]], [0, *whole[10:20]]])
  assert inputs.description['bos']['applied'] == 'bos id 0 at position 1'
  plain = long_text(tokenizer, source, sequences=1, length=20, bos='none')
  np.testing.assert_array_equal(plain.tokens[0], whole[:20])
  with pytest.raises(ValueError, match='--length'):
    long_text(tokenizer, source, sequences=2, length=20)
  (tmp_path / 'b.txt').write_text('x' * 10**6)
  seen, encode = [], TextTokenizer.encode
  monkeypatch.setattr(TextTokenizer, 'encode', lambda self, text: seen.append(len(text)) or encode(self, text))
  long_text(tokenizer, source, sequences=1, length=20, bos='none')
  assert max(seen) < 20 * 64 + 2  # the head of a long document
