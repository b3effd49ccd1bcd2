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
from sink_jax.models.graft import start_like, without_bias
from sink_jax.models.sizes import parameter_shapes
from sink_jax.models.transformer import Transformer, init_params
from sink_jax.pretrained.export import export_checkpoint
from tests.random_params import next_token_losses, random_params, random_tokens, tiny, tiny_config

# One text: its loss has inputs of this shape, so one program of a model serves all tests.
TEXT = random_tokens(1, 10)
TOKENS = TEXT[:, :-1]
WINDOWS = (Layer(mask=sj.Window(size=4)), Layer())
MAMBA = Mamba(inner=8, state=4, conv=3, rank=2)
HYBRID = (Layer(mamba=MAMBA), Layer())


def biased(kv_bias):
  return dict(attention=sj.AttentionSpec(kv_bias=kv_bias))


def leaves(params):
  paths = jax.tree_util.tree_leaves_with_path(params)
  return {'/'.join(key.key for key in path): x for path, x in paths}


def loss(run):
  return next_token_losses(run.logits(TOKENS), TEXT).mean()


@pytest.mark.parametrize(
  'options',
  [
    *map(biased, ('KBias()', 'KVBias(shared=True)')),
    biased('VBias()') | dict(sink_tokens=1),
    # Blocks that differ, as in gpt-oss: their parameters are one level deeper.
    biased('SinkLogit()') | dict(pattern=WINDOWS),
  ],
  ids=str,
)
def test_the_rest_is_a_model_without_it(options):
  full = dataclasses.replace(tiny(**options), name='biased', step=3)
  bare = without_bias(full)
  plain = tiny_config(pattern=full.config.pattern)
  assert bare.config == plain
  assert (bare.name, bare.step) == ('biased', 3)
  # The remaining parameters are unchanged: this is the plain model with them.
  left, theirs = leaves(bare.params), leaves(full.params)
  assert left.keys() == leaves(parameter_shapes(plain)).keys()
  for path, x in left.items():
    assert x is theirs.pop(path)
  assert theirs
  assert all('kv_bias' in path or 'sink_tokens' in path for path in theirs)


def grafted(full, attention, **options):
  return sj.graft(full, attention=attention, tokens=TEXT, **options)


@pytest.mark.parametrize(
  'options, attention, new',
  [
    (
      dict(pattern=WINDOWS),
      {'head': 'HeadGate(scale=2)', 'value': 'ValueScale()'},
      ['head_kernel', 'value_scale'] * 2,
    ),
    (
      {},
      {
        'value': 'ValueScale()',
        'head': "ElementGate(source='value', scale=2)",
        'kv_bias': 'VBias()',
      },
      ['head_kernel', 'kv_bias_value', 'value_scale'],
    ),
    (dict(pattern=HYBRID), {'head': 'ElementGate(scale=2)'}, ['head_kernel']),
  ],
  ids=str,
)
def test_what_starts_like_the_source_changes_no_logit(options, attention, new, capsys):
  full = tiny(implementation='reference', kv_heads=2, **options)
  other = grafted(full, attention)
  report = other.graft
  assert str(report) in capsys.readouterr().out
  assert report.exact and report.fresh == () and 'start: identity' in str(report)
  assert [path.split('/')[-1] for path in report.new] == new
  # Compiled, so not bit for bit.
  assert report.loss_after == pytest.approx(report.loss_before, rel=1e-6)
  found, expected = other.logits(TOKENS), full.logits(TOKENS)
  np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
  if not options:
    with jax.disable_jit():
      np.testing.assert_array_equal(not_compiled(other), not_compiled(full))


def not_compiled(run):
  model = Transformer(run.config)
  return model.apply({'params': run.params}, TOKENS[:, :3])


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
  assert (start is not None) == opens
  assert start_like(sj.HeadNorm(eps=0.1), gate) is None
  if opens:
    shape = gate.params(sj.Dims(4, 4, 2))['kernel'].shape
    params = {'kernel': np.full(shape, start['kernel'], np.float32)}
    o, v = np.random.default_rng(0).standard_normal((2, 1, 3, 4, 2), np.float32)
    found = gate.output(o, v, v.reshape(1, 3, 8), params)
    np.testing.assert_allclose(found, o, rtol=1e-6)


@pytest.mark.typed
def test_a_sink_logit_starts_below_the_rows_of_its_head():
  full = tiny(pattern=WINDOWS, kv_heads=2)
  # Attention passes nothing to the next block, so both models' blocks read the same inputs.
  for block in full.params['blocks'].values():
    block['attention']['out']['kernel'] *= 0
  other = grafted(full, {'kv_bias': 'SinkLogit()'}, offset=-2.0)
  record = other.record(TEXT, sj.RecordOptions(attention=sj.maps))
  weights = record.layers.attention.weights_BxHxTxT
  # In a row with the sum e^l, the tokens keep e^l / (e^l + e^logit).
  kept = np.asarray(weights, np.float64).sum(-1)
  log_odds = np.log(kept / (1 - kept))
  np.testing.assert_allclose(log_odds.mean((1, 3)), 2, atol=1e-4)


