"""AttentionSpec: one attention variant, as a hashable value."""

import dataclasses
import math
import typing
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from sink_jax.attention import AnyArray, Dims, Learnable, Param, per_token, soft_cap
from sink_jax.attention.extra_key_value import ExtraKeyValue, NoBias, SinkLogit
from sink_jax.attention.head import HeadOutput, PlainOutput
from sink_jax.attention.mask import Causal, Mask
from sink_jax.attention.normalizer import AbsSum, Clipped, Normalizer, RowSum
from sink_jax.attention.position import Position, Rope
from sink_jax.attention.similarity import Exp, Similarity
from sink_jax.component import Component, from_string

LayerParams = Mapping[str, Mapping[str, AnyArray]]  # of one layer: {component: {name: array}}


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
  """out_i = 1/Z_i sum_j M(i,j) f(phi(q_i).phi(k_j)/sqrt(Dh) + g(i,j)) v_j.

  Afterwards `head` may change each head's output before W_O. The defaults are the paper's baseline:
  softmax, a causal mask, rotary positions. Each component may also be given as its config string. A
  spec is hashable and compared by value, so it can be a static argument of jitted functions.

  Raises:
    ValueError: the components make no sense together; the message gives the reason and a remedy.
  """

  similarity: Similarity = Exp()
  normalizer: Normalizer = RowSum()
  feature_map: per_token.FeatureMap = per_token.Identity()
  position: Position = Rope()
  mask: Mask = Causal()
  kv_bias: ExtraKeyValue = NoBias()
  qk_norm: per_token.QueryKeyNorm = per_token.NoQKNorm()
  temperature: per_token.Temperature = per_token.Fixed()
  value: per_token.Value = per_token.PlainValue()
  head: HeadOutput = PlainOutput()

  def __post_init__(self):
    for name, base in COMPONENTS.items():
      # The way around `frozen`: config strings become components before anything hashes the spec.
      object.__setattr__(self, name, from_string(base, getattr(self, name)))
    f, z, bias = self.similarity, self.normalizer, self.kv_bias
    exponential, valueless = f.kind == 'exponential', bias.acts_only_through_normalisation
    for refused, why in (
      (
        (f.kind == 'rectified') != isinstance(z, AbsSum),
        f'{f} with {z}: Softpick() and AbsSum() are one operation; use both, or neither.',
      ),
      (
        exponential and not z.power,
        f'{f} with {z} overflows: use RowSum() or another similarity, such as Sigmoid().',
      ),
      (
        exponential and isinstance(z, RowSum) and z.eps,
        f'{f} with {z}: rows of exp are relative to their maximum; use RowSum() without eps.',
      ),
      (
        isinstance(z, Clipped) and not exponential,
        f'{z} clips the weights of softmax, not of {f}: use Exp(), or RowSum().',
      ),
      (
        z.needs_nonnegative and self.signed,
        f'{z}: {f} of {self.feature_map} with {self.position} and {bias} may be negative; use '
        'AbsFloor() or Unnormalized(), or EluPlusOne() features without a position bias.',
      ),
      (
        bias.needs_exponential and not exponential,
        f'{bias} adds to a sum of exponentials, not of {f}: use Exp(), or KVBias().',
      ),
      (
        not z.power and valueless,
        f'{bias} acts only through a sum of similarities, which {z} lacks: use KVBias() or '
        'RowSum().',
      ),
      (
        bias.future is not None and self.mask.prefix is not None,
        f'{bias} stands for keys after the query, which {self.mask} shows: use Causal().',
      ),
    ):
      if refused:
        raise ValueError(why)

  @property
  def signed(self) -> bool:
    """True if a similarity f(s) can be negative."""
    # A sink logit is learned, and not a product of features.
    positive = (
      self.feature_map.positive
      and not self.position.has_bias
      and not isinstance(self.kv_bias, SinkLogit)
    )
    return self.similarity.signed and not positive

  @property
  def rows_sum_to_one(self) -> bool:
    """True if a row's weights, with the extra key's, are >= 0 and sum to one, as in softmax."""
    return self.normalizer.sums_to_one

  def params(self, dims: Dims) -> dict[str, dict[str, Param]]:
    """Returns the parameters of one layer, {component: {name: Param}}."""
    return {
      name: params
      for name in COMPONENTS
      if isinstance(part := getattr(self, name), Learnable) and (params := part.params(dims))
    }

  def strings(self) -> dict[str, str]:
    """Returns the config string of every component; `AttentionSpec(**strings)` is the spec."""
    return {name: repr(getattr(self, name)) for name in COMPONENTS}


# {name of a field, as in configs: the base class of its values}
COMPONENTS: dict[str, type[Component]] = typing.get_type_hints(AttentionSpec)


class TransformedQK(typing.NamedTuple):
  """Queries and keys of tokens 0..T-1: normalised, scaled by the temperature, rotated, mapped.

  Scores are their products over sqrt(Dh); grouped keys keep their Hkv heads.
  """

  q_BxTxHxDh: jax.Array
  k_BxTxHkvxDh: jax.Array


def transform_qk(
  spec: AttentionSpec, q_BxTxHxDh: AnyArray, k_BxTxHkvxDh: AnyArray, params: LayerParams
) -> TransformedQK:
  """Transforms projected queries and keys; raises a ValueError if they or `params` do not fit."""
  return position_qk(spec, *normalize_qk(spec, q_BxTxHxDh, k_BxTxHkvxDh, params), params)


