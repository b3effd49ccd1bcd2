"""Runs with random parameters for every row of the table of what is exported, for tests."""

import numpy as np

import sink_jax as sj
from sink_jax.attention.mask import Window
from sink_jax.models.config import Layer
from tests.random_params import random_params

TINY = dict(layers=2, d_model=32, heads=4, kv_heads=2, ffn_hidden=40, vocab_size=64,
            norm_eps=0.003, dtype='float32')


def run_of(options, **components):
  """A run without a parameter that is zero, so that none can be left out unseen."""
  config = sj.ModelConfig(**TINY | options | dict(attention=sj.AttentionSpec(**components)))
  return sj.Run(config, random_params(config), 'case', 5)


SINK_ID = 3  # of a learned sink token, where a case has one
# Name: the class, options of the model, components of its attention.
CASES = {
    'qk_norm': ('qwen3', {}, dict(qk_norm='QKNorm(eps=0.003)')),
    'qk_norm_eps': ('qwen3', dict(tied=True, head_dim=12), dict(qk_norm='QKNorm(eps=1e-6)')),
    'qk_norm_window': ('qwen3', dict(biases=('qkv', 'out')), dict(
        qk_norm='QKNorm(eps=0.01)', mask='Window(size=5)', position='Rope(base=100.0)')),
    'row_scale': ('llama', {}, dict(normalizer='RowSum(scale=3.0)')),
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
        qk_norm='QKNorm(eps=0.003)', head='ElementGate(scale=2.0, start="zero")',
        position='Rope(base=100.0)')),
    'head_gate': ('qwen3_next', dict(tied=True), dict(qk_norm='QKNorm()', head='HeadGate()')),
}


def case_of(name):
  """(class, run) of a case."""
  target, options, components = CASES[name]
  return target, run_of(options, **components)


def tokens_of(run, count=2, length=14):
  """Token ids (count, length), int32."""
  return np.random.default_rng(1).integers(run.config.vocab_size, size=(count, length),
                                           dtype=np.int32)


def with_sink(run, tokens):
  """The tokens as the exported model reads them."""
  sinks = np.full((len(tokens), run.config.sink_tokens), SINK_ID, np.int32)
  return np.concatenate([sinks, tokens], 1)
