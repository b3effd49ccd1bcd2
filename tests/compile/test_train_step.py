"""The whole training step of the paper's models, compiled for all devices of a small slice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from sink_jax.data.batches import Batch
from sink_jax.models.sizes import sized
from sink_jax.train.optimizer import OptimizerConfig, make_optimizer
from sink_jax.train.sharding import batch_sharding
from sink_jax.train.step import make_train_step, state_layout
from tests.compile import targets

LENGTH = 2048


def compile_step(target, size, sequences, split_parameters, remat):
  """The training step on the devices of the target's topology, for `sequences` on each."""
  devices = np.array(targets.topology_devices(target))
  shape = (1, -1) if split_parameters else (-1, 1)
  mesh = Mesh(devices.reshape(shape), ('data', 'fsdp'), axis_types=(AxisType.Auto,) * 2)
  config = sized(size, vocab_size=50432, implementation='pallas', remat=remat)
  optimizer = make_optimizer(OptimizerConfig(), 1000)
  one = lambda dtype: jax.ShapeDtypeStruct(
      (sequences * len(devices), LENGTH), dtype, sharding=batch_sharding(mesh))
  return targets.compile_for(
      target, make_train_step(config, optimizer, mesh), state_layout(config, optimizer, mesh),
      Batch(one(jnp.int32), one(jnp.int32), one(jnp.float32)))


@pytest.mark.parametrize('size, sequences, split_parameters, remat', [
    pytest.param('60m', 4, False, False, id='60m'),
    pytest.param('60m', 16, False, True, id='60m-remat', marks=pytest.mark.full),
    pytest.param('1b', 2, True, True, id='1b-remat', marks=pytest.mark.full),
])
def test_training_fits_the_device(target, size, sequences, split_parameters, remat, note):
  compiled = compile_step(target, size, sequences, split_parameters, remat)
  needed = targets.memory(compiled)
  note(target=target, model=size, sequences=sequences, remat=remat, **{
      f'{name}_gib': round(x / targets.GIB, 2) for name, x in needed._asdict().items()})
  assert needed.arguments + needed.temporaries < targets.HBM_BYTES[target]
  program = compiled.as_text()
  assert ('triton' if target == 'h200' else 'tpu_custom_call') in program
  if not split_parameters:  # devices meet only to add up: each attends to its own sequences
    assert 'all-reduce' in program
    assert 'all-gather' not in program and 'all-to-all' not in program
