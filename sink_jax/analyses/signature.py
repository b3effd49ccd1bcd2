"""The signature of sinks: where they are, and what goes with them, each number next to its nulls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure
from scipy.special import entr
from scipy.stats import mode, norm

from sink_jax.analyses.models import Model
from sink_jax.analyses.pictures import Row, grids
from sink_jax.analyses.runner import analysis
from sink_jax.evaluate import EPSILON, sinks
from sink_jax.evaluate.activations import BEYOND, describe
from sink_jax.evaluate.bootstrap import bootstrap
from sink_jax.evaluate.probe import probed
from sink_jax.evaluate.sink_report import DORMANT, SinkReport
from sink_jax.models.record import RecordOptions
from sink_jax.models.run import Run
from sink_jax.models.sizes import parameter_count
from sink_jax.models.transformer import init_params

# importance (S, N, H, T); norms of value and key (S, N, T), hidden (S, M, T), head (S, N, H); entropy
# (S, N, H); activation, kurtosis, token, channel and normal (S, M).
Arrays = dict[str, np.ndarray]
UNTRAINED = 300_000_000  # parameters, up to which an untrained model is measured
_STATISTICS: dict[str, Callable[[np.ndarray], Any]] = {
    'mean': np.mean, 'max': np.max, 'min': np.min, 'above': lambda x: (x > EPSILON).mean(),
    'below': lambda x: (x < DORMANT).mean()}
# {measure: (array, statistic over blocks and heads, sign, least effect that counts)}; None: one head. 0.3 is
# the paper's, 100 medians Sun et al.'s (arXiv:2402.17762); half of 0.3, a factor of 2, and ten times the
# kurtosis of a normal distribution are conventions.
MEASURES = {
    'sink rate': ('rate', 'mean', 1, None), 'sink heads': ('alpha', 'above', 1, None),
    'largest importance': ('alpha', 'max', 1, EPSILON), 'mean importance': ('alpha', 'mean', 1, EPSILON / 2),
    'value norm ratio': ('value', 'min', -1, 1 / 2), 'key norm ratio': ('key', 'min', -1, 1 / 2),
    'hidden norm ratio': ('hidden', 'max', 1, 2), 'least entropy': ('entropy', 'min', -1, 1 / 2),
    'mean entropy': ('entropy', 'mean', -1, 1 / 2), 'massive activation': ('activation', 'max', 1, BEYOND[0]),
    'kurtosis': ('kurtosis', 'max', 1, 30), 'dormant heads': ('head', 'below', 1, None),
    'least head norm': ('head', 'min', -1, DORMANT)}
_OF_POSITION = ('rate', 'alpha', 'value', 'key', 'hidden')
_OF_HIDDEN = ('hidden', 'activation', 'kurtosis')
_describe_each = jax.vmap(lambda hidden_TxD: describe(hidden_TxD[None]))


def _draw(rows: list[Row]) -> Figure:
  return grids([row | {'importance': row['value'], 'epsilon': EPSILON} for row in rows
                if row['measure'] == 'importance'], 'importance')


@analysis('signature', _draw, sequences=32, length=64)
def signature(model: Model) -> list[Row]:
  """Where the sinks are, and what goes with them, each number next to its nulls.

  Rows of a measure, of every further position of the first half that is a sink, and of the first token's
  importance by head. low, high: 99 % bounds of value, by a bootstrap over sequences; for a share of heads,
  the share by the bounds of each head. uniform: the measure in closed form without an effect: uniform
  attention, equal norms, normally distributed states. random_positions: the 99th percentile of the measure at
  random positions. untrained: the measure with fresh parameters. beyond: whether the interval exceeds these
  three nulls and the least effect that counts. shuffled: the measure on shuffled tokens, a control: a sink
  that belongs to the position remains.
  """
  inputs, run = model.inputs(), model.run
  tokens_SxT, tokenizer = inputs.tokens, inputs.tokenizer
  others = {'shuffled': _measured(model, run, np.random.default_rng(0).permuted(tokens_SxT, axis=1))}
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


def from_arrays(*, importance: Any = None, attentions: Sequence | None = None, hidden: Any = None,
                values: Any = None, keys: Any = None, heads: Any = None, entropy: Any = None,
                name: str = '') -> list[Row]:
  """The rows of `signature` from the arrays of any model, NumPy or PyTorch; it omits rows of missing arrays.

  Nulls that need the model are None.

  Args:
    importance: alpha (S, N, H, T), or attentions: the maps (S, H, T, T) of each of N layers.
    hidden: hidden states (S, M, T, D) after each block, without the embedding.
    values, keys, heads: (S, N, H, T, Dh); heads are outputs before W_O.
    entropy: of rows, divided by that of uniform attention (S, N, H); computed from attentions if given.

  Raises:
    ValueError: a shape does not fit, or a number is not finite.
  """
  given = {key: np.asarray(sinks.without_tensors(x), np.float32) for key, x in dict(
      importance=importance, entropy=entropy, hidden=hidden, value=values, key=keys, head=heads).items()
      if x is not None}
  if attentions is not None:
    given['importance'] = SinkReport.from_attentions(attentions).importance
    maps_SxNxHxTxT = np.stack([sinks.without_tensors(x) for x in attentions], 1)
    uniform = np.log(np.arange(1, maps_SxNxHxTxT.shape[-1] + 1)).sum()
    given['entropy'] = entr(maps_SxNxHxTxT).sum((-2, -1)) / uniform
  for key, axes in (('importance', 4), ('entropy', 3), ('hidden', 4), ('value', 5), ('key', 5), ('head', 5)):
    if key in given and (given[key].ndim != axes or not np.isfinite(given[key]).all()):
      raise ValueError(f'{key} must be finite, with {axes} axes, not of shape {given[key].shape}.')
  if 'hidden' in given:
    given |= _activations(jax.vmap(_describe_each)(given['hidden']), given['hidden'][0, 0].size)
  for key, mean in (('value', 2), ('key', 2), ('head', 3), ('hidden', ())):
    if key in given:
      given[key] = np.linalg.norm(given[key], axis=-1).mean(mean)
  if not given:
    raise ValueError('give importance, attentions, hidden, values, keys or heads.')
  blocks = range(1, 1 + max(x.shape[1] for x in given.values()))
  return [{'model': name or 'model'} | row for row in _rows(given, {}, blocks)]


def _measured(model: Model, run: Run, tokens_SxT: np.ndarray) -> Arrays:
  """The arrays of a model on tokens, in the precision of `evaluate.probe`."""
  run = dataclasses.replace(run, config=probed(run.config, model.options.dtype))
  parts, size = [], tokens_SxT.shape[1] * run.config.d_model
  for batch in model.batches(tokens_SxT):
    layers = jax.tree.map(lambda x: np.moveaxis(np.asarray(x), 1, 0), run.record(  # sequences first
        batch, RecordOptions(entropy=True, describe_hidden=_describe_each)).layers)
    parts.append(_activations(layers.hidden_description, size) | {
        'importance': layers.importance.normalized, 'entropy': layers.importance.entropy,
        'value': layers.value_norm_BxHxT.mean(2), 'key': layers.key_norm_BxHxT.mean(2),
        'head': layers.head_norm_BxHxT.mean(-1), 'hidden': layers.hidden_norm_BxT})
  return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


def _activations(found: Any, size: int) -> Arrays:
  """Statistics (S, M) of hidden states of `size` numbers; normal: the activation of normal numbers."""
  ratio = np.asarray(found.activation_max) / np.maximum(found.activation_median, 1e-30)
  return {'activation': ratio, 'kurtosis': np.asarray(found.kurtosis_moment),
          'token': np.asarray(found.activation_position), 'channel': np.asarray(found.activation_channel),
          'normal': np.full_like(ratio, norm.isf(0.5 / size) / norm.ppf(0.75))}


def _values(found: Arrays, at_S: np.ndarray) -> Arrays:
  """The arrays that measures reduce, by sequence, block and head if any, at a position (from 0) of each."""
  s, result = np.arange(len(at_S)), {key: found[key] for key in ('entropy', 'activation', 'kurtosis')
                                     if key in found}
  if 'importance' in found:
    result['alpha'] = found['importance'][s, :, :, at_S]
    result['rate'] = result['alpha'] > EPSILON
  for key in [key for key in ('value', 'key', 'hidden') if key in found]:
    others = (found[key].sum(-1) - found[key][s, :, at_S]) / (found[key].shape[-1] - 1)
    result[key] = found[key][s, :, at_S] / np.maximum(others, 1e-30)
  if 'head' in found:
    result['head'] = found['head'] / np.maximum(found['head'].mean(2, keepdims=True), 1e-30)
  return result


def _rows(found: Arrays, others: dict[str, Arrays], blocks: Sequence[int]) -> list[Row]:
  sequences = len(next(iter(found.values())))
  length = next((found[key].shape[-1] for key in ('importance', 'hidden', 'value', 'key') if key in found), 2)
  draws = [{key: x.mean(0) for key, x in _values(found, at_S).items()}
           for at_S in sinks.random_targets(sequences, length)]

  def row(measure: str, at: int) -> Row:
    key, statistic, sign, least = MEASURES[measure]
    at_S, reduce = np.full(sequences, at), _STATISTICS[statistic]
    x = _values(found, at_S)[key].astype(np.float64)
    least = 1 / x[0].size if least is None else least
    x_SxC = x.reshape(sequences, -1)
    if statistic == 'mean':
      x_SxC = x_SxC.mean(1, keepdims=True)
    mean_C, bounds = x_SxC.mean(0), np.stack(bootstrap(x_SxC))
    where: Row = dict.fromkeys(('block', 'head', 'position', 'text', 'channel'))
    if statistic in ('max', 'min'):
      bounds = bounds[:, [chosen := int((sign * mean_C).argmax())]]
      n, *head = map(int, np.unravel_index(chosen, x.shape[1:]))
      where |= {'block': n + 1 if key in _OF_HIDDEN else blocks[n], 'head': head[0] + 1 if head else None}
      if key == 'activation':
        where |= {'position': int(mode(found['token'][:, n]).mode), 'channel': int(mode(found['channel'][:, n]).mode)}
    low, high = sorted(float(reduce(bound)) for bound in bounds)
    mass = (1 / np.arange(at + 1, length + 1)).sum() / (length - at)  # of uniform attention
    none = {'alpha': mass, 'rate': mass > EPSILON, 'kurtosis': 3} | (
        {'activation': found['normal'][0, 0]} if key == 'activation' else {})
    nulls: Row = dict.fromkeys(('random_positions', 'shuffled', 'untrained'))
    nulls['uniform'] = float(reduce(np.asarray([none.get(key, 1)])))
    nulls |= {name: float(reduce(_values(x, at_S)[key].mean(0))) for name, x in others.items()}
    if key in _OF_POSITION:
      where['position'] = at + 1
      nulls['random_positions'] = float(np.percentile([reduce(draw[key]) for draw in draws], 50 + 49 * sign))
    bound = low if sign > 0 else -high
    beaten = [sign * null for name, null in nulls.items() if name != 'shuffled' and null is not None]
    return {'measure': measure, 'value': float(reduce(mean_C)), 'low': low, 'high': high, **nulls,
            'beyond': bound > max(beaten) and bound >= sign * least - 1e-9, **where}

  rows = [row(measure, 0) for measure, (key, *_) in MEASURES.items() if key in draws[0]]
  if 'importance' not in found:
    return rows
  alpha_SxNxHxT = found['importance']
  sinks_T = (alpha_SxNxHxT > EPSILON).sum((0, 1, 2))  # must be at least one head, the least effect
  rows += [row('sink rate', k) for k in range(1, length // 2) if sinks_T[k] >= sequences]
  uniform = float((1 / np.arange(1, length + 1)).mean())
  means_NxH, (low_NxH, high_NxH) = alpha_SxNxHxT[..., 0].mean(0), bootstrap(alpha_SxNxHxT[..., 0])
  return rows + [{'measure': 'importance', 'value': float(means_NxH[n, h]), 'low': float(low_NxH[n, h]),
                  'high': float(high_NxH[n, h]), 'uniform': uniform, 'block': blocks[n], 'head': h + 1,
                  'position': 1, 'text': None} for n, h in np.ndindex(*means_NxH.shape)]
