"""`attend`: one entry to every implementation of attention, and the choice among them.

The choice reads the platform, shapes and the spec; it never tries and catches. A named
implementation runs or raises: a sweep that silently changed kernels would give a wrong table.
"""

from __future__ import annotations

import functools
import logging

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sink_jax.arguments import check_known
from sink_jax.attention import AnyArray, reference
from sink_jax.attention.spec import (
  AttentionSpec,
  LayerParams,
  TransformedQK,
  check_dtypes,
  transform_qk,
)
from sink_jax.devices import platform
from sink_jax.foreign import standard_promotion
from sink_jax.kernels import chunked, flash, library_kernels
from sink_jax.kernels.epilogue import Shaped, apply_epilogue

_log = logging.getLogger('sink_jax')
# Our kernels, and our calls of libraries, are written for jax from this version on.
_KERNELS_JAX = (0, 10)


@standard_promotion()
def attend(
  spec: AttentionSpec,
  q_BxTxHxDh: Float[AnyArray, 'B T H Dh'],
  k_BxTxHkvxDh: Float[AnyArray, 'B T Hkv Dh'],
  v_BxTxHkvxDh: Float[AnyArray, 'B T Hkv Dh'],
  params: LayerParams | None = None,
  *,
  gate: Float[AnyArray, 'B T D'] | None = None,
  implementation: str | None = None,
) -> Float[Array, 'B T H Dh']:
  """Returns the attention output (B, T, H, Dh) of a variant, in the dtype of the queries.

  It applies the complete spec: QK norm, temperature, rotation, feature map, changes of values,
  mask, similarity, extra keys and values, normalizer, gates or norms of heads. Only embeddings of
  positions (Sinusoidal, Learned) are not applied: a model adds them to its inputs. H may be a
  multiple of Hkv (grouped-query attention).

  Args:
    params: {component: {name: array}} for the components that have parameters; their shapes
      are `spec.params(Dims(heads, kv_heads, head_dim, d_model))`.
    gate: the input (B, T, D) from which queries, keys and values were projected (in a pre-norm
      block its normed input); needed if the spec's `head` reads it, else None.
    implementation: one of the following, which agree to rounding. The default is the first in a
      fixed list for this platform that runs the case; which one it is, is logged.

      - 'reference': the T x T definition.
      - 'chunked': plain XLA with memory linear in T, on every platform. All that follow need jax
        0.10 or newer.
      - 'pallas': the kernels of this package for TPUs and NVIDIA GPUs, for every variant but
        Softpick and Clipped, in float32 or bfloat16, with a head dimension up to 256 that is a
        multiple of 16 on GPUs and of 8 elsewhere, where they are interpreted and very slow. A
        shard_map around them needs check_vma=False.
      - 'mosaic': the same kernels in Mosaic GPU, for Hopper GPUs and jax from 0.11.2 on, in
        bfloat16 with a head dimension up to 128; not for Relative.
      - 'cudnn', 'splash': softmax, with any extra key, by these libraries for GPUs and for TPUs.

  Raises:
    ValueError: shapes or dtypes do not fit, parameters are missing, the implementation is unknown,
      a gate lacks its input, or an input is given that no gate reads.
    NotImplementedError: the implementation does not run this case; the message gives the reason.
      No other implementation is tried instead.
  """
  params = params or {}
  check_implementation(implementation)
  _check_shapes(spec, q_BxTxHxDh, k_BxTxHkvxDh, v_BxTxHkvxDh, gate)
  check_dtypes(q_BxTxHxDh, k_BxTxHkvxDh, v_BxTxHkvxDh, *([] if gate is None else [gate]))
  qk = transform_qk(spec, q_BxTxHxDh, k_BxTxHkvxDh, params)
  v = spec.value.values(jnp.asarray(v_BxTxHkvxDh), params.get('value', {}))
  x = None if gate is None else jnp.asarray(gate)
  return attend_transformed(spec, qk, v, params, x, implementation=implementation)


def _check_shapes(
  spec: AttentionSpec, q: Shaped, k: Shaped, v: Shaped, gate: Shaped | None
) -> None:
  if k.shape != v.shape:
    raise ValueError(f'keys and values must have one shape, not {k.shape} and {v.shape}.')
  fits = gate is None or (len(gate.shape), gate.shape[:2]) == (3, q.shape[:2])
  if not fits or (gate is not None) != spec.head.reads_input:
    raise ValueError(
      'gate must be what queries, keys and values are projected from, (B, T, D), '
      f'for a head that reads it, and None for any other: {spec.head} with '
      f'{getattr(gate, "shape", None)}.'
    )


