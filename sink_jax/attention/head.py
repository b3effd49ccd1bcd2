"""What happens to a head's output between its rows of attention and W_O.

A query whose head finds nothing must still take a mean of values, because the weights of softmax
sum to one. A gate lets it take nothing of that mean instead, and a norm makes the size of the mean
the same for all queries; with either, papers find less attention to the first token.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp

from sink_jax.attention.param import AnyArray, Dims, Param, rms_norm
from sink_jax.component import Component

Arrays = Mapping[str, AnyArray]  # the component's parameters in one layer, by name

_ACTIVATIONS = {'sigmoid': jax.nn.sigmoid,
                'ns_sigmoid': lambda z: 0.5 + 0.5 * jax.nn.sigmoid(z)}


@dataclasses.dataclass(frozen=True)
class HeadOutput(Component):
  """A function of every head's output o_i, where query i is the only token that it sees.

  It acts on finished rows, so maps and importances of attention do not contain it.
  """

  # Words for tables and for sentences; empty where nothing happens.
  label: ClassVar[str] = ''

  @property
  def reads_input(self) -> bool:
    """Does it read the block's normed input, from which queries, keys and values are projected?"""
    return False

  def params(self, dims: Dims) -> dict[str, Param]:
    """The parameters of one layer, by name."""
    return {}

  def start_like(self, before: HeadOutput) -> dict[str, float] | None:
    """What all entries of new parameters start with to do what `before` did; None: no place."""
    return {} if self == before else None

  def input_width(self, heads: int, head_dim: int, params: Arrays) -> int | None:
    """The width of the block's input as far as parameters and heads show it, or None."""
    return None

  def products(self, dims: Dims) -> int:
    """Numbers per token that one product of the block's input with a matrix gives it."""
    return 0

  def output(self, o_BxLxHxDh: jax.Array, v_BxLxHkvxDh: jax.Array, x_BxLxD: jax.Array | None,
             params: Arrays) -> jax.Array:
    """What W_O gets in place of o, in float32.

    Args:
      v_BxLxHkvxDh: the values of the same L tokens as attention mixes them, with as many heads as
        keys have.
      x_BxLxD: the block's normed input of these tokens where `reads_input`, else None.
    """
    return o_BxLxHxDh


@dataclasses.dataclass(frozen=True)
class PlainOutput(HeadOutput):
  """o_h goes to W_O as it is."""


