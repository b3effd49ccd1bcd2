"""Steps of a group of trials that share a program: one compiled loop takes them all along.

What a group's arrays have as their first axis, G, are its members: a trial keeps its index and the
group its width for as long as it trains, so that the program stays the same and with it every bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sink_jax.data.batches import Batch
from sink_jax.kernels.shard import mesh_context
from sink_jax.models.config import ModelConfig
from sink_jax.train.optimizer import OptimizerConfig, Rates
from sink_jax.train.sharding import replicated
from sink_jax.train.step import Metrics, TrainState, batch_layout, make_update, state_layout

if TYPE_CHECKING:  # which reads data: the benchmark of groups runs without those packages
  from sink_jax.train.prepare import PreparedRun

STEPS = 50  # most of a call
_INPUT_BYTES = 2**28  # of a call, at most; but one step in any case


class GroupInputs(NamedTuple):
  """What S steps of a group read, of which a call takes some; NumPy arrays on the host.

  data: rows of the corpus (S, G, B) int32, or a Batch of (S, G, B, T) where there is none.
  rates: Rates of (S, G) float32. active: the members that take part in a step (S, G) bool.
  """

  data: np.ndarray | Batch
  rates: Rates
  active: np.ndarray


def compiled_group_steps(run: PreparedRun, width: int,
                         corpus: np.ndarray | None) -> jax.stages.Compiled:
  """The program of a group, compiled; its members share what `loss_logits` allows a device.

  Args:
    run: any of its members. corpus: None, or an array of the shape and type of the corpus.
  """
  experiment, mesh = run.experiment, run.mesh
  assert experiment.loss_logits is not None, 'prepare_run chooses it'
  # All members' logits are there at once, as one array: each has its part of the memory.
  steps = make_group_steps(run.model, experiment.optimizer, mesh, experiment.microbatches,
                           loss_logits=max(1, experiment.loss_logits // width))
  shape = lambda sizes, dtype: jax.ShapeDtypeStruct(sizes, dtype, sharding=replicated(mesh))
  states = jax.tree.map(lambda x: shape((width, *x.shape), x.dtype),
                        state_layout(run.model, experiment.optimizer, mesh))
  inputs = jax.tree.map(lambda x: shape(x.shape, x.dtype), empty_inputs(run, width, corpus))
  table = None if corpus is None else shape(corpus.shape, corpus.dtype)
  return steps.lower(states, table, inputs, shape((), jnp.int32)).compile()


def compiled_stack_and_slice(run: PreparedRun,
                             width: int) -> tuple[jax.stages.Compiled, jax.stages.Compiled]:
  """(`stack(*states) -> states of (G, ...)`, `slice(states, index) -> state`), compiled.

  A state is as `init_state` lays it out; index: int32. Nothing is put on the device.
  """
  whole, layout = replicated(run.mesh), state_layout(
      run.model, run.experiment.optimizer, run.mesh)
  stacked = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct((width, *x.shape), x.dtype, sharding=whole), layout)
  stack = jax.jit(lambda *states: jax.tree.map(lambda *xs: jnp.stack(xs), *states),
                  out_shardings=whole)
  slice_one = jax.jit(lambda states, index: jax.tree.map(lambda x: x[index], states),
                      out_shardings=jax.tree.map(lambda x: x.sharding, layout))
  return (stack.lower(*[layout] * width).compile(),
          slice_one.lower(stacked, jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)).compile())


def empty_inputs(run: PreparedRun, width: int, corpus: np.ndarray | None) -> GroupInputs:
  """Inputs of as many steps as a call can take, with no member active, on the host."""
  experiment = run.experiment
  batch = batch_layout(run.model, experiment.batch_size, experiment.data.context, run.mesh)
  if corpus is not None:
    batch = jax.ShapeDtypeStruct((experiment.batch_size,), jnp.int32)
  # Bytes of one step's data for all members, which decide how many steps fit into a call.
  size = width * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(batch))
  count = max(1, min(STEPS, _INPUT_BYTES // size))
  rate = np.zeros((count, width), np.float32)
  data = jax.tree.map(lambda x: np.zeros((count, width, *x.shape), x.dtype), batch)
  # A copy, since both arrays are filled in place.
  return GroupInputs(data, Rates(rate, rate.copy()), np.zeros((count, width), bool))


def make_group_steps(config: ModelConfig, optimizer: OptimizerConfig, mesh: jax.sharding.Mesh,
                     microbatches: int = 1, *,
                     loss_logits: int | None = None) -> jax.stages.Wrapped:
  """Returns jitted `steps(states, corpus, inputs, count) -> (states, metrics)`.

  states: TrainStates of (G, ...), donated. corpus: chunks (R, T + 1) of unsigned integers, or
  None. count: how many of the S steps to take; any number runs the same program. loss_logits:
  most logits of a member at a time.
  metrics: those of `make_update`, (S, G). A member whose loss or gradient is not finite in an
  active step keeps the state from before it, whatever follows.
  """
  update = mesh_context(mesh)(jax.vmap(make_update(config, optimizer, microbatches,
                                                   loss_logits=loss_logits)))

  def steps(states: TrainState, corpus: jax.Array | None, inputs: GroupInputs,
            count: jax.Array) -> tuple[TrainState, Metrics]:
    def step(i: int | jax.Array, carry: tuple[TrainState, jax.Array, Metrics],
             ) -> tuple[TrainState, jax.Array, Metrics]:
      states, alive_G, metrics = carry
      data, rates, active_G = jax.tree.map(lambda x: x[i], inputs)
      updated, values = update(states, _batch(corpus, data), rates)
      metrics = jax.tree.map(lambda all_steps, x: all_steps.at[i].set(x), metrics, values)
      finite_G = jnp.all(jnp.stack([jnp.isfinite(x) for x in values.values()]), 0)
      # An inactive member is computed like the others, and its new state dropped: a program
      # without it would be another one, with other roundings for those that are left.
      moved_G = alive_G & active_G & finite_G
      states = jax.tree.map(lambda new, old: jnp.where(_broadcast(moved_G, new), new, old),
                            updated, states)
      return states, alive_G & (finite_G | ~active_G), metrics

    # The loop carries the metrics of all steps from its beginning, so their shapes are needed
    # before a step has been traced.
    first = jax.tree.map(lambda x: x[0], inputs)
    shapes = jax.eval_shape(update, states, _batch(corpus, first.data), first.rates)[1]
    metrics = jax.tree.map(lambda x: jnp.zeros((inputs.active.shape[0], *x.shape)), shapes)
    alive_G = jnp.ones(inputs.active.shape[1], bool)
    states, _, metrics = jax.lax.fori_loop(0, count, step, (states, alive_G, metrics))
    return states, metrics

  return jax.jit(steps, donate_argnums=0)


def _batch(corpus: jax.Array | None, data: Any) -> Batch:
  """The batches (G, B, ...) of a step."""
  if corpus is None:
    return data
  # The corpus lies on the device once, for all members: a step brings the rows' numbers alone.
  chunks = corpus[data].astype(jnp.int32)
  # A chunk has T + 1 tokens: T inputs, and the token after each as its target. Chunks of a corpus
  # hold no padding, so every target counts.
  weights = jnp.ones(chunks[..., 1:].shape, jnp.float32)
  return Batch._make([chunks[..., :-1], chunks[..., 1:], weights])


def _broadcast(flags_G: jax.Array, x: jax.Array) -> jax.Array:
  return flags_G.reshape(-1, *[1] * (x.ndim - 1))
