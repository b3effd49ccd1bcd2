"""config.json: how it is read; a setting that changes a model's function is never ignored."""

import json
import math
from pathlib import Path

import jax
import pytest

import sink_jax as sj
from sink_jax.attention.extra_key_value import SinkLogit
from sink_jax.attention.mask import Causal, Window
from sink_jax.attention.position import Llama3Rope, Rope, YarnRope
from sink_jax.attention.per_token import QKNorm
from sink_jax.models.config import Experts, Layer
from sink_jax.models.sizes import parameter_shapes
from sink_jax.pretrained.config_keys import rope
from sink_jax.pretrained.families import FAMILIES, family_for
from tests.pretrained import tiny

FIXTURES = Path(__file__).parent / 'fixtures'
SLIDING, FULL = 'sliding_attention', 'full_attention'
MISSING = '(left out)'
LLAMA3 = dict(
  factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)
YARN = dict(
  factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False, original_max_position_embeddings=4096
)


def made(hf, changes):
  hf = {key: value for key, value in (hf | changes).items() if value is not MISSING}
  return family_for(hf).model_config(hf)


def config(kind, **changes):
  """The model for a config.json like LLaMA's, with three layers."""
  return made((tiny.GPT_OSS if kind == 'gpt_oss' else tiny.LLAMA) | dict(model_type=kind), changes)


def read(case, **changes):
  """The model of a stored checkpoint's config.json, with changes."""
  return made(json.loads((FIXTURES / case / 'config.json').read_text()), changes)


@pytest.mark.parametrize('kind', FAMILIES)
@pytest.mark.parametrize('changes', [{}, dict(attention_bias=True, tie_word_embeddings=True)])
def test_the_table_fills_the_tree(kind, changes):
  hf = json.loads((tiny.first_fixtures()[kind] / 'config.json').read_text()) | changes
  model = family_for(hf).model_config(hf)
  filled = {
    part.path
    for tensor in family_for(hf).stored_tensors(hf, model).values()
    for part in tensor.parts
  }
  assert filled == {
    '/'.join(key.key for key in path)
    for path, _ in jax.tree_util.tree_leaves_with_path(parameter_shapes(model))
  }


def test_what_config_json_leaves_out_is_the_familys():
  absent = dict(
    num_key_value_heads=MISSING,
    rms_norm_eps=MISSING,
    num_attention_heads=32,
    rope_theta=MISSING,
    hidden_size=64,
    num_local_experts=4,
    num_experts_per_tok=2,
  )
  found = {
    kind: config(kind, **absent)
    for kind in ('llama', 'mistral', 'qwen2', 'qwen3', 'phi3', 'mixtral', 'granite')
  }
  assert {
    kind: (x.dims.kv_heads, x.norm_eps, x.attention.position.base) for kind, x in found.items()
  } == {
    'llama': (32, 1e-6, 1e4),
    'mistral': (8, 1e-6, 1e4),
    'qwen2': (32, 1e-6, 1e4),
    'qwen3': (32, 1e-6, 1e4),
    'phi3': (32, 1e-5, 1e4),
    'mixtral': (8, 1e-5, 1e6),
    'granite': (32, 1e-6, 1e4),
  }
  assert {kind: x.dims.head_dim for kind, x in found.items() if x.dims.head_dim != 2} == {
    'qwen3': 128
  }
  assert {kind: x.attention.mask for kind, x in found.items() if x.attention.mask != Causal()} == {
    'mistral': Window(size=4096)
  }
  assert found['qwen2'].biases == ('qkv',) and found['granite'].biases == ()
  assert found['mixtral'].pattern == (Layer(experts=Experts(4, 2, renormalize=True)),)


