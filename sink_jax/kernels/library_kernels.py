"""Softmax attention by the kernels of libraries: cuDNN on NVIDIA GPUs, splash on TPUs.

Plain softmax calls their public functions. An extra key joins the softmax afterwards: the library
returns the logarithms of its row sums, and its backward kernels get the logarithms of the sums with
the extra key. XLA cannot partition these kernels: every device calls them for its share.

This file compares similarities, normalizers and masks by their exact class, where others read an
attribute: a library computes one fixed function, and a subclass may define another.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jax.ad_checkpoint import checkpoint_name

from sink_jax.attention.mask import Causal, Mask, Prefix, Window
from sink_jax.attention.normalizer import RowSum
from sink_jax.attention.similarity import Exp
from sink_jax.attention.spec import AttentionSpec, LayerParams
from sink_jax.foreign import standard_promotion
from sink_jax.kernels.block_mask import LANES, padded_tiles
from sink_jax.kernels.epilogue import ATTENTION, Shaped, extra_key_value, per_row, with_output_bias
from sink_jax.kernels.shard import shard_map_batch_heads

_FUSED = 2  # up to this number of tiles of keys splash runs one backward kernel


class Library(NamedTuple):
  """The kernels of a library, each of a spec and q, k, v; grouped heads stay grouped.

  Attributes:
    rows: finished rows of plain softmax (B, T, H, Dh), in the dtype of v; differentiable.
    forward: the same rows, not differentiable, and the logarithms (B, H, T) of their sums, float32.
    backward: takes also the rows, the logarithms and the cotangent of the rows; (dq, dk, dv).
  """

  rows: Callable[..., jax.Array]
  forward: Callable[..., tuple[jax.Array, jax.Array]]
  backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


def attend(
  library: Library,
  spec: AttentionSpec,
  q_BxTxHxDh: jax.Array,
  k_BxTxHkvxDh: jax.Array,
  v_BxTxHkvxDh: jax.Array,
  params: LayerParams,
) -> jax.Array:
  """Attention output (B, T, H, Dh) float32, by the kernels of a library: `CUDNN` or `SPLASH`."""
  out: Any
  if spec.kv_bias.has_extra_key:
    out = _with_extra_key(
      library,
      spec,
      q_BxTxHxDh,
      k_BxTxHkvxDh,
      v_BxTxHkvxDh,
      *extra_key_value(spec, q_BxTxHxDh, params),
    )
  else:
    rows = lambda *share: (library.rows(spec, *share),)
    (out,) = shard_map_batch_heads(
      'bthd bthd bthd -> bthd', rows, q_BxTxHxDh, k_BxTxHkvxDh, v_BxTxHkvxDh
    )
  assert isinstance(spec.normalizer, RowSum), 'these kernels refuse others'
  return with_output_bias(spec, out.astype(jnp.float32) * spec.normalizer.scale, params)


# Without the extra key, a softmax row is o and its sum of exponentials exp(L). An extra key with
# score s and value v* makes them L' = log(exp(L) + exp(s)) and o' = exp(L - L') o + exp(s - L') v*.
# The backward pass of softmax reads only scores, o', L' and the cotangent, so a library's kernels
# return the exact dq, dk and dv of the tokens.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _with_extra_key(
  library: Library,
  spec: AttentionSpec,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  extra_BxHxT: jax.Array,
  value_HxDh: jax.Array | None,
) -> jax.Array:
  """Rows (B, T, H, Dh) of softmax with an extra key, in the dtype of v."""
  return _extra_forward(library, spec, q, k, v, extra_BxHxT, value_HxDh)[0]


@standard_promotion()
def _extra_forward(
  library: Library,
  spec: AttentionSpec,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  extra_BxHxT: jax.Array,
  value_HxDh: jax.Array | None,
) -> tuple[jax.Array, Any]:
  out, lse_BxHxT = shard_map_batch_heads(
    'bthd bthd bthd -> bthd bht', functools.partial(library.forward, spec), q, k, v
  )
  total_BxHxT = jnp.logaddexp(lse_BxHxT, extra_BxHxT)
  out = out * per_row(jnp.exp(lse_BxHxT - total_BxHxT))
  if value_HxDh is not None:
    out = out + per_row(jnp.exp(extra_BxHxT - total_BxHxT)) * value_HxDh
  out, total_BxHxT = checkpoint_name((out.astype(v.dtype), total_BxHxT), ATTENTION)
  return out, (q, k, v, extra_BxHxT, value_HxDh, out, total_BxHxT)


@standard_promotion()
def _extra_backward(
  library: Library,
  spec: AttentionSpec,
  saved: Any,
  do_BxTxHxDh: jax.Array,
) -> tuple:
  q, k, v, extra_BxHxT, value_HxDh, out, total_BxHxT = saved
  of_tokens = shard_map_batch_heads(
    'bthd bthd bthd bthd bht bthd -> bthd bthd bthd',
    functools.partial(library.backward, spec),
    q,
    k,
    v,
    out,
    total_BxHxT,
    do_BxTxHxDh,
  )
  do = do_BxTxHxDh.astype(jnp.float32)
  weight_BxHxT, d_value = jnp.exp(extra_BxHxT - total_BxHxT), None
  d_weight_BxHxT = -jnp.einsum('bthd,bthd->bht', do, out.astype(jnp.float32))
  if value_HxDh is not None:
    d_weight_BxHxT += jnp.einsum('bthd,hd->bht', do, value_HxDh.astype(jnp.float32))
    d_value = jnp.einsum('bht,bthd->hd', weight_BxHxT, do).astype(value_HxDh.dtype)
  return *of_tokens, weight_BxHxT * d_weight_BxHxT, d_value


_with_extra_key.defvjp(_extra_forward, _extra_backward)


def cudnn_unsupported(
  spec: AttentionSpec,
  q_BxTxHxDh: Shaped,
  k_BxTxHkvxDh: Shaped,
  platform: str,
) -> str | None:
  """Why cuDNN cannot compute this, in one clause; None if it can."""
  dtype, length, head_dim = q_BxTxHxDh.dtype, q_BxTxHxDh.shape[1], q_BxTxHxDh.shape[-1]
  if platform != 'cuda':
    return f'it needs an NVIDIA GPU, not {platform}'
  if reason := _not_plain_softmax(spec, 'cuDNN'):
    return reason
  if type(spec.mask) not in (Causal, Window):
    return f'cuDNN knows the masks Causal() and Window(), not {spec.mask}'
  if dtype not in (jnp.bfloat16, jnp.float16) or k_BxTxHkvxDh.dtype != dtype:
    return (
      'cuDNN takes queries, keys and values all in bfloat16 or all in float16, not '
      f'{dtype} with {k_BxTxHkvxDh.dtype}'
    )
  # Hopper and later take 256, but shapes do not tell the GPU.
  if head_dim % 8 or head_dim > 128:
    return f'cuDNN takes a head dimension that is a multiple of 8 up to 128, not {head_dim}'
  if length == 1:
    return 'cuDNN up to version 9.9 refuses a mask for a single token'
  return None


def cudnn(
  spec: AttentionSpec,
  q_BxTxHxDh: jax.Array,
  k_BxTxHkvxDh: jax.Array,
  v_BxTxHkvxDh: jax.Array,
) -> jax.Array:
  """Softmax rows (B, T, H, Dh) in the dtype of v; grouped heads stay grouped."""
  # Without is_causal a window has no right edge in cuDNN: queries would see the future.
  window = _cudnn_window(spec, q_BxTxHxDh)
  return jax.nn.dot_product_attention(
    q_BxTxHxDh,
    k_BxTxHkvxDh,
    v_BxTxHkvxDh,
    is_causal=True,
    implementation='cudnn',
    # keys left and right of the query
    local_window_size=None if window is None else (window - 1, 0),
  )


def _cudnn_window(spec: AttentionSpec, q_BxTxHxDh: Shaped) -> int | None:
  window = spec.mask.window
  return window if window and window < q_BxTxHxDh.shape[1] else None


def _cudnn_forward(
  spec: AttentionSpec,
  q_BxTxHxDh: jax.Array,
  k_BxTxHkvxDh: jax.Array,
  v_BxTxHkvxDh: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  # jax.nn.dot_product_attention, which calls this function, would round the logarithms to 16 bits.
  from jax._src.cudnn import fused_attention_stablehlo as fused

  attention: Any = fused.dot_product_attention
  return attention(
    q_BxTxHxDh,
    k_BxTxHkvxDh,
    v_BxTxHkvxDh,
    mask_type=fused.MaskType.CAUSAL,
    scale=1 / math.sqrt(q_BxTxHxDh.shape[-1]),
    sliding_window_length=_cudnn_window(spec, q_BxTxHxDh),
    return_residual=True,
  )


def _cudnn_backward(
  spec: AttentionSpec,
  q_BxTxHxDh: jax.Array,
  k_BxTxHkvxDh: jax.Array,
  v_BxTxHkvxDh: jax.Array,
  out_BxTxHxDh: jax.Array,
  lse_BxHxT: jax.Array,
  do_BxTxHxDh: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  # JAX has no other way to give cuDNN's backward kernel other statistics.
  from jax._src.cudnn import fused_attention_stablehlo as fused

  unused = (jnp.zeros(0, q_BxTxHxDh.dtype),) * 7  # bias, lengths, offsets, page tables
  since_0_12 = {} if jax.__version_info__ < (0, 12) else {'score_mod': None}
  dq, dk, dv = fused._dot_product_attention_bwd_p_wrapper.bind(
    q_BxTxHxDh,
    k_BxTxHkvxDh,
    v_BxTxHkvxDh,
    *unused,
    lse_BxHxT,
    out_BxTxHxDh,
    do_BxTxHxDh,
    scale=1 / math.sqrt(q_BxTxHxDh.shape[-1]),
    seed=42,
    dropout_rate=0.0,
    variadic_args=(False, False),
    mask_type=fused.MaskType.CAUSAL,
    layout=fused.AttentionLayout.BTNH.value,
    sliding_window_length=_cudnn_window(spec, q_BxTxHxDh),
    **since_0_12,
  )
  return dq, dk, dv


CUDNN = Library(cudnn, _cudnn_forward, _cudnn_backward)


def splash_unsupported(
  spec: AttentionSpec,
  q_BxTxHxDh: Shaped,
  k_BxTxHkvxDh: Shaped,
  platform: str,
) -> str | None:
  """Why splash attention cannot compute this, in one clause; None if it can."""
  dtype, length, head_dim = q_BxTxHxDh.dtype, q_BxTxHxDh.shape[1], q_BxTxHxDh.shape[-1]
  if platform != 'tpu':
    return f'it needs a TPU, not {platform}'
  if reason := _not_plain_softmax(spec, 'splash attention'):
    return reason
  if type(spec.mask) not in (Causal, Window, Prefix):
    return f'splash attention is set up for Causal(), Window() and Prefix(), not {spec.mask}'
  if dtype not in (jnp.bfloat16, jnp.float32) or k_BxTxHkvxDh.dtype != dtype:
    return (
      'splash attention takes queries, keys and values all in bfloat16 or all in float32, '
      f'not {dtype} with {k_BxTxHkvxDh.dtype}'
    )
  if head_dim > 256:
    return f'splash attention is set up for a head dimension up to 256, not {head_dim}'
  if length % LANES and (spec.mask.prefix or 0) > length:
    return f'a length of {length} would be padded, and queries would see the padding'
  return None


def splash(
  spec: AttentionSpec,
  q_BxTxHxDh: jax.Array,
  k_BxTxHkvxDh: jax.Array,
  v_BxTxHkvxDh: jax.Array,
  *,
  interpret: bool = False,
) -> jax.Array:
  """Softmax rows (B, T, H, Dh) in the dtype of v; grouped heads stay grouped.

  interpret: run the kernel in Pallas' interpreter, which works on any machine.
  """
  length = q_BxTxHxDh.shape[1]
  q, k, v = _padded(spec.mask, _scaled(q_BxTxHxDh), k_BxTxHkvxDh, v_BxTxHkvxDh)
  kernel = _splash_kernel(*_splash_case(spec, q), interpret)
  out = jax.vmap(kernel)(*map(_heads_first, (q, k, v)))
  return _heads_first(out)[:, :length].astype(v_BxTxHkvxDh.dtype)


def _splash_forward(
  spec: AttentionSpec,
  q_BxTxHxDh: jax.Array,
  k_BxTxHkvxDh: jax.Array,
  v_BxTxHkvxDh: jax.Array,
  *,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
  length = q_BxTxHxDh.shape[1]
  q, k, v = _padded(spec.mask, _scaled(q_BxTxHxDh), k_BxTxHkvxDh, v_BxTxHkvxDh)
  kernel = _splash_kernel(*_splash_case(spec, q), interpret, save_residuals=True)
  out, (lse_BxHxT,) = jax.vmap(kernel)(*map(_heads_first, (q, k, v)))
  return _heads_first(out)[:, :length].astype(v_BxTxHkvxDh.dtype), lse_BxHxT[..., :length]


def _splash_backward(
  spec: AttentionSpec,
  q_BxTxHxDh: jax.Array,
  k_BxTxHkvxDh: jax.Array,
  v_BxTxHkvxDh: jax.Array,
  out_BxTxHxDh: jax.Array,
  lse_BxHxT: jax.Array,
  do_BxTxHxDh: jax.Array,
  *,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as module

  length = q_BxTxHxDh.shape[1]
  arrays = _scaled(q_BxTxHxDh), k_BxTxHkvxDh, v_BxTxHkvxDh, out_BxTxHxDh, do_BxTxHxDh
  padded = _padded(spec.mask, *arrays)
  kernel = _splash_kernel(*_splash_case(spec, padded[0]), interpret)

  def backward(q: Any, k: Any, v: Any, out: Any, lse: Any, do: Any) -> Any:
    saved = q, k, v, None, None, out, lse, kernel.dq_mask_info, kernel.dkv_mask_info
    return module._splash_attention_bwd(**kernel.kwargs, res=saved, do=do)[3:6]

  q, k, v, out, do = map(_heads_first, padded)
  # Padding queries have no cotangent, whatever their statistic is.
  lse = jnp.pad(lse_BxHxT, ((0, 0), (0, 0), (0, q.shape[2] - length)))
  gradients = map(_heads_first, jax.vmap(backward)(q, k, v, out, lse, do))
  d_scaled, dk, dv = (x[:, :length] for x in gradients)
  return (
    _scaled(d_scaled).astype(q_BxTxHxDh.dtype),
    dk.astype(k_BxTxHkvxDh.dtype),
    dv.astype(v_BxTxHkvxDh.dtype),
  )


SPLASH = Library(splash, _splash_forward, _splash_backward)


def _scaled(q_BxTxHxDh: jax.Array) -> jax.Array:
  # The kernel has no factor for the scores, so the queries carry it. A product in float32
  # and one rounding leave errors that differ from entry to entry and average out in a
  # score, and for 64 or 256 channels the factor is a power of two and nothing is rounded.
  # A factor rounded to bfloat16 would bend all scores the same way, like a temperature.
  return (q_BxTxHxDh.astype(jnp.float32) / math.sqrt(q_BxTxHxDh.shape[-1])).astype(q_BxTxHxDh.dtype)


def _padded(mask: Mask, q_BxTxHxDh: jax.Array, *others: jax.Array) -> list[jax.Array]:
  """Arrays (B, T, ...) with zeros at the end, up to a length that splash takes.

  The masks that splash takes hide later keys, so that no query of the text sees the padding.
  """
  length = q_BxTxHxDh.shape[1]
  if length % LANES:
    length, _ = padded_tiles(length, _most_rows(mask, q_BxTxHxDh))
  more = length - q_BxTxHxDh.shape[1]
  arrays = (q_BxTxHxDh, *others)
  return [jnp.pad(x, ((0, 0), (0, more), *[(0, 0)] * (x.ndim - 2))) for x in arrays]


def _heads_first(x: jax.Array) -> jax.Array:
  return jnp.swapaxes(x, 1, 2)


def _splash_case(spec: AttentionSpec, q_BxTxHxDh: Shaped) -> tuple[Mask, int, int, int]:
  _, length, heads, _ = q_BxTxHxDh.shape
  return spec.mask, length, heads, _block(spec.mask, q_BxTxHxDh)


def _block(mask: Mask, q_BxTxHxDh: Shaped) -> int:
  """Rows and columns of a splash tile: the largest size that divides the length and fits."""
  most = _most_rows(mask, q_BxTxHxDh)
  return max(b for b in range(LANES, most + 1, LANES) if q_BxTxHxDh.shape[1] % b == 0)


def _most_rows(mask: Mask, q_BxTxHxDh: Shaped) -> int:
  """The largest splash tile that fits.

  Large tiles are faster. On a TPU v4 with 16 MiB of vector memory 1024 fits if a row of queries
  takes 256 bytes, and 512 up to 1024 bytes. A tile that overlaps a window is computed completely,
  so smaller tiles leave out more of a narrow window's masked scores.
  """
  limit = 1024 if q_BxTxHxDh.dtype.itemsize == 2 and q_BxTxHxDh.shape[-1] <= LANES else 512
  if mask.window:
    limit = min(limit, max(mask.window, 256))
  return limit


@functools.lru_cache(maxsize=64)
def _splash_kernel(
  mask: Mask,
  length: int,
  heads: int,
  block: int,
  interpret: bool,
  save_residuals: bool = False,
):
  """A kernel for [heads, length, Dh], without a batch.

  It is cached, since its setup looks at every block of the T x T mask. The setup runs outside of
  any trace in progress and keeps NumPy arrays, so that other traces can use it.
  """
  # Imported here, so that only splash needs it.
  from jax.experimental.pallas.ops.tpu import splash_attention

  tokens = np.arange(length, dtype=np.int32)

  class OfPackage(splash_attention.Mask):
    """A mask of this package as splash reads it: block by block when the kernel is set up."""

    # From these attributes splash computes the mask of a tile inside the kernel, as for its masks;
    # without them it would load those tiles from memory.
    mask_function, q_sequence = staticmethod(mask.keep), tokens
    shape = (length, length)  # pyright: ignore[reportAssignmentType] a property there

    def __getitem__(self, index):
      i, j = (tokens[part] for part in index)
      return mask.keep(i[:, None], j[None, :])

  # One backward kernel takes 5 products of a tile where two take 7. It writes a dq for each tile of
  # keys, to be summed afterwards, so many tiles would take much memory.
  fused = length <= _FUSED * block
  of_dq = None if fused else block
  sizes = splash_attention.BlockSizes(
    block_q=block,
    block_kv=block,
    block_kv_compute=block,
    block_q_dkv=block,
    block_kv_dkv=block,
    block_kv_dkv_compute=block,
    block_q_dq=of_dq,
    block_kv_dq=of_dq,
    use_fused_bwd_kernel=fused,
  )
  with core.eval_context():
    kernel = splash_attention.make_splash_mha(
      splash_attention.MultiHeadMask([OfPackage()] * heads),
      block_sizes=sizes,
      head_shards=1,
      q_seq_shards=1,
      interpret=interpret,
      save_residuals=save_residuals,
      residual_checkpoint_name=ATTENTION,
    )
    return jax.tree.map(np.asarray, kernel)


def _not_plain_softmax(spec: AttentionSpec, kernel: str) -> str | None:
  if type(spec.similarity) is not Exp:
    return f'{kernel} computes softmax, so the similarity must be Exp(), not {spec.similarity}'
  if type(spec.normalizer) is not RowSum:
    return f'{kernel} computes softmax, so the normalizer must be RowSum(), not {spec.normalizer}'
  if spec.position.has_bias:
    return f'{kernel} takes no bias on the scores, and {spec.position} adds one'
  return None
