"""Settings of config.json that change a model's function are read or refused, never ignored."""

import json
from pathlib import Path

import pytest

import sink_jax as sj
from sink_jax.pretrained.families import family_for

FIXTURES = Path(__file__).parent / 'fixtures'


def read(case, **changes):
  hf = json.loads((FIXTURES / case / 'config.json').read_text()) | changes
  return family_for(hf).model_config(hf)


@pytest.mark.parametrize('case, key, value', [
    ('gpt2', 'add_cross_attention', True),
    ('gpt2', 'activation_function', 'gelu_10'),
    ('gpt2', 'n_embd', None),
    ('gpt2', 'quantization_config', {'quant_method': 'gptq'}),
    ('falcon', 'alibi', True),
    ('falcon', 'activation', 'gelu_10'),
    ('falcon', 'num_ln_in_parallel_attn', 2),
    ('falcon', 'num_attention_heads', 5),
    ('falcon', 'head_dim', 12),
    ('falcon_grouped', 'num_ln_in_parallel_attn', 3),
    ('falcon_grouped', 'parallel_attn', False),
    ('gpt_neox', 'hidden_act', 'mish'),
    ('gpt_neox', 'rope_scaling', {'type': 'dynamic', 'factor': 2.0}),
    ('gpt_neox', 'use_parallel_residual', 'yes'),
    ('opt', '_remove_final_layer_norm', True),
    ('opt', 'layer_norm_elementwise_affine', False),
    ('opt', 'activation_function', 'gelu_10'),
    ('granite_swa', 'layer_rope_theta', [100.0] * 3),
    ('granite_swa', 'layer_rope_theta', [0.0, -1.0, 100.0, 100.0]),
    ('granite_swa', 'residual_multiplier', 0),
    ('gemma2', 'hidden_activation', 'gelu'),
    ('gemma2', 'use_bidirectional_attention', True),
    ('gemma2', 'query_pre_attn_scalar', 0),
    ('gemma2', 'final_logit_softcapping', -30.0),
    ('gemma2', 'attn_logit_softcapping', 'tanh'),
    ('gemma2', 'rope_scaling', {'type': 'dynamic', 'factor': 2.0}),
    ('olmo2', 'clip_qkv', 8.0),
    ('olmo2', 'rope_scaling', {'type': 'dynamic', 'factor': 2.0}),
    ('gemma3', 'hidden_activation', 'gelu'),
    ('gemma3', 'use_bidirectional_attention', True),
    ('gemma3', 'attn_logit_softcapping', 50.0),
    ('gemma3', 'query_pre_attn_scalar', 0),
    ('gemma3', 'sliding_window_pattern', 0),
    ('gemma3', 'rope_scaling', {'type': 'dynamic', 'factor': 2.0}),
    ('gemma3', 'rope_parameters', {'rope_type': 'default'}),
    ('gemma3_images', 'text_config', 'gemma'),
    ('gemma3_images', 'quantization_config', {'quant_method': 'gptq'}),
    ('gemma3_new', 'rope_scaling', {'rope_type': 'linear', 'factor': 8.0}),
    ('olmo3', 'rope_scaling', {'rope_type': 'linear', 'factor': 8.0}),
    ('olmo3', 'clip_qkv', 8.0),
    ('olmo3', 'rope_parameters', {'full_attention': {'rope_type': 'default'}}),
    ('olmo3_plain', 'rope_theta', 10000.0),
    ('smollm3', 'no_rope_layers', [1, 0]),
    ('smollm3', 'no_rope_layers', [1, 0, 2, 1]),
    ('jamba', 'hidden_act', 'gelu'),
    ('jamba', 'mamba_inner_layernorms', False),
    ('jamba', 'sliding_window', 5),
    ('jamba', 'attn_layer_offset', 4),
    ('jamba', 'expert_layer_period', 0),
    ('jamba', 'mamba_dt_rank', 'half'),
], ids=str)
def test_what_is_not_supported_is_named(case, key, value):
  with pytest.raises(ValueError) as caught:
    read(case, **{key: value})
  named = next(iter(value.values())) if isinstance(value, dict) else value
  assert str(named) in str(caught.value) or value is None
  assert key in str(caught.value) or key == 'rope_scaling'


def test_what_is_left_out_has_the_default_of_the_family():
  assert read('gpt2', n_inner=None).ffn_hidden == 4 * 32
  assert read('jamba', mamba_dt_rank='auto').pattern[0].mamba.rank == 1
  assert read('opt', word_embed_proj_dim=None).embedding_dim is None
  rope = read('gpt_neox', rotary_pct=None, rotary_emb_base=None).attention.position
  assert (rope.base, rope.fraction) == (10000.0, 0.25)
  assert read('gpt2', activation_function='gelu_pytorch_tanh').ffn == 'gelu_tanh'
  assert read('opt', enable_bias=False).biases == ()
  assert read('falcon', ffn_hidden_size=None).ffn_hidden == 4 * 32
  assert (read('falcon').dims.kv_heads, read('falcon', multi_query=False).dims.kv_heads) == (1, 4)
  granite = read('granite_swa', layer_types=None, layer_rope_theta=None)
  assert [layer.mask is None for layer in granite.pattern] == [True, False, False, False]
  assert {layer.position for layer in granite.pattern} == {None}
  hf = json.loads((FIXTURES / 'gemma2' / 'config.json').read_text())
  for key in ('attn_logit_softcapping', 'final_logit_softcapping', 'tie_word_embeddings',
              'sliding_window', 'head_dim', 'num_key_value_heads'):
    hf.pop(key, None)
  gemma = family_for(hf).model_config(hf)
  assert (gemma.attention.similarity, gemma.logit_cap) == (sj.CappedExp(cap=50.0), 30.0)
  assert gemma.tied and (gemma.dims.head_dim, gemma.kv_heads) == (256, None)
  assert [layer.mask for layer in gemma.pattern] == [sj.Window(size=4096), sj.Causal()]


@pytest.mark.parametrize('key, value', [
    ('hidden_size', 10**20), ('vocab_size', 2**31), ('layer_norm_eps', 10**400),
    ('layer_norm_eps', float('nan')), ('rope_scaling', {'rope_type': [1]}),
    ('rope_scaling', {'type': {'a': 1}})])
def test_numbers_that_cannot_be_are_refused_before_anything_is_made(key, value):
  with pytest.raises(ValueError, match=key.replace('rope_scaling', 'rope_type')):
    read('gpt_neox', **{key: value})


def test_a_kind_of_layers_has_the_base_of_its_family():
  kinds = {'full_attention': {'rope_type': 'default'}, 'sliding_attention': {'rope_type': 'default'}}
  bases = lambda config: {(layer.position or config.attention.position).base
                          for layer in config.pattern}
  assert bases(read('gemma3_new', rope_parameters=kinds)) == {1e6, 1e4}
  assert bases(read('gemma3_new', rope_parameters=kinds, rope_theta=1e3,
                    rope_local_base_freq=1e2)) == {1e3, 1e2}
  assert bases(read('olmo3', rope_parameters=kinds)) == {5e5}
