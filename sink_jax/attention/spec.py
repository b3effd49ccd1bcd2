"""AttentionSpec: one attention variant, as a hashable value."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sink_jax.attention.extra_key_value import ExtraKeyValue, NoBias
from sink_jax.attention.feature_map import FeatureMap, Identity
from sink_jax.attention.head import HeadOutput, PlainOutput
from sink_jax.attention.mask import Causal, Mask
from sink_jax.attention.normalizer import AbsSum, Normalizer, RowSum
from sink_jax.attention.param import AnyArray, Dims, Param, soft_cap
from sink_jax.attention.position import Position, Positions, Rope
from sink_jax.attention.qk_norm import NoQKNorm, QueryKeyNorm
from sink_jax.attention.similarity import Exp, Similarity
from sink_jax.attention.temperature import Fixed, Temperature
from sink_jax.attention.value import PlainValue, Value
from sink_jax.component import Component, from_string

Params = Mapping[str, Mapping[str, AnyArray]]  # of one layer: {component: {name: array}}

# The largest eps of a sum of similarities that leaves a row's weights shares of one. The official
# code (sail-sg/Attention-Sink) adds 1e-8; a sum of sigmoids is about half the number of keys.
_NEGLECTED = 1e-6

# The fields of a spec, by the names that they have in configs, and the base of their values.
COMPONENTS: dict[str, type[Component]] = {
    'similarity': Similarity,
    'normalizer': Normalizer,
    'feature_map': FeatureMap,
    'position': Position,
    'mask': Mask,
    'kv_bias': ExtraKeyValue,
    'qk_norm': QueryKeyNorm,
    'temperature': Temperature,
    'value': Value,
    'head': HeadOutput,
}


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
  """out_i = 1/Z_i sum_j M(i,j) f(phi(q_i).phi(k_j)/sqrt(Dh) + g(i,j)) v_j.

  Afterwards `head` may gate or normalise each head's out before W_O. The defaults are the paper's
  baseline: softmax, a causal mask, rotary positions. Each component may also be given as its config
  string. A spec is hashable and compared by value, so it can be a static argument of jitted
  functions. The following combinations make no sense and raise a ValueError, where Exp stands for
  CappedExp as well:

  * Exp with Unnormalized or Count: exp overflows unless it is divided by a sum of exp.
  * Exp with RowSum(eps=...): rows of exp are computed relative to their maximum, where an absolute
    eps has no fixed meaning.
  * PNorm or RowSum with a similarity that can be negative (Linear, unless the features are positive
    and there is no position bias and no sink logit): the sum may have no root, or vanish.
  * Softpick without AbsSum, or AbsSum without Softpick: the two are parts of one operation.
  * Clipped with a similarity other than Exp: it clips the weights of softmax.
  * An extra key without a value (KBias with a zero value, SinkLogit) with Unnormalized, where it
    has no effect on the output, or with Count, where its parameters have none.
  * ZeroSink or PseudoMask with a similarity other than Exp: they add to a sum of exponentials.
  * PseudoMask with Prefix: it stands for the keys after the query, some of which a prefix shows.
  * LogLength with a mask that does not define how many keys a query sees.
  """

  similarity: Similarity = Exp()
  normalizer: Normalizer = RowSum()
  feature_map: FeatureMap = Identity()
  position: Position = Rope()
  mask: Mask = Causal()
  kv_bias: ExtraKeyValue = NoBias()
  qk_norm: QueryKeyNorm = NoQKNorm()
  temperature: Temperature = Fixed()
  value: Value = PlainValue()
  head: HeadOutput = PlainOutput()

  def __post_init__(self):
    for name, base in COMPONENTS.items():
      # The way around `frozen`: config strings become components before anything hashes the spec.
      object.__setattr__(self, name, from_string(base, getattr(self, name)))
    f, z, bias = self.similarity, self.normalizer, self.kv_bias
    if (f.kind == 'rectified') != isinstance(z, AbsSum):
      raise ValueError(f'{f} with {z}: Softpick() and AbsSum() are parts of one operation; use '
                       'both, or neither.')
    if f.kind == 'exponential' and not z.power:
      raise ValueError(f'{f} with {z} overflows: use RowSum() (softmax) or another '
                       'similarity, such as Sigmoid() or Relu().')
    if f.kind == 'exponential' and isinstance(z, RowSum) and z.eps:
      raise ValueError(f'{f} with {z}: rows of exp are computed relative to their maximum, '
                       'where eps has no fixed meaning; use RowSum() without eps.')
    if z.clips and f.kind != 'exponential':
      raise ValueError(f'{z} clips the weights of softmax, and {f} has none: use Exp(), or '
                       'RowSum() with this similarity.')
    if z.needs_nonnegative and self.signed:
      raise ValueError(f'{z} needs similarities that cannot be negative, but {f} of '
                       f'{self.feature_map} with {self.position} can be: use AbsFloor() or '
                       'Unnormalized(), or EluPlusOne() features without a position bias.')
    if z.power is None and bias.acts_only_through_normalisation:
      raise ValueError(f'{bias} has no effect with {z}: an extra key without a value acts only '
                       'through the normalisation; use KVBias() or a normalizer.')
    if self.temperature.counts_keys:
      self.mask.visible(0, 1)  # raises where the mask has no such number
    if bias.needs_exponential and f.kind != 'exponential':
      raise ValueError(f'{bias} adds to a sum of exponentials, which rows of {f} have not: use '
                       'Exp(), or KVBias() with this similarity.')
    if bias.future is not None and self.mask.prefix is not None:
      raise ValueError(f'{bias} stands for keys after the query, and {self.mask} shows some of '
                       'them: use Causal() or Window().')
    if z.power == 0 and bias.acts_only_through_normalisation:
      raise ValueError(f'{bias} has no score that {z} reads: without a value an extra key is one '
                       'key more, whatever its parameters are; use KVBias() or RowSum().')

  @property
  def signed(self) -> bool:
    """Whether a similarity f(s) can be negative."""
    # A bias or an extra logit may be negative, whatever the sign of phi(q).phi(k).
    positive = (self.feature_map.positive and not self.position.has_bias
                and not self.kv_bias.logit_may_be_negative)
    return self.similarity.signed and not positive

  @property
  def scores_by_difference(self) -> bool:
    """Whether rotations make q_i . k_j depend on positions by the difference i - j alone."""
    # Features of a rotated vector are not the rotated features.
    return self.position.turns and isinstance(self.feature_map, Identity)

  @property
  def rows_sum_to_one(self) -> bool:
    """Whether a row's weights, with the extra key's, are >= 0 and sum to one, as in softmax."""
    # `type` and not isinstance: a subclass may divide by something else.
    z = self.normalizer
    return type(z) is RowSum and z.scale == 1 and z.eps <= _NEGLECTED

  def params(self, dims: Dims) -> dict[str, dict[str, Param]]:
    """Returns the parameters of one layer, {component: {name: Param}}.

    Components without parameters are left out. Position embeddings belong to the model, not to a
    layer.
    """
    params = {name: getattr(self, name).params(dims)
              for name in ('feature_map', 'kv_bias', 'qk_norm', 'temperature', 'value', 'head')}
    return {name: by_name for name, by_name in params.items() if by_name}

  def strings(self) -> dict[str, str]:
    """Returns the config string of every component; `AttentionSpec(**strings)` is the spec."""
    return {name: repr(getattr(self, name)) for name in COMPONENTS}


class TransformedQK(NamedTuple):
  """Queries and keys of tokens 0..T-1 as the scores see them: normalised, rotated, mapped.

  Queries have the factor of the temperature.

  Scores are their products over sqrt(Dh); grouped keys keep their Hkv heads. The two are made
  once and handed to whatever needs scores of them: an implementation of attention, its
  importance, its maps.
  """

  q_BxTxHxDh: jax.Array
  k_BxTxHkvxDh: jax.Array


def transform_qk(spec: AttentionSpec, q_BxTxHxDh: AnyArray, k_BxTxHkvxDh: AnyArray,
                 params: Params) -> TransformedQK:
  """The transformed queries and keys of projected ones.

  Raises:
    ValueError: shapes or dtypes that do not fit together, parameters that are not those of the
      spec.
  """
  return position_qk(spec, *normalize_qk(spec, q_BxTxHxDh, k_BxTxHkvxDh, params), params)


def normalize_qk(spec: AttentionSpec, q_BxTxHxDh: AnyArray, k_BxTxHkvxDh: AnyArray,
                 params: Params) -> tuple[jax.Array, jax.Array]:
  """Normalised queries and keys: the first step of `transform_qk`, before positions come in.

  A cache keeps keys in this form. Shapes, dtypes and `params` are checked here.
  """
  dims = dims_of(q_BxTxHxDh, k_BxTxHkvxDh)
  check_dtypes(q_BxTxHxDh, k_BxTxHkvxDh)
  # Queries and keys do not show the width of what they were projected from.
  width = spec.head.input_width(dims.heads, dims.head_dim, params.get('head', {}))
  dims = dataclasses.replace(dims, d_model=width)
  # The last argument holds the heads that arrays (B, H, T, Dh) would have, for a hint in the error.
  check_params(spec, dims, params, dataclasses.replace(
      dims, heads=q_BxTxHxDh.shape[1], kv_heads=k_BxTxHkvxDh.shape[1]))
  norm_params = params.get('qk_norm', {})
  return (spec.qk_norm.queries(jnp.asarray(q_BxTxHxDh), norm_params),
          spec.qk_norm.keys(jnp.asarray(k_BxTxHkvxDh), norm_params))


def position_qk(spec: AttentionSpec, q_BxTxHxDh: jax.Array, k_BxTxHkvxDh: jax.Array,
                params: Params) -> TransformedQK:
  """The second step of `transform_qk`, of normalised queries and keys."""
  # NumPy positions: the angles of rotary embeddings are then constants of the program.
  tokens = np.arange(q_BxTxHxDh.shape[1])
  q_BxTxHxDh = scaled_queries(spec, q_BxTxHxDh, tokens, params)
  return TransformedQK(apply_position_and_features(spec, q_BxTxHxDh, tokens, params),
                       apply_position_and_features(spec, k_BxTxHkvxDh, tokens, params))


def scaled_queries(spec: AttentionSpec, q_BxLxHxDh: jax.Array, positions_L: Positions,
                   params: Params) -> jax.Array:
  """Normalised queries with the factor of the temperature."""
  factor_LxH = spec.temperature.factor_LxH(positions_L, spec.mask, params.get('temperature', {}))
  if factor_LxH is None:
    return q_BxLxHxDh
  # Like a rotation it is computed in float32, and the query is rounded once.
  return (q_BxLxHxDh.astype(jnp.float32) * factor_LxH[:, :, None]).astype(q_BxLxHxDh.dtype)


def transform_values(spec: AttentionSpec, v_BxTxHkvxDh: jax.Array, params: Params,
                     first_BxTxHkvxDh: jax.Array | None = None) -> jax.Array:
  """The values that attention mixes, of projected ones and, but in the first block, of its."""
  return spec.value.values(v_BxTxHkvxDh, params.get('value', {}), first_BxTxHkvxDh)


def apply_position_and_features(spec: AttentionSpec, x_BxTxHxDh: jax.Array, positions_T: Positions,
                                params: Params) -> jax.Array:
  """Normalised queries or keys, rotated by their positions and mapped to features."""
  return spec.feature_map.features(spec.position.rotate(x_BxTxHxDh, positions_T),
                                   params.get('feature_map', {}))


def extra_key_logit(spec: AttentionSpec, q_BxLxHxDh: jax.Array, params: Params,
                    i_L: Positions) -> jax.Array | None:
  """Score (B, H, L) float32 of the extra key for transformed queries at positions i_L.

  It is None without an extra key.
  """
  if not spec.kv_bias.has_extra_key:
    return None
  heads, head_dim = q_BxLxHxDh.shape[2:]
  extra_params = params.get('kv_bias', {})
  # The number of key heads is unknown here and does not matter: k* has a row per query head.
  key = spec.kv_bias.key_HxDh(extra_params, Dims(heads, heads, head_dim))
  if key is None:
    logit_HxL = spec.kv_bias.logit_HxL(extra_params, heads, i_L).astype(jnp.float32)
    return jnp.broadcast_to(logit_HxL, (q_BxLxHxDh.shape[0], heads, q_BxLxHxDh.shape[1]))
  # k* passes the feature map like any key, but has no position: it is never rotated.
  key = spec.feature_map.features(key, params.get('feature_map', {}))
  # The precision of the tokens' scores, which compete with this one in the same row.
  product = jnp.einsum('blhd,hd->bhl', q_BxLxHxDh, key.astype(q_BxLxHxDh.dtype),
                       preferred_element_type=jnp.float32)
  return soft_cap(product / math.sqrt(head_dim), spec.similarity.limit)


def repeat_heads(x_BxTxHkvxDh: jax.Array, heads: int) -> jax.Array:
  """Grouped keys or values (B, T, H, Dh), each repeated for the query heads of its group."""
  # `repeat`, not `tile`: the first H / Hkv query heads read key head 0, as in LLaMA and Mistral.
  return jnp.repeat(x_BxTxHkvxDh, heads // x_BxTxHkvxDh.shape[2], axis=2)


def dims_of(q_BxLxHxDh: AnyArray, k_BxTxHkvxDh: AnyArray) -> Dims:
  """The sizes of queries and keys; raises a ValueError where they do not fit together."""
  if q_BxLxHxDh.ndim != 4 or k_BxTxHkvxDh.ndim != 4:
    raise ValueError('q, k and v must have the axes (batch, length, heads, head_dim), not '
                     f'{q_BxLxHxDh.shape} and {k_BxTxHkvxDh.shape}.')
  if 0 in q_BxLxHxDh.shape or 0 in k_BxTxHkvxDh.shape:
    raise ValueError(f'nothing to attend to: {q_BxLxHxDh.shape}, {k_BxTxHkvxDh.shape}.')
  heads, kv_heads = q_BxLxHxDh.shape[2], k_BxTxHkvxDh.shape[2]
  if heads % kv_heads or q_BxLxHxDh.shape[-1] != k_BxTxHkvxDh.shape[-1]:
    raise ValueError(f'{heads} query heads must be a multiple of {kv_heads} key heads, of '
                     f'equal head_dim: {q_BxLxHxDh.shape}, {k_BxTxHkvxDh.shape}.'
                     f'{_transposed(q_BxLxHxDh.shape, k_BxTxHkvxDh.shape)}')
  if q_BxLxHxDh.shape[:2] != k_BxTxHkvxDh.shape[:2]:
    raise ValueError('queries and keys must have the same batch and length: '
                     f'{q_BxLxHxDh.shape}, {k_BxTxHkvxDh.shape}.'
                     f'{_transposed(q_BxLxHxDh.shape, k_BxTxHkvxDh.shape)}')
  return Dims(heads, kv_heads, q_BxLxHxDh.shape[-1])


def check_dtypes(*arrays: AnyArray) -> None:
  """Raises a ValueError unless queries, keys and perhaps values have one floating-point dtype."""
  dtypes = {array.dtype for array in arrays}
  # Rotations of integers would be rounded to integers.
  if len(dtypes) > 1 or not all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
    raise ValueError('queries, keys and values must have one floating-point dtype, not '
                     f'{", ".join(sorted(map(str, dtypes)))}.')


def transposed(which: str) -> str:
  """A hint for the error where arrays would fit with their axes of length and heads exchanged."""
  return (f' {which} look like (B, H, T, Dh), and (B, T, H, Dh) is wanted: exchange their axes by '
          'x.swapaxes(1, 2).')


def _transposed(q: tuple[int, ...], k: tuple[int, ...]) -> str:
  """The hint of `transposed` for the shape that would fit if it were transposed, or ''."""
  other = lambda shape: (shape[0], shape[2], shape[1], shape[3])
  fit = lambda q, k: q[:2] == k[:2] and q[3] == k[3] and q[2] % k[2] == 0
  # Both exchanged comes first: a caller of another layout most likely has it in all arrays.
  for which, a, b in (('The arrays', other(q), other(k)), ('The keys', q, other(k)),
                      ('The queries', other(q), k)):
    if fit(a, b):
      return transposed(which)
  return ''


def check_params(spec: AttentionSpec, dims: Dims, params: Params,
                 exchanged: Dims | None = None) -> None:
  """Raises a ValueError unless `params` holds just the parameters of the spec.

  Args:
    exchanged: the sizes if the arrays had their axes of length and heads exchanged.
  """
  shapes = lambda dims: {component: {name: p.shape for name, p in by_name.items()}
                         for component, by_name in spec.params(dims).items()}
  wanted = shapes(dims)
  given = {component: {name: tuple(x.shape) for name, x in by_name.items()}
           for component, by_name in params.items()}
  if wanted != given:
    # Transposed arrays of ungrouped heads pass `dims_of`, which takes T for the number of heads:
    # the parameters are then the first that do not fit.
    hint = transposed('The arrays') if exchanged and given == shapes(exchanged) else ''
    raise ValueError(f'params must hold {wanted or "nothing"} for this spec, not '
                     f'{given or "nothing"}.{hint}')
