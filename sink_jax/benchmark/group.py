"""`group`: steps of several small trials, one trial after the other and as one group."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sink_jax.benchmark import machine
from sink_jax.benchmark.table import column, document
from sink_jax.benchmark.timing import Countdown, reason
from sink_jax.data.batches import Batch
from sink_jax.models.sizes import flops_per_token, parameter_count, sized
from sink_jax.train.group_steps import STEPS, GroupInputs, make_group_steps
from sink_jax.train.optimizer import OptimizerConfig, Rates, peak_rates
from sink_jax.train.sharding import make_mesh
from sink_jax.train.step import init_state, make_train_step

_PAIRS = 5  # of timings, the one way and the other in turn
_CHUNKS = 512
COLUMNS = [
    column('trials', 'trials', 'd'), column('size', 'size'), column('batch', 'B', 'd'),
    column('length', 'T', 'd'), column('alone_ms', 'alone ms', '.2f'),
    column('group_ms', 'group ms', '.2f'), column('ratio', 'group/alone', '.2f'),
    column('tokens_per_second', 'tokens/s, group', ',.0f'), column('mfu', 'MFU, group', '.1%'),
    column('note', ''),
]


def run(trials, size, batch, length, vocab, dtype, steps, seed, limit=None,
        save: Callable[[dict[str, Any]], None] = lambda result: None) -> dict[str, Any]:
  """Times steps of groups of so many trials, on one device.

  Args:
    trials: widths, such as [2, 6].
    steps: of each timing, at most 50.

  Raises:
    ValueError: a size that does not exist, too many steps, or several devices.
  """
  if steps > STEPS:
    raise ValueError(f'--steps={steps} must be at most {STEPS}, the steps of a call.')
  if jax.device_count() > 1:
    raise ValueError(f'a group trains on one device, and {jax.device_count()} are here: show it '
                     'one, such as with CUDA_VISIBLE_DEVICES=0.')
  config = sized(size, vocab_size=vocab, dtype=dtype)
  rate, per_token = machine.matmul_rate(dtype), flops_per_token(config, length)
  where = machine.describe(seed) | {'matmul_tflops': rate and rate / 1e12, 'dtype': dtype,
                                    'parameters': parameter_count(config)}
  options = {'trials': trials, 'size': size, 'batch': batch, 'length': length, 'vocab': vocab,
             'steps': steps, 'limit': limit}
  notes = ['ms: of one step of all trials, medians of pairs in turn. Alone, every batch is put on '
           'the device for its step; a group takes rows of a corpus that lies there.']
  rows: list[dict[str, Any]] = []
  result = lambda complete: document('group', where, options, COLUMNS, rows, notes, complete)
  progress = Countdown(len(trials), limit)
  for width in trials:
    row = {'trials': width, 'size': size, 'batch': batch, 'length': length}
    if progress.over():
      row['failed'] = 'not run: the time was up'
    else:
      progress.next(f'{width} trials')
      try:
        row |= _timed(config, width, batch, length, steps, seed)
        row['tokens_per_second'] = 1000 * width * batch * length / row['group_ms']
        row['mfu'] = rate and row['tokens_per_second'] * per_token / rate
      except Exception as error:  # most of all, no memory
        row['failed'] = reason(error)
    rows.append(row)
    save(result(False))
  return result(True)


def _timed(config, width, batch, length, steps, seed):
  mesh, optimizer = make_mesh(), OptimizerConfig()
  draw = np.random.default_rng(seed)
  corpus = draw.integers(0, config.vocab_size, (_CHUNKS, length + 1), np.uint16)
  rows = draw.integers(0, _CHUNKS, (steps, width, batch), np.int32)
  rates = peak_rates(optimizer)
  one = make_train_step(config, optimizer, mesh)
  states = [init_state(config, optimizer, seed + i, mesh) for i in range(width)]
  stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *states)
  together = make_group_steps(config, optimizer, mesh)
  inputs = GroupInputs(rows, Rates(*(np.full((steps, width), x) for x in rates)),
                  np.ones((steps, width), bool))
  on_device = jnp.asarray(corpus)

  def alone():
    for i in range(width):
      for step in range(steps):
        chunks = corpus[rows[step, i]].astype(np.int32)
        data = Batch(chunks[:, :-1], chunks[:, 1:], np.ones((batch, length), np.float32))
        states[i], _ = one(states[i], data, rates)
      jax.block_until_ready(states[i])

  def group():
    nonlocal stacked
    stacked, _ = together(stacked, on_device, inputs, np.int32(steps))
    jax.block_until_ready(stacked)

  times = {alone: [], group: []}
  for repetition in range(_PAIRS + 1):
    for way, taken in times.items():
      began = time.perf_counter()
      way()
      if repetition:  # the first compiles
        taken.append(1000 * (time.perf_counter() - began) / steps)
  found = {'alone_ms': statistics.median(times[alone]),
           'group_ms': statistics.median(times[group])}
  return found | {'ratio': found['group_ms'] / found['alone_ms']}
