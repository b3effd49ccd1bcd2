"""Propositions 1 to 4: what holds, what follows for a sink, and inputs that break them."""

import numpy as np
import pytest

import sink_jax as sj
from sink_jax.analyses import repeated_tokens
from sink_jax.analyses.propositions import closed_form, proposition_number, rotary_bound
from sink_jax.models.config import Layer, Mamba
from tests.analyses.small import (
  check_png,
  check_rows,
  drawn,
  lines,
  options,
  random_inputs,
  repeated_inputs,
  small_run,
)

POSITIONS = ['Nope()', 'Relative()', 'Alibi()', 'Rope()', 'Rope(fraction=0.5)', 'YarnRope()']
HARMONIC = sum(1 / t for t in range(1, 65)) / 64  # importance of the first of 64 equal keys


@pytest.fixture(scope='module')
def all_of_them():
  return repeated_tokens.check_all(length=64)


def test_all_propositions_without_a_checkpoint(all_of_them, tmp_path):
  assert [r['proposition'] for r in all_of_them] == [1, 2, 2, 3, 4]
  for r in all_of_them:
    assert r['holds'] and r['hidden_difference'] < 1e-5 and r['difference'] < 1e-5
    alpha, closed = np.array(r['alpha']), np.array(r['closed_alpha'])
    if r['form'] == 'exact':
      np.testing.assert_allclose(alpha, closed, rtol=1e-4)
    else:
      assert (alpha <= closed).all() and 0 < r['ratio'] <= 1
  table = check_rows(repeated_tokens, all_of_them)
  assert [row[-2] for row in table[1:]] == ['yes'] * 5
  assert [row[-1] for row in table[1:]] == ['no', 'yes', 'no', 'no', 'no']
  repeated_tokens.draw(all_of_them, tmp_path / 'all.png')
  check_png(tmp_path / 'all.png')


def test_what_is_drawn_where(all_of_them, monkeypatch):
  for ax, result in zip(drawn(repeated_tokens, all_of_them, monkeypatch).axes, all_of_them):
    found = lines(ax)
    assert len(found) == 2 * len(result['heads']) and ax.get_xlabel() == 'key'
    for own in result['heads']:
      name = f'block {own["layer"] + 1}, head {own["head"] + 1}'
      closed = 'closed form' if result['form'] == 'exact' else 'upper bound'
      for words, key in (('measured', 'row'), (closed, 'closed_row')):
        np.testing.assert_allclose(found[f'{name}: {words}'],
                                   np.transpose([np.arange(1, 65), own[key]]))


def test_the_premise_of_proposition_2_fails_and_with_it_the_conclusion(all_of_them):
  nope, relative, decreasing, alibi, _ = all_of_them
  assert nope['closed_alpha'] == pytest.approx(np.full((2, 4), HARMONIC))
  # Bucket numbers of Eq. 6 by hand: exact below 16, logarithmic up to distance 128 beyond.
  bucket = [d if d < 16 else 16 + int(16 * np.log2(d / 16) / 3) for d in range(64)]
  alpha = np.mean([np.exp(bucket[t]) / np.exp(bucket[:t + 1]).sum() for t in range(64)])
  assert alpha == pytest.approx(0.334, abs=5e-4)
  np.testing.assert_allclose(relative['closed_alpha'], alpha)
  assert not relative['bias_non_increasing'] and relative['closed_sink'] == relative['sink'] == 100
  assert 'premise of the proposition fails' in relative['verdict']
  assert '0.334 > 0.3 at T = 64' in relative['verdict']
  for other in (nope, decreasing, alibi):
    assert other['bias_non_increasing'] and other['closed_sink'] == 0
    assert 'premise' not in other['verdict'] and 'No sink' in other['verdict']


def test_the_verdict_follows_the_numbers():
  run = small_run(attention=sj.AttentionSpec(position='Nope()'))
  # Of four equal keys the first has 25/48 on average, without any sink in the words' sense.
  found = repeated_tokens.measure(run, repeated_inputs(length=4), options())
  assert 'importance of up to 0.521 > 0.3 at T = 4' in found['verdict']
  found = repeated_tokens.measure(run, repeated_inputs(length=4), options(epsilons=(0.6,)))
  assert 'No sink' in found['verdict'] and '0.521 <= 0.6' in found['verdict']


