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


@pytest.mark.parametrize(
  'task', [BigramBackcopy(), BigramBackcopy(vocab_size=9, triggers=2, seed=4)]
)
def test_transitions_never_lead_to_bos_or_between_triggers(task):
  table, ordinary = task.transitions, slice(task.triggers + 1, None)
  triggers = slice(1, task.triggers + 1)
  assert_allclose(table.sum(-1), 1)
  assert (table[:, 0] == 0).all()
  assert (table[0, triggers] == 0).all()
  assert (table[triggers, triggers] == 0).all()
  assert (table[ordinary, 1:] > 0).all()
  assert (table[1:, ordinary] > 0).all()


def test_transitions_are_a_softmax_of_normal_logits_with_boosted_triggers():
  # Without the boost of 4, each ordinary row is a softmax of 1.5 * N(0, 1).
  plain = BigramBackcopy(boost=1.0).transitions[4:, 1:]
  logits = np.log(plain)
  deviation = (logits - logits.mean(-1, keepdims=True)).std()
  assert_allclose(deviation, 1.5, rtol=0.05)
  boosted = plain * np.r_[[4.0] * 3, np.ones(60)]
  expected = boosted / boosted.sum(-1, keepdims=True)
  assert_allclose(BigramBackcopy().transitions[4:, 1:], expected)
  assert (BigramBackcopy(seed=1).transitions != BigramBackcopy().transitions).any()


def test_the_first_token_follows_the_stationary_distribution_without_triggers():
  table = BigramBackcopy(vocab_size=12).transitions
  walk = np.linalg.matrix_power(table[1:, 1:], 500)[0]
  walk[:3] = 0
  assert_allclose(table[0, 1:], walk / walk.sum(), atol=1e-9)


def test_sequences_follow_the_definition():
  task = BigramBackcopy(vocab_size=12, length=20, triggers=2)
  batch = _many(task)
  x = joined(batch)
  assert_array_equal(x[:, 1:], batch.targets)
  assert x.shape == (3000, 21)
  assert x.dtype == np.int32
  assert_array_equal(x[:, 0], 0)
  assert set(np.unique(x[:, 1:])) == {*range(1, 12)}
  trigger = (x == 1) | (x == 2)
  assert not trigger[:, 1].any()
  assert not (trigger[:, 1:] & trigger[:, :-1]).any()
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
  content, (bos, trigger, other) = tokens[..., :16], np.moveaxis(tokens[..., 16:], -1, 0)
  assert tokens.shape == (3000, 16, 19)
  assert tokens.dtype == np.float32
  assert (task.input_features, task.output_features) == (19, 16)
  assert task.vocab_size == 0
  assert_array_equal(bos, np.eye(16)[np.zeros(3000, int)])
  assert_array_equal(bos + trigger + other, 1)
  assert_array_equal(trigger.sum(-1), 1)
  assert_array_equal(content[:, 0], 0)
  assert_array_equal(weights, np.ones((3000, 16)))
  places = trigger.argmax(-1)
  assert places.min() == 2
  assert_allclose(_shares(places, 16)[2:], 1 / 14, atol=0.02)
  for b, place in enumerate(places[:200]):
    expected = np.zeros((16, 16))
    expected[place] = content[b, 1:place].mean(0)
    assert_allclose(targets[b], expected, atol=1e-6)
  drawn = content[:, 1:]
  assert_allclose([drawn.mean(), drawn.std()], [0, 1], atol=0.01)
  correlations = np.corrcoef(drawn.reshape(-1, 16).T) - np.eye(16)
  assert np.abs(correlations).max() < 0.02
  loss = (targets**2).sum((1, 2)).mean()
  assert_allclose(loss, task.facts()['loss_of_zero'], rtol=0.05)


@pytest.mark.parametrize(
  'task', [BigramBackcopy(length=16, valid_sequences=10), TriggerAveraging(valid_sequences=10)]
)
def test_data_interface(task):
  data = open_data(DataConfig(source=task, context=16))
  tokens = data.batch(3, 8, seed=1).tokens
  assert_array_equal(tokens, task.batch('train', 1, np.arange(24, 32)).tokens)
  valid = task.batch('valid', 1, np.arange(24, 32))
  for other in (data.batch(4, 8, 1), data.batch(3, 8, 2), valid):
    # Nearly every sequence differs; two short ones may be equal.
    assert (other.tokens != tokens).reshape(8, -1).any(1).mean() > 0.9
  sets = data.validation(batch_size=4)
  assert set(map(len, sets.values())) == {3}
  last = sets['valid'][2]
  assert last.weights.sum() == 2 * 16  # 10 sequences: the last batch has 2
  assert_array_equal(data.probe_tokens(12, 9)[:4], sets['valid'][0].tokens[:, :9])
  assert data.summary()['context'] == 16
  for name in ('vocab_size', 'input_features', 'output_features'):
    assert getattr(data, name) == getattr(task, name)
  if isinstance(task, BigramBackcopy):
    parts = sets['backcopy'][2].weights + sets['bigram'][2].weights
    assert_array_equal(parts[:2], last.weights[:2])
