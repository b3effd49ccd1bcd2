"""Measures what the paper reports of trained runs beyond the probe: analyses.json of a run."""

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

from sink_jax.analyses.first_token import first_token_chain
from sink_jax.data.batches import Batch
from sink_jax.data.dataset import Dataset, open_data
from sink_jax.evaluate.probe import probe
from sink_jax.evaluate.sink_report import SinkReport
from sink_jax.io.files import write_atomically
from sink_jax.io.paths import AnyPath, to_path
from sink_jax.kernels.shard import mesh_of
from sink_jax.models.config import ModelConfig
from sink_jax.models.graft import learned_bias, without_bias
from sink_jax.models.record import RecordOptions
from sink_jax.models.run import Run
from sink_jax.pretrained.load import load_run
from sink_jax.train.config import Experiment, from_dict
from sink_jax.train.workdir import read_config, read_status
from sink_jax.train.step import make_validation_step

_SEQUENCES = 8  # whose attention maps and first tokens are looked at
_SHORTEST_MAP = 64  # tokens, as the probes have, where the context allows them
_LONGEST_MAP = 128  # tokens of a map that is kept: 16,384 numbers
_TOKENS_AT_A_TIME = 2**17  # of the validation: one device may analyse what many have trained
_PREFIX_SEQUENCES = 5  # of Figure 5 middle


def write_analyses(workdir: str | AnyPath) -> None:
  """Writes analyses.json of a finished run, if an analysis applies to it.

  A run that has the file keeps it, and a run that is not done gets none.

  Raises:
    ValueError: the workdir or its data cannot be read.
    CheckpointError: no usable checkpoint.
  """
  path = to_path(workdir) / 'analyses.json'
  if path.exists() or read_status(workdir)['status'] != 'done':
    return
  experiment = from_dict(read_config(workdir))
  if applicable(experiment.model_config(), experiment.data.context):
    results = analyse(load_run(workdir), experiment)
    write_atomically(path, json.dumps(results, allow_nan=False) + '\n')


def applicable(config: ModelConfig, context: int) -> list[str]:
  """Lists the analyses that apply to a model trained on sequences of `context` tokens."""
  spec, mask = config.attention, config.attention.mask
  # Does the first token see itself alone, with a weight of one?
  first_sees_itself = (spec.rows_sum_to_one and not learned_bias(config) and mask.prefix is None
                       and mask.key_range(0, 0, context) == (0, 1))
  applies = {'removed': bool(learned_bias(config)),
             'window': mask.window is not None and context > mask.window,
             'prefix': mask.prefix is not None,
             'first_token_chain': first_sees_itself}
  return [name for name, yes in applies.items() if yes]


def analyse(run: Run, experiment: Experiment, data: Dataset | None = None) -> dict[str, Any]:
  """Carries out the analyses that apply to a run.

  Args:
    run: the trained model.
    experiment: its config.
    data: of the experiment; they are opened where an analysis needs them and none are given.

  Returns:
    {name: results} as plain numbers, strings and lists.

  Raises:
    ValueError: the data cannot be opened.
  """
  # Two analyses may need the data, and most runs have none that does.
  opened = functools.cache(lambda: data or open_data(experiment.data))
  measures = {'removed': removed, 'window': window, 'prefix': prefix,
              'first_token_chain': first_token}
  return {name: measures[name](run, experiment, opened)
          for name in applicable(run.config, experiment.data.context)}


