"""Gates, norms and projections of each head's output, between attention and W_O."""

from __future__ import annotations

import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from sink_jax.attention import Arrays, Dims, Learnable, Param, linear, require, rms_norm
from sink_jax.component import Component


class HeadOutput(Learnable, Component):
  """A function of every head's output o_i that reads no other token.

  It acts after the values are averaged, so attention maps and importances do not include it.
  """

  # does it read what queries, keys and values are projected from?
  reads_input: ClassVar[bool] = False

  def input_width(self, params: Arrays) -> int | None:
    """Returns the width of attention's input x, if its parameters show it; else None."""
    return None

  def output(self, o: jax.Array, v: jax.Array, x: jax.Array | None, params: Arrays) -> jax.Array:
    """Returns the input of W_O, given the outputs o (B, L, H, Dh) of L tokens; float32 if changed.

    v: the values (B, L, Hkv, Dh) of the same tokens, as attention mixes them. x: the input (B, L,
    D) of attention for these tokens if `reads_input`, else None.
    """
    return o


class PlainOutput(HeadOutput):
  """No change: W_O gets the output o_h of attention."""


class HeadGate(HeadOutput):
  """o_h <- scale sigmoid(x W_g) o_h, with one gate per head and token.

  With source='input' it is the gate G1 of Qiu et al. 2025 (arXiv 2505.06708, "headwise"), where x
  is the input that queries are projected from. Their code (qiuzh20/gated_attention,
  modeling_qwen3.py) and that of Qwen3-Next in transformers compute gates and queries in one
  projection, so the gates have a bias if the queries have one; their models have none.

  With source='value', x is the values of the token in all heads: the value-state gated attention of
  Bu et al. 2025 (arXiv 2510.09017, Appendix B, by a detailed summary of the paper).

  `HeadGate(source='slice', opening=0.25)` is the gated attention of Bondarenko et al. 2023 (arXiv
  2306.12929; code of Qualcomm-AI-research/outlier-free-transformers, 'conditional_per_token' with
  a linear layer): head h reads the channels h Dh to (h + 1) Dh of the input.

  scale: with scale=2 gates whose W_g is zero are exactly one. opening: if given, the gates have a
  learned bias and begin at scale opening where x W_g = 0. The parameter is the bias's difference
  from logit(opening), so weight decay pulls the bias towards logit(opening).
  """

  source: str = 'input'
  scale: float = 1.0
  opening: float | None = None
  elementwise: ClassVar[bool] = False

  def __post_init__(self):
    require(
      self, self.source in ('input', 'value', 'slice'), "source must be 'input', 'value' or 'slice'"
    )
    require(self, self.scale > 0, 'scale must be > 0')
    require(
      self,
      self.opening is None or 0 < self.opening < 1,
      'opening must lie between 0 and 1, or be None for no bias',
    )

  @property
  def reads_input(self) -> bool:
    return self.source != 'value'

  def params(self, dims: Dims) -> dict[str, Param]:
    require(
      self,
      self.source != 'input' or dims.d_model is not None,
      "its kernel has d_model rows: give Dims its d_model, or use source='value'",
    )
    require(
      self,
      self.source != 'slice' or dims.d_model in (None, dims.heads * dims.head_dim),
      f'{dims.heads} slices of {dims.head_dim} channels do not make {dims.d_model}: use '
      "source='input'",
    )
    # Heads come first in the output axis, so that 'tensor' splits gates as it splits queries.
    inputs = {
      'input': dims.d_model,
      'value': dims.kv_heads * dims.head_dim,
      'slice': dims.head_dim,
    }[self.source]
    assert inputs is not None
    gates = dims.heads * (dims.head_dim if self.elementwise else 1)
    bias = {} if self.opening is None else {'bias': Param((gates,), 0.0)}
    return {'kernel': Param((inputs, gates), 'linear')} | bias

  def input_width(self, params: Arrays) -> int | None:
    return len(params['kernel']) if self.source == 'input' and 'kernel' in params else None

  def output(self, o: jax.Array, v: jax.Array, x: jax.Array | None, params: Arrays) -> jax.Array:
    x = v.reshape(*o.shape[:-2], -1) if self.source == 'value' else x
    assert x is not None, f'{self} needs the input of the block'
    # As in other linear layers: a product in the dtype of the activations.
    kernel = params['kernel'].astype(x.dtype)
    width = len(kernel) * (o.shape[-2] if self.source == 'slice' else 1)
    if x.shape[-1] != width:
      raise ValueError(f'{self} reads {width} channels, and its input has {x.shape[-1]}.')
    if self.source == 'slice':
      kernel = kernel.reshape(len(kernel), o.shape[-2], -1)
      z = jnp.einsum('...hd,dhf->...hf', x.reshape(o.shape), kernel)
    else:
      z = linear(x, jnp.asarray(kernel))
    # One gate for each head, or Dh elementwise ones.
    z = z.reshape(*o.shape[:-1], -1).astype(jnp.float32)
    if self.opening is not None:
      logit = math.log(self.opening / (1 - self.opening))
      z = z + (logit + params['bias'].reshape(o.shape[-2], -1))
    return o.astype(jnp.float32) * (self.scale * jax.nn.sigmoid(z))


class ElementGate(HeadGate):
  """o_h <- scale sigmoid(x W_g) * o_h, elementwise: a `HeadGate` with one gate per channel.

  With source='input' it is the gate G1 "elementwise" of Qiu et al. 2025 (arXiv 2505.06708), which
  Qwen3-Next has. The fields are those of `HeadGate`.
  """

  elementwise = True


class HeadNorm(HeadOutput):
  """o_h <- o_h / sqrt(mean(o_h^2) + eps) * gain, an RMSNorm over the channels of each head.

  It is the head-wise RMSNorm of Li et al. 2026 (arXiv 2605.06611, Section 5.1, by a detailed
  summary of the paper). The heads share the gain, which starts at one.
  """

  eps: float = 1e-6

  def __post_init__(self):
    require(self, self.eps > 0, 'eps must be > 0')

  def params(self, dims: Dims) -> dict[str, Param]:
    return {'gain': Param((dims.head_dim,), 1.0)}

  def output(self, o: jax.Array, v: jax.Array, x: jax.Array | None, params: Arrays) -> jax.Array:
    return rms_norm(o.astype(jnp.float32), params['gain'], self.eps)


class Exclusive(HeadOutput):
  """o_h <- o_h - (o_h . v_h) v_h / |v_h|^2, o_h without its component along the value v_h.

  It is exclusive self attention (XSA) of Zhai 2026 (arXiv 2603.09078, Eq. 2 and Algorithm 1, by a
  transcription), which acts on each head before W_O. |v_h| is at least 1e-9, so that gradients stay
  finite.
  """

  def output(self, o: jax.Array, v: jax.Array, x: jax.Array | None, params: Arrays) -> jax.Array:
    o = o.astype(jnp.float32)
    v = jnp.repeat(v.astype(jnp.float32), o.shape[-2] // v.shape[-2], axis=-2)
    dot = lambda a, b: (a * b).sum(-1, keepdims=True)
    return o - dot(o, v) / jnp.maximum(dot(v, v), 1e-18) * v
