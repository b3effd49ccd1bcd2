"""Kept attention and advice on caches, against NumPy on maps and models that read kept tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import sink_jax as sj
from sink_jax.analyses import cache as module
from sink_jax.attention.spec import TransformedQK, transform_qk
from sink_jax.models.record import Seen
from tests.analyses.small import HYBRID, VOCABULARY, maps, small_run, tokens

PAIRS = (
  (0, 1),
  (0, 16),
  (1, 5),
  (4, 64),
  (8, 100),
)


def kept(weights_xTxT, first, recent):
  """The definition: 1 minus the mass of dropped keys, a mean over queries i >= first + recent."""
  length = weights_xTxT.shape[-1]
  i, j = np.ogrid[:length, :length]
  dropped = (weights_xTxT * ((j >= first) & (j <= i - recent))).sum(-1)
  return 1 - dropped[..., first + recent :].mean(-1)


@pytest.mark.typed
@pytest.mark.parametrize('window', [None, 40])
def test_kept_mass_is_the_sum_over_a_map_of_softmax(window):
  # The 200 queries need several blocks, and the last one is padded. Two query heads share a
  # key/value head.
  rng = np.random.default_rng(0)
  q = rng.standard_normal((2, 200, 4, 8), np.float32) * 2
  k = rng.standard_normal((2, 200, 2, 8), np.float32)
  mask = sj.Window(window) if window else sj.Causal()
  spec = sj.AttentionSpec(position=sj.Nope(), mask=mask)
  shared = np.repeat(np.float64(k), 2, 2)
  s = np.einsum('bihd,bjhd->bhij', np.float64(q), shared) / np.sqrt(8)
  i, j = np.ogrid[:200, :200]
  p = np.exp(s) * ((j <= i) & (i - j < (window or 200)))
  p /= p.sum(-1, keepdims=True)
  qk = TransformedQK(jnp.asarray(q), jnp.asarray(k))
  found = module.kept_mass(Seen(spec, qk, {}), PAIRS)
  # Masses are sums of at most 200 numbers that are rounded to 2^-24 of themselves.
  expected = np.stack([kept(p, *pair) for pair in PAIRS], -1)
  np.testing.assert_allclose(found, expected, atol=1e-6)


def test_kept_mass_of_other_attention_is_that_of_its_normalised_rows():
  rng = np.random.default_rng(1)
  q, k = rng.standard_normal((2, 1, 130, 2, 4), np.float32)
  for spec, params in (
    (sj.AttentionSpec(kv_bias=sj.SinkLogit()), {'kv_bias': {'logit': np.ones(2)}}),
    (sj.AttentionSpec(similarity=sj.Relu(), normalizer=sj.Unnormalized()), {}),
    (sj.AttentionSpec(similarity=sj.Sigmoid(), normalizer=sj.Unnormalized()), {}),
  ):
    rows = sj.attention_map(spec, q, k, params, proxy=True)
    qk = transform_qk(spec, q, k, params)
    found = module.kept_mass(Seen(spec, qk, params), PAIRS)
    expected = np.stack([kept(np.float64(rows), *pair) for pair in PAIRS], -1)
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.full
def test_memory_is_linear_in_the_length():
  spec = sj.AttentionSpec(position=sj.Nope())
  pairs = (
    (0, 64),
    (4, 60),
    (4, 1020),
  )
  program = jax.jit(lambda q, k: module.kept_mass(Seen(spec, TransformedQK(q, k), {}), pairs))
  lengths = (16384, 65536)
  peaks = []
  for length in lengths:
    x = jax.ShapeDtypeStruct((1, length, 1, 8), np.float32)
    compiled = program.lower(x, x).compile()
    peaks.append(compiled.memory_analysis().temp_size_in_bytes)
  # bytes; a map has 4 T^2
  assert peaks[1] < 4.4 * peaks[0]
  assert peaks[1] < 65536**2 / 8
  # If all keys are equal, attention is uniform, and the mass is a share of the keys.
  ones = np.ones((1, 65536, 1, 8), np.float32)
  expected = [np.mean((s + w) / np.arange(s + w + 1, 65537)) for s, w in pairs]
  np.testing.assert_allclose(program(ones, ones)[0, 0], expected, atol=2e-6)


def test_rows_of_mass_have_the_maps_of_the_model_and_a_null(monkeypatch):
  # A patched `cached_losses` could stay in an analysis that is imported meanwhile.
  losses = lambda config, params, ids, policy: [np.ones((len(ids), 79))]
  monkeypatch.setattr(module, 'text_losses', losses)
  for layers in ({}, dict(pattern=HYBRID)):
    run = small_run(sharp=3.0, **layers)
    ids = tokens(6, 80)
    rows = [row for row in sj.analyse('cache', run, ids).rows if row['part'] == 'mass']
    weights_NxSxHxTxT = maps(run, ids[:3])  # the half that chooses the cache
    assert {row['block'] for row in rows} == ({2} if layers else {1, 2})
    for row in rows:
      n = row['block'] - 1 if not layers else 0
      pair = row['first'], row['recent']
      mass_S = kept(weights_NxSxHxTxT[n, :, row['head'] - 1], *pair)
      assert row['kept'] == pytest.approx(mass_S.mean(), abs=1e-5)
      low, high = stats.ttest_1samp(mass_S, 0).confidence_interval(0.99)
      bounds = max(0, low), min(1, high)
      assert (row['low'], row['high']) == pytest.approx(bounds, abs=2e-4)
      uniform = np.tri(80) / np.arange(1, 81)[:, None]
      null = kept(uniform, *pair)
      assert row['uniform'] == pytest.approx(null)
      if pair == (4, 64):
        assert row['key_value_head'] == (1, 1, 2, 2)[row['head'] - 1]
        assert row['role'] == ('streams' if mass_S.mean() >= 0.95 else 'retrieves')


def test_losses_are_those_of_a_model_that_reads_what_the_cache_keeps(monkeypatch):
  """With one block and no positions, the last query reads the kept tokens in any order."""
  monkeypatch.setattr(module, 'LEAST_KEPT', 0)
  run = small_run(layers=1, sharp=3.0, attention=sj.AttentionSpec(position=sj.Nope()))
  ids = tokens(4, 48)
  rows = sj.analyse('cache', run, np.tile(ids, (2, 1))).rows
  caches = [row for row in rows if row['part'] == 'cache' and row['positions'] == 'text']
  assert [(row['first'], row['size']) for row in caches] == [
    (0, 12),
    (4, 12),
    (0, 24),
    (4, 24),
  ]

  def late_S(first, recent, start):
    losses = []
    for t in range(start, 48):
      begins, ends = range(min(first, t)), range(max(0, t - recent), t)
      kept_t = np.unique([*begins, *ends])
      padded = np.zeros_like(ids)  # on the right, which the last kept token does not see
      padded[:, : len(kept_t)] = ids[:, kept_t]
      x = np.asarray(run.logits(padded), float)[:, len(kept_t) - 1]
      of_next = x[range(4), ids[:, t]]
      losses.append(np.log(np.exp(x).sum(-1)) - of_next)
    return np.mean(losses, 0)

  for row in caches:
    start = max(24, row['size'])  # the second half, or from the step at which the cache is full
    late = late_S(row['first'], row['recent'], start)
    full = late_S(0, 48, start)
    assert row['loss'] == pytest.approx(late.mean(), rel=1e-5)
    assert row['full'] == pytest.approx(full.mean(), rel=1e-5)
    change = 100 * (late.mean() / full.mean() - 1)
    assert row['change'] == pytest.approx(
      change, abs=1e-2
    )  # in per cent; the losses are accurate to 1e-6
    assert row['low'] <= row['change'] <= row['high']
    assert row['within'] == (row['high'] <= 1)
    assert row['bytes'] == row['size'] * 2 * 1 * 2 * 4 * 2  # K and V, block, heads, Dh, bytes
    assert row['full_bytes'] == row['bytes'] / row['size'] * 48
    of_documents = [
      other['change']
      for other in rows
      if other['part'] == 'document' and all(other[x] == row[x] for x in ('first', 'size'))
    ]
    assert np.mean(of_documents[: len(ids)]) == pytest.approx(row['change'])


def advised(change, family='llama', bos=False):
  """Rows if the late loss is 1 with the full cache, and rises by `change` per cent by text."""

  def losses(config, params, tokens_SxT, policy):
    changes = change(policy) if policy.size < tokens_SxT.shape[1] else 0
    changes_Sx1 = np.broadcast_to(changes, (8,))[:, None]
    return [1 + changes_Sx1 / 100 * np.ones(2047)]

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(module, 'text_losses', losses)
    masses = lambda model, pairs, ids: np.ones((8, 2, 4, len(pairs)))
    patch.setattr(module, '_masses', masses)
    patch.setattr(module, 'model_type', lambda run: family)
    options = dict(
      inputs='random',
      bos='force' if bos else 'none',
      sequences=16,
      length=2048,
    )
    return sj.analyse('cache', small_run(), **options).rows


def test_the_advice_is_the_smallest_cache_whose_interval_is_safe():
  rows = advised(lambda policy: 0.5 if policy.sinks else 3)
  advice = rows[-1]
  assert (advice['size'], advice['sinks'], advice['length'], advice['documents']) == (
    512,
    4,
    2048,
    16,
  )
  assert eval(advice['policy'], {'CachePolicy': sj.CachePolicy}) == sj.CachePolicy(512, 4, 'text')
  assert 'For texts of up to 2048 tokens keep the first 4 and the last 508' in advice['words']
  assert '0.0328 instead of 0.131 MB' in advice['words']  # 64 bytes a token
  tried = [(row['size'], row['first'], row['safe']) for row in rows if row['part'] == 'cache']
  # The smallest safe cache was tried on both halves, twice, and the larger one on one half.
  assert tried == [
    (512, 0, False),
    (512, 4, True),
    (1024, 0, False),
    (1024, 4, None),
    (512, 4, True),
  ]
  assert advice['kvpress'] == 'StreamingLLMPress(n_sink=4, compression_ratio=0.75)'
  # llama.cpp drops half of its c - keep tokens. The rest must be as many as the window holds, and
  # it pads 4 + 2 * 508 to a multiple of 256. It keeps a BOS in addition to what --keep says.
  assert advice['llama_cpp'] == '--context-shift --keep 4 -c 1024'
  with_bos = advised(lambda policy: 0.5 if policy.sinks else 3, bos=True)[-1]
  assert with_bos['llama_cpp'] == '--context-shift --keep 3 -c 1024'
  # A mean within 1 % is not enough, because the interval over texts reaches further.
  unsure = advised(lambda policy: [0, 0, 0, 0, 0, 0, 0, 7])
  assert all(
    row['change'] < 1 < row['high'] and row['safe'] is False
    for row in unsure
    if row['part'] == 'cache'
  )
  assert unsure[-1]['part'] == 'advice'
  assert 'size' not in unsure[-1]


def test_a_tool_has_a_line_only_where_it_does_what_was_measured():
  safe = lambda policy: 0.5
  assert {'kvpress', 'llama_cpp'} <= set(advised(safe)[-1])
  # llama.cpp shifts no model with windows, and kvpress does not shorten them.
  for family in (None, 'gemma3_text', 'jamba'):
    assert not {'kvpress', 'llama_cpp'} & set(advised(safe, family)[-1])
  # llama.cpp renumbers positions: a cache that is safe only with the text's gets no line for it.
  assert 'llama_cpp' not in advised(lambda policy: 0 if policy.positions == 'text' else 5)[-1]
  # Nor one that is safe only on the half that chose it.
  halves = iter([0, 0, 0, 0, 0, 0, 5])  # four are tried, the best again, and both with new numbers
  assert 'llama_cpp' not in advised(lambda policy: next(halves))[-1]
  assert not next(halves, None)
  # Its context, twice the window, holds the whole text: it would never shift.
  assert 'llama_cpp' not in advised(lambda policy: 0.5 if policy.size > 512 else 3)[-1]


def test_caches_that_are_not_tried_have_a_reason_and_controls_always_run():
  run = small_run(attention=sj.AttentionSpec(position=sj.Nope()))
  run.params['blocks']['attention']['query']['kernel'] *= 0  # uniform attention
  result = sj.analyse('cache', run, tokens(4, 96))
  rows = [row for row in result.rows if row['part'] == 'cache']
  for row in rows:
    left_out = row['first'] > 0 and row['kept'] < 0.5
    assert ('reason' in row) == left_out
    assert ('loss' not in row) == left_out
  assert any('reason' in row for row in rows)
  with pytest.raises(ValueError, match='sequences'):
    sj.analyse('cache', run, tokens(3, 96))


@pytest.mark.full
@pytest.mark.parametrize('seed', range(4))
def test_advice_holds_on_texts_it_was_not_made_on(seed):
  run = small_run(sharp=1 + seed)
  ids = np.random.default_rng(seed).integers(0, VOCABULARY, (48, 96))
  rows = sj.analyse('cache', run, ids).rows
  held, advice = (
    [row for row in rows if row['part'] == part][-1:] for part in ('held out', 'advice')
  )
  assert not held or held[0]['low'] <= 1  # within 1 %, at the lower end of the new texts' interval
  assert advice[0]['part'] == 'advice'


def test_what_holds_only_where_it_was_chosen_is_seen(monkeypatch):
  ids = tokens(16, 128)

  def losses(config, params, tokens_SxT, policy):
    changed = policy.size < 128 and np.array_equal(tokens_SxT, ids[8:])
    return [np.full((8, 127), 1 + 0.06 * changed)]

  monkeypatch.setattr(module, 'text_losses', losses)
  rows = sj.analyse('cache', small_run(), ids).rows
  [held], advice = [row for row in rows if row['part'] == 'held out'], rows[-1]
  assert held['change'] == pytest.approx(6)
  assert not held['safe']
  assert '+6.00 %' in advice['words']
  assert 'is not safe' in advice['words']
  assert 'size' not in advice