def test_what_other_config_json_leaves_out_is_the_familys():
  assert (
    read('gpt2', n_inner=None).ffn_hidden
    == read('falcon', ffn_hidden_size=None).ffn_hidden
    == 4 * 32
  )
  assert read('jamba', mamba_dt_rank='auto').pattern[0].mamba.rank == 1
  assert read('opt', word_embed_proj_dim=None).embedding_dim is None
  assert read('gpt_neox', rotary_pct=None, rotary_emb_base=None).attention.position == Rope(
    fraction=0.25
  )
  assert read('falcon').dims.kv_heads == 1
  granite = read('granite_swa', layer_types=None, layer_rope_theta=None)
  assert [granite.attention_of(layer).mask.window for layer in granite.pattern] == [None, 4, 4, 4]
  assert {layer.position for layer in granite.pattern} == {None}


def test_what_config_json_of_gemma_leaves_out():
  absent = (
    'attn_logit_softcapping',
    'final_logit_softcapping',
    'tie_word_embeddings',
    'sliding_window',
    'head_dim',
    'num_key_value_heads',
  )
  gemma = read('gemma2', **dict.fromkeys(absent, MISSING))
  assert (gemma.attention.similarity, gemma.logit_cap) == (sj.CappedExp(cap=50.0), 30.0)
  assert gemma.tied and (gemma.dims.head_dim, gemma.kv_heads) == (256, None)
  assert [gemma.attention_of(layer).mask for layer in gemma.pattern] == [
    Window(size=4096),
    Causal(),
  ]


def test_options():
  plain = config('llama')
  assert plain.biases == () and not plain.tied and plain.head_dim is None
  other = config(
    'llama',
    attention_bias=True,
    mlp_bias=True,
    tie_word_embeddings=True,
    head_dim=6,
    pretraining_tp=2,
    hidden_act='swish',
  )
  assert other.biases == ('qkv', 'out', 'ffn') and other.tied and other.head_dim == 6
  # transformers does not read `mlp_bias` for Qwen3 either.
  assert config('qwen3', attention_bias=True, mlp_bias=True).biases == ('qkv', 'out')
  assert config('phi3', sliding_window=2047).attention.mask == Window(size=2047)
  assert config('phi3', partial_rotary_factor=0.75).attention.position.fraction == 0.75
  assert config('mistral', sliding_window=None).attention.mask == Causal()
  assert config('qwen3', sliding_window=4).attention.mask == Causal()
  assert read('gpt2', activation_function='gelu_pytorch_tanh').ffn == 'gelu_tanh'
  assert read('opt', enable_bias=False).biases == ()
  assert read('falcon', multi_query=False).dims.kv_heads == 4


@pytest.mark.parametrize(
  'changes, windows',
  [
    (dict(max_window_layers=1), [None, 4, 4]),
    (dict(max_window_layers=0), [4]),
    (dict(num_hidden_layers=4, layer_types=[SLIDING, FULL] * 2), [4, None]),
  ],
)
def test_windows_of_qwen3(changes, windows):
  model = config('qwen3', use_sliding_window=True, sliding_window=4, **changes)
  assert [model.attention_of(layer).mask.window for layer in model.pattern] == windows
  assert model.attention.qk_norm == QKNorm(eps=1e-5)


def test_gpt_oss():
  model = config('gpt_oss')
  experts = Experts(count=3, active=2, renormalize=True)
  assert [(model.attention_of(x).mask, x.experts) for x in model.pattern] == [
    (Window(size=4), experts),
    (Causal(), experts),
  ]
  assert model.attention.kv_bias == SinkLogit()
  assert model.biases == ('qkv', 'out', 'ffn') and model.ffn == 'clamped_swiglu'
  published = config('gpt_oss', rope_theta=MISSING, rope_scaling=MISSING).attention.position
  assert published == YarnRope(
    base=150000.0,
    factor=32.0,
    original_length=4096,
    truncate=False,
    attention_factor=published.amplitude,
  )
  assert config('gpt_oss', attention_bias=False).biases == ('ffn',)
  assert config('gpt_oss', layer_types=[FULL] * 4).pattern == (Layer(experts=experts),)