@dataclasses.dataclass(frozen=True)
class HeadGate(HeadOutput):
  """o_h <- scale act(x W_g) o_h with one number per head and token.

  With source 'input' it is the gate G1 of Qiu et al. 2025 (arXiv 2505.06708, "headwise"), where x
  is what queries are projected from: their code (qiuzh20/gated_attention, modeling_qwen3.py) and
  that of Qwen3-Next in transformers compute it with the matrix of the queries, whose bias, if any,
  it shares; their models have none. With source 'value' x is the token's own value in the head, or
  in its group of heads (value-state gated attention, Bu et al. 2025, arXiv 2510.09017; its abstract
  was read, not its code, and each head has a W_g of its own here).

  `HeadGate(source='slice', opening=0.25)` is the gated attention of Bondarenko et al. 2023 (arXiv
  2306.12929; code of Qualcomm-AI-research/outlier-free-transformers, 'conditional_per_token' with
  a linear layer): head h reads the channels h Dh to (h + 1) Dh of the block's input, and the gate
  has a bias that starts at logit(.25).

  Attributes:
    source: 'input', 'value' or 'slice', see above.
    act: 'sigmoid', or 'ns_sigmoid', 0.5 + 0.5 sigmoid, which closes no further than half
      (the non-sparse gate of Qiu et al.).
    scale: the factor of the activation. With scale=2 and start='zero' all gates begin at exactly
      one, so the model begins as one without gates.
    start: 'random' initialises W_g like a linear layer; 'zero'.
    opening: where given, the gates have a learned bias, and with x W_g = 0 they begin at
      scale act(logit(opening)). What is learned is the difference from logit(opening), to which
      weight decay returns it.
  """

  source: str = 'input'
  act: str = 'sigmoid'
  scale: float = 1.0
  start: str = 'random'
  opening: float | None = None

  label = 'head gate'

  def __post_init__(self):
    for name, choices in (('source', ('input', 'value', 'slice')), ('act', tuple(_ACTIVATIONS)),
                          ('start', ('random', 'zero'))):
      if getattr(self, name) not in choices:
        raise ValueError(f'{self}: {name} must be one of {", ".join(map(repr, choices))}.')
    if not 0 < self.scale < math.inf:
      raise ValueError(f'{self}: scale must be > 0 and finite.')
    if self.opening is not None and not 0 < self.opening < 1:
      raise ValueError(f'{self}: opening must lie between 0 and 1, or be None for no bias.')

  @property
  def reads_input(self) -> bool:
    return self.source != 'value'

  def params(self, dims: Dims) -> dict[str, Param]:
    width = dims.heads * dims.head_dim
    if self.source == 'input' and dims.d_model is None:
      raise ValueError(f'{self} has a kernel of (d_model, {self._gates(dims)}): give Dims its '
                       "d_model, and attention the parameters of spec.params(dims), or use "
                       "source='value'.")
    if self.source == 'slice' and dims.d_model not in (None, width):
      raise ValueError(f'{self} gives every head its slice of the input, but {dims.heads} heads of '
                       f"{dims.head_dim} channels do not make {dims.d_model}: use source='input'.")
    # The inputs of a product come first, as in the matrices of linear layers, and the heads are the
    # outer part of the outputs: 'tensor' splits them as it splits those of queries.
    inputs = dims.d_model if self.source == 'input' else dims.head_dim
    assert inputs is not None
    kernel = Param((inputs, self._gates(dims)), 'zeros' if self.start == 'zero' else 'linear')
    bias = {} if self.opening is None else {'bias': Param((self._gates(dims),), 'zeros')}
    return {'kernel': kernel} | bias

  def start_like(self, before: HeadOutput) -> dict[str, float] | None:
    if before != PlainOutput():
      return super().start_like(before)
    # scale act(z) = 1 in all gates, where z is what the bias makes it, and 0 without one.
    share = 1 / self.scale if self.act == 'sigmoid' else 2 / self.scale - 1
    if self.opening is None:
      return {'kernel': 0.0} if math.isclose(share, 0.5) else None
    if not 0 < share < 1:
      return None
    return {'kernel': 0.0, 'bias': _logit(share) - _logit(self.opening)}

  def input_width(self, heads: int, head_dim: int, params: Arrays) -> int | None:
    if self.source == 'input':
      return params['kernel'].shape[0] if 'kernel' in params else None
    return heads * head_dim if self.source == 'slice' else None

  def products(self, dims: Dims) -> int:
    return self._gates(dims) if self.source == 'input' else 0

  def output(self, o_BxLxHxDh: jax.Array, v_BxLxHkvxDh: jax.Array, x_BxLxD: jax.Array | None,
             params: Arrays) -> jax.Array:
    heads, head_dim = o_BxLxHxDh.shape[-2:]
    x = v_BxLxHkvxDh if self.source == 'value' else x_BxLxD
    assert x is not None, f'{self} needs the input of the block'
    # As in other linear layers: a product in the dtype of the activations.
    kernel = params['kernel'].astype(x.dtype)
    if self.source == 'input':
      z = jnp.einsum('...d,df->...f', x, kernel)
    else:
      own = x.reshape(o_BxLxHxDh.shape) if self.source == 'slice' else x
      # The heads of a group are neighbours, and each has its own matrix for the value they share.
      z = jnp.einsum('...kd,dkf->...kf', own, kernel.reshape(head_dim, own.shape[-2], -1))
    # G is 1, or Dh of an elementwise gate.
    z_BxLxHxG = z.reshape(*o_BxLxHxDh.shape[:-1], -1).astype(jnp.float32)
    if self.opening is not None:
      bias_HxG = params['bias'].reshape(heads, -1)
      z_BxLxHxG = z_BxLxHxG + (_logit(self.opening) + bias_HxG)
    return o_BxLxHxDh.astype(jnp.float32) * (self.scale * _ACTIVATIONS[self.act](z_BxLxHxG))

  def _gates(self, dims: Dims) -> int:
    """Gates of one token."""
    return dims.heads


def _logit(share: float) -> float:
  """The inverse of the sigmoid."""
  return math.log(share / (1 - share))


@dataclasses.dataclass(frozen=True)
class ElementGate(HeadGate):
  """The same with a number per channel: o_h <- scale act(x W_g) * o_h, elementwise.

  With source 'input' it is G1 "elementwise" of Qiu et al. 2025 (arXiv 2505.06708), as Qwen3-Next
  has it; with source 'value' the gate of arXiv 2510.09017. The fields are those of `HeadGate`.
  """

  label = 'element gate'

  def _gates(self, dims: Dims) -> int:
    return dims.heads * dims.head_dim


@dataclasses.dataclass(frozen=True)
class HeadNorm(HeadOutput):
  """o_h <- o_h / sqrt(mean(o_h^2) + eps) * gain_h, an RMSNorm over the channels of each head.

  The head-wise RMSNorm of Li et al. 2026 (arXiv 2605.06611), of which the abstract was read. The
  gain, a vector per head that starts at one, could be a factor of the rows of W_O as well, so
  sharing it among heads would give the same functions.
  """

  eps: float = 1e-6

  label = 'head norm'

  def __post_init__(self):
    if not 0 < self.eps < math.inf:
      raise ValueError(f'{self}: eps must be > 0 and finite.')

  def params(self, dims: Dims) -> dict[str, Param]:
    return {'gain': Param((dims.heads, dims.head_dim), 'ones')}

  def output(self, o_BxLxHxDh: jax.Array, v_BxLxHkvxDh: jax.Array, x_BxLxD: jax.Array | None,
             params: Arrays) -> jax.Array:
    return rms_norm(o_BxLxHxDh.astype(jnp.float32), params['gain'], self.eps)
