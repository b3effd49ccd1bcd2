"""Config strings, refused combinations and what single slots promise."""


import jax
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.attention.mask import Mask
from sink_jax.attention.position import Position
from sink_jax.attention.similarity import Similarity
from sink_jax.attention.spec import COMPONENTS
from sink_jax.component import Component, from_string, registry
from tests.attention_specs import PAPER, slot_values
from tests.attention_variants import alibi_slope, t5_bucket

VALUES = [(slot, x) for slot, values in slot_values().items() for x in values]


@pytest.mark.parametrize('slot, value', VALUES, ids=lambda x: repr(x))
def test_the_repr_of_a_slot_builds_it_again(slot, value):
  assert from_string(COMPONENTS[slot], repr(value)) == value
  assert hash(from_string(COMPONENTS[slot], repr(value))) == hash(value)


@pytest.mark.parametrize('spec', PAPER.values(), ids=PAPER)
def test_a_spec_is_rebuilt_from_its_strings(spec):
  assert sj.AttentionSpec(**spec.strings()) == spec


@pytest.mark.parametrize('text, words', [
    ('Windw(size=3)', ['Did you mean Window', 'Causal, Prefix, Window']),
    ('Window(sise=3)', ['no argument', 'size']),
    ('Window(3)', ['name=value']),
    ('Window(size=3, size=4)', ['given twice']),
    ('Window(size=3.5)', ['must be int']),
    ("Window(size='3')", ['must be int']),
    ('Window(size=True)', ['must be int']),
    ('Window(size=0)', ['at least 1']),
    ('Window(size=__import__("os"))', ['must be int']),
    ('Window(size=2**99999999)', ['Cannot read']),
    ('(lambda: 1)()', ['Cannot read']),
    ('Window(', ['Cannot read']),
    ('', ['Cannot read']),
    (None, ['must be a config string']),
    ('(' * 5000, ['Cannot read']),
])
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


def test_a_sigmoid_without_a_bias_is_written_as_before_there_was_one():
  assert repr(sj.Sigmoid()) == 'Sigmoid()' == repr(from_string(Similarity, 'Sigmoid(bias=0)'))
  assert from_string(Similarity, 'Sigmoid()') == sj.Sigmoid(bias=0.0)
  assert repr(sj.Sigmoid(bias=-2.5)) == 'Sigmoid(bias=-2.5)'


def test_a_new_slot_class_is_a_choice_at_once():
  class Everything(Mask):
    def keep(self, i, j):
      return j == j

  try:
    assert from_string(Mask, 'Everything()') == Everything()
  finally:
    del Everything
    import gc
    gc.collect()
  assert 'Everything' not in registry(Mask)


@pytest.mark.parametrize('slots, remedy', [
    (dict(normalizer=sj.Unnormalized()), 'RowSum()'),
    (dict(normalizer=sj.RowSum(eps=1e-8)), 'without eps'),
    (dict(similarity=sj.Linear(), normalizer=sj.PNorm()), 'AbsFloor()'),
    (dict(similarity=sj.Linear()), 'AbsFloor()'),
    (dict(similarity=sj.Linear(), feature_map=sj.EluPlusOne(), position=sj.Alibi()), 'AbsFloor()'),
    (dict(similarity=sj.Sigmoid(), normalizer=sj.Unnormalized(), kv_bias=sj.KBias()), 'KVBias()'),
    (dict(similarity=sj.Sigmoid(), normalizer=sj.Unnormalized(), kv_bias=sj.SinkLogit()),
     'KVBias()'),
    (dict(similarity=sj.Softpick()), 'and AbsSum()'),
    (dict(normalizer=sj.AbsSum()), 'Softpick() and'),
    (dict(similarity=sj.Relu(), normalizer=sj.RowSum(eps=1e-3), kv_bias=sj.ZeroSink()), 'Exp()'),
    (dict(kv_bias=sj.PseudoMask(), mask=sj.Prefix()), 'Causal()'),
    (dict(similarity=sj.Relu(), normalizer=sj.Clipped()), 'Exp()'),
    (dict(normalizer=sj.Count()), 'Relu()'),
    (dict(similarity=sj.Relu(), normalizer=sj.Count(), kv_bias=sj.KBias()), 'KVBias()'),
])
def test_a_senseless_combination_names_the_remedy(slots, remedy):
  with pytest.raises(ValueError, match=remedy.replace('(', r'\(').replace(')', r'\)')):
    sj.AttentionSpec(**slots)


