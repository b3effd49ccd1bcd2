"""The results of a probe, as arrays with the metrics and pictures of them, and as text."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Array, Float, Integer

from sink_jax.evaluate import EPSILON, sinks
from sink_jax.evaluate.activations import BEYOND, Activations
from sink_jax.foreign import Tensor, TokenMask, texts_in
from sink_jax.io.paths import to_path
from sink_jax.io.terminal import text_table

if TYPE_CHECKING:
  from matplotlib.figure import Figure

DORMANT = 0.25  # of the mean output norm of a block's heads (HONOR, arXiv 2504.03889)
_EXACT = 'attention weights'  # protocol['scores'], where they are not a proxy


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class SinkReport:
  """The results of a probe of S sequences of T tokens: N of M layers have attention, with H heads.

  A report of only attention maps has no activations, and empty `norms`. For a padded batch T is the
  length of the longest text, numbers of tokens beyond the end of a text are NaN, and means are over
  texts.

  Attributes:
    importance: alpha of every token (S, N, H, T), from softmax weights, else from the paper's
      row-normalised proxy scores.
    raw_importance: the same from the weights that multiply the values: the raw mass that a token
      receives.
    extra_key: the mean normalised weight (S, N, H) of the extra key, or of the learned sink tokens
      together; None without either.
    extra_key_released: this mean as the official implementation (sail-sg/Attention-Sink) computes
      it, which also counts a dummy row of weight one; with learned sink tokens, their rows.
    norms: l2 norms by name. 'query', 'key', 'value' and 'head' (outputs before W_O) are (S, N, H,
      T), of key/value heads for keys and values. 'hidden' (S, M + 1, T) has the embedding as entry
      0; 'hidden_before_norm' (S, M, T) is before the last norm of a post-norm block. 'sink_token'
      (S, M + 1) is the largest norm among the hidden states of learned sink tokens.
    activations: statistics (M + 1,) of the same hidden states, over the first sequences only.
    protocol: how the report was made, as plain values for JSON; see `probe`.
    entropy: of attention, as a share of uniform attention's (S, N, H), see `Importance`; 1 is
      uniform.
    lengths: the number of tokens (S,) of each text of a padded batch, otherwise None.
  """

  importance: Float[np.ndarray, 'S N H T']
  raw_importance: Float[np.ndarray, 'S N H T']
  extra_key: Float[np.ndarray, 'S N H'] | None
  extra_key_released: Float[np.ndarray, 'S N H'] | None
  norms: dict[str, Float[np.ndarray, 'S ...']]
  activations: Activations | None
  protocol: dict[str, Any]
  entropy: Float[np.ndarray, 'S N H'] | None = None
  lengths: Integer[np.ndarray, ' S'] | None = None

  @classmethod
  def from_attentions(
    cls,
    attentions: Sequence | Array | np.ndarray | Tensor,
    name: str = '',
    *,
    mask: TokenMask | None = None,
  ) -> SinkReport:
    """Returns the report of only attention maps; a ValueError as of `sink_jax.importance`.

    Padding on the right cannot be recognised: without `mask` it counts as text.

    Args:
      attentions: the maps (S, H, T, T) of N layers: a list or tuple of arrays or PyTorch tensors,
        such as the `attentions` of a transformers model, or one array (N, S, H, T, T).
      name: of the model, for titles.
      mask: (S, T), 1 for tokens and 0 for padding on their left or right: the
        attention_mask.
    """
    layers = sinks.maps_of_layers(attentions)
    texts = texts_in(mask, len(layers[0]), layers[0].shape[-1])
    alpha = np.swapaxes(sinks.importance(layers, mask=mask), 0, 1)
    length_S = None if texts is None else np.asarray(texts.length_S)
    if length_S is not None:
      alpha = alpha[..., : length_S.max()]
    protocol = {
      'scores': _EXACT,
      'run': name,
      **sizes(alpha, length_S),
      'blocks': list(range(1, alpha.shape[1] + 1)),
    }
    return cls(alpha, alpha, None, None, {}, None, protocol, lengths=length_S)

  def sink_rates(self, epsilon: float = EPSILON) -> Float[np.ndarray, ' T']:
    """Returns Sink_k^epsilon (T,) of tokens as shares (`summary` has percent); entry 0 is Sink_1.

    For a padded batch the rate of token k is a mean over the texts that have a token k.
    """
    return sinks.sink_rate(self.importance, epsilon)

  def sink_rate(self, position: int = 1, epsilon: float = EPSILON) -> float:
    """Returns Sink_k^epsilon of the token at a position in 1..T, as a share: 0.745 for 74.5 %."""
    rates_T = self.sink_rates(epsilon)
    if position not in range(1, len(rates_T) + 1):
      raise ValueError(f'position {position} is outside 1..{len(rates_T)}; positions are 1-based.')
    return float(rates_T[position - 1])

  def sink_positions(self) -> np.ndarray:
    """Returns the positions, from 1, of the sinks: the rate there is at least half of the largest.

    Only those of the first half, since few rows see a later token; position 1 where no head has a
    sink.
    """
    shortest = self.importance.shape[-1] if self.lengths is None else self.lengths.min()
    rates_T = self.sink_rates()[: max(1, shortest // 2)]
    return np.flatnonzero(rates_T >= rates_T.max() / 2) + 1 if rates_T.any() else np.array([1])

  def head_importance(self) -> Float[np.ndarray, 'N H']:
    """Returns the first token's importance by layer and head (N, H), a mean over sequences."""
    return self.importance[..., 0].mean(0)

  def head_rows(self, epsilon: float = EPSILON) -> list[dict[str, Any]]:
    """Returns a row for each head: the first token's importance, and the Sink_1 of the model."""
    common = {
      'model': self.protocol['run'] or 'model',
      'epsilon': epsilon,
      'sink_1': 100 * self.sink_rate(1, epsilon),
    }
    return [
      common | {'block': self.protocol['blocks'][n], 'head': h + 1, 'importance': float(alpha)}
      for (n, h), alpha in np.ndenumerate(self.head_importance())
    ]

  def norm_ratio(self, kind: str) -> Float[np.ndarray, ' layers']:
    """Returns, by layer, the mean norm of the first token over that of others (Figures 7 and 8).

    kind: a key of `norms` except 'sink_token'. Not finite if all other norms are zero.
    """
    if kind not in (choices := [name for name in self.norms if name != 'sink_token']):
      raise ValueError(
        f'There are no norms of {kind!r} by position, and none in a report of only attention '
        f'maps; choices: {", ".join(choices)}.'
      )
    norms = self.norms[kind]
    # Over sequences, and over heads where the norms have such an axis.
    mean_N = lambda x: x.mean((0, *range(2, x.ndim)), np.float64)
    with np.errstate(divide='ignore', invalid='ignore'):
      return mean_N(norms[..., 0]) / mean_N(mean_of_text(norms[..., 1:]))

  def summary(self, epsilon: float = EPSILON) -> dict[str, Any]:
    """Returns the report as plain numbers, for logs and JSON; rates are in percent.

    A report of only maps leaves out what needs norms. `head_norm` has the mean norm of every head's
    output over that of all heads of its block. A number that is not finite is None, as JSON has no
    NaN.
    """
    finite = lambda values: [x.item() if np.isfinite(x) else None for x in np.asarray(values)]
    slot = lambda weight: None if weight is None else 100 * float((weight > epsilon).mean())
    alpha_NxH, raw_SxNxH = self.head_importance(), self.raw_importance[..., 0].astype(np.float64)
    rates = [100 * float(rate) for rate in self.sink_rates(epsilon)]
    # Importance is a mean over the rows that may attend to key k; times their number it is a sum
    # again.
    length_S = sinks.text_lengths(self.raw_importance)[:, None, None, None]
    masses = self.raw_importance * np.maximum(length_S - np.arange(len(rates)), 1)
    row_masses = np.nansum(masses, -1) / length_S[..., 0]
    summary = {
      'sink_1': rates[0],
      'sink': rates,
      'sink_bias_slot': slot(self.extra_key),
      'sink_bias_slot_released': slot(self.extra_key_released),
      'largest_importance': float(alpha_NxH.max()),
      'mean_importance': float(alpha_NxH.mean()),
      'mean_bias_slot': None if self.extra_key is None else float(self.extra_key.mean()),
      'raw_mass_1': float(raw_SxNxH.mean()),
      'largest_raw_mass_1': float(raw_SxNxH.mean(0).max()),
      'raw_row_mass': float(row_masses.mean()),
    }
    if self.activations is None:
      return summary
    sink_token, norms_NxH = self.norms.get('sink_token'), mean_of_text(self.norms['head']).mean(0)
    with np.errstate(divide='ignore', invalid='ignore'):
      head_norms = norms_NxH / norms_NxH.mean(1, keepdims=True)
    return summary | {
      'entropy_ratio': None
      if self.entropy is None
      else [finite(block) for block in self.entropy.mean(0)],
      'head_norm': [finite(block) for block in head_norms],
      # Below a quarter of their block's mean (HONOR, arXiv 2504.03889), or NaN in a block without
      # output.
      'dormant_heads': 100 * float((~(head_norms >= DORMANT)).mean()),
      **{
        f'{kind}_ratio': finite(self.norm_ratio(kind))
        for kind in ('value', 'key', 'hidden', 'hidden_before_norm')
      },
      # The learned sink token's norm over the mean of all tokens (Figure 7 middle).
      'sink_token_ratio': None
      if sink_token is None
      else finite(sink_token.mean(0, np.float64) / mean_of_text(self.norms['hidden']).mean(0)),
      **{name: finite(values) for name, values in self.activations._asdict().items()},
      'null_p99': {
        'sink_1': 100 * sinks.sink_rate_null(self.importance, epsilon),
        'hidden_ratio': finite([sinks.hidden_ratio_null(self.norms['hidden'][:, 1:])])[0],
      },
    }

  def plot(self, path: str | os.PathLike | None = None, epsilon: float = EPSILON) -> Figure:
    """Draws the first token's importance, blocks across and heads down, on a figure for a notebook.

    path: the PNG file to write, or None. epsilon: the threshold of the Sink_1 in the title.
    """
    from sink_jax.pictures import maps, style  # matplotlib only when a picture is wanted

    figure = maps.grid(self.head_rows(epsilon), 'importance')
    if path is not None:
      to_path(path).write_bytes(style.png(figure))
    return figure

  def __repr__(self) -> str:
    return as_text(self.summary(), self.protocol, EPSILON)


