"""A model whose matrices are held in 16 bits: a device converts those of one block at a time."""

import functools
import math

import jax
import jax.numpy as jnp

from sink_jax.models.arrays import precise
from sink_jax.models.layers import apply
from sink_jax.models.sizes import parameter_shapes, sized
from sink_jax.models.transformer import Transformer
from tests.compile import targets


def test_a_program_holds_one_block_in_float32(target):
  """XLA could convert the stacked matrices of all blocks before the loop over them."""
  model = sized('60m', vocab_size=512, dtype='float32', implementation='chunked', layers=16)

  def logits(params, tokens):
    with precise('float32'):
      return apply(Transformer(model), params, tokens)

  def needs(dtype):
    def held(path, x):
      name = jax.tree_util.keystr(path, simple=True, separator='/')
      large = name.endswith('kernel') or name == 'embed'
      return jax.ShapeDtypeStruct(x.shape, dtype if large else 'float32')

    params = jax.tree_util.tree_map_with_path(held, parameter_shapes(model))
    tokens = jax.ShapeDtypeStruct((1, 128), jnp.int32)
    return targets.memory(targets.compile_for(target, logits, params, tokens))

  stored, float32 = needs('bfloat16'), needs('float32')
  assert stored.arguments < 0.51 * float32.arguments
  sizes = jax.tree.leaves(parameter_shapes(model)['blocks'])
  block = functools.reduce(lambda total, x: total + math.prod(x.shape), sizes, 0) // 16 * 4
  assert stored.temporaries - float32.temporaries < 2 * block
