"""config.json of LLaMA and what is built like it: what becomes of it, and what is refused."""

import json

import jax
import pytest

from sink_jax.attention.extra_key_value import SinkLogit
from sink_jax.attention.mask import Causal, Window
from sink_jax.attention.position import YarnRope
from sink_jax.attention.per_token import QKNorm
from sink_jax.models.config import Experts, Layer
from sink_jax.models.sizes import parameter_shapes
from sink_jax.pretrained.families import FAMILIES, NOT_READ, family_for
from sink_jax.pretrained.stored_tensors import shortest_period
from tests.pretrained import tiny

SLIDING, FULL = 'sliding_attention', 'full_attention'


def config(kind, **changes):
  hf = (tiny.GPT_OSS if kind == 'gpt_oss' else tiny.LLAMA) | dict(model_type=kind) | changes
  hf = {key: value for key, value in hf.items() if value != 'missing'}
  return family_for(hf).model_config(hf)


def test_what_config_json_leaves_out_is_the_familys_own():
  absent = dict(num_key_value_heads='missing', rms_norm_eps='missing', num_attention_heads=32,
                hidden_size=64)
  llama, mistral, qwen3 = (config(kind, **absent) for kind in ('llama', 'mistral', 'qwen3'))
  assert (llama.dims.kv_heads, mistral.dims.kv_heads, qwen3.dims.kv_heads) == (32, 8, 32)
  assert llama.dims.head_dim == mistral.dims.head_dim == 2 and qwen3.dims.head_dim == 128
  assert llama.norm_eps == mistral.norm_eps == qwen3.attention.qk_norm.eps == 1e-6
  assert mistral.attention.mask == Window(size=4096)
  assert config('mistral', sliding_window=None).attention.mask == Causal()
  assert config('qwen3', sliding_window=4).attention.mask == Causal()


def test_llama_options():
  plain = config('llama')
  assert plain.biases == () and not plain.tied and plain.head_dim is None
  other = config('llama', attention_bias=True, mlp_bias=True, tie_word_embeddings=True,
                 head_dim=6, pretraining_tp=2, hidden_act='swish')
  assert other.biases == ('qkv', 'out', 'ffn') and other.tied and other.head_dim == 6


def test_what_is_built_like_llama_has_its_own_defaults():
  absent = dict(num_key_value_heads='missing', rms_norm_eps='missing', num_attention_heads=32,
                rope_theta='missing', hidden_size=64, num_local_experts=4, num_experts_per_tok=2)
  made = {kind: config(kind, **absent) for kind in ('qwen2', 'phi3', 'mixtral', 'granite')}
  assert [(x.dims.kv_heads, x.norm_eps, x.attention.position.base) for x in made.values()] == [
      (32, 1e-6, 1e4), (32, 1e-5, 1e4), (8, 1e-5, 1e6), (32, 1e-6, 1e4)]
  assert {x.attention.mask for x in made.values()} == {Causal()}
  assert made['qwen2'].biases == ('qkv',) and made['granite'].biases == ()
  assert made['mixtral'].pattern == (Layer(experts=Experts(4, 2, renormalize=True)),)
  assert config('phi3', sliding_window=2047).attention.mask == Window(size=2047)
  assert config('phi3', partial_rotary_factor=0.75).attention.position.fraction == 0.75


@pytest.mark.parametrize('attention, expected', [(False, ()), (True, ('qkv', 'out'))])
def test_qwen3_has_no_biases_outside_of_attention(attention, expected):
  # As in transformers, whose Qwen3 does not read `mlp_bias`.
  assert config('qwen3', attention_bias=attention, mlp_bias=True).biases == expected


def test_qwen3_windows():
  assert config('qwen3').attention.qk_norm == QKNorm(eps=1e-5)
  some = config('qwen3', use_sliding_window=True, sliding_window=4, max_window_layers=1)
  assert [layer.mask for layer in some.pattern] == [Causal(), Window(size=4), Window(size=4)]
  listed = config('qwen3', use_sliding_window=True, sliding_window=4, num_hidden_layers=4,
                  layer_types=[SLIDING, FULL] * 2)
  assert [layer.mask for layer in listed.pattern] == [Window(size=4), Causal()]
  every = config('qwen3', use_sliding_window=True, sliding_window=4, max_window_layers=0)
  assert every.pattern == (Layer(),) and every.attention.mask == Window(size=4)


def test_gpt_oss():
  made = config('gpt_oss')
  experts = Experts(count=3, active=2, renormalize=True)
  assert made.pattern == (Layer(mask=Window(size=4), experts=experts), Layer(experts=experts))
  assert made.attention.mask == Causal() and made.attention.kv_bias == SinkLogit()
  assert made.biases == ('qkv', 'out', 'ffn') and made.ffn == 'clamped_swiglu'
  published = config('gpt_oss', rope_theta='missing', rope_scaling='missing')
  assert published.attention.position == YarnRope(
      base=150000.0, factor=32.0, original_length=4096, truncate=False,
      attention_factor=published.attention.position.amplitude)
  assert config('gpt_oss', attention_bias=False).biases == ('ffn',)
  one = config('gpt_oss', layer_types=[FULL] * 4)
  assert one.pattern == (Layer(experts=experts),)


