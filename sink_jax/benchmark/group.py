"""`group`: steps of several small trials, one trial after the other and as one group."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from sink_jax.benchmark import machine
from sink_jax.benchmark.records import Column, Document, GroupRow
from sink_jax.benchmark.timing import Countdown, reason
from sink_jax.data.batches import Batch
from sink_jax.models.sizes import flops_per_token, parameter_count, sized
from sink_jax.train.group_steps import STEPS, GroupInputs, make_group_steps
from sink_jax.train.optimizer import OptimizerConfig, Rates, peak_rates
from sink_jax.train.sharding import make_mesh
from sink_jax.train.step import init_state, make_train_step

# Timings with and without grouping, in turn: a machine that slows down does so for both.
_PAIRS = 5
_CHUNKS = 512  # of the corpus
COLUMNS = [
    Column('trials', 'trials', 'd'), Column('size', 'size'), Column('batch', 'B', 'd'),
    Column('length', 'T', 'd'), Column('alone_ms', 'alone ms', '.2f'),
    Column('group_ms', 'group ms', '.2f'), Column('ratio', 'group/alone', '.2f'),
    Column('tokens_per_second', 'tokens/s, group', ',.0f'), Column('mfu', 'MFU, group', '.1%'),
    Column('note', ''),
]


def run(trials: list[int], size: str, batch: int, length: int, vocab: int, dtype: str, steps: int,
        seed: int, limit: float | None = None,
        save: Callable[[Document], None] = lambda document: None) -> Document:
  """Times steps of groups of trials on one device, with and without grouping.

  Args:
    trials: how many trials a group has, such as [2, 6].
    steps: of each timing, at most 50.

  Raises:
    ValueError: the size does not exist, the steps are too many, or there are several devices.
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
  rows: list[GroupRow] = []
  result = lambda complete: Document('group', where, options, COLUMNS, list(rows), notes, complete)
  progress = Countdown(len(trials), limit)
  for width in trials:
    row = GroupRow(trials=width, size=size, batch=batch, length=length)
    if progress.over():
      row = dataclasses.replace(row, failed='not run: the time was up')
    else:
      progress.next(f'{width} trials')
      try:
        alone_ms, group_ms = _timed(config, width, batch, length, steps, seed)
        per_second = 1000 * width * batch * length / group_ms
        row = dataclasses.replace(
            row, alone_ms=alone_ms, group_ms=group_ms, ratio=group_ms / alone_ms,
            tokens_per_second=per_second, mfu=rate and per_second * per_token / rate)
      except Exception as error:  # most of all, no memory
        row = dataclasses.replace(row, failed=reason(error))
    rows.append(row)
    save(result(False))
  return result(True)


def _timed(config, width, batch, length, steps, seed) -> tuple[float, float]:
  """Milliseconds of a step of all trials: one after the other, and as a group."""
  mesh, optimizer = make_mesh(), OptimizerConfig()
  draw = np.random.default_rng(seed)
  # 16 bits, as a cache on the disk has them where the vocabulary is small enough.
  corpus = draw.integers(0, config.vocab_size, (_CHUNKS, length + 1), np.uint16)
  rows = draw.integers(0, _CHUNKS, (steps, width, batch), np.int32)
  rates = peak_rates(optimizer)
  single_step = make_train_step(config, optimizer, mesh)
  states = [init_state(config, optimizer, seed + i, mesh) for i in range(width)]
  stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *states)
  group_steps = make_group_steps(config, optimizer, mesh)
  # Rates per step and trial, since trials of a group may differ in them; no trial is done early.
  inputs = GroupInputs(rows, Rates(*(np.full((steps, width), x) for x in rates)),
                       np.ones((steps, width), bool))
  on_device = jnp.asarray(corpus)

  def alone():
    for i in range(width):  # as a sweep trains them: a trial is done before the next one begins
      for step in range(steps):
        chunks = corpus[rows[step, i]].astype(np.int32)
        data = Batch(chunks[:, :-1], chunks[:, 1:], np.ones((batch, length), np.float32))
        states[i], _ = single_step(states[i], data, rates)
      jax.block_until_ready(states[i])

  def group():
    nonlocal stacked
    stacked, _ = group_steps(stacked, on_device, inputs, np.int32(steps))
    jax.block_until_ready(stacked)

  times: dict[Callable[[], None], list[float]] = {alone: [], group: []}
  for repetition in range(_PAIRS + 1):
    for run_steps, taken in times.items():
      began = time.perf_counter()
      run_steps()
      if repetition:  # the first one compiles
        taken.append(1000 * (time.perf_counter() - began) / steps)
  return statistics.median(times[alone]), statistics.median(times[group])
