"""What a component, a spec and `attend` refuse: the message names the part and the remedy."""

import numpy as np
import pytest

import sink_jax as sj
from sink_jax.attention.mask import Mask
from sink_jax.attention.similarity import Similarity
from sink_jax.attention.spec import COMPONENTS
from sink_jax.component import from_string
from tests.attention_specs import random_inputs

MASKS = [
  ('Windw(size=3)', 'Causal, Prefix, Window.*Did you mean Window|Did you mean Window.*Prefix'),
  ('Window(sise=3)', 'no argument.*size'),
  ('Window(3)', 'name=value'),
  ('Window(size=3, size=4)', 'given twice'),
  ('Window(size=3.5)', 'must be int'),
  ("Window(size='3')", 'must be int'),
  ('Window(size=True)', 'must be int'),
  ('Window(size=__import__("os"))', 'must be int'),
  (None, 'must be a config string'),
  ('Window(size=2**99999999)', 'Cannot read'),
  ('(lambda: 1)()', 'Cannot read'),
  ('Window(', 'Cannot read'),
  ('', 'Cannot read'),
  ('(' * 5000, 'Cannot read'),
]


@pytest.mark.parametrize('text, words', MASKS)
def test_a_bad_config_string_is_explained(text, words):
  with pytest.raises(ValueError, match=words):
    from_string(Mask, text)


def test_softmax_is_named_by_what_it_consists_of():
  for base in (Similarity, COMPONENTS['normalizer']):
    with pytest.raises(ValueError, match=r'Exp\(\).*RowSum\(\)') as error:
      from_string(base, 'Softmax()')
    assert 'Did you mean' not in str(error.value)


# Components that differ from the defaults, and words of the message.
SPECS = [
  ('normalizer=Unnormalized()', r'RowSum\(\)'),
  ('normalizer=Count()', r'RowSum\(\)'),
  ('normalizer=RowSum(eps=1e-8)', 'without eps'),
  ('similarity=Linear() normalizer=PNorm()', r'AbsFloor\(\)'),
  ('similarity=Linear()', r'AbsFloor\(\)'),
  ('similarity=Linear() feature_map=EluPlusOne() position=Alibi()', r'AbsFloor\(\)'),
  ('similarity=Linear() feature_map=EluPlusOne() kv_bias=SinkLogit()', r'AbsFloor\(\)'),
  ('similarity=Sigmoid() normalizer=Unnormalized() kv_bias=KBias()', r'KVBias\(\)'),
  ('similarity=Sigmoid() normalizer=Unnormalized() kv_bias=SinkLogit()', r'KVBias\(\)'),
  ('similarity=Relu() normalizer=Count() kv_bias=KBias()', r'KVBias\(\)'),
  ('similarity=Softpick()', r'and AbsSum\(\)'),
  ('normalizer=AbsSum()', r'Softpick\(\) and'),
  ('similarity=Relu() normalizer=RowSum(eps=1e-3) kv_bias=ZeroSink()', r'Exp\(\)'),
  ('kv_bias=PseudoMask() mask=Prefix()', r'Causal\(\)'),
  ('similarity=Relu() normalizer=Clipped()', r'Exp\(\)'),
  # A field that cannot have this value is named.
  ('normalizer=RowSum(eps=-1.0)', 'eps.* >= 0'),
  ('normalizer=RowSum(scale=0.0)', 'scale.* > 0'),
  ('normalizer=PNorm(p=0.0)', 'p.* > 0'),
  (f'normalizer=PNorm(p={10**400})', 'finite'),
  ('normalizer=AbsFloor(floor=0.0)', 'floor.* > 0'),
  ('normalizer=AbsSum(eps=0.0)', 'eps.* > 0'),
  ('normalizer=Clipped(low=0.1)', 'low.* <= 0'),
  ('normalizer=Clipped(high=0.9)', 'high.* >= 1'),
  ('similarity=CappedExp(cap=0.0)', 'cap.* above 0'),
  ('similarity=Sigmoid(bias=1e999)', 'bias.* finite'),
  ('mask=Window(size=0)', 'size.* whole number from 1'),
  ('mask=Prefix(length=0)', 'length.* whole number from 1'),
  ("kv_bias=KBias(value='one')", "value.* 'zero', 'first' or 'uniform'"),
  ('kv_bias=KBias(learnable_dims=0)', 'learnable_dims.* at least 1'),
  ('kv_bias=ZeroSink(n=0.0)', 'n.* > 0'),
  ('kv_bias=ZeroSink(n=1e999)', 'n.* finite'),
  ('kv_bias=PseudoMask(context=0)', 'context.* at least 1'),
  ('kv_bias=PseudoMask(gamma=0.0)', 'gamma.* > 0'),
  ('position=Relative(buckets=1)', 'buckets.* 2 buckets'),
  ('position=Rope(base=0.0)', 'base.* > 0'),
  ('position=Rope(fraction=0.0)', 'fraction.* must lie'),
  ('position=Sinusoidal(base=0.0)', 'base.* > 0'),
  ('position=YarnRope(beta_fast=-1.0)', 'beta_fast.* > 0'),
  ('qk_norm=QKNorm(eps=-1.0)', 'eps.* >= 0'),
  ("head=HeadGate(source='query')", "source.* 'input', 'value' or 'slice'"),
  ('head=HeadGate(opening=1.0)', 'opening.* must lie'),
  ('head=ElementGate(scale=0.0)', 'scale.* > 0'),
  ('head=HeadNorm(eps=0.0)', 'eps.* > 0'),
]


