"""What a probe of a model found, as arrays with the metrics and pictures of them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Array, Float

from sink_jax.arguments import explained
from sink_jax.evaluate import nulls, sinks, summary_text
from sink_jax.evaluate.activations import Activations
from sink_jax.evaluate.threshold import EPSILON
from sink_jax.io.tables import data_frame

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure

# A head is dormant whose mean output is shorter than this share of the mean of its block's heads.
DORMANT = 0.25


@dataclasses.dataclass(frozen=True, repr=False)
class SinkReport:
  """The results of a probe of S sequences of T tokens: N of M layers have attention, with H heads.

  It is shown as its summary in a few lines.

  Attributes:
    importance: the importance alpha of every token (S, N, H, T), computed from row-normalised
      scores: from softmax itself, and from the paper's proxy scores where attention is not
      normalised.
    raw_importance: the importance computed from the attention weights that multiply the values, the
      raw mass that a token receives. It differs from `importance` where rows do not sum to one.
    bias_slot: the mean normalised weight of the extra key, or of the learned sink tokens together,
      (S, N, H); None without either.
    bias_slot_released: this mean as the official implementation (sail-sg/Attention-Sink) computes
      it, which also counts a dummy row of weight one; with learned sink tokens, their own rows.
    norms: l2 norms by name. 'query', 'key' and 'value' are (S, N, H, T), where H is the number of
      key/value heads for keys and values. 'head' (S, N, H, T) is that of the heads' outputs, after
      gates and norms of heads and before W_O. 'hidden' (S, M + 1, T) is that of the hidden states,
      where entry 0 is the embedding; 'hidden_before_norm' (S, M, T) is that before the last norm
      of a post-norm block. With learned sink tokens, 'sink_token' (S, M + 1) is the largest norm
      among their hidden states, which no other array includes.
    activations: statistics (M + 1,) of the same hidden states, over the first sequences only; see
      `Activations`. A report of attention maps alone has none, and empty `norms`.
    protocol: how the report was made (metric, scores, sequences, length, dtype and others), as
      plain values for JSON; see `probe`.
  """

  importance: Float[np.ndarray, 'S N H T']
  raw_importance: Float[np.ndarray, 'S N H T']
  bias_slot: Float[np.ndarray, 'S N H'] | None
  bias_slot_released: Float[np.ndarray, 'S N H'] | None
  norms: dict[str, Float[np.ndarray, 'S ...']]
  activations: Activations | None
  protocol: dict[str, Any]

  @classmethod
  @explained
  def from_attentions(cls, attentions: Sequence | Array | np.ndarray, name: str = '') -> SinkReport:
    """Returns the report of attention maps alone, which has neither norms nor activations.

        out = model(**inputs, output_attentions=True)      # a transformers model, 'eager' attention
        sj.SinkReport.from_attentions(out.attentions).plot()

    Args:
      attentions: the maps (S, H, T, T) of N layers: a list or tuple of arrays or PyTorch tensors,
        or one such array (N, S, H, T, T).
      name: the name of the model, for titles.

    Raises:
      ValueError: as `sink_jax.importance` does, or maps of another shape.
    """
    alpha_NxSxHxT = np.array([np.asarray(sinks.importance(maps)) for maps in attentions])
    if alpha_NxSxHxT.ndim != 4:
      raise ValueError('attentions must be maps (S, H, T, T) of each layer: sequences, heads, '
                       f'queries, keys; their importances have shape {alpha_NxSxHxT.shape}.')
    alpha_SxNxHxT = np.swapaxes(alpha_NxSxHxT, 0, 1)
    return cls(alpha_SxNxHxT, alpha_SxNxHxT, None, None, {}, None, {
        'scores': 'attention weights', 'run': name, 'sequences': len(alpha_SxNxHxT),
        'length': alpha_SxNxHxT.shape[-1]})

  @property
  def blocks(self) -> list[int]:
    """The numbers, from 1, of the N blocks with attention."""
    return self.protocol.get('blocks', list(range(1, self.importance.shape[1] + 1)))

  @explained
  def sink_rates(self, epsilon: float = EPSILON) -> Float[np.ndarray, ' T']:
    """Returns Sink_k^epsilon of every token (T,), as shares; entry 0 is Sink_1."""
    return sinks.sink_rate(self.importance, epsilon)

  @explained
  def sink_rate(self, position: int = 1, epsilon: float = EPSILON) -> float:
    """Returns Sink_k^epsilon of the token at a 1-based position, as a share.

    Raises:
      ValueError: the position lies outside 1..T, or epsilon outside (0, 1).
    """
    _check_position(position, self.importance)
    return float(self.sink_rates(epsilon)[position - 1])

  @explained
  def bias_slot_rate(self, epsilon: float = EPSILON, released: bool = False) -> float | None:
    """Returns Sink_*^epsilon, the share of heads whose extra key has a weight above epsilon.

    It is None if the model has neither an extra key nor learned sink tokens.

    Args:
      epsilon: the threshold, between 0 and 1.
      released: whether to use `bias_slot_released`, the weight as the official code counts it.
    """
    weight_SxNxH = self.bias_slot_released if released else self.bias_slot
    if weight_SxNxH is None:
      return None
    # `sink_rate` has an axis of keys, and the extra key is the only one on it.
    return float(sinks.sink_rate(weight_SxNxH[..., None], epsilon)[0])

  @explained
  def head_importance(self, position: int = 1) -> Float[np.ndarray, 'N H']:
    """Returns the importance of one token by layer and head (N, H), averaged over sequences."""
    _check_position(position, self.importance)
    return self.importance[..., position - 1].mean(0)

  @explained
  def norm_ratio(self, kind: str, position: int = 1) -> Float[np.ndarray, ' layers']:
    """Returns, per layer, the mean norm at a position over that at all others (Figures 7 and 8).

    A ratio is not finite if all other norms are zero.

    Args:
      kind: a key of `norms` but 'sink_token', whose ratio is `sink_token_ratio`; the ratios have
        its axis of layers.
      position: the 1-based position.

    Raises:
      ValueError: there are no such norms, or the position lies outside 1..T.
    """
    if kind not in self.norms:
      choices = ', '.join(self.norms) or 'none, as the report is one of attention maps alone'
      raise ValueError(f'There are no norms of {kind!r}; choices: {choices}.')
    if kind == 'sink_token':
      raise ValueError('The learned sink tokens have no position: use sink_token_ratio().')
    norms = np.asarray(self.norms[kind], np.float64)
    _check_position(position, norms)
    at = norms[..., position - 1]
    others = np.delete(norms, position - 1, -1).mean(-1)
    # Axis 1 has the layers; the others are sequences, and heads where the norms are of heads.
    axes = tuple(a for a in range(at.ndim) if a != 1)
    with np.errstate(divide='ignore', invalid='ignore'):
      return at.mean(axes) / others.mean(axes)

  def sink_token_ratio(self) -> Float[np.ndarray, ' layers'] | None:
    """Returns, per layer, the norm of the learned sink token over the mean norm of all tokens.

    The ratios are (M + 1,), and entry 0 is that of the embeddings (Figure 7 middle). Of several
    sink tokens the largest norm counts. It is None without sink tokens.
    """
    if 'sink_token' not in self.norms:
      return None
    with np.errstate(divide='ignore', invalid='ignore'):
      return self.norms['sink_token'].mean(0, np.float64) / self.norms['hidden'].mean(
          (0, 2), np.float64)

  def head_norms(self) -> Float[np.ndarray, 'N H']:
    """Returns the mean norm of every head's output over that of all heads of its block (N, H).

    A head whose output is nearly zero has no effect. Such heads are called dormant, and a sink is
    how softmax makes a head dormant (HONOR, Sandoval-Segura et al., arXiv 2504.03889). The ratio is
    not finite if all outputs of a block are zero.
    """
    norms_NxH = self.norms['head'].mean((0, 3), np.float64)
    with np.errstate(divide='ignore', invalid='ignore'):
      return norms_NxH / norms_NxH.mean(1, keepdims=True)

  def dormant_rate(self, level: float = DORMANT) -> float:
    """Returns the share of heads, dormant ones, whose `head_norms` lie below `level`.

    All heads of a block without any output are dormant.
    """
    # Written so that the nan of such a block, which fails every comparison, counts as dormant.
    return float((~(self.head_norms() >= level)).mean())

  def raw_row_mass(self) -> float:
    """Returns sum_j A_ij over tokens j, averaged over rows: 1 for softmax without an extra key."""
    length = self.raw_importance.shape[-1]
    # Importance is a mean over the rows that may attend to key k; this takes the division back.
    rows_seeing_k = length - np.arange(length)
    return float((self.raw_importance * rows_seeing_k).sum(-1).mean() / length)

  @explained
  def nulls(self, epsilon: float = EPSILON) -> dict[str, float]:
    """Returns what the metrics would be at random positions in place of the first token.

    They are the 99th percentiles, over random positions, of Sink_1^epsilon in percent ('sink_1')
    and of the largest hidden norm ratio of any block ('hidden_ratio'); see `evaluate.nulls`.
    """
    sinks.check_epsilon(epsilon)
    return {'sink_1': 100 * nulls.sink_rate_null(self.importance, epsilon),
            'hidden_ratio': nulls.hidden_ratio_null(self.norms['hidden'][:, 1:])}

  @explained
  def summary(self, epsilon: float = EPSILON) -> dict[str, Any]:
    """Returns the report as plain numbers, for logs and JSON; rates are in percent.

    A report of maps alone leaves out what needs norms. The last entries of 'sink' are rates of a
    mean over few queries, see `sink_jax.importance`.

    A ratio of norms is None if the norms that it divides by are zero, and a kurtosis is None if all
    hidden states are equal.
    """
    # JSON has no NaN and no infinity.
    finite = lambda values: [x.item() if np.isfinite(x) else None for x in np.asarray(values)]
    percent = lambda x: None if x is None else 100 * x
    rates = self.sink_rates(epsilon)
    summary = {
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
    }
    if self.activations is None:
      return summary
    sink_token = self.sink_token_ratio()
    return summary | {
        'head_norm': [finite(block) for block in self.head_norms()],
        'dormant_heads': percent(self.dormant_rate()),
        **{f'{kind}_ratio': finite(self.norm_ratio(kind))
           for kind in ('value', 'key', 'hidden', 'hidden_before_norm')},
        'sink_token_ratio': None if sink_token is None else finite(sink_token),
        **{name: finite(values) for name, values in self.activations._asdict().items()},
        'null_p99': {name: finite([value])[0] for name, value in self.nulls(epsilon).items()},
    }

  def plot(self, path: str | os.PathLike | None = None, epsilon: float = EPSILON, *,
           ax: Axes | None = None) -> Figure:
    """Draws a heat map of the first token's importance, blocks across and heads down.

    Args:
      path: the PNG file to write; by default none is written.
      epsilon: the threshold of the Sink_1 in the title.
      ax: the Matplotlib axes to draw on; by default those of a new figure.

    Returns:
      The figure, which a notebook shows.
    """
    from sink_jax.evaluate import plots  # matplotlib only when a picture is wanted

    return plots.importance_map(
        self.head_importance(), path, rate=self.sink_rate(epsilon=epsilon), blocks=self.blocks,
        name=self.protocol.get('run', ''), epsilon=epsilon, ax=ax)

  def to_pandas(self) -> Any:
    """Returns a `pandas.DataFrame` with a row for every head.

    Its columns are block and head (both from 1), importance and raw_importance of the first token,
    and head_norm (see `head_norms`), which a report of maps alone has not.

    Raises:
      ImportError: pandas is not installed.
    """
    heads = self.importance.shape[2]
    return data_frame({
        'block': np.repeat(self.blocks, heads), 'head': np.tile(1 + np.arange(heads),
                                                                len(self.blocks)),
        'importance': self.head_importance().ravel(),
        'raw_importance': self.raw_importance[..., 0].mean(0).ravel(),
        **({'head_norm': self.head_norms().ravel()} if self.norms else {})})

  def __repr__(self) -> str:
    return summary_text.as_text(self.summary(), self.protocol, EPSILON)

  def _repr_html_(self) -> str:
    return summary_text.as_html(self.summary(), self.protocol, EPSILON)

  def plot_norm_ratios(self, path: str | os.PathLike) -> None:
    """Writes a PNG of the norms of the first token relative to those of the others, by block."""
    from sink_jax.evaluate import plots  # as above

    kinds = ('value', 'key', 'hidden', 'hidden_before_norm')
    plots.norm_ratios({kind: self.norm_ratio(kind) for kind in kinds}, path, blocks=self.blocks,
                      name=self.protocol.get('run', ''))


def _check_position(position: int, values: np.ndarray) -> None:
  length = values.shape[-1]
  if not 1 <= position <= length:
    raise ValueError(f'position {position} is outside 1..{length}; positions are 1-based.')