@pytest.mark.parametrize('make', [
    lambda: sj.RowSum(eps=-1.0), lambda: sj.RowSum(scale=0.0), lambda: sj.PNorm(p=0.0),
    lambda: sj.AbsFloor(floor=0.0), lambda: sj.AbsSum(eps=0.0), lambda: sj.Prefix(length=0),
    lambda: sj.KBias(value='one'), lambda: sj.KBias(learnable_dims=0),
    lambda: sj.Relative(buckets=1),
    lambda: sj.LogLength(scale=float('nan')), lambda: sj.Llama4(beta=-0.1),
    lambda: sj.Llama4(beta=float('inf')), lambda: sj.Llama4(floor=0), lambda: sj.Llama4(floor=2.5),
    lambda: sj.ValueResidual(own=float('inf')),
    lambda: sj.HeadGate(source='query'), lambda: sj.HeadGate(act='relu'),
    lambda: sj.ElementGate(start='ones'), lambda: sj.ElementGate(scale=0.0),
    lambda: sj.HeadGate(opening=1.0), lambda: sj.HeadNorm(eps=0.0),
    lambda: sj.Sigmoid(bias=float('nan')), lambda: sj.ZeroSink(n=0.0),
    lambda: sj.ZeroSink(n=float('inf')), lambda: sj.Clipped(low=0.1),
    lambda: sj.Clipped(high=0.9), lambda: sj.PseudoMask(context=0),
    lambda: sj.PseudoMask(context=2.5), lambda: sj.PseudoMask(gamma=0.0)])
def test_a_value_out_of_range_is_refused(make):
  with pytest.raises(ValueError):
    make()


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
  spec = sj.AttentionSpec(position=sj.Relative())
  zeros = np.zeros((1, 64, 1, 2), np.float32)
  alpha = sj.streaming_importance(spec, zeros, zeros).normalized[0, 0, 0]
  assert abs(alpha - 0.334) < 1e-3
  spec = sj.AttentionSpec(position=sj.Relative(decreasing=True))
  assert sj.streaming_importance(spec, zeros, zeros).normalized[0, 0, 0] < 0.05


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


def test_learned_positions_refuse_longer_inputs():
  with pytest.raises(ValueError, match='max_length'):
    sj.Learned(max_length=4).check_length(5)


def test_rope_refuses_odd_head_dimensions():
  x = np.zeros((1, 4, 1, 3), np.float32)
  with pytest.raises(ValueError, match='even head dimension'):
    sj.attend(sj.AttentionSpec(), x, x, x)


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


def test_a_mask_that_does_not_count_its_keys_has_no_logarithm_of_them():
  class EverySecond(sj.Causal):  # the count of Causal would be another mask's
    def keep(self, i, j):
      return (j <= i) & ((i - j) % 2 == 0)

  try:
    with pytest.raises(ValueError, match=r'give EverySecond a method visible\(i, keys\)'):
      sj.AttentionSpec(mask=EverySecond(), temperature=sj.LogLength())
    assert sj.AttentionSpec(mask=EverySecond(), temperature=sj.Llama4()).mask == EverySecond()
  finally:
    del EverySecond
    import gc
    gc.collect()


def test_params_must_be_those_of_the_slots():
  x = np.zeros((1, 4, 2, 4), np.float32)
  with pytest.raises(ValueError, match='params must hold'):
    sj.attend(sj.AttentionSpec(kv_bias=sj.KBias()), x, x, x)
  with pytest.raises(ValueError, match='params must hold'):
    sj.attend(sj.AttentionSpec(), x, x, x, {'kv_bias': {'key': np.zeros((2, 4))}})
  with pytest.raises(ValueError, match='learnable_dims exceeds'):
    sj.AttentionSpec(kv_bias=sj.KBias(learnable_dims=5)).params(sj.Dims(2, 2, 4))


