"""Config strings, refused arguments, and the properties that single components promise."""

import jax
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.attention.mask import Mask
from sink_jax.attention.position import Position, YarnRope
from sink_jax.attention.similarity import Similarity
from sink_jax.attention.spec import COMPONENTS
from sink_jax.component import from_string, registry
from tests.attention_specs import PAPER, random_inputs, slot_values
from tests.attention_variants import alibi_slope, t5_bucket

VALUES = [(slot, x) for slot, values in slot_values().items() for x in values]


@pytest.mark.parametrize('slot, value', VALUES, ids=lambda x: repr(x))
def test_the_repr_of_a_slot_builds_it_again(slot, value):
  assert from_string(COMPONENTS[slot], repr(value)) == value
  assert hash(from_string(COMPONENTS[slot], repr(value))) == hash(value)


def test_a_spec_is_rebuilt_from_its_strings():
  for spec in PAPER.values():
    assert sj.AttentionSpec(**spec.strings()) == spec


@pytest.mark.parametrize('text, words', [
    ('Windw(size=3)', ['Did you mean Window', 'Causal, Prefix, Window']),
    ('Window(sise=3)', ['no argument', 'size']), ('Window(3)', ['name=value']),
    ('Window(size=3, size=4)', ['given twice']), ('Window(size=3.5)', ['must be int']),
    ("Window(size='3')", ['must be int']), ('Window(size=True)', ['must be int']),
    ('Window(size=0)', ['whole number from 1']), ('Window(size=__import__("os"))', ['must be int']),
    (None, ['must be a config string']),
    *((text, ['Cannot read']) for text in (
        'Window(size=2**99999999)', '(lambda: 1)()', 'Window(', '', '(' * 5000))])
def test_a_bad_config_string_is_explained(text, words):
  with pytest.raises(ValueError) as error:
    from_string(Mask, text)
  for word in words:
    assert word in str(error.value)


def test_softmax_is_named_by_what_it_consists_of():
  for kind in (Similarity, COMPONENTS['normalizer']):
    with pytest.raises(ValueError, match=r'Exp\(\).*RowSum\(\)') as error:
      from_string(kind, 'Softmax()')
    assert 'Did you mean' not in str(error.value)


def test_numbers_are_read_as_their_field_says():
  assert from_string(Similarity, 'Exp') == sj.Exp()
  assert from_string(Position, 'Rope(base=500000)') == sj.Rope(base=500000.0)
  assert isinstance(from_string(Position, 'Rope(base=500000)').base, float)


def test_a_new_slot_class_is_a_choice_at_once():
  class Everything(Mask):
    def keep(self, i, j):
      return j == j

  try:
    assert from_string(Mask, 'Everything()') == Everything()
    with pytest.raises(NotImplementedError, match=r'needs a method visible\(i, keys\)'):
      x = np.zeros((1, 4, 1, 2), np.float32)
      sj.attend(sj.AttentionSpec(mask=Everything(), temperature='LogLength(learned=False)'), x, x, x)
  finally:
    del Everything
    import gc
    gc.collect()
  assert 'Everything' not in registry(Mask)


@pytest.mark.parametrize('slots, remedy', [
    (dict(normalizer='Unnormalized()'), r'RowSum\(\)'), (dict(normalizer='Count()'), r'RowSum\(\)'),
    (dict(normalizer='RowSum(eps=1e-8)'), 'without eps'),
    (dict(similarity='Linear()', normalizer='PNorm()'), r'AbsFloor\(\)'),
    (dict(similarity='Linear()'), r'AbsFloor\(\)'),
    (dict(similarity='Linear()', feature_map='EluPlusOne()', position='Alibi()'), r'AbsFloor\(\)'),
    (dict(similarity='Linear()', feature_map='EluPlusOne()', kv_bias='SinkLogit()'), r'AbsFloor\(\)'),
    (dict(similarity='Sigmoid()', normalizer='Unnormalized()', kv_bias='KBias()'), r'KVBias\(\)'),
    (dict(similarity='Sigmoid()', normalizer='Unnormalized()', kv_bias='SinkLogit()'), r'KVBias\(\)'),
    (dict(similarity='Relu()', normalizer='Count()', kv_bias='KBias()'), r'KVBias\(\)'),
    (dict(similarity='Softpick()'), r'and AbsSum\(\)'), (dict(normalizer='AbsSum()'), r'Softpick\(\) and'),
    (dict(similarity='Relu()', normalizer='RowSum(eps=1e-3)', kv_bias='ZeroSink()'), r'Exp\(\)'),
    (dict(kv_bias='PseudoMask()', mask='Prefix()'), r'Causal\(\)'),
    (dict(similarity='Relu()', normalizer='Clipped()'), r'Exp\(\)')])