def attend_transformed(
  spec: AttentionSpec,
  qk: TransformedQK,
  v_BxTxHkvxDh: jax.Array,
  params: LayerParams,
  gate_BxTxD: jax.Array | None = None,
  *,
  implementation: str | None = None,
) -> jax.Array:
  """`attend` for queries, keys and values that are transformed already and have matching shapes."""
  q, k = qk
  name = implementation or choose(spec, q, k)
  reason = unsupported(name, spec, q, k)
  if reason:
    raise NotImplementedError(f"implementation '{name}': {reason}. 'chunked' runs every case.")
  _, compute = _TABLE[name]
  o = compute(spec, q, k, v_BxTxHkvxDh, params)
  return spec.head.output(o, v_BxTxHkvxDh, gate_BxTxD, params.get('head', {})).astype(q.dtype)


def _reference(
  spec: AttentionSpec,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  params: LayerParams,
) -> jax.Array:
  tokens = jnp.arange(q.shape[1])
  return reference.attend(spec, q, k, v, params, tokens, tokens)


def _pallas(
  spec: AttentionSpec,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  params: LayerParams,
  *,
  backend: flash.Backend = 'pallas',
) -> jax.Array:
  if platform() not in ('cuda', 'tpu'):
    _log_once(f"attention: 'pallas' is interpreted on {platform()}, and very slow")
  return apply_epilogue(spec, q, flash.rows(spec, q, k, v, backend), params)


# {name: (unsupported(spec, q, k, platform), attend(spec, q, k, v, params))}. The first returns, in
# one clause, why the implementation does not run a case on a platform, or None. The second takes
# transformed queries and keys, and returns finished rows (B, T, H, Dh) in any float dtype.
_TABLE = {
  'reference': (lambda *case: None, _reference),
  'chunked': (lambda *case: None, chunked.attend),
  'pallas': (flash.unsupported, _pallas),
  'mosaic': (flash.mosaic_unsupported, functools.partial(_pallas, backend='mosaic')),
  'cudnn': (
    library_kernels.cudnn_unsupported,
    functools.partial(library_kernels.attend, library_kernels.CUDNN),
  ),
  'splash': (
    library_kernels.splash_unsupported,
    functools.partial(library_kernels.attend, library_kernels.SPLASH),
  ),
}
IMPLEMENTATIONS = tuple(_TABLE)
# What `choose` tries on each platform, in this order; 'chunked' if none of them runs the case.
# Libraries come before our kernels, which are slower on plain softmax.
_PREFERRED = {'cuda': ('cudnn', 'pallas'), 'tpu': ('splash', 'pallas')}


def choose(spec: AttentionSpec, q_BxTxHxDh: Shaped, k_BxTxHkvxDh: Shaped) -> str:
  """Returns the implementation that this platform uses by default.

  It is logged once, with those that are refused. `choose` reads only shapes and dtypes, so arrays,
  tracers and ShapeDtypeStructs will do.
  """
  reasons = {
    name: unsupported(name, spec, q_BxTxHxDh, k_BxTxHkvxDh)
    for name in _PREFERRED.get(platform(), ())
  }
  name = next((name for name, reason in reasons.items() if not reason), 'chunked')
  refused = ''.join(f'; not {other}: {reason}' for other, reason in reasons.items() if reason)
  level = logging.DEBUG if not refused else logging.WARNING if _jax_is_old() else logging.INFO
  _log_once(f'attention: {name} on {platform()}{refused}', level)
  return name


def unsupported(
  name: str,
  spec: AttentionSpec,
  q_BxTxHxDh: Shaped,
  k_BxTxHkvxDh: Shaped,
) -> str | None:
  """Why an implementation does not run a case on this platform, or None."""
  if name not in ('reference', 'chunked') and _jax_is_old():
    return f'it needs jax {".".join(map(str, _KERNELS_JAX))} or newer, not {jax.__version__}'
  reason, _ = _TABLE[name]
  return reason(spec, q_BxTxHxDh, k_BxTxHkvxDh, platform())


def _jax_is_old() -> bool:
  return jax.__version_info__ < _KERNELS_JAX


def check_implementation(implementation: str | None) -> None:
  """Raises a ValueError that lists the choices."""
  if implementation is not None:
    check_known(implementation, IMPLEMENTATIONS, 'Unknown implementation')


@functools.lru_cache(maxsize=None)  # a trace of every layer and step would log it again
def _log_once(message: str, level: int = logging.INFO) -> None:
  _log.log(level, message)
