"""`attention --sweep`: block sizes of the GPU kernels, timed one kernel at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp

from sink_jax.benchmark import machine
from sink_jax.benchmark.baselines import random_inputs, runs
from sink_jax.benchmark.records import Column, Document, SweepRow
from sink_jax.benchmark.timing import Countdown, measure, reason
from sink_jax.benchmark.variants import VARIANTS, chosen
from sink_jax.benchmark.work import Work
from sink_jax.kernels import flash_gpu, gpu_layout
from sink_jax.kernels.dispatch import platform
from sink_jax.kernels.epilogue import PartialAttention
from sink_jax.kernels.score_tile import row_cotangents

KERNELS = ('forward', 'dq', 'dkv', 'columns')
# (own, other, warps, stages), the likely ones first.
CANDIDATES = (
    (64, 64, 4, 3), (128, 64, 4, 3), (128, 64, 8, 3), (128, 32, 8, 2), (64, 64, 4, 2),
    (128, 64, 8, 2), (64, 64, 8, 2), (128, 128, 8, 2), (64, 32, 4, 3), (128, 32, 4, 3),
    (128, 32, 4, 2), (64, 128, 4, 2), (128, 64, 4, 2), (64, 32, 4, 2), (64, 64, 4, 4),
    (32, 64, 4, 2), (128, 128, 8, 3))
COLUMNS = [
    Column('shape', 'B,H,T,Dh'), Column('kernel', 'kernel'), Column('own', 'own', 'd'),
    Column('other', 'other', 'd'), Column('warps', 'warps', 'd'), Column('stages', 'stages', 'd'),
    Column('call_ms', 'ms', '.3f'), Column('vs_table', 'x of the table', '.2f'),
    Column('best', ''), Column('note', ''),
]


def run(shapes: Sequence[tuple[int, int, int, int]], variant: str, seed: int, seconds: float,
        limit: float | None = None, save: Callable[[Document], None] = lambda document: None,
        kernels: Sequence[str] = KERNELS,
        candidates: Sequence[tuple[int, int, int, int]] = CANDIDATES) -> Document:
  """Times every candidate of every kernel at every shape (B, H, T, Dh), in bfloat16.

  The present entry of the table comes first, and a candidate that does not compile is a row with
  the reason. Without an NVIDIA GPU the kernels are interpreted, which shows that the sweep works
  and nothing else.

  Args:
    candidates: (own, other, warps, stages) each, see `Blocks`.
  """
  spec = chosen([variant], VARIANTS, '--variants')[variant]
  interpret = platform() != 'cuda'
  where = machine.describe(seed) | {'dtype': 'bfloat16'}
  notes = [f'Kernels of {variant}, each on its own. x of the table: against the entry of BLOCKS.']
  if interpret:
    notes.append('INTERPRETED: these times say nothing about a GPU.')
  options = {'shapes': [list(s) for s in shapes], 'variant': variant, 'kernels': list(kernels),
             'candidates': [list(c) for c in candidates], 'seconds': seconds, 'limit': limit}
  rows: list[SweepRow] = []

  def result(complete):
    marked = _mark_best(rows)
    return Document('sweep', where, options, COLUMNS, marked, notes + paste(marked), complete)

  jobs = [(kernel, shape) for shape in shapes for kernel in kernels]
  progress = Countdown(len(jobs), limit)
  for kernel, shape in jobs:
    if progress.over():
      break
    progress.next(f'{kernel} at head dimension {shape[3]}')
    calls = _calls(kernel, Work(spec, shape, 'bfloat16', seed), interpret)
    # The present entry is timed first, because the other rows are divided by its time.
    present = _entry(kernel, shape[3])
    tried = [present, *(c for c in (gpu_layout.Blocks(*c) for c in candidates) if c != present)]
    compiled = _compile(kernel, shape[3], tried, *calls)
    base = None  # milliseconds of the entry in the table, which comes first
    for blocks, program in zip(tried, compiled):
      row = SweepRow(shape=','.join(map(str, shape)), head_dim=shape[3], kernel=kernel,
                     own=blocks.own, other=blocks.other, warps=blocks.warps, stages=blocks.stages,
                     note='in the table' if blocks == present else '')
      try:
        call = measure(runs(program.result(), *calls[1]), seconds)
        base = base or (call.median if blocks == present else None)
        row = dataclasses.replace(row, call=call, vs_table=call.median / base if base else None)
      except Exception as error:  # too much shared memory, most of all
        row = dataclasses.replace(row, failed=reason(error))
      rows.append(row)
      if progress.over():
        break
    save(result(False))
  return result(True)


def paste(rows: Sequence[SweepRow]) -> list[str]:
  """The best blocks as the text of BLOCKS in kernels/gpu_layout.py; [] without any.

  The table has one entry for a kernel and a head dimension. Where several shapes of one head
  dimension have different best blocks there is no such entry, and a line names them instead.
  """
  # By kernel and head dimension: {blocks: the shapes at which they are the best}.
  best: dict[str, dict[int, dict[str, list[str]]]] = {}
  for row in sorted(filter(lambda row: row.best, rows), key=lambda row: row.head_dim):
    blocks = f'Blocks({row.own}, {row.other}, {row.warps}, {row.stages})'
    by_blocks = best.setdefault(row.kernel, {}).setdefault(row.head_dim, {})
    by_blocks.setdefault(blocks, []).append(row.shape or '')
  lines, notes = [], []
  for kernel, of_kernel in best.items():
    entries = ', '.join(f'{head_dim}: {next(iter(blocks))}'
                        for head_dim, blocks in of_kernel.items() if len(blocks) == 1)
    lines += [f"    '{kernel}': {{{entries}}},"] if entries else []
    notes += [f'{kernel} at head dimension {head_dim}: the best blocks depend on the shape ('
              + '; '.join(f'{text} at {" and ".join(at)}' for text, at in blocks.items())
              + '): choose by the shape that matters.'
              for head_dim, blocks in of_kernel.items() if len(blocks) > 1]
  if lines:
    notes.append('For BLOCKS in sink_jax/kernels/gpu_layout.py:\n' + '\n'.join(lines))
  return notes


@contextlib.contextmanager
def patched(kernel: str, head_dim: int, blocks: gpu_layout.Blocks) -> Iterator[None]:
  """Gives the table another entry for this head dimension, while something is traced."""
  table = gpu_layout.BLOCKS[kernel]
  before = dict(table)
  # The smallest entry that holds the head dimension is taken, so one of exactly its size wins.
  table[head_dim] = blocks
  try:
    yield
  finally:
    table.clear()
    table.update(before)


def _entry(kernel, head_dim):
  table = gpu_layout.BLOCKS[kernel]
  return table[min(limit for limit in table if head_dim <= limit)]


def _calls(kernel, work, interpret):
  """A function that runs one kernel, and its inputs.

  The backward pass is two kernels, and no function runs one alone: of a program that returns the
  gradients of one only, the compiler drops the other.
  """
  (q, k, v, _), do = random_inputs(work)
  spec, options = work.spec, {'interpret': interpret}
  if kernel == 'forward':
    return lambda *x: flash_gpu.forward(spec, *x, **options), (q, k, v)
  forward = jax.jit(lambda *x: tuple(flash_gpu.forward(spec, *x, **options)))
  result = PartialAttention(*forward(q, k, v))
  if kernel == 'columns':
    # Weights of one: the kernel then sums the plain columns.
    rows = result.row_stats_BxHxT, jnp.ones_like(result.row_stats_BxHxT)
    length = work.shape[2]
    return lambda *x: flash_gpu.column_sums(spec, length, *x, **options), (q, k, *rows)
  # No cotangent comes from the statistics of the rows, as where the output alone is used.
  zeros = jnp.zeros_like(result.row_stats_BxHxT)
  rows = row_cotangents(spec, result, PartialAttention(do, zeros, zeros))
  wanted = slice(0, 1) if kernel == 'dq' else slice(1, 3)  # the other kernel is dropped
  return lambda *x: flash_gpu.backward(spec, *x, **options)[wanted], (q, k, v, do, *rows)


def _compile(kernel, head_dim, tried, f, arrays):
  """Traces the candidates one after the other and compiles them in threads; futures.

  Tracing reads the table of blocks, which is global, so it cannot be done in threads.
  """
  with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
    return [pool.submit(_lower(kernel, head_dim, blocks, f, arrays)) for blocks in tried]


def _lower(kernel, head_dim, blocks, f, arrays):
  """A function that compiles, or raises what tracing has raised."""
  try:
    with patched(kernel, head_dim, blocks):
      # A new function each time: of the same one JAX would reuse the trace with other blocks.
      return jax.jit(lambda *x: tuple(f(*x))).lower(*arrays).compile
  except Exception as error:
    refused = error

    def fail():
      raise refused

    return fail


def _mark_best(rows: list[SweepRow]) -> list[SweepRow]:
  """The rows, with `best` in the fastest of every kernel and shape."""
  best: dict[tuple[str, str | None], tuple[float, int]] = {}
  for number, row in enumerate(rows):
    if row.call:
      # Of equal times the earlier row wins.
      key, timed = (row.kernel, row.shape), (row.call.median, number)
      best[key] = min(best.get(key, timed), timed)
  numbers = {number for _, number in best.values()}
  return [dataclasses.replace(row, best='best' if number in numbers else '')
          for number, row in enumerate(rows)]
