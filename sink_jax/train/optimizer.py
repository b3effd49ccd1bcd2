"""The optimizer: an update rule, its schedule, decoupled weight decay and clipping.

The semantics are those of PyTorch's AdamW and clip_grad_norm_, which the official implementation
(sail-sg/Attention-Sink) uses.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from sink_jax.train.update_rule import AdamW, UpdateRule, is_matrix

_BLOCK = 1024  # updates whose learning rates are computed at a time
_CHOICES = {
    'schedule': ('cosine', 'constant'),
    'decay': ('all', 'matrices'),
}


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """Everything of `optimizer` in a config: the rule, the schedule, the decay and the clipping.

  rule: how gradients are made into an update; weight decay is decoupled from it, as in
    PyTorch's AdamW: an update takes lr * weight_decay of every parameter away.
  schedule: after a linear warm-up, 'cosine' down to final_fraction of the learning rate
    after the last step (as the paper has it) or 'constant' (the effect of all configs of the
    official implementation).
  decay: 'all' parameters, embeddings, gains and biases included, as in the official
    implementation; or 'matrices' only, the textbook form: the weights of linear layers and of the
    MLP feature map, not embeddings, gains, k*, v* and sink logits.
  clip: largest global gradient norm; 0 does not clip.
  trained: paths of the parameters that are trained, None for all. It is no key of a config:
    `init.train` decides it.
  """

  rule: UpdateRule = AdamW()
  learning_rate: float = 4e-4
  schedule: str = 'cosine'
  final_fraction: float = 0.1
  warmup_steps: int = 100
  weight_decay: float = 0.1
  decay: str = 'all'
  clip: float = 1.0
  trained: tuple[str, ...] | None = None

  def __post_init__(self):
    for name, allowed in _CHOICES.items():
      if getattr(self, name) not in allowed:
        raise ValueError(f'optimizer.{name} = {getattr(self, name)!r}; choices: '
                         f'{", ".join(allowed)}.')
    if not 0 < self.learning_rate < math.inf:
      raise ValueError(f'optimizer.learning_rate must be > 0 and finite, not {self.learning_rate}.')
    for name in ('warmup_steps', 'weight_decay', 'clip', 'final_fraction'):
      # Written as `not <=`, since NaN fails every comparison, and is thus refused as well.
      if not 0 <= getattr(self, name) < math.inf:
        none = '; 0 does not clip' if name == 'clip' else ''
        raise ValueError(f'optimizer.{name} must be >= 0 and finite, not {getattr(self, name)}'
                         f'{none}.')
    if self.final_fraction > 1:
      raise ValueError('optimizer.final_fraction must be at most 1, the learning rate itself, not '
                       f'{self.final_fraction}.')


class Rates(NamedTuple):
  """What may differ from update to update and from run to run: arguments of the step.

  They are float32 scalars; in the inputs of a group, arrays of them. Runs that differ in them and
  in the seed alone share a compiled program, for they are no constants of it.
  """

  learning_rate: ArrayLike
  weight_decay: ArrayLike  # the decay of an update is this times the learning rate


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
  """Learning rate of update 0, 1, ..., steps - 1.

  The warm-up reaches update s with (s + 1) / warmup_steps of the learning rate. (The official
  implementation raises it with every micro-batch from 0: (s + 1 - 1/m) / warmup_steps with m
  micro-batches.)
  """
  peak, warmup = config.learning_rate, config.warmup_steps
  if config.schedule == 'constant':
    after = optax.constant_schedule(peak)
  else:
    # At least 1: optax refuses a decay of no steps, which a warm-up as long as the run would leave.
    after = optax.cosine_decay_schedule(peak, max(1, steps - warmup), config.final_fraction)
  if not warmup:
    return after
  # From 1 / warmup at update 0 to 1 at update warmup - 1: optax counts the steps between the two.
  warm = optax.linear_schedule(peak / warmup, peak, max(1, warmup - 1))
  return optax.join_schedules([warm, after], [warmup])


def learning_rates(config: OptimizerConfig, steps: int) -> Callable[[int], float]:
  """Returns a function of an update, 0, 1, ..., steps - 1, to its learning rate, on the host.

  The rates are computed a block at a time: a run may have more steps than fit the memory.
  """
  # The schedules are linear in their peak: runs of other learning rates compile nothing new.
  fractions = jax.jit(learning_rate_schedule(dataclasses.replace(config, learning_rate=1.0), steps))

  @functools.lru_cache(2)  # the block of an update, and that of the one before, logged a step late
  def block(number: int) -> np.ndarray:
    # The last block is filled up with the last update, so that all blocks have one shape and one
    # compiled program. A constant schedule returns a single number, hence the broadcast.
    updates = np.minimum(np.arange(_BLOCK) + number * _BLOCK, steps - 1).astype(np.int32)
    return np.broadcast_to(np.asarray(fractions(updates), np.float64), updates.shape)

  def learning_rate(update: int) -> float:
    number, offset = divmod(update, _BLOCK)
    return config.learning_rate * float(block(number)[offset])

  return learning_rate


def peak_rates(config: OptimizerConfig) -> Rates:
  """The learning rate at the peak of the schedule, and the weight decay."""
  return Rates(np.float32(config.learning_rate), np.float32(config.weight_decay))


def compiled_part(config: OptimizerConfig) -> OptimizerConfig:
  """The config without the parts of `Rates`: equal for runs that share a compiled step."""
  return dataclasses.replace(config, learning_rate=1.0, schedule='constant', final_fraction=0.0,
                             warmup_steps=0, weight_decay=0.0)


def make_optimizer(config: OptimizerConfig, rates: Rates) -> optax.GradientTransformation:
  """Clipping, then the update rule with decoupled decay, for one update at these rates.

  The tree of its state does not depend on the rates, which may be traced.
  """
  # The order is PyTorch's: gradients are clipped before they enter the moments, and the decay is of
  # the parameters as they were before the update.
  parts = [optax.clip_by_global_norm(config.clip)] if config.clip else []
  if (scaling := config.rule.transformation()) is not None:
    parts.append(scaling)
  mask = None if config.decay == 'all' else _matrices
  # The rates are arguments of the step, not of a schedule in optax. The learning rate passes
  # through a schedule all the same, so that the state counts the updates: checkpoints have that
  # count.
  parts += [optax.add_decayed_weights(jnp.asarray(rates.weight_decay), mask),
            optax.scale_by_learning_rate(lambda _: jnp.asarray(rates.learning_rate))]
  return optax.chain(*parts)


def init_optimizer(config: OptimizerConfig, params: optax.Params) -> optax.OptState:
  """The state of the optimizer before the first update."""
  # Any rates would do: the state holds moments and counts, and no rate.
  return make_optimizer(config, Rates(0.0, 0.0)).init(trained_part(config, params))


def trained_part(config: OptimizerConfig, params: Any) -> Any:
  """The tree of the parameters that are trained; those that are not have no place in it.

  The optimizer works on this tree alone, so it keeps and decays nothing of the others, and clips
  by the norm of the gradients that there are.
  """
  if (trained := config.trained) is None:
    return params

  def part(tree: Any, prefix: str) -> Any:
    if not isinstance(tree, Mapping):
      return tree if prefix in trained else None
    parts = {key: part(x, f'{prefix}/{key}' if prefix else key) for key, x in tree.items()}
    return {key: x for key, x in parts.items() if x is not None} or None

  return part(params, '') or {}


def with_trained(params: Any, trained: Any) -> Any:
  """The parameters with those of `trained`, a part of the tree, in the place of their own."""
  if not isinstance(trained, Mapping):
    return trained
  return {key: with_trained(x, trained[key]) if key in trained else x for key, x in params.items()}


def kept_arrays(config: OptimizerConfig, params: optax.Params) -> float:
  """What the optimizer keeps, in arrays of the parameters' bytes: 2 with AdamW, its moments.

  params: arrays, or their shapes; nothing is allocated.
  """
  size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
  return size(jax.eval_shape(lambda p: init_optimizer(config, p), params)) / size(params)


def _matrices(params: optax.Params) -> Any:
  return jax.tree_util.tree_map_with_path(lambda path, _: is_matrix(path), params)
