"""The probe against a computation on full maps."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import sink_jax as sj
from sink_jax.models.config import Layer
from sink_jax.models.record import maps, states
from sink_jax.models.transformer import init_params
from tests.random_params import random_tokens, tiny

pytestmark = pytest.mark.typed

CONFIG = dict(layers=2, d_model=16, heads=4, ffn_hidden=24, vocab_size=11)


def run(scale=8.0, **options):
  """An untrained model with sharpened attention, so that some heads have sinks."""
  config = sj.ModelConfig(**CONFIG | options)
  params = init_params(config, 0)
  kernel = params['blocks']['attention']['query']['kernel']
  params['blocks']['attention']['query']['kernel'] = kernel * scale
  return sj.Run(config, params, name='test', step=7)


TOKENS = random_tokens(5, 12, 11)


close = functools.partial(assert_allclose, rtol=1e-4)


@pytest.mark.parametrize(
  'spec',
  [
    sj.AttentionSpec(),
    sj.AttentionSpec('Sigmoid()', 'Unnormalized()'),
    sj.AttentionSpec('Softpick()', 'AbsSum()', kv_bias=sj.SinkLogit()),
  ],
)
def test_a_report_is_what_the_maps_say(spec):
  model = run(attention=spec, dtype='float32')
  report = sj.probe(model, TOKENS)
  layers = model.record(TOKENS, sj.RecordOptions(attention=maps, hidden=states)).layers
  proxy_NxSxHxTxT = np.asarray(layers.attention.proxy_BxHxTxT)
  alpha_NxSxHxT = proxy_NxSxHxTxT.sum(-2) / (12 - np.arange(12))
  alpha_SxNxHxT = alpha_NxSxHxT.swapaxes(0, 1)
  close(report.importance, alpha_SxNxHxT, rtol=1e-5, atol=1e-6)
  rates = (alpha_SxNxHxT > 0.2).mean((0, 1, 2))

  assert report.sink_rate(position=1, epsilon=0.2) == pytest.approx(rates[0])
  assert report.sink_rate(position=3, epsilon=0.2) == pytest.approx(rates[2])

  # The extra key has the rest of a row.
  rest = np.maximum(1 - proxy_NxSxHxTxT.sum(-1, keepdims=True), 1e-30)
  rows = np.concatenate([proxy_NxSxHxTxT, rest], -1)
  logs = np.log(np.maximum(rows, 1e-30))
  entropy = -(rows * logs).sum(-1).mean((1, 3))
  seen = np.arange(1, 13) + spec.kv_bias.has_extra_key
  summary = report.summary(0.2)
  close(summary['entropy_ratio'], entropy / np.log(seen).mean())
  norms_NxSxT = np.linalg.norm(layers.hidden, axis=-1)
  first_N = norms_NxSxT[..., 0].mean(1)
  others_N = norms_NxSxT[..., 1:].mean((1, 2))
  close(report.norm_ratio('hidden')[1:], first_N / others_N)
  assert summary['sink_1'] == pytest.approx(100 * rates[0])
  raw = np.asarray(layers.attention.weights_BxHxTxT)
  row_mass = raw.sum(-1).mean()
  assert summary['raw_row_mass'] == pytest.approx(row_mass, rel=1e-5)
  assert (summary['sink_bias_slot'] is None) == (not spec.kv_bias.has_extra_key)

  # The raw mass of softmax is the mean importance.
  assert ('raw mass' in repr(report)) == (spec != sj.AttentionSpec())


def test_the_slot_rate_counts_with_and_without_the_dummy_row():
  model = run(attention=sj.AttentionSpec(kv_bias=sj.KBias()))
  report = sj.probe(model, TOKENS)
  slot, released = report.extra_key, report.extra_key_released
  close(released, (1 + 12 * slot) / 13, rtol=1e-5)
  epsilon = float(np.median(slot))
  summary = report.summary(epsilon)
  rates = [100 * (share > epsilon).mean() for share in (slot, released)]
  found = [summary[f'sink_bias_slot{ending}'] for ending in ('', '_released')]

  assert found == pytest.approx(rates)


def test_the_norm_of_the_sink_token_itself():
  """It is the larger one of two sink tokens, in every block."""
  model = run(sink_tokens=2, dtype='float32')

  # Equivalent: two more entries of the vocabulary come first, and are ordinary tokens.
  params = dict(model.params)
  params['embed'] = np.concatenate([params['embed'], params.pop('sink_tokens')])
  kernel = params['unembed']['kernel']
  params['unembed'] = {'kernel': np.pad(kernel, ((0, 0), (0, 2)))}
  config = dataclasses.replace(model.config, sink_tokens=0, vocab_size=13)
  longer = sj.Run(config, params)
  sink_tokens = [[11, 12]] * 5
  inputs = np.concatenate([sink_tokens, TOKENS], 1)
  options = sj.RecordOptions(attention=maps, hidden=states)
  layers = longer.record(inputs, options).layers
  embedded_SxTxD = params['embed'][inputs]
  hidden_NxSxTxD = np.concatenate([embedded_SxTxD[None], layers.hidden])
  norms_NxSxT = np.linalg.norm(hidden_NxSxTxD.astype(np.float64), axis=-1)
  norms_SxNxT = norms_NxSxT.swapaxes(0, 1)
  sinks_SxN = norms_SxNxT[..., :2].max(-1)
  others_SxNxT = norms_SxNxT[..., 2:]

  report = sj.probe(model, TOKENS)
  close(report.norms['sink_token'], sinks_SxN, rtol=1e-5)
  close(report.norms['hidden'], others_SxNxT, rtol=1e-5)

  alpha_NxSxHxT = layers.importance.normalized[..., 2:]
  alpha_SxNxHxT = alpha_NxSxHxT.swapaxes(0, 1)
  close(report.importance, alpha_SxNxHxT, rtol=1e-4, atol=1e-6)

  rows_NxSxHxTxT = np.asarray(layers.attention.proxy_BxHxTxT)
  to_sinks_NxSxH = rows_NxSxHxTxT[..., :2].sum(-1).mean(-1)
  close(report.extra_key_released, to_sinks_NxSxH.swapaxes(0, 1), rtol=1e-4)

  expected = sinks_SxN.mean(0) / others_SxNxT.mean((0, 2))
  close(report.summary()['sink_token_ratio'], expected, rtol=1e-5)
  with pytest.raises(ValueError, match='sink_token'):
    report.norm_ratio('sink_token')


def test_the_protocol_tells_what_was_measured():
  protocol = sj.probe(run(), TOKENS, dtype='bfloat16').protocol
  assert 'per sequence' in protocol.pop('metric')
  assert protocol == dict(
    scores='attention weights',
    blocks=[1, 2],
    first_token_limits=[1, 1],
    sequences=5,
    length=12,
    activation_sequences=5,
    dtype='bfloat16',
    matmul_precision='default',
    bos='none',
    first_token_ids=TOKENS[0, :4].tolist(),
    step=7,
    run='test',
  )
  sigmoid = sj.AttentionSpec('Sigmoid()', 'Unnormalized()')
  proxy = sj.probe(run(attention=sigmoid), TOKENS).protocol
  assert proxy['matmul_precision'] == 'highest'
  assert 'proxy' in proxy['scores']


@pytest.mark.untyped
@pytest.mark.parametrize(
  'options, words',
  [
    (dict(tokens=np.zeros((0, 5), int)), r'\(S, T\)'),
    (dict(tokens=np.zeros(5, int)), r'\(S, T\)'),
    (dict(tokens=[[1], [2, 3]]), 'tokens is a list'),
    (dict(tokens=TOKENS, batch_size=-1), 'batch_size'),
    (dict(tokens=TOKENS + 11), 'vocabulary has 11'),
    (dict(tokens=TOKENS - 11), 'vocabulary'),
    (dict(), 'give either tokens'),
    (dict(tokens=TOKENS, texts=['a']), 'give either tokens'),
    (dict(tokens=TOKENS, special=True), 'give either tokens'),
    (dict(texts=['a text']), 'no tokenizer is known: pass token ids'),
  ],
)
def test_what_a_probe_refuses(options, words):
  with pytest.raises(ValueError, match=words):
    sj.probe(run(), **options)


class Letters:
  """A tokenizer whose tokens are the letters a to k; the special token '<k>' is k, too."""

  prefix = ()

  def tokens(self, texts, length, special):
    texts = [text.replace('<k>', 'k') for text in texts] if special else texts
    ids = [[ord(letter) - ord('a') for letter in text] for text in texts]
    return [np.array(row[:length]) for row in ids]


@pytest.mark.untyped
@pytest.mark.parametrize(
  'texts, options',
  [
    (['abcd', 'kjihgfe'], {}),
    (('abcdk', 'kjihg'), dict(length=4)),
    (['abcd', '<k>jih'], dict(special=True)),
  ],
)
def test_texts_may_stand_for_tokens(texts, options):
  """They are cut to one length."""
  model = dataclasses.replace(run(), read_tokenizer=lambda run: Letters())
  report = sj.probe(model, texts=texts, **options)
  ids = [Letters().tokens([text], 4, special=False)[0] for text in ('abcd', 'kjih')]
  expected = sj.probe(model, np.stack(ids))
  assert_array_equal(report.importance, expected.importance)


def test_the_largest_activation_is_named():
  model = run(dtype='float32')
  embed = np.array(model.params['embed'])
  embed[3, 5] = 3e4
  model.params['embed'] = embed
  tokens = np.full((3, 8), 4)
  tokens[:, 0] = 3  # the large one is only at the start
  report = sj.probe(model, tokens)
  lines = repr(report).splitlines()
  (row,) = [line for line in lines if line.startswith('largest activation')]
  size = np.asarray(report.activations.activation_max)
  times = size / np.asarray(report.activations.activation_median)

  assert f'{times.max():,.0f} times the median' in row
  assert 'channel 5 of token 1' in row
  assert f'{size[times.argmax()]:,.0f}' in row


def test_what_is_of_the_proxy_has_a_star():
  spec = sj.AttentionSpec('Sigmoid()', 'Unnormalized()', kv_bias=sj.KVBias())
  report = sj.probe(run(scale=1.0, attention=spec), TOKENS)
  text = repr(report)
  assert '* of proxy' in text
  assert 'Sink_*' in text
  assert max(map(len, text.splitlines())) < 160


@pytest.mark.parametrize(
  'mask, pattern, words',
  [
    ('Window(size=3)', (Layer(),), ['2 of 2 blocks']),
    ('Prefix(length=2)', (Layer(),), []),
    ('Causal()', (Layer(mask=sj.Window(size=2)), Layer()), ['1 of 2 blocks']),
  ],
)
def test_a_mask_that_hides_the_first_token_is_named(mask, pattern, words):
  """Importance of the first token then has a limit below 1."""
  model = tiny(attention=sj.AttentionSpec(mask=mask), pattern=pattern)
  report = sj.probe(model, TOKENS)
  notes = [line for line in repr(report).splitlines() if 'by construction' in line]

  assert len(notes) == len(words)
  assert all(word in note for word, note in zip(words, notes))
  limits = np.array(report.protocol['first_token_limits'])
  assert (report.head_importance() <= limits[:, None] + 1e-6).all()
  if mask == 'Window(size=3)':
    assert limits.tolist() == [3 / 12] * 2
    assert report.sink_rate() == 0


def test_positions_are_1_based():
  report = sj.probe(run(), TOKENS)
  for position in (0, 13):
    with pytest.raises(ValueError, match='1-based'):
      report.sink_rate(position)


@pytest.mark.parametrize(
  'value, block, words',
  [
    (
      np.nan,
      0,
      'importance in block 2, head 1 is not finite; nor is its parameter '
      r'blocks/attention/value/kernel\[0\], so the model cannot be used.',
    ),
    (np.inf, 0, r'importance in block 2, head 1 is .*/kernel\[0\]'),
    (np.nan, 1, r'value norm in block 2, head 1 is .*/kernel\[1\]'),
  ],
)
def test_a_parameter_that_is_not_finite_is_named(value, block, words):
  model = run()
  values = model.params['blocks']['attention']['value']
  values['kernel'] = values['kernel'].at[block, 0, 0].set(value)
  with pytest.raises(ValueError, match=f'^test: {words}'):
    sj.probe(model, TOKENS)


def test_activations_that_overflow():
  model = run()
  params = jax.tree.map(lambda x: x * 1e30, model.params)
  model = dataclasses.replace(model, params=params)
  with pytest.raises(
    ValueError, match='of the embedding is not .*overflow in bfloat16 .*: use dtype flo'
  ):
    sj.probe(model, TOKENS, dtype='bfloat16')
  with pytest.raises(ValueError, match='overflow in float32 on these inputs'):
    sj.probe(model, TOKENS)


def test_heads_whose_outputs_are_short_are_dormant():
  model = run()
  value = model.params['blocks']['attention']['value']  # its kernel: (layers, D, H Dh), with Dh = 4
  value['kernel'] = value['kernel'].at[0, :, :4].multiply(0.01)  # the first head of the first block
  report = sj.probe(model, TOKENS)
  summary = report.summary()
  norms_NxH = np.array(summary['head_norm'])
  close(norms_NxH.mean(1), [1, 1])

  assert np.argwhere(norms_NxH < 0.25).tolist() == [[0, 0]]
  assert summary['dormant_heads'] == 100 / 8

  # Causal query 1 sees only itself, so its head's output is its value.
  head, value = (report.norms[kind][..., 0] for kind in ('head', 'value'))
  close(head, value, rtol=1e-5)


def test_norms_that_vanish_have_no_ratio():
  model = run()
  model.params['blocks']['attention']['value']['kernel'] *= 0
  report = sj.probe(model, TOKENS)

  assert report.summary()['value_ratio'] == [None, None]
  assert None not in report.summary()['key_ratio']
  assert report.summary()['sink_token_ratio'] is None
  moments = np.array([np.nan, 3.0, np.inf])
  huge = np.full_like(report.norms['value'], 3e38)  # float32 cannot hold their sum
  other = dataclasses.replace(
    report,
    activations=report.activations._replace(kurtosis_moment=moments),
    norms=report.norms | {'value': huge},
  )
  assert other.summary()['kurtosis_moment'] == [None, 3.0, None]
  assert other.summary()['value_ratio'] == [1, 1]
