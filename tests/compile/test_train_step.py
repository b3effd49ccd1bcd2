"""The complete training step of the paper's models, compiled for all devices of a small slice."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from sink_jax.data.batches import Batch
from sink_jax.models.sizes import sized
from sink_jax.train.optimizer import OptimizerConfig
from sink_jax.models.sharding import batch_sharding
from sink_jax.train.step import make_train_step, state_layout
from tests.compile import targets

LENGTH = 2048


def compile_step(
  target: str,
  size: str,
  sequences: int,
  sizes: tuple[int, int, int],
  remat: str,
  implementation: str = 'pallas',
) -> jax.stages.Compiled:
  """The training step on the devices of the target's topology, for `sequences` sequences in total.

  sizes: (data, fsdp, tensor) of the mesh.
  """
  devices = np.array(targets.topology_devices(target))
  mesh = Mesh(devices.reshape(sizes), ('data', 'fsdp', 'tensor'), axis_types=(AxisType.Auto,) * 3)
  config = sized(size, vocab_size=50432, implementation=implementation, remat=remat)
  optimizer = OptimizerConfig()
  one = lambda dtype: jax.ShapeDtypeStruct(
    (sequences, LENGTH), dtype, sharding=batch_sharding(mesh)
  )
  return targets.compile_for(
    target,
    make_train_step(config, optimizer, mesh),
    state_layout(config, optimizer, mesh),
    Batch(one(jnp.int32), one(jnp.int32), one(jnp.float32)),
    optimizer.learning_rate,
  )


def collectives(compiled: jax.stages.Compiled) -> dict[str, dict[str, int]]:
  """Traffic between devices: {operation: {shape: how often the program has it}}."""
  found = {}
  program = re.sub(r'\{[^{}]*\}|/\*.*?\*/', '', compiled.as_text())
  for shapes, kind in re.findall(
    r'= (\([^()]*\)|\S+) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)'
    r'(?:-start)?\(',
    program,
  ):
    for shape in re.findall(r'\w+\[[^]]*\]', shapes):
      counts = found.setdefault(kind, {})
      counts[shape] = counts.get(shape, 0) + 1
  return found


@pytest.mark.parametrize(
  'size, sequences, sizes, remat',
  [
    pytest.param('60m', 4, (-1, 1, 1), 'none', id='60m'),
    pytest.param('60m', 4, (-1, 2, 2), 'none', id='60m-tensor', marks=pytest.mark.full),
    pytest.param('60m', 16, (-1, 1, 1), 'blocks', id='60m-remat', marks=pytest.mark.full),
    pytest.param('1b', 2, (1, -1, 1), 'blocks', id='1b-remat', marks=pytest.mark.full),
    pytest.param('1b', 2, (-1, 2, 2), 'blocks', id='1b-tensor', marks=pytest.mark.full),
  ],
)
def test_training_fits_the_device(target, size, sequences, sizes, remat):
  """sequences: the number per device, even if a group of devices shares the same ones."""
  devices = len(targets.topology_devices(target))
  compiled = compile_step(target, size, sequences * devices, sizes, remat)
  needed = targets.memory(compiled)
  between = collectives(compiled)
  assert needed.arguments + needed.temporaries < targets.HBM_BYTES[target]
  assert ('triton' if target == 'h200' else 'tpu_custom_call') in compiled.as_text()
  assert 'all-reduce' in between
  if sizes[1:] == (1, 1):  # devices only add up sums: each attends to different sequences
    assert not {'all-gather', 'all-to-all'} & between.keys()
  if sizes[2] > 1:  # only parameters are gathered, and once the gradient of the loss
    assert 'all-to-all' not in between
    activations = {
      shape: n for shape, n in between.get('all-gather', {}).items() if f',{LENGTH},' in shape
    }
    assert sum(activations.values()) <= 1, activations
