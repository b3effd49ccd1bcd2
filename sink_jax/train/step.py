"""The compiled training and validation steps, and their layout on the mesh."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh
from jax.typing import ArrayLike

from sink_jax.data.batches import Batch
from sink_jax.kernels.shard import axis_size, mesh_context, sum_over_axis
from sink_jax.models.config import ModelConfig
from sink_jax.models.layers import after_update
from sink_jax.models.sharding import batch_sharding, replicated, state_shardings
from sink_jax.models.transformer import init_params
from sink_jax.train.loss import summed_loss, training_weights
from sink_jax.train.optimizer import OptimizerConfig, make_optimizer, trained_part, with_trained

Params: TypeAlias = Mapping[Any, Any]  # dicts of dicts of arrays, as Flax has them
Metrics: TypeAlias = dict[str, jax.Array]  # 'loss', 'grad_norm' and others, float32 scalars

# The most compiled programs of each kind that a process keeps. The functions that make them are
# cached by their arguments, so that trials of a sweep that differ only in their seed trace and
# compile them once.
_PROGRAMS = 8


class TrainState(NamedTuple):
  """All that an update reads and writes, and all that a checkpoint holds.

  step: updates done, int32. opt_state: the state of `make_optimizer`.
  """

  step: jax.Array
  params: Params
  opt_state: optax.OptState


@functools.lru_cache(_PROGRAMS)
def state_layout(config: ModelConfig, optimizer: OptimizerConfig, mesh: Mesh) -> TrainState:
  """The state as shapes with shardings: what a checkpoint is restored into."""
  shapes = jax.eval_shape(lambda: _first_state(optimizer, init_params(config, 0)))
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    shapes,
    state_shardings(mesh, shapes),
  )


def batch_layout(config: ModelConfig, batch_size: int, context: int, mesh: Mesh) -> Batch:
  """A batch as shapes with shardings, as `state_layout`: what a step is traced for."""

  def array(dtype: jax.typing.DTypeLike, *features: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
      (batch_size, context, *features), dtype, sharding=batch_sharding(mesh)
    )

  if config.vocab_size:
    return Batch._make([array(jnp.int32), array(jnp.int32), array(jnp.float32)])
  return Batch._make(
    [
      array(jnp.float32, config.input_features),
      array(jnp.float32, config.output_features),
      array(jnp.float32),
    ]
  )


def init_state(
  config: ModelConfig, optimizer: OptimizerConfig, seed: int, mesh: Mesh
) -> TrainState:
  """A fresh state; each device computes the part of it that it will hold."""
  # The seed is an argument of the program, so that runs that differ only in it share the program.
  return _compiled_init(config, optimizer, mesh)(jnp.int32(seed))


@functools.lru_cache(_PROGRAMS)
def _compiled_init(
  config: ModelConfig, optimizer: OptimizerConfig, mesh: Mesh
) -> jax.stages.Wrapped:
  # With the shardings of the outputs each device draws only its part, so the model need not fit one
  # device. JAX's random numbers are partitionable, so a parameter does not depend on the mesh.
  return jax.jit(
    lambda seed: _first_state(optimizer, init_params(config, seed)),
    out_shardings=_shardings(config, optimizer, mesh),
  )


def _shardings(config: ModelConfig, optimizer: OptimizerConfig, mesh: Mesh) -> TrainState:
  return jax.tree.map(lambda x: x.sharding, state_layout(config, optimizer, mesh))


def _first_state(optimizer: OptimizerConfig, params: Params) -> TrainState:
  # Any learning rate would do: the state holds moments and counts.
  opt_state = make_optimizer(optimizer, 0.0).init(trained_part(optimizer, params))
  return TrainState(jnp.zeros((), jnp.int32), params, opt_state)


def state_of_params(
  params: Params, config: ModelConfig, optimizer: OptimizerConfig, mesh: Mesh
) -> TrainState:
  """The state of a run that begins with these parameters, which are donated.

  params: float32, laid out over the mesh as `state_layout` has them.
  """
  return jax.jit(
    functools.partial(_first_state, optimizer),
    donate_argnums=0,
    out_shardings=_shardings(config, optimizer, mesh),
  )(params)


@functools.lru_cache(_PROGRAMS)
def make_train_step(
  config: ModelConfig,
  optimizer: OptimizerConfig,
  mesh: Mesh,
  microbatches: int = 1,
  *,
  loss_logits: int | None = None,
  gradient_dtype: str = 'float32',
) -> jax.stages.Wrapped:
  """Returns jitted `update(state, batch, rate) -> (state, metrics)`; the state is donated.

  The loss is the weighted mean over the batch. With microbatches, gradients are summed over equal
  slices of the batch, each divided by the weight of the batch. How the devices of the mesh add them
  up:

    over 'data': once in a step, after the last micro-batch, in `gradient_dtype`. The products of
      the backward pass are in the dtype of the model; their sums are float32.
    over 'fsdp': after each micro-batch, whose gradients are reduce-scattered into a sum that is
      split as the parameters are, in the dtype of the products; an unsplit sum would need the
      memory of all parameters.

  rate: the learning rate of this update, an argument, so that runs that differ in it or in the
    schedule share an entry of JAX's compilation cache. loss_logits: most logits at a time on a
    device, see `cross_entropy`.
  metrics: 'loss', the cross-entropy, and 'grad_norm' (before clipping, of what is trained), float32
    scalars.
  """
  gradients = _gradients(config, optimizer, microbatches, loss_logits, gradient_dtype)

  @mesh_context(mesh)
  def update(state: TrainState, batch: Batch, rate: ArrayLike) -> tuple[TrainState, Metrics]:
    # A batch whose weights are all 0 has loss 0 and no gradient; 0 / 0 would be NaN, and end the
    # run as diverged.
    total = jnp.maximum(jnp.sum(training_weights(batch.weights, config)), 1)
    if axis_size('data') == 1:
      value, grads = gradients((state.params, total), batch)
    else:
      # Each device of 'data' computes the gradients of its sequences, and they are summed
      # afterwards: XLA would sum in the dtype of the products of the backward pass.
      value, grads = sum_over_axis('data', gradients, (state.params, total), batch)
    trained = trained_part(optimizer, state.params)
    grads = jax.tree.map(lambda x, p: x.astype(p.dtype), grads, trained)
    updates, opt_state = make_optimizer(optimizer, rate).update(grads, state.opt_state, trained)
    params = with_trained(state.params, optax.apply_updates(trained, updates))
    if config.linear == 'sigma_reparam':
      params = with_trained(params, trained_part(optimizer, after_update(params)))
    metrics = {'loss': value, 'grad_norm': optax.tree.norm(grads)}
    return TrainState(state.step + 1, params, opt_state), metrics

  state_sharding = _shardings(config, optimizer, mesh)
  # The new state has the old one's shapes and shardings, so XLA writes it into the old one's
  # memory: without donation a device would hold parameters and both moments twice. The caller must
  # not use the old state again. Metrics are replicated: every process reads them.
  return jax.jit(
    update,
    donate_argnums=0,
    in_shardings=(state_sharding, batch_sharding(mesh), replicated(mesh)),
    out_shardings=(state_sharding, replicated(mesh)),
  )


def _gradients(
  config: ModelConfig,
  optimizer: OptimizerConfig,
  microbatches: int,
  loss_logits: int | None,
  gradient_dtype: str,
) -> Callable[..., Any]:
  """Returns `gradients((params, weight of the batch), batch) -> (loss, gradients)` of a device."""

  def value_and_grads(params: Params, total: jax.Array, batch: Batch) -> tuple[jax.Array, Params]:
    # Divided by the weight of the batch, not of the slice: sequences weigh differently, and a
    # mean of the slices' means would be another loss. Gradients are computed only for the
    # parameters that are trained.
    def loss(trained: Params) -> jax.Array:
      weights = training_weights(batch.weights, config)
      return summed_loss(config, with_trained(params, trained), batch, weights, loss_logits) / total

    return jax.value_and_grad(loss)(trained_part(optimizer, params))

  def accumulated(whole: tuple[Params, jax.Array], batch: Batch) -> tuple[jax.Array, Params]:
    if microbatches == 1:
      return value_and_grads(*whole, batch)
    # Every slice takes every m-th sequence, so that each stays spread over the devices: slices of
    # neighbours would lie on a few devices, and the others would wait.
    slices = jax.tree.map(
      lambda x: jnp.moveaxis(
        x.reshape(x.shape[0] // microbatches, microbatches, *x.shape[1:]), 1, 0
      ),
      batch,
    )
    # The sums are float32, as the parameters are: in bfloat16 the gradients of later slices would
    # be rounded away next to the sum of the earlier ones.
    zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, trained_part(optimizer, whole[0]))
    add = lambda sums, slice: (jax.tree.map(jnp.add, sums, value_and_grads(*whole, slice)), None)
    return jax.lax.scan(add, zeros, slices)[0]

  def gradients(whole: tuple[Params, jax.Array], batch: Batch) -> tuple[jax.Array, Params]:
    value, grads = accumulated(whole, batch)
    return value, jax.tree.map(lambda x: x.astype(gradient_dtype), grads)

  return gradients


@functools.lru_cache(_PROGRAMS)
def make_validation_step(
  config: ModelConfig, mesh: Mesh | AbstractMesh | None, *, loss_logits: int | None = None
) -> jax.stages.Wrapped:
  """Returns jitted `losses(params, batch) -> (sum of weighted losses, sum of weights)`.

  The blocks are looped over for any `config.unroll`: without a backward pass a loop copies no
  activations, and it compiles faster.

  Args:
    mesh: None for parameters on one device, such as those of `load_run`.
  """
  config = dataclasses.replace(config, unroll=1)

  @mesh_context(mesh)
  def losses(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
    # Sums and not their ratio: the caller adds batches up before it divides, since the last batch
    # may be filled up with sequences of weight 0. Training has other weights: it
    # drops the targets inside a prefix.
    return (summed_loss(config, params, batch, batch.weights, loss_logits), jnp.sum(batch.weights))

  # Replicated, so that every process can read the sums. Without a mesh they stay on the device of
  # the parameters.
  return jax.jit(losses, out_shardings=replicated(mesh) if mesh else None)
