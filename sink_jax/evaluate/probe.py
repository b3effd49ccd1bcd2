"""The sink probe: importance and norms of a model on a fixed set of sequences."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from sink_jax.evaluate.activations import SEQUENCES, Activations, describe, not_finite
from sink_jax.evaluate.sink_report import SinkReport, sizes
from sink_jax.foreign import Texts, TokenMask, as_array, standard_promotion, texts_in
from sink_jax.models.arrays import check_ids, matmul_precision
from sink_jax.models.config import ModelConfig
from sink_jax.models.record import Record, RecordOptions
from sink_jax.models.run import ModelInputs, Run

PROBE_OPTIONS = RecordOptions(entropy=True, hidden=describe)


@standard_promotion()
def probe(
  run: Run,
  tokens: ModelInputs | None = None,
  *,
  texts: str | Sequence[str] | None = None,
  length: int | None = None,
  special: bool = False,
  mask: TokenMask | None = None,
  dtype: str = 'float32',
  batch_size: int | None = None,
) -> SinkReport:
  """Runs a model on tokens (S, T), or on texts, and returns its SinkReport.

  A padded batch gives what each of its texts gives by itself: the model reads texts of one length
  together, without padding, by a program that is compiled for each length. Statistics of
  activations are means over at most ten texts of each length, with the position and the channel of
  the largest.

  Args:
    run: the model.
    tokens: ids (S, T), or features (S, T, F) for a model of continuous inputs.
    texts: S strings instead of tokens, which the run's tokenizer encodes; see `sink_jax.tokenize`.
    length: the number T of tokens that are taken of each text; by default that of the shortest.
    special: whether names of special tokens in texts, such as the '<|im_start|>' of a chat, are
      these tokens, or, by default, text; see `sink_jax.tokenize`.
    mask: (S, T), 1 for tokens and 0 for padding on their left or right: the attention_mask. Without
      it padding counts as text.
    dtype: of activations. With 'float32' matrix products are float32 on every device. The official
      implementation probes in 'bfloat16', whose rounding lowers importances near the threshold.
    batch_size: the number of sequences at a time, which bounds memory; by default all.

  Raises:
    ValueError: tokens are not (S, T) or exceed the vocabulary, the mask does not fit, a text
      has fewer than two tokens, or there is no tokenizer. NotFinite, one of them: a result of the
      model is not finite; names the block, and the parameter or the remedy.
  """
  if batch_size is not None and batch_size < 1:
    raise ValueError(f'batch_size = {batch_size} must be at least 1, or None for all sequences.')
  if (tokens is None) == (texts is None) or texts is None and (length is not None or special):
    raise ValueError(
      'give either tokens (S, T), or texts=[...], which may have length= and special=.'
    )
  if texts is not None:
    rows = run.tokenizer.tokens(texts, length, special=special)
    tokens = [row[: min(map(len, rows))] for row in rows]
    # These texts begin as the tokenizer prescribes, unlike the inputs of a run.
    run = dataclasses.replace(run, bos='tokenizer' if run.tokenizer.prefix else 'none')
  run = dataclasses.replace(run, config=probed(run.config, dtype))
  tokens = _checked(tokens, run.config.vocab_size)
  padded = texts_in(mask, *tokens.shape[:2], least=2)
  return _report(run, tokens, padded, batch_size or len(tokens), dtype)


def _checked(tokens: ModelInputs | None, vocabulary: int) -> np.ndarray:
  """Probe tokens as an array; a ValueError if their shape or their ids do not fit."""
  checked = np.asarray(as_array(tokens, 'probe tokens'))
  # A ratio divides by the other tokens.
  if checked.ndim < 2 or not len(checked) or checked.shape[1] < 2:
    raise ValueError(
      f'probe tokens must have shape (S, T) with T > 1, not {checked.shape}; strings are '
      'texts=[...].'
    )
  if vocabulary:
    check_ids(checked, vocabulary, 'probe tokens')
  return checked


def _report(run: Run, tokens: np.ndarray, texts: Texts | None, size: int, dtype: str) -> SinkReport:
  """The report of tokens (S, T), `size` sequences at a time, or of the texts in them."""
  config, rows = run.config, tokens if texts is None else texts.rows(tokens)
  length_S = np.asarray([len(row) for row in rows])
  order, parts, described = [], [], {}
  # Each part is copied to the host before the next is recorded, so the device holds one part.
  for length in sorted(set(length_S.tolist())):
    of_length = np.flatnonzero(length_S == length)
    for part in np.split(of_length, range(size, len(of_length), size)):
      record = run.record(np.stack([rows[s] for s in part]), PROBE_OPTIONS)
      arrays, activations = _to_host(record)
      if what := _not_finite_in(arrays, config):
        raise not_finite(run, what, dtype)
      order.extend(part)
      parts.append(_padded(arrays, int(length_S.max()) - length))
      described.setdefault(length, (min(SEQUENCES, len(part)), activations))
  joined = jax.tree.map(lambda *xs: np.concatenate(xs), *parts)
  if texts is not None:
    joined = jax.tree.map(lambda x: x[np.argsort(order)], joined)
  counts, activations = zip(*described.values())
  padded_lengths = None if texts is None else length_S
  protocol = {
    'metric': 'alpha_k > epsilon per sequence, then mean over sequences, layers, heads',
    'scores': (
      'attention weights'
      if config.attention.rows_sum_to_one
      else 'row-normalised proxy |f| / (sum |f| + 1e-8)'
    ),
    'blocks': [layer + 1 for layer in config.attention_layers],
    'first_token_limits': first_token_limits(config, int(length_S.min())),
    **sizes(joined['importance'], padded_lengths),
    'activation_sequences': sum(counts),
    'dtype': dtype,
    'matmul_precision': matmul_precision(dtype),
    'bos': run.bos,
    'first_token_ids': rows[0][:4].tolist() if config.vocab_size else None,
    'step': run.step,
    'run': run.name,
  }
  return SinkReport(
    **joined, activations=_mean(counts, activations), protocol=protocol, lengths=padded_lengths
  )


def probed(config: ModelConfig, dtype: str) -> ModelConfig:
  """The config of a model as `probe` runs it: not unrolled, which serves only the backward pass."""
  # The libraries' kernels (cuDNN, splash) run neither float32 nor sequences as short as a probe's.
  name = (
    config.implementation if config.implementation in ('reference', 'chunked', 'pallas') else None
  )
  return dataclasses.replace(config, dtype=dtype, unroll=1, implementation=name)


def first_token_limits(config: ModelConfig, length: int) -> list[float]:
  """By block, the share of queries that see the first of `length` tokens: a bound of importance."""
  queries = np.arange(length)
  seeing = [np.broadcast_to(spec.mask.keep(queries, 0), length) for spec in config.attention_specs]
  return [float(np.mean(seeing_T)) for seeing_T in seeing]


def _to_host(record: Record) -> tuple[dict[str, Any], Activations]:
  """The fields of SinkReport as NumPy arrays, sequences first, to join batches along them."""
  layers = record.layers
  first = lambda x: None if x is None else np.moveaxis(np.asarray(x), 1, 0)
  after = lambda h0, h: np.concatenate(
    [np.asarray(h0)[:, None], np.moveaxis(np.asarray(h), 1, 0)], 1
  )
  norms = {
    name: first(getattr(layers, f'{name}_norm_BxHxT')) for name in ('query', 'key', 'value', 'head')
  }
  norms |= dict(
    hidden=after(record.embedding_norm_BxT, layers.hidden_norm_BxT),
    hidden_before_norm=first(layers.hidden_before_norm_BxT),
  )
  if layers.sink_token_norm_B is not None:
    norms['sink_token'] = after(record.sink_embedding_norm_B, layers.sink_token_norm_B)
  masses = layers.importance
  return dict(
    importance=first(masses.normalized),
    raw_importance=first(masses.raw),
    extra_key=first(masses.extra_key),
    extra_key_released=first(masses.extra_key_released),
    norms=norms,
    entropy=first(masses.entropy),
  ), jax.tree.map(np.append, record.embedding, layers.hidden)


def _padded(arrays: dict[str, Any], missing: int) -> dict[str, Any]:
  """The fields of SinkReport with NaN for tokens that these texts lack."""
  if not missing:
    return arrays
  pad = lambda x: np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)], constant_values=np.nan)
  norms = {name: x if name == 'sink_token' else pad(x) for name, x in arrays['norms'].items()}
  of_tokens = {name: pad(arrays[name]) for name in ('importance', 'raw_importance')}
  return arrays | of_tokens | {'norms': norms}


def _mean(counts: Sequence[int], parts: Sequence[Activations]) -> Activations:
  """The mean of descriptions of so many sequences each, and the place of the largest activation."""
  stacked: Any = jax.tree.map(lambda *xs: np.stack(xs), *parts)
  largest_M = stacked.activation_max.argmax(0)
  at_largest = lambda x_PxM: np.take_along_axis(x_PxM, largest_M[None], 0)[0]
  mean: Any = jax.tree.map(lambda x_PxM: np.average(x_PxM, axis=0, weights=counts), stacked)
  return mean._replace(
    activation_position=at_largest(stacked.activation_position),
    activation_channel=at_largest(stacked.activation_channel),
  )


def _not_finite_in(joined: dict[str, Any], config: ModelConfig) -> str | None:
  """The first result that is not finite, by block and head from 1; None where all are finite."""
  norms = {f'{name} norm': x for name, x in joined['norms'].items()}
  for name, x in (joined | norms).items():
    if name == 'norms' or x is None or (finite := np.isfinite(x)).all():
      continue
    layer, head, *_ = *np.argwhere(~finite.all(0))[0], 0
    if name.startswith(('hidden', 'sink_token')):  # entry 0 is the embedding, before any norm
      block = layer + (name == 'hidden_before_norm norm')
      return f'{name} {f"in block {block}" if block else "of the embedding"}'
    return f'{name} in block {config.attention_layers[layer] + 1}, head {head + 1}'
  return None
