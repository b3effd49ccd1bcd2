"""The numbers and the attention maps of the page to explore a model's heads."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from sink_jax.analyses.models import Model
from sink_jax.evaluate.probe import probed
from sink_jax.evaluate.sink_report import SinkReport
from sink_jax.models.record import RecordOptions, maps
from sink_jax.report.explorer import Explored

TOKENS = 10  # whose importance the page shows
_TEXTS = 4
_LENGTH, _FEWER, _MANY = 64, 32, 512  # tokens of a map; fewer in models of many heads
_KEPT = 0.95  # of the attention, within the distance
_EPSILONS = [n / 100 for n in range(1, 100)]


def explore(model: Model) -> Explored:
  """Measures a model on the texts of its options; the maps are those of the first four.

  A map has the first 64 tokens of a text, in a model of more than 512 heads the first 32, so that
  the page stays small. Where rows of weights do not sum to one, weights are the proxy scores.
  """
  inputs = model.inputs()
  report = model.report(inputs.tokens)
  layers, heads = report.importance.shape[1:3]
  length = _LENGTH if layers * heads <= _MANY else _FEWER
  tokens_SxT = inputs.tokens[:_TEXTS, :length]
  weights_SxNxHxTxT = _weights(model, tokens_SxT)
  numbers = _numbers(report) | {'distance': _distances(weights_SxNxHxTxT).tolist()}
  queries, keys = np.tril_indices(tokens_SxT.shape[1])
  lower_SxNxHxP = weights_SxNxHxTxT[..., queries, keys]
  roots_SxNxHxP = np.rint(255 * np.sqrt(np.clip(lower_SxNxHxP, 0, 1))).astype(np.uint8)
  word = (lambda i: inputs.tokenizer.decode([i])) if inputs.tokenizer else str
  texts = [[word(int(i)) for i in tokens_T] for tokens_T in tokens_SxT]
  return Explored(numbers, texts, roots_SxNxHxP)


def _weights(model: Model, tokens_SxT: np.ndarray) -> np.ndarray:
  """The maps (S, N, H, T, T), recorded a text at a time: each has all heads."""
  config = probed(model.run.config, model.options.dtype)
  run = dataclasses.replace(model.run, config=config)
  weights = []
  for batch_1xT in model.batches(tokens_SxT, 1):
    recorded = run.record(batch_1xT, RecordOptions(attention=maps)).layers.attention
    weights.append(np.asarray(recorded.proxy_BxHxTxT)[:, 0])
  return np.stack(weights)


def _numbers(report: SinkReport) -> dict[str, Any]:
  alpha_NxHxK = report.importance[..., :TOKENS].mean(0, np.float64)
  heads = alpha_NxHxK.shape[1]
  rates_ExK = [100 * report.sink_rates(epsilon)[:TOKENS] for epsilon in _EPSILONS]
  ratios = {}
  for kind in ('value', 'key'):
    mean_NxHkvxT = report.norms[kind].mean(0, np.float64)
    others_NxHkv = np.maximum(mean_NxHkvxT[..., 1:].mean(-1), np.finfo(np.float32).tiny)
    ratio_NxHkv = mean_NxHkvxT[..., 0] / others_NxHkv
    ratios[f'{kind}_ratio'] = np.repeat(ratio_NxHkv, heads // ratio_NxHkv.shape[1], 1)
  assert report.entropy is not None
  return {
    'blocks': report.protocol['blocks'],
    'epsilons': _EPSILONS,
    'sink_rates': _rounded(np.transpose(rates_ExK)),
    'importance': _rounded(alpha_NxHxK),
    'entropy': _rounded(report.entropy.mean(0)),
    **{name: _rounded(ratio_NxH) for name, ratio_NxH in ratios.items()},
  }


def _distances(weights_SxNxHxTxT: np.ndarray) -> np.ndarray:
  """The smallest distance (N, H) in tokens within which 95 % of the attention of all queries is."""
  mean_NxHxTxT = weights_SxNxHxTxT.mean(0, np.float64)
  diagonals = [
    np.trace(mean_NxHxTxT, -distance, 2, 3) for distance in range(mean_NxHxTxT.shape[-1])
  ]
  kept_TxNxH = np.cumsum(diagonals, 0)
  return (kept_TxNxH >= _KEPT * kept_TxNxH[-1]).argmax(0)


def _rounded(x: Any) -> Any:
  """Nested lists of numbers with four digits; None for what is not finite."""
  if np.ndim(x):
    return [_rounded(part) for part in x]
  return float(f'{x:.4g}') if math.isfinite(x) else None
