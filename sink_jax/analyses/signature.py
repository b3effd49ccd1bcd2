"""The signature of sinks: where they are and what goes with them, each number next to its nulls."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure
from scipy.special import entr
from scipy.stats import mode, norm

from sink_jax.analyses.models import Model
from sink_jax.analyses.runner import SOURCE_TEXT, analysis
from sink_jax.evaluate import EPSILON, sinks
from sink_jax.evaluate.activations import BEYOND, describe
from sink_jax.evaluate.intervals import t_interval
from sink_jax.evaluate.sink_report import DORMANT, SinkReport, mean_of_text
from sink_jax.foreign import Texts, TokenMask, check_entries, texts_in
from sink_jax.models.record import RecordOptions
from sink_jax.models.run import Run
from sink_jax.models.sizes import parameter_count
from sink_jax.models.transformer import init_params
from sink_jax.pictures.maps import grid
from sink_jax.pictures.style import Row

# importance (S, N, H, T); norms of value and key (S, N, T), hidden (S, M, T), head (S, N, H);
# entropy (S, N, H); activation, kurtosis, token, channel and normal (S, M).
Arrays = dict[str, np.ndarray]
UNTRAINED = 300_000_000  # parameters, up to which an untrained model is measured
_STATISTICS: dict[str, Callable[[np.ndarray], Any]] = {
  'mean': np.mean,
  'max': np.max,
  'min': np.min,
  'above': lambda x: (x > EPSILON).mean(),
  'below': lambda x: (x < DORMANT).mean(),
}
# {measure: (array, statistic over blocks and heads, sign, least effect that counts)}; None: one
# head, or that nothing counts. 0.3 is the paper's, 100 medians Sun et al.'s (arXiv:2402.17762);
# half of 0.3, a factor of 2, and ten times the kurtosis of a normal distribution are conventions.
MEASURES = {
  'sink rate': ('rate', 'mean', 1, None),
  'sink heads': ('alpha', 'above', 1, None),
  'largest importance': ('alpha', 'max', 1, EPSILON),
  'mean importance': ('alpha', 'mean', 1, EPSILON / 2),
  'value norm ratio': ('value', 'min', -1, 1 / 2),
  'key norm ratio': ('key', 'min', -1, 1 / 2),
  'hidden norm ratio': ('hidden', 'max', 1, 2),
  'least entropy': ('entropy', 'min', -1, None),
  'mean entropy': ('entropy', 'mean', -1, None),
  'massive activation': ('activation', 'max', 1, BEYOND[0]),
  'kurtosis': ('kurtosis', 'max', 1, 30),
  'dormant heads': ('head', 'below', 1, None),
  'least head norm': ('head', 'min', -1, DORMANT),
}
_OF_POSITION = ('rate', 'alpha', 'value', 'key', 'hidden')
_OF_HIDDEN = ('hidden', 'activation', 'kurtosis')
_SHARES = ('rate', 'alpha')  # which end at 1; all measures end at 0
_WITHOUT_NULL = ('entropy',)
# The axes of the arrays of `from_arrays`; one with the same name is equally long in all arrays.
_AXES = {
  'importance': 'S N H T',
  'attentions': 'S N H T',
  'entropy': 'S N H',
  'hidden': 'S M T D',
  'values': 'S N Hkv T Dv',
  'keys': 'S N Hkv T Dh',
  'heads': 'S N H T Dv',
}
_WORDS = {
  'S': 'sequences',
  'N': 'layers',
  'H': 'heads',
  'T': 'tokens',
  'Hkv': 'key/value heads',
  'Dv': 'channels',
}
_describe_each = jax.vmap(lambda hidden_TxD: describe(hidden_TxD[None]))


def _draw(rows: list[Row]) -> Figure:
  shown = []
  for row in rows:
    if row['measure'] == 'importance':
      panel = row.get(SOURCE_TEXT, row['model'])
      shown.append(row | {'model': panel, 'importance': row['value'], 'epsilon': EPSILON})
  return grid(shown, 'importance')


@analysis('signature', _draw, sequences=32, length=64)
def signature(model: Model) -> list[Row]:
  """Where the sinks are, and what goes with them, each number next to its nulls.

  Rows of a measure, of every further position of the first half that is a sink, and of the first
  token's importance by head. low, high: 99 % bounds of value, a t interval over sequences; for a
  share of heads, the share by the bounds of each head. uniform: the measure in closed form without
  an effect: uniform attention, equal norms, normally distributed states. random_positions: the 99th
  percentile of the measure at random positions. untrained: the measure with fresh parameters.
  beyond: whether the interval exceeds these three nulls and the least effect that counts; None for
  an entropy, since random attention with peaks has a low one too, so that uniform attention is not
  a null of it. shuffled: the measure on shuffled tokens, a control: a sink that belongs to the
  position remains.
  """
  inputs, run = model.inputs(), model.run
  tokens_SxT, tokenizer = inputs.tokens, inputs.tokenizer
  others = {
    'shuffled': _measured(model, run, np.random.default_rng(0).permuted(tokens_SxT, axis=1))
  }
  if parameter_count(run.config) <= UNTRAINED:
    fresh = dataclasses.replace(run, params=init_params(run.config, 0))
    others['untrained'] = _measured(model, fresh, tokens_SxT)
  found = _measured(model, run, tokens_SxT)
  rows = _rows(found, others, model.blocks)
  for row in rows:  # the token there, if most of the sequences in which it is a sink share it
    if tokenizer is not None and row['position']:
      at = row['position'] - 1
      ids = tokens_SxT[(found['importance'][..., at] > EPSILON).any((1, 2)), at]
      if len(ids) and 2 * (ids == mode(ids).mode).sum() > len(ids):
        row['text'] = tokenizer.decode([mode(ids).mode])
  return rows


def from_arrays(
  *,
  importance: Any = None,
  attentions: Any = None,
  hidden: Any = None,
  values: Any = None,
  keys: Any = None,
  heads: Any = None,
  entropy: Any = None,
  mask: TokenMask | None = None,
  name: str = '',
) -> list[Row]:
  """The rows of `signature` from the arrays of any model; it omits rows of missing arrays.

  Arrays may be those of NumPy, JAX or PyTorch. Nulls that need the model are None. Every text of a
  padded batch counts by itself, and a null in closed form is a mean over texts. Padding on the
  right cannot be recognised: without `mask` it counts as text.

  Args:
    importance: alpha (S, N, H, T), or attentions: the maps (S, H, T, T) of each of N layers. For a
      padded batch alpha is what `sink_jax.importance` returns.
    hidden: hidden states (S, M, T, D) after each block, without the embedding.
    values, keys, heads: (S, N, H, T, Dh); heads are outputs before W_O.
    entropy: of rows, divided by that of uniform attention (S, N, H); computed from attentions if
      given.
    mask: (S, T), 1 for tokens and 0 for padding on their left or right: the attention_mask.

  Raises:
    ValueError: a shape does not fit, also to that of another array, a number is not finite, or an
      importance or a map is not one.
  """
  arrays = dict(
    importance=importance, entropy=entropy, hidden=hidden, values=values, keys=keys, heads=heads
  )
  given = {
    key: np.asarray(sinks.real_array(x, key), np.float32)
    for key, x in arrays.items()
    if x is not None
  }
  layers = [] if attentions is None else sinks.maps_of_layers(attentions)
  sizes = _sizes(given, layers)
  texts = texts_in(mask, sizes['S'], sizes.get('T'), least=2)
  found = {}
  if 'entropy' in given:
    found['entropy'] = given['entropy']
    check_entries('entropy', np.isfinite(given['entropy']), given['entropy'], 'it must be finite')
  if layers:
    report = SinkReport.from_attentions(layers, mask=mask)
    found |= {'importance': report.importance, 'entropy': _entropy(layers, texts)}
  elif 'importance' in given:
    found['importance'] = sinks.checked_importance(given['importance'])
    if texts is None and np.isnan(found['importance']).any():
      raise ValueError('importance is that of a padded batch, by its NaN: give mask= as well.')
  found |= _of_vectors(given, texts)
  blocks = range(1, 1 + max(x.shape[1] for x in found.values()))
  return [{'model': name or 'model'} | row for row in _rows(found, {}, blocks)]


def _sizes(given: Arrays, layers: Sequence[Any]) -> dict[str, int]:
  """The size of each axis by its letter; a ValueError if arrays have different ones."""
  shapes: dict[str, tuple[int, ...]] = {}
  if layers:
    sequences, heads, length, _ = layers[0].shape
    shapes['attentions'] = sequences, len(layers), heads, length
  shapes |= {key: x.shape for key, x in given.items()}
  if not shapes:
    raise ValueError('give importance, attentions, hidden, values, keys or heads.')
  sizes: dict[str, tuple[int, str]] = {}
  for key, shape in shapes.items():
    axes = _AXES[key].split()
    if len(shape) != len(axes):
      raise ValueError(f'{key} must have the axes ({", ".join(axes)}), not shape {shape}.')
    for axis, size in zip(axes, shape):
      expected, other = sizes.setdefault(axis, (size, key))
      if size != expected:
        raise ValueError(
          f'{key} has {size} {_WORDS[axis]} (axis {axis} of {_AXES[key]}), and '
          f'{other} has {expected}: give arrays of the same batch.'
        )
  return {axis: size for axis, (size, _) in sizes.items()}


def _of_vectors(given: Arrays, texts: Texts | None) -> Arrays:
  """Norms of hidden states, values, keys and outputs of heads, and activations, where given."""
  norms = {
    key: _norms(key, given[key], texts)
    for key in ('hidden', 'values', 'keys', 'heads')
    if key in given
  }
  found: Arrays = {}
  if 'hidden' in norms:
    found = {'hidden': norms['hidden']} | _activations_of_texts(given['hidden'], texts)
  found |= {key: norms[f'{key}s'].mean(2) for key in ('value', 'key') if f'{key}s' in norms}
  if 'heads' in norms:
    found['head'] = mean_of_text(norms['heads'])
  return found


def _norms(name: str, x: np.ndarray, texts: Texts | None) -> np.ndarray:
  """The l2 norms (S, ..., T) of vectors (S, ..., T, D); of texts NaN beyond their ends."""
  norms = np.linalg.norm(x, axis=-1)
  if texts is not None:
    norms = texts.filled(texts.aligned(norms, -1), -1, 0)  # padding may hold anything
  check_entries(f'norm of {name}', np.isfinite(norms), norms, 'it must be finite')
  return norms if texts is None else texts.filled(norms, -1, np.nan)


def _entropy(layers: Sequence[Any], texts: Texts | None) -> np.ndarray:
  """The entropy (S, N, H) of maps of N layers, divided by that of uniform attention."""
  sequences, _, length, _ = layers[0].shape
  length_S = np.full(sequences, length) if texts is None else np.asarray(texts.length_S)
  uniform_S = np.asarray([np.log(np.arange(1, n + 1)).sum() for n in length_S])
  sums = []
  for maps_SxHxTxT in layers:
    maps_SxHxTxT = np.asarray(maps_SxHxTxT, np.float64)
    if texts is not None:
      maps_SxHxTxT = texts.filled(texts.aligned(maps_SxHxTxT, -2, -1), -2, 0)
    sums.append(entr(maps_SxHxTxT).sum((-2, -1)))
  return np.stack(sums, 1) / uniform_S[:, None, None]


def _activations_of_texts(hidden_SxMxTxD: np.ndarray, texts: Texts | None) -> Arrays:
  """`_activations` of hidden states, of the texts of one length at a time."""
  sequences, _, length, width = hidden_SxMxTxD.shape
  length_S = np.full(sequences, length)
  if texts is not None:
    length_S, hidden_SxMxTxD = np.asarray(texts.length_S), texts.aligned(hidden_SxMxTxD, 2)
  found: Arrays = {}
  for n in np.unique(length_S):
    of_length = np.flatnonzero(length_S == n)
    described = jax.vmap(_describe_each)(hidden_SxMxTxD[of_length, :, :n])
    for key, x_SxM in _activations(described, n * width).items():
      found.setdefault(key, np.empty(hidden_SxMxTxD.shape[:2], x_SxM.dtype))[of_length] = x_SxM
  return found


def _measured(model: Model, run: Run, tokens_SxT: np.ndarray) -> Arrays:
  """The arrays of a model on tokens, in the precision of `evaluate.probe`."""
  run = dataclasses.replace(run, config=model.config)
  parts, size = [], tokens_SxT.shape[1] * run.config.d_model
  for batch in model.batches(tokens_SxT):
    layers = jax.tree.map(
      lambda x: np.moveaxis(np.asarray(x), 1, 0),
      run.record(  # sequences first
        batch, RecordOptions(entropy=True, hidden=_describe_each)
      ).layers,
    )
    parts.append(
      _activations(layers.hidden, size)
      | {
        'importance': layers.importance.normalized,
        'entropy': layers.importance.entropy,
        'value': layers.value_norm_BxHxT.mean(2),
        'key': layers.key_norm_BxHxT.mean(2),
        'head': layers.head_norm_BxHxT.mean(-1),
        'hidden': layers.hidden_norm_BxT,
      }
    )
  return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


def _activations(found: Any, size: int) -> Arrays:
  """Statistics (S, M) of hidden states of `size` numbers; normal: the activation of normal ones."""
  ratio = np.asarray(found.activation_max) / np.maximum(found.activation_median, 1e-30)
  return {
    'activation': ratio,
    'kurtosis': np.asarray(found.kurtosis_moment),
    'token': np.asarray(found.activation_position),
    'channel': np.asarray(found.activation_channel),
    'normal': np.full_like(ratio, norm.isf(0.5 / size) / norm.ppf(0.75)),
  }


def _values(found: Arrays, at_S: np.ndarray) -> Arrays:
  """The arrays that measures reduce, by sequence, block and any head, at positions (S,) from 0."""
  s, result = (
    np.arange(len(at_S)),
    {key: found[key] for key in ('entropy', 'activation', 'kurtosis') if key in found},
  )
  if 'importance' in found:
    result['alpha'] = found['importance'][s, :, :, at_S]
    result['rate'] = result['alpha'] > EPSILON
  for key in [key for key in ('value', 'key', 'hidden') if key in found]:
    others = np.nansum(found[key], -1) - found[key][s, :, at_S]
    others /= sinks.text_lengths(found[key])[:, None] - 1
    result[key] = found[key][s, :, at_S] / np.maximum(others, 1e-30)
  if 'head' in found:
    result['head'] = found['head'] / np.maximum(found['head'].mean(2, keepdims=True), 1e-30)
  return result


def _uniform_importance(length: int, at: int) -> float:
  """The importance of a key (from 0) if every query gives equal weights to all keys up to it."""
  return (1 / np.arange(at + 1, length + 1)).sum() / (length - at)


@dataclasses.dataclass(frozen=True)
class _Measured:
  """The arrays of a model and of the `others` of which its nulls are, and how measures read them.

  blocks: numbers, from 1, of the blocks with attention. length_S: of texts. draws: what measures
  reduce at random positions, means over sequences.
  """

  found: Arrays
  others: dict[str, Arrays]
  blocks: Sequence[int]
  length_S: np.ndarray
  draws: list[Arrays]

  def row(self, measure: str, at: int) -> Row:
    """A measure at a position, from 0, with its bounds and nulls."""
    key, statistic, sign, least = MEASURES[measure]
    reduce = _STATISTICS[statistic]
    x = _values(self.found, np.full(len(self.length_S), at))[key].astype(np.float64)
    least = 1 / x[0].size if least is None else least
    x_SxC = x.reshape(len(x), -1)
    if statistic == 'mean':
      x_SxC = x_SxC.mean(1, keepdims=True)
    mean_C, most = x_SxC.mean(0), 1 if key in _SHARES else math.inf
    bounds = np.stack(t_interval(x_SxC, least=0, most=most))
    where: Row = dict.fromkeys(('block', 'head', 'position', 'text', 'channel'))
    if statistic in ('max', 'min'):
      chosen = int((sign * mean_C).argmax())
      bounds = bounds[:, [chosen]]
      where |= self._place(key, np.unravel_index(chosen, x.shape[1:]))
    if key in _OF_POSITION:
      where['position'] = at + 1
    low, high = sorted(float(reduce(bound)) for bound in bounds)
    nulls = self._nulls(measure, at)
    beyond = None if key in _WITHOUT_NULL else _beyond(sign, low, high, least, nulls)
    return {
      'measure': measure,
      'value': float(reduce(mean_C)),
      'low': low,
      'high': high,
      **nulls,
      'beyond': beyond,
      **where,
    }

  def _place(self, key: str, index: Sequence[Any]) -> Row:
    """Block and head, if any; of an activation also the commonest position and channel."""
    n, *head = map(int, index)
    place: Row = {
      'block': n + 1 if key in _OF_HIDDEN else self.blocks[n],
      'head': head[0] + 1 if head else None,
    }
    if key == 'activation':
      place['position'] = int(mode(self.found['token'][:, n]).mode)
      place['channel'] = int(mode(self.found['channel'][:, n]).mode)
    return place

  def _nulls(self, measure: str, at: int) -> Row:
    """The measure without an effect, at random positions, and of the others."""
    key, statistic, sign, _ = MEASURES[measure]
    reduce, at_S = _STATISTICS[statistic], np.full(len(self.length_S), at)
    masses = [_uniform_importance(length, at) for length in self.length_S]
    closed = {'alpha': np.mean(masses), 'rate': np.greater(masses, EPSILON).mean(), 'kurtosis': 3}
    if key == 'activation':
      closed[key] = self.found['normal'].mean(dtype=np.float64)
    nulls: Row = dict.fromkeys(('random_positions', 'shuffled', 'untrained'))
    nulls['uniform'] = float(reduce(np.asarray([closed.get(key, 1)])))
    for name, arrays in self.others.items():
      nulls[name] = float(reduce(_values(arrays, at_S)[key].mean(0)))
    if key in _OF_POSITION:
      drawn = [reduce(draw[key]) for draw in self.draws]
      nulls['random_positions'] = float(np.percentile(drawn, 50 + 49 * sign))
    return nulls


def _beyond(sign: int, low: float, high: float, least: float, nulls: Row) -> bool:
  """Whether an interval exceeds the nulls and the least effect; sign -1: whether it is below."""
  bound = low if sign > 0 else -high
  beaten = [sign * null for name, null in nulls.items() if name != 'shuffled' and null is not None]
  return bound > max(beaten) and bound >= sign * least - 1e-9


def _rows(found: Arrays, others: dict[str, Arrays], blocks: Sequence[int]) -> list[Row]:
  sequences = len(next(iter(found.values())))
  of_tokens = [found[key] for key in ('importance', 'hidden', 'value', 'key') if key in found]
  length_S = sinks.text_lengths(of_tokens[0]) if of_tokens else np.full(sequences, 2)
  draws = [
    {key: x.mean(0) for key, x in _values(found, at_S).items()}
    for at_S in sinks.random_targets(length_S)
  ]
  measured = _Measured(found, others, blocks, length_S, draws)
  rows = [measured.row(name, 0) for name, (key, *_) in MEASURES.items() if key in draws[0]]
  if 'importance' not in found:
    return rows
  alpha_SxNxHxT = found['importance']
  sinks_T = (alpha_SxNxHxT > EPSILON).sum((0, 1, 2))  # must be at least one head, the least effect
  further = [k for k in range(1, length_S.min() // 2) if sinks_T[k] >= sequences]
  rows += [measured.row('sink rate', k) for k in further]
  uniform = float(np.mean([_uniform_importance(length, 0) for length in length_S]))
  return rows + _head_rows(alpha_SxNxHxT[..., 0], uniform, blocks)


def _head_rows(alpha_SxNxH: np.ndarray, uniform: float, blocks: Sequence[int]) -> list[Row]:
  """The first token's importance by head."""
  mean_NxH, (low_NxH, high_NxH) = alpha_SxNxH.mean(0), t_interval(alpha_SxNxH, least=0, most=1)
  return [
    {
      'measure': 'importance',
      'value': float(mean_NxH[n, h]),
      'low': float(low_NxH[n, h]),
      'high': float(high_NxH[n, h]),
      'uniform': uniform,
      'block': blocks[n],
      'head': h + 1,
      'position': 1,
      'text': None,
    }
    for n, h in np.ndindex(*mean_NxH.shape)
  ]