def test_what_makes_no_sense_names_the_remedy(slots, remedy):
  with pytest.raises(ValueError, match=remedy):
    sj.AttentionSpec(**slots)


@pytest.mark.parametrize('cls, field, value, said', [
    (sj.RowSum, 'eps', -1.0, '>= 0'), (sj.RowSum, 'scale', 0.0, '> 0'), (sj.PNorm, 'p', 0.0, '> 0'),
    (sj.AbsFloor, 'floor', 0.0, '> 0'), (sj.AbsSum, 'eps', 0.0, '> 0'), (sj.Clipped, 'low', 0.1, '<= 0'),
    (sj.Clipped, 'high', 0.9, '>= 1'), (sj.CappedExp, 'cap', 0.0, 'above 0'),
    (sj.Window, 'size', 0, 'whole number from 1'), (sj.Prefix, 'length', 0, 'whole number from 1'),
    (sj.KBias, 'value', 'one', "'zero', 'first' or 'uniform'"), (sj.KBias, 'learnable_dims', 0, 'at least 1'),
    (sj.ZeroSink, 'n', 0.0, '> 0'), (sj.PseudoMask, 'context', 0, 'at least 1'),
    (sj.PseudoMask, 'gamma', 0.0, '> 0'), (sj.Relative, 'buckets', 1, '2 buckets'),
    (sj.Rope, 'base', 0.0, '> 0'), (sj.Rope, 'fraction', 0.0, 'must lie'), (sj.QKNorm, 'eps', -1.0, '>= 0'),
    (sj.Sinusoidal, 'base', 0.0, '> 0'), (YarnRope, 'beta_fast', -1.0, '> 0'),
    (sj.HeadGate, 'source', 'query', "'input', 'value' or 'slice'"), (sj.ElementGate, 'scale', 0.0, '> 0'),
    (sj.HeadGate, 'opening', 1.0, 'must lie'), (sj.HeadNorm, 'eps', 0.0, '> 0'),
    (sj.Sigmoid, 'bias', float('nan'), 'finite'), (sj.ZeroSink, 'n', float('inf'), 'finite'),
    (sj.ValueResidual, 'own', float('inf'), 'finite')])
def test_a_field_that_cannot_have_a_value_is_named(cls, field, value, said):
  slot = next(slot for slot, base in COMPONENTS.items() if issubclass(cls, base))
  with pytest.raises(ValueError, match=f'{field}.* {said}'):
    sj.AttentionSpec(**{slot: cls(**{field: value})})


@pytest.mark.parametrize('eps, expected', [(0.0, True), (1e-8, True), (1e-3, False), (1.0, False)])
def test_rows_sum_to_one_unless_eps_takes_a_share(eps, expected):
  spec = sj.AttentionSpec('Sigmoid()', sj.RowSum(eps=eps))
  zeros = np.zeros((1, 4, 1, 2), np.float32)
  sums = np.asarray(sj.attention_map(spec, zeros, zeros).sum(-1))
  assert spec.rows_sum_to_one == np.allclose(sums, 1, atol=1e-5) == expected


def test_alibi_slopes():
  np.testing.assert_allclose(sj.Alibi().slopes(8), [2.0**-h for h in range(1, 9)])
  np.testing.assert_allclose(sj.Alibi().slopes(16), [2 ** (-h / 2) for h in range(1, 17)])
  np.testing.assert_allclose(sj.Alibi().slopes(6), [alibi_slope(h, 6) for h in range(6)])


