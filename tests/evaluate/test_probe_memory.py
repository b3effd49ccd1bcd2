"""Probing a model takes memory that is linear in the length of the inputs."""

import jax
import jax.numpy as jnp

import sink_jax as sj
from sink_jax.evaluate.activations import query_key_angles
from sink_jax.models.config import Experts, Layer, Mamba
from sink_jax.models.record import largest_logit, last_row
from sink_jax.models.run import record
from sink_jax.models.sizes import parameter_shapes

# Blocks of every kind: what is quadratic in one of them would be the largest part of all.
CONFIG = sj.ModelConfig(
  layers=3,
  d_model=32,
  heads=2,
  kv_heads=1,
  ffn_hidden=64,
  vocab_size=64,
  dtype='float32',
  attention=sj.AttentionSpec(position='Nope()', kv_bias='SinkLogit()'),
  pattern=(
    Layer(),
    Layer(mask=sj.Window(128), experts=Experts(4, 2)),
    Layer(mamba=Mamba(64, 8, 4, 4)),
  ),
)


def test_memory_is_linear_in_the_length():
  def measured(seen):
    return query_key_angles(seen), last_row(seen), largest_logit(seen)

  length = 16384
  tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
  options = sj.RecordOptions(attention=measured)
  compiled = record.lower(CONFIG, options, None, parameter_shapes(CONFIG), tokens).compile()

  # The map of one head would have 4 * length^2 bytes, and its mask length^2.
  assert compiled.memory_analysis().temp_size_in_bytes < length**2 / 2