def mean_of_text(values: Float[np.ndarray, '*lead T']) -> Float[np.ndarray, '*lead']:
  """Means over the tokens of each text, in float64; values beyond its end are NaN."""
  return np.asarray(np.nanmean(values, -1, np.float64))


def sizes(importance_SxNxHxT: np.ndarray, length_S: np.ndarray | None) -> dict[str, Any]:
  """The entries of a protocol about the number of sequences and of tokens."""
  sequences, *_, length = importance_SxNxHxT.shape
  lengths = {} if length_S is None else {'lengths': length_S.tolist()}
  return {'sequences': sequences, 'length': length} | lengths


def as_text(summary: Mapping[str, Any], protocol: Mapping[str, Any], epsilon: float) -> str:
  """The lines of a summary for a terminal; the arguments are as in sink_report.json."""
  step = '' if protocol.get('step') is None else f', step {protocol["step"]}'
  least = min(protocol.get('lengths', [protocol['length']]))
  tokens = f'{least} to {protocol["length"]}' if least < protocol['length'] else protocol['length']
  of = f'{protocol["sequences"]} sequences of {tokens} tokens'
  lines = [
    f'{protocol["run"] or "model"}{step}: {of}',
    *text_table(
      ('metric', 'value', 'meaning'), table_rows(summary, protocol, epsilon), left=(0, 2)
    ),
    '* of proxy scores: the rows of this attention do not sum to one'
    * (protocol['scores'] != _EXACT),
    limit_note(protocol.get('first_token_limits', ()), least, epsilon),
  ]
  return '\n'.join(filter(None, lines))