@pytest.mark.parametrize('shapes, words', [
    (((1, 4, 3, 4), (1, 4, 2, 4), (1, 4, 2, 4)), 'multiple of'),
    (((1, 4, 2, 4), (1, 5, 2, 4), (1, 5, 2, 4)), 'same batch and length'),
    (((1, 4, 2, 4), (1, 4, 2, 4), (1, 4, 1, 4)), 'same shape'),
    (((4, 2, 4), (4, 2, 4), (4, 2, 4)), 'axes'),
    (((0, 4, 2, 4), (0, 4, 2, 4), (0, 4, 2, 4)), 'nothing to attend to'),
    (((1, 0, 2, 4), (1, 0, 2, 4), (1, 0, 2, 4)), 'nothing to attend to'),
])
def test_shapes_that_do_not_fit_are_explained(shapes, words):
  with pytest.raises(ValueError, match=words):
    sj.attend(sj.AttentionSpec(), *(np.zeros(s, np.float32) for s in shapes))


@pytest.mark.parametrize('q, k, v, words', [
    ((2, 4, 9, 8), (2, 2, 9, 8), (2, 2, 9, 8), 'The arrays look like'),  # (B, H, T, Dh), grouped
    ((2, 9, 4, 8), (2, 2, 9, 8), (2, 2, 9, 8), 'The keys look like'),
    ((2, 4, 9, 8), (2, 9, 2, 8), (2, 9, 2, 8), 'The queries look like'),
    ((2, 9, 4, 8), (2, 9, 2, 8), (2, 2, 9, 8), 'The values look like')])
def test_other_layouts_are_caught_where_the_shapes_show_them(q, k, v, words):
  q, k, v = (np.zeros(shape, np.float32) for shape in (q, k, v))
  words += r' \(B, H, T, Dh\), and \(B, T, H, Dh\) is wanted: .*swapaxes\(1, 2\)'
  with pytest.raises(ValueError, match=words):
    sj.attend(sj.AttentionSpec(), q, k, v)
  if 'values' not in words:
    for other in (sj.streaming_importance, sj.attention_map):
      with pytest.raises(ValueError, match=words):
        other(sj.AttentionSpec(), q, k)


def test_parameters_show_the_layout_too():
  x = np.zeros((2, 4, 9, 8), np.float32)  # four heads, nine tokens
  params = {'kv_bias': {'logit': np.zeros(4, np.float32)}}
  with pytest.raises(ValueError, match=r'params must hold .* The arrays look like \(B, H, T, Dh\)'):
    sj.attend(sj.AttentionSpec(kv_bias='SinkLogit()'), x, x, x, params)
  with pytest.raises(ValueError) as error:  # of no head count that there is
    sj.attend(sj.AttentionSpec(kv_bias='SinkLogit()'), x[:, :3], x[:, :3], x[:, :3], params)
  assert 'look like' not in str(error.value)


@pytest.mark.parametrize('head, gate, words', [
    ('HeadGate()', None, "gate=x_BxTxD, or use source='value'"),
    ('PlainOutput()', (1, 4, 8), 'leave gate out'),
    ("ElementGate(source='value')", (1, 4, 8), 'leave gate out'),
    ('HeadGate()', (1, 5, 8), r'\(1, 4, 8\), not \(1, 5, 8\)'),
    ('ElementGate()', (1, 4, 7), r'\(1, 4, 8\), not \(1, 4, 7\)'),
    ("HeadGate(source='slice')", (1, 4, 7), r'\(1, 4, 8\), not \(1, 4, 7\)'),
    ('HeadGate()', (1, 4, 8, 1), 'not'),
])
def test_a_gate_takes_the_input_that_it_reads_and_no_other(head, gate, words):
  x, spec = np.zeros((1, 4, 2, 4), np.float32), sj.AttentionSpec(head=head)
  params = jax.tree.map(lambda p: np.zeros(p.shape, np.float32), spec.params(sj.Dims(2, 2, 4, 8)),
                        is_leaf=lambda p: isinstance(p, sj.Param))
  gate = gate and np.zeros(gate, np.float32)
  with pytest.raises(ValueError, match=words):
    sj.attend(spec, x, x, x, params, gate=gate)


