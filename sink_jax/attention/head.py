"""Gates and norms of each head's output, between attention and W_O.

A query that matches no key must still average values, because the weights of softmax sum to one. A
gate can set this average to zero, and a norm gives it the same size for all queries. With either,
papers find less attention to the first token.
"""

from __future__ import annotations

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


class HeadOutput(Component):
  """A function of every head's output o_i that reads no token but i.

  It acts after the values are averaged, so attention maps and importances do not include it.
  """

  # Words for tables and for sentences; empty where nothing happens.
  label: ClassVar[str] = ''

  @property
  def reads_input(self) -> bool:
    """Whether it reads the input x from which queries, keys and values are projected."""
    return False

  def params(self, dims: Dims) -> dict[str, Param]:
    """Returns the parameters of one layer, {name: Param}."""
    return {}

  def input_width(self, heads: int, head_dim: int, params: Arrays) -> int | None:
    """Returns the width of attention's input x, if heads or parameters determine it; else None."""
    return None

  def products(self, dims: Dims) -> int:
    """Returns how many numbers per token it computes as one matrix product with the whole x."""
    return 0

  def output(self, o_BxLxHxDh: jax.Array, v_BxLxHkvxDh: jax.Array, x_BxLxD: jax.Array | None,
             params: Arrays) -> jax.Array:
    """Returns what W_O gets in place of o; gates and norms compute it in float32.

    Args:
      o_BxLxHxDh: the outputs of the heads for L tokens.
      v_BxLxHkvxDh: the values of the same tokens as attention mixes them, in the heads of keys.
      x_BxLxD: the input of attention for these tokens if `reads_input`, else None.
      params: the parameters of the layer, by name.
    """
    return o_BxLxHxDh


class PlainOutput(HeadOutput):
  """No change: W_O gets the output o_h of attention."""


class HeadGate(HeadOutput):
  """o_h <- scale act(x W_g) o_h, with one gate per head and token.

  With source='input' it is the gate G1 of Qiu et al. 2025 (arXiv 2505.06708, "headwise"), where x
  is the input that queries are projected from. Their code (qiuzh20/gated_attention,
  modeling_qwen3.py) and that of Qwen3-Next in transformers compute gates and queries in one
  projection, so the gates have a bias if the queries have one; their models have none.

  With source='value', x is the token's own value in the head, or in the head's group. It is the
  value-state gated attention of Bu et al. 2025 (arXiv 2510.09017), of which only the abstract was
  read, not the code; here each head has a W_g of its own.

  `HeadGate(source='slice', opening=0.25)` is the gated attention of Bondarenko et al. 2023 (arXiv
  2306.12929; code of Qualcomm-AI-research/outlier-free-transformers, 'conditional_per_token' with
  a linear layer): head h reads the channels h Dh to (h + 1) Dh of the input, and the gate has a
  bias that starts at logit(0.25).

  Attributes:
    source: what x is: 'input', 'value' or 'slice', see above.
    act: 'sigmoid', or 'ns_sigmoid' for 0.5 + 0.5 sigmoid, which is never below one half (the
      non-sparse gate of Qiu et al.).
    scale: the factor of the activation. With scale=2, start='zero' and the other defaults, all
      gates begin at exactly one, so the model begins as one without gates.
    start: how W_g is initialised: 'random', like a linear layer, or 'zero'.
    opening: if given, the gates have a learned bias and begin at scale act(logit(opening)) where
      x W_g = 0. The parameter is the bias's difference from logit(opening), so weight decay pulls
      the bias towards logit(opening).
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


class ElementGate(HeadGate):
  """o_h <- scale act(x W_g) * o_h, elementwise: a `HeadGate` with one gate per channel.

  With source='input' it is the gate G1 "elementwise" of Qiu et al. 2025 (arXiv 2505.06708), which
  Qwen3-Next has; with source='value' it is the gate of arXiv 2510.09017. The fields are those of
  `HeadGate`.
  """

  label = 'element gate'

  def _gates(self, dims: Dims) -> int:
    return dims.heads * dims.head_dim


class HeadNorm(HeadOutput):
  """o_h <- o_h / sqrt(mean(o_h^2) + eps) * gain_h, an RMSNorm over the channels of each head.

  It is the head-wise RMSNorm of Li et al. 2026 (arXiv 2605.06611), of which only the abstract was
  read. Each head has its own gain vector, which starts at one. W_O can absorb the gain, so a gain
  that all heads share would give the same functions.
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
