"""The results of a probe, as arrays with the metrics and pictures of them, and as text."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Array, Float

from sink_jax.evaluate import EPSILON, sinks
from sink_jax.evaluate.activations import BEYOND, Activations
from sink_jax.io.terminal import text_table

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure

_EXACT = 'attention weights'  # protocol['scores'], where they are not a proxy


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class SinkReport:
  """The results of a probe of S sequences of T tokens: N of M layers have attention, with H heads.

  It is shown as its summary in a few lines. A report of only attention maps has no activations, and
  empty `norms`.

  Attributes:
    importance: the importance alpha of every token (S, N, H, T), of row-normalised scores: of softmax
      itself, and of the paper's proxy scores where attention is not normalised.
    raw_importance: that of the weights that multiply the values, the raw mass that a token receives.
    bias_slot: the mean normalised weight of the extra key, or of the learned sink tokens together,
      (S, N, H); None without either.
    bias_slot_released: this mean as the official implementation (sail-sg/Attention-Sink) computes
      it, which also counts a dummy row of weight one; with learned sink tokens, their rows.
    norms: l2 norms by name. 'query', 'key', 'value' and 'head' are (S, N, H, T), of key/value heads
      for keys and values; 'head' is of the heads' outputs, after gates and norms of heads and before
      W_O. 'hidden' (S, M + 1, T) is of the hidden states, entry 0 of the embedding;
      'hidden_before_norm' (S, M, T) is before the last norm of a post-norm block. With learned sink
      tokens, 'sink_token' (S, M + 1) is the largest norm among their hidden states.
    activations: statistics (M + 1,) of the same hidden states, over the first sequences only.
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
  def from_attentions(cls, attentions: Sequence | Array | np.ndarray, name: str = '') -> SinkReport:
    """Returns the report of only attention maps.

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

  def sink_rates(self, epsilon: float = EPSILON) -> Float[np.ndarray, ' T']:
    """Returns Sink_k^epsilon of every token (T,), as shares; entry 0 is Sink_1."""
    return sinks.sink_rate(self.importance, epsilon)

  def sink_rate(self, position: int = 1, epsilon: float = EPSILON) -> float:
    """Returns Sink_k^epsilon of the token at a position in 1..T, as a share."""
    return float(self.sink_rates(epsilon)[self._index(position)])

  def bias_slot_rate(self, epsilon: float = EPSILON, released: bool = False) -> float | None:
    """Returns Sink_*^epsilon, the share of heads whose extra key is above epsilon; None without such a key.

    released: by `bias_slot_released`, the weight as the official code counts it.
    """
    weight_SxNxH = self.bias_slot_released if released else self.bias_slot
    if weight_SxNxH is None:
      return None
    # `sink_rate` has an axis of keys, and the extra key is the only one on it.
    return float(sinks.sink_rate(weight_SxNxH[..., None], epsilon)[0])

  def head_importance(self, position: int = 1) -> Float[np.ndarray, 'N H']:
    """Returns the importance of one token by layer and head (N, H), averaged over sequences."""
    return self.importance[..., self._index(position)].mean(0)

  def norm_ratio(self, kind: str, position: int = 1) -> Float[np.ndarray, ' layers']:
    """Returns, per layer, the mean norm at a position over that at all others (Figures 7 and 8).

    kind: a key of `norms` but 'sink_token', whose ratio is `sink_token_ratio`. position: in 1..T. A ratio
    is not finite if all other norms are zero.
    """
    if kind not in self.norms or kind == 'sink_token':
      choices = ', '.join(name for name in self.norms if name != 'sink_token')
      raise ValueError(f'There are no norms of {kind!r} by position; choices: '
                       f'{choices or "none, as the report is one of only attention maps"}.')
    norms, at = np.asarray(self.norms[kind], np.float64), self._index(position)
    # Axis 1 has the layers; the others are sequences, and heads where the norms are of heads.
    axes = tuple(a for a in range(norms.ndim - 1) if a != 1)
    with np.errstate(divide='ignore', invalid='ignore'):
      return norms[..., at].mean(axes) / np.delete(norms, at, -1).mean((*axes, -1))

  def sink_token_ratio(self) -> Float[np.ndarray, ' layers'] | None:
    """Returns the norm of the learned sink token over the mean of all tokens, (M + 1,) (Figure 7 middle)."""
    if 'sink_token' not in self.norms:
      return None
    with np.errstate(divide='ignore', invalid='ignore'):
      return self.norms['sink_token'].mean(0, np.float64) / self.norms['hidden'].mean((0, 2), np.float64)

  def head_norms(self) -> Float[np.ndarray, 'N H']:
    """Returns the mean norm of every head's output over that of all heads of its block (N, H).

    A head whose output is nearly zero is called dormant, and a sink is how softmax makes it so (HONOR,
    Sandoval-Segura et al., arXiv 2504.03889). Not finite if all outputs of a block are zero.
    """
    norms_NxH = self.norms['head'].mean((0, 3), np.float64)
    with np.errstate(divide='ignore', invalid='ignore'):
      return norms_NxH / norms_NxH.mean(1, keepdims=True)

  def dormant_rate(self) -> float:
    """Returns the share of heads, dormant ones, whose `head_norms` lie below a quarter."""
    # The NaN of a block without any output, which fails every comparison, counts as dormant.
    return float((~(self.head_norms() >= 0.25)).mean())

  def raw_row_mass(self) -> float:
    """Returns sum_j A_ij over tokens j, averaged over rows: 1 for softmax without an extra key."""
    length = self.raw_importance.shape[-1]
    # Importance is a mean over the rows that may attend to key k; this takes the division back.
    rows_seeing_k = length - np.arange(length)
    return float((self.raw_importance * rows_seeing_k).sum(-1).mean() / length)

  def nulls(self, epsilon: float = EPSILON) -> dict[str, float]:
    """Returns 99th percentiles over random positions in place of the first token; see `sinks.random_targets`.

    'sink_1' is of Sink_1^epsilon in percent, 'hidden_ratio' of the largest hidden norm ratio of any block.
    """
    sinks.check_epsilon(epsilon)
    return {'sink_1': 100 * sinks.sink_rate_null(self.importance, epsilon),
            'hidden_ratio': sinks.hidden_ratio_null(self.norms['hidden'][:, 1:])}

  def summary(self, epsilon: float = EPSILON) -> dict[str, Any]:
    """Returns the report as plain numbers, for logs and JSON; rates are in percent.

    A report of only maps leaves out what needs norms. A number that is not finite is None: a ratio to
    norms of zero, a kurtosis of hidden states that are all equal.
    """
    # JSON has no NaN and no infinity.
    finite = lambda values: [x.item() if np.isfinite(x) else None for x in np.asarray(values)]
    percent = lambda x: None if x is None else 100 * x
    alpha_NxH, raw_SxNxH = self.head_importance(), self.raw_importance[..., 0].astype(np.float64)
    rates = [100 * float(rate) for rate in self.sink_rates(epsilon)]
    summary = {
        'sink_1': rates[0], 'sink': rates,
        'sink_bias_slot': percent(self.bias_slot_rate(epsilon)),
        'sink_bias_slot_released': percent(self.bias_slot_rate(epsilon, released=True)),
        'largest_importance': float(alpha_NxH.max()), 'mean_importance': float(alpha_NxH.mean()),
        'mean_bias_slot': None if self.bias_slot is None else float(self.bias_slot.mean()),
        'raw_mass_1': float(raw_SxNxH.mean()), 'largest_raw_mass_1': float(raw_SxNxH.mean(0).max()),
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

    path: the PNG file to write, or None. epsilon: the threshold of the Sink_1 in the title. ax: the
    Matplotlib axes to draw on; by default those of a new figure. Returns the figure, which a notebook shows.
    """
    from sink_jax.evaluate import plots  # matplotlib only when a picture is wanted

    return plots.importance_map(
        self.head_importance(), path, rate=self.sink_rate(epsilon=epsilon), blocks=self.blocks,
        name=self.protocol.get('run', ''), epsilon=epsilon, ax=ax)

  def __repr__(self) -> str:
    return as_text(self.summary(), self.protocol, EPSILON)

  def _index(self, position: int) -> int:
    length = self.importance.shape[-1]
    if not 1 <= position <= length:
      raise ValueError(f'position {position} is outside 1..{length}; positions are 1-based.')
    return position - 1


