"""`loss`: cross-entropy with its gradients, in chunks and with the logits of all positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from sink_jax.benchmark import machine
from sink_jax.benchmark.baselines import runs
from sink_jax.benchmark.flops import loss_flops
from sink_jax.benchmark.table import column, document
from sink_jax.benchmark.timing import Countdown, measure, reason
from sink_jax.train.loss import cross_entropy

COLUMNS = [
    column('shape', 'B,T,D,V'), column('what', 'what'),
    column('both_ms', 'loss+gradients ms', '.3f'), column('tflops', 'TFLOP/s', '.3g'),
    column('share', 'of matmul', '.0%'), column('mb', 'MB', ',.0f'),
    column('loss', 'nats/token', '.4f'), column('vs_plain', 'x plain', '.2f'), column('note', ''),
]
NOTES = [
    'loss+gradients: median milliseconds of the loss with its gradients in h (B, T, D) and W '
    '(D, V). MB: peak memory beside the inputs, gradients included.',
    'plain: float32 logits of all positions, differentiated by JAX. TFLOP/s: 6 B T D V.',
]


def plain_cross_entropy(h_BxTxD, kernel_DxV, targets_BxT, weights_BxT):
  """The same sum as `train.loss.cross_entropy`, by its definition."""
  logits = jnp.einsum('btd,dv->btv', h_BxTxD, kernel_DxV.astype(h_BxTxD.dtype),
                      preferred_element_type=jnp.float32)
  chosen = jnp.take_along_axis(logits, targets_BxT[..., None], -1)[..., 0]
  return jnp.sum((jax.nn.logsumexp(logits, -1) - chosen) * weights_BxT)


def run(tokens, d_model, vocab, dtype, seed, seconds, limit=None,
        save: Callable[[dict[str, Any]], None] = lambda result: None) -> dict[str, Any]:
  """Times both forms at tokens = (B, T)."""
  batch, length = tokens
  rate = machine.matmul_rate(dtype)
  where = machine.describe(seed) | {'matmul_tflops': rate and rate / 1e12, 'dtype': dtype}
  options = {'tokens': list(tokens), 'd_model': d_model, 'vocab': vocab, 'seconds': seconds,
             'limit': limit}
  h = machine.random(seed, (batch, length, d_model), dtype)
  kernel = machine.random(seed + 1, (d_model, vocab), 'float32') / d_model**0.5
  targets = jax.random.randint(jax.random.key(seed), (batch, length), 0, vocab)
  arrays = h, kernel, targets, jnp.full((batch, length), 1 / (batch * length))
  rows: list[dict[str, Any]] = []
  result = lambda complete: document('loss', where, options, COLUMNS, rows, NOTES, complete)
  forms = {'in chunks (ours)': cross_entropy, 'plain': plain_cross_entropy}
  progress = Countdown(len(forms), limit)
  for what, f in forms.items():
    row = {'shape': f'{batch},{length},{d_model},{vocab}', 'what': what}
    if progress.over():
      row['failed'] = 'not run: the time was up'
    else:
      progress.next(what)
      try:
        row |= _timed(f, arrays, loss_flops(batch * length, d_model, vocab), seconds, rate)
      except Exception as error:  # most of all, no memory
        row['failed'] = reason(error)
    rows.append(row)
    base = rows[-1].get('both_ms') if what == 'plain' else None
    for other in rows:
      if base and 'both_ms' in other:
        other['vs_plain'] = other['both_ms'] / base
    save(result(False))
  return result(True)


def _timed(f, arrays, flops, seconds, rate):
  compiled = jax.jit(jax.value_and_grad(f, (0, 1))).lower(*arrays).compile()
  bytes_, limit = machine.compiled_bytes(compiled), machine.memory_limit()
  if (bytes_ or 0) > limit:
    return {'bytes': bytes_, 'failed': f'out of memory: needs {bytes_ / 1e9:.0f} GB of '
                                       f'{limit / 1e9:.0f} GB'}
  timing = measure(runs(compiled, *arrays), seconds)
  return timing.named('both') | {
      'flops': flops, 'tflops': flops / timing.median / 1e9,
      'share': flops / timing.median * 1e3 / rate if rate else None,
      'bytes': bytes_, 'mb': None if bytes_ is None else bytes_ / 1e6,
      'loss': float(compiled(*arrays)[0])}
