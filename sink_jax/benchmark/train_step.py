"""`train_step`: complete training steps of a model with AdamW, in tokens per second."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from sink_jax.benchmark.measure import (
  FLOOR,
  Case,
  Column,
  Program,
  Rates,
  accelerated,
  ratio_columns,
  time_group,
)
from sink_jax.data.batches import Batch
from sink_jax.kernels.dispatch import check_implementation
from sink_jax.models.config import ModelConfig
from sink_jax.models.sharding import batch_sharding, make_mesh
from sink_jax.models.sizes import flops_per_token, parameter_count, sized
from sink_jax.train.memory import memory
from sink_jax.train.optimizer import OptimizerConfig
from sink_jax.train.step import init_state, make_train_step

COLUMNS: list[Column] = [
  ('size', 'size', ''),
  ('batch', 'B', 'd'),
  ('length', 'T', 'd'),
  ('implementation', 'attention', ''),
  ('ms', 'ms/step', '.2f'),
  *ratio_columns('x first'),
  ('tokens_per_second', 'tokens/s', ',.0f'),
  *FLOOR,
  ('gb', 'GB', '.2f'),
  ('loss', 'loss', '.3f'),
  ('failed', '', ''),
]
NOTES = (
  'TFLOP/s: of one device; every linear layer, and attention over the keys that the mask '
  'leaves, forward and twice that backward. x first: over the first attention at this batch '
  'size. GB: peak memory of the step, state included. loss: of random tokens, before the '
  'first step.'
)
_UNROLL = 24  # blocks that are compiled one after another, at most; more are in a loop


def run(
  rates: Rates,
  dtype: str,
  seconds: float,
  size: str | None,
  batch: Sequence[int],
  length: int | None,
  vocab: int | None,
  implementation: Sequence[str],
  remat: str,
) -> list[dict[str, Any]]:
  """The rows of every batch size and implementation, which are timed alternately.

  Args:
    implementation: names for `attend`; 'default' is the choice of the platform.
    remat: of `ModelConfig`.

  Raises:
    ValueError: a size, batch or implementation that does not exist or fit.
  """
  fast, devices = accelerated(), jax.device_count()
  length, vocab = length or (2048 if fast else 256), vocab or (50432 if fast else 512)
  size = size or ('60m' if fast else 'tiny')
  plain = sized(size, vocab_size=vocab, dtype=dtype, remat=remat, unroll=_UNROLL)
  rows = []
  for sequences in batch or ((8, 16, 32) if fast else (4,)):
    if sequences % devices:
      raise ValueError(f'--batch={sequences} is not a multiple of the {devices} devices.')
    cases = []
    for name in implementation:
      model = dataclasses.replace(plain, implementation=None if name == 'default' else name)
      check_implementation(model.implementation)
      row = {
        'size': size,
        'batch': sequences,
        'length': length,
        'implementation': name,
        'remat': remat,
        'parameters': parameter_count(model),
      }
      cases.append(_case(row, model, sequences * length / devices, base=not cases))
    rows += time_group(cases, seconds, rates)
  for row in rows:
    tokens = row['batch'] * row['length']
    row['tokens_per_second'] = 1000 * tokens / row['ms'] if 'ms' in row else None
  return rows


def _case(row: dict[str, Any], model: ModelConfig, tokens: float, base: bool) -> Case:
  """tokens: of a device."""
  flops = tokens * flops_per_token(model, row['length'])
  # AdamW reads and writes the parameters and two moments, in float32.
  bytes_ = 24 * row['parameters']
  return Case(row, functools.partial(_prepare, row, model), flops, bytes_, base)


def timed_step(model: ModelConfig, sequences: int, length: int, steps: int = 5) -> float:
  """Seconds of a training step of a model with a vocabulary, the median of a few."""
  program = _prepare({'batch': sequences, 'length': length}, model)
  seconds = []
  for _ in range(steps):
    began = time.perf_counter()
    program.wait(program.call())
    seconds.append(time.perf_counter() - began)
  return statistics.median(seconds)


def _prepare(row: dict[str, Any], model: ModelConfig) -> Program:
  """A training step that passes its state from call to call."""
  mesh, optimizer = make_mesh(), OptimizerConfig()
  shape = row['batch'], row['length']
  tokens = np.random.default_rng(0).integers(
    0, model.vocab_size, (shape[0], shape[1] + 1), np.int32
  )
  # The batch is on the devices before the first step: its transfer belongs to the input pipeline.
  data = jax.device_put(
    Batch(tokens[:, :-1], tokens[:, 1:], np.ones(shape, np.float32)), batch_sharding(mesh)
  )
  state, rate = init_state(model, optimizer, 0, mesh), optimizer.learning_rate
  step = make_train_step(model, optimizer, mesh).lower(state, data, rate).compile()
  row['gb'] = memory(step).total / 1e9

  def call():
    nonlocal state
    state, metrics = step(state, data, rate)
    return metrics

  row['loss'] = float(call()['loss'])
  return Program(call)
