"""The implementations of attention as values of one interface, and the table of them.

Each takes transformed queries and keys (see `attention.spec.transform_qk`) and returns finished
rows: kernels compute partial rows and statistics, to which `epilogue` adds the rest.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from sink_jax.attention import reference
from sink_jax.attention.spec import AttentionSpec, Params, repeat_heads
from sink_jax.kernels import chunked, flash, library_kernels, linear
from sink_jax.kernels.epilogue import Shaped, apply_epilogue, apply_softmax_epilogue
from sink_jax.kernels.shard import shard_map_batch_heads

# Why a kernel does not run (spec, q, k, platform), in one clause; None if it does.
_Unsupported = Callable[[AttentionSpec, Shaped, Shaped, str], str | None]


@dataclasses.dataclass(frozen=True)
class Implementation(abc.ABC):
  """One way to compute attention.

  compiled_for: platforms that it is compiled for; it is interpreted on any other. None: all.
  """

  name: str
  compiled_for: tuple[str, ...] | None = None

  def unsupported(self, spec: AttentionSpec, q_BxTxHxDh: Shaped, k_BxTxHkvxDh: Shaped,
                  platform: str) -> str | None:
    """Why it does not run a case on a platform, in one clause; None if it does.

    Reads shapes and dtypes alone, so arrays, tracers and ShapeDtypeStructs do.
    """
    return None

  @abc.abstractmethod
  def attend(self, spec: AttentionSpec, q_BxTxHxDh: jax.Array, k_BxTxHkvxDh: jax.Array,
             v_BxTxHkvxDh: jax.Array, params: Params) -> jax.Array:
    """Attention output (B, T, H, Dh) of transformed queries and keys, in any float dtype."""


@dataclasses.dataclass(frozen=True)
class Reference(Implementation):
  """The T x T definition, which every other implementation is tested against."""

  def attend(self, spec: AttentionSpec, q_BxTxHxDh: jax.Array, k_BxTxHkvxDh: jax.Array,
             v_BxTxHkvxDh: jax.Array, params: Params) -> jax.Array:
    tokens = jnp.arange(q_BxTxHxDh.shape[1])
    return reference.attend(spec, q_BxTxHxDh, k_BxTxHkvxDh, v_BxTxHkvxDh, params, tokens, tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel(Implementation):
  """A kernel of this package: rows and their statistics, finished by the epilogue.

  grouped: it takes fewer heads of keys than of queries; otherwise they are repeated for it.
  """

  rows: Callable[..., Any]  # (spec, q, k, v) -> PartialAttention; jax.custom_vjp has no types
  reason: _Unsupported = lambda spec, q, k, platform: None
  grouped: bool = True

  def unsupported(self, spec: AttentionSpec, q_BxTxHxDh: Shaped, k_BxTxHkvxDh: Shaped,
                  platform: str) -> str | None:
    return self.reason(spec, q_BxTxHxDh, k_BxTxHkvxDh, platform)

  def attend(self, spec: AttentionSpec, q_BxTxHxDh: jax.Array, k_BxTxHkvxDh: jax.Array,
             v_BxTxHkvxDh: jax.Array, params: Params) -> jax.Array:
    heads = q_BxTxHxDh.shape[2]
    k, v = ((k_BxTxHkvxDh, v_BxTxHkvxDh) if self.grouped else
            (repeat_heads(k_BxTxHkvxDh, heads), repeat_heads(v_BxTxHkvxDh, heads)))
    return apply_epilogue(spec, q_BxTxHxDh, self.rows(spec, q_BxTxHxDh, k, v), params)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunked(Kernel):
  """The kernel in plain XLA, which also has whole rows at hand for normalizers that clip them."""

  def attend(self, spec: AttentionSpec, q_BxTxHxDh: jax.Array, k_BxTxHkvxDh: jax.Array,
             v_BxTxHkvxDh: jax.Array, params: Params) -> jax.Array:
    if spec.normalizer.clips:
      return chunked.whole_rows(spec, q_BxTxHxDh, k_BxTxHkvxDh, v_BxTxHkvxDh, params)
    return super().attend(spec, q_BxTxHxDh, k_BxTxHkvxDh, v_BxTxHkvxDh, params)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SoftmaxLibrary(Implementation):
  """Plain softmax by the library of a platform, which returns finished rows and no statistics."""

  platform: str
  device: str  # the platform in words, for the error
  rows: Callable[[AttentionSpec, jax.Array, jax.Array, jax.Array], jax.Array]
  reason: Callable[[AttentionSpec, Shaped, Shaped], str | None]

  def unsupported(self, spec: AttentionSpec, q_BxTxHxDh: Shaped, k_BxTxHkvxDh: Shaped,
                  platform: str) -> str | None:
    if platform != self.platform:
      return f'it needs {self.device}, not {platform}'
    return self.reason(spec, q_BxTxHxDh, k_BxTxHkvxDh)

  def attend(self, spec: AttentionSpec, q_BxTxHxDh: jax.Array, k_BxTxHkvxDh: jax.Array,
             v_BxTxHkvxDh: jax.Array, params: Params) -> jax.Array:
    # XLA cannot partition these kernels: every device calls them for its share.
    rows, = shard_map_batch_heads(
        'bthd bthd bthd -> bthd', lambda *share: (self.rows(spec, *share),),
        q_BxTxHxDh, k_BxTxHkvxDh, v_BxTxHkvxDh)
    return apply_softmax_epilogue(spec, rows, params)


def _pallas_unsupported(spec: AttentionSpec, q_BxTxHxDh: Shaped, k_BxTxHkvxDh: Shaped,
                        platform: str) -> str | None:
  if spec.normalizer.clips:
    return (f'{spec.normalizer} clips single weights, which takes the sum of a row before its '
            'first weight; the kernels know it after the last one')
  return flash.unsupported(platform, q_BxTxHxDh, k_BxTxHkvxDh)


# In the order in which errors list them.
ALL: dict[str, Implementation] = {each.name: each for each in (
    Reference('reference'),
    Chunked('chunked', rows=chunked.rows, grouped=False),
    Kernel('linear', rows=linear.rows,
           reason=lambda spec, q, k, platform: linear.unsupported(spec)),
    Kernel('pallas', compiled_for=('cuda', 'tpu'), rows=flash.rows,
           reason=_pallas_unsupported),
    SoftmaxLibrary('cudnn', platform='cuda', device='an NVIDIA GPU', rows=library_kernels.cudnn,
                   reason=library_kernels.cudnn_unsupported),
    SoftmaxLibrary('splash', platform='tpu', device='a TPU', rows=library_kernels.splash,
                   reason=library_kernels.splash_unsupported))}
