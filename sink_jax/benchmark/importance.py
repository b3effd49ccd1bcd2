"""`importance`: column means of attention without a T x T map, up to any length."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from sink_jax.arguments import check_known
from sink_jax.attention.reference import attention_map
from sink_jax.benchmark import machine
from sink_jax.benchmark.baselines import random_inputs, runs
from sink_jax.benchmark.flops import importance_flops
from sink_jax.benchmark.records import Column, Document, ImportanceRow
from sink_jax.benchmark.timing import Countdown, measure, reason
from sink_jax.benchmark.variants import VARIANTS
from sink_jax.benchmark.work import Work
from sink_jax.evaluate.sinks import importance
from sink_jax.kernels.dispatch import choose_importance
from sink_jax.kernels.importance import streaming_importance

COLUMNS = [
    Column('shape', 'B,H,T,Dh'), Column('what', 'what'),
    Column('implementation', 'implementation'), Column('seconds', 'seconds', '.4f'),
    Column('tflops', 'TFLOP/s', '.3g'), Column('share', 'of matmul', '.0%'),
    Column('mb', 'MB', ',.1f'), Column('map_gb', 'float32 T x T, GB', ',.2f'), Column('note', ''),
]
NOTES = [
    'seconds: median per call. MB: peak memory beside queries and keys.',
    'TFLOP/s: 2 H Dh per score that the mask leaves in each of two passes, the statistics of the '
    'rows and the sums over the columns; for the first keys the second pass is T x keys.',
    'float32 T x T: the size of one such map of all heads; the T x T row makes at least two.',
]


def run(lengths: list[int], heads: int, head_dims: list[int], keys: int, variant: str, dtype: str,
        seed: int, seconds: float, limit: float | None = None,
        save: Callable[[Document], None] = lambda document: None) -> Document:
  """Times the importance of all keys, of the first `keys`, and by the T x T definition.

  Raises:
    ValueError: the variant is unknown, or there are more keys than tokens.
  """
  check_known(variant, VARIANTS, '--variant: unknown')
  spec = VARIANTS[variant]
  if keys > min(lengths):
    raise ValueError(f'--keys={keys} is more than --length={min(lengths)}.')
  # Within a head dimension from short to long: a time limit cuts off what takes longest.
  shapes = [(1, heads, length, head_dim) for head_dim in head_dims for length in sorted(lengths)]
  cases = [(shape, what) for shape in shapes
           for what in ('all keys', f'first {keys} keys', 'T x T')]
  rate = machine.matmul_rate(dtype)
  where = machine.describe(seed) | {'matmul_tflops': rate and rate / 1e12, 'dtype': dtype}
  options = {'lengths': lengths, 'heads': heads, 'head_dims': head_dims, 'keys': keys,
             'variant': variant, 'seconds': seconds, 'limit': limit}
  rows: list[ImportanceRow] = []
  result = lambda complete: Document('importance', where, options, COLUMNS, list(rows), NOTES,
                                     complete)
  progress = Countdown(len(cases), limit)
  for shape, what in cases:
    text = ','.join(map(str, shape))
    row = ImportanceRow(shape=text, what=what, variant=variant,
                        map_gb=4 * shape[1] * shape[2]**2 / 1e9)
    if progress.over():
      row = dataclasses.replace(row, failed='not run: the time was up')
    else:
      progress.next(f'({text}) {what}')
      first_keys = keys if what.startswith('first') else None
      try:
        row = _timed(row, Work(spec, shape, dtype, seed), first_keys, seconds, rate)
      except Exception as error:  # no memory, or no kernel for this
        row = dataclasses.replace(row, failed=reason(error))
    rows.append(row)
    save(result(False))
  return result(True)


def _timed(row: ImportanceRow, work: Work, keys: int | None, seconds: float,
           rate: float | None) -> ImportanceRow:
  """The row with its numbers; keys: the first ones alone, None for all."""
  (q, k, _, params), _ = random_inputs(work)
  definition = row.what == 'T x T'
  if definition:
    name = 'reference'
    # Scores, weights and one copy, in float32: asking for more memory than there is can end the
    # process instead of raising.
    needed, limit = 4 * work.shape[1] * work.shape[2]**2 * 3, machine.memory_limit()
    if needed > limit:
      return dataclasses.replace(
          row, implementation=name,
          failed=f'needs about {needed / 1e9:.0f} GB, there are {limit / 1e9:.0f} GB')
    f = lambda q, k, params: importance(attention_map(work.spec, q, k, params, proxy=True))
  else:
    name = choose_importance(None, work.spec, q, k)
    f = functools.partial(streaming_importance, work.spec, keys=keys)
  compiled = jax.jit(f).lower(q, k, params).compile()
  results = []  # of the newest call alone

  def call(*arrays):
    results[:] = [compiled(*arrays)]
    return results[0]

  timing = measure(runs(call, q, k, params), seconds)
  # A call may take minutes: none is made for the sake of its result.
  alpha = results[0] if definition else results[0].normalized
  flops = importance_flops(work.shape, work.spec.mask, keys)
  bytes_ = machine.compiled_bytes(compiled)
  return dataclasses.replace(
      row, call=timing, implementation=name, seconds=timing.median / 1000, flops=flops,
      tflops=flops / timing.median / 1e9,
      share=flops / timing.median * 1e3 / rate if rate else None,
      bytes=bytes_, mb=None if bytes_ is None else bytes_ / 1e6,
      alpha_1=float(jnp.mean(alpha[..., 0])))
