"""Models with a different attention, norm or sink token than they were trained with."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.data.tokenizer import Bytes
from sink_jax.evaluate import inputs
from sink_jax.models.config import Layer, Mamba
from sink_jax.models.graft import learned_bias, start_like, without_bias
from sink_jax.models.sizes import parameter_shapes
from sink_jax.models.transformer import Transformer, init_params
from sink_jax.pretrained.export import export_checkpoint
from tests.random_params import random_params

TINY = dict(layers=2, d_model=16, heads=4, ffn_hidden=24, vocab_size=11, dtype='float32')
TEXT = np.random.default_rng(0).integers(0, 11, (2, 10))
# The loss of TEXT has inputs of this length, so one program serves both.
TOKENS = TEXT[:, :-1]


def run(**options):
  config = sj.ModelConfig(**TINY | options)
  return sj.Run(config, random_params(config), name='biased', step=3)


def biased(kv_bias):
  return dict(attention=sj.AttentionSpec(kv_bias=kv_bias))


@pytest.mark.parametrize(
  'options',
  [
    biased('KBias()'),
    biased("KBias(value='first')"),
    biased('KVBias(shared=True)'),
    biased('VBias()'),
    biased('SinkLogit()'),
    dict(sink_tokens=1),
    biased('VBias()') | dict(sink_tokens=1),
    # Blocks that differ, as in gpt-oss: their parameters are one level deeper.
    biased('SinkLogit()') | dict(pattern=(Layer(mask=sj.Window(size=4)), Layer())),
  ],
  ids=str,
)
def test_the_rest_is_a_model_without_it(options):
  full = run(**options)
  bare = without_bias(full)
  plain = sj.ModelConfig(**TINY, pattern=full.config.pattern)
  assert bare.config == plain and (bare.name, bare.step) == ('biased', 3)
  shapes = jax.tree.map(lambda x: x.shape, bare.params)
  assert shapes == jax.tree.map(lambda x: x.shape, parameter_shapes(plain))
  # The remaining parameters are unchanged: this is the plain model with the full model's
  # parameters.
  theirs = dict(jax.tree_util.tree_leaves_with_path(full.params))
  for path, x in jax.tree_util.tree_leaves_with_path(bare.params):
    assert x is theirs.pop(path)
  assert theirs and all('kv_bias' in str(path) or 'sink_tokens' in str(path) for path in theirs)


def test_what_is_removed_is_said_in_words():
  said = lambda **options: learned_bias(sj.ModelConfig(**TINY | options))
  assert said() == '' and said(sink_tokens=3) == 'the 3 learned sink tokens x*'
  assert said(sink_tokens=1, **biased('VBias()')) == (
    'the learned sink token x* and the value bias v*'
  )


def leaves(params):
  return {
    '/'.join(key.key for key in path): np.asarray(x)
    for path, x in jax.tree_util.tree_leaves_with_path(params)
  }


def grafted(full, attention, **options):
  return sj.graft(full, attention=attention, tokens=TEXT, **options)


def bits(r, tokens):
  return np.asarray(Transformer(r.config).apply({'params': r.params}, tokens))


WINDOWS = (Layer(mask=sj.Window(size=4)), Layer())
HYBRID = (Layer(mamba=Mamba(inner=8, state=4, conv=3, rank=2)), Layer())


@pytest.mark.every(2)
@pytest.mark.parametrize(
  'options, attention, new',
  [
    ({}, {'head': 'HeadGate(scale=2)', 'kv_bias': 'VBias()'}, ['head_kernel', 'kv_bias_value']),
    (dict(pattern=WINDOWS), {'value': 'ValueScale()'}, ['value_scale'] * 2),
    (
      {},
      {'value': 'ValueResidual()', 'head': "ElementGate(source='value', scale=2)"},
      ['head_kernel', 'value_first', 'value_own'],
    ),
    pytest.param(
      dict(pattern=HYBRID),
      {'head': 'ElementGate(scale=2)'},
      ['head_kernel'],
      marks=pytest.mark.full,
    ),
  ],
  ids=str,
)
def test_what_starts_like_the_source_changes_no_logit(options, attention, new, capsys):
  full = run(implementation='reference', kv_heads=2, **options)
  other = grafted(full, attention)
  report = other.graft
  assert str(report) in capsys.readouterr().out
  assert report.fresh == () and 'start: identity' in str(report)
  assert report.exact and [path.split('/')[-1] for path in report.new] == new
  # compiled, so not bit for bit
  assert report.loss_after == pytest.approx(report.loss_before, rel=1e-6)
  np.testing.assert_allclose(other.logits(TOKENS), full.logits(TOKENS), rtol=1e-6, atol=1e-6)
  with jax.disable_jit():
    np.testing.assert_array_equal(bits(other, TOKENS[:, :5]), bits(full, TOKENS[:, :5]))


@pytest.mark.parametrize(
  'head, opens',
  [
    ('HeadGate()', False),
    ('HeadNorm()', False),
    ('Exclusive()', False),
    ("HeadGate(source='slice', opening=0.3)", False),
    ("HeadGate(source='slice', scale=2)", True),
    ("ElementGate(source='value', scale=2)", True),
  ],
)
def test_gates_start_at_one_where_they_can(head, opens):
  # Without a bias, gates with other numbers have no start at which they are one for all tokens.
  gate = sj.AttentionSpec(head=head).head
  start = start_like(sj.PlainOutput(), gate)
  assert (start is not None) == opens and start_like(sj.HeadNorm(eps=0.1), gate) is None
  if opens:
    params = {
      name: np.full(p.shape, start[name], np.float32)
      for name, p in gate.params(sj.Dims(4, 4, 2)).items()
    }
    o, x = np.random.default_rng(0).standard_normal((2, 1, 3, 4, 2), np.float32)
    np.testing.assert_allclose(gate.output(o, x, x.reshape(1, 3, 8), params), o, rtol=1e-6)


@pytest.mark.typed
def test_a_sink_logit_starts_below_the_rows_of_its_head():
  full = run(pattern=WINDOWS, kv_heads=2)
  # Attention passes nothing to the next block, so both models' blocks read the same inputs.
  for block in full.params['blocks'].values():
    block['attention']['out']['kernel'] *= 0
  maps = (
    grafted(full, {'kv_bias': 'SinkLogit()'}, offset=-2.0)
    .record(TEXT, sj.RecordOptions(attention=sj.maps))
    .layers.attention.weights_BxHxTxT
  )
  # In a row with the sum e^l, the tokens keep e^l / (e^l + e^logit).
  kept = np.asarray(maps, np.float64).sum(-1)
  np.testing.assert_allclose(np.log(kept / (1 - kept)).mean((1, 3)), 2, atol=1e-4)


def test_a_far_sink_logit_changes_nothing_and_a_near_one_little():
  full = run(kv_heads=2)
  far = grafted(full, {'kv_bias': 'SinkLogit()'}, offset=-30.0)
  np.testing.assert_allclose(far.logits(TOKENS), full.logits(TOKENS), rtol=1e-6, atol=1e-6)
  near = grafted(full, {'kv_bias': 'SinkLogit()'})
  difference = np.abs(near.logits(TOKENS) - full.logits(TOKENS)).max()
  assert 1e-5 < difference < 0.1 and not near.graft.exact and not near.graft.fresh
  at_zero = grafted(full, {'kv_bias': 'SinkLogit()'}, start='random')
  assert not at_zero.params['blocks']['attention']['kv_bias_logit'].any()


def next_token_loss(r, text=TEXT):
  """Mean cross-entropy of the next tokens, from logits, in NumPy."""
  logits = np.asarray(r.logits(text[:, :-1]), np.float64)
  shares = np.exp(logits - logits.max(-1, keepdims=True))
  shares /= shares.sum(-1, keepdims=True)
  return -np.log(np.take_along_axis(shares, text[:, 1:, None], -1)).mean()


@pytest.mark.every(3)
@pytest.mark.parametrize(
  'changes, new, removed',
  [
    (dict(sink_tokens=1), ['sink_tokens'], []),
    (
      dict(attention={'kv_bias': 'KBias()', 'mask': 'Window(size=4)'}),
      ['blocks/attention/kv_bias_key'],
      [],
    ),
    pytest.param(dict(attention={'kv_bias': 'ZeroSink()'}), [], [], marks=pytest.mark.full),
    pytest.param(
      dict(norm='layernorm'),
      ['blocks/norm1/bias', 'blocks/norm2/bias', 'final_norm/bias'],
      [],
      marks=pytest.mark.full,
    ),
    # The gain becomes one number; it was a vector.
    (dict(norm='single'), *[['blocks/norm1/gain', 'blocks/norm2/gain', 'final_norm/gain']] * 2),
    (dict(attention={'head': 'HeadGate()'}, start='random'), ['blocks/attention/head_kernel'], []),
  ],
  ids=str,
)
def test_the_rest_starts_as_in_a_fresh_model_and_its_loss_is_measured(changes, new, removed):
  full = run()
  other = sj.graft(full, tokens=TEXT, seed=3, **changes)
  report = other.graft
  assert (list(report.new), list(report.removed), report.exact) == (new, removed, False)
  fresh, theirs = leaves(init_params(other.config, 3)), leaves(full.params)
  for path, x in leaves(other.params).items():
    np.testing.assert_array_equal(x, fresh[path] if path in new else theirs[path], path)
  assert report.loss_before == pytest.approx(next_token_loss(full), rel=1e-6)
  assert report.loss_after == pytest.approx(next_token_loss(other), rel=1e-6)
  assert abs(report.loss_after - report.loss_before) > 1e-3
  assert f'{report.loss_after:.4f} nats' in str(report)
  assert list(report.fresh) == new
  assert json.loads(json.dumps(dataclasses.asdict(report)))['new'] == new
  # The report says what happened, not what was requested.
  assert 'start: identity' not in str(report)


def test_a_published_model_is_grafted_without_tokens_of_ones_own(tmp_path):
  config = sj.ModelConfig(**TINY | dict(vocab_size=258))
  export_checkpoint(sj.Run(config, random_params(config)), tmp_path, context=64)
  gate = {'attention': {'head': 'HeadGate(scale=2)'}}
  with pytest.raises(ValueError, match='tokenizer'):
    sj.graft(sj.load_pretrained(tmp_path), **gate)
  Bytes().open().save(tmp_path)
  model = sj.load_pretrained(tmp_path)
  text = inputs.natural(model.tokenizer, inputs.open_source(), sequences=32).tokens
  measured = sj.graft(model, **gate).graft
  assert measured == sj.graft(model, **gate, tokens=text).graft and measured.exact
  assert measured.loss_before == pytest.approx(next_token_loss(model, text), rel=1e-6)


def test_a_removal_is_a_graft():
  full = dataclasses.replace(run(**biased('KVBias()')), probe_tokens=TEXT)
  bare = sj.graft(full, attention=sj.AttentionSpec())
  assert bare.graft.removed == ('blocks/attention/kv_bias_key', 'blocks/attention/kv_bias_value')
  assert jax.tree.all(jax.tree.map(lambda x, y: x is y, bare.params, without_bias(full).params))
  assert bare.graft.loss_after == pytest.approx(next_token_loss(without_bias(full)), rel=1e-6)
  assert without_bias(sj.graft(bare, sink_tokens=1)).graft is None


@pytest.mark.parametrize(
  'options, changes, words',
  [
    ({}, {}, 'changes nothing.*HeadGate'),
    ({}, dict(attention={'head': 'PlainOutput()'}, norm='rmsnorm'), 'changes nothing'),
    ({}, dict(attention={'gate': 'HeadGate()'}), "no component 'gate'.*head"),
    ({}, dict(attention={'head': 'HeadGat()'}), 'Did you mean HeadGate'),
    (dict(pattern=HYBRID), dict(attention={'value': 'ValueResidual()'}), 'the first has attention'),
    (dict(pattern=WINDOWS), dict(attention={'mask': 'Prefix()'}), 'a mask of their own'),
    ({}, dict(sink_tokens=1, start='zero'), "start 'zero'. Choices: identity, random"),
    ({}, dict(sink_tokens=1, tokens=None), 'no probe inputs.*tokens='),
    (
      dict(vocab_size=0, input_features=3, output_features=2),
      dict(sink_tokens=1),
      'continuous inputs',
    ),
    ({}, dict(sink_tokens=1, tokens=TEXT[0]), r'shape \(S, T\)'),
    ({}, dict(sink_tokens=1, tokens=TEXT + 1), 'vocabulary has 11'),
  ],
  ids=str,
)
def test_grafts_without_meaning_are_refused(options, changes, words):
  config = sj.ModelConfig(**TINY | options)
  with pytest.raises(ValueError, match=words):  # raised before the parameters are read
    sj.graft(sj.Run(config, {}), **{'tokens': TEXT} | changes)
