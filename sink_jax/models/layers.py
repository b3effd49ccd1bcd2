"""Linear layers, norms, feed-forward networks, mixtures of them, and Mamba."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from sink_jax.attention import linear, rms_norm
from sink_jax.kernels.shard import sharding_constraint
from sink_jax.models.arrays import ParamTree
from sink_jax.arguments import check_known
from sink_jax.models.config import Experts, Mamba, ModelConfig
from sink_jax.models.decode import MambaCache

_erf_gelu = functools.partial(jax.nn.gelu, approximate=False)
_tanh_gelu = functools.partial(jax.nn.gelu, approximate=True)
_ACTIVATIONS = {
  'relu': jax.nn.relu,
  'reglu': jax.nn.relu,
  'gelu': _erf_gelu,
  'geglu': _erf_gelu,
  'gelu_tanh': _tanh_gelu,
  'tanh_geglu': _tanh_gelu,
  'swish': jax.nn.silu,
  'swiglu': jax.nn.silu,
}
_VECTOR = 'singular'  # the leaf with the singular vector of a kernel
# (W W^T)^(2^n) has the singular values to the power 2^(n+1): a smaller one still mixes into the
# vector only if it is within 1e-4 of the largest.
_SQUARINGS = 13
# Accelerators round the factors of float32 products by default, and sigma scales the layer.
_product = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
_CLAMP, _STEEPNESS = 7.0, 1.702  # of gpt-oss's gated unit, swiglu_limit and alpha of its code


def initializer(kind: str | float, config: ModelConfig) -> Callable[..., jax.Array]:
  """The function (key, shape, dtype) -> array that initialises a parameter, by its `Param.init`."""
  if not isinstance(kind, str):
    return nn.initializers.constant(kind)
  check_known(kind, ('linear', 'embedding', 'bias', 'ffn_out'), 'Unknown Param.init')
  if kind == 'bias':
    return nn.initializers.normal(0.02)
  if config.init == 'tinyllama':
    if kind == 'ffn_out' and config.ffn == 'swiglu':
      # The official model files scale only this matrix by the depth.
      return nn.initializers.normal(1 / (math.sqrt(config.ffn_hidden) * config.layers))
    # PyTorch's weight.size(1): the inputs of a linear layer, but the width of an embedding.
    axis = -1 if kind == 'embedding' else 0
    return lambda key, shape, dtype=jnp.float32: (
      math.sqrt(2 / (5 * shape[axis])) * jax.random.normal(key, shape, dtype)
    )
  if kind == 'embedding':
    return nn.initializers.normal(1.0)
  return lambda key, shape, dtype=jnp.float32: (
    jax.random.uniform(key, shape, dtype, -1, 1) / math.sqrt(shape[0])
  )


def apply(module: nn.Module, params: ParamTree, *inputs, **options) -> Any:
  """`module.apply`, typed for modules without mutable collections, as all are here."""
  return module.apply({'params': params}, *inputs, **options)


def activate(ffn: str, h: jax.Array, factor: jax.Array | None = None) -> jax.Array:
  """act(h), or act(h) * factor for gated feed-forward networks."""
  if ffn == 'clamped_swiglu':
    assert factor is not None
    h, factor = jnp.minimum(h, _CLAMP), jnp.clip(factor, -_CLAMP, _CLAMP)
    return h * jax.nn.sigmoid(_STEEPNESS * h) * (factor + 1)
  h = _ACTIVATIONS[ffn](h)
  return h if factor is None else h * factor


def reparametrised(kernel_IxO: jax.Array, gamma: jax.Array, vector_I: jax.Array) -> jax.Array:
  """gamma W / sigma(W), float32, with gradients for W and gamma (sigmaReparam, arXiv:2303.06296).

  sigma(W) is the largest singular value and gamma a learned scalar that starts at 1: scores grow no
  faster than the gammas do, and attention keeps its entropy. The releases of Zhai et al. 2023
  (apple/ml-sigma-reparam) do so in every linear layer of a block and in the last of the model, with
  one step of the power iteration in each forward pass of training. Here it applies to the linear
  layers of the blocks, except head gates.

  The singular vector is a leaf of the parameters next to its kernel, so that it is saved, split and
  copied with the model. It gets no gradient, and a forward pass only reads it.
  """
  # The derivative of |v W| at a fixed v is that of sigma if v is the left singular vector: the
  # change of v with W is of second order.
  image_O = _product('i,io->o', jax.lax.stop_gradient(vector_I), kernel_IxO)
  return kernel_IxO * (gamma / jnp.linalg.norm(image_O))


def singular_vector(kernel_IxO: jax.Array) -> jax.Array:
  """The left singular vector (I,) of the largest singular value, float32."""
  if kernel_IxO.shape[0] > kernel_IxO.shape[1]:  # W^T W is then the smaller product
    vector_I = _product('io,o->i', kernel_IxO, singular_vector(kernel_IxO.T))
    return vector_I / jnp.linalg.norm(vector_I)

  def square(_: int, power_IxI: jax.Array) -> jax.Array:
    power_IxI = _product('ij,jk->ik', power_IxI, power_IxI)
    return power_IxI / jnp.linalg.norm(power_IxI)

  # (W W^T)^(2^n) tends to v v^T; its largest column has the most of v.
  gram_IxI = _product('io,jo->ij', kernel_IxO, kernel_IxO)
  power_IxI = jax.lax.fori_loop(0, _SQUARINGS, square, gram_IxI / jnp.linalg.norm(gram_IxI))
  vector_I = power_IxI[:, jnp.argmax(jnp.diag(power_IxI))]
  return vector_I / jnp.linalg.norm(vector_I)


def after_update(params: Mapping[Any, Any]) -> Mapping[Any, Any]:
  """Returns the parameters with new singular vectors of their kernels, which may have more axes.

  Each training update ends with it. Vectors are computed from scratch: one that follows by power
  iteration lags when another singular value overtakes the largest.
  """
  if _VECTOR in params:
    vectors = jnp.vectorize(singular_vector, signature='(i,o)->(i)')
    return {**params, _VECTOR: vectors(params['kernel'])}
  return {name: after_update(x) if isinstance(x, Mapping) else x for name, x in params.items()}


class Dense(nn.Module):
  """x W, plus a bias where `config.biases` names the layer's group.

  Parameters are float32 and are rounded to the dtype of x for the product. With `config.linear`
  'sigma_reparam' the layers of a block multiply by gamma W / sigma(W).
  """

  features: int
  config: ModelConfig
  group: str = ''  # one of CHOICES['biases'] in config.py; 'dt' always has a bias
  init_kind: str = 'linear'
  out_dtype: DTypeLike | None = None  # of the result and of its sums; by default the dtype of x

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    w = self.param(
      'kernel', initializer(self.init_kind, self.config), (x.shape[-1], self.features), jnp.float32
    )
    if self.config.linear == 'sigma_reparam' and self.group in ('qkv', 'out', 'ffn'):
      gamma = self.param('gamma', nn.initializers.ones, (), jnp.float32)
      vector = self.param(_VECTOR, lambda key: singular_vector(w))
      w = reparametrised(w, gamma, vector)
    dtype = self.out_dtype or x.dtype
    out = linear(x, w.astype(x.dtype), dtype)
    if self.group in (*self.config.biases, 'dt'):
      bias = self.param('bias', nn.initializers.zeros, (self.features,), jnp.float32)
      out = out + bias.astype(dtype)
    return out


class Weights(nn.Module):
  """Kernels (..., I, O), each initialised by itself, and biases (..., O), None without them."""

  shape: tuple[int, ...]
  config: ModelConfig

  @nn.compact
  def __call__(self, biased: bool = True) -> tuple[jax.Array, jax.Array | None]:
    init = initializer('linear', self.config)

    def init_each(key, shape, dtype):
      if len(shape) == 2:
        return init(key, shape, dtype)
      keys = jax.random.split(key, shape[0])
      return jax.vmap(lambda key: init_each(key, shape[1:], dtype))(keys)

    kernel = self.param('kernel', init_each, self.shape, jnp.float32)
    if not biased:
      return kernel, None
    bias_shape = *self.shape[:-2], self.shape[-1]
    return kernel, self.param('bias', nn.initializers.zeros, bias_shape, jnp.float32)


class Norm(nn.Module):
  """The norm that `config.norm` names, with its parameters, in float32 (LN of Eq. 2 and 3).

  RMSNorm is x / sqrt(mean(x^2) + eps) g, and LayerNorm the same of the centred x, plus a bias.

  'single' is SSNorm (Outlier-Safe Pre-Training, arXiv:2506.19697): RMSNorm with one scalar g
  instead of a vector, so that all channels share a scale. g starts at 1, as in the release
  (dmis-lab/Outlier-Safe-Pre-Training); it would be sqrt(D) on x / |x|_2, the same function.

  'dyt' is Dynamic Tanh (arXiv:2503.10622): tanh(a x) g + b in each channel, without a statistic of
  x. a starts at 0.5, the default of the release (jiachenzhu/DyT). For LLaMA the release has a
  smaller a, which depends on the width, no b, and a learned scale sqrt(D) on embeddings.
  """

  config: ModelConfig

  @nn.compact
  def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
    kind, channels = self.config.norm, x_BxTxD.shape[-1:]
    if kind == 'none':
      return x_BxTxD
    gain = self.param(
      'gain', nn.initializers.ones, () if kind == 'single' else channels, jnp.float32
    )
    if kind in ('rmsnorm', 'single'):
      return rms_norm(x_BxTxD, gain, self.config.norm_eps)
    bias = self.param('bias', nn.initializers.zeros, channels, jnp.float32)
    x = x_BxTxD.astype(jnp.float32)
    if kind == 'dyt':
      alpha = self.param('alpha', nn.initializers.constant(0.5), (), jnp.float32)
      return (jnp.tanh(alpha * x) * gain + bias).astype(x_BxTxD.dtype)
    # float32, so that nothing is rounded before the bias is added.
    x = x - x.mean(-1, keepdims=True)
    return (rms_norm(x, gain, self.config.norm_eps) + bias).astype(x_BxTxD.dtype)


def residual(
  config: ModelConfig,
  number: int,
  h_BxTxD: jax.Array,
  f: Callable[[jax.Array], tuple[jax.Array, Any]],
  norm: Callable[[str, jax.Array], jax.Array],
  read_BxTxD: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, Any]:
  """h + beta f(h), with the norms where `config.norm_location` has them.

  f is sub-layer `number`, 1 or 2, of its block; it reads h or read_BxTxD, and returns (output,
  extra). norm(name, x) normalises x. Returns the stream after the sub-layer, the stream before the
  norm of a post-norm block, and extra.

  beta is 1, but 1 / sqrt(2 layers) in the Outlier Protected block of He et al. (arXiv:2405.19279),
  so that all sub-layers together add an output of size one. The authors' code
  (bobby-he/simplified_transformers, op.yaml) has 0.2 for 12 blocks, and a LayerNorm before the
  first attention, since its embeddings start at 0.02; here they start at 1.
  """
  location = config.norm_location
  x = h_BxTxD if read_BxTxD is None else read_BxTxD
  o_BxTxD, rest = f(norm(f'norm{number}', x) if location in ('pre', 'sandwich') else x)
  if location in ('sandwich', 'after'):
    o_BxTxD = norm(f'norm{number}_after', o_BxTxD)
  if location == 'protected':
    o_BxTxD = 1 / math.sqrt(2 * config.layers) * o_BxTxD
  before = h_BxTxD + o_BxTxD
  return (norm(f'norm{number}', before) if location == 'post' else before), before, rest


class FeedForward(nn.Module):
  """act(x W1) W2, or (act(x W1) * x W2) W3 for a gated network (Table 11).

  In a protected block act reads sqrt(3) x W1, a scale that He et al. (arXiv:2405.19279) leave
  optional: kernels from U(+-1/sqrt(D)) reduce a mean square of one to a third.
  """

  config: ModelConfig

  @nn.compact
  def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
    config = self.config
    if config.ffn == 'none':
      return jnp.zeros_like(x_BxTxD)
    hidden = lambda name: sharding_constraint(
      'bth', Dense(config.ffn_hidden, config, group='ffn', name=name)(x_BxTxD)
    )
    h = hidden('w1')
    if config.norm_location == 'protected':
      h = math.sqrt(3) * h
    h = activate(config.ffn, h, hidden('w2') if config.ffn.endswith('glu') else None)
    w_out = Dense(config.d_model, config, group='ffn', init_kind='ffn_out', name='w_out')
    return sharding_constraint('btd', w_out(h))


class MixtureOfExperts(nn.Module):
  """The sum over the active experts e of weight_e FFN_e(x), by a softmax router (Jamba, gpt-oss).

  All X experts run on all tokens, one after another, and inactive ones get weight zero. That is
  exact, takes the memory of one expert and the time of all, and is meant for evaluation.
  """

  config: ModelConfig
  experts: Experts

  @nn.compact
  def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
    config, experts = self.config, self.experts
    logits_BxTxX = Dense(experts.count, config, group='ffn', out_dtype=jnp.float32, name='router')(
      x_BxTxD
    )
    top, active = jax.lax.top_k(logits_BxTxX, experts.active)
    if experts.renormalize:
      top = jax.nn.softmax(top, -1)
    else:
      # These do not sum to one: the shares of inactive experts are lost.
      top = jnp.take_along_axis(jax.nn.softmax(logits_BxTxX, -1), active, -1)
    # (B, T, active, X) summed over the active ones: a weight for each of the X experts.
    weights_BxTxX = jnp.sum(jax.nn.one_hot(active, experts.count) * top[..., None], -2)

    gated = config.ffn.endswith('glu')
    width, hidden = config.d_model, config.ffn_hidden
    shapes = {'w1': (width, hidden), 'w_out': (hidden, width)}
    if gated:
      shapes['w2'] = width, hidden
    biased = 'ffn' in config.biases
    weights = {
      name: Weights((experts.count, *shape), config, name=name)(biased)
      for name, shape in shapes.items()
    }

    def add(total, expert):
      matrices, weight_BxT = expert

      def layer(name, x):
        kernel, bias = matrices[name]
        out = linear(x, kernel.astype(x.dtype))
        return out if bias is None else out + bias.astype(x.dtype)

      factor = layer('w2', x_BxTxD) if gated else None
      h = activate(config.ffn, layer('w1', x_BxTxD), factor)
      out = layer('w_out', h).astype(jnp.float32)
      return total + weight_BxT[..., None] * out, None

    # The scan takes one expert's matrices and weights at a time, and adds up in float32.
    total = jnp.zeros(x_BxTxD.shape, jnp.float32)
    total, _ = jax.lax.scan(add, total, (weights, jnp.moveaxis(weights_BxTxX, -1, 0)))
    return total.astype(x_BxTxD.dtype)


class MambaMixer(nn.Module):
  """A selective state space model (Gu and Dao 2023) instead of attention, as in Jamba.

  state_t = exp(dt_t A) state_{t-1} + dt_t B_t x_t and y_t = C_t state_t + D x_t per channel,
  with dt, B and C made from x_t. The recurrence runs token after token, in float32.

  I counts inner channels, S the states of a channel, K the taps of the convolution.
  """

  config: ModelConfig
  sizes: Mamba

  @nn.compact
  def __call__(
    self,
    x_BxTxD: jax.Array,
    cache: MambaCache | None = None,
  ) -> tuple[jax.Array, MambaCache | None]:
    """The output (B, T, D), and the cache after these tokens, which continue `cache`."""
    config, sizes = self.config, self.sizes
    batch, length, _ = x_BxTxD.shape
    layer = lambda features, name, group: Dense(features, config, group=group, name=name)
    x, gate = jnp.split(layer(2 * sizes.inner, 'in', 'mamba')(x_BxTxD), 2, -1)
    x_BxTxI, inputs = self._convolved(x, cache)
    parts = jnp.split(
      layer(sizes.rank + 2 * sizes.state, 'x', '')(x_BxTxI),
      (sizes.rank, sizes.rank + sizes.state),
      -1,
    )
    # These norms are Jamba's addition: Mamba itself has none.
    dt, b_BxTxS, c_BxTxS = (
      Norm(config, name=f'{name}_norm')(part) for name, part in zip(('dt', 'b', 'c'), parts)
    )
    dt_BxTxI = jax.nn.softplus(
      Dense(sizes.inner, config, group='dt', name='dt')(dt).astype(jnp.float32)
    )
    a_log = self.param(
      'a_log',
      lambda key: jnp.broadcast_to(
        jnp.log(jnp.arange(1, sizes.state + 1, dtype=jnp.float32)), (sizes.inner, sizes.state)
      ),
    )
    d_I = self.param('d', nn.initializers.ones, (sizes.inner,), jnp.float32)
    # The parameter is log(-A), so that A stays negative in training and every state decays.
    a_IxS = -jnp.exp(a_log.astype(jnp.float32))

    def step(state_BxIxS, token):
      x_BxI, dt_BxI, b_BxS, c_BxS = token
      drive = (dt_BxI * x_BxI)[..., None] * b_BxS[:, None, :]
      state = jnp.exp(dt_BxI[..., None] * a_IxS) * state_BxIxS + drive
      return state, jnp.einsum('bis,bs->bi', state, c_BxS)

    # The state is summed in float32: its decays are close to one, and bfloat16 would round them.
    tokens = [
      jnp.swapaxes(z.astype(jnp.float32), 0, 1) for z in (x_BxTxI, dt_BxTxI, b_BxTxS, c_BxTxS)
    ]
    state = jnp.zeros((batch, sizes.inner, sizes.state)) if cache is None else cache.state_BxIxS
    state, y_TxBxI = jax.lax.scan(step, state, tuple(tokens))
    y = jnp.swapaxes(y_TxBxI, 0, 1) + d_I.astype(jnp.float32) * x_BxTxI.astype(jnp.float32)
    y = y * jax.nn.silu(gate.astype(jnp.float32))
    out = layer(config.d_model, 'out', 'mamba')(y.astype(gate.dtype))
    # The convolution of the next token reads the last K - 1 of these K - 1 + T inputs.
    return out, None if cache is None else MambaCache(inputs[:, length:], state)

  def _convolved(self, x_BxTxI: jax.Array, cache: MambaCache | None) -> tuple[jax.Array, jax.Array]:
    """silu(causal convolution of x) (B, T, I), and the inputs (B, K - 1 + T, I) that it reads."""
    sizes, dtype = self.sizes, x_BxTxI.dtype
    batch, length, _ = x_BxTxI.shape
    # The last tap is for the token itself.
    taps_KxI, bias_I = Weights((sizes.conv, sizes.inner), self.config, name='conv')()
    assert bias_I is not None
    before = (
      jnp.zeros((batch, sizes.conv - 1, sizes.inner), dtype)
      if cache is None
      else cache.inputs_BxKxI.astype(dtype)
    )
    # The K - 1 inputs before these tokens, or zeros, make the convolution causal.
    inputs = jnp.concatenate([before, x_BxTxI], 1)
    x = sum(
      (inputs[:, i : i + length] * taps_KxI[i].astype(dtype) for i in range(sizes.conv)),
      start=jnp.zeros((), dtype),
    )
    return jax.nn.silu(x + bias_I.astype(dtype)), inputs
