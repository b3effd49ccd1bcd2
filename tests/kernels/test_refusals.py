"""What each implementation refuses, with the reason, and what it takes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.attention.mask import Mask
from sink_jax.kernels import dispatch
from tests.attention_specs import random_inputs

HAS_MOSAIC = jax.__version_info__ >= (0, 11, 2)
PLATFORMS = {'pallas': 'cuda', 'mosaic': 'cuda', 'cudnn': 'cuda', 'splash': 'tpu'}
LIBRARIES, SOFTPICK = 'cudnn splash', dict(similarity='Softpick()', normalizer='AbsSum()')

# Implementations, components, sizes and platform that differ, and words of the reason; None: it
# runs.
CASES = [
  ('pallas', {}, dict(head_dim=40), 'head_dim = 40 is not a multiple of 16 up to 256'),
  ('pallas', {}, dict(head_dim=264, platform='tpu'), 'head_dim = 264 is not a multiple of 8'),
  ('pallas', {}, dict(head_dim=40, platform='tpu'), None),
  ('pallas', {}, dict(dtype='float16'), 'must both be bfloat16 or float32'),
  ('pallas', dict(normalizer='Clipped()'), {}, 'the sum of a row before'),
  ('pallas', SOFTPICK, {}, r'Softpick\(\) weighs values'),
  ('mosaic', {}, {}, None),
  ('mosaic', {}, dict(platform='cpu'), 'Hopper'),
  ('mosaic', {}, dict(platform='tpu'), 'Hopper'),
  ('mosaic', {}, dict(dtype='float32'), 'takes bfloat16'),
  ('mosaic', {}, dict(head_dim=256), 'a head_dim up to 128'),
  ('mosaic', dict(position='Relative()'), {}, 'no floor function'),
  ('mosaic', dict(normalizer='Clipped()'), {}, 'clips single weights'),
  (LIBRARIES, dict(similarity='CappedExp()'), {}, r'must be Exp\(\), not CappedExp\(cap=50.0\)'),
  (LIBRARIES, dict(normalizer='PNorm(p=2.0)'), {}, r'must be RowSum\(\), not PNorm\(p=2.0\)'),
  (LIBRARIES, dict(position='Alibi()'), {}, r'takes no bias on the scores, and Alibi\(\) adds'),
  (LIBRARIES, dict(mask=Mask()), {}, r'Causal\(\).* not Mask\('),
  (LIBRARIES, {}, dict(platform='cpu'), 'not cpu'),
  ('cudnn', dict(mask='Prefix(length=3)'), {}, r'Window\(\), not Prefix\(length=3\)'),
  ('cudnn', {}, dict(dtype='float32'), 'all in float16, not float32 with float32'),
  ('cudnn', {}, dict(head_dim=136), 'a multiple of 8 up to 128, not 136'),
  ('cudnn', {}, dict(length=1), 'refuses a mask for a single token'),
  ('cudnn', {}, dict(length=333, dtype='float16'), None),
  ('splash', {}, dict(dtype='float16'), 'all in float32, not float16 with float16'),
  ('splash', {}, dict(head_dim=264), 'a head dimension up to 256, not 264'),
  ('splash', {}, dict(length=2000), None),  # padded
  ('splash', dict(mask='Prefix(length=9)'), dict(length=5), 'queries would see the padding'),
  ('splash', {}, dict(length=128, head_dim=100, dtype='float32'), None),
  # Components that act before or after the softmax are allowed.
  (LIBRARIES, dict(position='Rope()', normalizer='RowSum(scale=0.2)'), {}, None),
  (LIBRARIES, dict(kv_bias='SinkLogit()'), {}, None),
  (LIBRARIES, dict(kv_bias='VBias()', feature_map='Mlp()', qk_norm='QKNorm()'), {}, None),
  (LIBRARIES, dict(mask='Window(size=3)'), {}, None),
]


@pytest.mark.parametrize('names, components, case, words', CASES)
def test_reasons(monkeypatch, names, components, case, words):
  spec = sj.AttentionSpec(**dict(position='Nope()') | components)
  for name in names.split():
    if name == 'mosaic' and not HAS_MOSAIC:
      words = 'needs jax 0.11.2 or newer'
    platform = case.get('platform', PLATFORMS[name])
    monkeypatch.setattr(dispatch, 'platform', lambda: platform)
    told = dispatch.unsupported(name, spec, *queries_and_keys(**case))
    if words is None:
      assert told is None
    else:
      assert re.search(words, told or '')


def queries_and_keys(length=2048, head_dim=96, dtype='bfloat16', platform=None):
  for heads in (8, 2):
    yield jax.ShapeDtypeStruct((2, length, heads, head_dim), dtype)


def test_a_named_implementation_runs_or_raises():
  x = jnp.zeros((1, 8, 2, 64), jnp.float16)
  for name in PLATFORMS:
    with pytest.raises(NotImplementedError, match=f"'{name}': .*'chunked' runs every case"):
      sj.attend(sj.AttentionSpec(), x, x, x, implementation=name)


def test_a_second_derivative_is_refused():
  q, k, v, _ = random_inputs(sj.AttentionSpec(), length=5, head_dim=8)

  def out(q):
    return sj.attend(sj.AttentionSpec(), q, k, v, implementation='pallas').sum()

  def slope(q):
    return jax.grad(out)(q).sum()

  with pytest.raises(NotImplementedError, match='second derivative .*chunked'):
    jax.grad(slope)(q)


def test_an_importance_of_more_keys_than_there_are_is_refused():
  x = np.zeros((1, 4, 1, 2), np.float32)
  with pytest.raises(ValueError, match='keys = 5 is outside 1..4'):
    sj.streaming_importance(sj.AttentionSpec(), x, x, keys=5)
