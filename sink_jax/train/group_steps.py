"""Steps of a group of trials that share a program: one compiled loop takes them all along.

What a group's arrays have first, G, are its slots: a trial keeps its slot and the group its width
for as long as it trains, so that the program stays the same and with it every bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sink_jax.data.batches import Batch
from sink_jax.kernels.shard import mesh_context
from sink_jax.models.config import ModelConfig
from sink_jax.train.optimizer import OptimizerConfig, Rates
from sink_jax.train.sharding import replicated
from sink_jax.train.step import batch_layout, make_update, state_layout

STEPS = 50  # most of a call
_INPUT_BYTES = 2**28  # of a call, at most; but one step in any case


class Inputs(NamedTuple):
  """What S steps of a group read, of which a call takes some.

  given: rows of the corpus (S, G, B) int32, or a Batch of (S, G, B, T) where there is none.
  rates: Rates of (S, G) float32. active: the slots that take part in a step (S, G) bool.
  """

  given: Any
  rates: Rates
  active: Any


def compiled_group_steps(job, width: int, corpus):
  """The program of a group, compiled; its slots share what `loss_logits` allows a device.

  job: the `loop.Job` of any of its trials. corpus: None, or an array of the shape and type.
  """
  experiment, mesh = job.experiment, job.mesh
  steps = make_group_steps(job.model, experiment.optimizer, mesh, experiment.microbatches,
                           loss_logits=max(1, experiment.loss_logits // width))
  shape = lambda sizes, dtype: jax.ShapeDtypeStruct(sizes, dtype, sharding=replicated(mesh))
  states = jax.tree.map(lambda x: shape((width, *x.shape), x.dtype),
                        state_layout(job.model, experiment.optimizer, mesh))
  inputs = jax.tree.map(lambda x: shape(x.shape, x.dtype), empty_inputs(job, width, corpus))
  corpus = None if corpus is None else shape(corpus.shape, corpus.dtype)
  return steps.lower(states, corpus, inputs, shape((), jnp.int32)).compile()


def compiled_stack_and_slice(job, width: int):
  """(`stack(*states) -> states of (G, ...)`, `slice(states, slot) -> state`), compiled.

  A state is as `init_state` lays it out; slot: int32. Nothing is put on the device.
  """
  whole, layout = replicated(job.mesh), state_layout(
      job.model, job.experiment.optimizer, job.mesh)
  stacked = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct((width, *x.shape), x.dtype, sharding=whole), layout)
  stack = jax.jit(lambda *slots: jax.tree.map(lambda *xs: jnp.stack(xs), *slots),
                  out_shardings=whole)
  one = jax.jit(lambda states, slot: jax.tree.map(lambda x: x[slot], states),
                out_shardings=jax.tree.map(lambda x: x.sharding, layout))
  return (stack.lower(*[layout] * width).compile(),
          one.lower(stacked, jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)).compile())


def empty_inputs(job, width: int, corpus) -> Inputs:
  """Inputs of as many steps as a call can take, with no slot active, on the host."""
  experiment = job.experiment
  batch = batch_layout(job.model, experiment.batch_size, experiment.data.context, job.mesh)
  if corpus is not None:
    batch = jax.ShapeDtypeStruct((experiment.batch_size,), jnp.int32)
  size = width * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(batch))
  count = max(1, min(STEPS, _INPUT_BYTES // size))
  rate = np.zeros((count, width), np.float32)
  given = jax.tree.map(lambda x: np.zeros((count, width, *x.shape), x.dtype), batch)
  return Inputs(given, Rates(rate, rate.copy()), np.zeros((count, width), bool))


def make_group_steps(config: ModelConfig, optimizer: OptimizerConfig, mesh, microbatches: int = 1,
                     *, loss_logits: int | None = None):
  """Returns jitted `steps(states, corpus, inputs, count) -> (states, metrics)`.

  states: TrainStates of (G, ...), donated. corpus: chunks (R, T + 1) of unsigned integers, or
  None. count: how many of the S steps to take; any number runs the same program. loss_logits:
  most logits of a slot at a time.
  metrics: those of `make_update`, (S, G). A slot whose loss or gradient is not finite in an
  active step keeps the state from before it, whatever follows.
  """
  update = mesh_context(mesh)(jax.vmap(make_update(config, optimizer, microbatches,
                                                   loss_logits=loss_logits)))

  def steps(states, corpus, inputs, count):
    def step(i, carry):
      states, alive, metrics = carry
      given, rates, active = jax.tree.map(lambda x: x[i], inputs)
      updated, values = update(states, _batch(corpus, given), rates)
      metrics = jax.tree.map(lambda all_steps, x: all_steps.at[i].set(x), metrics, values)
      finite = jnp.all(jnp.stack([jnp.isfinite(x) for x in values.values()]), 0)
      moved = alive & active & finite
      states = jax.tree.map(lambda new, old: jnp.where(_beside(moved, new), new, old),
                            updated, states)
      return states, alive & (finite | ~active), metrics

    first = jax.tree.map(lambda x: x[0], inputs)
    shapes = jax.eval_shape(update, states, _batch(corpus, first.given), first.rates)[1]
    metrics = jax.tree.map(lambda x: jnp.zeros((inputs.active.shape[0], *x.shape)), shapes)
    alive = jnp.ones(inputs.active.shape[1], bool)
    states, _, metrics = jax.lax.fori_loop(0, count, step, (states, alive, metrics))
    return states, metrics

  return jax.jit(steps, donate_argnums=0)


def _batch(corpus, given):
  """The batches (G, B, ...) of a step."""
  if corpus is None:
    return given
  chunks = corpus[given].astype(jnp.int32)
  return Batch(chunks[..., :-1], chunks[..., 1:], jnp.ones(chunks[..., 1:].shape, jnp.float32))


def _beside(flags_G, x):
  return flags_G.reshape(-1, *[1] * (x.ndim - 1))
