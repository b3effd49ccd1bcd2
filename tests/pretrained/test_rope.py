"""Rotary settings of config.json, old and new, and what has no counterpart here."""

import math

import pytest

from sink_jax.attention.position import Llama3Rope, Rope, YarnRope
from sink_jax.pretrained.rope import rope

LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=8192)
YARN = dict(factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
            original_max_position_embeddings=4096)


@pytest.mark.parametrize('kind, extra, expected', [
    ('default', {}, Rope(base=5e5)),
    ('linear', dict(factor=2), Rope(base=5e5, factor=2.0)),
    ('llama3', LLAMA3, Llama3Rope(base=5e5, factor=8.0, low_frequency_factor=1.0,
                                  high_frequency_factor=4.0, original_length=8192)),
    ('yarn', YARN, YarnRope(base=5e5, factor=32.0, original_length=4096, truncate=False,
                            attention_factor=0.1 * math.log(32) + 1))])
def test_the_old_form_and_the_new_one_say_the_same(kind, extra, expected):
  new = {'rope_parameters': {'rope_type': kind, 'rope_theta': 500000, **extra}}
  olds = [{'rope_theta': 500000.0, 'rope_scaling': {key: kind, **extra}}
          for key in ('type', 'rope_type')]
  if kind == 'default':
    olds.append({'rope_theta': 500000.0, 'rope_scaling': None})
  for hf in (new, *olds):
    assert rope(hf) == expected


def test_defaults():
  assert rope({}) == Rope(base=10000.0)
  assert rope({}, base=7.0) == Rope(base=7.0)
  assert rope({'rope_theta': 3.0, 'rope_parameters': {'rope_type': 'default'}}) == Rope(base=3.0)
  assert rope({}, fraction=0.25).fraction == 0.25
  assert rope({'rope_parameters': {'partial_rotary_factor': 0.5}}, fraction=0.25).fraction == 0.5
  yarn = {'rope_type': 'yarn', 'factor': 4.0}
  assert rope({'rope_parameters': yarn, 'max_position_embeddings': 64}) == YarnRope(
      factor=4.0, original_length=64, attention_factor=0.1 * math.log(4) + 1)


def test_yarn_amplitudes():
  def amplitude(**extra):
    return rope({'rope_parameters': {'rope_type': 'yarn', **YARN, **extra}}).amplitude

  assert amplitude(factor=1.0) == amplitude(factor=0.5) == 1
  assert amplitude(attention_factor=0.7) == 0.7
  ratio = (0.1 * 0.7 * math.log(32) + 1) / (0.1 * 0.3 * math.log(32) + 1)
  assert amplitude(mscale=0.7, mscale_all_dim=0.3) == pytest.approx(ratio)


@pytest.mark.parametrize('hf, part', [
    ({'rope_scaling': {'type': 'dynamic', 'factor': 2.0}}, "'dynamic'.*length of the input"),
    ({'rope_scaling': {'type': 'longrope', 'factor': 2.0}}, "'longrope'.*length of the input"),
    ({'rope_parameters': {'rope_type': 'spiral'}}, "'spiral'.*default, linear, llama3, yarn"),
    ({'rope_parameters': {'rope_type': 'linear'}}, 'linear.*factor'),
    ({'rope_parameters': {'rope_type': 'linear', 'factor': '2'}}, "factor.*'2'"),
    ({'rope_parameters': {'rope_type': 'llama3', 'factor': 2.0}}, 'low_freq_factor'),
    ({'rope_parameters': {'rope_type': 'yarn', 'factor': 2.0}}, 'max_position_embeddings'),
    ({'rope_parameters': {'rope_type': 'yarn', **YARN, 'beta_fast': []}}, 'beta_fast'),
    ({'rope_parameters': {'mrope_section': [1, 2]}}, 'mrope_section'),
    ({'rope_parameters': {'full_attention': {'rope_type': 'default'}}}, 'full_attention'),
    ({'rope_parameters': {'partial_rotary_factor': 0.5}}, 'partial_rotary_factor = 0.5'),
    ({'partial_rotary_factor': 0.5}, 'partial_rotary_factor = 0.5'),
    ({'rope_scaling': 'linear'}, "rope_scaling = 'linear'"),
    ({'rope_theta': 'big'}, "rope_theta = 'big'")])
def test_what_is_not_supported_is_named(hf, part):
  with pytest.raises(ValueError, match=part):
    rope(hf)
