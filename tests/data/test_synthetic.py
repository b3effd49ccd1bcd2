"""Synthetic tasks against their definitions, which are recomputed here."""

import numpy as np
import pytest

from sink_jax.component import from_string
from sink_jax.data.dataset import DataConfig, Source, open_data
from sink_jax.data.synthetic import BigramBackcopy, TriggerAveraging
from sink_jax.data.tokenizer import TrainedBpe


def _many(task, count=3000, seed=0):
  return task.batch('train', seed, np.arange(count))


def test_transition_table():
  for task in (BigramBackcopy(), BigramBackcopy(vocab_size=9, triggers=2, seed=4)):
    table, k = task.transitions, task.triggers
    np.testing.assert_allclose(table.sum(-1), 1)
    assert (table[:, 0] == 0).all() and (table[0, 1:k + 1] == 0).all()
    assert (table[1:k + 1, 1:k + 1] == 0).all()
    assert (table[k + 1:, 1:] > 0).all() and (table[1:, k + 1:] > 0).all()
  # Without the boost of 4, each ordinary row is a softmax of 1.5 * N(0, 1).
  plain = BigramBackcopy(boost=1.0).transitions[4:, 1:]
  boosted = plain * np.r_[[4.0] * 3, np.ones(60)]
  np.testing.assert_allclose(BigramBackcopy().transitions[4:, 1:], boosted / boosted.sum(-1, keepdims=True))
  ordinary = np.log(plain)
  np.testing.assert_allclose((ordinary - ordinary.mean(-1, keepdims=True)).std(), 1.5, rtol=0.05)
  assert (BigramBackcopy(seed=1).transitions != BigramBackcopy().transitions).any()
  # The first token follows the stationary distribution without triggers.
  task = BigramBackcopy(vocab_size=12)
  walk = np.linalg.matrix_power(task.transitions[1:, 1:], 500)[0]
  walk[:3] = 0
  np.testing.assert_allclose(task.transitions[0, 1:], walk / walk.sum(), atol=1e-9)


def test_sequences_follow_the_definition():
  task = BigramBackcopy(vocab_size=12, length=20, triggers=2)
  batch = _many(task)
  x = np.concatenate([batch.tokens, batch.targets[:, -1:]], 1)
  np.testing.assert_array_equal(x[:, 1:], batch.targets)
  assert x.shape == (3000, 21) and x.dtype == np.int32
  assert (x[:, 0] == 0).all() and (x[:, 1:] >= 1).all() and (x < 12).all()
  trigger = (x == 1) | (x == 2)
  assert not trigger[:, 1].any() and not (trigger[:, 1:] & trigger[:, :-1]).any()
  copies = trigger[:, 1:-1]
  assert copies.sum() > 1000
  assert (x[:, 2:] == x[:, :-2])[copies].all()
  sets = task.target_sets(batch)
  np.testing.assert_array_equal(sets['backcopy'][:, 1:], copies)
  np.testing.assert_array_equal(sets['backcopy'] + sets['bigram'], batch.weights)
  # After a non-trigger, the next token is drawn from that token's row of the table.
  for last in range(3, 12):
    following = x[:, 2:][x[:, 1:-1] == last]
    frequency = np.bincount(following, minlength=12) / len(following)
    np.testing.assert_allclose(frequency, task.transitions[last], atol=4 * 0.5 / len(following)**0.5)
  frequency = np.bincount(x[:, 1], minlength=12) / 3000
  np.testing.assert_allclose(frequency, task.transitions[0], atol=0.04)
  # The control has no copies and only one set of targets.
  control = BigramBackcopy(vocab_size=12, backcopy=False)
  batch = _many(control)
  assert control.target_sets(batch) == {}
  following = batch.targets[batch.tokens == 1]
  frequency = np.bincount(following, minlength=12) / len(following)
  np.testing.assert_allclose(frequency, control.transitions[1], atol=0.03)