def test_a_gate_of_another_width_or_precision_is_refused():
  x, spec = np.zeros((1, 4, 2, 4), np.float32), sj.AttentionSpec(head='HeadGate()')
  params = {'head': {'kernel': np.zeros((6, 2), np.float32)}}
  assert sj.attend(spec, x, x, x, params, gate=np.zeros((1, 4, 6), np.float32)).shape == x.shape
  with pytest.raises(ValueError, match='dtype of the queries, float32, not float16'):
    sj.attend(spec, x, x, x, params, gate=np.zeros((1, 4, 6), np.float16))
  with pytest.raises(ValueError, match="give Dims its d_model.*source='value'"):
    sj.attend(spec, x, x, x, gate=x[..., 0])
  with pytest.raises(ValueError, match=r"params must hold .*\(6, 2\).*, not .*\(6, 3\)"):
    sj.attention_map(spec, x, x, {'head': {'kernel': np.zeros((6, 3), np.float32)}})
  with pytest.raises(ValueError, match="3 heads of 5 channels do not make 16: use source='input'"):
    sj.ModelConfig(layers=1, d_model=16, heads=3, head_dim=5, ffn_hidden=8, vocab_size=9,
                   attention=sj.AttentionSpec(head="HeadGate(source='slice')"))


def test_many_heads_of_few_tokens_are_legitimate():
  q, k = np.zeros((1, 1, 6, 4), np.float32), np.zeros((1, 1, 2, 4), np.float32)
  assert sj.attend(sj.AttentionSpec(), q, k, k).shape == q.shape


def test_an_unknown_implementation_lists_the_choices():
  x = np.zeros((1, 4, 2, 4), np.float32)
  with pytest.raises(ValueError, match='reference, chunked, linear, pallas'):
    sj.attend(sj.AttentionSpec(), x, x, x, implementation='flash')


def test_slots_are_values_of_jit():
  f = jax.jit(sj.attend, static_argnums=0)
  x = np.ones((1, 4, 2, 4), np.float32)
  np.testing.assert_allclose(f(sj.AttentionSpec(), x, x, x), x, rtol=1e-6)
  assert isinstance(sj.AttentionSpec().mask, Component)


@pytest.mark.parametrize('text', [
    'Llama3Rope(low_frequency_factor=4.0)', 'Llama3Rope(low_frequency_factor=0.0)',
    'YarnRope(base=1.0)', 'YarnRope(beta_fast=-3.0)', 'YarnRope(original_length=0)',
    'Rope(fraction=0.0)', 'Rope(factor=0.0)'])
def test_rotations_that_cannot_be_are_refused(text):
  with pytest.raises(ValueError, match=text.split('(')[0]):
    sj.AttentionSpec(position=text)


@pytest.mark.parametrize('build_one', [
    lambda: sj.Window(size=2.5), lambda: sj.Window(size=True), lambda: sj.Prefix(length=2.5)])
def test_sizes_of_masks_are_whole_numbers(build_one):
  with pytest.raises(ValueError, match='must be a whole number'):
    build_one()


def test_masks_say_what_they_are_asked():
  facts = lambda mask: (mask.window, mask.prefix, mask.first_target)
  assert facts(sj.Causal()) == (None, None, 0)
  assert facts(sj.Window(size=3)) == (3, None, 0)
  assert facts(sj.Prefix(length=3)) == (None, 3, 2)
  assert sj.Window(size=32).scaled(64, of=2048) == sj.Window(size=1)
  assert sj.Prefix(length=3).scaled(64, of=2048) == sj.Prefix(length=3)
  assert sj.Learned(max_length=2048).scaled(64) == sj.Learned(max_length=64)
  with pytest.raises(ValueError, match='a window of 16 of 2048 tokens would be 0.5 of 64'):
    sj.Window(size=16).scaled(64, of=2048)


def test_extra_keys_say_what_they_are_asked():
  assert [x.label for x in (sj.NoBias(), sj.KBias(), sj.SinkLogit())] == ['', 'K bias', 'sink logit']
  assert sj.NoBias().description == '' and sj.KVBias().description.endswith('k* and v*')
  assert sj.KBias().acts_only_through_normalisation and sj.SinkLogit().logit_may_be_negative
  assert not sj.KBias(value='first').acts_only_through_normalisation
  sj.KBias(learnable_dims=8).check_narrower(16)
  with pytest.raises(ValueError, match='16 learnable dimensions; heads have 16'):
    sj.KBias(learnable_dims=16).check_narrower(16)
