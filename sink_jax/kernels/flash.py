"""The Pallas kernels as one differentiable function, for whichever platform it is lowered."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from sink_jax.attention.spec import AttentionSpec
from sink_jax.kernels import flash_gpu, flash_tpu
from sink_jax.kernels.finish import KernelRows
from sink_jax.kernels.sharded import over_batch
from sink_jax.kernels.tile import row_cotangents

_INTERPRETED = flash_tpu  # what runs, slowly, on a platform without kernels


def unsupported(platform: str, q_BxTxHxDh, k_BxTxHkvxDh) -> str | None:
  """Why the kernels do not run this on a platform, in one clause; None if they do."""
  dtypes = {jnp.dtype(x.dtype) for x in (q_BxTxHxDh, k_BxTxHkvxDh)}
  if len(dtypes) > 1 or not dtypes <= {jnp.dtype('bfloat16'), jnp.dtype('float32')}:
    return ('queries and keys must both be bfloat16 or float32, not '
            f'{q_BxTxHxDh.dtype} and {k_BxTxHkvxDh.dtype}')
  kernels = flash_gpu if platform == 'cuda' else flash_tpu
  return kernels.unsupported(q_BxTxHxDh.shape[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def rows(spec: AttentionSpec, q_BxTxHxDh, k_BxTxHkvxDh, v_BxTxHkvxDh) -> KernelRows:
  """Rows, in the dtype of v, and statistics of prepared queries and keys; differentiable."""
  return _forward(spec, q_BxTxHxDh, k_BxTxHkvxDh, v_BxTxHkvxDh)[0]


def _forward(spec, q, k, v):
  result = KernelRows(*_on_platform('forward', (spec,), q, k, v))
  return result, (q, k, v, result)


def _backward(spec, saved, cotangents):
  q, k, v, result = saved
  per_row = row_cotangents(spec, result, cotangents)
  return _on_platform('backward', (spec,), q, k, v, cotangents.out_BxTxHxDh, *per_row)


rows.defvjp(_forward, _backward)


def statistics(spec: AttentionSpec, q_BxTxHxDh, k_BxTxHkvxDh):
  """stat, power_stat and sum_j |f_ij| (B, H, T) float32; the last is zero for exp."""
  return _on_platform('statistics', (spec,), q_BxTxHxDh, k_BxTxHkvxDh)


def columns(spec: AttentionSpec, keys: int, q_BxTxHxDh, k_BxTxHkvxDh, stat_BxHxT,
            *weights_BxHxT):
  """Sums over the rows i, (B, H, keys) float32: f_ij w_i, and |f_ij| w_i of a second w.

  stat: for exp the logarithm that rows are relative to, f_ij = exp(s_ij - stat_i).
  """
  return _on_platform('columns', (spec, keys), q_BxTxHxDh, k_BxTxHkvxDh, stat_BxHxT,
                      *weights_BxHxT)


def _on_platform(name, static, *arrays):
  def kernel(module, **options):
    return lambda *arrays: tuple(getattr(module, name)(*static, *arrays, **options))

  def share(*arrays):
    with jax.enable_x64(False):  # in which the kernels' positions would be 64 bits wide
      return jax.lax.platform_dependent(
          *arrays, tpu=kernel(flash_tpu), cuda=kernel(flash_gpu),
          default=kernel(_INTERPRETED, interpret=True)), ()

  @jax.custom_jvp
  def call(*arrays):
    return over_batch(share, *arrays)[0]

  @call.defjvp
  def refuse(primals, tangents):
    what = 'importance has no gradient' if name in ('statistics', 'columns') else (
        'attention has no second derivative')
    raise NotImplementedError(
        f"{what} by implementation 'pallas': use implementation='chunked'.")

  return call(*arrays)