def table_rows(
  summary: Mapping[str, Any], protocol: Mapping[str, Any], epsilon: float
) -> list[tuple[str, str, str]]:
  """Name, value and meaning of each number of a summary that is shown."""
  star = '' if protocol['scores'] == _EXACT else '*'
  rows = [
    (
      'Sink_1',
      f'{summary["sink_1"]:.1f} %{star}',
      f'of pairs of a head and a sequence: the first token gets more than {epsilon:g}',
    )
  ]
  if summary['sink_bias_slot'] is not None:  # takes the sink of the first token over (Table 4)
    rows.append(
      (
        'Sink_*',
        f'{summary["sink_bias_slot"]:.1f} %',
        'the extra key; as sail-sg/Attention-Sink '
        f'counts: {summary["sink_bias_slot_released"]:.1f} %',
      )
    )
  rows += [
    (
      f'{which} importance',
      f'{summary[f"{which}_importance"]:.3f}{star}',
      'of the first token, over heads',
    )
    for which in ('largest', 'mean')
  ]
  mean, raw, row = (
    f'{summary[name]:.3f}' for name in ('mean_importance', 'raw_mass_1', 'raw_row_mass')
  )
  if (raw, row) != (mean, '1.000'):  # as they are where rows sum to one
    rows.append(('raw mass', raw, f'weight of the first token, of {row} in a row'))
  if 'value_ratio' not in summary:  # of only maps
    return rows
  return rows + _state_rows(summary, protocol)


