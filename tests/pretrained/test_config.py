"""config.json: how it is read; a setting that changes a model's function is never ignored."""

import itertools
import json
import math
import operator
import re
from pathlib import Path

import jax
import pytest

import sink_jax as sj
from sink_jax.attention.mask import Causal, Window
from sink_jax.attention.position import Llama3Rope, Rope, YarnRope
from sink_jax.attention.per_token import QKNorm
from sink_jax.models.sizes import parameter_shapes
from sink_jax.pretrained.config_keys import rope
from sink_jax.pretrained.families import FAMILIES, family_for
from tests.pretrained import tiny

FIXTURES = Path(__file__).parent / 'fixtures'
FIRST = tiny.first_fixtures()
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
  assert kind in FIRST, f'fixtures/ has no {kind}: see docs/add_family.md'
  hf = json.loads((FIRST[kind] / 'config.json').read_text()) | changes
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


@pytest.mark.parametrize(
  'kind, kv_heads, head_dim, eps, base, mask, biases',
  [
    ('llama', 32, 2, 1e-6, 1e4, Causal(), ()),
    ('mistral', 8, 2, 1e-6, 1e4, Window(size=4096), ()),
    ('qwen2', 32, 2, 1e-6, 1e4, Causal(), ('qkv',)),
    ('qwen3', 32, 128, 1e-6, 1e4, Causal(), ()),
    ('phi3', 32, 2, 1e-5, 1e4, Causal(), ()),
    ('mixtral', 8, 2, 1e-5, 1e6, Causal(), ()),
  ],
)
def test_what_config_json_leaves_out_is_the_familys(
  kind, kv_heads, head_dim, eps, base, mask, biases
):
  absent = dict.fromkeys(('num_key_value_heads', 'rms_norm_eps', 'rope_theta'), MISSING)
  of_mixtral = dict(num_local_experts=4, num_experts_per_tok=2)
  model = config(kind, hidden_size=64, num_attention_heads=32, **absent, **of_mixtral)
  assert (model.dims.kv_heads, model.dims.head_dim) == (kv_heads, head_dim)
  assert (model.norm_eps, model.attention.position.base) == (eps, base)
  assert (model.attention.mask, model.biases) == (mask, biases)


def windows(model):
  return [spec.mask.window for spec in model.attention_specs]


def rank(model):
  return model.pattern[0].mamba.rank


GEMMA = (
  'attn_logit_softcapping',
  'final_logit_softcapping',
  'tie_word_embeddings',
  'sliding_window',
  'head_dim',
  'num_key_value_heads',
)


@pytest.mark.parametrize(
  'case, changes, expected',
  [
    ('gpt2', dict(n_inner=None), dict(ffn_hidden=4 * 32)),
    ('gpt2', dict(activation_function='gelu_pytorch_tanh'), dict(ffn='gelu_tanh')),
    ('falcon', dict(ffn_hidden_size=None), {'ffn_hidden': 4 * 32, 'dims.kv_heads': 1}),
    ('falcon', dict(multi_query=False), {'dims.kv_heads': 4}),
    ('jamba', dict(mamba_dt_rank='auto'), {rank: 1}),
    ('opt', dict(word_embed_proj_dim=None, enable_bias=False), dict(embedding_dim=None, biases=())),
    (
      'gpt_neox',
      dict(rotary_pct=None, rotary_emb_base=None),
      {'attention.position': Rope(fraction=0.25)},
    ),
    ('granite_swa', dict(layer_types=None, layer_rope_theta=None), {windows: [None, 4, 4, 4]}),
    (
      'gemma2',
      dict.fromkeys(GEMMA, MISSING),
      {
        'attention.similarity': sj.CappedExp(cap=50.0),
        'logit_cap': 30.0,
        'tied': True,
        'dims.head_dim': 256,
        'kv_heads': None,
        windows: [4096, None] * 2,
      },
    ),
    (
      'llama',
      dict(attention_bias=True, mlp_bias=True, pretraining_tp=2, hidden_act='swish'),
      dict(biases=('qkv', 'out', 'ffn')),
    ),
    # transformers does not read `mlp_bias` for Qwen3 either.
    ('qwen3', dict(attention_bias=True, mlp_bias=True), dict(biases=('qkv', 'out'))),
    ('qwen3', dict(sliding_window=4, use_sliding_window=False), {'attention.mask': Causal()}),
    (
      'phi3',
      dict(sliding_window=2047, partial_rotary_factor=0.75),
      {'attention.mask': Window(size=2047), 'attention.position.fraction': 0.75},
    ),
    ('mistral', dict(sliding_window=None), {'attention.mask': Causal()}),
    ('gpt_oss', dict(attention_bias=False), dict(biases=('ffn',))),
    ('gpt_oss', dict(layer_types=None), {windows: [4, None]}),
  ],
  # Without addresses of functions: processes of the tests compare the names.
  ids=lambda x: re.sub(r'<function (\w+) at \w+>', r'\1', str(x)),
)
def test_values_that_are_left_out_or_have_a_meaning_of_their_own(case, changes, expected):
  model = read(case, **changes)
  for name, value in expected.items():
    found = name(model) if callable(name) else operator.attrgetter(name)(model)
    assert found == value, name