@pytest.mark.every(3)
@pytest.mark.parametrize('position', POSITIONS)
def test_closed_forms_of_recorded_maps(position):
  masks = [sj.Window(size=5), sj.Causal()]
  run = small_run(attention=sj.AttentionSpec(position=position),
                  pattern=tuple(Layer(mask=mask) for mask in masks))
  inputs = repeated_inputs()
  found = repeated_tokens.check(run, inputs.tokens)
  layers = run.record(inputs.tokens, sj.RecordOptions(maps=True, queries_keys=True)).layers
  maps = np.asarray(layers.maps_BxHxTxT, np.float64)
  q, k = (np.linalg.norm(np.asarray(x, np.float64), axis=-1) / 2 ** 0.5  # sqrt(Dh) = 2
          for x in (layers.queries_BxTxHxDh, layers.keys_BxTxHkvxDh))
  spec, ratios = run.config.attention, []
  for n, s, h in np.ndindex(2, 2, 4):
    mask = masks[n]
    for t in range(12):
      seen = [j for j in range(12) if mask.keep(t, j)]
      if isinstance(spec.position, sj.Rope):
        xi = q[n, s, t, h] * k[n, s, 0, h // 2]
        bound = np.exp(2 * xi) / (np.exp(2 * xi) + len(seen) - 1)
        assert maps[n, s, h, t].max() <= bound * (1 + 1e-5)
        ratios += [maps[n, s, h, t].max() / bound] * (len(seen) > 1)
      else:
        g = lambda j: (float(spec.position.distance_bias(np.int32(t - j)))
                       * spec.position.slopes(4)[h] if spec.position.has_bias else 0.0)
        total = sum(np.exp(g(j)) for j in seen)
        expected = [np.exp(g(j)) / total if j in seen else 0 for j in range(12)]
        np.testing.assert_allclose(maps[n, s, h, t], expected, atol=1e-5)
  assert found['hidden_difference'].max() < 1e-5 and found['difference'].max() < 1e-5
  np.testing.assert_allclose(found['alpha'], sj.importance(maps)[..., 0].swapaxes(0, 1), atol=1e-5)
  if ratios:
    assert found['ratio'].max() == pytest.approx(max(ratios), rel=1e-4)


@pytest.mark.parametrize('position', POSITIONS[:4])
def test_other_tokens_break_the_equalities(position):
  run, inputs = small_run(attention=sj.AttentionSpec(position=position)), random_inputs()
  found = repeated_tokens.check(run, inputs.tokens)
  assert found['hidden_difference'].min() > 0.1
  if position != 'Rope()':
    assert found['difference'].max() > 0.05
  result = repeated_tokens.summary(run.config, found, 0.3)
  assert not result['holds'] and 'NOT equal' in result['verdict']
  with pytest.raises(ValueError, match='one token repeated'):
    repeated_tokens.measure(run, inputs, options())


def test_a_bound_that_is_too_low_is_noticed(monkeypatch):
  run = small_run()
  monkeypatch.setattr(repeated_tokens, '_largest_score', lambda layers, n: np.zeros(4))  # 1/t
  result = repeated_tokens.summary(run.config, repeated_tokens.check(
      run, repeated_inputs().tokens), 0.3)
  assert not result['holds'] and 'does NOT stay below' in result['verdict'] and result['ratio'] > 1


def test_large_scores_make_the_bound_say_nothing():
  run = small_run()
  attention = run.params['blocks']['attention']
  attention['query']['kernel'] = 10 * attention['query']['kernel']
  found = repeated_tokens.measure(run, repeated_inputs(), options())
  assert found['holds'] and found['closed_sink'] > found['sink']
  assert repeated_tokens.rows([found])[1][-1] == 'open'
  assert 'Nothing follows about a sink at T = 12: the bound allows' in found['verdict']
  spec = sj.AttentionSpec()
  assert rotary_bound([1000.0], spec.mask, 9)[0, 8, 0] == 1  # without overflow
  assert closed_form(sj.AttentionSpec(position=sj.Alibi()), 3, 400).sum(-1) == pytest.approx(1)


@pytest.mark.parametrize('changes, words', [
    (dict(attention=sj.AttentionSpec(position='Learned()')), 'its own embedding'),
    (dict(attention=sj.AttentionSpec(position='Sinusoidal()')), 'its own embedding'),
    (dict(attention=sj.AttentionSpec('Sigmoid()', 'Unnormalized()')), 'not softmax'),
    (dict(attention=sj.AttentionSpec(kv_bias='SinkLogit()')), 'an extra key'),
    (dict(sink_tokens=1), 'sink token'),
    (dict(attention=sj.AttentionSpec(feature_map='Mlp()')), 'Mlp'),
    (dict(attention=sj.AttentionSpec(temperature='LogLength()')), 'multiplies the queries'),
    (dict(pattern=(Layer(), Layer(position=sj.Nope()))), 'positions of their own'),
    (dict(pattern=(Layer(), Layer(mamba=Mamba(8, 2, 2, 1)))), 'Mamba')])
def test_models_of_which_no_proposition_speaks(changes, words):
  config = sj.sized('tiny', vocab_size=11, **changes)
  with pytest.raises(ValueError, match=words):
    proposition_number(config)


def test_the_length_of_maps_is_limited():
  with pytest.raises(ValueError, match='at most 512'):
    repeated_tokens.check(small_run(), np.zeros((1, 513), int))
