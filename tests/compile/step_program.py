"""Training steps to be counted: as a run compiles them, but for devices that are not here.

python -P tests/compile/step_program.py STEP FOLDER, with the tree to be measured in PYTHONPATH,
compiles a step and writes its text and memory into the folder. STEP is the JSON of a `Step`.
Trees as old as 877ade5 are understood.
"""

import contextlib
import dataclasses
import json
import pathlib
import sys
import time
from unittest import mock

import jax
import jax.numpy as jnp

from sink_jax.data.batches import Batch
from sink_jax.kernels import dispatch
from sink_jax.kernels.shard import mesh_context
from sink_jax.models.config import ModelConfig
from sink_jax.models.sizes import SIZES, sized
from sink_jax.plan import compiler
from sink_jax.train import loss
from sink_jax.train.optimizer import OptimizerConfig
from sink_jax.train.sharding import batch_sharding, make_mesh
from sink_jax.train.step import make_train_step, state_layout
from tests.compile import targets

try:
  from sink_jax.train import defaults
  from sink_jax.train.optimizer import peak_rates
except ImportError:  # 877ade5 chooses nothing, and the schedule is a part of its program
  defaults = peak_rates = None


@dataclasses.dataclass(frozen=True)
class Step:
  """A step of the 60M model, or of its first layers.

  where: 'h200', or a slice of TPUs such as 'v5e:4x4', all of whose devices split the batch.
  sequences: of a device in a micro-batch, of `length` tokens.
  part: 'step', or 'loss' for the cross-entropy and its gradients alone.
  """

  where: str
  sequences: int
  layers: int = 10
  vocab: int = 50432
  length: int = 2048
  microbatches: int = 1
  part: str = 'step'

  @property
  def platform(self) -> str:
    """The platform of the devices, 'cuda' or 'tpu'."""
    return 'cuda' if self.where == 'h200' else 'tpu'

  @property
  def blocks(self) -> int:
    """FLOPs of a device in matrix products with the parameters of the blocks."""
    per_layer = 4 * D_MODEL**2 + 3 * D_MODEL * SIZES['60m']['ffn_hidden']
    return 0 if self.part == 'loss' else 6 * self._tokens * self.layers * per_layer

  @property
  def unembedding(self) -> int:
    """FLOPs of a device in matrix products with the unembedding."""
    return 6 * self._tokens * D_MODEL * self.vocab

  @property
  def _tokens(self):
    return self.microbatches * self.sequences * self.length


D_MODEL = SIZES['60m']['d_model']


def compile_step(step: Step) -> jax.stages.Compiled:
  """The compiled program of a step."""
  if step.where == 'h200':
    devices = targets.topology_devices('h200')[:1]
  else:
    devices = compiler.topology_devices(step.where)
  mesh = make_mesh(devices=devices)
  rows = step.sequences * step.microbatches * len(devices)
  one = lambda dtype, *more: jax.ShapeDtypeStruct((rows, step.length, *more), dtype,
                                                  sharding=batch_sharding(mesh))
  tokens, weights = one(jnp.int32), one(jnp.float32)
  if step.part == 'loss':
    kernel = jax.ShapeDtypeStruct((D_MODEL, step.vocab), jnp.float32)
    f = jax.jit(mesh_context(mesh)(jax.value_and_grad(loss.cross_entropy, (0, 1))))
    arguments = one(jnp.bfloat16, D_MODEL), kernel, tokens, weights
  else:
    model, optimizer = _model(step), OptimizerConfig()
    batch = Batch(tokens, tokens, weights)
    f, arguments = _train_step(model, optimizer, mesh, step.microbatches, batch)
  with contextlib.ExitStack() as stack:
    for module in (dispatch, loss):
      if hasattr(module, 'platform'):
        stack.enter_context(mock.patch.object(module, 'platform', lambda: step.platform))
    if peak_rates is None:  # it made splash's masks by what does not work within a shard_map
      stack.enter_context(
          mock.patch.object(jax, 'ensure_compile_time_eval', jax.core.eval_context))
    if step.where == 'h200':
      return targets.compile_for('h200', f, *arguments)
    return compiler.compile_lowered(f.lower(*arguments))


def _model(step: Step) -> ModelConfig:
  """The model, with what a run chooses for the platform; cuDNN's attention needs a GPU here."""
  model = sized('60m', vocab_size=step.vocab, layers=step.layers,
                implementation='pallas' if step.where == 'h200' else None)
  if defaults is None:
    return model
  load_type = getattr(defaults, 'DeviceLoad', None) or defaults.Share  # its name in older trees
  load = load_type(step.platform, None, step.sequences * step.length)
  return defaults.with_defaults(model, load, remat='none', unroll=None)


def _train_step(model, optimizer, mesh, microbatches, batch):
  rates = ()
  if peak_rates is None:
    from sink_jax.train.optimizer import make_optimizer
    optimizer = make_optimizer(optimizer, 1000)
  else:
    rates = peak_rates(optimizer),
  return make_train_step(model, optimizer, mesh, microbatches), (
      state_layout(model, optimizer, mesh), batch, *rates)


def main():
  step, folder = Step(**json.loads(sys.argv[1])), pathlib.Path(sys.argv[2])
  began = time.monotonic(), time.process_time()
  compiled = compile_step(step)
  spent = {'compile_seconds': time.monotonic() - began[0],
           'compile_cpu_seconds': time.process_time() - began[1]}
  (folder / 'program.txt').write_text(compiled.as_text())
  (folder / 'memory.json').write_text(json.dumps(
      {'temporaries': targets.memory(compiled).temporaries, **spent, 'jax': jax.__version__}))


if __name__ == '__main__':
  main()
