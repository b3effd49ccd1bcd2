"""The Pallas kernels as one differentiable function, for whichever platform it is lowered.

`flash_tpu` and `flash_gpu` have the same four functions; one of them is chosen when a program is
lowered, not when it is traced, so a program can be compiled for a platform that is not here. The
forward pass keeps q, k, v, its output and the statistics of its rows; the backward kernels compute
the scores again, tile by tile.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from sink_jax.attention.spec import AttentionSpec
from sink_jax.kernels import flash_gpu, flash_tpu
from sink_jax.kernels.epilogue import ATTENTION, PartialAttention, Shaped
from sink_jax.kernels.score_tile import row_cotangents
from sink_jax.kernels.shard import shard_map_batch_heads

_INTERPRETED = flash_tpu  # interpreted, and slow, on a platform without kernels


def unsupported(platform: str, q_BxTxHxDh: Shaped, k_BxTxHkvxDh: Shaped) -> str | None:
  """Why the kernels do not run this on a platform, in one clause; None if they do."""
  dtypes = {jnp.dtype(x.dtype) for x in (q_BxTxHxDh, k_BxTxHkvxDh)}
  if len(dtypes) > 1 or not dtypes <= {jnp.dtype('bfloat16'), jnp.dtype('float32')}:
    return ('queries and keys must both be bfloat16 or float32, not '
            f'{q_BxTxHxDh.dtype} and {k_BxTxHkvxDh.dtype}')
  kernels = flash_gpu if platform == 'cuda' else flash_tpu
  return kernels.unsupported(q_BxTxHxDh.shape[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def rows(spec: AttentionSpec, q_BxTxHxDh: jax.Array, k_BxTxHkvxDh: jax.Array,
         v_BxTxHkvxDh: jax.Array) -> PartialAttention:
  """Rows, in the dtype of v, and statistics of transformed queries and keys; differentiable."""
  return _forward(spec, q_BxTxHxDh, k_BxTxHkvxDh, v_BxTxHkvxDh)[0]


def _forward(spec: AttentionSpec, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[
    PartialAttention, tuple[jax.Array, jax.Array, jax.Array, PartialAttention]]:
  rows = _on_platform('forward', 'bthd bthd bthd -> bthd bht bht', (spec,), q, k, v)
  result = checkpoint_name(PartialAttention(*rows), ATTENTION)
  return result, (q, k, v, result)


def _backward(
    spec: AttentionSpec, saved: tuple[jax.Array, jax.Array, jax.Array, PartialAttention],
    cotangents: PartialAttention) -> tuple[jax.Array, ...]:
  q, k, v, result = saved
  per_row = row_cotangents(spec, result, cotangents)
  layout = f'bthd bthd bthd bthd{" bht" * len(per_row)} -> bthd bthd bthd'
  return _on_platform('backward', layout, (spec,), q, k, v, cotangents.out_BxTxHxDh, *per_row)


rows.defvjp(_forward, _backward)


def statistics(spec: AttentionSpec, q_BxTxHxDh: jax.Array,
               k_BxTxHkvxDh: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
  """stat, power_stat and sum_j |f_ij| (B, H, T) float32; the last is zero for exp."""
  return _on_platform('statistics', 'bthd bthd -> bht bht bht', (spec,), q_BxTxHxDh, k_BxTxHkvxDh)


def column_sums(spec: AttentionSpec, keys: int, q_BxTxHxDh: jax.Array, k_BxTxHkvxDh: jax.Array,
                row_stats_BxHxT: jax.Array, *weights_BxHxT: jax.Array) -> tuple[jax.Array, ...]:
  """Sums over the rows i, (B, H, keys) float32: f_ij w_i, and |f_ij| w_i of a second w.

  Args:
    row_stats_BxHxT: for exp the logarithm that rows are relative to, f_ij = exp(s_ij - stat_i).
    weights_BxHxT: the factors w of the rows, one or two.
  """
  sums = ' bht' * len(weights_BxHxT)
  return _on_platform('column_sums', f'bthd bthd bht{sums} ->{sums}', (spec, keys), q_BxTxHxDh,
                      k_BxTxHkvxDh, row_stats_BxHxT, *weights_BxHxT)


def _on_platform(
    name: str, layout: str, static: tuple[AttentionSpec] | tuple[AttentionSpec, int],
    q_BxTxHxDh: jax.Array, *arrays: jax.Array) -> tuple:
  # The slopes are an input beside the arrays, so that a device which has some of the heads gets
  # the slopes of just those.
  slopes_H = jnp.asarray(static[0].position.slopes(q_BxTxHxDh.shape[2]), jnp.float32)

  def kernel(module, **options):
    return lambda slopes, *arrays: tuple(
        getattr(module, name)(*static, *arrays, slopes_H=slopes, **options))

  def share(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """What every device computes of its share."""
    with jax.enable_x64(False):  # in which the kernels' positions would be 64 bits wide
      return jax.lax.platform_dependent(
          *arrays, tpu=kernel(flash_tpu), cuda=kernel(flash_gpu),
          default=kernel(_INTERPRETED, interpret=True))

  # A Pallas call has no derivative; without this rule its error would name internals.
  @jax.custom_jvp
  def call(*arrays: jax.Array) -> tuple:
    return shard_map_batch_heads(f'h {layout}', share, slopes_H, *arrays)

  @call.defjvp
  def refuse(primals, tangents):
    what = 'importance has no gradient' if name in ('statistics', 'column_sums') else (
        'attention has no second derivative')
    raise NotImplementedError(
        f"{what} by implementation 'pallas': use implementation='chunked'.")

  return call(q_BxTxHxDh, *arrays)
