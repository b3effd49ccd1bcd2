"""Causal edits: what a model loses without its sinks, next to the same edits of random targets."""

from __future__ import annotations

import dataclasses
import functools
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.sharding import Mesh
from matplotlib.figure import Figure

from sink_jax.analyses.models import Model
from sink_jax.analyses.pictures import Row, intervals
from sink_jax.analyses.runner import analysis
from sink_jax.evaluate import EPSILON
from sink_jax.evaluate.activations import BEYOND, medians
from sink_jax.evaluate.intervals import t_interval
from sink_jax.evaluate.probe import probed
from sink_jax.evaluate.sink_report import DORMANT, SinkReport
from sink_jax.kernels.shard import mesh_of
from sink_jax.models.arrays import ParamTree
from sink_jax.models.config import ModelConfig
from sink_jax.models.edits import edit_tree, edited_logits, next_token_losses
from sink_jax.models.record import RecordOptions
from sink_jax.models.run import record

Controls = Annotated[int, tyro.conf.arg(help='edits of random targets next to each edit.')]
# The first columns of a row, the argument of `edit_tree`, and its arrays: first the targets', then
# controls'.
Edit = tuple[Row, str, list[np.ndarray]]
_FIRST = 4  # tokens that no control edits: sinks may lie there
_LEAST = 0.01  # of the loss: a smaller change counts as none, as in the advice on caches


def _draw(rows: list[Row]) -> Figure:
  measured = [row for row in rows if 'change' in row]
  if not measured:
    raise ValueError(
      'no edit has targets and controls, and so nothing can be drawn: take longer inputs.'
    )
  return intervals(
    measured, ('edit', 'targets'), label='change of the loss (nats); grey: random targets'
  )


@analysis('causal edits', _draw, sequences=16, length=64)
def edits(model: Model, *, controls: Controls = 8) -> list[Row]:
  """Loss without the sink: keys, values, massive channels, dormant heads and BOS, with controls.

  The loss is that of the tokens from the third on, in nats; `low` and `high` bound the mean of its
  change over sequences. `beyond`: whether `low` exceeds the change of every control and 1 % of the
  loss. An edit that has no targets, or too few other candidates for a control, is a row without
  numbers.

  - drop the key: later tokens do not see a sink (`SinkReport.sink_positions`), in all blocks and
    heads. Controls are other positions of the first half, from the fifth on. With relative
    positions, dropping position 1 is as if the text began at its second token, which becomes the
    sink: this edit moves a sink.
  - drop the key in sink heads: only in heads that give a sink more than 0.3, so that the second
    token still sees the first in other heads. Controls are other positions in the same heads.
  - zero the value: the value of the same positions is zero; their weight stays.
  - cap the massive channels: channels with an entry above 100 medians of a block's hidden states
    (Sun et al., arXiv 2402.17762), in most sequences, are clipped after every block to the largest
    entry of all other channels; `cap` is the median of this limit over blocks. Controls are other
    channels, all entries of which are zero after every block.
  - remove the dormant heads: outputs of heads below a quarter of their block's mean norm (HONOR,
    arXiv 2504.03889) are zero. Controls are as many other heads, of the same block while it has
    them.
  - leave out BOS: the same texts without it. The only control leaves out the second token instead.
  """
  if controls < 1:
    raise ValueError(f'--controls={controls} must be at least 1.')
  inputs = model.inputs()
  tokens_SxT, report = inputs.tokens, model.report(inputs.tokens)
  base_S, rows = _losses(model, tokens_SxT)[:, 1:].mean(1), []
  for row, argument, arrays in (
    *_sinks(report, model.run.config.sink_tokens, controls),
    _massive_channels(model, tokens_SxT, controls),
    _dormant_heads(report, controls),
  ):
    if row['targets'] != 'none' and len(arrays) > 1:
      row |= _changes(
        base_S, [_losses(model, tokens_SxT, **{argument: x})[:, 1:].mean(1) for x in arrays]
      )
    rows.append(row)
  rows.append({'edit': 'leave out BOS', 'targets': 'none'})
  if inputs.description['bos']['applied'] != 'none':
    # Moved to the end, the token is read by no other, and the length and the program stay the same.
    moved = [np.append(np.delete(tokens_SxT, k, 1), tokens_SxT[:, k : k + 1], 1) for k in (0, 1)]
    rows[-1] |= {'targets': 'BOS'} | _changes(
      base_S, [_losses(model, ids)[:, :-1].mean(1) for ids in moved]
    )
  return rows


