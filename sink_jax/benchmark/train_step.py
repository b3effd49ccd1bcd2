"""`train_step`: whole training steps of a model, in tokens per second and MFU."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from sink_jax.attention.spec import AttentionSpec
from sink_jax.benchmark import machine
from sink_jax.benchmark.flops import datasheet_peak
from sink_jax.benchmark.table import column, document
from sink_jax.benchmark.timing import Countdown, reason, summary
from sink_jax.data.batches import Batch
from sink_jax.kernels.dispatch import check_implementation, choose, platform
from sink_jax.models.sizes import flops_per_token, parameter_count, sized
from sink_jax.train.defaults import device_memory, DeviceLoad, with_defaults
from sink_jax.train.optimizer import OptimizerConfig, peak_rates
from sink_jax.train.sharding import batch_sharding, make_mesh
from sink_jax.train.step import init_state, make_train_step

_WARMUP, _GROUPS = 3, 5
COLUMNS = [
    column('size', 'size'), column('batch', 'B', 'd'), column('length', 'T', 'd'),
    column('implementation', 'attention'), column('remat', 'remat'),
    column('unroll', 'unroll', 'd'), column('step_ms', 'ms/step', '.2f'),
    column('tokens_per_second', 'tokens/s', ',.0f'), column('mfu', 'MFU', '.1%'),
    column('mfu_datasheet_text', 'MFU, datasheet', '>'), column('floor_ms', 'floor ms', '.2f'),
    column('vs_floor', 'x floor', '.2f'), column('gb', 'GB', '.2f'),
    column('loss', 'loss', '.3f'), column('note', ''),
]


def run(size, batches, length, vocab, dtype, implementations, remat, unroll, slots, steps,
        seed, limit=None, save: Callable[[dict[str, Any]], None] = lambda result: None
        ) -> dict[str, Any]:
  """Times `steps` steps after a warm-up, for every batch size and implementation.

  Args:
    slots: {slot: config string} of the attention, as `AttentionSpec` takes them.
    implementations: names of `attend`, 'default' for the platform's choice.
    remat, unroll: of `ModelConfig`, None for what a run chooses.

  Raises:
    ValueError: a size, slot, batch or implementation that does not exist or fit.
  """
  spec = AttentionSpec(**slots)
  implementations = [None if name == 'default' else name for name in implementations]
  for name in implementations:
    check_implementation(name)
  plain = sized(size, vocab_size=vocab, dtype=dtype, attention=spec)

  def config(name, batch):
    share = DeviceLoad(platform(), device_memory(), batch * length / devices)
    return with_defaults(dataclasses.replace(plain, implementation=name), share, remat, unroll)

  devices = jax.device_count()
  if any(batch % devices for batch in batches):
    raise ValueError(f'--batch={" ".join(map(str, batches))} must be multiples of the {devices} '
                     'devices.')
  rate, per_token = machine.matmul_rate(dtype), flops_per_token(plain, length)
  kind = jax.devices()[0].device_kind
  peak = datasheet_peak(kind)
  where = machine.describe(seed) | {
      'matmul_tflops': rate and rate / 1e12, 'datasheet_tflops': peak and peak / 1e12,
      'dtype': dtype, 'parameters': parameter_count(plain), 'flops_per_token': per_token}
  options = {'size': size, 'batch': batches, 'length': length, 'vocab': vocab, 'remat': remat,
             'unroll': unroll, 'implementation': implementations, 'attention': spec.strings(),
             'steps': steps, 'limit': limit}
  notes = _notes(rate, peak, dtype, kind, per_token)
  rows: list[dict[str, Any]] = []
  result = lambda complete: document('train_step', where, options, COLUMNS, rows, notes, complete)
  cases = [(name, batch) for batch in batches for name in implementations]
  progress = Countdown(len(cases), limit)
  for name, batch in cases:
    model = config(name, batch)
    row = {'size': size, 'batch': batch, 'length': length, 'remat': model.remat,
           'unroll': model.unroll, 'implementation': name or _default(model, batch, length)}
    if progress.over():
      row['failed'] = 'not run: the time was up'
    else:
      progress.next(f'{size}, batch {batch}, {row["implementation"]}')
      try:
        row |= _timed(model, batch, length, steps, seed)
        row |= _rates(row['step_ms'], batch * length, per_token, rate, peak)
      except Exception as error:  # most of all, no memory
        row['failed'] = reason(error)
    rows.append(row)
    save(result(False))
  return result(True)


def _timed(config, batch, length, steps, seed):
  mesh = make_mesh()
  optimizer = OptimizerConfig()
  tokens = jax.random.randint(jax.random.key(seed), (batch, length + 1), 0, config.vocab_size)
  data = jax.device_put(Batch(tokens[:, :-1], tokens[:, 1:], jnp.ones((batch, length))),
                        batch_sharding(mesh))
  state = init_state(config, optimizer, seed, mesh)
  rates = peak_rates(optimizer)
  began = time.perf_counter()
  step = make_train_step(config, optimizer, mesh).lower(state, data, rates).compile()
  compile_s = time.perf_counter() - began
  stats = step.memory_analysis()
  for _ in range(_WARMUP):
    state, metrics = step(state, data, rates)
  first = float(metrics['loss'])
  calls, times = max(1, steps // _GROUPS), []
  for _ in range(min(_GROUPS, steps)):
    began = time.perf_counter()
    for _ in range(calls):
      state, metrics = step(state, data, rates)
    jax.block_until_ready(state)
    times.append((time.perf_counter() - began) / calls)
  used = jax.devices()[0].memory_stats() or {}
  bytes_ = stats and (stats.argument_size_in_bytes + stats.temp_size_in_bytes
                      + stats.output_size_in_bytes - stats.alias_size_in_bytes)
  return summary(times, calls).named('step') | {
      'compile_s': compile_s, 'bytes': bytes_, 'gb': None if bytes_ is None else bytes_ / 1e9,
      'peak_bytes_in_use': used.get('peak_bytes_in_use'),
      'loss_after_warmup': first, 'loss': float(metrics['loss'])}


def _rates(ms, tokens, per_token, rate, peak):
  devices = jax.device_count()
  per_second = 1000 * tokens / ms
  flops = per_second * per_token
  floor = 1000 * tokens * per_token / (rate * devices) if rate else None
  datasheet = flops / (peak * devices) if peak else None
  return {
      'tokens_per_second': per_second, 'flops_per_step': tokens * per_token,
      'mfu': flops / (rate * devices) if rate else None, 'mfu_datasheet': datasheet,
      'mfu_datasheet_text': 'n/a' if datasheet is None else f'{datasheet:.1%}',
      'floor_ms': floor, 'vs_floor': ms / floor if floor else None}


def _default(config, batch, length):
  shape = lambda heads: jax.ShapeDtypeStruct(
      (batch, length, heads, config.dims.head_dim), jnp.dtype(config.dtype))
  return f'{choose(config.attention, shape(config.heads), shape(config.dims.kv_heads))} (default)'


def _notes(rate, peak, dtype, kind, per_token):
  notes = [f'{per_token / 1e6:,.1f} MFLOP per token: every linear layer, and attention over the '
           'keys that the mask leaves, forward and twice that backward.',
           'GB: peak memory of the compiled step, state included. The loss is of random tokens: '
           'it falls because the same batch comes again.']
  if rate:
    notes.append(f'MFU: share of the {rate / 1e12:,.2f} TFLOP/s measured for a large {dtype} '
                 'matrix product in this run; floor: the time of the FLOPs at that rate.')
  notes.append(f'MFU, datasheet: share of {peak / 1e12:,.1f} TFLOP/s ({kind}, dense bfloat16).'
               if peak else f'MFU, datasheet: no peak is known here for {kind!r}.')
  return notes
