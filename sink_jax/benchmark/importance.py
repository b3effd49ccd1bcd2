"""`importance`: column means of attention without a T x T map, up to any length."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from sink_jax.attention.reference import attention_map
from sink_jax.benchmark import machine
from sink_jax.benchmark.baselines import Work, random_inputs, runs
from sink_jax.benchmark.flops import importance_flops
from sink_jax.benchmark.table import column, document
from sink_jax.benchmark.timing import Countdown, measure, reason
from sink_jax.benchmark.variants import VARIANTS, chosen
from sink_jax.evaluate.sinks import importance
from sink_jax.kernels.dispatch import choose_importance
from sink_jax.kernels.importance import streaming_importance

COLUMNS = [
    column('shape', 'B,H,T,Dh'), column('what', 'what'),
    column('implementation', 'implementation'), column('seconds', 'seconds', '.4f'),
    column('tflops', 'TFLOP/s', '.3g'), column('share', 'of matmul', '.0%'),
    column('mb', 'MB', ',.1f'), column('map_gb', 'float32 T x T, GB', ',.2f'), column('note', ''),
]
NOTES = [
    'seconds: median per call. MB: peak memory beside queries and keys.',
    'TFLOP/s: 2 H Dh per score that the mask leaves in each of two passes, the statistics of the '
    'rows and the sums over the columns; for the first keys the second pass is T x keys.',
    'float32 T x T: the size of one such map of all heads; the T x T row makes at least two.',
]


def run(lengths, heads, head_dims, keys, variant, dtype, seed, seconds, limit=None,
        save: Callable[[dict[str, Any]], None] = lambda result: None) -> dict[str, Any]:
  """Times all keys, the first `keys` keys and the T x T definition at every length.

  Raises:
    ValueError: an unknown variant, or more keys than tokens.
  """
  spec = chosen([variant], VARIANTS, '--variant')[variant]
  if keys > min(lengths):
    raise ValueError(f'--keys={keys} is more than --length={min(lengths)}.')
  shapes = [(1, heads, length, head_dim) for head_dim in head_dims for length in sorted(lengths)]
  cases = [(shape, what) for shape in shapes
           for what in ('all keys', f'first {keys} keys', 'T x T')]
  rate = machine.matmul_rate(dtype)
  where = machine.describe(seed) | {'matmul_tflops': rate and rate / 1e12, 'dtype': dtype}
  options = {'lengths': lengths, 'heads': heads, 'head_dims': head_dims, 'keys': keys,
             'variant': variant, 'seconds': seconds, 'limit': limit}
  rows: list[dict[str, Any]] = []
  result = lambda complete: document('importance', where, options, COLUMNS, rows, NOTES, complete)
  progress = Countdown(len(cases), limit)
  for shape, what in cases:
    text = ','.join(map(str, shape))
    row = {'shape': text, 'what': what, 'variant': variant,
           'map_gb': 4 * shape[1] * shape[2]**2 / 1e9}
    if progress.over():
      row['failed'] = 'not run: the time was up'
    else:
      progress.next(f'({text}) {what}')
      shown = keys if what.startswith('first') else None
      try:
        row |= _timed(Work(spec, shape, dtype, seed), what == 'T x T', shown, seconds, rate)
      except Exception as error:  # no memory, or no kernel for this
        row['failed'] = reason(error)
    rows.append(row)
    save(result(False))
  return result(True)


def _timed(work, definition, keys, seconds, rate):
  (q, k, _, params), _ = random_inputs(work)
  if definition:
    name = 'reference'
    needed, limit = 4 * work.shape[1] * work.shape[2]**2 * 3, machine.memory_limit()
    if needed > limit:
      return {'implementation': name,
              'failed': f'needs about {needed / 1e9:.0f} GB, there are {limit / 1e9:.0f} GB'}
    f = lambda q, k, params: importance(attention_map(work.spec, q, k, params, proxy=True))
  else:
    name = choose_importance(None, q, k)
    f = functools.partial(streaming_importance, work.spec, keys=keys)
  compiled = jax.jit(f).lower(q, k, params).compile()
  seen = []

  def call(*arrays):
    seen[:] = [compiled(*arrays)]
    return seen[0]

  timing = measure(runs(call, q, k, params), seconds)
  alpha = seen[0] if definition else seen[0].normalized
  flops = importance_flops(work.shape, work.spec.mask, keys)
  bytes_ = machine.compiled_bytes(compiled)
  return timing.named('call') | {
      'implementation': name, 'seconds': timing.median / 1000, 'flops': flops,
      'tflops': flops / timing.median / 1e9,
      'share': flops / timing.median * 1e3 / rate if rate else None,
      'bytes': bytes_, 'mb': None if bytes_ is None else bytes_ / 1e6,
      'alpha_1': float(jnp.mean(alpha[..., 0]))}
