"""The sink probe: importance and norms of a model on a fixed set of sequences."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from sink_jax.arguments import explained
from sink_jax.evaluate import nulls, sinks
from sink_jax.evaluate.activations import SEQUENCES, Activations, describe
from sink_jax.evaluate.finite import not_finite
from sink_jax.evaluate.threshold import EPSILON
from sink_jax.models.config import ModelConfig
from sink_jax.models.precision import matmul_precision
from sink_jax.models.record import Record, RecordOptions
from sink_jax.models.run import ModelInputs, Run

# A head is dormant whose mean output is shorter than this share of the mean of its block's heads.
DORMANT = 0.25
# What a probe records: lowered elsewhere too, to know the memory that it takes.
PROBE_OPTIONS = RecordOptions(describe_hidden=describe)


@dataclasses.dataclass(frozen=True)
class SinkReport:
  """The results of a probe: S sequences, N layers with attention, H heads, T tokens.

  importance: alpha of every token, of row-normalised scores (S, N, H, T): softmax
    itself, and the paper's proxy scores where attention is not normalised.
  raw_importance: the same of the attention weights that multiply the values, which is the raw
    mass that a token receives. The two differ where rows do not sum to one.
  bias_slot: mean normalised weight of the extra key or the learned sink tokens (S, N, H); None
    without one. bias_slot_released: the same as the official implementation
    (sail-sg/Attention-Sink) computes it, which counts a dummy row of weight one too.
  norms: l2 norms 'query', 'key', 'value' (S, N, H, T), for keys and values of their own heads;
    'head' (S, N, H, T) of the heads' outputs, after gates and norms of heads, before W_O;
    'hidden' (S, M + 1, T) of all M layers, where entry 0 is the embedding, and
    'hidden_before_norm' (S, M, T); with learned sink tokens 'sink_token' (S, M + 1), the
    largest of their hidden states', which no other array counts.
  activations: arrays (M + 1,) of the same hidden states, of the first sequences alone; see
    `Activations`.
  protocol: how the report was made: metric, scores, sequences, length, dtype and others, as
    plain values for JSON; see `probe`.
  """

  importance: Float[np.ndarray, 'S N H T']
  raw_importance: Float[np.ndarray, 'S N H T']
  bias_slot: Float[np.ndarray, 'S N H'] | None
  bias_slot_released: Float[np.ndarray, 'S N H'] | None
  norms: dict[str, Float[np.ndarray, 'S ...']]
  activations: Activations
  protocol: dict[str, Any]

  @property
  def blocks(self) -> list[int]:
    """Numbers of the N blocks, from 1: those with attention."""
    return self.protocol.get('blocks', list(range(1, self.importance.shape[1] + 1)))

  @explained
  def sink_rates(self, epsilon: float = EPSILON) -> Float[np.ndarray, ' T']:
    """Sink_k^epsilon of every token (T,), shares; entry 0 is Sink_1."""
    return sinks.sink_rate(self.importance, epsilon)

  @explained
  def sink_rate(self, position: int = 1, epsilon: float = EPSILON) -> float:
    """Sink_k^epsilon of the token at a 1-based position, a share.

    Raises:
      ValueError: a position outside 1..T, or epsilon outside (0, 1).
    """
    _check_position(position, self.importance)
    return float(self.sink_rates(epsilon)[position - 1])

  @explained
  def bias_slot_rate(self, epsilon: float = EPSILON, released: bool = False) -> float | None:
    """Sink_*^epsilon, the share of heads whose extra key exceeds epsilon; None without one.

    released: whether to count as the official implementation does.
    """
    weight_SxNxH = self.bias_slot_released if released else self.bias_slot
    if weight_SxNxH is None:
      return None
    # `sink_rate` has an axis of keys, and the extra key is the only one on it.
    return float(sinks.sink_rate(weight_SxNxH[..., None], epsilon)[0])

  @explained
  def head_importance(self, position: int = 1) -> Float[np.ndarray, 'N H']:
    """Importance of one token per layer and head (N, H), averaged over sequences."""
    _check_position(position, self.importance)
    return self.importance[..., position - 1].mean(0)

  @explained
  def norm_ratio(self, kind: str, position: int = 1) -> Float[np.ndarray, ' layers']:
    """Mean norm at a position over the mean norm at all others, per layer (Figures 7 and 8).

    kind: a key of `norms`, whose layers are counted. Not finite where all others are zero.

    Raises:
      ValueError: there are no such norms, or a position outside 1..T.
    """
    if kind not in self.norms:
      raise ValueError(f'There are no norms of {kind!r}; choices: {", ".join(self.norms)}.')
    norms = np.asarray(self.norms[kind], np.float64)
    _check_position(position, norms)
    at = norms[..., position - 1]
    others = np.delete(norms, position - 1, -1).mean(-1)
    # Axis 1 has the layers; the others are sequences, and heads where the norms are of heads.
    axes = tuple(a for a in range(at.ndim) if a != 1)
    with np.errstate(divide='ignore', invalid='ignore'):
      return at.mean(axes) / others.mean(axes)

  def sink_token_ratio(self) -> Float[np.ndarray, ' layers'] | None:
    """Mean norm of the learned sink tokens over that of the tokens (M + 1,); None without one.

    Entry 0 is that of the embeddings (Figure 7 middle). Of several sink tokens the largest norm
    counts.
    """
    if 'sink_token' not in self.norms:
      return None
    with np.errstate(divide='ignore', invalid='ignore'):
      return self.norms['sink_token'].mean(0, np.float64) / self.norms['hidden'].mean(
          (0, 2), np.float64)

  def head_norms(self) -> Float[np.ndarray, 'N H']:
    """The mean norm of every head's output over that of all heads of its block.

    A head whose output is next to nothing does nothing: such heads are dormant, and a sink is how
    softmax makes one (HONOR, Sandoval-Segura et al., arXiv 2504.03889). Not finite where a whole
    block's outputs are zero.
    """
    norms_NxH = self.norms['head'].mean((0, 3), np.float64)
    with np.errstate(divide='ignore', invalid='ignore'):
      return norms_NxH / norms_NxH.mean(1, keepdims=True)

  def dormant_rate(self, level: float = DORMANT) -> float:
    """The share of heads whose `head_norms` lie below a level."""
    return float((self.head_norms() < level).mean())

  def raw_row_mass(self) -> float:
    """Mean over rows of sum_j A_ij between tokens: 1 for softmax without an extra key."""
    length = self.raw_importance.shape[-1]
    # Importance is a mean over the rows that may attend to key k; this takes the division back.
    rows_seeing_k = length - np.arange(length)
    return float((self.raw_importance * rows_seeing_k).sum(-1).mean() / length)

  @explained
  def nulls(self, epsilon: float = EPSILON) -> dict[str, float]:
    """What random target positions give in place of the first token, see `evaluate.nulls`.

    The 99th percentiles of Sink_1^epsilon in percent ('sink_1') and of the largest hidden norm
    ratio of a block ('hidden_ratio').
    """
    return {'sink_1': 100 * nulls.sink_rate_null(self.importance, epsilon),
            'hidden_ratio': nulls.hidden_ratio_null(self.norms['hidden'][:, 1:])}

  @explained
  def summary(self, epsilon: float = EPSILON) -> dict[str, Any]:
    """The report as plain numbers, for logs and JSON; rates are in percent.

    A ratio of norms is None where the norms that it divides by are zero, and a kurtosis where
    all hidden states are equal.
    """
    # JSON has no NaN and no infinity.
    finite = lambda values: [x.item() if np.isfinite(x) else None for x in np.asarray(values)]
    percent = lambda x: None if x is None else 100 * x
    rates = self.sink_rates(epsilon)
    ratios = {f'{kind}_ratio': finite(self.norm_ratio(kind))
              for kind in ('value', 'key', 'hidden', 'hidden_before_norm')}
    sink_token = self.sink_token_ratio()
    return {
        'sink_1': percent(float(rates[0])),
        'sink': [percent(float(r)) for r in rates],
        'sink_bias_slot': percent(self.bias_slot_rate(epsilon)),
        'sink_bias_slot_released': percent(self.bias_slot_rate(epsilon, released=True)),
        'largest_importance': float(self.head_importance().max()),
        'mean_importance': float(self.head_importance().mean()),
        'mean_bias_slot': None if self.bias_slot is None else float(self.bias_slot.mean()),
        'raw_mass_1': float(self.raw_importance[..., 0].mean(dtype=np.float64)),
        'largest_raw_mass_1': float(self.raw_importance[..., 0].mean(0, np.float64).max()),
        'raw_row_mass': self.raw_row_mass(),
        'head_norm': [finite(block) for block in self.head_norms()],
        'dormant_heads': percent(self.dormant_rate()),
        **ratios,
        'sink_token_ratio': None if sink_token is None else finite(sink_token),
        **{name: finite(values) for name, values in self.activations._asdict().items()},
        'null_p99': {name: finite([value])[0] for name, value in self.nulls(epsilon).items()},
    }

  def plot(self, path: str | os.PathLike, epsilon: float = EPSILON) -> None:
    """Writes a heat map of the first token's importance over layers and heads (PNG)."""
    from sink_jax.evaluate import plots  # matplotlib only when a picture is wanted

    plots.importance_map(
        self.head_importance(), path, rate=self.sink_rate(epsilon=epsilon), blocks=self.blocks,
        name=self.protocol.get('run', ''), epsilon=epsilon)

  def plot_norm_ratios(self, path: str | os.PathLike) -> None:
    """Writes the norms of the first token relative to the others, by block (PNG)."""
    from sink_jax.evaluate import plots  # as above

    kinds = ('value', 'key', 'hidden', 'hidden_before_norm')
    plots.norm_ratios({kind: self.norm_ratio(kind) for kind in kinds}, path, blocks=self.blocks,
                      name=self.protocol.get('run', ''))