def removed(run: Run, experiment: Experiment, data: Callable[[], Dataset]) -> dict[str, Any]:
  """Measures the model without its extra key/value or sink token (end of Section 7.3)."""
  bare = without_bias(run)
  summary = _probe(bare, experiment).summary(experiment.probe.epsilon)
  # A divisor of the batch size of training, so that smaller batches hold exactly the same
  # sequences.
  size = _divisor(experiment.batch_size, _TOKENS_AT_A_TIME // experiment.data.context)
  # The sequences of the validation during training, in batches that fit one device.
  batches = data().validation(
      size, experiment.validation.batches * experiment.batch_size // size)['valid']
  return {'what': learned_bias(run.config), 'sink_1': summary['sink_1'],
          'largest_importance': _number(summary['largest_importance']),
          'valid_loss': _validation_loss(bare, batches),
          'valid_loss_before': _validation_loss(run, batches)}


def window(run: Run, experiment: Experiment, data: Callable[[], Dataset]) -> dict[str, Any]:
  """Measures attention to the absolute and to the relative first token (Figure 6).

  The numbers are means over layers, heads and sequences, of scores whose rows sum to one. A query
  at i <= w attends to token 1; the first token that one at i > w attends to is token i - w + 1.
  """
  size, context = experiment.attention.mask.window, experiment.data.context
  assert size is not None  # else the analysis does not apply
  # Twice the window where there are so many tokens: then as many queries have lost token 1 from
  # sight as still see it.
  length = min(context, max(2 * size, _SHORTEST_MAP))
  # The inputs of the probe where they are long enough, else the validation sequences.
  tokens = np.asarray(run.probe_tokens)[:_SEQUENCES]
  if from_probe := tokens.shape[1] >= length:
    tokens = tokens[:, :length]
  else:
    batch = data().validation(_SEQUENCES, 1)['valid'][0]
    tokens = batch.tokens[batch.weights.any(1), :length]
  run = _in_float32(run)
  mean_TxT = np.zeros((length, length))
  for i in range(len(tokens)):  # one at a time, for the memory of its maps
    maps = run.record(tokens[i:i + 1], RecordOptions(maps=True)).layers.proxy_maps_BxHxTxT
    assert maps is not None  # the options ask for it
    mean_TxT += np.asarray(jnp.mean(maps, (0, 1, 2)), np.float64) / len(tokens)
  queries = np.arange(length)
  # Query 0 is left out: it sees itself alone, and has no other key to prefer.
  within, beyond = queries[1:size], queries[size:]
  # The uniform weights are what a query gives to each of its keys without any preference: within
  # the window, 0-based position i has i+1 keys, and beyond it every query has `size`.
  result = {'size': size, 'length': length, 'sequences': len(tokens),
            'inputs': 'probe' if from_probe else 'validation',
            'absolute_first': float(mean_TxT[within, 0].mean()) if size > 1 else None,
            'absolute_uniform': float((1 / (within + 1)).mean()) if size > 1 else None,
            'relative_first': float(mean_TxT[beyond, beyond - size + 1].mean()),
            'uniform': 1 / size}
  if length <= _LONGEST_MAP:
    result['map'] = mean_TxT.round(4).tolist()
  return result


def prefix(run: Run, experiment: Experiment,
           data: Callable[[], Dataset] | None = None) -> dict[str, Any]:
  """Measures Sink_k of single sequences, and where their strongest sinks are (Figure 5 middle).

  The importance of a late key is a mean of few rows, so only the first half of the keys counts.
  """
  length, epsilon = experiment.attention.mask.prefix, experiment.probe.epsilon
  assert length is not None  # else the analysis does not apply
  alpha_SxNxHxT = _probe(run, experiment).importance
  # Five keys behind the prefix as well, to show where the sinks end.
  rates = (alpha_SxNxHxT[:_PREFIX_SEQUENCES, ..., :length + 5] > epsilon).mean((1, 2))
  early = alpha_SxNxHxT[..., :alpha_SxNxHxT.shape[-1] // 2]
  strongest = early.argmax(-1)[(early > epsilon).any(-1)]
  in_prefix = strongest < length - run.config.sink_tokens  # which count as part of the prefix
  return {'length': length, 'sequences': (100 * rates).tolist(),
          'strongest_in_prefix': float(in_prefix.mean()) if len(in_prefix) else None}


def first_token(run: Run, experiment: Experiment | None = None,
                data: Callable[[], Dataset] | None = None) -> dict[str, Any]:
  """Compares the first token's hidden states with those of a chain of MLPs (Section 3.1).

  Returns:
    largest_relative_difference: of vectors, over sequences and blocks. It is the rounding of
    float32 if the statement holds.
  """
  # The kernels and the matrix units of accelerators round more than the statement allows.
  run = _in_float32(run, implementation='chunked')
  tokens = np.asarray(run.probe_tokens)[:_SEQUENCES]
  with jax.default_matmul_precision('highest'):
    hidden_NxBxTxD = run.record(tokens, RecordOptions(hidden=True)).layers.hidden_BxTxD
    chain_NxBxD = first_token_chain(run.config, run.params, tokens)
  assert hidden_NxBxTxD is not None  # the options ask for it
  hidden_NxBxD = np.asarray(hidden_NxBxTxD[:, :, 0], np.float64)
  chain_NxBxD = np.asarray(chain_NxBxD, np.float64)
  difference = (np.linalg.norm(hidden_NxBxD - chain_NxBxD, axis=-1)
                / np.linalg.norm(hidden_NxBxD, axis=-1))
  return {'largest_relative_difference': _number(difference.max())}


def _probe(run: Run, experiment: Experiment) -> SinkReport:
  """The probe as it was during training, a part of the sequences at a time."""
  assert run.probe_tokens is not None  # a training run has them
  size = max(1, _TOKENS_AT_A_TIME // run.probe_tokens.shape[1])
  return probe(run, run.probe_tokens, dtype=experiment.probe.dtype, batch_size=size)


def _validation_loss(run: Run, batches: Sequence[Batch]) -> float | None:
  """Mean loss of the targets in all batches, in nats per token."""
  mesh = mesh_of(run.params)
  assert not isinstance(mesh, AbstractMesh)  # that of arrays on devices has the devices
  step = make_validation_step(run.config, mesh)
  totals = [step(run.params, batch) for batch in batches]
  # Each total is a sum of losses and the number of targets: rows that only fill a batch count for
  # nothing, which a mean of means would not do.
  return _number(sum(t[0] for t in totals) / sum(t[1] for t in totals))


def _in_float32(run: Run, **options) -> Run:
  return dataclasses.replace(
      run, config=dataclasses.replace(run.config, dtype='float32', **options))


def _divisor(number: int, limit: int) -> int:
  """The largest divisor up to a limit, at least 1."""
  return next((n for n in range(min(number, limit), 1, -1) if number % n == 0), 1)


def _number(x: float | np.floating | jax.Array) -> float | None:
  """A number for JSON, which has none that is not finite."""
  return float(x) if math.isfinite(x) else None