def _sinks(report: SinkReport, sink_tokens: int, controls: int) -> list[Edit]:
  alpha_NxHxT = report.importance.mean(0)
  length = alpha_NxHxT.shape[-1]
  early_T = np.arange(length // 2)  # few rows see a later token
  sinks = report.sink_positions() - 1
  chosen = [sinks, *_others(np.setdiff1d(early_T[_FIRST:], sinks), sinks.size, controls)]
  kept = [
    ~np.isin(np.arange(-sink_tokens, length), k) for k in chosen
  ]  # learned sink tokens come first
  others_NxH = ~(alpha_NxHxT[..., sinks] > EPSILON).any(-1)
  words = f'position{"s" * (sinks.size > 1)} {", ".join(str(k + 1) for k in sinks)}'
  heads = 'none' if others_NxH.all() else f'{words} in {_number((~others_NxH).sum(), "head")}'
  return [
    ({'edit': 'drop the key', 'targets': words}, 'keep_NxBxHxT', kept),
    (
      {'edit': 'drop the key in sink heads', 'targets': heads},
      'keep_NxBxHxT',
      [others_NxH[:, None, :, None] | kept_T for kept_T in kept],
    ),
    ({'edit': 'zero the value', 'targets': words}, 'values_NxBxT', kept),
  ]


def _massive_channels(model: Model, tokens_SxT: np.ndarray, controls: int) -> Edit:
  config, params = probed(model.run.config, model.options.dtype), model.run.params
  options = RecordOptions(hidden=_sizes)
  sizes = [
    record(config, options, mesh_of(params), params, batch_BxT).layers.hidden
    for batch_BxT in model.batches(tokens_SxT)
  ]
  largest_MxSxD, median_MxSx1 = (np.concatenate(parts, 1) for parts in zip(*sizes))
  massive_D = ((largest_MxSxD > BEYOND[0] * median_MxSx1).mean(1) > 0.5).any(0)
  row = {'edit': 'cap the massive channels', 'targets': _number(massive_D.sum(), 'channel')}
  if not massive_D.any():
    return row, 'caps_MxD', []
  caps_Mx1 = largest_MxSxD[..., ~massive_D].max((1, 2), initial=0)[:, None]
  other = _others(np.flatnonzero(~massive_D), massive_D.sum(), controls)
  zeros_D = [
    np.where(np.isin(np.arange(massive_D.size), channels), 0, np.inf) for channels in other
  ]
  return (
    row | {'cap': float(np.median(caps_Mx1))},
    'caps_MxD',
    [np.where(massive_D, caps_Mx1, np.inf), *zeros_D],
  )


def _sizes(hidden_BxTxD: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The largest |h| of each channel (B, D), and the median (B, 1) over all channels and tokens."""
  size_BxTxD = jnp.abs(hidden_BxTxD.astype(jnp.float32))
  return size_BxTxD.max(1), medians(size_BxTxD.reshape(len(size_BxTxD), -1))[:, None]


def _dormant_heads(report: SinkReport, controls: int) -> Edit:
  norms = report.summary()[
    'head_norm'
  ]  # of every head over its block's mean; None without any output
  dormant_NxH = np.array([[x is None or x < DORMANT for x in block] for block in norms])
  rng, kept = np.random.default_rng(0), [~dormant_NxH]
  for _ in range(controls if dormant_NxH.mean() <= 0.5 else 0):
    chosen_NxH = np.zeros_like(dormant_NxH)
    for dormant_H, chosen_H in zip(dormant_NxH, chosen_NxH):
      chosen_H[rng.permutation(np.flatnonzero(~dormant_H))[: dormant_H.sum()]] = True
    rest = rng.permutation(np.flatnonzero(~dormant_NxH & ~chosen_NxH))
    chosen_NxH.flat[rest[: dormant_NxH.sum() - chosen_NxH.sum()]] = True
    kept.append(~chosen_NxH)
  row = {'edit': 'remove the dormant heads', 'targets': _number(dormant_NxH.sum(), 'head')}
  return row, 'heads_NxH', kept


def _others(candidates: np.ndarray, count: int, controls: int) -> list[np.ndarray]:
  """`controls` draws of `count` candidates each; [] if there are fewer candidates."""
  rng = np.random.default_rng(0)
  return [
    rng.choice(candidates, count, replace=False)
    for _ in range(controls if candidates.size >= count else 0)
  ]


def _number(count: int, noun: str) -> str:
  return f'{count} {noun}{"s" if count > 1 else ""}' if count else 'none'


def _losses(model: Model, tokens_SxT: np.ndarray, **changes: np.ndarray) -> np.ndarray:
  """The losses (S, T - 1) of tokens 2 to T, in nats, with the arrays of an `edit_tree`."""
  run = model.run
  config = dataclasses.replace(probed(run.config, model.options.dtype), implementation='chunked')
  edits = edit_tree(config, batch=1, length=tokens_SxT.shape[1] + config.sink_tokens, **changes)
  return np.concatenate(
    [
      _batch_losses(config, mesh_of(run.params), run.params, edits, batch_BxT)
      for batch_BxT in model.batches(tokens_SxT)
    ],
    dtype=np.float64,
  )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _batch_losses(
  config: ModelConfig, mesh: Mesh | None, params: ParamTree, edits: ParamTree, tokens_BxT: jax.Array
) -> jax.Array:
  return next_token_losses(edited_logits(config, mesh, params, edits, tokens_BxT), tokens_BxT)


def _changes(base_S: np.ndarray, losses_CxS: list[np.ndarray]) -> Row:
  """The columns about an edit and its controls; the losses of the edit come first."""
  low, high = t_interval(losses_CxS[0] - base_S)
  change, *control = (float((losses_S - base_S).mean()) for losses_S in losses_CxS)
  return {
    'loss': float(losses_CxS[0].mean()),
    'change': change,
    'low': float(low),
    'high': float(high),
    'controls': len(control),
    'control': float(np.mean(control)),
    'control_low': min(control),
    'control_high': max(control),
    'beyond': bool(low > max(*control, _LEAST * base_S.mean())),
  }
