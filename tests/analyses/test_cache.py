"""Kept attention and advice on caches, against NumPy on maps and models that read kept tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from scipy.special import logsumexp

import sink_jax as sj
from sink_jax.analyses import cache as module
from sink_jax.attention.spec import TransformedQK, transform_qk
from sink_jax.models.record import Seen
from tests.analyses.small import HYBRID, VOCABULARY, maps, small_run, tokens

PAIRS = ((0, 1), (0, 16), (1, 5), (4, 64), (8, 100))


def kept(weights_xTxT, first, recent):
  """The definition: 1 minus the mass of dropped keys, a mean over queries i >= first + recent."""
  length = weights_xTxT.shape[-1]
  i, j = np.ogrid[:length, :length]
  is_dropped = (j >= first) & (j <= i - recent)
  dropped_xT = (weights_xTxT * is_dropped).sum(-1)
  return 1 - dropped_xT[..., first + recent :].mean(-1)


def kept_pairs(weights_xTxT):
  return np.stack([kept(weights_xTxT, *pair) for pair in PAIRS], -1)


def of_part(rows, name):
  return [row for row in rows if row['part'] == name]


@pytest.mark.typed
@pytest.mark.parametrize(
  'spec, params',
  [
    (sj.AttentionSpec(), {}),
    (sj.AttentionSpec(mask=sj.Window(40)), {}),
    (sj.AttentionSpec(kv_bias=sj.SinkLogit()), {'kv_bias': {'logit': np.ones(2)}}),
    (sj.AttentionSpec(similarity=sj.Relu(), normalizer=sj.Unnormalized()), {}),
    (sj.AttentionSpec(similarity=sj.Sigmoid(), normalizer=sj.Unnormalized()), {}),
  ],
  ids=['softmax', 'window', 'logit', 'relu', 'sigmoid'],
)
def test_kept_mass_is_that_of_normalised_rows(spec, params):
  # The 200 queries need several blocks, and the last one is padded.
  rng = np.random.default_rng(1)
  q, k = jnp.asarray(rng.standard_normal((2, 2, 200, 2, 4), np.float32))
  k = k[:, :, :1]  # two query heads share a key/value head
  qk = transform_qk(spec, q, k, params)
  found = module.kept_mass(Seen(spec, qk, params), PAIRS)
  rows = sj.attention_map(spec, q, k, params, proxy=True)

  # Masses are sums of at most 200 numbers that are rounded to 2^-24 of themselves.
  np.testing.assert_allclose(found, kept_pairs(np.float64(rows)), atol=1e-6)


@pytest.mark.full
def test_memory_is_linear_in_the_length():
  spec = sj.AttentionSpec(position=sj.Nope())
  pairs = ((0, 64), (4, 60), (4, 1020))
  program = jax.jit(lambda q, k: module.kept_mass(Seen(spec, TransformedQK(q, k), {}), pairs))

  def peak(length):  # bytes; a map has 4 T^2
    x = jax.ShapeDtypeStruct((1, length, 1, 8), np.float32)
    compiled = program.lower(x, x).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  assert peak(65536) < 4.4 * peak(16384)
  assert peak(65536) < 65536**2 / 8

  # If all keys are equal, attention is uniform, and the mass is a share of the keys.
  ones = np.ones((1, 65536, 1, 8), np.float32)
  expected = [np.mean((s + w) / np.arange(s + w + 1, 65537)) for s, w in pairs]

  np.testing.assert_allclose(program(ones, ones)[0, 0], expected, atol=2e-6)


@pytest.mark.parametrize('layers, blocks', [({}, [1, 2]), (dict(pattern=HYBRID), [2])])
def test_rows_of_mass_have_the_maps_of_the_model_and_a_null(monkeypatch, layers, blocks):
  ones = lambda config, params, ids, policy: [np.ones((len(ids), 79))]
  monkeypatch.setattr(module, 'text_losses', ones)
  run = small_run(sharp=3.0, **layers)
  ids = tokens(6, 80)
  rows = of_part(sj.analyse('cache', run, ids).rows, 'mass')
  weights_NxSxHxTxT = maps(run, ids[:3])  # the half that chooses the cache
  uniform_TxT = np.tri(80) / np.arange(1, 81)[:, None]

  assert sorted({row['block'] for row in rows}) == blocks
  for row in rows:
    n = blocks.index(row['block'])
    pair = row['first'], row['recent']
    mass_S = kept(weights_NxSxHxTxT[n, :, row['head'] - 1], *pair)
    low, high = stats.ttest_1samp(mass_S, 0).confidence_interval(0.99)
    assert row['kept'] == pytest.approx(mass_S.mean(), abs=1e-5)
    assert row['low'] == pytest.approx(max(0, low), abs=2e-4)
    assert row['high'] == pytest.approx(min(1, high), abs=2e-4)
    assert row['uniform'] == pytest.approx(kept(uniform_TxT, *pair))
    if pair == (4, 64):
      assert row['key_value_head'] == (1, 1, 2, 2)[row['head'] - 1]
      assert row['role'] == ('streams' if mass_S.mean() >= 0.95 else 'retrieves')


def late(run, ids, first, recent, start):
  """The mean loss (S,) from `start` on, of queries that read only what a cache keeps.

  With one block and no positions, the last query reads the kept tokens in any order.
  """
  losses = []
  for t in range(start, ids.shape[1]):
    last = range(max(0, t - recent), t)
    kept_t = np.unique([*range(min(first, t)), *last])
    padded = np.zeros_like(ids)  # on the right, which the last kept token does not see
    padded[:, : len(kept_t)] = ids[:, kept_t]
    logits = np.asarray(run.logits(padded), float)[:, len(kept_t) - 1]
    losses.append(logsumexp(logits, -1) - logits[range(len(ids)), ids[:, t]])
  return np.mean(losses, 0)


def test_losses_are_those_of_a_model_that_reads_what_the_cache_keeps(monkeypatch):
  monkeypatch.setattr(module, 'LEAST_KEPT', 0)
  run = small_run(layers=1, sharp=3.0, attention=sj.AttentionSpec(position=sj.Nope()))
  ids = tokens(4, 48)
  rows = sj.analyse('cache', run, np.tile(ids, (2, 1))).rows
  caches = [row for row in of_part(rows, 'cache') if row['positions'] == 'text']
  sizes = [(row['first'], row['size']) for row in caches]

  assert sizes == [(first, size) for size in (12, 24) for first in (0, 1, 2, 4)]
  for row, (first, size) in zip(caches, sizes):
    start = max(24, size)  # the second half, or from the step at which the cache is full
    loss_S = late(run, ids, first, row['recent'], start)
    full_S = late(run, ids, 0, 48, start)
    change = 100 * (loss_S.mean() / full_S.mean() - 1)
    assert row['loss'] == pytest.approx(loss_S.mean(), rel=1e-5)
    assert row['full'] == pytest.approx(full_S.mean(), rel=1e-5)
    assert row['change'] == pytest.approx(change, abs=1e-2)  # in per cent, of losses to 1e-6
    assert row['low'] <= row['change'] <= row['high']
    assert row['within'] == (row['high'] <= 1)
    assert row['bytes'] == size * 2 * 1 * 2 * 4 * 2  # K and V, block, heads, Dh, bytes
    assert row['full_bytes'] == row['bytes'] / size * 48
    of_documents = [
      other['change']
      for other in of_part(rows, 'document')
      if (other['first'], other['size']) == (first, size)
    ]
    assert np.mean(of_documents[: len(ids)]) == pytest.approx(row['change'])
    if first < 4:  # how much more it costs than four first tokens, by document
      most_S = late(run, ids, 4, size - 4, start)
      more_S = 100 * (loss_S - most_S) / full_S.mean()
      low, high = stats.ttest_1samp(more_S, 0).confidence_interval(0.99)
      found = [row['more'], row['more_low'], row['more_high']]
      np.testing.assert_allclose(found, [more_S.mean(), low, high], atol=2e-2)
      assert row['enough'] == (row['more_high'] <= 1)
    else:
      assert 'more' not in row


def advised(change, family='llama', bos=False):
  """Rows if the late loss is 1 with the full cache, and rises by `change` per cent by text."""

  def losses(config, params, tokens_SxT, policy):
    changes = change(policy) if policy.size < tokens_SxT.shape[1] else 0
    loss_S = 1 + np.broadcast_to(changes, 8) / 100
    return [np.repeat(loss_S[:, None], 2047, 1)]

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(module, 'text_losses', losses)
    patch.setattr(module, '_masses', lambda model, pairs, ids: np.ones((8, 2, 4, len(pairs))))
    patch.setattr(module, 'model_type', lambda run: family)
    options = dict(inputs='random', sequences=16, length=2048)
    return sj.analyse('cache', small_run(), bos='force' if bos else 'none', **options).rows


def test_the_advice_is_the_smallest_cache_whose_interval_is_safe():
  rows = advised(lambda policy: 0.5 if policy.sinks == 4 else 3)
  advice = rows[-1]
  shown = {name: advice[name] for name in ('size', 'sinks', 'length', 'documents')}

  assert shown == {'size': 512, 'sinks': 4, 'length': 2048, 'documents': 16}
  assert eval(advice['policy'], {'CachePolicy': sj.CachePolicy}) == sj.CachePolicy(512, 4, 'text')
  assert 'For texts of up to 2048 tokens keep the first 4 and the last 508' in advice['words']
  assert '0.0328 instead of 0.131 MB' in advice['words']  # 64 bytes a token
  # The smallest safe cache was tried on both halves, twice, and the larger one on one half.
  tried = [(row['size'], row['first'], row['safe']) for row in of_part(rows, 'cache')]
  chosen = (512, 4, True)
  unchosen = [(512, 0, False), (512, 1, False), (512, 2, False)]
  larger = [(1024, 0, False), (1024, 1, False), (1024, 2, False), (1024, 4, None)]
  assert tried == [*unchosen, chosen, *larger, chosen]
  assert advice['kvpress'] == 'StreamingLLMPress(n_sink=4, compression_ratio=0.75)'

  # llama.cpp drops half of its c - keep tokens. The rest must be as many as the window holds, and
  # it pads 4 + 2 * 508 to a multiple of 256. It keeps a BOS in addition to what --keep says.
  assert advice['llama_cpp'] == '--context-shift --keep 4 -c 1024'

  with_bos = advised(lambda policy: 0.5 if policy.sinks == 4 else 3, bos=True)[-1]

  assert with_bos['llama_cpp'] == '--context-shift --keep 3 -c 1024'


def test_a_mean_within_one_per_cent_is_not_safe_if_the_interval_over_texts_reaches_further():
  rows = advised(lambda policy: [0, 0, 0, 0, 0, 0, 0, 7])

  for row in of_part(rows, 'cache'):
    assert row['change'] < 1 < row['high']
    assert row['safe'] is False
  assert rows[-1]['part'] == 'advice'
  assert 'size' not in rows[-1]


def test_a_tool_has_a_line_only_where_it_does_what_was_measured():
  safe = lambda policy: 0.5

  assert {'kvpress', 'llama_cpp'} <= set(advised(safe)[-1])
  # llama.cpp shifts no model with windows, and kvpress does not shorten them.
  for family in (None, 'gemma3_text', 'jamba'):
    assert not {'kvpress', 'llama_cpp'} & set(advised(safe, family)[-1])
  # llama.cpp renumbers positions: a cache that is safe only with the text's gets no line for it.
  assert 'llama_cpp' not in advised(lambda policy: 0 if policy.positions == 'text' else 5)[-1]
  # Nor one that is safe only on the half that chose it.
  # Eight are tried, the best again, and both with new numbers.
  halves = iter([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 5])
  assert 'llama_cpp' not in advised(lambda policy: next(halves))[-1]
  assert not next(halves, None)
  # Its context, twice the window, holds the whole text: it would never shift.
  assert 'llama_cpp' not in advised(lambda policy: 0.5 if policy.size > 512 else 3)[-1]


def test_caches_that_are_not_tried_have_a_reason_and_controls_always_run():
  run = small_run(attention=sj.AttentionSpec(position=sj.Nope()))
  run.params['blocks']['attention']['query']['kernel'] *= 0  # uniform attention
  rows = of_part(sj.analyse('cache', run, tokens(4, 96)).rows, 'cache')

  for row in rows:
    untried = row['first'] > 0 and row['kept'] < 0.5
    assert ('reason' in row) == untried
    assert ('loss' in row) != untried
  assert any('reason' in row for row in rows)

  with pytest.raises(ValueError, match='sequences'):
    sj.analyse('cache', run, tokens(3, 96))


@pytest.mark.full
@pytest.mark.parametrize('seed', range(4))
def test_advice_holds_on_texts_it_was_not_made_on(seed):
  run = small_run(sharp=1 + seed)
  ids = np.random.default_rng(seed).integers(0, VOCABULARY, (48, 96))
  rows = sj.analyse('cache', run, ids).rows

  assert of_part(rows, 'advice')
  for held in of_part(rows, 'held out')[-1:]:
    assert held['low'] <= 1  # within 1 %, at the lower end of the new texts' interval


def test_what_holds_only_where_it_was_chosen_is_seen(monkeypatch):
  ids = tokens(16, 128)

  def losses(config, params, tokens_SxT, policy):
    is_new = np.array_equal(tokens_SxT, ids[8:])
    loss = 1.06 if is_new and policy.size < 128 else 1
    return [np.full((8, 127), loss)]

  monkeypatch.setattr(module, 'text_losses', losses)
  rows = sj.analyse('cache', small_run(), ids).rows
  [held] = of_part(rows, 'held out')
  advice = rows[-1]

  assert held['change'] == pytest.approx(6)
  assert not held['safe']
  assert '+6.00 %' in advice['words']
  assert 'is not safe' in advice['words']
  assert 'size' not in advice
