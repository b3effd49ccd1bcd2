"""`loss`: cross-entropy with its gradients, in chunks and with the logits of all positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from sink_jax.benchmark import machine
from sink_jax.benchmark.baselines import runs
from sink_jax.benchmark.flops import loss_flops
from sink_jax.benchmark.records import Column, Document, LossRow
from sink_jax.benchmark.timing import Countdown, measure, reason
from sink_jax.train.loss import cross_entropy

COLUMNS = [
    Column('shape', 'B,T,D,V'), Column('what', 'what'),
    Column('both_ms', 'loss+gradients ms', '.3f'), Column('tflops', 'TFLOP/s', '.3g'),
    Column('share', 'of matmul', '.0%'), Column('mb', 'MB', ',.0f'),
    Column('loss', 'nats/token', '.4f'), Column('vs_plain', 'x plain', '.2f'), Column('note', ''),
]
NOTES = [
    'loss+gradients: median milliseconds of the loss with its gradients in h (B, T, D) and W '
    '(D, V). MB: peak memory beside the inputs, gradients included.',
    'plain: float32 logits of all positions, differentiated by JAX. TFLOP/s: 6 B T D V.',
]


def plain_cross_entropy(h_BxTxD: jax.Array, kernel_DxV: jax.Array, targets_BxT: jax.Array,
                        weights_BxT: jax.Array) -> jax.Array:
  """The same sum as `train.loss.cross_entropy`, by its definition, a scalar in float32."""
  logits = jnp.einsum('btd,dv->btv', h_BxTxD, kernel_DxV.astype(h_BxTxD.dtype),
                      preferred_element_type=jnp.float32)
  chosen = jnp.take_along_axis(logits, targets_BxT[..., None], -1)[..., 0]
  return jnp.sum((jax.nn.logsumexp(logits, -1) - chosen) * weights_BxT)


def run(tokens: tuple[int, int], d_model: int, vocab: int, dtype: str, seed: int, seconds: float,
        limit: float | None = None,
        save: Callable[[Document], None] = lambda document: None) -> Document:
  """Times the loss in chunks and the plain one; tokens: (B, T)."""
  batch, length = tokens
  rate = machine.matmul_rate(dtype)
  where = machine.describe(seed) | {'matmul_tflops': rate and rate / 1e12, 'dtype': dtype}
  options = {'tokens': list(tokens), 'd_model': d_model, 'vocab': vocab, 'seconds': seconds,
             'limit': limit}
  h = machine.random(seed, (batch, length, d_model), dtype)
  # Scaled so that logits are of size one: h has D numbers of that size.
  kernel = machine.random(seed + 1, (d_model, vocab), 'float32') / d_model**0.5
  targets = jax.random.randint(jax.random.key(seed), (batch, length), 0, vocab)
  # Weights of 1 / (B T) make the weighted sum the mean in nats per token.
  arrays = h, kernel, targets, jnp.full((batch, length), 1 / (batch * length))
  rows: list[LossRow] = []
  result = lambda complete: Document('loss', where, options, COLUMNS, _compare(rows), NOTES,
                                     complete)
  forms = {'in chunks (ours)': cross_entropy, 'plain': plain_cross_entropy}
  progress = Countdown(len(forms), limit)
  for what, f in forms.items():
    row = LossRow(shape=f'{batch},{length},{d_model},{vocab}', what=what)
    if progress.over():
      row = dataclasses.replace(row, failed='not run: the time was up')
    else:
      progress.next(what)
      try:
        row = _timed(row, f, arrays, loss_flops(batch * length, d_model, vocab), seconds, rate)
      except Exception as error:  # most of all, no memory
        row = dataclasses.replace(row, failed=reason(error))
    rows.append(row)
    save(result(False))
  return result(True)


def _compare(rows: list[LossRow]) -> list[LossRow]:
  """The rows with vs_plain, once the plain form has been timed."""
  plain = next((row.both for row in rows if row.what == 'plain' and row.both), None)
  return [dataclasses.replace(row, vs_plain=row.both.median / plain.median)
          if plain and row.both else row for row in rows]


def _timed(row: LossRow, f, arrays, flops: float, seconds: float, rate: float | None) -> LossRow:
  compiled = jax.jit(jax.value_and_grad(f, (0, 1))).lower(*arrays).compile()
  # The logits of all positions may not fit, and running out of memory can end the process.
  bytes_, limit = machine.compiled_bytes(compiled), machine.memory_limit()
  if bytes_ is not None and bytes_ > limit:
    return dataclasses.replace(row, bytes=bytes_, failed=(
        f'out of memory: needs {bytes_ / 1e9:.0f} GB of {limit / 1e9:.0f} GB'))
  timing = measure(runs(compiled, *arrays), seconds)
  return dataclasses.replace(
      row, both=timing, flops=flops, tflops=flops / timing.median / 1e9,
      share=flops / timing.median * 1e3 / rate if rate else None,
      bytes=bytes_, mb=None if bytes_ is None else bytes_ / 1e6,
      loss=float(compiled(*arrays)[0]))