def as_text(summary: Mapping[str, Any], protocol: Mapping[str, Any], epsilon: float) -> str:
  """The lines of a summary for a terminal; the arguments are as in sink_report.json."""
  step = '' if protocol.get('step') is None else f', step {protocol["step"]}'
  dtype = f', {protocol["dtype"]}' if 'dtype' in protocol else ''
  lines = [f'{protocol.get("run") or "model"}{step}: {protocol["sequences"]} sequences of '
           f'{protocol["length"]} tokens{dtype}',
           *text_table(('metric', 'value', 'meaning'), table_rows(summary, protocol, epsilon), left=(0, 2))]
  if protocol['scores'] != _EXACT:
    lines.append('* of proxy scores: the rows of this attention do not sum to one')
  note = limit_note(protocol.get('first_token_limits', ()), protocol['length'], epsilon)
  return '\n'.join([*lines, note] if note else lines)


def table_rows(summary: Mapping[str, Any], protocol: Mapping[str, Any],
               epsilon: float) -> list[tuple[str, str, str]]:
  """Name, value and meaning of each number of a summary that is shown."""
  star = '' if protocol['scores'] == _EXACT else '*'
  size = lambda x: f'{x:.2f}' if x < 100 else f'{x:,.0f}'
  rows = [('Sink_1', f'{summary["sink_1"]:.1f} %{star}',
           f'of heads give the first token more than {epsilon:g}')]
  if summary['sink_bias_slot'] is not None:  # takes the sink of the first token over (Table 4)
    rows.append(('Sink_*', f'{summary["sink_bias_slot"]:.1f} %', 'the extra key; as sail-sg/Attention-Sink '
                 f'counts: {summary["sink_bias_slot_released"]:.1f} %'))
  rows += [(f'{which} importance', f'{summary[f"{which}_importance"]:.3f}{star}',
            'of the first token, over heads') for which in ('largest', 'mean')]
  rows.append(('raw mass', f'{summary["raw_mass_1"]:.3f}',
               f'on the first token, of {summary["raw_row_mass"]:.3f} in a row'))
  known = lambda ratios, blocks: [pair for pair in zip(ratios, blocks) if pair[0] is not None]
  if pairs := known(summary.get('value_ratio', ()), protocol.get('blocks', ())):
    rows.append(('value norm ratio', size(min(pairs)[0]),
                 f'first token to the others, smallest in block {min(pairs)[1]}'))
  hidden = summary.get('hidden_ratio', ())
  if pairs := known(hidden[1:], range(1, len(hidden))):
    rows.append(('hidden norm ratio', size(max(pairs)[0]),
                 f'first token to the others, largest in block {max(pairs)[1]}'))
  # The activation that exceeds the median of its block most; the first entry is the embedding.
  peaks = zip(*(summary.get(f'activation_{key}', ()) for key in ('max', 'median', 'position', 'channel')))
  if times := [(peak[0] / peak[1], block, *peak) for block, peak in enumerate(peaks) if peak[0] and peak[1]]:
    ratio, block, largest, _, token, channel = max(times)
    rule = '' if ratio > BEYOND[0] else f' (massive: above {BEYOND[0]})'
    rows.append(('largest activation', size(largest), f'{ratio:,.0f} times the median{rule}: channel '
                 f'{channel:g} of token {token:g}, {f"block {block}" if block else "the embedding"}'))
  return rows


def limit_note(limits: Sequence[float], length: int, epsilon: float) -> str:
  """A line about the blocks whose mask, by `first_token_limits`, allows no sink; '' without one."""
  below = [limit for limit in limits if limit <= epsilon]
  if not below:
    return ''
  where = 'every block' if len(below) == len(limits) else f'{len(below)} of {len(limits)} blocks'
  return (f'Sink_1 is 0 by construction in {where}: at most {100 * max(below):.0f} % of {length} queries see '
          f'the first token there, and a sink needs more than {epsilon:g}; take shorter sequences')
