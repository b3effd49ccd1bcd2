"""Massive activations and nulls against NumPy in float64, and with planted activations."""

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

import sink_jax as sj
from sink_jax.evaluate import sinks
from sink_jax.evaluate.activations import SEQUENCES, describe
from sink_jax.models.record import states
from tests.random_params import random_tokens, tiny

RUN = tiny(layers=3)
TOKENS = random_tokens(25)


def expected(hidden):
  """Each quantity by its definition, one sequence at a time."""
  rows = []
  for h in np.asarray(hidden, np.float64)[:SEQUENCES]:
    size = abs(h)
    rms = np.sqrt((h**2).mean(0))
    median = np.median(size)
    ratio = size / median
    beyond = [(ratio > least).sum() for least in (100, 1000)]
    centred = h - h.mean()
    moment = (centred**4).mean() / h.var() ** 2
    channels = (rms**4).mean() / (rms**2).mean() ** 2
    rows.append([size.max(), median, *beyond, moment, channels])
  mean_TxD = abs(hidden[:SEQUENCES]).mean(0)
  token, channel = np.unravel_index(mean_TxD.argmax(), mean_TxD.shape)
  return [*np.mean(rows, 0), token + 1, channel]


@pytest.mark.parametrize(
  'shape',
  [
    (3, 5, 8),
    (12, 7, 3),
    (1, 2, 1),
  ],
)
def test_each_number_is_what_its_definition_says(shape):
  hidden = np.random.default_rng(0).standard_normal(shape, np.float32)
  hidden[:, 1, -1] *= 5000
  assert_allclose(describe(jnp.asarray(hidden)), expected(hidden), rtol=2e-5)


def test_large_states_do_not_leave_the_range_of_float32():
  hidden = np.random.default_rng(0).standard_normal((2, 64, 8))
  hidden[:, 0, 3] = 1e4
  large = describe(jnp.asarray(hidden * 1e15, jnp.float32))
  plain = expected(hidden)
  assert_allclose(large[4:6], plain[4:6], rtol=1e-4)


def test_a_planted_massive_activation_is_found_where_it_is():
  # The last matrix of block 2 writes a large number into channel 5 for every token.
  run = tiny(layers=3)
  out = run.params['blocks']['ffn']['w_out']
  out['kernel'] = out['kernel'].at[1, :, 5].set(3e6)
  report = sj.probe(run, TOKENS)
  summary = report.summary()
  beyond = summary['activations_beyond_1000']

  assert beyond[:2] == [0, 0]
  assert min(beyond[2:]) >= 1
  assert summary['activation_channel'][2:] == [5, 5]
  assert summary['kurtosis_channels'][2] > 15
  record = run.record(TOKENS, sj.RecordOptions(hidden=states))
  for block, hidden in enumerate([record.embedding, *record.layers.hidden]):
    found = [x[block] for x in report.activations]
    assert_allclose(found, expected(np.asarray(hidden)), rtol=1e-4)


@pytest.mark.parametrize('batch_size', [4, SEQUENCES])
def test_parts_of_a_probe_change_nothing_while_the_first_holds_what_is_described(batch_size):
  whole = sj.probe(RUN, TOKENS)
  parts = sj.probe(RUN, TOKENS, batch_size=batch_size)
  assert_allclose(whole.importance, parts.importance, rtol=1e-5, atol=1e-6)
  assert whole.protocol['activation_sequences'] == SEQUENCES
  assert parts.protocol['activation_sequences'] == batch_size
  if batch_size == SEQUENCES:
    for one, other in zip(whole.activations, parts.activations):
      assert_allclose(one, other, rtol=1e-5)


def test_the_null_of_a_sink_is_the_rate_of_random_targets():
  alpha_SxNxHxT = np.zeros((20, 2, 3, 16))
  alpha_SxNxHxT[..., 0] = 0.9  # only the first token is a sink
  assert sinks.sink_rate_null(alpha_SxNxHxT) == 0
  alpha_SxNxHxT[:, 0, 0, 1:] = 0.5  # one of six heads counts every position
  assert sinks.sink_rate_null(alpha_SxNxHxT) == pytest.approx(1 / 6)
  targets = sinks.random_targets(np.full(20, 16))
  assert targets.shape == (sinks.DRAWS, 20)
  assert (targets.min(), targets.max()) == (1, 7)

  # The null is the 99th percentile over draws.
  random = np.random.default_rng(1).random((20, 2, 3, 16))
  chosen = [random[range(20), ..., draw] for draw in targets]
  rates = [(alpha > 0.3).mean() for alpha in chosen]
  assert sinks.sink_rate_null(random) == pytest.approx(np.percentile(rates, 99))


def test_the_null_of_the_hidden_ratio_is_that_of_random_targets():
  norms_SxNxT = np.random.default_rng(0).uniform(1, 3, (6, 4, 10))
  ratios = []
  for draw in sinks.random_targets(np.full(6, 10)):
    at_SxN = norms_SxNxT[range(6), :, draw]
    others_SxN = (norms_SxNxT.sum(-1) - at_SxN) / 9
    ratio_N = at_SxN.mean(0) / others_SxN.mean(0)
    ratios.append(ratio_N.max())

  assert sinks.hidden_ratio_null(norms_SxNxT) == pytest.approx(np.percentile(ratios, 99))

  # The first token is never a target of the null. It only counts as one of the other tokens.
  norms_SxNxT[..., 0] = 1000
  assert sinks.hidden_ratio_null(norms_SxNxT) < 1

  # If there are two tokens, only the second can be a target.
  assert sinks.hidden_ratio_null(np.ones((2, 1, 2))) == 1