@pytest.mark.parametrize(
  'changes, expected',
  [
    (dict(max_window_layers=1), [None, 4, 4]),
    (dict(max_window_layers=0), [4, 4, 4]),
    (dict(num_hidden_layers=4, layer_types=[SLIDING, FULL] * 2), [4, None] * 2),
  ],
)
def test_windows_of_qwen3(changes, expected):
  model = config('qwen3', use_sliding_window=True, sliding_window=4, **changes)
  assert windows(model) == expected
  assert model.attention.qk_norm == QKNorm(eps=1e-5)


def test_gpt_oss_as_published():
  published = config('gpt_oss', rope_theta=MISSING, rope_scaling=MISSING).attention.position
  assert published == yarn(base=150000.0, truncate=False, attention_factor=published.amplitude)


@pytest.mark.parametrize(
  'case, changes, expected',
  [
    ('gemma3_new', {}, {1e6, 1e4}),
    ('gemma3_new', dict(rope_theta=1e3, rope_local_base_freq=1e2), {1e3, 1e2}),
    ('olmo3', {}, {5e5}),
  ],
)
def test_a_kind_of_layers_has_the_base_of_its_family(case, changes, expected):
  kinds = {FULL: {'rope_type': 'default'}, SLIDING: {'rope_type': 'default'}}
  model = read(case, rope_parameters=kinds, **changes)
  assert {spec.position.base for spec in model.attention_specs} == expected


def yarn(length=4096, factor=32.0, **options):
  default = 0.1 * math.log(factor) + 1
  options = {'attention_factor': default} | options
  return YarnRope(factor=factor, original_length=length, **options)


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
    ('yarn', YARN, yarn(base=5e5, truncate=False)),
  ],
)
def test_the_old_form_of_rotary_settings_and_the_new_one_say_the_same(kind, extra, expected):
  for hf in (
    {'rope_parameters': {'rope_type': kind, 'rope_theta': 500000, **extra}},
    {'rope_theta': 500000.0, 'rope_scaling': {'type': kind, **extra}},
    {'rope_theta': 500000.0, 'rope_scaling': {'rope_type': kind, **extra}},
  ):
    assert rope(hf) == expected


@pytest.mark.parametrize(
  'hf, family, expected',
  [
    ({}, {}, Rope(base=10000.0)),
    ({'rope_scaling': None}, dict(base=7.0), Rope(base=7.0)),
    ({'rope_theta': 3.0, 'rope_parameters': {'rope_type': 'default'}}, {}, Rope(base=3.0)),
    ({}, dict(fraction=0.25), Rope(fraction=0.25)),
    (
      {'rope_parameters': {'partial_rotary_factor': 0.5}},
      dict(fraction=0.25),
      Rope(fraction=0.5),
    ),
    (
      {'rope_parameters': {'rope_type': 'yarn', 'factor': 4.0}, 'max_position_embeddings': 64},
      {},
      yarn(64, 4.0),
    ),
  ],
)
def test_rotary_defaults(hf, family, expected):
  assert rope(hf, **family) == expected


