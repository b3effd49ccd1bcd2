"""The sink probe: importance and norms of a model on a fixed set of sequences."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import jax
import numpy as np

from sink_jax.arguments import explained
from sink_jax.evaluate.activations import SEQUENCES, Activations, describe
from sink_jax.evaluate.finite import not_finite
from sink_jax.evaluate.limits import first_token_limits
from sink_jax.evaluate.sink_report import SinkReport
from sink_jax.models.arrays import check_ids, matmul_precision
from sink_jax.models.config import ModelConfig
from sink_jax.models.record import Record, RecordOptions
from sink_jax.models.run import ModelInputs, Run

# What a probe records: lowered elsewhere too, to know the memory that it takes.
PROBE_OPTIONS = RecordOptions(describe_hidden=describe)


@explained
def probe(run: Run, tokens: ModelInputs | str | None = None, *,
          texts: str | Sequence[str] | None = None,
          length: int | None = None, dtype: str = 'float32', batch_size: int | None = None,
          ) -> SinkReport:
  """Runs a model on tokens (S, T), or on texts, and returns its SinkReport.

  Importance is computed per sequence. A rate thresholds each sequence and then averages over
  sequences, layers and heads, in the order of the official implementation
  (sail-sg/Attention-Sink).

  Args:
    run: the model.
    tokens: ids (S, T), or features (S, T, F) for a model of continuous inputs, or texts.
    texts: S strings in place of tokens, which the run's tokenizer encodes; see `sink_jax.tokenize`.
    length: the number T of tokens that are taken of each text; by default that of the shortest.
    dtype: the dtype of activations during the probe. With 'float32' matrix products are float32 on
      every device. The official implementation probes its models in 'bfloat16', whose rounding
      lowers importances near the threshold.
    batch_size: the number of sequences at a time, which bounds memory; by default all.

  Raises:
    ValueError: tokens are not (S, T) or exceed the vocabulary, a text is shorter than `length`,
      there is no tokenizer, or batch_size is below 1.
    NotFinite: a result of the model is not finite. The message names the block, and the parameter
      at fault or the remedy. It is a ValueError.
  """
  if batch_size is not None and batch_size < 1:
    raise ValueError(f'batch_size = {batch_size} must be at least 1, or None for all sequences.')
  if texts is None and _are_texts(tokens):
    tokens, texts = None, tokens
  if texts is not None:
    tokens, run = _of_texts(run, tokens, texts, length)
  elif tokens is None or length is not None:
    raise ValueError('give tokens (S, T), or texts=[...], which may have a length.')
  tokens = np.asarray(tokens)
  config = probed(run.config, dtype)
  # A sequence of one token has no other tokens, whose norms a ratio divides by.
  if tokens.ndim < 2 or not len(tokens) or tokens.shape[1] < 2:
    raise ValueError('probe tokens must have shape (S, T) with T > 1, not '
                     f'{tokens.shape}.')
  if config.vocab_size:
    check_ids(tokens, config.vocab_size, 'probe tokens')
  run = dataclasses.replace(run, config=config)
  # Each part is copied to the host before the next is recorded, so the device holds one part.
  size = batch_size or len(tokens)
  parts = [_to_host(run.record(tokens[i:i + size], PROBE_OPTIONS))
           for i in range(0, len(tokens), size)]
  joined = jax.tree.map(lambda *xs: np.concatenate(xs), *(arrays for arrays, _ in parts))
  if what := _first_not_finite(joined, config):
    raise not_finite(run, what, dtype)
  return SinkReport(**joined, activations=parts[0][1], protocol={
      'metric': 'alpha_k > epsilon per sequence, then mean over sequences, layers, heads',
      'scores': ('attention weights' if config.attention.rows_sum_to_one
                 else 'row-normalised proxy |f| / (sum |f| + 1e-8)'),
      'row_divisor': 'T - k + 1; all rows count, under a causal mask those from k on',
      'blocks': [layer + 1 for layer in config.attention_layers],
      'first_token_limits': first_token_limits(config, tokens.shape[1]),
      'sequences': len(tokens),
      'activation_sequences': min(SEQUENCES, size, len(tokens)),
      'length': tokens.shape[1],
      'dtype': dtype,
      'matmul_precision': matmul_precision(dtype),
      'bos': run.bos,
      'first_token_ids': tokens[0, :4].tolist() if config.vocab_size else None,
      'step': run.step,
      'run': run.name,
  })


def probed(config: ModelConfig, dtype: str) -> ModelConfig:
  """The config of a model as `probe` runs it."""
  # The libraries' kernels (cuDNN, splash) run neither float32 nor sequences as short as a probe's,
  # and give no statistics of rows, which importance needs: a probe runs without them.
  implementation = config.implementation
  if implementation not in ('reference', 'chunked', 'pallas'):
    implementation = None
  # Unrolling saves copies for the backward pass, and a probe has none.
  return dataclasses.replace(config, dtype=dtype, unroll=1, implementation=implementation)


def _are_texts(x: object) -> TypeGuard[str | Sequence[str]]:
  return isinstance(x, str) or isinstance(x, (list, tuple)) and any(isinstance(t, str) for t in x)


def _of_texts(run: Run, tokens: ModelInputs | None, texts: str | Sequence[str],
              length: int | None) -> tuple[list[np.ndarray] | np.ndarray, Run]:
  """Tokens (S, T), and the run with `bos` as these texts begin."""
  if tokens is not None:
    raise ValueError('give either tokens or texts.')
  tokens = run.tokenizer.tokens(texts, length)
  if length is None:
    shortest = min(map(len, tokens))
    tokens = [row[:shortest] for row in tokens]
  # The report says how its own inputs begin, and these texts begin as the tokenizer has it,
  # whatever the inputs of the run were.
  bos = 'tokenizer' if run.tokenizer.prefix else 'none'
  return tokens, dataclasses.replace(run, bos=bos)


def _to_host(record: Record) -> tuple[dict[str, Any], Activations]:
  """A record as NumPy arrays: those with sequences, first, by the fields of SinkReport."""
  layers = record.layers
  # A record has its layers first; a report has its sequences first, to join batches along them.
  first = lambda x: np.moveaxis(np.asarray(x), 1, 0)
  optional = lambda x: None if x is None else first(x)
  # The embedding's norm as entry 0, before those of the blocks.
  after = lambda h0, h: np.concatenate([np.asarray(h0)[:, None], first(h)], 1)
  norms = dict(query=first(layers.query_norm_BxHxT), key=first(layers.key_norm_BxHxT),
               value=first(layers.value_norm_BxHxT), head=first(layers.head_norm_BxHxT),
               hidden=after(record.embedding_norm_BxT, layers.hidden_norm_BxT),
               hidden_before_norm=first(layers.hidden_before_norm_BxT))
  if layers.sink_token_norm_B is not None:
    norms['sink_token'] = after(record.sink_embedding_norm_B, layers.sink_token_norm_B)
  activations = jax.tree.map(lambda of_embedding, of_blocks: np.append(of_embedding, of_blocks),
                             record.embedding_description, layers.hidden_description)
  return dict(
      importance=first(layers.importance.normalized),
      raw_importance=first(layers.importance.raw),
      bias_slot=optional(layers.importance.bias_slot),
      bias_slot_released=optional(layers.importance.bias_slot_released),
      norms=norms), activations


def _first_not_finite(joined: Mapping[str, Any], config: ModelConfig) -> str | None:
  """The first result that is not finite, by block and head from 1; None where all are finite."""
  norms = joined['norms']
  of_heads = {name: joined[name] for name in ('importance', 'raw_importance', 'bias_slot',
                                              'bias_slot_released')}
  of_heads |= {f'{name} norm': norms[name] for name in ('query', 'key', 'value', 'head')}
  for name, x in of_heads.items():
    if x is not None and not (finite := np.isfinite(x)).all():
      # Over all sequences: the message names a block and a head, and not a sequence.
      layer, head, *_ = np.argwhere(~finite.all(0))[0]
      return f'{name} in block {config.attention_layers[layer] + 1}, head {head + 1}'
  # With the number of the block that entry 0 is of: 0 is the embedding, which no norm goes before.
  for name, first in (('hidden', 0), ('hidden_before_norm', 1), ('sink_token', 0)):
    if name in norms and not (finite := np.isfinite(norms[name])).all():
      block = first + np.argwhere(~finite.all(0))[0][0]
      return f'{name} norm {f"in block {block}" if block else "of the embedding"}'
  return None