def test_a_kind_of_layers_has_the_base_of_its_family():
  kinds = {FULL: {'rope_type': 'default'}, SLIDING: {'rope_type': 'default'}}
  bases = lambda model: {model.attention_of(layer).position.base for layer in model.pattern}
  assert bases(read('gemma3_new', rope_parameters=kinds)) == {1e6, 1e4}
  assert bases(
    read('gemma3_new', rope_parameters=kinds, rope_theta=1e3, rope_local_base_freq=1e2)
  ) == {1e3, 1e2}
  assert bases(read('olmo3', rope_parameters=kinds)) == {5e5}


@pytest.mark.parametrize(
  'kind, extra, expected',
  [
    ('default', {}, Rope(base=5e5)),
    ('linear', dict(factor=2), Rope(base=5e5, factor=2.0)),
    (
      'llama3',
      LLAMA3,
      Llama3Rope(
        base=5e5,
        factor=8.0,
        low_frequency_factor=1.0,
        high_frequency_factor=4.0,
        original_length=8192,
      ),
    ),
    (
      'yarn',
      YARN,
      YarnRope(
        base=5e5,
        factor=32.0,
        original_length=4096,
        truncate=False,
        attention_factor=0.1 * math.log(32) + 1,
      ),
    ),
  ],
)
def test_the_old_form_of_rotary_settings_and_the_new_one_say_the_same(kind, extra, expected):
  assert rope({'rope_parameters': {'rope_type': kind, 'rope_theta': 500000, **extra}}) == expected
  for key in ('type', 'rope_type'):
    assert rope({'rope_theta': 500000.0, 'rope_scaling': {key: kind, **extra}}) == expected
  if kind == 'default':
    assert rope({'rope_theta': 500000.0, 'rope_scaling': None}) == expected


def test_rotary_defaults_and_amplitudes():
  assert rope({}) == Rope(base=10000.0) and rope({}, base=7.0) == Rope(base=7.0)
  assert rope({'rope_theta': 3.0, 'rope_parameters': {'rope_type': 'default'}}) == Rope(base=3.0)
  assert rope({}, fraction=0.25).fraction == 0.25
  assert rope({'rope_parameters': {'partial_rotary_factor': 0.5}}, fraction=0.25).fraction == 0.5
  yarn = {'rope_type': 'yarn', 'factor': 4.0}
  assert rope({'rope_parameters': yarn, 'max_position_embeddings': 64}) == YarnRope(
    factor=4.0, original_length=64, attention_factor=0.1 * math.log(4) + 1
  )
  amplitude = lambda **extra: (
    rope({'rope_parameters': {'rope_type': 'yarn', **YARN, **extra}}).amplitude
  )
  assert amplitude(factor=1.0) == amplitude(factor=0.5) == 1
  assert amplitude(attention_factor=0.7) == 0.7
  ratio = (0.1 * 0.7 * math.log(32) + 1) / (0.1 * 0.3 * math.log(32) + 1)
  assert amplitude(mscale=0.7, mscale_all_dim=0.3) == pytest.approx(ratio)


@pytest.mark.parametrize(
  'kind, extra, ignored',
  [
    ('yarn', YARN, dict(attn_factor=2.0)),
    ('yarn', YARN, dict(finetuned=True)),
    ('linear', dict(factor=2.0), dict(beta_fast=32)),
    ('llama3', LLAMA3, dict(mscale=0.7)),
    ('default', {}, dict(factor=8.0)),
    ('default', {}, dict(mrope_section=[1, 2])),
  ],
)
def test_what_transformers_ignores_with_a_warning_gets_a_remark(kind, extra, ignored, caplog):
  settings = {'rope_type': kind, **extra}
  expected = rope({'rope_parameters': settings, 'max_position_embeddings': 99})
  assert not caplog.messages
  assert rope({'rope_parameters': settings | ignored, 'max_position_embeddings': 99}) == expected
  (remark,) = caplog.messages
  ((key, value),) = ignored.items()
  assert f'{key} = {value}' in remark and repr(kind) in remark


