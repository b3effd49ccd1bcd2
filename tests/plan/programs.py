"""Small programs compiled for 8 simulated devices, whose traffic is known; prints JSON."""

import json
import os
import sys

os.environ['XLA_FLAGS'] = ('--xla_force_host_platform_device_count=8 '
                           '--xla_backend_optimization_level=0')
os.environ['JAX_PLATFORMS'] = 'cpu'

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from sink_jax.models.config import ModelConfig
from sink_jax.models.sizes import parameter_count
from sink_jax.plan import interconnect
from sink_jax.plan.hlo_cost import read
from sink_jax.train.optimizer import OptimizerConfig, peak_rates
from sink_jax.train.step import batch_layout, make_train_step, state_layout

LAYERS, D, ROWS = 5, 64, 16


def mesh(*sizes):
  return jax.make_mesh(sizes, ('data', 'fsdp', 'tensor'), axis_types=(AxisType.Auto,) * 3)


def scanned(where, weights):
  """Gradient of LAYERS products h = h W, with the weights split as said."""
  over = lambda *axes: NamedSharding(where, PartitionSpec(*axes))
  w = jax.ShapeDtypeStruct((LAYERS, D, D), jnp.float32, sharding=over(*weights))
  h = jax.ShapeDtypeStruct((ROWS, D), jnp.float32, sharding=over(('data', 'fsdp')))
  loss = lambda w, h: jnp.sum(jax.lax.scan(
      lambda h, w: (jax.lax.with_sharding_constraint(jnp.tanh(h @ w), over(('data', 'fsdp'))),
                    None), h, w)[0])
  return jax.jit(jax.grad(loss), out_shardings=over(*weights)).lower(w, h).compile().as_text()


def training_step(where, microbatches=1, dtype='float32'):
  config = ModelConfig(layers=3, d_model=16, heads=2, ffn_hidden=24, vocab_size=32,
                       dtype=dtype, implementation='reference')
  optimizer = OptimizerConfig()
  step = make_train_step(config, optimizer, where, microbatches)
  return parameter_count(config), step.lower(
      state_layout(config, optimizer, where), batch_layout(config, 8 * microbatches, 12, where),
      peak_rates(optimizer)).compile().as_text()


def described(text, where):
  program = read(text)
  return {'products': program.matmul_flops, 'unknown': program.unknown_loops,
          'bytes': program.bytes,
          'collectives': [dict(kind=c.kind, payload=c.payload, moved=c.moved, count=c.count,
                               axes=interconnect.axes_of(c, where)) for c in program.collectives]}


data, split = mesh(8, 1, 1), mesh(2, 4, 1)
parameters, step = training_step(data)
json.dump({'data': described(scanned(data, (None, None, None)), data),
           'fsdp': described(scanned(split, (None, 'fsdp', None)), split),
           'step': described(step, data), 'parameters': parameters,
           'slices': described(training_step(data, 4)[1], data),
           'split slices': described(training_step(split, 4, 'bfloat16')[1], split)}, sys.stdout)