def test_trigger_averaging_follows_the_definition():
  task = TriggerAveraging()
  batch = _many(task)
  content, flags = batch.tokens[..., :16], batch.tokens[..., 16:]
  assert batch.tokens.shape == (3000, 16, 19) and batch.tokens.dtype == np.float32
  assert (task.input_features, task.output_features, task.vocab_size) == (19, 16, 0)
  assert (flags.sum(-1) == 1).all() and (flags[:, 0, 0] == 1).all() and (flags[:, 1:, 0] == 0).all()
  assert (flags[..., 1].sum(-1) == 1).all() and (content[:, 0] == 0).all()
  places = flags[..., 1].argmax(-1)
  np.testing.assert_allclose(np.bincount(places, minlength=16) / 3000,
                             np.r_[0, 0, np.full(14, 1 / 14)], atol=0.02)
  for b in range(200):
    expected = np.zeros((16, 16))
    expected[places[b]] = content[b, 1:places[b]].mean(0)
    np.testing.assert_allclose(batch.targets[b], expected, atol=1e-6)
  np.testing.assert_allclose([content[:, 1:].mean(), content[:, 1:].std()], [0, 1], atol=0.01)
  assert abs(np.corrcoef(content[:, 1:, 0].ravel(), content[:, 1:, 1].ravel())[0, 1]) < 0.02
  loss = (batch.targets**2).sum((1, 2)).mean()
  np.testing.assert_allclose(loss, task.facts()['loss_of_zero'], rtol=0.05)
  assert (batch.weights == 1).all() and batch.weights.shape == (3000, 16)


@pytest.mark.parametrize('task', [BigramBackcopy(length=16, valid_sequences=10),
                                  TriggerAveraging(valid_sequences=10)])
def test_data_interface(task):
  data = open_data(DataConfig(source=task, context=16))
  assert (data.vocab_size, data.input_features, data.output_features) == (
      task.vocab_size, task.input_features, task.output_features)
  whole = data.batch(3, 8, seed=1)
  rows = np.array([1, 2, 7])
  part = data.batch(3, 8, 1, rows)
  for name in whole._fields:
    np.testing.assert_array_equal(getattr(part, name), getattr(whole, name)[rows])
  np.testing.assert_array_equal(next(data.batches(3, 8, 1)).tokens, whole.tokens)
  for other in (data.batch(4, 8, 1), data.batch(3, 8, 2), task.batch('valid', 1, np.arange(24, 32))):
    assert (other.tokens != whole.tokens).any(axis=tuple(range(1, whole.tokens.ndim))).mean() > 0.9
  sets = data.validation(batch_size=4)
  assert [len(s) for s in sets.values()] == [3] * len(sets)
  assert sets['valid'][2].weights.sum() == 2 * 16  # 10 sequences: the last batch has 2
  np.testing.assert_array_equal(data.probe_tokens(12, 9)[:4], sets['valid'][0].tokens[:, :9])
  if isinstance(task, BigramBackcopy):
    assert set(sets) == {'valid', 'backcopy', 'bigram'}
    for batch in zip(*sets.values(), strict=True):
      np.testing.assert_array_equal(batch[0].weights, batch[1].weights + batch[2].weights)
  assert data.summary()['context'] == 16


@pytest.mark.parametrize('options, words', [
    ({'context': 32}, 'context=32 must equal the length 64'),
    ({'max_tokens': 100}, 'max_tokens is for document corpora'),
    ({'tokenizer': TrainedBpe()}, 'tokenizer is for document corpora'),
    ({'source': 'BigramBackcopy(vocab_size=5)'}, 'vocab_size'),
    ({'source': 'TriggerAveraging(length=2)'}, 'length')])
def test_options_that_do_not_fit_a_task(options, words):
  with pytest.raises(ValueError, match=words):
    source = from_string(Source, options.get('source', 'BigramBackcopy()'))
    open_data(DataConfig(**{'context': 64} | options | {'source': source}))
