"""`train_step`: whole training steps of a model, in tokens per second and MFU."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sink_jax.attention.spec import AttentionSpec
from sink_jax.benchmark import machine
from sink_jax.benchmark.flops import datasheet_peak
from sink_jax.benchmark.records import Column, Document, TrainStepRow
from sink_jax.benchmark.timing import Countdown, reason, summary
from sink_jax.data.batches import Batch
from sink_jax.kernels.dispatch import check_implementation, choose, platform
from sink_jax.models.config import ModelConfig
from sink_jax.models.sizes import flops_per_token, parameter_count, sized
from sink_jax.train.defaults import DeviceLoad, device_memory, with_defaults
from sink_jax.train.optimizer import OptimizerConfig, peak_rates
from sink_jax.train.sharding import batch_sharding, make_mesh
from sink_jax.train.step import init_state, make_train_step

_WARMUP, _GROUPS = 3, 5
COLUMNS = [
    Column('size', 'size'), Column('batch', 'B', 'd'), Column('length', 'T', 'd'),
    Column('implementation', 'attention'), Column('remat', 'remat'),
    Column('unroll', 'unroll', 'd'), Column('step_ms', 'ms/step', '.2f'),
    Column('tokens_per_second', 'tokens/s', ',.0f'), Column('mfu', 'MFU', '.1%'),
    Column('mfu_datasheet_text', 'MFU, datasheet', '>'), Column('floor_ms', 'floor ms', '.2f'),
    Column('vs_floor', 'x floor', '.2f'), Column('gb', 'GB', '.2f'),
    Column('loss', 'loss', '.3f'), Column('note', ''),
]


def run(size: str, batches: list[int], length: int, vocab: int, dtype: str,
        implementations: list[str], remat: str | None, unroll: int | None,
        components: dict[str, Any], steps: int, seed: int, limit: float | None = None,
        save: Callable[[Document], None] = lambda document: None) -> Document:
  """Times `steps` steps after a warm-up, for every batch size and implementation.

  Args:
    components: {field of AttentionSpec: config string}.
    implementations: of `attend`; 'default' is the choice of the platform.
    remat, unroll: of `ModelConfig`; None for the values that a run chooses.

  Raises:
    ValueError: a size, component, batch or implementation that does not exist or fit.
  """
  spec = AttentionSpec(**components)
  names = [None if name == 'default' else name for name in implementations]
  for name in names:
    check_implementation(name)
  plain = sized(size, vocab_size=vocab, dtype=dtype, attention=spec)

  # Recomputation and unrolling are chosen for every batch size, as at the begin of a run.
  def config(name: str | None, batch: int) -> ModelConfig:
    load = DeviceLoad(platform(), device_memory(), batch * length / devices)
    return with_defaults(dataclasses.replace(plain, implementation=name), load, remat, unroll)

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
             'unroll': unroll, 'implementation': names, 'attention': spec.strings(),
             'steps': steps, 'limit': limit}
  notes = _notes(rate, peak, dtype, kind, per_token)
  rows: list[TrainStepRow] = []
  result = lambda complete: Document('train_step', where, options, COLUMNS, list(rows), notes,
                                     complete)
  cases = [(name, batch) for batch in batches for name in names]
  progress = Countdown(len(cases), limit)
  for name, batch in cases:
    model = config(name, batch)
    row = TrainStepRow(size=size, batch=batch, length=length, remat=model.remat,
                       unroll=model.unroll,
                       implementation=name or _default(model, batch, length))
    if progress.over():
      row = dataclasses.replace(row, failed='not run: the time was up')
    else:
      progress.next(f'{size}, batch {batch}, {row.implementation}')
      try:
        row = _with_rates(_timed(row, model, steps, seed), per_token, rate, peak)
      except Exception as error:  # most often there is too little memory
        row = dataclasses.replace(row, failed=reason(error))
    rows.append(row)
    save(result(False))
  return result(True)


def _timed(row: TrainStepRow, config: ModelConfig, steps: int, seed: int) -> TrainStepRow:
  """The row with the times, the memory and the losses of its steps."""
  mesh = make_mesh()
  optimizer = OptimizerConfig()
  shape = row.batch, row.length
  tokens = np.asarray(jax.random.randint(
      jax.random.key(seed), (row.batch, row.length + 1), 0, config.vocab_size))
  # On the devices before the first step: its transfer belongs to the input pipeline.
  data = jax.device_put(Batch(tokens[:, :-1], tokens[:, 1:], np.ones(shape, np.float32)),
                        batch_sharding(mesh))
  state = init_state(config, optimizer, seed, mesh)
  rates = peak_rates(optimizer)
  began = time.perf_counter()
  step = make_train_step(config, optimizer, mesh).lower(state, data, rates).compile()
  compile_s = time.perf_counter() - began
  stats = step.memory_analysis()
  # The state is donated to each step, so the steps follow one another and none is left out.
  for _ in range(_WARMUP):
    state, metrics = step(state, data, rates)
  # Reading a number waits for the device, so the clock starts with an empty queue.
  first = float(metrics['loss'])
  # Groups of steps without a wait between them, as in training; several, for a spread.
  calls, times = max(1, steps // _GROUPS), []
  for _ in range(min(_GROUPS, steps)):
    began = time.perf_counter()
    for _ in range(calls):
      state, metrics = step(state, data, rates)
    jax.block_until_ready(state)
    times.append((time.perf_counter() - began) / calls)
  # What the compiler states, and what was measured: the second has other programs in it, too.
  used = jax.devices()[0].memory_stats() or {}
  # The donated state is an argument and a result in the same memory: it counts once.
  bytes_ = stats and (stats.argument_size_in_bytes + stats.temp_size_in_bytes
                      + stats.output_size_in_bytes - stats.alias_size_in_bytes)
  return dataclasses.replace(
      row, step=summary(times, calls), compile_s=compile_s, bytes=bytes_,
      gb=None if bytes_ is None else bytes_ / 1e9,
      peak_bytes_in_use=used.get('peak_bytes_in_use'),
      loss_after_warmup=first, loss=float(metrics['loss']))


def _with_rates(row: TrainStepRow, per_token: float, rate: float | None,
                peak: float | None) -> TrainStepRow:
  """The row with tokens per second, MFU and the floor of its step.

  per_token: FLOPs. rate, peak: FLOP/s of one device, as measured and of its maker.
  """
  assert row.step, 'the step was timed'
  devices, tokens, ms = jax.device_count(), row.batch * row.length, row.step.median
  per_second = 1000 * tokens / ms
  flops = per_second * per_token
  floor = 1000 * tokens * per_token / (rate * devices) if rate else None
  datasheet = flops / (peak * devices) if peak else None
  return dataclasses.replace(
      row, tokens_per_second=per_second, flops_per_step=tokens * per_token,
      mfu=flops / (rate * devices) if rate else None, mfu_datasheet=datasheet,
      mfu_datasheet_text='n/a' if datasheet is None else f'{datasheet:.1%}',
      floor_ms=floor, vs_floor=ms / floor if floor else None)


def _default(config: ModelConfig, batch: int, length: int) -> str:
  """The implementation that the platform chooses, marked as such."""
  shape = lambda heads: jax.ShapeDtypeStruct(
      (batch, length, heads, config.dims.head_dim), jnp.dtype(config.dtype))
  return f'{choose(config.attention, shape(config.heads), shape(config.dims.kv_heads))} (default)'


def _notes(rate: float | None, peak: float | None, dtype: str, kind: str,
           per_token: float) -> list[str]:
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
