"""Runs with random parameters for every row of the table of what is exported, for tests."""

import numpy as np

import sink_jax as sj
from sink_jax.attention.mask import Window
from sink_jax.models.config import Layer
from sink_jax.pretrained.export import export_checkpoint
from tests.random_params import random_params

TINY = dict(layers=2, d_model=32, heads=4, kv_heads=2, ffn_hidden=40, vocab_size=64,
            norm_eps=0.003, dtype='float32')


def config_of(options, **components):
  return sj.ModelConfig(**TINY | options | dict(attention=sj.AttentionSpec(**components)))


def run_of(options, **components):
  """A run without a parameter that is zero, so that none can be left out unseen."""
  config = config_of(options, **components)
  return sj.Run(config, random_params(config), 'case', 5)


SINK_ID = 3  # of a learned sink token, where a case has one
# Name: the class, options of the model, components of its attention.
CASES = {
    'qk_norm': ('qwen3', {}, dict(qk_norm='QKNorm(eps=0.003)')),
    'qk_norm_eps': ('qwen3', dict(tied=True, head_dim=12), dict(qk_norm='QKNorm(eps=1e-6)')),
    'qk_norm_window': ('qwen3', dict(biases=('qkv', 'out')), dict(
        qk_norm='QKNorm(eps=0.01)', mask='Window(size=5)', position='Rope(base=100.0)')),
    'row_scale': ('llama', dict(linear='sigma_reparam'), dict(normalizer='RowSum(scale=3.0)')),
    'value_scale': ('mistral', {}, dict(value='ValueScale()', mask='Window(size=6)')),
    'v_bias': ('llama', {}, dict(kv_bias='VBias()')),
    'v_bias_shared': ('llama', dict(biases=('out', 'ffn')), dict(
        kv_bias='VBias(shared=True)', normalizer='RowSum(scale=0.5)', value='ValueScale()')),
    'sink_token': ('llama', dict(tied=True, sink_tokens=1), {}),
    'sink_token_window': ('mistral', dict(sink_tokens=1), dict(mask='Window(size=5)')),
    'sink_logit': ('granite_swa', dict(head_dim=12), dict(
        kv_bias='SinkLogit()', position='Rope(base=100.0)')),
    'sink_logit_windows': ('granite_swa', dict(
        layers=4, tied=True, biases=('qkv', 'out', 'ffn'),
        pattern=(Layer(mask=Window(size=5)), Layer())), dict(kv_bias='SinkLogit()')),
    'sink_logit_nope': ('granite_swa', {}, dict(
        kv_bias='SinkLogit()', position='Nope()', mask='Window(size=5)', value='ValueScale()')),
    'off_by_one': ('granite_swa', {}, dict(kv_bias='ZeroSink(n=3.0)')),
    'element_gate': ('qwen3_next', dict(head_dim=12), dict(
        qk_norm='QKNorm(eps=0.003)', head='ElementGate(scale=2.0)',
        position='Rope(base=100.0)')),
    'head_gate': ('qwen3_next', dict(tied=True), dict(qk_norm='QKNorm()', head='HeadGate()')),
}
# What only PyTorch code of its own holds: together the cases have every value of every part of
# attention and every choice of the model that it computes, see test_export_custom.py.
GATED = dict(head='ElementGate(source="value", scale=1.5, opening=0.25)')
CASES |= {f'custom_{name}': ('custom', options, components) for name, options, components in (
    ('sigmoid', dict(ffn='relu', norm='layernorm', biases=('qkv', 'out', 'ffn', 'unembed')), dict(
        similarity='Sigmoid(bias=-2.0)', normalizer='Unnormalized()', position='Learned()',
        feature_map='Mlp()', qk_norm='QKNorm()',
        head='HeadGate(source="slice", opening=0.25)', kv_bias='KVBias()')),
    ('relu', dict(ffn='gelu', norm='single', tied=True), dict(
        similarity='Relu()', normalizer='Count()', position='Alibi()', mask='Prefix(length=3)',
        feature_map='EluPlusOne()',
        kv_bias='KBias(value="first", value_norm=2.0, learnable_dims=3)', qk_norm='QKNorm()')),
    ('squared_relu', dict(ffn='gelu_tanh', norm='dyt', norm_location='sandwich', heads=6,
                          kv_heads=3, head_dim=8), dict(
        similarity='SquaredRelu()', normalizer='RowSum(eps=1e-3, scale=2.0)', position='Alibi()',
        kv_bias='VBias(shared=True)', head='HeadNorm(eps=0.01)')),
    ('linear', dict(ffn='swish', norm='none', norm_location='post'), dict(
        similarity='Linear()', normalizer='AbsFloor()', mask='Window(size=7)',
        position='Sinusoidal()', temperature='LogLength(scale=0.4)', value='ValueScale()')),
    ('elu', dict(ffn='reglu', norm_location='post', combine_heads='add'), dict(
        similarity='EluPlusOne()', normalizer='PNorm(p=2.0)', head='HeadGate(scale=2.0)',
        position='Relative(buckets=8, max_distance=30)', value='ValueResidual()')),
    ('kernel', dict(ffn='geglu', parallel_residual=True, sink_tokens=2), dict(
        similarity='Linear()', normalizer='RowSum(eps=1e-6)', feature_map='EluPlusOne()',
        position='Rope(fraction=0.5, factor=2.0)', mask='Window(size=9)',
        value='ValueResidual(own=0.6, first=0.3, learned=False)', **GATED)),
    ('softpick', dict(ffn='none', linear='sigma_reparam'), dict(
        similarity='Softpick()', normalizer='AbsSum()', kv_bias='SinkLogit()',
        position='Llama3Rope(base=100.0, original_length=64)')),
    ('clipped', dict(norm_location='protected', layers=4, pattern=(
        Layer(mask=Window(size=4)), Layer(position=sj.Rope(base=50.0)))), dict(
            normalizer='Clipped(low=-0.02, high=1.1)', qk_norm='QKNorm(eps=0.01)',
            position='YarnRope(base=100.0, original_length=16, factor=4.0)',
            kv_bias='ZeroSink(n=2.0)', temperature='LogLength(learned=False, scale=0.3)')),
    ('powers', dict(sink_tokens=1), dict(
        normalizer='PNorm(p=0.5)', position='Nope()',
        head='ElementGate(source="slice")')),
    ('floor', {}, dict(normalizer='AbsFloor(floor=5.0)', position='Relative(decreasing=True)',
                       kv_bias='KBias(shared=True, value="uniform")',
                       head='ElementGate(opening=0.7)')),
    ('softmax', dict(layers=2), {}))}


def case_of(name):
  """(class, run) of a case."""
  target, options, components = CASES[name]
  return target, run_of(options, **components)


def tokens_of(run, count=2, length=14):
  """Token ids (count, length), int32."""
  return np.random.default_rng(1).integers(run.config.vocab_size, size=(count, length),
                                           dtype=np.int32)


def exported(case, folder):
  """config.json of a case that is written to a folder."""
  target, run = case_of(case)
  hf, _ = export_checkpoint(run, folder, context=64, sink_id=SINK_ID,
                            target='custom' if target == 'custom' else None)
  assert hf['model_type'] == ('sink_jax' if target == 'custom' else target)
  return hf


def with_sink(run, tokens):
  """The tokens as the exported model reads them."""
  sinks = np.full((len(tokens), run.config.sink_tokens), SINK_ID, np.int32)
  return np.concatenate([sinks, tokens], 1)
