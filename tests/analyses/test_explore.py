"""The numbers and maps of the page to explore are those of full maps."""

import contextlib
import functools
import io

import numpy as np
import pytest

import sink_jax as sj
from sink_jax.analyses.explore import explore
from sink_jax.analyses.models import InputOptions, Model
from sink_jax.evaluate import explored as measured
from sink_jax.train.loop import train
from tests.analyses.small import importance, maps, model, small_run, tokens
from tests.train.runs import config

RUN = small_run(sharp=3.0)


@pytest.fixture(scope='module')
def explored():
  return explore(model(RUN, tokens(6, 20), sequences=6, length=20))


def test_numbers_are_those_of_full_maps(explored):
  ids, [numbers] = tokens(6, 20), explored.numbers
  alpha_NxSxHxT = importance(RUN, ids)
  # Four digits, and float32 sums of 20 weights.
  close = functools.partial(np.testing.assert_allclose, rtol=6e-4, atol=1e-6)

  close(numbers['importance'], alpha_NxSxHxT.mean(1)[..., :10])

  rates_ExK = np.transpose(numbers['sink_rates'])

  for epsilon, rate_K in zip(numbers['epsilons'], rates_ExK, strict=True):
    above_T = (alpha_NxSxHxT > epsilon).mean((0, 1, 2))
    close(rate_K, 100 * above_T[:10])
  assert numbers['epsilons'][29] == 0.3
  assert numbers['blocks'] == [1, 2]

  norms_NxSxHkvxT = np.asarray(RUN.record(ids).layers.value_norm_BxHxT, np.float64)
  mean_NxHkvxT = norms_NxSxHkvxT.mean(1)
  ratios_NxHkv = mean_NxHkvxT[..., 0] / mean_NxHkvxT[..., 1:].mean(-1)

  # Heads 1 and 2 read key/value head 1.
  close(numbers['value_ratio'], np.repeat(ratios_NxHkv, 2, 1))


def assert_roots(found, weights):
  """Bytes are the square roots of weights."""
  error = np.abs(found / 255 - np.sqrt(weights))
  assert error.max() < 0.51 / 255


def test_maps_are_bytes_of_roots(explored):
  weights_NxSxHxTxT = maps(RUN, tokens(6, 20)[:4])
  lower = [weights_NxSxHxTxT[..., i, j] for i in range(20) for j in range(i + 1)]
  weights_SxNxHxP = np.stack(lower, -1).swapaxes(0, 1)

  assert explored.roots_SxNxHxP.shape == (4, 2, 4, 210)
  assert_roots(explored.roots_SxNxHxP, weights_SxNxHxP)
  assert [len(text) for text in explored.texts] == [20] * 4


def test_distances_keep_the_attention(explored):
  weights_NxHxTxT = maps(RUN, tokens(6, 20)[:4]).mean(1)
  [numbers] = explored.numbers

  for n, h in np.ndindex(2, 4):
    distance = numbers['distance'][n][h]
    within = lambda d: np.tril(np.triu(weights_NxHxTxT[n, h], -d)).sum() / 20
    assert within(distance - 1) < 0.95 <= within(distance)


def test_a_model_of_many_heads_has_shorter_maps(monkeypatch):
  monkeypatch.setattr(measured, '_MANY', 7)
  shorter = explore(model(RUN, tokens(2, 40), sequences=2, length=40))
  assert [len(text) for text in shorter.texts] == [32, 32]


def test_a_run_that_kept_maps_is_shown_by_its_steps(tmp_path):
  with contextlib.redirect_stdout(io.StringIO()):
    train(config(steps=6, probe__every=2, probe__maps=3), tmp_path / 'run')
  steps = {int(path.stem) for path in (tmp_path / 'run/maps').iterdir()}

  assert steps == {0, 4, 6}  # of 0, 2, 4 and 6

  run = sj.load_run(tmp_path / 'run')
  found = explore(Model(run, InputOptions()))

  assert found.steps == [0, 4, 6]
  assert len(found.numbers) == 3
  assert len(found.texts) == 1

  ids = np.asarray(run.probe_tokens)
  last = sj.probe(run, ids).importance[..., :10].mean(0)

  np.testing.assert_allclose(found.numbers[2]['importance'], last, rtol=1e-3, atol=1e-6)

  weights_NxHxTxT = maps(run, ids[:1])[:, 0]
  queries, keys = np.tril_indices(ids.shape[1])

  assert_roots(found.roots_SxNxHxP[2], weights_NxHxTxT[..., queries, keys])

  (tmp_path / 'run/maps/4.json').write_text('{}')

  with pytest.raises(ValueError, match='4.json does not hold maps'):
    explore(Model(run, InputOptions()))
