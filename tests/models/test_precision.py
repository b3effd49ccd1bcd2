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
from tests.random_params import tiny, tiny_config

TOKENS = jax.ShapeDtypeStruct((2, 8), jnp.int32)
POLICY = sj.CachePolicy(size=6, sinks=1)


def logits(config):
  return run.logits.lower(config, None, parameter_shapes(config), TOKENS)


def record(config):
  functions = maps, last_row, queries_keys, largest_logit, query_key_angles
  every = RecordOptions(attention=lambda seen: [f(seen) for f in functions], hidden=states)
  # Some of what can be recorded is float32 in any dtype.
  options = every if config.dtype == 'float32' else RecordOptions()
  config = probed(config, config.dtype)
  return run.record.lower(config, options, None, parameter_shapes(config), TOKENS)


def begin(config):
  return generate._begin.lower(config, None, POLICY, parameter_shapes(config), TOKENS)


def sample(config):
  return read(config, generate.Sampling(), 1)


def score(config):
  return read(config, None, 4)


def read(config, sampling, together):
  state = jax.eval_shape(lambda: empty_state(config, POLICY, 2))
  given, counts = jax.ShapeDtypeStruct((2, 4), jnp.int32), jnp.zeros(2, jnp.int32)
  return generate._read.lower(
    config,
    None,
    POLICY,
    parameter_shapes(config),
    sampling,
    together,
    (jnp.zeros((2, 32)), state),
    jax.random.key(0),
    0,
    given,
    counts,
  )


def precisions(lowered):
  """The precisions of all matrix products in a program."""
  products = [line for line in lowered.as_text().splitlines() if 'dot_general' in line]
  assert len(products) > 5
  found = [re.search(r'precision = \[(\w+), (\w+)\]', line) for line in products]
  return {word for match in found for word in (match.groups() if match else ['DEFAULT'])}


def attention(**components):
  return dict(attention=sj.AttentionSpec(**components))


JAMBA = (Layer(mamba=Mamba(inner=16, state=4, conv=2, rank=2)), Layer(experts=Experts(2, 1)))


@pytest.mark.parametrize(
  'program, options',
  [
    (logits, attention(similarity='Sigmoid()', normalizer='Unnormalized()')),
    (record, attention(kv_bias='KVBias()') | dict(implementation='reference')),
    (record, dict(pattern=JAMBA, combine_heads='add')),
    (begin, attention(similarity='Linear()', normalizer='AbsFloor()') | dict(sink_tokens=1)),
    (sample, {}),
    (score, {}),
  ],
)
def test_products_of_float32_are_float32_on_every_device(program, options):
  config = lambda dtype: dataclasses.replace(tiny_config(**options), dtype=dtype)
  assert precisions(program(config('float32'))) == {'HIGHEST'}
  assert precisions(program(config('bfloat16'))) == {'DEFAULT'}


def test_it_neither_leaks_nor_compiles_a_model_twice():
  model, tokens = tiny(), jnp.zeros((2, 8), jnp.int32)
  before = run.record._cache_size()
  sj.probe(model, tokens)
  model.record(tokens, PROBE_OPTIONS)
  assert run.record._cache_size() == before + 1
  assert jax.config.jax_default_matmul_precision is None
  square = jnp.zeros((4, 4))
  assert 'HIGHEST' not in jax.jit(jnp.matmul).lower(square, square).as_text()
