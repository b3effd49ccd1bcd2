"""Measurements of trained runs that the paper reports beyond the probe: analyses.json of a run."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from sink_jax.data.batches import Batch
from sink_jax.data.dataset import DataConfig, Dataset, open_data
from sink_jax.evaluate.probe import probe
from sink_jax.evaluate.sink_report import SinkReport
from sink_jax.io.files import write_atomically
from sink_jax.io.paths import AnyPath, to_path
from sink_jax.kernels.shard import mesh_of
from sink_jax.models.config import ModelConfig
from sink_jax.models.graft import learned_bias, without_bias
from sink_jax.models.record import Maps, RecordOptions, maps, states
from sink_jax.models.run import Run
from sink_jax.train.config import Experiment
from sink_jax.train.load import load_run
from sink_jax.train.step import make_validation_step
from sink_jax.train.workdir import read_experiment, read_status

_SEQUENCES = 8  # sequences with recorded attention maps and first tokens
_SHORTEST_MAP = 64  # tokens, as the probes have, if the context allows them
_TOKENS_AT_A_TIME = 2**17  # at validation: one device may analyse a model that many have trained


def write_analyses(workdir: str | AnyPath, data: DataConfig) -> None:
  """Writes analyses.json of a finished run, if an analysis applies to it and it has none.

  data: of the caller's config, which the run must have: paths of a stored config are not opened.

  Raises:
    ValueError, CheckpointError: the workdir, its data or its checkpoint cannot be read.
  """
  path = to_path(workdir) / 'analyses.json'
  if path.exists() or read_status(workdir)['status'] != 'done':
    return
  experiment = dataclasses.replace(read_experiment(workdir), data=data)
  if applicable(experiment.model_config(), experiment.data.context):
    write_atomically(
      path, json.dumps(analyse_run(load_run(workdir), experiment), allow_nan=False) + '\n'
    )


def applicable(config: ModelConfig, context: int) -> dict[str, Callable[..., dict[str, Any]]]:
  """{name: analysis} of those that apply to a model trained on sequences of `context` tokens."""
  spec, mask = config.attention, config.attention.mask
  masks = {config.attention_of(layer).mask for layer in config.pattern}
  # The first token attends only to itself, with a weight of one.
  only_itself = (
    spec.rows_sum_to_one
    and not learned_bias(config)
    and all(of.prefix is None and of.key_range(0, 0, context) == (0, 1) for of in masks)
  )
  same = masks == {mask}
  analyses = {
    'removed': (removed, bool(learned_bias(config))),
    'window': (window, same and mask.window is not None and context > mask.window),
    'prefix': (prefix, same and mask.prefix is not None),
    'first_token_chain': (first_token, only_itself),
  }
  return {name: measure for name, (measure, applies) in analyses.items() if applies}


def analyse_run(run: Run, experiment: Experiment, data: Dataset | None = None) -> dict[str, Any]:
  """{name: results} of the analyses that apply to a run; `data` is opened if none is given."""
  opened = functools.cache(lambda: data or open_data(experiment.data))
  return {
    name: measure(run, experiment, opened)
    for name, measure in applicable(run.config, experiment.data.context).items()
  }


def removed(run: Run, experiment: Experiment, data: Callable[[], Dataset]) -> dict[str, Any]:
  """The model without its extra key/value or sink token (end of Section 7.3)."""
  bare = without_bias(run)
  summary = _probe(bare, experiment).summary(experiment.probe.epsilon)
  # A divisor of the batch size of training: smaller batches hold the same sequences.
  most = max(1, _TOKENS_AT_A_TIME // experiment.data.context)
  size = next(
    n for n in range(min(most, experiment.batch_size), 0, -1) if experiment.batch_size % n == 0
  )
  batches = data().validation(size, experiment.validation.batches * experiment.batch_size // size)[
    'valid'
  ]
  return {
    'what': learned_bias(run.config),
    'sink_1': summary['sink_1'],
    'largest_importance': _number(summary['largest_importance']),
    'valid_loss': _validation_loss(bare, batches),
    'valid_loss_before': _validation_loss(run, batches),
  }


def window(run: Run, experiment: Experiment, data: Callable[[], Dataset]) -> dict[str, Any]:
  """Attention to the absolute and to the relative first token (Figure 6), and under uniform rows.

  Means over layers, heads and sequences, of scores whose rows sum to one. A query at i <= w attends
  to token 1; for a query at i > w the first token that it attends to is i - w + 1.
  """
  size, context = experiment.attention.mask.window, experiment.data.context
  assert size is not None
  # Twice the window, so that as many queries no longer see token 1 as see it.
  length = min(context, max(2 * size, _SHORTEST_MAP))
  tokens = np.asarray(run.probe_tokens)[:_SEQUENCES]
  if from_probe := tokens.shape[1] >= length:
    tokens = tokens[:, :length]
  else:
    batch = data().validation(_SEQUENCES, 1)['valid'][0]
    tokens = batch.tokens[batch.weights.any(1), :length]
  run, mean_TxT = _in_float32(run), np.zeros((length, length))
  for row in tokens[:, None]:  # one at a time, for the memory of its maps
    recorded: Maps = run.record(row, RecordOptions(attention=maps)).layers.attention
    mean_TxT += np.asarray(jnp.mean(recorded.proxy_BxHxTxT, (0, 1, 2)), np.float64) / len(tokens)
  # Query 0 is left out: it has no other key to prefer.
  within, beyond = np.arange(1, size), np.arange(size, length)
  return {
    'size': size,
    'length': length,
    'sequences': len(tokens),
    'inputs': 'probe' if from_probe else 'validation',
    'absolute_first': float(mean_TxT[within, 0].mean()) if size > 1 else None,
    'absolute_uniform': float((1 / (within + 1)).mean()) if size > 1 else None,
    'relative_first': float(mean_TxT[beyond, beyond - size + 1].mean()),
    'uniform': 1 / size,
  }


def prefix(
  run: Run, experiment: Experiment, data: Callable[[], Dataset] | None = None
) -> dict[str, Any]:
  """The share of heads and sequences whose strongest sink lies in the prefix (Figure 5 middle).

  The importance of a late key is a mean of few rows, so only the first half of the keys counts.
  """
  length, epsilon = experiment.attention.mask.prefix, experiment.probe.epsilon
  assert length is not None
  alpha_SxNxHxT = _probe(run, experiment).importance
  early = alpha_SxNxHxT[..., : alpha_SxNxHxT.shape[-1] // 2]
  strongest = early.argmax(-1)[(early > epsilon).any(-1)]
  # Learned sink tokens are a part of the prefix.
  in_prefix = strongest < length - run.config.sink_tokens
  return {
    'length': length,
    'strongest_in_prefix': float(in_prefix.mean()) if len(in_prefix) else None,
  }


def first_token(
  run: Run, experiment: Experiment | None = None, data: Callable[[], Dataset] | None = None
) -> dict[str, Any]:
  """The first token as a chain of MLPs (Section 3.1), where o = v W_O.

  If the other tokens are removed and queries are negated, its hidden states differ only by
  rounding.
  """
  # The kernels and the matrix units of accelerators round more than the statement allows.
  run, tokens = (
    _in_float32(run, implementation='chunked'),
    np.asarray(run.probe_tokens)[:_SEQUENCES],
  )
  others = dataclasses.replace(
    run,
    params=jax.tree_util.tree_map_with_path(
      lambda path, x: -x if any(getattr(key, 'key', '') == 'query' for key in path) else x,
      run.params,
    ),
  )
  with jax.default_matmul_precision('highest'):
    options = RecordOptions(hidden=states)
    first = lambda run, tokens: np.asarray(run.record(tokens, options).layers.hidden, np.float64)[
      :, :, 0
    ]
    hidden_NxBxD, alone_NxBxD = first(run, tokens), first(others, tokens[:, :1])
  difference = np.linalg.norm(hidden_NxBxD - alone_NxBxD, axis=-1) / np.linalg.norm(
    hidden_NxBxD, axis=-1
  )
  return {'largest_relative_difference': _number(difference.max())}


def _probe(run: Run, experiment: Experiment) -> SinkReport:
  """The probe as it was during training, a part of the sequences at a time."""
  assert run.probe_tokens is not None
  size = max(1, _TOKENS_AT_A_TIME // run.probe_tokens.shape[1])
  return probe(run, run.probe_tokens, dtype=experiment.probe.dtype, batch_size=size)


def _validation_loss(run: Run, batches: Sequence[Batch]) -> float | None:
  """Mean loss of the targets in all batches, in nats per token."""
  mesh = mesh_of(run.params)
  assert not isinstance(mesh, AbstractMesh)
  step = make_validation_step(run.config, mesh)
  # Each total is a sum of losses and the number of targets: rows that only fill a batch do not
  # count.
  totals = [step(run.params, batch) for batch in batches]
  return _number(sum(t[0] for t in totals) / sum(t[1] for t in totals))


def _in_float32(run: Run, **options) -> Run:
  return dataclasses.replace(
    run, config=dataclasses.replace(run.config, dtype='float32', **options)
  )


def _number(x: float | np.floating | jax.Array) -> float | None:
  """A number for JSON; None if it is not finite."""
  return float(x) if math.isfinite(x) else None
