"""Perplexities with bounded caches against probabilities from the tokens that a cache keeps."""

import numpy as np
import pytest

import sink_jax as sj
from tests.analyses.numpy_decoder import nats, next_nats
from tests.analyses.small import near, small_run, tokens


def test_caches_that_hold_everything_agree_and_others_forget():
  run = small_run()
  ids = tokens(2, 40)
  rows = sj.analyse(
    'streaming',
    run,
    ids,
    cache_size=8,
    sinks=2,
  ).rows
  parts = {(row['cache'], row['part']): row for row in rows if row['part'] != 'curve'}
  losses = next_nats(run.logits(ids), ids).mean(0)

  assert parts['all tokens', 'all']['perplexity'] == near(np.exp(losses.mean()))

  late = parts['all tokens', 'last quarter']['perplexity']
  assert late == near(np.exp(losses[-9:].mean()))

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
    assert row['perplexity'] == near(np.exp(own.mean()))
  for name, curve in curves.items():
    # the parts cover the full text
    assert curve[0]['start'] == 1
    assert curve[-1]['tokens'] == 40
    for a, b in zip(curve, curve[1:]):
      assert a['tokens'] == b['start']
    # All caches hold the same tokens until the first one is dropped.
    early = lambda rows: [row['perplexity'] for row in rows if row['tokens'] <= 8]
    assert early(curve) == pytest.approx(early(curves['all tokens']), rel=1e-4)

  assert len({parts[name, 'all']['perplexity'] for name in curves}) == 4


def test_a_window_keeps_the_tokens_before_the_predicted_one():
  one = small_run(layers=1)  # of two blocks, the second would read further back
  ids = tokens(2, 40)
  found = sj.analyse(
    'streaming',
    one,
    ids,
    cache_size=8,
    sinks=2,
  ).rows
  windowed = next(row for row in found if row['cache'] == 'last 8' and row['part'] == 'all')
  expected = []

  for t in range(1, 40):
    padded = np.zeros_like(ids[:, :8])  # on the right, which the last token does not see
    padded[:, : min(t, 8)] = ids[:, max(0, t - 8) : t]
    expected.append(nats(one.logits(padded)[:, min(t, 8) - 1], ids[:, t]))

  assert windowed['perplexity'] == pytest.approx(np.exp(np.mean(expected)), rel=1e-4)


def test_caches_that_a_model_cannot_have_are_rows_with_the_reason():
  run = small_run(attention=sj.AttentionSpec(position=sj.Learned(max_length=16)))
  rows = sj.analyse(
    'streaming',
    run,
    tokens(1, 40),
    cache_size=8,
    sinks=2,
  ).rows
  refused = [row for row in rows if row['part'] == 'not possible']

  assert [row['cache'] for row in refused] == ['first 2 and last 6, text positions', 'all tokens']
  for row in refused:
    assert '16 learned positions' in row['reason']

  for options in (dict(cache_size=20, sinks=2), dict(cache_size=8, sinks=8)):
    with pytest.raises(ValueError, match='cache_size|sinks'):
      sj.analyse('streaming', run, tokens(1, 40), **options)
