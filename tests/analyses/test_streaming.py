"""Perplexities with bounded caches against probabilities from the tokens that a cache keeps."""

import numpy as np
import pytest

import sink_jax as sj
from tests.analyses.small import small_run, tokens


def test_caches_that_hold_everything_agree_and_others_forget():
  run, ids = small_run(), tokens(2, 40)
  rows = sj.analyse('streaming', run, ids, cache_size=8, sinks=2).rows
  parts = {(row['cache'], row['part']): row for row in rows if row['part'] != 'curve'}
  logits = np.asarray(run.logits(ids), float)[:, :-1]
  losses = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, ids[:, 1:, None], -1)[..., 0]
  losses = losses.mean(0)
  assert parts['all tokens', 'all']['perplexity'] == pytest.approx(np.exp(losses.mean()), rel=1e-5)
  late = parts['all tokens', 'last quarter']['perplexity']
  assert late == pytest.approx(np.exp(losses[-9:].mean()), rel=1e-5)
  curves = {}
  for row in rows:
    if row['part'] == 'curve':
      curves.setdefault(row['cache'], []).append(row)
  assert list(curves) == [
    'last 8',
    'first 2 and last 6',
    'first 2 and last 6, text positions',
    'all tokens',
  ]
  for row in curves['all tokens']:
    own = losses[row['start'] - 1 : row['tokens'] - 1]
    assert row['perplexity'] == pytest.approx(np.exp(own.mean()), rel=1e-5)
  for name, curve in curves.items():
    assert curve[0]['start'] == 1 and curve[-1]['tokens'] == 40  # the parts cover the full text
    assert all(a['tokens'] == b['start'] for a, b in zip(curve, curve[1:]))
    # All caches hold the same tokens until the first one is dropped.
    early = lambda rows: [row['perplexity'] for row in rows if row['tokens'] <= 8]
    assert early(curve) == pytest.approx(early(curves['all tokens']), rel=1e-4)
  assert len({parts[name, 'all']['perplexity'] for name in curves}) == 4
  # A window of 8 keeps the 8 tokens before the predicted one, in each of two blocks.
  one = small_run(layers=1)
  found = sj.analyse('streaming', one, ids, cache_size=8, sinks=2).rows
  windowed = next(row for row in found if row['cache'] == 'last 8' and row['part'] == 'all')
  expected = []
  for t in range(1, 40):
    padded = np.zeros_like(ids[:, :8])  # on the right, which the last token does not see
    padded[:, : min(t, 8)] = ids[:, max(0, t - 8) : t]
    x = np.asarray(one.logits(padded), float)[:, min(t, 8) - 1]
    expected.append(np.log(np.exp(x).sum(-1)) - x[range(2), ids[:, t]])
  assert windowed['perplexity'] == pytest.approx(np.exp(np.mean(expected)), rel=1e-4)


def test_caches_that_a_model_cannot_have_are_rows_with_the_reason():
  run = small_run(attention=sj.AttentionSpec(position=sj.Learned(max_length=16)))
  rows = sj.analyse('streaming', run, tokens(1, 40), cache_size=8, sinks=2).rows
  refused = [row for row in rows if row['part'] == 'not possible']
  assert [row['cache'] for row in refused] == ['first 2 and last 6, text positions', 'all tokens']
  assert all('16 learned positions' in row['reason'] for row in refused)
  for options in (dict(cache_size=20, sinks=2), dict(cache_size=8, sinks=8)):
    with pytest.raises(ValueError, match='cache_size|sinks'):
      sj.analyse('streaming', run, tokens(1, 40), **options)