def normalize_qk(
  spec: AttentionSpec, q_BxTxHxDh: AnyArray, k_BxTxHkvxDh: AnyArray, params: LayerParams
) -> tuple[jax.Array, jax.Array]:
  """The first step of `transform_qk`, which checks and normalises; a cache keeps such keys."""
  q, k = q_BxTxHxDh.shape, k_BxTxHkvxDh.shape
  if len(q) != 4 or len(k) != 4 or 0 in (*q, *k) or q[:2] != k[:2] or q[3] != k[3] or q[2] % k[2]:
    raise ValueError(
      'q, k and v must have the axes (batch, length, heads, head_dim), none of them '
      'empty, with the same batch, length and head_dim, and the query heads must be '
      f'a multiple of the key heads; here q and k are {q} and {k}.'
    )
  check_dtypes(q_BxTxHxDh, k_BxTxHkvxDh)
  # Queries and keys do not show the width of the layer's input.
  width = spec.head.input_width(params.get('head', {}))
  shapes = lambda tree: {
    component: {name: tuple(x.shape) for name, x in by_name.items()}
    for component, by_name in tree.items()
  }
  wanted, given = shapes(spec.params(Dims(q[2], *k[2:], width))), shapes(params)
  if wanted != given:
    raise ValueError(
      f'params must hold {wanted or "nothing"} for this spec, not {given or "nothing"}.'
    )
  norm_params = params.get('qk_norm', {})
  return (
    spec.qk_norm.normalized(jnp.asarray(q_BxTxHxDh), norm_params, 'query'),
    spec.qk_norm.normalized(jnp.asarray(k_BxTxHkvxDh), norm_params, 'key'),
  )


def position_qk(
  spec: AttentionSpec, q_BxTxHxDh: jax.Array, k_BxTxHkvxDh: jax.Array, params: LayerParams
) -> TransformedQK:
  """The second step of `transform_qk`, of normalised queries and keys."""
  # NumPy positions: the angles of rotary embeddings are then constants of the program.
  tokens = np.arange(q_BxTxHxDh.shape[1])
  q_BxTxHxDh = scaled_queries(spec, q_BxTxHxDh, tokens, params)
  return TransformedQK(
    apply_position_and_features(spec, q_BxTxHxDh, tokens, params),
    apply_position_and_features(spec, k_BxTxHkvxDh, tokens, params),
  )


def scaled_queries(
  spec: AttentionSpec, q_BxLxHxDh: jax.Array, positions_L: AnyArray, params: LayerParams
) -> jax.Array:
  """Multiplies normalised queries by the factor of the temperature."""
  factor_LxH = spec.temperature.factor_LxH(positions_L, spec.mask, params.get('temperature', {}))
  if factor_LxH is None:
    return q_BxLxHxDh
  # Like a rotation it is computed in float32, and the query is rounded once.
  return (q_BxLxHxDh.astype(jnp.float32) * factor_LxH[:, :, None]).astype(q_BxLxHxDh.dtype)


def apply_position_and_features(
  spec: AttentionSpec, x_BxTxHxDh: jax.Array, positions_T: AnyArray, params: LayerParams
) -> jax.Array:
  """Rotates normalised queries or keys by their positions and maps them to features."""
  return spec.feature_map.features(
    spec.position.rotate(x_BxTxHxDh, positions_T), params.get('feature_map', {})
  )


def extra_key_logit(
  spec: AttentionSpec, q_BxLxHxDh: jax.Array, params: LayerParams, i_L: AnyArray
) -> jax.Array | None:
  """Score (B, H, L) float32 of the extra key for transformed queries at positions i_L, or None."""
  if not spec.kv_bias.has_extra_key:
    return None
  batch, length, heads, head_dim = q_BxLxHxDh.shape
  extra_params = params.get('kv_bias', {})
  # The number of key heads is unknown here and does not matter: k* has a row per query head.
  key = spec.kv_bias.key_HxDh(extra_params, Dims(heads, heads, head_dim))
  if key is None:
    logit_HxL = spec.kv_bias.logit_HxL(extra_params, heads, i_L).astype(jnp.float32)
    return jnp.broadcast_to(logit_HxL, (batch, heads, length))
  # k* passes the feature map like any key, but has no position: it is never rotated.
  key = spec.feature_map.features(key, params.get('feature_map', {}))
  # The precision of the tokens' scores, which compete with this one in the same row.
  product = jnp.einsum(
    'blhd,hd->bhl', q_BxLxHxDh, key.astype(q_BxLxHxDh.dtype), preferred_element_type=jnp.float32
  )
  return soft_cap(product / math.sqrt(head_dim), spec.similarity.cap)


def check_dtypes(*arrays: AnyArray) -> None:
  """Raises a ValueError unless queries, keys and perhaps values have one floating-point dtype."""
  dtypes = {array.dtype for array in arrays}
  # Rotations of integers would be rounded to integers.
  if len(dtypes) > 1 or not all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
    raise ValueError(
      'queries, keys and values must have one floating-point dtype, not '
      f'{", ".join(sorted(map(str, dtypes)))}.'
    )