@pytest.mark.parametrize('kind, changes, part', [
    ('llama', dict(hidden_act='gelu'), "hidden_act = 'gelu'"),
    ('llama', dict(attention_bias='yes'), "attention_bias = 'yes'"),
    ('llama', dict(vocab_size='missing'), 'no vocab_size'),
    ('llama', dict(hidden_size=8.0), 'hidden_size = 8.0'),
    ('llama', dict(num_hidden_layers=0), 'num_hidden_layers = 0'),
    ('llama', dict(num_key_value_heads='two'), "num_key_value_heads = 'two'"),
    ('llama', dict(num_attention_heads=3), 'num_attention_heads = 3'),
    ('llama', dict(rms_norm_eps='small'), "rms_norm_eps = 'small'"),
    ('llama', dict(quantization_config={'quant_method': 'awq'}), "'awq'"),
    ('llama', dict(rope_scaling={'type': 'dynamic', 'factor': 2}), 'dynamic'),
    ('mistral', dict(layer_types=[SLIDING, FULL, FULL]), 'layer_types'),
    ('mistral', dict(sliding_window=0), 'sliding_window = 0'),
    ('mistral', dict(sliding_window=None, layer_types=[SLIDING] * 3), 'layer_types'),
    ('qwen3', dict(layer_types=[SLIDING] * 3), 'sliding_window = None'),
    ('qwen3', dict(layer_types=[FULL] * 2), 'names 2 layers'),
    ('qwen3', dict(layer_types=['chunked_attention'] * 3), 'chunked_attention'),
    ('qwen3', dict(layer_types=3), 'must be a list'),
    ('qwen3', dict(headwise_attn_output_gate=True, elementwise_attn_output_gate=True),
     'elementwise_attn_output_gate = True.*one gate'),
    ('qwen3', dict(headwise_attn_output_gate=True, qkv_bias=True), 'qkv_bias = True'),
    ('qwen3', dict(elementwise_attn_output_gate=1), 'elementwise_attn_output_gate = 1'),
    ('qwen3', dict(use_qk_norm=False), 'use_qk_norm = False'),
    ('qwen2', dict(rope_scaling={'type': 'mrope'}), 'mrope'),
    ('phi3', dict(rope_scaling={'type': 'su', 'long_factor': [1.0]}), "type = 'su'.*LongRoPE"),
    ('phi3', dict(rope_scaling={'rope_type': 'yarn', 'factor': 2.0}), 'LongRoPE'),
    ('mixtral', dict(num_local_experts=2, num_experts_per_tok=0), 'num_experts_per_tok = 0'),
    ('mixtral', dict(num_local_experts=2), 'num_experts_per_tok'),
    ('granite', dict(attention_multiplier=-1), 'attention_multiplier = -1'),
    ('gpt_oss', dict(swiglu_limit=6.0), 'swiglu_limit = 6.0'),
    ('gpt_oss', dict(swiglu_alpha=1.0), 'swiglu_alpha = 1.0'),
    ('gpt_oss', dict(num_local_experts='missing'), 'num_local_experts'),
    ('gpt_oss', dict(quantization_config={'quant_method': 'fp8'}), "'fp8'")])
def test_what_is_not_supported_is_named(kind, changes, part):
  with pytest.raises(ValueError, match=part) as caught:
    config(kind, **changes)
  assert 'config.json' in str(caught.value)


def test_unknown_architectures_list_the_known_ones():
  for hf in ({}, {'model_type': 'gpt5'}, {'model_type': ['llama']}):
    with pytest.raises(ValueError, match=', '.join(sorted(FAMILIES))):
      family_for(hf)
  assert family_for({'model_type': 'mistral'}) is FAMILIES['mistral']


def test_popular_architectures_are_refused_with_the_nearest_one_that_is_read():
  assert len(NOT_READ) == 10 and not set(NOT_READ) & set(FAMILIES)
  for kind, (reason, nearest) in NOT_READ.items():
    assert nearest in FAMILIES
    for name in (kind, f'{kind}_text'):
      with pytest.raises(ValueError) as caught:
        family_for({'model_type': name})
      assert f'{name!r} is not supported: {reason}. The nearest that is: {nearest}. Sup' in str(
          caught.value)


@pytest.mark.every(3)
@pytest.mark.parametrize('kind', FAMILIES)
@pytest.mark.parametrize('changes', [{}, dict(attention_bias=True, tie_word_embeddings=True)])
def test_the_table_fills_the_tree(kind, changes):
  hf = json.loads((tiny.first_fixtures()[kind] / 'config.json').read_text()) | changes
  made = family_for(hf).model_config(hf)
  filled = {part.path for tensor in family_for(hf).stored_tensors(hf, made).values()
            for part in tensor.parts}
  paths = {'/'.join(key.key for key in path)
           for path, _ in jax.tree_util.tree_leaves_with_path(
               parameter_shapes(made))}
  assert filled == paths


def test_shortest_period():
  assert shortest_period('abab') == ('a', 'b')
  assert shortest_period('aba') == ('a', 'b', 'a')
  assert shortest_period('aaa') == ('a',)
  assert shortest_period('a') == ('a',)