def _state_rows(
  summary: Mapping[str, Any], protocol: Mapping[str, Any]
) -> list[tuple[str, str, str]]:
  """The rows of `table_rows` about values and hidden states."""
  rows = []
  size = lambda x: f'{x:.2f}' if x < 100 else f'{x:,.0f}'
  blocks = range(len(summary['hidden_ratio']))  # 0 is the embedding
  for name, of, end, which in (
    ('value', protocol['blocks'], min, 'smallest'),
    ('hidden', blocks, max, 'largest'),
  ):
    if pairs := [(x, n) for x, n in zip(summary[f'{name}_ratio'], of) if n and x is not None]:
      ratio, block = end(pairs)
      rows.append(
        (f'{name} norm ratio', size(ratio), f'first token to the others, {which} in block {block}')
      )
  # The activation that exceeds the median of its block most.
  peaks = zip(
    *(summary[f'activation_{key}'] for key in ('max', 'median', 'position', 'channel')), blocks
  )
  if times := [(peak[0] / peak[1], *peak) for peak in peaks if peak[0] and peak[1]]:
    ratio, largest, _, token, channel, block = max(times)
    where = (
      f'channel {channel:g} of token {token:g}, {f"block {block}" if block else "the embedding"}'
    )
    rows.append(
      (
        'largest activation',
        size(largest),
        f'{ratio:,.0f} times the median (massive: above {BEYOND[0]}): {where}',
      )
    )
  return rows


def limit_note(limits: Sequence[float], length: int, epsilon: float) -> str:
  """A line about the blocks whose mask, by `first_token_limits`, allows no sink; '' without one."""
  if not (below := [limit for limit in limits if limit <= epsilon]):
    return ''
  return (
    f'Sink_1 is 0 by construction in {len(below)} of {len(limits)} blocks, where at most '
    f'{100 * max(below):.0f} % of {length} queries see the first token; take shorter sequences'
  )
