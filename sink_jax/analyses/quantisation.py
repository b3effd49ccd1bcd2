"""Quantisation: the loss with quantised activations, or keys and values; some tokens are spared."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh
from matplotlib.figure import Figure

from sink_jax.analyses.cache import TOLERANCE
from sink_jax.analyses.models import Model
from sink_jax.analyses.quantisers import ACTIVATIONS, CACHES, Quantiser
from sink_jax.analyses.runner import analysis
from sink_jax.attention.spec import TransformedQK
from sink_jax.evaluate.intervals import t_interval
from sink_jax.kernels.shard import mesh_of
from sink_jax.models.arrays import ParamTree
from sink_jax.models.config import ModelConfig
from sink_jax.models.edits import edited_by, next_token_losses
from sink_jax.models.layers import Dense
from sink_jax.models.run import Run
from sink_jax.models.sizes import cache_bytes_per_token
from sink_jax.models.transformer import Transformer
from sink_jax.pictures.charts import intervals
from sink_jax.pictures.style import Row
from sink_jax.pretrained.load import names_in_transformers

_CACHE = 'cache'  # keys and values
RUNS, NOISE = 4, 1e-6
_OF_PARTS = 4  # sequences of the rows of modules and blocks, which no sentence quotes
_BLOCK_NAME = re.compile(r'(.*?)\.\d+(?=\.)')  # 'model.layers.3'
# (block from 1, layer) -> the number of a quantiser in its table, from 1; 0 for none.
Chosen = Callable[[int, str], int]


def _draw(rows: list[Row]) -> Figure:
  shown = [
    row | {'spares': f'spares {row["spared"]}'}
    for row in rows
    if row['part'] == 'all' and 'change' in row
  ]
  return intervals(
    shown, ('quantiser', 'spares'), ('model', 'what'), name='change of the loss (nats)', log=0.1
  )


@analysis('quantisation', _draw, sequences=16, length=64)
def quantisation(model: Model) -> list[Row]:
  """Loss with quantised activations, or keys and values, as tools do it, with some tokens spared.

  Activations are the inputs of the linear layers of attention and of dense feed-forward networks;
  Mamba mixers, experts, weights and (un)embeddings keep their values. The cache has keys as
  attention reads them, after RoPE, and the values. The quantisers are those of
  `analyses.quantisers`; one that does not fit the heads of the model is a row with the reason.

  Spared tokens keep their values and do not count for the scale: none, the sinks
  (`SinkReport.sink_positions`), and as many random others. `change` is the loss minus the loss of
  the float model, in nats, and `recovered` the change with none spared minus this one, D_sink of
  Rahulrayy/attention-sinks-quant where sinks are spared; both with 99 % intervals over sequences.

  A rounding error that flips a value grows through the blocks, and differs between devices. So the
  embeddings are multiplied by 1 + 1e-6 times normal noise, the same in the float model. Numbers
  that sentences quote are means over four `runs` (seeds 0 to 3), between `least` and `most`, each
  run with other random tokens; other rows have one run and no range. `verdict`: safe if the
  upper bound is at most 1 % of the loss, unsafe if the lower one is more, else undecided, and
  destroyed if the perplexity is at least tenfold. Rows of part 'module' and
  'block' quantise only layers of one name, or one block, to int8 per tensor, in one run on the
  first 4 sequences; `transformers`: their name there. `baseline`: the loss of the float model.
  A cache takes `bits` a value, and `bytes_per_token` of `bytes_of_16_bits` in all blocks.
  """
  tokens_SxT, config = model.inputs().tokens, model.run.config
  sinks = model.report(tokens_SxT).sink_positions() - 1
  choices = _spared(tokens_SxT.shape, sinks)
  positions = {
    'none': '',
    'sinks': ', '.join(str(k + 1) for k in sinks),
    'random': f'{choices["random"][0, 0].sum()} others',
  }
  measure = functools.partial(_losses, model, tokens_SxT)
  none_SxT = choices['none'][0]
  nothing = lambda block, layer: 0
  base_RxS = np.stack([measure(nothing, none_SxT, run) for run in range(RUNS)])
  rows = []
  for what, table in (('activations', ACTIVATIONS), (_CACHE, CACHES)):
    for number, quantiser in enumerate(table, 1):
      case = _case(what, quantiser, config)
      if reason := _misfit(quantiser, model.run):
        rows.append(case | {'spared': 'none', 'reason': reason})
        continue
      on = lambda block, layer: number * ((layer == _CACHE) == (what == _CACHE))
      changes: dict[str, np.ndarray] = {}
      for name, masks_RxSxT in choices.items():
        # No sentence has the rows of a cache that spares tokens.
        quoted = quantiser.quoted and (name == 'none' or what != _CACHE)
        runs = RUNS if quoted else 1
        losses = [measure(on, masks_RxSxT[run], run) for run in range(runs)]
        changes[name] = np.stack(losses) - base_RxS[:runs]
        row = case | {'spared': name, 'positions': positions[name], 'runs': runs}
        row |= _change(base_RxS, changes[name])
        if name != 'none':
          row |= _of_runs('recovered', changes['none'][:runs] - changes[name])
        rows.append(row)
  few = slice(_OF_PARTS)
  of_parts = functools.partial(_losses, model, tokens_SxT[few])
  return [*rows, *_parts(model.run, of_parts, none_SxT[few], base_RxS[:1, few])]


def _case(what: str, quantiser: Quantiser, config: ModelConfig) -> Row:
  """The quantiser of a row, and what quantised keys and values of a token take."""
  case = {'part': 'all', 'what': what, 'quantiser': quantiser.name}
  case |= {'tool': quantiser.tool, 'flag': quantiser.flag}
  if what != _CACHE:
    return case
  bits = quantiser.bits_of_value(config.dims.head_dim)
  return case | {
    'bits': bits,
    'bytes_per_token': cache_bytes_per_token(config, bits),
    'bytes_of_16_bits': cache_bytes_per_token(config),
  }


def _parts(
  run: Run,
  measure: Callable[..., np.ndarray],
  none_SxT: np.ndarray,
  base_1xS: np.ndarray,
) -> list[Row]:
  """Rows of each module and of each block."""
  layers = dict.fromkeys(layer for _, layer in _modules(run) if layer != _CACHE)
  blocks = range(1, run.config.layers + 1)
  parts = [('module', name) for name in layers]
  parts += [('block', n) for n in blocks]
  names = _transformers_names(run)
  rows = []
  for part, value in parts:

    def on(block: int, layer: str) -> int:
      asked = block if part == 'block' else layer
      return int(layer != _CACHE and asked == value)

    change_1xS = measure(on, none_SxT, 0)[None] - base_1xS
    case = {
      'part': part,
      part: value,
      'transformers': names.get((part, value)),
      'what': 'activations',
      'quantiser': ACTIVATIONS[0].name,
      'spared': 'none',
      'runs': 1,
    }
    rows.append(case | _change(base_1xS, change_1xS))
  return rows


def _transformers_names(run: Run) -> dict[tuple[str, str | int], str]:
  """{(part, module or block): its name in transformers}, where it has one there.

  Of a module with '*' for the number of the block: 'model.layers.*.self_attn.q_proj'.
  """
  stored = names_in_transformers(run)
  period = len(run.config.pattern)
  found: dict[tuple[str, str | int], str] = {}
  for (number, layer), path in _modules(run).items():
    kernel = '/'.join(('blocks', *path, 'kernel'))
    for block in range(number, run.config.layers + 1, period):
      name = stored.get((kernel, (block - 1) // period), '')
      of_block = _BLOCK_NAME.match(name)
      if of_block:
        found['block', block] = of_block[0]
        found['module', layer] = f'{of_block[1]}.*{name[of_block.end() :]}'
  return found


def _misfit(quantiser: Quantiser, run: Run) -> str:
  """Why a quantiser does not fit the heads of a model; '' if it does."""
  size = run.config.dims.head_dim
  if size % quantiser.block == 0:
    return ''
  return f'heads have {size} channels, and {quantiser.tool} rounds blocks of {quantiser.block}'


def _spared(shape: tuple[int, int], sinks: np.ndarray) -> dict[str, np.ndarray]:
  """{words: masks (RUNS, S, T)} of spared tokens; random ones are not sinks, and differ by run."""
  at = np.arange(shape[1])
  others = np.setdiff1d(at, sinks)
  count = min(len(sinks), len(others))
  same = np.broadcast_to(others, (RUNS, shape[0], len(others)))
  order = np.random.default_rng(0).permuted(same, axis=2)
  everywhere = lambda mask_T: np.broadcast_to(mask_T, (RUNS, *shape))
  return {
    'none': everywhere(at < 0),
    'sinks': everywhere(np.isin(at, sinks)),
    'random': (order[..., :count, None] == at).any(2),
  }


def _change(base_RxS: np.ndarray, change_RxS: np.ndarray) -> Row:
  row = _of_runs('change', change_RxS)
  baseline = float(base_RxS.mean())
  verdict = _verdict(row, TOLERANCE / 100 * baseline)
  return {'baseline': baseline, 'loss': baseline + row['change']} | row | {'verdict': verdict}


def _verdict(row: Row, limit: float) -> str:
  """The verdict on a change; limit: 1 % of the loss. Unless it is safe, noise leaves it open."""
  if row['high'] <= limit:
    return 'safe'
  several = row['least'] is not None
  if several and abs(row['change']) < row['most'] - row['least']:
    return 'undecided'  # within noise
  if row['change'] >= math.log(10):
    return 'destroyed'
  return 'unsafe' if row['low'] > limit else 'undecided'


def _of_runs(name: str, values_RxS: np.ndarray) -> Row:
  """The mean, its bounds over sequences, and its range over runs, which one run does not have."""
  low, high = t_interval(values_RxS.mean(0))
  prefix = '' if name == 'change' else f'{name}_'
  mean_R = values_RxS.mean(1)
  several = len(mean_R) > 1
  return {
    name: float(values_RxS.mean()),
    f'{prefix}low': float(low),
    f'{prefix}high': float(high),
    f'{prefix}least': float(mean_R.min()) if several else None,
    f'{prefix}most': float(mean_R.max()) if several else None,
  }


def _modules(run: Run) -> dict[tuple[int, str], tuple[str, ...]]:
  """{(block of the pattern from 1, layer): path below 'blocks'} of what can be quantised."""
  found = {}
  pattern = run.config.pattern
  for path in flatten_dict(run.params['blocks']):
    number = int(path[0].removeprefix('layer')) + 1 if len(pattern) > 1 else 1
    dense_ffn = 'ffn' in path and not pattern[number - 1].experts
    dense = path[-3:-2] == ('attention',) or dense_ffn
    if path[-1] == 'kernel' and dense:
      found[number, path[-2]] = path[:-1]
    if path[-2:] == ('query', 'kernel'):
      found[number, _CACHE] = path[:-2]
  return found


def _losses(
  model: Model,
  tokens_SxT: np.ndarray,
  chosen: Chosen,
  spared_SxT: np.ndarray,
  seed: int,
) -> np.ndarray:
  """Mean losses (S,), nats, float64; `chosen` says of a block and a layer how it is quantised."""
  run = model.run
  config = model.config
  leaves = {}
  for (number, layer), path in _modules(run).items():
    blocks = range(number, config.layers + 1, len(config.pattern))
    numbers = [chosen(block, layer) for block in blocks]
    leaves[*path, 'quantiser'] = np.array(numbers, np.int32)
  edits = unflatten_dict(leaves)
  losses = []
  size = model.options.at_a_time(tokens_SxT.shape[1])
  for start in range(0, len(tokens_SxT), size):
    at = slice(start, start + size)
    model_and_edits = config, mesh_of(run.params), run.params, {'blocks': edits}
    losses.append(_batch_losses(*model_and_edits, tokens_SxT[at], spared_SxT[at], seed))
  return np.concatenate(losses, dtype=np.float64).mean(1)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _batch_losses(
  config: ModelConfig,
  mesh: Mesh | None,
  params: ParamTree,
  edits: ParamTree,
  tokens_BxT: jax.Array,
  spared_BxT: jax.Array,
  seed: jax.Array,
) -> jax.Array:
  """Losses (B, T - 1) with the modules of `edits` quantised; learned sink tokens are not spared."""
  spared_BxT = jnp.pad(spared_BxT, ((0, 0), (config.sink_tokens, 0)))

  def rounded(x: jax.Array, layer: Any, table: Sequence[Quantiser], *arguments: bool) -> jax.Array:
    of_tokens = *x.shape[:2], *[1] * (x.ndim - 2)
    spared = jnp.reshape(spared_BxT, of_tokens)
    wide = x.astype(jnp.float32)
    functions = [lambda x: x]
    for each in table:
      fits = x.shape[-1] % each.block == 0  # one that does not fit is never chosen
      call = lambda x, each=each: each.function(x, *arguments)
      functions.append(call if fits else functions[0])
    number = layer.get_variable('edits', 'quantiser')
    changed = jax.lax.switch(number, functions, jnp.where(spared, 0, wide))
    return jnp.where((number == 0) | spared, wide, changed).astype(x.dtype)

  def edited(function, args, kwargs, context):
    layer = context.module
    if isinstance(layer, Transformer) and context.method_name == '_embedded':
      h_BxTxD = function(*args, **kwargs)
      noise = jax.random.normal(jax.random.key(seed), h_BxTxD.shape)
      return (h_BxTxD * (1 + NOISE * noise)).astype(h_BxTxD.dtype)
    if isinstance(layer, Dense) and layer.has_variable('edits', 'quantiser'):
      return function(rounded(args[0], layer, ACTIVATIONS))
    if context.method_name != 'edit_inputs':
      return function(*args, **kwargs)
    (q, k), v, attention = function(*args, **kwargs)
    k = rounded(k, layer, CACHES, True)
    v = rounded(v, layer, CACHES, False)
    return TransformedQK(q, k), v, attention

  logits_BxTxV = edited_by(edited, config, mesh, params, edits, tokens_BxT)
  return next_token_losses(logits_BxTxV, tokens_BxT)
