"""The numbers and maps of the page to explore are those of full maps."""

import contextlib
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
  close = dict(rtol=6e-4, atol=1e-6)
  np.testing.assert_allclose(numbers['importance'], alpha_NxSxHxT.mean(1)[..., :10], **close)
  for n, epsilon in enumerate(numbers['epsilons']):
    above_T = (alpha_NxSxHxT > epsilon).mean((0, 1, 2))
    np.testing.assert_allclose(np.array(numbers['sink_rates'])[:, n], 100 * above_T[:10], **close)
  assert numbers['epsilons'][29] == 0.3
  assert numbers['blocks'] == [1, 2]
  norms_NxSxHkvxT = np.asarray(RUN.record(ids).layers.value_norm_BxHxT, np.float64)
  mean_NxHkvxT = norms_NxSxHkvxT.mean(1)
  ratios_NxHkv = mean_NxHkvxT[..., 0] / mean_NxHkvxT[..., 1:].mean(-1)
  # Heads 1 and 2 read key/value head 1.
  np.testing.assert_allclose(numbers['value_ratio'], ratios_NxHkv[:, [0, 0, 1, 1]], **close)


def test_maps_are_bytes_of_roots_and_distances_keep_the_attention(explored):
  weights_NxSxHxTxT = maps(RUN, tokens(6, 20)[:4])
  assert len(explored.texts) == 4
  assert len(explored.texts[0]) == 20
  place = 0
  for i in range(20):
    for j in range(i + 1):
      roots_SxNxH = np.sqrt(np.moveaxis(weights_NxSxHxTxT[..., i, j], 1, 0))
      found_SxNxH = explored.roots_SxNxHxP[..., place] / 255
      assert np.abs(found_SxNxH - roots_SxNxH).max() < 0.51 / 255
      place += 1
  assert place == explored.roots_SxNxHxP.shape[-1]
  for n, h in np.ndindex(2, 4):
    found = explored.numbers[0]['distance'][n][h]
    kept = [np.tril(np.triu(weights_NxSxHxTxT[n, :, h], -d)).sum() / 80 for d in (found - 1, found)]
    assert kept[0] < 0.95 <= kept[1]


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
  report = sj.probe(run, run.probe_tokens)
  np.testing.assert_allclose(
    found.numbers[2]['importance'], report.importance[..., :10].mean(0), rtol=1e-3, atol=1e-6
  )
  ids = np.asarray(run.probe_tokens)
  weights_NxHxTxT = maps(run, ids[:1])[:, 0]
  lower_NxHxP = weights_NxHxTxT[..., *np.tril_indices(ids.shape[1])]
  assert np.abs(found.roots_SxNxHxP[2] / 255 - np.sqrt(lower_NxHxP)).max() < 0.51 / 255
  (tmp_path / 'run/maps/4.json').write_text('{}')
  with pytest.raises(ValueError, match='4.json does not hold maps'):
    explore(Model(run, InputOptions()))