# Refused settings: the stored checkpoint, a key, its value, and text in the message besides the
# key.
REFUSED = [
  ('llama', 'hidden_act', 'gelu', 'gelu'),
  ('llama', 'attention_bias', 'yes', 'yes'),
  ('llama', 'vocab_size', MISSING, 'no vocab_size'),
  ('llama', 'hidden_size', 8.0, '8.0'),
  ('llama', 'num_hidden_layers', 0, '0'),
  ('llama', 'rms_norm_eps', 'small', 'small'),
  ('llama', 'quantization_config', {'quant_method': 'awq'}, 'awq'),
  ('llama', 'rope_scaling', {'type': 'dynamic', 'factor': 2}, 'dynamic'),
  ('llama', 'rope_scaling', {'rope_type': [1]}, '1'),
  ('llama', 'rope_scaling', 'linear', 'linear'),
  ('llama', 'rope_parameters', {'rope_type': 'linear'}, 'no factor'),
  ('llama', 'rope_parameters', {'rope_type': 'linear', 'factor': '2'}, "factor = '2'"),
  ('llama', 'rope_parameters', {'rope_type': 'llama3', 'factor': 2.0}, 'low_freq_factor'),
  ('llama', 'rope_parameters', {'rope_type': 'yarn', **YARN, 'beta_fast': []}, 'beta_fast'),
  ('llama', 'rope_parameters', {FULL: {'rope_type': 'default'}}, FULL),
  ('llama', 'rope_parameters', {'partial_rotary_factor': 0.5}, 'partial_rotary_factor = 0.5'),
  ('llama', 'partial_rotary_factor', 0.5, '0.5'),
  ('llama', 'rope_theta', 'big', 'big'),
  ('mistral', 'layer_types', [SLIDING, FULL], 'alike'),
  ('mistral', 'sliding_window', 0, '0'),
  ('qwen3', 'layer_types', [SLIDING] * 2, 'sliding_window = None'),
  ('qwen3', 'layer_types', [FULL], 'num_hidden_layers'),
  ('qwen3', 'layer_types', 3, '3'),
  ('qwen3', 'layer_types', ['chunked_attention'] * 2, 'chunked_attention'),
  ('qwen3', 'elementwise_attn_output_gate', 1, '1'),
  ('qwen3', 'use_qk_norm', False, 'False'),
  ('qwen2', 'rope_scaling', {'type': 'mrope'}, 'mrope'),
  ('phi3', 'rope_scaling', {'type': 'su', 'long_factor': [1.0]}, 'LongRoPE'),
  ('phi3', 'rope_scaling', {'rope_type': 'yarn', 'factor': 2.0}, 'LongRoPE'),
  ('mixtral', 'num_experts_per_tok', MISSING, 'no'),
  ('granite', 'attention_multiplier', -1, '-1'),
  ('gpt_oss', 'swiglu_limit', 6.0, '6.0'),
  ('gpt_oss', 'swiglu_alpha', 1.0, '1.0'),
  ('gpt_oss', 'quantization_config', {'quant_method': 'fp8'}, 'fp8'),
  ('gpt2', 'add_cross_attention', True, 'True'),
  ('gpt2', 'activation_function', 'gelu_10', 'gelu_10'),
  ('gpt2', 'n_embd', None, 'no'),
  ('gpt2', 'quantization_config', {'quant_method': 'gptq'}, 'gptq'),
  ('falcon', 'alibi', True, 'True'),
  ('falcon', 'activation', 'gelu_10', 'gelu_10'),
  ('falcon', 'num_ln_in_parallel_attn', 2, '2'),
  ('falcon', 'num_attention_heads', 5, '5'),
  ('falcon', 'head_dim', 12, '12'),
  ('falcon_grouped', 'num_ln_in_parallel_attn', 3, '3'),
  ('falcon_grouped', 'parallel_attn', False, 'False'),
  ('gpt_neox', 'hidden_act', 'mish', 'mish'),
  ('gpt_neox', 'rope_scaling', {'type': 'dynamic', 'factor': 2.0}, 'dynamic'),
  ('gpt_neox', 'use_parallel_residual', 'yes', 'yes'),
  ('gpt_neox', 'layer_norm_eps', 10**400, 'finite'),
  ('gpt_neox', 'layer_norm_eps', math.nan, 'finite'),
  ('opt', '_remove_final_layer_norm', True, 'True'),
  ('opt', 'layer_norm_elementwise_affine', False, 'False'),
  ('opt', 'activation_function', 'gelu_10', 'gelu_10'),
  ('granite_swa', 'layer_rope_theta', [100.0] * 3, '4'),
  ('granite_swa', 'layer_rope_theta', [0.0, -1.0, 100.0, 100.0], '-1.0'),
  ('granite_swa', 'residual_multiplier', 0, 'above 0'),
  ('gemma2', 'hidden_activation', 'gelu', 'gelu'),
  ('gemma2', 'use_bidirectional_attention', True, 'True'),
  ('gemma2', 'query_pre_attn_scalar', 0, 'above 0'),
  ('gemma2', 'final_logit_softcapping', -30.0, '-30'),
  ('gemma2', 'attn_logit_softcapping', 'tanh', 'tanh'),
  ('olmo2', 'clip_qkv', 8.0, '8.0'),
  ('gemma3', 'hidden_activation', 'gelu', 'gelu'),
  ('gemma3', 'use_bidirectional_attention', True, 'True'),
  ('gemma3', 'attn_logit_softcapping', 50.0, '50'),
  ('gemma3', 'query_pre_attn_scalar', 0, 'above 0'),
  ('gemma3', 'sliding_window_pattern', 0, '0'),
  ('gemma3', 'rope_scaling', {'type': 'dynamic', 'factor': 2.0}, 'dynamic'),
  ('gemma3', 'rope_parameters', {'rope_type': 'default'}, FULL),
  ('gemma3_images', 'text_config', 'gemma', 'gemma'),
  ('gemma3_images', 'quantization_config', {'quant_method': 'gptq'}, 'gptq'),
  ('gemma3_new', 'rope_scaling', {'rope_type': 'linear', 'factor': 8.0}, 'linear'),
  ('olmo3', 'rope_scaling', {'rope_type': 'linear', 'factor': 8.0}, 'linear'),
  ('olmo3', 'clip_qkv', 8.0, '8.0'),
  ('olmo3_plain', 'rope_theta', 10000.0, '10000'),
  ('olmo3', 'rope_parameters', {FULL: {'rope_type': 'default'}}, SLIDING),
  ('smollm3', 'no_rope_layers', [1, 0], '4'),
  ('smollm3', 'no_rope_layers', [1, 0, 2, 1], '2'),
  ('jamba', 'hidden_act', 'gelu', 'gelu'),
  ('jamba', 'mamba_inner_layernorms', False, 'False'),
  ('jamba', 'sliding_window', 5, '5'),
  ('jamba', 'attn_layer_offset', 4, '4'),
  ('jamba', 'expert_layer_period', 0, '0'),
  ('jamba', 'mamba_dt_rank', 'half', 'half'),
]


@pytest.mark.parametrize('case, key, value, said', REFUSED, ids=str)
def test_what_is_not_supported_is_named(case, key, value, said):
  with pytest.raises(ValueError) as caught:
    read(case, **{key: value})
  assert said in str(caught.value)
  assert key in str(caught.value) or key in ('rope_scaling', 'rope_parameters', 'layer_types')


def test_a_head_has_one_gate_and_no_biases_with_it():
  gates = dict(headwise_attn_output_gate=True)
  for other in ('elementwise_attn_output_gate', 'qkv_bias', 'attention_bias'):
    with pytest.raises(ValueError, match=f'{other} = True'):
      config('qwen3', **gates, **{other: True})


def test_unknown_architectures_list_the_known_ones():
  for hf in ({}, {'model_type': 'gpt5'}, {'model_type': ['llama']}):
    with pytest.raises(ValueError, match=', '.join(sorted(FAMILIES))):
      family_for(hf)
