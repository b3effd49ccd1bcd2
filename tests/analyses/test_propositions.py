"""Propositions 1 to 4: their conditions, what follows for a sink, and inputs that break them."""

import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy.special import softmax

import sink_jax as sj
from sink_jax.analyses import propositions
from sink_jax.analyses.runner import find, measure
from sink_jax.models.config import Layer
from sink_jax.models.record import queries_keys
from tests.analyses.small import HYBRID, importance, maps, near, small_run, tokens


@pytest.fixture(scope='module')
def without_a_checkpoint():
  analysis = find('propositions')
  rows = lambda run: measure(analysis, run, analysis.inputs, {}).rows
  return {run.name: rows(run) for run in analysis.models()}


def test_all_propositions_without_a_checkpoint(without_a_checkpoint):
  found = {name: rows[0] for name, rows in without_a_checkpoint.items()}
  columns = 'proposition', 'sink', 'premise'
  said = {name: tuple(row[column] for column in columns) for name, row in found.items()}

  assert said == {
    'Nope()': (1, 'no', True),
    'Relative()': (2, 'yes', False),
    'Alibi()': (3, 'no', True),
    'Relative(decreasing=True)': (2, 'no', True),
    'Rope()': (4, 'no', True),
  }

  for name, rows in without_a_checkpoint.items():
    for row in rows:
      assert row['holds']
      assert row['hidden_difference'] < 1e-5
      assert row['difference'] < 1e-5
      if name == 'Rope()':
        assert row['importance'] <= row['closed_importance']
      else:
        assert row['importance'] == pytest.approx(row['closed_importance'], rel=1e-4)

  expected = sum(1 / t for t in range(1, 65)) / 64

  assert found['Nope()']['closed_importance'] == pytest.approx(expected)

  # Eq. 6 by hand: bucket numbers are exact below 16 and logarithmic from there to distance 128.
  logarithmic = lambda d: 16 + int(16 * np.log2(d / 16) / 3)
  bucket = [d if d < 16 else logarithmic(d) for d in range(64)]
  weights = np.exp(bucket)
  alpha = np.mean(weights / weights.cumsum())

  assert found['Relative()']['closed_importance'] == pytest.approx(alpha)
  assert alpha == pytest.approx(0.334, abs=5e-4)


@pytest.mark.parametrize('position', ['Relative()', 'Alibi()', 'Rope(fraction=0.5)', 'YarnRope()'])
def test_closed_forms_of_recorded_maps(position):
  masks = [sj.Window(size=5), sj.Causal()]
  pattern = tuple(Layer(mask=mask) for mask in masks)
  run = small_run(attention=sj.AttentionSpec(position=position), pattern=pattern)
  ids = tokens(1, repeat=True)
  rows = sj.analyse('propositions', run, ids).rows
  weights = maps(run, ids)[:, 0]
  qk = run.record(ids, sj.RecordOptions(attention=queries_keys)).layers.attention
  q, k = (
    np.linalg.norm(np.asarray(x, float), axis=-1)[:, 0] / 2**0.5  # sqrt(Dh) = 2
    for x in qk
  )
  spec = run.config.attention

  for row in rows:
    n = row['block'] - 1
    h = row['head'] - 1
    mask = masks[row['block'] - 1]
    for t in range(12):
      seen = [j for j in range(12) if mask.keep(t, j)]
      if row['form'] == 'bound':
        largest = np.exp(2 * q[n, t, h] * k[n, 0, h // 2])
        bound = largest / (largest + len(seen) - 1)
        assert weights[n, h, t].max() <= bound * (1 + 1e-5)
        if t == 11:
          assert max(row['closed_weights']) == near(bound)
      else:
        bias = [float(spec.position.distance_bias(np.int32(t - j))) for j in seen]
        slope = spec.position.slopes(4)[h]
        expected = np.zeros(12)
        expected[seen] = softmax(slope * np.array(bias))
        assert_allclose(weights[n, h, t], expected, atol=1e-5)
    assert row['holds']
    assert row['difference'] < 1e-5
    assert row['importance'] == pytest.approx(importance(run, ids)[n, 0, h, 0], abs=1e-5)
    assert_allclose(row['weights'], weights[n, h, -1], atol=1e-6)


def test_what_breaks_them(monkeypatch):
  run = small_run(attention=sj.AttentionSpec(position='Nope()'))

  with pytest.raises(ValueError, match='one token repeated'):
    sj.analyse('propositions', run, tokens())
  # With four equal keys, the first gets 25/48 of the attention on average, independent of content.
  for epsilon, sink in ((0.3, 'yes'), (0.6, 'no')):
    row = sj.analyse('propositions', run, tokens(1, 4, repeat=True), epsilon=epsilon).rows[0]
    assert row['closed_importance'] == pytest.approx(25 / 48)
    assert row['sink'] == sink

  layers = run.record(tokens(1), propositions.RECORDED).layers
  found = propositions.compared(run.config, layers)  # tokens that differ

  assert found['hidden_difference'] > 0.1
  assert found['difference'].max() > 0.05

  rotary = small_run(sharp=10.0)
  row = sj.analyse('propositions', rotary, tokens(1, repeat=True)).rows[0]

  # scores are so large that the bound says nothing
  assert row['holds']
  assert row['sink'] == 'open'

  monkeypatch.setattr(
    propositions, '_largest_score', lambda qk, n: np.zeros(4)
  )  # makes the bound 1/t

  assert not sj.analyse('propositions', rotary, tokens(1, repeat=True)).rows[0]['holds']
  assert propositions.rotary_bound([1000.0], sj.Causal(), 9)[0, 8, 0] == 1  # does not overflow


@pytest.mark.parametrize(
  'changes',
  [
    *(
      dict(attention=sj.AttentionSpec(**spec))
      for spec in (dict(position='Learned()'), dict(kv_bias='KBias()'), dict(normalizer='PNorm()'))
    ),
    dict(sink_tokens=1),
    dict(pattern=HYBRID),
  ],
)
def test_models_to_which_none_applies(changes):
  with pytest.raises(ValueError, match='do not apply'):
    sj.analyse('propositions', small_run(**changes), tokens(1, repeat=True))
