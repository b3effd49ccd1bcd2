"""Matrix products of models under analysis are float32 if their activations are float32."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

import sink_jax as sj
from sink_jax.evaluate.activations import query_key_angles
from sink_jax.evaluate.probe import PROBE_OPTIONS, probed
from sink_jax.models import generate, run
from sink_jax.models.config import Experts, Layer, Mamba
from sink_jax.models.decode import empty_state
from sink_jax.models.record import (
  RecordOptions,
  largest_logit,
  last_row,
  maps,
  queries_keys,
  states,
)
from sink_jax.models.sizes import parameter_shapes

CONFIG = sj.ModelConfig(layers=2, d_model=16, heads=2, ffn_hidden=24, vocab_size=11)
TOKENS = jax.ShapeDtypeStruct((2, 8), jnp.int32)
POLICY = sj.CachePolicy(size=6, sinks=1)


def logits(config):
  return run.logits.lower(config, None, parameter_shapes(config), TOKENS)


def record(config, options):
  return run.record.lower(config, options, None, parameter_shapes(config), TOKENS)


def begin(config):
  return generate._begin.lower(config, None, POLICY, parameter_shapes(config), TOKENS)


def read(config, together):
  carry = jnp.zeros((2, 11)), jax.eval_shape(lambda: empty_state(config, POLICY, 2))
  return generate._read.lower(
    config,
    None,
    POLICY,
    parameter_shapes(config),
    generate.Sampling() if together == 1 else None,
    together,
    carry,
    jax.random.key(0),
    0,
    jax.ShapeDtypeStruct((2, 4), jnp.int32),
    jnp.zeros(2, jnp.int32),
  )


def precisions(lowered):
  """The precisions of all matrix products in a program."""
  products = [line for line in lowered.as_text().splitlines() if 'dot_general' in line]
  assert len(products) > 5
  found = [re.search(r'precision = \[(\w+), (\w+)\]', line) for line in products]
  return {word for match in found for word in (match.groups() if match else ['DEFAULT'])}


@pytest.mark.every(3)
@pytest.mark.parametrize(
  'program',
  [
    logits,
    lambda config: record(config, RecordOptions()),
    begin,
    lambda config: read(config, 1),
    lambda config: read(config, 4),
  ],
)
def test_products_of_float32_are_float32_on_every_device(program):
  config = lambda dtype: dataclasses.replace(CONFIG, dtype=dtype)
  assert precisions(program(config('float32'))) == {'HIGHEST'}
  assert precisions(program(config('bfloat16'))) == {'DEFAULT'}


@pytest.mark.every(2)
@pytest.mark.parametrize(
  'options',
  [
    dict(attention=sj.AttentionSpec('Sigmoid()', 'Unnormalized()'), implementation='chunked'),
    dict(attention=sj.AttentionSpec(kv_bias=sj.KVBias()), implementation='reference'),
    dict(attention=sj.AttentionSpec(similarity='Linear()', normalizer='AbsFloor()'), sink_tokens=1),
    dict(
      pattern=(
        Layer(mamba=Mamba(inner=16, state=4, conv=2, rank=2)),
        Layer(experts=Experts(count=2, active=1)),
      ),
      combine_heads='add',
    ),
  ],
  ids=['sigmoid', 'reference', 'linear', 'jamba'],
)
def test_so_are_those_of_the_variants_and_of_all_that_is_recorded(options):
  config = dataclasses.replace(CONFIG, **options)
  functions = maps, last_row, queries_keys, largest_logit, query_key_angles
  every = RecordOptions(attention=lambda seen: [f(seen) for f in functions], hidden=states)
  assert precisions(record(probed(config, 'float32'), every)) == {'HIGHEST'}
  assert precisions(record(probed(config, 'bfloat16'), RecordOptions())) == {'DEFAULT'}


def test_it_neither_leaks_nor_compiles_a_model_twice():
  model = sj.Run(
    dataclasses.replace(CONFIG, dtype='float32'),
    jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), parameter_shapes(CONFIG)),
  )
  tokens = jnp.zeros((2, 8), jnp.int32)
  before = run.record._cache_size()
  sj.probe(model, tokens)
  model.record(tokens, PROBE_OPTIONS)
  assert run.record._cache_size() == before + 1
  assert jax.config.jax_default_matmul_precision is None
  square = jnp.zeros((4, 4))
  assert 'HIGHEST' not in jax.jit(jnp.matmul).lower(square, square).as_text()
