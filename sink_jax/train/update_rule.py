"""UpdateRule: how an update follows from the gradients, before its learning rate and decay."""

from __future__ import annotations

import dataclasses
import math

import optax

from sink_jax.component import Component


@dataclasses.dataclass(frozen=True)
class UpdateRule(Component):
  """How gradients are scaled into an update; `optimizer.rule` of a config names one.

  Clipping comes before it, and decoupled weight decay and the learning rate after it, for every
  rule: see `make_optimizer`. A new rule is a subclass here, and nothing else.
  """

  abstract = True

  def transformation(self) -> optax.GradientTransformation | None:
    """The scaling alone; None for a rule whose update is the gradient itself.

    None and not `optax.identity()`: a checkpoint names the entries of the optimizer's state by
    their places in the chain, and even an empty entry would shift those behind it.
    """
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class AdamW(UpdateRule):
  """Adam's scaling (Kingma and Ba 2015) as in PyTorch's AdamW (Loshchilov and Hutter 2019).

  b1, b2: decay of the averages of the gradient and of its square. eps: is added to the root.
  """

  b1: float = 0.9
  b2: float = 0.95
  eps: float = 1e-8

  def __post_init__(self):
    # With 1 the bias correction 1 - b^t would divide by 0. Written as `not (...)`, since NaN fails
    # every comparison, and is thus refused as well.
    if not (0 <= self.b1 < 1 and 0 <= self.b2 < 1):
      raise ValueError(f'optimizer.rule = {self}: b1 and b2 must be in [0, 1).')
    # With eps 0 a parameter whose gradient has always been 0, such as the embedding of an id that
    # never occurs, would get the update 0 / 0.
    if not 0 < self.eps < math.inf:
      raise ValueError(f'optimizer.rule = {self}: eps must be > 0 and finite.')

  def transformation(self) -> optax.GradientTransformation:
    return optax.scale_by_adam(self.b1, self.b2, self.eps)


@dataclasses.dataclass(frozen=True)
class Sgd(UpdateRule):
  """Gradient descent, with heavy-ball momentum where `momentum` is not 0.

  momentum: decay of the running sum of gradients that is the update; 0 keeps no state.
  """

  momentum: float = 0.0

  def __post_init__(self):
    if not 0 <= self.momentum < 1:
      raise ValueError(f'optimizer.rule = {self}: momentum must be in [0, 1).')

  def transformation(self) -> optax.GradientTransformation | None:
    return optax.trace(self.momentum) if self.momentum else None
