"""`attention --sweep`: block sizes of the GPU kernels, timed one kernel at a time, in bfloat16."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from sink_jax.arguments import check_known
from sink_jax.benchmark.attention import SHAPES, VARIANTS, attention_flops
from sink_jax.benchmark.implementations import Work, random_inputs
from sink_jax.benchmark.machine import compiled
from sink_jax.benchmark.rows import FLOOR, Case, Column, Rates, ratio_columns, time_group
from sink_jax.kernels import flash_gpu, gpu_layout
from sink_jax.kernels.dispatch import platform
from sink_jax.kernels.epilogue import PartialAttention
from sink_jax.kernels.score_tile import row_cotangents

# (own, other, warps, stages), see `Blocks`.
CANDIDATES = (
    (64, 64, 4, 3), (128, 64, 4, 3), (128, 64, 8, 3), (128, 32, 8, 2), (64, 64, 4, 2),
    (128, 64, 8, 2), (64, 64, 8, 2), (128, 128, 8, 2), (64, 32, 4, 3), (128, 32, 4, 3),
    (128, 32, 4, 2), (64, 128, 4, 2), (128, 64, 4, 2), (64, 32, 4, 2), (64, 64, 4, 4),
    (32, 64, 4, 2), (128, 128, 8, 3))
_PRODUCTS = {'forward': 2, 'dq': 3, 'dkv': 4}  # of T x T x Dh, in each kernel
COLUMNS: list[Column] = [
    ('shape', 'B,H,T,Dh', ''), ('kernel', 'kernel', ''), ('own', 'own', 'd'), ('other', 'other', 'd'),
    ('warps', 'warps', 'd'), ('stages', 'stages', 'd'), ('ms', 'ms', '.3f'), *ratio_columns('x the table'),
    *FLOOR, ('failed', '', '')]
NOTES = ('The first row of each kernel is the entry of BLOCKS in sink_jax/kernels/gpu_layout.py, with which the '
         'others are compared. Without an NVIDIA GPU the kernels are interpreted, and the times mean nothing.')


def run(rates: Rates, dtype: str, seed: int, seconds: float, shape: Sequence[tuple[int, int, int, int]],
        variants: Sequence[str], implementations: Sequence[str] = ()) -> list[dict[str, Any]]:
  """The rows of every candidate of every kernel at every shape (B, H, T, Dh), sorted by time.

  Raises:
    ValueError: an unknown variant, or options that are not for block sizes.
  """
  if implementations or len(variants) > 1:
    raise ValueError('--sweep times block sizes of the kernels of this package with one variant: leave '
                     '--implementations out, and write --variants softmax.')
  variant = (*variants, 'softmax')[0]
  check_known(variant, VARIANTS, '--variants: unknown')
  spec, rows = VARIANTS[variant], []
  for one_shape in shape or SHAPES[True][:3]:  # one per head dimension, the key of the table
    work = Work(spec, one_shape, dtype, seed)
    flops = attention_flops(one_shape, spec.mask)[0] / 2  # of one product
    for kernel, products in _PRODUCTS.items():
      f, *arrays = _kernel(kernel, work)
      present = gpu_layout.choose_blocks(kernel, dtype, one_shape[3])
      tried = dict.fromkeys([present, *(gpu_layout.Blocks(*candidate) for candidate in CANDIDATES)])
      cases = []
      for blocks in tried:
        row = {'shape': ','.join(map(str, one_shape)), 'variant': variant, 'kernel': kernel} | vars(blocks)
        prepare = functools.partial(_prepare, row, kernel, one_shape[3], blocks, f, arrays)
        cases.append(Case(row, prepare, flops * products, sum(x.nbytes for x in arrays), blocks == present))
      time_group(cases, seconds, rates)
      rows += [cases[0].row, *sorted((case.row for case in cases[1:]), key=lambda row: row.get('ms', 1e9))]
  return rows


def _prepare(row, kernel, head_dim, blocks, f, arrays):
  """Compiles a kernel while the table has other blocks for its head dimension."""
  table = gpu_layout.BLOCKS[kernel]
  before = dict(table)
  table[head_dim] = blocks  # it wins: the smallest entry that holds the head dimension is taken
  try:
    # A new function each time: for the same one JAX would reuse the trace with other blocks.
    return compiled(row, lambda *x: tuple(f(*x)), *arrays)
  finally:
    table.clear()
    table.update(before)


def _kernel(kernel: str, work: Work) -> tuple[Callable[..., Any], *tuple[jax.Array, ...]]:
  """A function that runs one kernel, and its inputs."""
  (q, k, v, _), do = random_inputs(work)
  interpret, spec = platform() != 'cuda', work.spec
  forward = functools.partial(flash_gpu.forward, spec, interpret=interpret)
  if kernel == 'forward':
    return forward, q, k, v
  result = PartialAttention(*jax.jit(forward)(q, k, v))
  # No cotangent comes from the statistics of the rows, as where only the output is used.
  zeros = jnp.zeros_like(result.row_stats_BxHxT)
  rows = row_cotangents(spec, result, PartialAttention(do, zeros, zeros))
  wanted = slice(0, 1) if kernel == 'dq' else slice(1, 3)  # the compiler drops the other kernel
  return lambda *x: flash_gpu.backward(spec, *x, interpret=interpret)[wanted], q, k, v, do, *rows
