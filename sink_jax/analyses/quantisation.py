"""Quantisation: the loss with quantised activations, or keys and values; some tokens are spared."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh
from matplotlib.figure import Figure

from sink_jax.analyses.models import Model
from sink_jax.analyses.pictures import Row, intervals
from sink_jax.analyses.runner import analysis
from sink_jax.attention.spec import TransformedQK
from sink_jax.evaluate.intervals import t_interval
from sink_jax.evaluate.probe import probed
from sink_jax.kernels.shard import mesh_of
from sink_jax.models.arrays import ParamTree
from sink_jax.models.config import ModelConfig
from sink_jax.models.edits import edited_by, next_token_losses
from sink_jax.models.layers import Dense
from sink_jax.models.run import Run

First = Annotated[int, tyro.conf.arg(help='how many of the first tokens keep their values.')]
_CACHE = 'cache'  # keys and values
_DRAWS = 8  # of random tokens


def _draw(rows: list[Row]) -> Figure:
  shown = [
    row | {'spares': f'spares {row["spared"]}', 'of': f'{row["bits"]} bits'}
    for row in rows
    if row['part'] == 'all'
  ]
  return intervals(
    shown, ('of', 'scale', 'spares'), ('model', 'what'), label='change of the loss (nats)', log=0.1
  )


@analysis('quantisation', _draw, sequences=16, length=64)
def quantisation(model: Model, *, first: First = 4) -> list[Row]:
  """Loss with quantised activations, or keys and values: 8 and 4 bits, with some tokens spared.

  Activations are the inputs of the linear layers of attention and of dense feed-forward networks;
  Mamba mixers, experts, weights and (un)embeddings keep their values. The cache has keys as
  attention reads them, and the values. A scale, max|x| / (2^(bits - 1) - 1), serves one sequence
  (per tensor) or one token.

  Spared tokens keep their values and do not count for the scale: none, the `first`, the sinks
  (`SinkReport.sink_positions`), and as many random others, the mean of 8 draws, between `least` and
  `most`. `change` is the loss minus the loss of the float model, in nats, and `recovered` the
  change with none spared minus this one, D_sink of Rahulrayy/attention-sinks-quant where sinks are
  spared; both with 99 % intervals over sequences. `destroyed`: the perplexity is at least tenfold.
  Rows of part 'module' and 'block' quantise only layers of one name, or one block, to 8 bits per
  tensor.
  """
  tokens_SxT = model.inputs().tokens
  if not 0 < first < tokens_SxT.shape[1]:
    raise ValueError(f'--first={first} must be between 1 and {tokens_SxT.shape[1] - 1}.')
  sinks = model.report(tokens_SxT).sink_positions() - 1
  choices = _spared(tokens_SxT.shape, first, sinks)
  named = {
    'none': '',
    f'first {first}': f'1 to {first}',
    'random': f'{choices["random"][0, 0].sum()} others',
    'sinks': ', '.join(str(k + 1) for k in sinks),
  }
  measure = functools.partial(_losses, model, tokens_SxT)
  none_SxT = choices['none'][0]
  base_S = measure(lambda block, layer: False, none_SxT, 8, False)
  rows = []
  for what, bits, scale in itertools.product(
    ('activations', _CACHE), (8, 4), ('per tensor', 'per token')
  ):
    on = lambda block, layer: (layer == _CACHE) == (what == _CACHE)
    case = {'part': 'all', 'what': what, 'bits': bits, 'scale': scale}
    changes = {}
    for name, masks_RxSxT in choices.items():
      losses = [measure(on, mask_SxT, bits, scale == 'per token') for mask_SxT in masks_RxSxT]
      changes[name] = np.stack(losses) - base_S
    for name, change_RxS in changes.items():
      row = case | {'spared': name, 'positions': named[name]}
      change = _change(base_S, change_RxS.mean(0))
      rows.append(row | change | _recovered(name, changes))
  setting = {'what': 'activations', 'bits': 8, 'scale': 'per tensor', 'spared': 'none'}
  kinds = dict.fromkeys(('module', layer) for _, layer in _modules(model.run) if layer != _CACHE)
  for part, value in [*kinds, *(('block', n + 1) for n in range(model.run.config.layers))]:
    on = lambda block, layer: layer != _CACHE and value == {'module': layer, 'block': block}[part]
    changed_S = measure(on, none_SxT, 8, False)
    rows.append({'part': part, part: value} | setting | _change(base_S, changed_S - base_S))
  return rows


def quantised(
  x_BxTx: jax.Array,
  levels: jax.Array | float,
  per_token: jax.Array | bool,
  spared_BxT: jax.Array | np.ndarray,
) -> jax.Array:
  """Values (B, T, ...) rounded to integers of +-`levels`, ties to even; see `quantisation`."""
  x = x_BxTx.astype(jnp.float32)
  spared = jnp.reshape(spared_BxT, (*x.shape[:2], *[1] * (x.ndim - 2)))
  token = jnp.where(spared, 0, jnp.abs(x)).max(tuple(range(2, x.ndim)), keepdims=True)
  largest = jnp.where(per_token, token, token.max(1, keepdims=True))
  scale = jnp.where(largest > 0, largest / levels, 1)
  return jnp.where(spared, x, jnp.round(x / scale) * scale).astype(x_BxTx.dtype)


def _spared(shape: tuple[int, int], first: int, sinks: np.ndarray) -> dict[str, np.ndarray]:
  """{words: masks (R, S, T)} of spared tokens; random ones are neither sinks nor the first."""
  at = np.arange(shape[1])
  others = np.setdiff1d(at[first:], sinks)
  count = min(len(sinks), len(others))
  order = np.random.default_rng(0).permuted(
    np.broadcast_to(others, (_DRAWS, shape[0], len(others))), axis=2
  )
  same = {'none': at < 0, f'first {first}': at < first, 'sinks': np.isin(at, sinks)}
  return {name: np.broadcast_to(mask_T, (1, *shape)) for name, mask_T in same.items()} | {
    'random': (order[..., :count, None] == at).any(2)
  }


def _change(base_S: np.ndarray, change_S: np.ndarray) -> Row:
  (low, high), change = t_interval(change_S), float(change_S.mean())
  return {
    'loss': float(base_S.mean()) + change,
    'change': change,
    'low': float(low),
    'high': float(high),
    'destroyed': change >= math.log(10),
  }


def _recovered(name: str, changes: dict[str, np.ndarray]) -> Row:
  """How much a choice of spared tokens recovers, and the range of its draws if it is random."""
  if name == 'none':
    return {}
  change_RxS = changes[name]
  recovered_S = changes['none'][0] - change_RxS.mean(0)
  low, high = t_interval(recovered_S)
  row = {
    'recovered': float(recovered_S.mean()),
    'recovered_low': float(low),
    'recovered_high': float(high),
  }
  if name != 'random':
    return row
  change_R = change_RxS.mean(1)
  return row | {'least': float(change_R.min()), 'most': float(change_R.max())}


def _modules(run: Run) -> dict[tuple[int, str], tuple[str, ...]]:
  """{(block of the pattern from 1, layer): path below 'blocks'} of what can be quantised."""
  found = {}
  for path in flatten_dict(run.params['blocks']):
    number = int(path[0].removeprefix('layer')) + 1 if len(run.config.pattern) > 1 else 1
    dense = (
      path[-3:-2] == ('attention',) or 'ffn' in path and not run.config.pattern[number - 1].experts
    )
    if path[-1] == 'kernel' and dense:
      found[number, path[-2]] = path[:-1]
    if path[-2:] == ('query', 'kernel'):
      found[number, _CACHE] = path[:-2]
  return found


def _losses(
  model: Model,
  tokens_SxT: np.ndarray,
  on: Callable[[int, str], bool],
  spared_SxT: np.ndarray,
  bits: int,
  per_token: bool,
) -> np.ndarray:
  """Mean losses (S,), nats, float64; `on` says of a block from 1 and a layer if it is quantised."""
  run, config, losses = model.run, probed(model.run.config, model.options.dtype), []
  edits = unflatten_dict(
    {
      (*path, 'quantised'): np.array(
        [on(block, layer) for block in range(number, config.layers + 1, len(config.pattern))]
      )
      for (number, layer), path in _modules(run).items()
    }
  )
  size = model.options.at_a_time(tokens_SxT.shape[1])
  for start in range(0, len(tokens_SxT), size):
    at = slice(start, start + size)
    losses.append(
      _batch_losses(
        config,
        mesh_of(run.params),
        run.params,
        {'blocks': edits},
        tokens_SxT[at],
        spared_SxT[at],
        2.0 ** (bits - 1) - 1,
        per_token,
      )
    )
  return np.concatenate(losses, dtype=np.float64).mean(1)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _batch_losses(
  config: ModelConfig,
  mesh: Mesh | None,
  params: ParamTree,
  edits: ParamTree,
  tokens_BxT: jax.Array,
  spared_BxT: jax.Array,
  levels: jax.Array,
  per_token: jax.Array,
) -> jax.Array:
  """Losses (B, T - 1) with the modules of `edits` quantised; learned sink tokens are not spared."""
  spared_BxT = jnp.pad(spared_BxT, ((0, 0), (config.sink_tokens, 0)))

  def edited(function, args, kwargs, context):
    layer = context.module
    change = lambda x: jnp.where(
      layer.get_variable('edits', 'quantised'), quantised(x, levels, per_token, spared_BxT), x
    )
    if isinstance(layer, Dense) and layer.has_variable('edits', 'quantised'):
      return function(change(args[0]))
    if context.method_name != 'edit_inputs':
      return function(*args, **kwargs)
    (q, k), v, attention = function(*args, **kwargs)
    return TransformedQK(q, change(k)), change(v), attention

  logits_BxTxV = edited_by(edited, config, mesh, params, edits, tokens_BxT)
  return next_token_losses(logits_BxTxV, tokens_BxT)