@pytest.mark.parametrize(
  'extra, expected',
  [
    (dict(factor=1.0), 1),
    (dict(factor=0.5), 1),
    (dict(attention_factor=0.7), 0.7),
    (
      dict(mscale=0.7, mscale_all_dim=0.3),
      (0.1 * 0.7 * math.log(32) + 1) / (0.1 * 0.3 * math.log(32) + 1),
    ),
  ],
)
def test_amplitudes_of_yarn(extra, expected):
  found = rope({'rope_parameters': {'rope_type': 'yarn', **YARN, **extra}})
  assert found.amplitude == pytest.approx(expected)


@pytest.mark.parametrize(
  'kind, extra, key, value',
  [
    ('yarn', YARN, 'attn_factor', 2.0),
    ('linear', dict(factor=2.0), 'beta_fast', 32),
    ('llama3', LLAMA3, 'mscale', 0.7),
    ('default', {}, 'mrope_section', [1, 2]),
  ],
)
def test_what_transformers_ignores_with_a_warning_gets_a_remark(kind, extra, key, value, caplog):
  settings = {'rope_type': kind, **extra}
  expected = rope({'rope_parameters': settings})
  assert not caplog.messages
  assert rope({'rope_parameters': settings | {key: value}}) == expected
  (remark,) = caplog.messages
  assert f'{key} = {value}' in remark
  assert repr(kind) in remark


CONFIGS = {kind: json.loads((path / 'config.json').read_text()) for kind, path in FIRST.items()}
KEYS = sorted({key for hf in CONFIGS.values() for key in hf} - {'model_type'})
ALIASES = {'rotary_pct': 'partial_rotary_factor', 'rotary_emb_base': 'rope_theta'}


@pytest.mark.parametrize('kind', CONFIGS)
def test_a_value_of_the_wrong_kind_is_refused_by_name_unless_nothing_reads_it(kind):
  hf = CONFIGS[kind]
  sound = made(hf, {})
  dynamic = {'type': 'dynamic', 'factor': 2.0}
  scalings = [('rope_scaling', dynamic), ('rope_parameters', dynamic)]
  for key, value in [*itertools.product(KEYS, ('wrong', [1])), *scalings]:
    try:
      model = made(hf, {key: value})
    except ValueError as error:
      named = {key, ALIASES.get(key, key), 'dynamic'}
      assert any(name in str(error) for name in named), (key, error)
    else:
      assert model == sound, (key, value)


@pytest.mark.parametrize('kind', CONFIGS)
def test_quantised_weights_are_refused(kind):
  with pytest.raises(ValueError, match="quantization_config = .*'gptq'"):
    made(CONFIGS[kind], dict(quantization_config={'quant_method': 'gptq'}))


# By the stored checkpoint: values that another program would read as a change of the model.
UNSUPPORTED = {
  'llama': dict(hidden_size=8.0, num_hidden_layers=0, partial_rotary_factor=0.5),
  'mistral': dict(sliding_window=0),
  'qwen3': dict(elementwise_attn_output_gate=1, use_qk_norm=False),
  'granite': dict(attention_multiplier=-1),
  'gpt_oss': dict(swiglu_limit=6.0, swiglu_alpha=1.0),
  'gpt2': dict(add_cross_attention=True),
  'falcon': dict(alibi=True, num_ln_in_parallel_attn=2, num_attention_heads=5, head_dim=12),
  'falcon_grouped': dict(num_ln_in_parallel_attn=3, parallel_attn=False),
  'opt': dict(_remove_final_layer_norm=True, layer_norm_elementwise_affine=False),
  'granite_swa': dict(residual_multiplier=0),
  'gemma2': dict(
    use_bidirectional_attention=True, query_pre_attn_scalar=0, final_logit_softcapping=-30.0
  ),
  'gemma3': dict(attn_logit_softcapping=50.0, sliding_window_pattern=0),
  'olmo3': dict(clip_qkv=8.0),
  'olmo3_plain': dict(rope_theta=10000.0),
  'jamba': dict(
    mamba_inner_layernorms=False, sliding_window=5, attn_layer_offset=4, expert_layer_period=0
  ),
}


