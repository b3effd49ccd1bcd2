"""Linear layers, norms and feed-forward networks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from sink_jax.attention import rms_norm
from sink_jax.kernels.shard import sharding_constraint
from sink_jax.models.arrays import ParamTree
from sink_jax.models.config import ModelConfig
from sink_jax.models.sigma_reparam import VECTOR, reparametrised, singular_vector

_erf_gelu = functools.partial(jax.nn.gelu, approximate=False)
_tanh_gelu = functools.partial(jax.nn.gelu, approximate=True)
_ACTIVATIONS = {
    'relu': jax.nn.relu, 'reglu': jax.nn.relu, 'gelu': _erf_gelu, 'geglu': _erf_gelu,
    'gelu_tanh': _tanh_gelu, 'tanh_geglu': _tanh_gelu, 'swish': jax.nn.silu, 'swiglu': jax.nn.silu}
_CLAMP, _STEEPNESS = 7.0, 1.702  # of gpt-oss's gated unit, swiglu_limit and alpha of its code


def initializer(kind: str | float, config: ModelConfig) -> Callable[..., jax.Array]:
  """The function (key, shape, dtype) -> array that initialises a parameter, by its `Param.init`."""
  if not isinstance(kind, str):
    return nn.initializers.constant(kind)
  if kind in ('zeros', 'ones'):
    return getattr(nn.initializers, kind)
  if kind == 'bias':
    return nn.initializers.normal(0.02)
  if config.init == 'tinyllama':
    if kind == 'ffn_out' and config.ffn == 'swiglu':
      # The official model files scale only this matrix by the depth.
      return nn.initializers.normal(1 / (math.sqrt(config.ffn_hidden) * config.layers))
    # PyTorch's weight.size(1): the inputs of a linear layer, but the width of an embedding.
    axis = -1 if kind == 'embedding' else 0
    return lambda key, shape, dtype=jnp.float32: (
        math.sqrt(2 / (5 * shape[axis])) * jax.random.normal(key, shape, dtype))
  if kind == 'embedding':
    return nn.initializers.normal(1.0)
  return lambda key, shape, dtype=jnp.float32: jax.random.uniform(
      key, shape, dtype, -1, 1) / math.sqrt(shape[0])


def apply(module: nn.Module, params: ParamTree, *inputs, **options) -> Any:
  """`module.apply` without the types of collections that change, which no module here has."""
  return module.apply({'params': params}, *inputs, **options)


def activate(ffn: str, h: jax.Array, linear: jax.Array | None = None) -> jax.Array:
  """act(h), or act(h) * linear for the gated kinds of feed-forward networks."""
  if ffn == 'clamped_swiglu':
    assert linear is not None
    h, linear = jnp.minimum(h, _CLAMP), jnp.clip(linear, -_CLAMP, _CLAMP)
    return h * jax.nn.sigmoid(_STEEPNESS * h) * (linear + 1)
  h = _ACTIVATIONS[ffn](h)
  return h if linear is None else h * linear


class Linear(nn.Module):
  """x W, plus a bias where `config.biases` names the layer's group.

  Parameters are float32 and are rounded to the dtype of x for the product. With `config.linear`
  'sigma_reparam' the layers of a block multiply by gamma W / sigma(W).
  """

  features: int
  config: ModelConfig
  group: str = ''  # one of BIASED; 'dt' always has a bias
  init_kind: str = 'linear'
  out_dtype: DTypeLike | None = None  # of the result and of its sums; by default that of x

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    w = self.param('kernel', initializer(self.init_kind, self.config),
                   (x.shape[-1], self.features), jnp.float32)
    if self.config.linear == 'sigma_reparam' and self.group in ('qkv', 'out', 'ffn'):
      gamma = self.param('gamma', nn.initializers.ones, (), jnp.float32)
      vector = self.param(VECTOR, lambda key: singular_vector(w))
      w = reparametrised(w, gamma, vector)
    dtype = self.out_dtype or x.dtype
    out = jnp.einsum('...i,io->...o', x, w.astype(x.dtype), preferred_element_type=dtype)
    if self.group in (*self.config.biases, 'dt'):
      bias = self.param('bias', nn.initializers.zeros, (self.features,), jnp.float32)
      out = out + bias.astype(dtype)
    return out


class Weights(nn.Module):
  """Kernels (..., I, O), each initialised by itself, and biases (..., O)."""

  shape: tuple[int, ...]
  config: ModelConfig
  biased: bool = True

  @nn.compact
  def __call__(self) -> tuple[jax.Array, jax.Array]:
    init, bias = initializer('linear', self.config), (*self.shape[:-2], self.shape[-1])
    every = lambda key, shape, dtype: (init(key, shape, dtype) if len(shape) == 2 else jax.vmap(
        lambda key: every(key, shape[1:], dtype))(jax.random.split(key, shape[0])))
    kernel = self.param('kernel', every, self.shape, jnp.float32)
    return kernel, (self.param('bias', nn.initializers.zeros, bias, jnp.float32) if self.biased
                    else jnp.zeros(bias, kernel.dtype))


class Norm(nn.Module):
  """The norm that `config.norm` names, with its parameters, in float32 (LN of Eq. 2 and 3).

  RMSNorm is x / sqrt(mean(x^2) + eps) g, and LayerNorm the same of the centred x, plus a bias.

  'single' is SSNorm (Outlier-Safe Pre-Training, arXiv:2506.19697): RMSNorm with one scalar g in
  place of a vector, so that no channel has a scale of its own. g starts at 1, as in the release
  (dmis-lab/Outlier-Safe-Pre-Training); it would be sqrt(D) on x / |x|_2, the same function.

  'dyt' is Dynamic Tanh (arXiv:2503.10622): tanh(a x) g + b in each channel, without a statistic
  of x. The scalar a starts at 0.5, the default of the release (jiachenzhu/DyT). For LLaMA the release
  has smaller ones, by the width, no b, and a learned scale sqrt(D) on embeddings.
  """

  config: ModelConfig

  @nn.compact
  def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
    kind, channels = self.config.norm, x_BxTxD.shape[-1:]
    if kind == 'none':
      return x_BxTxD
    gain = self.param('gain', nn.initializers.ones, () if kind == 'single' else channels,
                      jnp.float32)
    if kind in ('rmsnorm', 'single'):
      return rms_norm(x_BxTxD, gain, self.config.norm_eps)
    bias = self.param('bias', nn.initializers.zeros, channels, jnp.float32)
    x = x_BxTxD.astype(jnp.float32)
    if kind == 'dyt':
      alpha = self.param('alpha', nn.initializers.constant(0.5), (), jnp.float32)
      return (jnp.tanh(alpha * x) * gain + bias).astype(x_BxTxD.dtype)
    x = x - x.mean(-1, keepdims=True)  # float32, so that nothing is rounded before the bias is added
    return (rms_norm(x, gain, self.config.norm_eps) + bias).astype(x_BxTxD.dtype)


def residual(config: ModelConfig, number: int, h_BxTxD: jax.Array,
             f: Callable[[jax.Array], tuple[jax.Array, Any]],
             norm: Callable[[str, jax.Array], jax.Array], read_BxTxD: jax.Array | None = None,
             ) -> tuple[jax.Array, jax.Array, Any]:
  """h + beta f(h), with the norms where `config.norm_location` has them.

  f is the sub-layer `number` of its block, 1 or 2, reads h or read_BxTxD, and returns its output and
  anything else; norm takes a name and what it normalises. Returns the stream after the sub-layer,
  the same before the norm of a post-norm block, and what else f returned.
  """
  location = config.norm_location
  x = h_BxTxD if read_BxTxD is None else read_BxTxD
  o_BxTxD, rest = f(norm(f'norm{number}', x) if location in ('pre', 'sandwich') else x)
  if location in ('sandwich', 'after'):
    o_BxTxD = norm(f'norm{number}_after', o_BxTxD)
  if location == 'protected':
    o_BxTxD = config.branch_scale * o_BxTxD
  before = h_BxTxD + o_BxTxD
  return (norm(f'norm{number}', before) if location == 'post' else before), before, rest


class FeedForward(nn.Module):
  """act(x W1) W2, or (act(x W1) * x W2) W3 for the gated kinds (Table 11).

  In a protected block act takes sqrt(3) x W1, a scale that He et al. (arXiv:2405.19279) leave
  optional: of inputs with a mean square of one, kernels from U(+-1/sqrt(D)) make a third of that.
  """

  config: ModelConfig

  @nn.compact
  def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
    config = self.config
    if config.ffn == 'none':
      return jnp.zeros_like(x_BxTxD)
    hidden = lambda name: sharding_constraint(
        'bth', Linear(config.ffn_hidden, config, group='ffn', name=name)(x_BxTxD))
    h = hidden('w1')
    if config.norm_location == 'protected':
      h = math.sqrt(3) * h
    h = activate(config.ffn, h, hidden('w2') if config.ffn.endswith('glu') else None)
    w_out = Linear(config.d_model, config, group='ffn', init_kind='ffn_out', name='w_out')
    return sharding_constraint('btd', w_out(h))
