"""Plain softmax attention by the kernels of libraries: cuDNN on NVIDIA GPUs, splash on TPUs.

Either returns finished softmax rows and no statistics, so it serves neither an extra key nor
another normalizer; the scale of RowSum and VBias act on the rows afterwards. XLA cannot partition
these kernels: every device calls them for its share.

Similarities, normalizers and masks are compared by class here, where others ask what a value
says of itself: a library computes what its authors wrote, so only the very classes that mean
the same are safe, and no subclass of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from sink_jax.attention.mask import Causal, Mask, Prefix, Window
from sink_jax.attention.normalizer import RowSum
from sink_jax.attention.similarity import Exp
from sink_jax.attention.spec import AttentionSpec, Params
from sink_jax.kernels.epilogue import ATTENTION, Shaped, apply_softmax_epilogue
from sink_jax.kernels.shard import shard_map_batch_heads

_LANES = 128  # of a TPU's vector registers, which splash fills


def attend(rows: Callable[..., jax.Array], spec: AttentionSpec, q_BxTxHxDh: jax.Array,
           k_BxTxHkvxDh: jax.Array, v_BxTxHkvxDh: jax.Array, params: Params) -> jax.Array:
  """Attention output (B, T, H, Dh) float32, by the rows of a library: `cudnn` or `splash`."""
  out, = shard_map_batch_heads('bthd bthd bthd -> bthd', lambda *share: (rows(spec, *share),),
                               q_BxTxHxDh, k_BxTxHkvxDh, v_BxTxHkvxDh)
  return apply_softmax_epilogue(spec, out, params)


def cudnn_unsupported(spec: AttentionSpec, q_BxTxHxDh: Shaped, k_BxTxHkvxDh: Shaped,
                      platform: str) -> str | None:
  """Why cuDNN cannot compute this, in one clause; None if it can."""
  dtype, length, head_dim = q_BxTxHxDh.dtype, q_BxTxHxDh.shape[1], q_BxTxHxDh.shape[-1]
  if platform != 'cuda':
    return f'it needs an NVIDIA GPU, not {platform}'
  if reason := _not_plain_softmax(spec, 'cuDNN'):
    return reason
  if type(spec.mask) not in (Causal, Window):
    return f'cuDNN knows the masks Causal() and Window(), not {spec.mask}'
  if dtype not in (jnp.bfloat16, jnp.float16) or k_BxTxHkvxDh.dtype != dtype:
    return ('cuDNN takes queries, keys and values all in bfloat16 or all in float16, not '
            f'{dtype} with {k_BxTxHkvxDh.dtype}')
  # 256 from Hopper on, which the shapes do not tell.
  if head_dim % 8 or head_dim > 128:
    return f'cuDNN takes a head dimension that is a multiple of 8 up to 128, not {head_dim}'
  if length == 1:
    return 'cuDNN up to version 9.9 refuses a mask for a single token'
  return None


def cudnn(spec: AttentionSpec, q_BxTxHxDh: jax.Array, k_BxTxHkvxDh: jax.Array,
          v_BxTxHkvxDh: jax.Array) -> jax.Array:
  """Softmax rows (B, T, H, Dh) in the dtype of v; grouped heads stay grouped."""
  window = None
  if spec.mask.window and spec.mask.window < q_BxTxHxDh.shape[1]:
    window = (spec.mask.window - 1, 0)  # how many keys to the left and right of the query
  # A window without is_causal has no right edge in cuDNN: queries would see the future.
  return jax.nn.dot_product_attention(
      q_BxTxHxDh, k_BxTxHkvxDh, v_BxTxHkvxDh, is_causal=True, local_window_size=window,
      implementation='cudnn')


def splash_unsupported(spec: AttentionSpec, q_BxTxHxDh: Shaped, k_BxTxHkvxDh: Shaped,
                       platform: str) -> str | None:
  """Why splash attention cannot compute this, in one clause; None if it can."""
  dtype, length, head_dim = q_BxTxHxDh.dtype, q_BxTxHxDh.shape[1], q_BxTxHxDh.shape[-1]
  if platform != 'tpu':
    return f'it needs a TPU, not {platform}'
  if reason := _not_plain_softmax(spec, 'splash attention'):
    return reason
  if type(spec.mask) not in (Causal, Window, Prefix):
    return f'splash attention is set up for Causal(), Window() and Prefix(), not {spec.mask}'
  if dtype not in (jnp.bfloat16, jnp.float32) or k_BxTxHkvxDh.dtype != dtype:
    return ('splash attention takes queries, keys and values all in bfloat16 or all in float32, '
            f'not {dtype} with {k_BxTxHkvxDh.dtype}')
  if head_dim > 256:
    return f'splash attention is set up for a head dimension up to 256, not {head_dim}'
  if length % _LANES:
    return f'splash attention takes a length that is a multiple of {_LANES}, not {length}'
  return None


def splash(spec: AttentionSpec, q_BxTxHxDh: jax.Array, k_BxTxHkvxDh: jax.Array,
           v_BxTxHkvxDh: jax.Array, *, interpret: bool = False) -> jax.Array:
  """Softmax rows (B, T, H, Dh) in the dtype of v; grouped heads stay grouped.

  interpret: run the kernel in Pallas' interpreter, which works on any machine.
  """
  length, heads, head_dim = q_BxTxHxDh.shape[1:]
  # The kernel has no factor for the scores, so the queries carry it. A product in float32
  # and one rounding leave errors that differ from entry to entry and average out in a
  # score, and for 64 or 256 channels the factor is a power of two and nothing is rounded.
  # A factor rounded to bfloat16 would bend all scores the same way, like a temperature.
  q = (q_BxTxHxDh.astype(jnp.float32) / math.sqrt(head_dim)).astype(q_BxTxHxDh.dtype)
  kernel = _splash_kernel(spec.mask, length, heads, _block(spec.mask, q), interpret)
  heads_first = lambda x: jnp.swapaxes(x, 1, 2)
  out = jax.vmap(kernel)(*map(heads_first, (q, k_BxTxHkvxDh, v_BxTxHkvxDh)))
  return heads_first(out).astype(v_BxTxHkvxDh.dtype)


def _block(mask: Mask, q_BxTxHxDh: Shaped) -> int:
  """Rows and columns of a splash tile: the most that divide the length and fit.

  Large tiles are faster. 1024 fit the 16 MiB of vector memory of a TPU v4 where a row of
  queries takes 256 bytes, 512 do up to 1024 bytes. A tile that reaches into a window is
  computed as a whole, so for a narrow window smaller ones leave out more.
  """
  limit = 1024 if q_BxTxHxDh.dtype.itemsize == 2 and q_BxTxHxDh.shape[-1] <= _LANES else 512
  if mask.window:
    limit = min(limit, max(mask.window, 256))
  return max(b for b in range(_LANES, limit + 1, _LANES) if q_BxTxHxDh.shape[1] % b == 0)


@functools.lru_cache(maxsize=64)
def _splash_kernel(mask: Mask, length: int, heads: int, block: int, interpret: bool):
  """A kernel for [heads, length, Dh], without a batch.

  Kept, since setting it up looks at every block of the T x T mask. It is set up outside
  of any trace in progress and holds NumPy arrays, so that it can serve other traces too.
  """
  # Imported here, so that nothing else needs it.
  from jax.experimental.pallas.ops.tpu import splash_attention

  tokens = np.arange(length, dtype=np.int32)

  class OfPackage(splash_attention.Mask):
    """A mask of this package as splash reads it: block by block when the kernel is set up."""

    # From these attributes, which splash's masks have too, it computes the mask of a tile inside
    # the kernel; without them it would load those tiles from memory.
    mask_function, q_sequence = staticmethod(mask.keep), tokens
    shape = (length, length)  # pyright: ignore[reportAssignmentType] a property there

    def __getitem__(self, index):
      i, j = (tokens[part] for part in index)
      return mask.keep(i[:, None], j[None, :])

  sizes = splash_attention.BlockSizes(
      block_q=block, block_kv=block, block_kv_compute=block,
      block_q_dkv=block, block_kv_dkv=block, block_kv_dkv_compute=block,
      block_q_dq=block, block_kv_dq=block)
  with core.eval_context():
    kernel = splash_attention.make_splash_mha(
        splash_attention.MultiHeadMask([OfPackage()] * heads), block_sizes=sizes, head_shards=1,
        q_seq_shards=1, interpret=interpret, residual_checkpoint_name=ATTENTION)
    return jax.tree.map(np.asarray, kernel)


def _not_plain_softmax(spec: AttentionSpec, kernel: str) -> str | None:
  if type(spec.similarity) is not Exp:
    return f'{kernel} computes softmax, so the similarity must be Exp(), not {spec.similarity}'
  if type(spec.normalizer) is not RowSum:
    return f'{kernel} computes softmax, so the normalizer must be RowSum(), not {spec.normalizer}'
  if spec.kv_bias.has_extra_key:
    return f'{kernel} gives no row statistics, which {spec.kv_bias} needs to join the softmax'
  if spec.position.has_bias:
    return f'{kernel} takes no bias on the scores, and {spec.position} adds one'
  return None