def test_a_far_sink_logit_changes_nothing_and_a_near_one_little():
  config, sink = tiny_config(kv_heads=2), {'kv_bias': 'SinkLogit()'}
  full = sj.Run(config, random_params(config, seed=1))
  logits = full.logits(TOKENS)
  far = grafted(full, sink, offset=-30.0)
  np.testing.assert_allclose(far.logits(TOKENS), logits, rtol=1e-6, atol=1e-6)
  near = grafted(full, sink)
  difference = near.logits(TOKENS) - logits
  assert 1e-5 < np.abs(difference).max() < 0.1
  assert not near.graft.exact and not near.graft.fresh
  at_zero = grafted(full, sink, start='random')
  assert not at_zero.params['blocks']['attention']['kv_bias_logit'].any()


NORMS = ['blocks/norm1', 'blocks/norm2', 'final_norm']


@pytest.mark.parametrize(
  'changes, new, removed',
  [
    (
      dict(attention={'kv_bias': 'KBias()', 'mask': 'Window(size=4)'}),
      ['blocks/attention/kv_bias_key'],
      [],
    ),
    (dict(attention={'kv_bias': 'ZeroSink()'}), [], []),
    (
      dict(sink_tokens=1, norm='layernorm'),
      [*(f'{norm}/bias' for norm in NORMS), 'sink_tokens'],
      [],
    ),
    # The gain becomes one number; it was a vector.
    (dict(norm='single'), *[[f'{norm}/gain' for norm in NORMS]] * 2),
    (dict(attention={'head': 'HeadGate()'}, start='random'), ['blocks/attention/head_kernel'], []),
  ],
  ids=str,
)
def test_the_rest_starts_as_in_a_fresh_model_and_its_loss_is_measured(changes, new, removed):
  full = tiny()
  other = sj.graft(full, tokens=TEXT, seed=3, **changes)
  report = other.graft
  assert list(report.new) == list(report.fresh) == new
  assert list(report.removed) == removed
  assert not report.exact
  expected = leaves(full.params)
  if new:
    fresh = leaves(init_params(other.config, 3))
    expected |= {path: fresh[path] for path in new}
  for path, x in leaves(other.params).items():
    np.testing.assert_array_equal(x, expected[path], path)
  assert report.loss_before == pytest.approx(loss(full), rel=1e-6)
  assert report.loss_after == pytest.approx(loss(other), rel=1e-6)
  assert abs(report.loss_after - report.loss_before) > 1e-3
  assert f'{report.loss_after:.4f} nats' in str(report)
  stored = json.dumps(dataclasses.asdict(report))
  assert json.loads(stored)['new'] == new
  # The report says what happened, not what was requested.
  assert 'start: identity' not in str(report)


def test_a_published_model_is_measured_on_text_by_its_tokenizer(tmp_path):
  export_checkpoint(tiny(vocab_size=258), tmp_path, context=64)
  gate = {'attention': {'head': 'HeadGate(scale=2)'}}
  with pytest.raises(ValueError, match='tokenizer'):
    sj.graft(sj.load_pretrained(tmp_path), **gate)
  Bytes().open().save(tmp_path)
  model = sj.load_pretrained(tmp_path)
  text = inputs.natural(model.tokenizer, inputs.open_source(), sequences=32).tokens
  np.testing.assert_array_equal(model.make_tokens(model), text)
  short = dataclasses.replace(model, make_tokens=lambda run: TEXT)
  report = sj.graft(short, **gate).graft
  assert report.exact
  assert report.loss_before == pytest.approx(loss(model), rel=1e-6)


def test_a_removal_is_a_graft():
  full = dataclasses.replace(tiny(**biased('KVBias()')), probe_tokens=TEXT)
  bare, expected = sj.graft(full, attention=sj.AttentionSpec()), without_bias(full)
  removed = 'blocks/attention/kv_bias_key', 'blocks/attention/kv_bias_value'
  assert bare.graft.removed == removed
  pairs = zip(jax.tree.leaves(bare.params), jax.tree.leaves(expected.params), strict=True)
  assert all(x is y for x, y in pairs)
  assert bare.graft.loss_after == pytest.approx(loss(expected), rel=1e-6)
  assert without_bias(sj.graft(bare, sink_tokens=1)).graft is None
