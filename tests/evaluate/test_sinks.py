"""Sink metrics, worked by hand."""

import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import sink_jax as sj

A = np.array([[1.0, 0.0, 0.0],
              [0.5, 0.5, 0.0],
              [0.6, 0.3, 0.1]])


@pytest.mark.parametrize('xp', [np, jnp])
def test_importance_by_hand(xp):
  alpha = sj.importance(xp.asarray(A))
  np.testing.assert_allclose(alpha, [2.1 / 3, 0.8 / 2, 0.1 / 1], rtol=1e-6)
  assert isinstance(alpha, np.ndarray) == (xp is np)


def test_a_prefix_counts_all_rows():
  a = A.copy()
  a[0] = [0.7, 0.3, 0.0]  # the first token sees the second
  np.testing.assert_allclose(sj.importance(a)[1], (0.3 + 0.5 + 0.3) / 2)


@pytest.mark.parametrize('xp', [np, jnp])
def test_the_threshold_comes_before_the_mean(xp):
  # Two sequences, one layer, two heads. Head 1: 0.5 and 0.0, mean 0.25, below 0.3, yet in one
  # of two sequences it is a sink. Head 2: 0.31 twice.
  importance = xp.asarray([[[[0.5, 0.0], [0.31, 0.0]]], [[[0.0, 0.0], [0.31, 0.3]]]])
  np.testing.assert_allclose(sj.sink_rate(importance), [0.75, 0.0])  # 0.3 is not above 0.3
  np.testing.assert_allclose(sj.sink_rate(importance, epsilon=0.4), [0.25, 0.0])


def test_rates_lie_on_the_grid_of_the_paper():
  # 100 sequences of 80 heads: multiples of 0.0125 %, as all published values are.
  rng = np.random.default_rng(0)
  rate = sj.sink_rate(rng.random((100, 10, 8, 4)))
  np.testing.assert_allclose(rate * 8000, np.round(rate * 8000), atol=1e-3)


def test_wrong_shapes_are_explained():
  with pytest.raises(ValueError, match=r'\(\.\.\., T, T\)'):
    sj.importance(np.zeros((3, 4)))
  with pytest.raises(ValueError, match=r'\(S, N, H, T\)'):
    sj.sink_rate(np.zeros((3, 4)))


@pytest.mark.parametrize('rate, expected', [
    ([0, 0, 0], None), ([0.2, 0.3, 0.4], 0), ([0, 0.2, 0.05, 0.1, 0.5], 60),
    ([0.5, 0.5, 0.0], None), ([], None), ([0, 0, 0.1], 40)])
def test_emergence_is_the_step_from_which_the_rate_stays(rate, expected):
  assert sj.emergence_step(range(0, 20 * len(rate), 20), rate, level=0.1) == expected


def test_metrics_need_neither_flax_nor_ml_collections():
  code = '''
import sys
for name in ('flax', 'ml_collections', 'optax', 'orbax', 'grain', 'tensorflow_datasets'):
  sys.modules[name] = None
import numpy as np, sink_jax as sj
print(sj.sink_rate(sj.importance(np.eye(3)[None, None, None])))
x = np.ones((1, 4, 2, 8), np.float32)
print(sj.attend(sj.AttentionSpec(), x, x, x).shape)
print(sj.streaming_importance(sj.AttentionSpec(), x, x).raw.shape)
'''
  done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