@pytest.mark.parametrize(
  'case, key, value',
  [(case, *item) for case, changes in UNSUPPORTED.items() for item in changes.items()],
)
def test_what_is_not_supported_is_named_with_its_value(case, key, value):
  with pytest.raises(ValueError, match=f'{key}.* = {value}'):
    read(case, **{key: value})


LINEAR = {'rope_type': 'linear', 'factor': 8.0}


@pytest.mark.parametrize(
  'case, key, value, words',
  [
    ('llama', 'vocab_size', MISSING, 'no vocab_size'),
    ('gpt2', 'n_embd', None, 'no n_embd'),
    ('mixtral', 'num_experts_per_tok', MISSING, 'no num_experts_per_tok'),
    ('gpt_neox', 'layer_norm_eps', 10**400, 'layer_norm_eps = 1.*finite'),
    ('gpt_neox', 'layer_norm_eps', math.nan, 'layer_norm_eps = nan .*finite'),
    ('llama', 'rope_scaling', {'rope_type': [1]}, '1'),
    ('llama', 'rope_parameters', {'rope_type': 'linear'}, 'no factor'),
    ('llama', 'rope_parameters', {'rope_type': 'linear', 'factor': '2'}, "factor = '2'"),
    ('llama', 'rope_parameters', {'rope_type': 'llama3', 'factor': 2.0}, 'low_freq_factor'),
    ('llama', 'rope_parameters', {'rope_type': 'yarn', **YARN, 'beta_fast': []}, 'beta_fast'),
    ('llama', 'rope_parameters', {FULL: {'rope_type': 'default'}}, FULL),
    ('llama', 'rope_parameters', {'partial_rotary_factor': 0.5}, 'partial_rotary_factor = 0.5'),
    ('gemma3', 'rope_parameters', {'rope_type': 'default'}, FULL),
    ('olmo3', 'rope_parameters', {FULL: {'rope_type': 'default'}}, SLIDING),
    ('gemma3_new', 'rope_scaling', LINEAR, 'rope_scaling = .*linear'),
    ('phi3', 'rope_scaling', {'type': 'su', 'long_factor': [1.0]}, 'LongRoPE'),
    ('phi3', 'rope_scaling', {'rope_type': 'yarn', 'factor': 2.0}, 'LongRoPE'),
    ('mistral', 'layer_types', [SLIDING, FULL], 'layer_types.* alike'),
    ('qwen3', 'layer_types', [SLIDING] * 2, 'sliding_window = None'),
    ('qwen3', 'layer_types', [FULL], 'layer_types.* num_hidden_layers'),
    ('qwen3', 'layer_types', ['chunked_attention'] * 2, 'layer_types = .chunked_attention'),
    ('granite_swa', 'layer_rope_theta', [100.0] * 3, 'layer_rope_theta.* 4'),
    ('granite_swa', 'layer_rope_theta', [0.0, -1.0, 100.0, 100.0], 'layer_rope_theta.*-1.0'),
    ('smollm3', 'no_rope_layers', [1, 0], 'no_rope_layers.* 4'),
    ('smollm3', 'no_rope_layers', [1, 0, 2, 1], 'no_rope_layers.* 2'),
  ],
  ids=str,
)
def test_what_is_refused_for_a_reason_of_its_own(case, key, value, words):
  with pytest.raises(ValueError, match=words):
    read(case, **{key: value})


def test_a_head_has_one_gate_and_no_biases_with_it():
  gates = dict(headwise_attn_output_gate=True)
  for other in ('elementwise_attn_output_gate', 'qkv_bias', 'attention_bias'):
    with pytest.raises(ValueError, match=f'{other} = True'):
      config('qwen3', **gates, **{other: True})


def test_unknown_architectures_list_the_known_ones():
  for hf in ({}, {'model_type': 'gpt5'}, {'model_type': ['llama']}):
    with pytest.raises(ValueError, match=', '.join(sorted(FAMILIES))):
      family_for(hf)
