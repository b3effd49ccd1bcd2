"""Padded batches: every number is that of each text by itself; padding on the left is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import sink_jax as sj
from sink_jax.analyses import signature
from sink_jax.models.config import Layer
from tests.random_params import tiny

pytestmark = pytest.mark.typed

LENGTHS = np.array([9, 4, 7, 9, 2])
S = len(LENGTHS)
T = 9
HEADS = 4
KV_HEADS = 2
WIDTH = 8
# The same sums in float64, or in float32 with rows at another place of a batch.
close = functools.partial(assert_allclose, rtol=1e-6, atol=1e-6)
SIDES = pytest.mark.parametrize('side', ['left', 'right'])


def padded(texts, side, fill):
  """Texts (T, ...) of different lengths as one array, with `fill` on a side."""
  first = texts[0]
  batch = np.full((S, T, *first.shape[1:]), fill, first.dtype)
  for row, text in zip(batch, texts):
    at = T - len(text) if side == 'left' else 0
    row[at : at + len(text)] = text
  return batch


def mask_of(side):
  """What says where texts lie."""
  return padded([np.ones(n, int) for n in LENGTHS], side, 0)


def drawn(*shape, seed=0):
  rng = np.random.default_rng(seed)
  return [rng.standard_normal((n, *shape), np.float32) for n in LENGTHS]


def texts_alone(layers=2):
  """Maps (H, T, T) of each text, of each layer: causal rows that sum to one."""
  rng = np.random.default_rng(0)

  def maps(n):
    scores = 2 * rng.standard_normal((HEADS, n, n))
    weights = np.tril(np.exp(scores))
    return weights / weights.sum(-1, keepdims=True)

  return [[maps(n) for n in LENGTHS] for _ in range(layers)]


def batch_of_maps(texts, side, rows=1 / T):
  """Maps (S, H, T, T), with the rows that transformers gives to padding, or NaN, or zeros."""
  batch = np.full((S, HEADS, T, T), float(rows))
  for maps, text in zip(batch, texts):
    n = text.shape[-1]
    at = slice(T - n, T) if side == 'left' else slice(n)
    maps[:, at] = 0
    maps[:, at, at] = text
  return batch


@SIDES
@pytest.mark.parametrize('xp', [np, jnp])
@pytest.mark.parametrize('rows', [1 / T, 0, np.nan])
def test_importance_is_that_of_each_text(side, xp, rows):
  layers = texts_alone()
  given = [xp.asarray(batch_of_maps(texts, side, rows)) for texts in layers]
  alpha_NxSxHxT = sj.importance(tuple(given), mask=mask_of(side))
  one = sj.importance(given[0], mask=mask_of(side))
  close(one, alpha_NxSxHxT[0])
  there = [[] for _ in range(T)]  # by position
  for alpha_SxHxT, texts in zip(alpha_NxSxHxT, layers):
    for alpha_HxT, text, n in zip(alpha_SxHxT, texts, LENGTHS):
      close(alpha_HxT[:, :n], sj.importance(text))
      assert np.isnan(alpha_HxT[:, n:]).all()
      for k in range(n):
        there[k] += alpha_HxT[:, k].tolist()
  rates = sj.sink_rate(alpha_NxSxHxT)
  expected = [np.mean(np.array(values) > 0.3) for values in there]
  close(rates, expected)

  # The axes of an importance may come in any order.
  alpha_SxHxNxT = np.moveaxis(alpha_NxSxHxT, 0, 2)
  moved = sj.sink_rate(alpha_SxHxNxT)

  assert_array_equal(moved, rates)


def test_a_mask_may_be_traced():
  maps, mask = batch_of_maps(texts_alone(1)[0], 'right'), mask_of('right')
  importance = lambda maps, mask: sj.importance(maps, mask=mask)
  close(jax.jit(importance)(maps, mask), importance(maps, mask))


@SIDES
def test_a_report_of_maps(side):
  layers = texts_alone()
  batch = [batch_of_maps(texts, side) for texts in layers]
  report = sj.SinkReport.from_attentions(batch, mask=mask_of(side))
  by_text = [[maps[None] for maps in of_layers] for of_layers in zip(*layers)]
  alone = list(map(sj.SinkReport.from_attentions, by_text))
  for key in ('sink_1', 'mean_importance', 'raw_mass_1', 'raw_row_mass'):
    values = [one.summary()[key] for one in alone]
    mean = pytest.approx(np.mean(values), rel=1e-6)
    assert report.summary()[key] == mean
  assert report.lengths.tolist() == LENGTHS.tolist()
  assert '2 to 9 tokens' in repr(report)

  # The last position is in two texts; the longest of others has seven tokens.
  rates = [alone[s].sink_rate(9) for s in (0, 3)]
  assert report.sink_rate(9) == np.mean(rates)
  part = [maps[1:3] for maps in batch]
  shorter = sj.SinkReport.from_attentions(part, mask=mask_of(side)[1:3])
  assert shorter.importance.shape == (2, 2, HEADS, 7)


LINEAR = (
  'sink rate',
  'mean importance',
  'mean entropy',
  'value norm ratio',
  'key norm ratio',
  'hidden norm ratio',
  'massive activation',
  'kurtosis',
)


def of_measure(rows, measure):
  """The rows of a card about a measure."""
  return [row for row in rows if row['measure'] == measure]


@SIDES
def test_a_card_of_arrays(side):
  """Every measure of a padded batch is the mean over its texts."""
  [texts], hidden = texts_alone(1), drawn(16, seed=5)
  for text in hidden:
    text[0, 3] = 4e3

  vectors = {
    'keys': drawn(KV_HEADS, WIDTH, seed=1),
    'values': drawn(KV_HEADS, WIDTH, seed=6),
    'heads': drawn(HEADS, WIDTH, seed=7),
  }

  def card_of_text(s):
    """Twice the text, since an interval needs two."""
    twice = lambda x: np.stack([x, x])
    of_text = {name: twice(np.swapaxes(x[s], 0, 1)[None]) for name, x in vectors.items()}
    return signature.from_arrays(
      attentions=[twice(texts[s])],
      hidden=twice(hidden[s][None]),
      **of_text,
    )

  alone = [card_of_text(s) for s in range(S)]

  # Padding may hold anything, since a model computes nothing there that counts.
  maps = [batch_of_maps(texts, side)]
  of_batch = {name: padded(x, side, np.inf) for name, x in vectors.items()}
  rows = signature.from_arrays(
    attentions=maps,
    hidden=padded(hidden, side, np.nan)[:, None],
    **{name: x_SxTxHxDh.swapaxes(1, 2)[:, None] for name, x_SxTxHxDh in of_batch.items()},
    mask=mask_of(side),
  )
  for measure in LINEAR:
    found, *_ = of_measure(rows, measure)
    for key in ('value', 'uniform'):
      values = [of_measure(others, measure)[0][key] for others in alone]
      mean = np.mean(values)
      assert found[key] == pytest.approx(mean, rel=1e-6), (measure, key)
  assert of_measure(rows, 'massive activation')[0]['channel'] == 3

  # Attention maps and their importance say the same.
  given = sj.importance(maps, mask=mask_of(side)).swapaxes(0, 1)
  again = signature.from_arrays(importance=given, mask=mask_of(side))
  by_head = lambda rows: [row['value'] for row in of_measure(rows, 'importance')]
  means = np.mean([by_head(others) for others in alone], 0)
  close(by_head(rows), means)
  close(by_head(again), by_head(rows))


SPECS = [
  sj.AttentionSpec(),
  sj.AttentionSpec(position=sj.Alibi(), mask=sj.Window(3)),
  sj.AttentionSpec(mask=sj.Prefix(4), kv_bias=sj.KBias()),  # longer than the shortest text
  sj.AttentionSpec('Sigmoid()', 'Unnormalized()', temperature='LogLength()'),
]


@SIDES
@pytest.mark.parametrize('spec', SPECS, ids=str)
def test_streaming_importance_is_that_of_each_text(side, spec):
  q = drawn(HEADS, WIDTH, seed=4)
  k = drawn(KV_HEADS, WIDTH, seed=2)
  shapes = spec.params(sj.Dims(HEADS, KV_HEADS, WIDTH))
  params = jax.tree.map(
    lambda param: np.full(param.shape, 0.5, np.float32),
    shapes,
    is_leaf=lambda x: hasattr(x, 'shape'),
  )
  measure = functools.partial(sj.streaming_importance, spec, params=params, entropy=True)
  batch = padded(q, side, np.nan), padded(k, side, np.nan)
  found = measure(*batch, mask=mask_of(side))
  for s, n in enumerate(LENGTHS):
    alone = measure(q[s][None], k[s][None])
    for name, ours, one in zip(found._fields, found, alone):
      if one is None or ours is None:
        assert one is ours
      elif name in ('raw', 'normalized'):
        close(ours[s, :, :n], one[0], err_msg=name)
        assert np.isnan(ours[s, :, n:]).all()
      else:
        close(ours[s], one[0], err_msg=name)

  # Also of the first keys only, under jit.
  few = jax.jit(lambda q, k, mask: measure(q, k, keys=3, mask=mask))
  traced = few(*batch, mask_of(side))
  close(traced.normalized, found.normalized[..., :3])


def test_a_temperature_that_counts_a_prefix_is_refused():
  spec = sj.AttentionSpec(mask=sj.Prefix(4), temperature='LogLength(learned=False)')
  q = np.ones((S, T, 1, 2))
  with pytest.raises(ValueError, match='LogLength'):
    sj.streaming_importance(spec, q, q, mask=mask_of('right'))


MODELS = [
  {
    'sink_tokens': 1,
    'pattern': (Layer(mask=sj.Window(3)), Layer()),
  },
  dict(attention=sj.AttentionSpec(mask=sj.Prefix(4))),
]


@SIDES
@pytest.mark.parametrize('options_of_model', MODELS, ids=str)
def test_a_probe_is_that_of_each_text(side, options_of_model):
  """Numbers of a text do not see padding or its neighbours; those of a batch are means."""
  run = tiny(kv_heads=2, **options_of_model)
  texts = [np.random.default_rng(n).integers(0, 11, n) for n in LENGTHS]
  tokens = padded(texts, side, 3)
  report = sj.probe(run, tokens, batch_size=2, mask=mask_of(side))
  alone = [sj.probe(run, text[None]) for text in texts]
  of_norms = functools.partial(close, rtol=1e-5)  # float32 norms of about 4
  for s, (one, n) in enumerate(zip(alone, LENGTHS)):
    close(report.importance[s, ..., :n], one.importance[0])
    assert np.isnan(report.importance[s, ..., n:]).all()
    close(report.entropy[s], one.entropy[0])
    for kind in ('hidden', 'key', 'value', 'head'):
      ours = report.norms[kind]
      theirs = one.norms[kind]
      of_norms(ours[s, ..., :n], theirs[0])

  # A ratio of means over texts.
  norms_SxNxT = report.norms['hidden']
  others_SxN = np.nanmean(norms_SxNxT[..., 1:], -1)
  first_N = norms_SxNxT[..., 0].mean(0)
  of_norms(report.norm_ratio('hidden'), first_N / others_SxN.mean(0))
  rates = [one.summary()['sink_1'] for one in alone]

  assert report.summary()['sink_1'] == pytest.approx(np.mean(rates))
  largest = [one.activations.activation_max for one in alone]
  of_norms(report.activations.activation_max, np.mean(largest, 0))
  assert report.protocol['lengths'] == LENGTHS.tolist()
  assert report.protocol['activation_sequences'] == S
  assert report.protocol['first_token_ids'] == texts[0][:4].tolist()


def layers_of(*shape, window=T, chunk=T, prefix=0):
  """Maps of zeros and equal weights: causal, with a window, chunks, or a prefix that all see."""
  i, j = np.ogrid[:T, :T]
  causal = (j <= i) & (i - j < window)
  same_chunk = i // chunk == j // chunk
  seen = causal & same_chunk | (j < prefix)
  maps = seen / seen.sum(1, keepdims=True)
  return np.broadcast_to(maps, (*shape, T, T))


@pytest.mark.untyped
@pytest.mark.parametrize('rows', [1 / T, 0, np.nan])
@pytest.mark.parametrize('xp', [np, jnp])
def test_padding_on_the_left_is_refused(rows, xp):
  batches = [batch_of_maps(texts, 'left', rows) for texts in texts_alone()]
  layers = list(map(xp.asarray, batches))
  words = r'5 tokens of padding .* mask='
  one = layers[0]
  stacked = xp.asarray(layers)
  for maps in (tuple(layers), stacked, one, one[1, 0]):
    with pytest.raises(ValueError, match=words):
      sj.importance(maps)
  card = lambda maps: sj.card_of(attentions=maps)
  for call in (sj.SinkReport.from_attentions, card):
    with pytest.raises(ValueError, match=rf'sequence 1 .* {words}'):
      call(layers)


@pytest.mark.parametrize(
  'options_of_maps',
  [
    {},
    dict(window=1),
    dict(window=3),
    dict(chunk=4),
    dict(prefix=4),
    dict(prefix=4, window=2),
  ],
  ids=str,
)
def test_masks_without_padding_pass(options_of_maps):
  maps = layers_of(2, 3, **options_of_maps)
  assert np.isfinite(sj.importance([maps, maps])).all()


def test_weights_of_zero_are_not_padding():
  """Softpick and ReLU give nothing at all to keys with negative scores."""
  maps = np.array(layers_of(2, 3))
  maps[:, 1, :, 0] = 0  # in one head

  assert sj.importance(maps)[0, 1, 0] == 0
  maps = np.array(layers_of(1, 1, prefix=4))
  maps[..., 0] = 0  # in all heads, but the first query sees only keys of the prefix
  assert sj.importance(maps)[0, 0, 0] == 0

  # A mask says that there is none where weights cannot tell.
  maps[..., 0, :] = 0
  with pytest.raises(ValueError, match='with ones'):
    sj.importance(maps)
  mask = np.ones((1, T), int)
  assert sj.importance(maps, mask=mask)[0, 0, 0] == 0


MAPS = layers_of(S, HEADS)
Q = np.ones((S, T, 2, 4), np.float32)
IDS = np.ones((S, T), int)
RUN = tiny()
CALLS = {
  'importance': functools.partial(sj.importance, MAPS),
  'report': functools.partial(sj.SinkReport.from_attentions, [MAPS]),
  'card': functools.partial(sj.card_of, attentions=[MAPS]),
  'streaming': functools.partial(sj.streaming_importance, sj.AttentionSpec(), Q, Q),
  'probe': functools.partial(sj.probe, RUN, IDS),
}


@pytest.mark.untyped
@pytest.mark.parametrize('call', CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(
  'mask, words',
  [
    (np.ones((S, T + 1)), r'mask .*\(5, 9\)'),
    (np.eye(S, T)[:, ::-1] * 2, 'every row 1'),
    (np.arange(T) % 2 + np.zeros((S, 1)), 'without a gap'),
    (np.zeros((S, T)), 'every row'),
  ],
)
def test_where_texts_cannot_lie(call, mask, words):
  with pytest.raises(ValueError, match=words):
    call(mask=mask)


ALPHA = sj.importance([MAPS], mask=mask_of('right'))


@pytest.mark.untyped
@pytest.mark.parametrize(
  'call, words',
  [
    # A mask that the model did not read.
    (lambda: sj.importance(MAPS, mask=mask_of('left')), 'attention_mask'),
    (lambda: sj.importance(layers_of(), mask=np.ones((1, T), int)), r'\(S, ..., T, T\)'),
    # NaN only after the last key of a text, which has a first one.
    (lambda: sj.sink_rate(ALPHA[..., ::-1]), 'is nan'),
    (lambda: sj.sink_rate(ALPHA * np.nan), 'is nan'),
    (lambda: sj.card_of(importance=ALPHA.swapaxes(0, 1)), 'mask='),
  ],
)
def test_where_texts_end_has_to_fit(call, words):
  with pytest.raises(ValueError, match=words):
    call()