def test_relative_buckets_are_those_of_t5():
  d = np.arange(300)
  expected = [t5_bucket(int(x)) for x in d]
  np.testing.assert_array_equal(sj.Relative().distance_bias(d), expected)
  np.testing.assert_array_equal(sj.Relative(decreasing=True).distance_bias(d), np.negative(expected))
  assert expected[15] == 15 and expected[16] == 16 and expected[127] == 31 == expected[299]


def test_the_released_relative_bias_makes_a_sink_without_any_content():
  zeros = np.zeros((1, 64, 1, 2), np.float32)
  first = lambda spec: sj.streaming_importance(spec, zeros, zeros).normalized[0, 0, 0]
  assert abs(first(sj.AttentionSpec(position=sj.Relative())) - 0.334) < 1e-3
  assert first(sj.AttentionSpec(position=sj.Relative(decreasing=True))) < 0.05


def test_sinusoidal_is_equation_5():
  p = np.asarray(sj.Sinusoidal().embedding(np.arange(9), 6, {}))
  t, i = 5, 3  # position, 1-based frequency
  omega = 1 / 10000 ** (2 * (i - 1) / 6)
  np.testing.assert_allclose(p[t, 4:6], [np.sin(omega * t), np.cos(omega * t)], rtol=1e-6)
  np.testing.assert_allclose(p[0], [0, 1] * 3)


def test_rope_depends_on_distances_only():
  rng = np.random.default_rng(0)
  q, k = rng.standard_normal((2, 8)).astype(np.float32)
  tile = lambda x: np.tile(x, (1, 50, 1, 1))
  rotated = [np.asarray(sj.Rope().rotate(tile(x), np.arange(50)))[0, :, 0] for x in (q, k)]
  dots = rotated[0] @ rotated[1].T
  for distance in (0, 1, 17):
    np.testing.assert_allclose(np.diag(dots, -distance), dots[distance, 0], rtol=1e-4, atol=1e-5)


def test_pseudo_attention_is_the_sum_over_the_positions_to_come():
  spec = sj.AttentionSpec(kv_bias=sj.PseudoMask(context=6, gamma=0.5), position=sj.Nope())
  zeros = np.zeros((1, 8, 1, 2), np.float32)
  sums = np.asarray(sj.attention_map(spec, zeros, zeros).sum(-1))[0, 0]
  hidden = [sum(np.exp(-0.5 * j) for j in range(i + 1, 6)) for i in range(8)]
  np.testing.assert_allclose(sums, [(i + 1) / (i + 1 + extra) for i, extra in enumerate(hidden)], rtol=1e-6)


@pytest.mark.parametrize('mask', [sj.Causal(), sj.Window(size=1), sj.Window(size=4),
                                  sj.Prefix(length=1), sj.Prefix(length=6), sj.Prefix(length=99)])
def test_key_ranges_are_the_smallest_that_hold_every_visible_key(mask):
  length = 12
  keep = np.asarray(mask.keep(np.arange(length)[:, None], np.arange(length)[None, :]))
  for first in range(length):
    for last in range(first, length):
      visible = np.flatnonzero(keep[first:last + 1].any(0))
      assert mask.key_range(first, last, length) == (visible[0], visible[-1] + 1)
  np.testing.assert_array_equal(mask.visible(np.arange(length), length), keep.sum(1))


def test_masks_say_what_they_are_asked():
  facts = lambda mask: (mask.window, mask.prefix)
  assert facts(sj.Causal()) == (None, None)
  assert facts(sj.Window(size=3)) == (3, None)
  assert facts(sj.Prefix(length=3)) == (None, 3)


X, GATED = np.zeros((1, 4, 2, 4), np.float32), dict(head={'kernel': np.zeros((8, 2), np.float32)})