@pytest.mark.parametrize('text, words', SPECS)
def test_a_spec_that_makes_no_sense_names_the_remedy(text, words):
  with pytest.raises(ValueError, match=words):
    sj.AttentionSpec(**dict(component.split('=', 1) for component in text.split()))


def test_a_number_that_is_not_one_is_refused():
  with pytest.raises(ValueError, match='bias must be finite'):
    sj.AttentionSpec(sj.Sigmoid(bias=float('nan')), 'Unnormalized()')


X = np.zeros((1, 4, 2, 4), np.float32)
GATE = {'head': {'kernel': np.zeros((6, 2), np.float32)}}


def attend(spec, q=X.shape, k=X.shape, v=X.shape, params=None, **options):
  arrays = (np.zeros(shape, np.float32) for shape in (q, k, v))
  return sj.attend(sj.AttentionSpec(**spec), *arrays, params, **options)


def gated(head, shape, params=None):
  params = params or random_inputs(sj.AttentionSpec(head=head), length=4, heads=2)[3]
  return attend(dict(head=head), params=params, gate=np.zeros(shape, np.float32))


CALLS = [
  (lambda: attend({}, q=(1, 4, 3, 4)), 'multiple of'),
  (lambda: attend({}, q=(1, 5, 2, 4)), 'the same batch, length'),
  (lambda: attend({}, v=(1, 4, 1, 4)), 'one shape'),
  (lambda: attend({}, *[(4, 2, 4)] * 3), 'axes'),
  (lambda: attend({}, *[(1, 0, 2, 4)] * 3), 'none of them empty'),
  (lambda: attend({}, *[(1, 4, 1, 3)] * 3), 'even head dimension'),
  (lambda: attend(dict(kv_bias='KBias()')), 'params must hold'),
  (lambda: attend({}, params={'kv_bias': {'key': np.zeros((2, 4))}}), 'params must hold'),
  (lambda: attend(dict(kv_bias='KBias(learnable_dims=5)')), 'learnable_dims exceeds'),
  (lambda: attend({}, implementation='flash'), 'reference, chunked, .*pallas'),
  (lambda: sj.AttentionSpec(normalizer=sj.RowSum(eps=float('nan'))), 'eps'),
  (lambda: sj.attend(sj.AttentionSpec(), X, X, X.astype('float16')), 'dtype'),
  (lambda: sj.attention_map(sj.AttentionSpec(), X.astype(int), X.astype(int)), 'dtype'),
  (lambda: sj.streaming_importance(sj.AttentionSpec(), X, X.astype('float16')), 'dtype'),
  # A gate takes the input that it reads, and no other.
  (lambda: attend(dict(head='HeadGate()')), r'gate must be .* HeadGate\(.* with None'),
  (lambda: gated('PlainOutput()', (1, 4, 8)), r'None for any other: PlainOutput\(\)'),
  (lambda: gated("ElementGate(source='value')", (1, 4, 8)), 'None for any other'),
  (lambda: gated('HeadGate()', (1, 5, 8)), r'with \(1, 5, 8\)'),
  (lambda: gated('ElementGate()', (1, 4, 7)), '7'),
  (lambda: gated("HeadGate(source='slice')", (1, 4, 12)), 'reads 8 channels'),
  (
    lambda: attend(dict(head='HeadGate()'), params=GATE, gate=np.zeros((1, 4, 6), np.float16)),
    'one floating-point dtype, not float16, float32',
  ),
  (
    lambda: attend(dict(head='HeadGate()'), gate=np.zeros((1, 4, 6), np.float32)),
    "give Dims its d_model.*source='value'",
  ),
  (
    lambda: sj.attention_map(
      sj.AttentionSpec(head='HeadGate()'), X, X, {'head': {'kernel': np.zeros((6, 3), np.float32)}}
    ),
    r'params must hold .*\(6, 2\).*, not .*\(6, 3\)',
  ),
  (
    lambda: sj.ModelConfig(
      layers=1,
      d_model=16,
      heads=3,
      head_dim=5,
      ffn_hidden=8,
      vocab_size=9,
      attention=sj.AttentionSpec(head="HeadGate(source='slice')"),
    ),
    "3 slices of 5 channels do not make 16: use source='input'",
  ),
]


@pytest.mark.parametrize('call, words', CALLS)
def test_arguments_that_do_not_fit_are_explained(call, words):
  with pytest.raises(ValueError, match=words):
    call()


def test_a_gate_of_another_width_fits_its_kernel():
  assert gated('HeadGate()', (1, 4, 6), GATE).shape == X.shape
