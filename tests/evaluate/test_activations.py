"""Massive activations and nulls against NumPy in float64, and with planted activations."""

import jax.numpy as jnp
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.evaluate import sinks
from sink_jax.evaluate.activations import SEQUENCES, describe
from sink_jax.models.record import states
from sink_jax.models.transformer import init_params

CONFIG = sj.ModelConfig(
  layers=3, d_model=16, heads=2, ffn_hidden=24, vocab_size=11, dtype='float32'
)


def expected(hidden):
  """Each quantity by its definition, one sequence at a time."""
  rows = []
  for h in np.asarray(hidden, np.float64)[:SEQUENCES]:
    size, rms = abs(h), np.sqrt((h**2).mean(0))
    median = np.median(size)
    rows.append(
      [
        size.max(),
        median,
        (size > 100 * median).sum(),
        (size > 1000 * median).sum(),
        ((h - h.mean()) ** 4).mean() / h.var() ** 2,
        (rms**4).mean() / (rms**2).mean() ** 2,
      ]
    )
  where = np.unravel_index(abs(hidden[:SEQUENCES]).mean(0).argmax(), hidden.shape[1:])
  return [*np.mean(rows, 0), where[0] + 1, where[1]]


@pytest.mark.parametrize('sequences, length, width', [(3, 5, 8), (12, 7, 3), (1, 2, 1)])
def test_each_number_is_what_its_definition_says(sequences, length, width):
  hidden = np.random.default_rng(0).standard_normal((sequences, length, width)).astype(np.float32)
  hidden[:, 1, width - 1] *= 5000
  np.testing.assert_allclose(np.stack(describe(jnp.asarray(hidden))), expected(hidden), rtol=2e-5)


def test_large_states_do_not_leave_the_range_of_float32():
  hidden = np.random.default_rng(0).standard_normal((2, 64, 8))
  hidden[:, 0, 3] = 1e4
  large = describe(jnp.asarray(hidden * 1e15, jnp.float32))
  np.testing.assert_allclose(large[4:6], expected(hidden)[4:6], rtol=1e-4)


def test_a_planted_massive_activation_is_found_where_it_is():
  params = init_params(CONFIG, 0)
  # The last matrix of block 2 writes a large number into channel 5 for every token.
  out = params['blocks']['ffn']['w_out']['kernel']
  params['blocks']['ffn']['w_out']['kernel'] = out.at[1, :, 5].set(3e5)
  tokens = np.random.default_rng(0).integers(0, 11, (12, 9))
  report = sj.probe(sj.Run(CONFIG, params), tokens)
  summary = report.summary()
  assert summary['activations_beyond_1000'][:2] == [0, 0]
  assert min(summary['activations_beyond_1000'][2:]) >= 1
  assert summary['activation_channel'][2:] == [5, 5]
  assert summary['kurtosis_channels'][2] > 15
  hidden = sj.Run(CONFIG, params).record(tokens, sj.RecordOptions(hidden=states))
  for block, h in enumerate([hidden.embedding, *hidden.layers.hidden]):
    np.testing.assert_allclose(
      [x[block] for x in report.activations], expected(np.asarray(h)), rtol=1e-4
    )
  assert report.protocol['activation_sequences'] == SEQUENCES


def test_parts_of_a_probe_change_nothing_while_the_first_holds_what_is_described():
  run = sj.Run(CONFIG, init_params(CONFIG, 0))
  tokens = np.random.default_rng(0).integers(0, 11, (25, 9))
  whole, parts = sj.probe(run, tokens), sj.probe(run, tokens, batch_size=SEQUENCES)
  np.testing.assert_allclose(whole.importance, parts.importance, rtol=1e-5, atol=1e-6)
  for one, other in zip(whole.activations, parts.activations):
    np.testing.assert_allclose(one, other, rtol=1e-5)
  small = sj.probe(run, tokens, batch_size=4)
  assert small.protocol['activation_sequences'] == 4  # the protocol states a smaller number


def test_the_null_of_a_sink_is_the_rate_of_random_targets():
  alpha = np.zeros((20, 2, 3, 16))
  alpha[..., 0] = 0.9  # only the first token is a sink
  assert sinks.sink_rate_null(alpha) == 0
  alpha[:, 0, 0, 1:] = 0.5  # one of six heads counts every position
  assert sinks.sink_rate_null(alpha) == pytest.approx(1 / 6)
  targets = sinks.random_targets(np.full(20, 16))
  assert targets.shape == (sinks.DRAWS, 20)
  assert targets.min() == 1
  assert targets.max() == 7
  random = np.random.default_rng(1).random((20, 2, 3, 16))
  rates = [
    np.mean([(random[s, ..., t] > 0.3).mean() for s, t in enumerate(draw)]) for draw in targets
  ]
  assert sinks.sink_rate_null(random) == pytest.approx(np.percentile(rates, 99))


def test_the_null_of_the_hidden_ratio_is_that_of_random_targets():
  norms, ratios = np.random.default_rng(0).uniform(1, 3, (6, 4, 10)), []
  for draw in sinks.random_targets(np.full(6, 10)):
    at = np.stack([norms[s, :, t] for s, t in enumerate(draw)])
    others = np.stack([np.delete(norms[s], t, -1) for s, t in enumerate(draw)])
    ratios.append((at.mean(0) / others.mean((0, 2))).max())
  assert sinks.hidden_ratio_null(norms) == pytest.approx(np.percentile(ratios, 99))
  # The first token is never a target of the null. It only counts as one of the other tokens.
  norms[..., 0] = 1000
  assert sinks.hidden_ratio_null(norms) < 1
  assert (
    sinks.hidden_ratio_null(np.ones((2, 1, 2))) == 1
  )  # of two tokens, only the second can be a target
