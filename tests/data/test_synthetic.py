"""Synthetic tasks against their definitions, which are recomputed here."""

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from sink_jax.data.dataset import DataConfig, open_data
from sink_jax.data.synthetic import BigramBackcopy, TriggerAveraging
from tests.data.rows import joined


def _many(task):
  return task.batch('train', 0, np.arange(3000))


def _shares(ids, size):
  return np.bincount(ids, minlength=size) / len(ids)


def test_transitions_are_a_softmax_of_normal_logits_with_boosted_triggers():
  table = BigramBackcopy().transitions
  assert_allclose(table.sum(-1), 1)
  assert (table[:, 0] == 0).all()
  assert (table[1:4, 1:4] == 0).all()
  assert (table != BigramBackcopy(seed=1).transitions).any()

  # Without the boost of 4, each ordinary row is a softmax of 1.5 * N(0, 1).
  plain = BigramBackcopy(boost=1.0).transitions[4:, 1:]
  logits = np.log(plain)
  deviation = (logits - logits.mean(-1, keepdims=True)).std()
  assert_allclose(deviation, 1.5, rtol=0.05)
  boosted = plain * np.r_[[4.0] * 3, np.ones(60)]
  assert_allclose(table[4:, 1:], boosted / boosted.sum(-1, keepdims=True))

  # The first token has the stationary distribution, without triggers.
  walk = np.linalg.matrix_power(table[1:, 1:], 500)[0]
  walk[:3] = 0
  assert_allclose(table[0, 1:], walk / walk.sum(), atol=1e-9)


def test_sequences_follow_the_definition():
  task = BigramBackcopy(vocab_size=12, length=20, triggers=2)
  batch = _many(task)
  x = joined(batch)
  assert (x.shape, x.dtype) == ((3000, 21), np.int32)
  assert_array_equal(x[:, 0], 0)
  trigger = (x == 1) | (x == 2)
  assert not trigger[:, 1].any()
  copies = trigger[:, 1:-1]
  assert copies.sum() > 1000
  assert_array_equal(x[:, 2:][copies], x[:, :-2][copies])
  sets = task.target_sets(batch)
  assert_array_equal(sets['backcopy'][:, 1:], copies)
  assert_array_equal(sets['backcopy'] + sets['bigram'], batch.weights)

  # After a non-trigger, the next token is drawn from that token's row of the table.
  for last in range(3, 12):
    after = x[:, 2:][x[:, 1:-1] == last]
    four_sigma = 4 * 0.5 / len(after) ** 0.5
    assert_allclose(_shares(after, 12), task.transitions[last], atol=four_sigma)
  assert_allclose(_shares(x[:, 1], 12), task.transitions[0], atol=0.04)


def test_the_control_has_no_copies_and_one_set_of_targets():
  control = BigramBackcopy(vocab_size=12, backcopy=False)
  batch = _many(control)
  assert control.target_sets(batch) == {}
  after = batch.targets[batch.tokens == 1]
  assert_allclose(_shares(after, 12), control.transitions[1], atol=0.03)


def test_trigger_averaging_follows_the_definition():
  task = TriggerAveraging()
  tokens, targets, weights = _many(task)
  content, flags = tokens[..., :16], tokens[..., 16:]
  assert (tokens.shape, tokens.dtype) == ((3000, 16, 19), np.float32)
  assert_array_equal(weights, np.ones((3000, 16)))
  places = flags[..., 1].argmax(-1)
  expected = np.full((3000, 16), 2)
  expected[:, 0] = 0
  expected[np.arange(3000), places] = 1
  assert_array_equal(flags, np.eye(3)[expected])
  assert_allclose(_shares(places, 16), [0, 0] + [1 / 14] * 14, atol=0.02)
  for b, place in enumerate(places[:200]):
    expected = np.zeros((16, 16))
    expected[place] = content[b, 1:place].mean(0)
    assert_allclose(targets[b], expected, atol=1e-6)
  assert_array_equal(content[:, 0], 0)
  drawn = content[:, 1:].reshape(-1, 16)
  assert_allclose(np.cov(drawn.T), np.eye(16), atol=0.04)
  loss = (targets**2).sum((1, 2)).mean()
  assert_allclose(loss, task.facts()['loss_of_zero'], rtol=0.05)


@pytest.mark.parametrize(
  'task, sizes',
  [
    (BigramBackcopy(length=16, valid_sequences=10), (64, 0, 0)),
    (TriggerAveraging(valid_sequences=10), (0, 19, 16)),
  ],
)
def test_data_interface(task, sizes):
  data = open_data(DataConfig(source=task, context=16))
  assert (data.vocab_size, data.input_features, data.output_features) == sizes
  assert data.summary()['context'] == 16
  tokens = data.batch(3, 8, seed=1).tokens
  assert_array_equal(tokens, task.batch('train', 1, np.arange(24, 32)).tokens)
  valid = task.batch('valid', 1, np.arange(24, 32))
  for other in (data.batch(4, 8, 1), data.batch(3, 8, 2), valid):
    # Nearly every sequence differs; two short ones may be equal.
    assert (other.tokens != tokens).reshape(8, -1).any(1).mean() > 0.9
  sets = data.validation(batch_size=4)
  assert {len(batches) for batches in sets.values()} == {3}
  last = sets['valid'][2]
  assert last.weights.sum() == 2 * 16  # 10 sequences: the last batch has 2
  assert_array_equal(data.probe_tokens(12, 9)[:4], sets['valid'][0].tokens[:, :9])
  if 'backcopy' in sets:
    parts = sets['backcopy'][2].weights + sets['bigram'][2].weights
    assert_array_equal(parts[:2], last.weights[:2])
