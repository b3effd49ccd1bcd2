"""The Pallas kernels as one differentiable function for any platform.

`flash_tpu` has two functions, forward and backward; `on_gpu` is both for `flash_gpu` and
`flash_mosaic`. A primitive stands for them until a program is lowered. Lowering imports and traces
only the module for the program's platform, which this machine need not have, or `flash_mosaic` on
request. The forward pass keeps q, k, v, its output and the statistics of its rows; the backward
kernels compute the scores again, tile by tile.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from sink_jax.attention.normalizer import Clipped
from sink_jax.attention.position import Relative
from sink_jax.attention.spec import AttentionSpec
from sink_jax.foreign import standard_promotion
from sink_jax.kernels.epilogue import ATTENTION, PartialAttention, Shaped
from sink_jax.kernels.score_tile import row_cotangents
from sink_jax.kernels.shard import shard_map_batch_heads

_INTERPRETED = 'tpu'  # its kernels are interpreted on platforms without kernels; slow
_LARGEST_HEAD_DIM = 256
_MOSAIC_JAX = (0, 11, 2)  # the kernels are written for the Mosaic GPU of jax from this version on
Backend = Literal['pallas', 'mosaic']


def unsupported(
  spec: AttentionSpec,
  q_BxTxHxDh: Shaped,
  k_BxTxHkvxDh: Shaped,
  platform: str,
) -> str | None:
  """Why the kernels do not run this on a platform, in one clause; None if they do."""
  if spec.similarity.kind == 'rectified':
    return f'{spec.similarity} weighs values by one function of a score and sums another'
  if isinstance(spec.normalizer, Clipped):
    return (
      f'{spec.normalizer} clips single weights, which takes the sum of a row before its '
      'first weight; the kernels know it after the last one'
    )
  dtypes = {jnp.dtype(x.dtype) for x in (q_BxTxHxDh, k_BxTxHkvxDh)}
  if len(dtypes) > 1 or not dtypes <= {jnp.dtype('bfloat16'), jnp.dtype('float32')}:
    return (
      'queries and keys must both be bfloat16 or float32, not '
      f'{q_BxTxHxDh.dtype} and {k_BxTxHkvxDh.dtype}'
    )
  head_dim, multiple = q_BxTxHxDh.shape[-1], 16 if platform == 'cuda' else 8
  if head_dim % multiple or head_dim > _LARGEST_HEAD_DIM:
    return f'head_dim = {head_dim} is not a multiple of {multiple} up to {_LARGEST_HEAD_DIM}'
  return None


def mosaic_unsupported(
  spec: AttentionSpec,
  q_BxTxHxDh: Shaped,
  k_BxTxHkvxDh: Shaped,
  platform: str,
) -> str | None:
  """Why the Mosaic GPU kernels do not run this, in one clause; None if they do."""
  if jax.__version_info__ < _MOSAIC_JAX:
    return f'it needs jax {".".join(map(str, _MOSAIC_JAX))} or newer, not {jax.__version__}'
  # Without a GPU here the program is for another machine, whose capability is unknown: assume
  # Hopper.
  capability = getattr(jax.devices()[0], 'compute_capability', '9.0')
  if platform != 'cuda' or not capability.startswith('9.'):
    return 'it needs an NVIDIA GPU of the Hopper generation (compute capability 9.0)'
  if q_BxTxHxDh.dtype != jnp.bfloat16 or q_BxTxHxDh.shape[-1] > 128:
    return (
      f'it takes bfloat16 and a head_dim up to 128, not {q_BxTxHxDh.dtype} and '
      f'{q_BxTxHxDh.shape[-1]}'
    )
  if isinstance(spec.position, Relative):
    return f'Mosaic GPU has no floor function, by which {spec.position} makes buckets'
  return unsupported(spec, q_BxTxHxDh, k_BxTxHkvxDh, platform)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 4))
def rows(
  spec: AttentionSpec,
  q_BxTxHxDh: jax.Array,
  k_BxTxHkvxDh: jax.Array,
  v_BxTxHkvxDh: jax.Array,
  backend: Backend = 'pallas',
) -> PartialAttention:
  """Rows, in the dtype of v, and row statistics of transformed queries and keys; differentiable."""
  return _forward(spec, q_BxTxHxDh, k_BxTxHkvxDh, v_BxTxHkvxDh, backend)[0]


@standard_promotion()
def _forward(
  spec: AttentionSpec,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  backend: Backend,
) -> tuple[PartialAttention, tuple[jax.Array, jax.Array, jax.Array, PartialAttention]]:
  rows = _on_every_device('forward', 'bthd bthd bthd -> bthd bht bht', spec, backend, q, k, v)
  result = checkpoint_name(PartialAttention(*rows), ATTENTION)
  return result, (q, k, v, result)


@standard_promotion()
def _backward(
  spec: AttentionSpec,
  backend: Backend,
  saved: tuple[jax.Array, jax.Array, jax.Array, PartialAttention],
  cotangents: PartialAttention,
) -> tuple[jax.Array, ...]:
  q, k, v, result = saved
  per_row = row_cotangents(spec, result, cotangents)
  layout = f'bthd bthd bthd bthd{" bht" * len(per_row)} -> bthd bthd bthd'
  return _on_every_device(
    'backward', layout, spec, backend, q, k, v, cotangents.out_BxTxHxDh, *per_row
  )


rows.defvjp(_forward, _backward)


def _on_every_device(
  kernels: Literal['forward', 'backward'],
  layout: str,
  spec: AttentionSpec,
  backend: Backend,
  q_BxTxHxDh: jax.Array,
  *arrays: jax.Array,
) -> tuple[jax.Array, ...]:
  # The slopes are an input next to the arrays, so that a device with some of the heads gets only
  # their slopes.
  slopes_H = jnp.asarray(spec.position.slopes(q_BxTxHxDh.shape[2]), jnp.float32)
  bind = functools.partial(_kernels_p.bind, kernels=kernels, spec=spec, backend=backend)
  return shard_map_batch_heads(f'h {layout}', bind, slopes_H, q_BxTxHxDh, *arrays)


# `jax.lax.platform_dependent` would trace the kernels of all platforms for each call.
_kernels_p = Primitive('attention_kernels')
_kernels_p.multiple_results = True
_kernels_p.def_impl(jax.jit(_kernels_p.bind, static_argnames=('kernels', 'spec', 'backend')))


@_kernels_p.def_abstract_eval
def _shapes(slopes, q, k, v, *rest, kernels, spec, backend):
  if kernels == 'backward':
    return [ShapedArray(x.shape, x.dtype) for x in (q, k, v)]
  batch, length, heads, _ = q.shape
  statistic = ShapedArray((batch, heads, length), jnp.dtype('float32'))
  return [ShapedArray(q.shape, v.dtype), statistic, statistic]


def on_gpu(
  call,
  kernels: str,
  spec: AttentionSpec,
  slopes_H: jax.Array,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *do_and_rows: jax.Array,
  interpret: Any = False,
) -> tuple[jax.Array, ...]:
  """The result of `flash_tpu`, by the kernels of `flash_gpu` or `flash_mosaic`."""
  if kernels == 'forward':
    row = jax.ShapeDtypeStruct((q.shape[0], q.shape[2], q.shape[1]), jnp.float32)
    results = jax.ShapeDtypeStruct(q.shape, v.dtype), row, row
    return call('forward', spec, slopes_H, [q], [k, v], results, interpret)
  return (
    *call('dq', spec, slopes_H, [q, *do_and_rows], [k, v], [q], interpret),
    *call('dkv', spec, slopes_H, [k, v], [q, *do_and_rows], [k, v], interpret),
  )


def _lowered_for(platform: str | None):
  @standard_promotion()
  def run(slopes_H, *arrays, kernels, spec, backend):
    # Imported here, so that only a program for a platform needs that platform's compiler.
    compute: Any
    if backend == 'mosaic':
      from sink_jax.kernels.flash_mosaic import call

      compute = functools.partial(on_gpu, call, kernels)
    elif (platform or _INTERPRETED) == 'cuda':
      from sink_jax.kernels.flash_gpu import call

      compute = functools.partial(on_gpu, call, kernels)
    else:
      from sink_jax.kernels import flash_tpu

      compute = getattr(flash_tpu, kernels)
    with jax.enable_x64(False):  # x64 would make the kernels' positions 64 bits wide
      return compute(spec, slopes_H, *arrays, interpret=platform is None)

  return mlir.lower_fun(run, multiple_results=True)


for _platform in ('tpu', 'cuda', None):
  mlir.register_lowering(_kernels_p, _lowered_for(_platform), platform=_platform)


def _batched(arrays, axes, **options):
  """Merges the axis of a `vmap` into the batch."""
  (slopes_H, *arrays), (_, *axes) = arrays, axes
  size = next(x.shape[axis] for x, axis in zip(arrays, axes) if axis is not None)
  first = (batching.bdim_at_front(x, axis, size) for x, axis in zip(arrays, axes))
  results = _kernels_p.bind(slopes_H, *(x.reshape(-1, *x.shape[2:]) for x in first), **options)
  return [x.reshape(size, -1, *x.shape[1:]) for x in results], [0] * len(results)


def _refuse(*arguments, backend, **options):
  raise NotImplementedError(
    'attention has no second derivative by implementation '
    f"'{backend}': use implementation='chunked'."
  )


batching.primitive_batchers[_kernels_p] = _batched
ad.primitive_jvps[_kernels_p] = _refuse
