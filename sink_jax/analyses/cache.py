"""Cache advice: the attention that a cache of first and last tokens keeps; the smallest safe cache.

A cache of the first s and the last W tokens (StreamingLLM, arXiv:2309.17453) drops the attention
mass on the tokens between them. A head that needs only a few first tokens and a short window
streams; any other head retrieves (DuoAttention, arXiv:2410.10819, which finds them by an
optimisation; here their mass decides).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float
from matplotlib.figure import Figure

from sink_jax.analyses.models import Model
from sink_jax.analyses.runner import analysis
from sink_jax.attention import reference
from sink_jax.evaluate.inputs import Inputs
from sink_jax.evaluate.intervals import t_interval
from sink_jax.io.terminal import Progress
from sink_jax.kernels import chunked
from sink_jax.kernels.shard import mesh_of
from sink_jax.models.arrays import ParamTree
from sink_jax.models.config import ModelConfig
from sink_jax.models.decode import CachePolicy, check_policy
from sink_jax.models.generate import text_losses
from sink_jax.models.record import RecordOptions, Seen
from sink_jax.models.run import record
from sink_jax.models.sizes import cache_bytes_per_token
from sink_jax.pictures.charts import lines
from sink_jax.pictures.style import Row
from sink_jax.pretrained.load import model_type
from sink_jax.report.markdown import plural

FIRST, RECENT = (0, 1, 2, 4, 8), (16, 64, 256)
SINKS = (0, 1, 2, 4)  # first tokens of the caches that are tried; StreamingLLM has 4
ROLE, STREAMS = (4, 64), 0.95  # a head streams if this cache keeps this share of its mass
LEAST_KEPT = 0.5  # a cache that keeps less than half of the mass is not tried
TOLERANCE = 1.0  # per cent of the loss
RATIOS = 1 / 4, 1 / 2  # of the tokens that a cache keeps to those of the text
# The families (model_type) that a tool runs with a cache as it is measured here: llama.cpp does not
# shift models with windows in some blocks, and kvpress leaves these blocks as they are.
TOOLS = {
  'llama.cpp': ('llama', 'mistral', 'qwen2', 'qwen3', 'gpt_neox'),
  'kvpress': ('llama', 'mistral', 'phi3', 'qwen2', 'qwen3'),
}
_CONTEXT_STEP = 256  # llama.cpp pads a context to a multiple of it


def kept_mass(seen: Seen, pairs: Sequence[tuple[int, int]]) -> Float[Array, 'B H G']:
  """The share of attention that the first s and the last W tokens keep, by head and pair (s, W).

  It is exact, in memory linear in T. Means are over the T - s - W queries that see more than s + W
  tokens; all others keep everything. Scores other than softmax are row-normalised; an extra key
  counts as kept, and learned sink tokens count as first tokens.

  pairs: (s, W) with s + W < T; W includes the query's token.
  """
  spec, (q_BxTxHxDh, k_BxTxHkvxDh), params, _ = seen
  length, size_G, total_BxHxG = q_BxTxHxDh.shape[1], np.sum(pairs, 1), jnp.zeros(())
  first_Gx1x1, recent_Gx1x1 = np.asarray(pairs).T[..., None, None]
  for start, end, lo, hi in chunked.spans(spec, length):

    def block_mass(block):
      i_L, q_BxLxHxDh = block
      j_T = jnp.arange(lo, hi)
      rows = reference.rows(spec, q_BxLxHxDh, k_BxTxHkvxDh[:, lo:hi], params, i_L, j_T)
      kept_GxLxT = (j_T < first_Gx1x1) | (i_L[:, None] - j_T < recent_Gx1x1)
      kept_BxHxGxL = jnp.einsum(
        'bhlt,glt->bhgl',
        rows.proxy_BxHxLxT,
        kept_GxLxT.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
      )
      if (extra_BxHxL := rows.extra_proxy_BxHxL) is None:
        extra_BxHxL = 1 - rows.proxy_BxHxLxT.any(-1)  # a row without any weight loses nothing
      counted_GxL = (i_L >= size_G[:, None]) & (i_L < length)  # without padding rows
      return ((kept_BxHxGxL + extra_BxHxL[:, :, None]) * counted_GxL).sum(-1)

    # Blocks are summed first, then spans: one long sum would round too often.
    total_BxHxG += jax.lax.map(
      block_mass, chunked.query_blocks(q_BxTxHxDh[:, start:end], start)
    ).sum(0)
  return total_BxHxG / (length - size_G)


def _draw(rows: list[Row]) -> Figure:
  shown = [
    row | {'keeps': plural(row['first'], 'first token')}
    for row in rows
    if row['part'] == 'cache' and row['positions'] == 'text'
  ]
  return lines(shown, 'size', 'change', ('keeps',), name='change of the loss (%)')


@analysis('cache advice', _draw, sequences=32, length=512)
def cache(model: Model) -> list[Row]:
  """The smallest cache of first and last tokens that keeps the loss of documents within 1 %.

  Caches hold a quarter and a half of each document, with its first 4, 2 or 1 tokens or, as the
  control, without them. The first half of the documents chooses a cache, the second half checks it.
  Intervals are 99 %, over documents. Rows by part:

  'mass': the share of attention that a pair (first, recent) keeps, by block and head, and the share
  that it would keep of `uniform` attention. The pair (4, 64) has the `role` of the head: 'streams'
  or 'retrieves', and its `key_value_head`, from 1. 'cache': the mean share over all heads; the loss
  (nats) of a document's second half, or from where the cache is full if that is later; its change
  (per cent) from the loss with the `full` cache, also of each 'document'; and the `bytes` of the
  cache and of the full one, of 16-bit keys and values. `within`: the upper bound of the change is
  at most 1 %. A cache that was not tried has the reason. `more`: the change beyond that of the
  cache of this size with 4 first tokens, with its interval; so many are `enough` if its upper bound
  is at most 1 %. The smallest cache that is `within` is
  tried again on the second half of the documents, which did not choose it: rows 'held out'. It is
  `safe` if it is `within` there too; a larger one that is not tried there has None. 'advice': the
  safe cache, for texts as long as the documents; for this package, and for tools that run the
  family of the checkpoint:

  - llama.cpp drops half of the recent tokens at a time and renumbers the others, so it needs twice
    the window, and pads -c to a multiple of 256. It shifts only while it generates: a prompt must
    be shorter than -c. There is no line if such a context holds all of a document. If not, the
    cache is tried with renumbered positions too, and must be within 1 % on both halves.
  - kvpress drops tokens of a prompt once, and keeps the positions of the others. Its ratio is that
    of a prompt as long as the documents.
  """
  # Documents, since parts of one document are too alike: their interval would not hold for other
  # texts.
  inputs = model.inputs()
  tokens_SxT, others_SxT = np.array_split(inputs.tokens, 2)
  length = tokens_SxT.shape[1]
  if len(others_SxT) < 2:
    raise ValueError(
      'a cache needs 4 sequences: intervals are over sequences, and half of them check.'
    )
  sizes = [int(ratio * length) for ratio in RATIOS]
  caches = [(first, size - first) for size in sizes for first in SINKS if size > first]
  grid = dict.fromkeys([*itertools.product(FIRST, RECENT), *caches])
  pairs = tuple(pair for pair in grid if sum(pair) < length)
  mass_SxNxHxG = _masses(model, pairs, tokens_SxT)
  kept_G = dict(zip(pairs, mass_SxNxHxG.mean((0, 1, 2))))
  groups = model.run.config.heads // model.run.config.dims.kv_heads
  rows = _mass_rows(model.blocks, pairs, mass_SxNxHxG, length, groups)
  full_SxT = cached_losses(model, tokens_SxT, _full(model, length))
  tried = _try_caches(model, tokens_SxT, {pair: kept_G[pair] for pair in caches}, full_SxT)
  if not (within := [row for row in tried if row.get('within')]):
    words = (
      f'Keep the full cache: none tried is shown to be safe for texts of up to {length} tokens.'
    )
    return [*rows, *tried, {'part': 'advice', 'length': length, 'words': words}]
  best = min(within, key=lambda row: (row['size'], row['change']))
  return [*rows, *tried, *_check(model, inputs, best, full_SxT)]


def _check(model: Model, inputs: Inputs, best: Row, full_SxT: np.ndarray) -> list[Row]:
  """The rows of a cache that the first documents chose: held out, renumbered, advice.

  Sets in `best` whether it is safe.
  """
  tokens_SxT, others_SxT = np.array_split(inputs.tokens, 2)
  length, size, first = tokens_SxT.shape[1], best['size'], best['first']
  full_of_others_SxT = cached_losses(model, others_SxT, _full(model, length))
  halves = (tokens_SxT, full_SxT), (others_SxT, full_of_others_SxT)
  policy = CachePolicy(size, first, 'text')
  rows = _cache_rows(model, others_SxT, policy, best['kept'], full_of_others_SxT)
  held = rows[0]
  held |= {'part': 'held out', 'safe': held['within']}
  best['safe'] = held['safe']
  advice = _advice(best, held, length, (len(tokens_SxT), len(others_SxT)))
  if not best['safe']:
    return [*rows, advice]
  family = model_type(model.run)
  if family in TOOLS['kvpress']:
    ratio = 1 - size / length
    advice['kvpress'] = f'StreamingLLMPress(n_sink={first}, compression_ratio={ratio:.4g})'
  context = -(-(first + 2 * best['recent']) // _CONTEXT_STEP) * _CONTEXT_STEP
  if family in TOOLS['llama.cpp'] and context < length:
    # llama.cpp has only renumbered positions, and keeps a BOS besides --keep.
    renumbered, again = (
      _cache_rows(model, half_SxT, CachePolicy(size, first), best['kept'], full)
      for half_SxT, full in halves
    )
    safe = all(half[0].get('within') for half in (renumbered, again))
    renumbered[0]['safe'] = safe
    again[0] |= {'part': 'held out', 'safe': safe}
    rows += [*renumbered, *again]
    if safe:
      begins_with_bos = inputs.description['bos']['applied'] != 'none'
      keep = max(0, first - begins_with_bos)
      advice['llama_cpp'] = f'--context-shift --keep {keep} -c {context}'
  return [*rows, advice]


def _try_caches(
  model: Model,
  tokens_SxT: np.ndarray,
  kept: dict[tuple[int, int], float],
  full_SxT: np.ndarray,
) -> list[Row]:
  """The rows of caches, of {(first, recent): the share of attention that it keeps}."""
  rows = []
  for (first, recent), share in kept.items():
    policy = CachePolicy(first + recent, first, 'text')
    rows += _cache_rows(model, tokens_SxT, policy, share, full_SxT)
  _compare_with_most(rows)
  return rows


def _compare_with_most(tried: list[Row]) -> None:
  """Sets in each cache with fewer first tokens how much more it costs than that with the most."""
  changes: dict[tuple[int, int], list[float]] = {}  # {(first, size): changes by document}
  for row in tried:
    if row['part'] == 'document':
      changes.setdefault((row['first'], row['size']), []).append(row['change'])
  for row in tried:
    of_most = changes.get((SINKS[-1], row['size']))
    if row['part'] != 'cache' or 'change' not in row or row['first'] == SINKS[-1] or not of_most:
      continue
    more_S = np.subtract(changes[row['first'], row['size']], of_most)
    low, high = map(float, t_interval(more_S))
    row |= {'more': float(more_S.mean()), 'more_low': low, 'more_high': high}
    row['enough'] = high <= TOLERANCE


def _full(model: Model, length: int) -> CachePolicy:
  """The cache of all tokens."""
  return CachePolicy(length + model.run.config.sink_tokens, positions='text')


def _advice(best: Row, held: Row, length: int, documents: tuple[int, int]) -> Row:
  """The advice on texts of `length` tokens. held: its cache on other documents."""
  size, first, recent = best['size'], best['first'], best['recent']
  kept = f'the first {first} and the last {recent}' if first else f'the last {recent}'
  change, held_change = (
    f'{row["change"]:+.2f} % ({row["low"]:+.2f} to {row["high"]:+.2f})' for row in (best, held)
  )
  measured = (
    f'by {change} on {documents[0]} documents, and by {held_change} on {documents[1]} others'
  )
  advice: Row = {'part': 'advice', 'length': length, 'documents': sum(documents)}
  if not best['safe']:
    words = f'Keep the full cache: {kept} of {length} tokens change the loss {measured}, which'
    return advice | {'words': f'{words} is not safe.'}
  megabytes = f'{best["bytes"] / 1e6:.3g} instead of {best["full_bytes"] / 1e6:.3g} MB'
  return advice | {
    'size': size,
    'sinks': first,
    'policy': f"CachePolicy(size={size}, sinks={first}, positions='text')",
    'words': (
      f'For texts of up to {length} tokens keep {kept}, {megabytes} of keys and values in 16 bits: '
      f'the loss changes {measured}.'
    ),
  }


def _masses(model: Model, pairs: tuple[tuple[int, int], ...], tokens_SxT: np.ndarray) -> np.ndarray:
  """`kept_mass` (S, N, H, G) of all sequences, in the blocks with attention."""
  run = model.run
  config, mesh = model.config, mesh_of(run.params)
  masses = [
    np.asarray(_batch_masses(config, mesh, pairs, run.params, batch_BxT))
    for batch_BxT in model.batches(tokens_SxT)
  ]
  return np.concatenate([np.moveaxis(mass_NxBxHxG, 1, 0) for mass_NxBxHxG in masses])


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _batch_masses(
  config: ModelConfig,
  mesh: Mesh | None,
  pairs: tuple[tuple[int, int], ...],
  params: ParamTree,
  tokens_BxT: jax.Array,
) -> jax.Array:
  """`kept_mass` (N, B, H, G) of all blocks with attention, without anything else of a record."""
  options = RecordOptions(attention=functools.partial(kept_mass, pairs=pairs))
  return record(config, options, mesh, params, tokens_BxT).layers.attention


def _mass_rows(
  blocks: list[int],
  pairs: tuple[tuple[int, int], ...],
  mass_SxNxHxG: np.ndarray,
  length: int,
  groups: int,
) -> list[Row]:
  """Rows of masses; groups: query heads of a key/value head."""
  mean, rows = mass_SxNxHxG.mean(0), []
  low, high = t_interval(mass_SxNxHxG, least=0, most=1)
  for n, h, g in np.ndindex(mean.shape):
    first, recent = pairs[g]
    uniform = (first + recent) / np.arange(first + recent + 1, length + 1)
    row = {
      'part': 'mass',
      'block': blocks[n],
      'head': h + 1,
      'first': first,
      'recent': recent,
      'kept': float(mean[n, h, g]),
      'low': float(low[n, h, g]),
      'high': float(high[n, h, g]),
      'uniform': float(uniform.mean()),
    }
    if pairs[g] == ROLE:
      row['role'] = 'streams' if row['kept'] >= STREAMS else 'retrieves'
      row['key_value_head'] = h // groups + 1
    rows.append(row)
  return rows


def _cache_rows(
  model: Model, tokens_SxT: np.ndarray, policy: CachePolicy, kept: float, full_SxT: np.ndarray
) -> list[Row]:
  """The loss with a cache and with the full one, and by document; or why it was not tried."""
  length, config = tokens_SxT.shape[1], model.run.config
  row = {
    'part': 'cache',
    'first': policy.sinks,
    'recent': policy.recent,
    'size': policy.size,
    'positions': policy.positions,
    'kept': float(kept),
  }
  if policy.sinks and kept < LEAST_KEPT:
    return [row | {'reason': f'it keeps less than {LEAST_KEPT:.0%} of the attention'}]
  try:
    check_policy(config, policy, length)
  except ValueError as error:
    return [row | {'reason': str(error)}]
  late = slice(max(length // 2, policy.size) - 1, None)  # the first token has no loss
  late_S, full_S = (
    x[:, late].mean(1) for x in (cached_losses(model, tokens_SxT, policy), full_SxT)
  )
  # All changes are relative to one number, the mean of the full cache, so that their mean is the
  # change of the mean.
  change_S = 100 * (late_S - full_S) / full_S.mean()
  low, high = t_interval(change_S)
  of_all = {
    'loss': float(late_S.mean()),
    'full': float(full_S.mean()),
    'change': float(change_S.mean()),
    'low': float(low),
    'high': float(high),
    'bytes': policy.size * cache_bytes_per_token(config),
    'full_bytes': length * cache_bytes_per_token(config),
    'within': bool(high <= TOLERANCE),
    'safe': None if high <= TOLERANCE else False,
  }
  policy_columns = {name: row[name] for name in ('first', 'size', 'positions')}
  documents = [
    {'part': 'document', **policy_columns, 'document': n, 'change': float(change)}
    for n, change in enumerate(change_S, 1)
  ]
  return [row | of_all, *documents]


def cached_losses(model: Model, tokens_SxT: np.ndarray, policy: CachePolicy) -> np.ndarray:
  """The losses (S, T - 1) of the tokens of each text but its first, float64; shows its progress."""
  pieces, name = [], f'{model.run.name}, {policy.sinks} + {policy.recent}'
  with contextlib.closing(Progress(name, tokens_SxT.shape[1] - 1, unit='token')) as progress:
    for piece in text_losses(model.run.config, model.run.params, tokens_SxT, policy):
      pieces.append(np.asarray(piece, np.float64))
      progress.update(sum(x.shape[1] for x in pieces))
  return np.concatenate(pieces, 1)
