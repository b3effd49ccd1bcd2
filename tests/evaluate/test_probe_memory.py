"""Probing a model takes memory that is linear in the length of the inputs."""

import jax
import jax.numpy as jnp
import pytest

import sink_jax as sj
from sink_jax.evaluate.activations import query_key_angles
from sink_jax.models.config import Experts, Layer, Mamba
from sink_jax.models.record import largest_logit, last_row
from sink_jax.models.run import record
from sink_jax.models.sizes import parameter_shapes

LENGTHS = 4096, 16384
SMALL = dict(layers=4, d_model=32, heads=2, ffn_hidden=64, vocab_size=64, dtype='float32')


def temporary_bytes(config, recorded, length):
  tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
  compiled = record.lower(config, recorded, None, parameter_shapes(config), tokens).compile()
  return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.every(3)
@pytest.mark.parametrize(
  'options',
  [
    dict(kv_heads=1),
    dict(
      attention=sj.AttentionSpec(kv_bias='SinkLogit()'),
      pattern=(Layer(mask=sj.Window(128), experts=Experts(4, 2)), Layer(experts=Experts(4, 2))),
    ),
    dict(
      attention=sj.AttentionSpec(position='Nope()'),
      pattern=(Layer(mamba=Mamba(64, 8, 4, 4)), Layer()),
    ),
  ],
)
def test_memory_is_linear_in_the_length(options):
  recorded = sj.RecordOptions(
    attention=lambda seen: (query_key_angles(seen), last_row(seen), largest_logit(seen))
  )
  config = sj.ModelConfig(**SMALL | options)
  short, long = (temporary_bytes(config, recorded, length) for length in LENGTHS)
  # For four times the tokens, linear memory grows four times, and quadratic memory sixteen times.
  assert long / short < 5
  # One head's map of the longer text would take a gigabyte.
  assert long < 16384**2 * 4 / 4


def test_maps_are_what_is_quadratic():
  config = sj.ModelConfig(**SMALL)
  record = sj.RecordOptions(attention=sj.maps)
  short, long = (temporary_bytes(config, record, length) for length in (512, 2048))
  assert long / short > 10