@explained
def probe(run: Run, tokens: ModelInputs | None = None, *, texts: str | Sequence[str] | None = None,
          length: int | None = None, dtype: str = 'float32', batch_size: int | None = None,
          ) -> SinkReport:
  """Records a model on tokens (S, T), or on texts, and returns its SinkReport.

  Importance is computed per sequence; rates threshold each sequence and then average
  over sequences, layers and heads, in the order of the official implementation.

  Args:
    tokens: ids (S, T), or features (S, T, F) of a model of continuous inputs.
    texts: S strings in place of tokens, which the tokenizer of the run reads; see
      `sink_jax.tokenize`.
    length: T of the texts, by default that of the shortest.
    dtype: of activations during the probe; with 'float32' matrix products are float32 on every
      device. The official implementation probes its models in 'bfloat16', which lowers
      importances near the threshold by rounding.
    batch_size: sequences at a time, to bound memory; all at once by default.

  Raises:
    ValueError: tokens are not (S, T), or exceed the vocabulary; a text is shorter than `length`,
      or there is no tokenizer.
    NotFinite: a ValueError; a result of the model is not finite. The message names the block, and
      the parameter at fault or the remedy.
  """
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
  if config.vocab_size and not 0 <= tokens.min() <= tokens.max() < config.vocab_size:
    raise ValueError(f'probe tokens reach {tokens.max()}, the vocabulary has '
                     f'{config.vocab_size} entries: use the tokenizer of the model.')
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
      'row_divisor': 'T - k + 1, all rows from k on, the diagonal included',
      'blocks': [layer + 1 for layer in config.attention_layers],
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


def _check_position(position: int, values: np.ndarray) -> None:
  length = values.shape[-1]
  if not 1 <= position <= length:
    raise ValueError(f'position {position} is outside 1..{length}; positions are 1-based.')