@pytest.mark.parametrize('spec, shapes, params, words', [
    ({}, ((1, 4, 3, 4), (1, 4, 2, 4), (1, 4, 2, 4)), {}, 'multiple of'),
    ({}, ((1, 4, 2, 4), (1, 5, 2, 4), (1, 5, 2, 4)), {}, 'the same batch, length'),
    ({}, ((1, 4, 2, 4), (1, 4, 2, 4), (1, 4, 1, 4)), {}, 'one shape'),
    ({}, [(4, 2, 4)] * 3, {}, 'axes'), ({}, [(1, 0, 2, 4)] * 3, {}, 'none of them empty'),
    ({}, [(1, 4, 1, 3)] * 3, {}, 'even head dimension'),
    (dict(kv_bias='KBias()'), [X.shape] * 3, {}, 'params must hold'),
    ({}, [X.shape] * 3, {'kv_bias': {'key': np.zeros((2, 4))}}, 'params must hold'),
    (dict(kv_bias='KBias(learnable_dims=5)'), [X.shape] * 3, {}, 'learnable_dims exceeds'),
    (dict(head='HeadGate()'), [X.shape] * 3, {}, r'gate must be .* HeadGate\(.* with None'),
    (dict(head='HeadGate()'), [X.shape] * 3, GATED, r'gate must be .* HeadGate\(.* with None')])
def test_arguments_that_do_not_fit_are_explained(spec, shapes, params, words):
  q, k, v = (np.zeros(shape, np.float32) for shape in shapes)
  with pytest.raises(ValueError, match=words):
    sj.attend(sj.AttentionSpec(**spec), q, k, v, params)


@pytest.mark.parametrize('head, gate, words', [
    ('PlainOutput()', (1, 4, 8), r'None for any other: PlainOutput\(\)'),
    ("ElementGate(source='value')", (1, 4, 8), 'None for any other'),
    ('HeadGate()', (1, 5, 8), r'with \(1, 5, 8\)'), ('ElementGate()', (1, 4, 7), '7'),
    ('HeadGate()', (1, 4, 8, 1), 'gate must be'), ("HeadGate(source='slice')", (1, 4, 12), 'reads 8 channels')])
def test_a_gate_takes_the_input_that_it_reads_and_no_other(head, gate, words):
  spec = sj.AttentionSpec(head=head)
  params = random_inputs(spec, length=4, heads=2)[3]
  with pytest.raises(ValueError, match=words):
    sj.attend(spec, X, X, X, params, gate=np.zeros(gate, np.float32))


def test_a_gate_of_another_width_or_precision_is_refused():
  spec, gate = sj.AttentionSpec(head='HeadGate()'), np.zeros((1, 4, 6), np.float32)
  params = {'head': {'kernel': np.zeros((6, 2), np.float32)}}
  assert sj.attend(spec, X, X, X, params, gate=gate).shape == X.shape
  for call, words in (
      (lambda: sj.attend(spec, X, X, X, params, gate=gate.astype(np.float16)),
       'one floating-point dtype, not float16, float32'),
      (lambda: sj.attend(spec, X, X, X, gate=gate), "give Dims its d_model.*source='value'"),
      (lambda: sj.attention_map(spec, X, X, {'head': {'kernel': np.zeros((6, 3), np.float32)}}),
       r"params must hold .*\(6, 2\).*, not .*\(6, 3\)"),
      (lambda: sj.ModelConfig(layers=1, d_model=16, heads=3, head_dim=5, ffn_hidden=8, vocab_size=9,
                              attention=sj.AttentionSpec(head="HeadGate(source='slice')")),
       "3 slices of 5 channels do not make 16: use source='input'")):
    with pytest.raises(ValueError, match=words):
      call()


def test_an_unknown_implementation_lists_the_choices():
  with pytest.raises(ValueError, match='reference, chunked, .*pallas'):
    sj.attend(sj.AttentionSpec(), X, X, X, implementation='flash')


def test_specs_are_static_arguments_of_jit():
  x = np.ones((1, 4, 2, 4), np.float32)
  np.testing.assert_allclose(jax.jit(sj.attend, static_argnums=0)(sj.AttentionSpec(), x, x, x), x,
                             rtol=1e-6)
