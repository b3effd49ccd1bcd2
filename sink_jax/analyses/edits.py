"""Causal edits: what a model loses without its sinks, next to the same edits of other targets."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.sharding import Mesh
from matplotlib.figure import Figure

from sink_jax.analyses.cache import TOLERANCE
from sink_jax.analyses.models import Model
from sink_jax.analyses.runner import SOURCE_TEXT, analysis
from sink_jax.evaluate import EPSILON
from sink_jax.evaluate.activations import BEYOND, medians
from sink_jax.evaluate.intervals import t_interval
from sink_jax.evaluate.sink_report import DORMANT, SinkReport
from sink_jax.kernels.shard import mesh_of
from sink_jax.models.arrays import ParamTree
from sink_jax.models.config import ModelConfig
from sink_jax.models.edits import (
  edit_tree,
  edited_importance,
  edited_logits,
  next_token_losses,
)
from sink_jax.models.record import RecordOptions
from sink_jax.models.run import record
from sink_jax.pictures.charts import intervals
from sink_jax.pictures.style import Row

Controls = Annotated[int, tyro.conf.arg(help='edits of random targets next to each edit.')]
Changes = dict[str, np.ndarray]  # arguments of `edit_tree`
_FIRST = 4  # tokens that no control edits: sinks may lie there
_LEAST = TOLERANCE / 100  # of the loss: a smaller change counts as none


class Edit(NamedTuple):
  """An edit and its controls: as many random other targets, and other targets of the same size.

  row: the first columns of its row.
  """

  row: Row
  targets: Changes
  controls: list[Changes]
  matched: Changes | None = None


def _draw(rows: list[Row]) -> Figure:
  measured = [row for row in rows if 'change' in row]
  if not measured:
    raise ValueError(
      'no edit has targets and controls, and so nothing can be drawn: take longer inputs.'
    )
  return intervals(
    measured,
    ('edit', 'targets'),
    (SOURCE_TEXT if SOURCE_TEXT in measured[0] else 'model',),
    name='change of the loss (nats); grey: random targets',
  )


@analysis('causal edits', _draw, sequences=16, length=64)
def edits(model: Model, *, controls: Controls = 8) -> list[Row]:
  """Loss without the sink: keys, values, massive channels, dormant heads and BOS, with controls.

  The loss is that of the tokens from the third on, in nats, and `baseline` that of the model as it
  is, where guesses with equal chances have `equal_chances`; `low` and `high` bound the mean of the
  change over sequences. Controls are as many random other targets, and `matched` is the change by
  other targets of the same size. `beyond`: whether `low` exceeds the change of every control and 1
  % of the loss. An edit that has no targets, or too few other candidates for a control, is a row
  without numbers.

  - drop the key: later tokens do not see a sink (`SinkReport.sink_positions`), in all blocks and
    heads. Controls are other positions of the first half, from the fifth on. With relative
    positions, dropping position 1 is as if the text began at its second token, which becomes the
    sink: this edit moves a sink.
  - drop the key in sink heads: only in heads that give a sink more than 0.3, so that the second
    token still sees the first in other heads. Controls are other positions in the same heads;
    matched: the other keys of each of them that get most attention, until they have had as much as
    its sinks (a `share` of its attention) or all of them are hidden (`matched_share`).
  - zero the value: later tokens read a value of zero at the same positions, with the same weight;
    a token still reads its own.
  - cap the massive channels: channels with an entry above 100 medians of a block's hidden states
    (Sun et al., arXiv 2402.17762), in most sequences, are clipped after every block to the largest
    entry of all other channels; `cap` is the median of this limit over blocks. Controls are other
    channels, all entries of which are zero after every block; matched: those with the largest
    entries. The same of the sinks, and of all other tokens.
  - remove the dormant heads: outputs of heads below a quarter of their block's mean norm (HONOR,
    arXiv 2504.03889) are zero. Controls are as many other heads, of the same block while it has
    them.
  - leave out BOS: the same texts without it. The only control leaves out the second token instead.

  `moved_to`: the token with the largest sink rate without the key, other than the sinks and of the
  first half, `moved_rate` that rate, and `rate_before` its rate without the edit.
  """
  if controls < 1:
    raise ValueError(f'--controls={controls} must be at least 1.')
  inputs = model.inputs()
  tokens_SxT = inputs.tokens
  if tokens_SxT.shape[1] < 3:
    raise ValueError('edits need 3 tokens: the loss is that of tokens from the third on.')
  report = model.report(tokens_SxT)
  losses = functools.partial(_late_losses, model, tokens_SxT)
  base_S = losses({})
  rows = []
  for edit in (
    *_sinks(report, model.run.config.sink_tokens, controls),
    *_massive_channels(model, report, tokens_SxT, controls),
    _dormant_heads(report, controls),
  ):
    row = edit.row
    if row['targets'] != 'none' and edit.controls:
      edited_S, *controls_CxS = map(losses, (edit.targets, *edit.controls))
      matched_S = None if edit.matched is None else losses(edit.matched)
      row |= _changes(base_S, edited_S, controls_CxS, matched_S)
      if 'keep_NxBxHxT' in edit.targets:
        row |= _moved(model, report, tokens_SxT, edit.targets)
    rows.append(row)
  has_bos = inputs.description['bos']['applied'] != 'none'
  rows.append(_without_bos(model, tokens_SxT, base_S, has_bos))
  equal_chances = math.log(model.run.config.vocab_size)
  return [row | {'equal_chances': equal_chances} if 'change' in row else row for row in rows]


def _without_bos(model: Model, tokens_SxT: np.ndarray, base_S: np.ndarray, has_bos: bool) -> Row:
  row = {'edit': 'leave out BOS', 'targets': 'none'}
  if not has_bos:
    return row
  # Moved to the end, the token is read by no other, and the length and the program stay the same.
  changed = []
  for k in (0, 1):
    moved_SxT = np.append(np.delete(tokens_SxT, k, 1), tokens_SxT[:, [k]], 1)
    changed.append(_losses(model, moved_SxT)[:, :-1].mean(1))
  without_S, other_S = changed
  return row | {'targets': 'BOS'} | _changes(base_S, without_S, [other_S])


def _sinks(report: SinkReport, sink_tokens: int, controls: int) -> list[Edit]:
  alpha_NxHxT = report.importance.mean(0)
  length = alpha_NxHxT.shape[-1]
  sinks = report.sink_positions() - 1
  early = np.arange(_FIRST, length // 2)  # few rows see a later token
  random = _others(np.setdiff1d(early, sinks), sinks.size, controls)
  at_T = np.arange(-sink_tokens, length)  # learned sink tokens come first
  kept, *others = [~np.isin(at_T, chosen) for chosen in (sinks, *random)]
  no_sink_NxH = ~(alpha_NxHxT[..., sinks] > EPSILON).any(-1)
  words = f'position{"s" * (sinks.size > 1)} {", ".join(str(k + 1) for k in sinks)}'
  heads = 'none' if no_sink_NxH.all() else f'{words} in {_number((~no_sink_NxH).sum(), "head")}'
  shares, elsewhere_NxHxT = _elsewhere(alpha_NxHxT, sinks, no_sink_NxH)
  before = (0, 0), (0, 0), (sink_tokens, 0)
  padded_NxHxT = np.pad(elsewhere_NxHxT, before, constant_values=True)
  in_all = lambda kept_T: {'keep_NxBxHxT': kept_T}
  in_heads = lambda kept_T: in_all(no_sink_NxH[:, None, :, None] | kept_T)
  zero = lambda kept_T: {'values_NxBxT': kept_T}
  return [
    Edit(
      {'edit': 'drop the key', 'targets': words},
      in_all(kept),
      [*map(in_all, others)],
    ),
    Edit(
      {'edit': 'drop the key in sink heads', 'targets': heads} | shares,
      in_heads(kept),
      [*map(in_heads, others)],
      in_all(padded_NxHxT[:, None]),
    ),
    Edit(
      {'edit': 'zero the value', 'targets': words},
      zero(kept),
      [*map(zero, others)],
    ),
  ]


def _elsewhere(
  alpha_NxHxT: np.ndarray, sinks: np.ndarray, no_sink_NxH: np.ndarray
) -> tuple[Row, np.ndarray]:
  """The share of the attention of sink heads on the sinks and on other keys, and those that stay.

  The keys are those with most attention, until they have as much as the sinks.
  """
  length = alpha_NxHxT.shape[-1]
  mass_NxHxT = alpha_NxHxT * np.arange(length, 0, -1) / length  # of a head's rows
  on_sinks_NxHx1 = mass_NxHxT[..., sinks].sum(-1, keepdims=True)
  other_NxHxT = np.where(np.isin(np.arange(length), sinks), 0, mass_NxHxT)
  order_NxHxT = np.argsort(-other_NxHxT, -1)
  sorted_NxHxT = np.take_along_axis(other_NxHxT, order_NxHxT, -1)
  before_NxHxT = np.cumsum(sorted_NxHxT, -1) - sorted_NxHxT
  hidden_NxHxT = np.zeros(mass_NxHxT.shape, bool)
  chosen_NxHxT = (before_NxHxT < on_sinks_NxHx1) & (sorted_NxHxT > 0)
  np.put_along_axis(hidden_NxHxT, order_NxHxT, chosen_NxHxT, -1)
  hidden_NxHxT &= ~no_sink_NxH[..., None]
  if no_sink_NxH.all():
    return {}, ~hidden_NxHxT
  share = on_sinks_NxHx1[~no_sink_NxH].mean()
  matched = (other_NxHxT * hidden_NxHxT).sum(-1)[~no_sink_NxH].mean()
  return {'share': float(share), 'matched_share': float(matched)}, ~hidden_NxHxT


def _moved(model: Model, report: SinkReport, tokens_SxT: np.ndarray, changes: Changes) -> Row:
  """Where the sink is if the keys of the sinks are hidden."""
  config, tree = _edit_tree(model, tokens_SxT, changes)
  mesh, params = mesh_of(model.run.params), model.run.params
  alpha_NxSxHxT = np.concatenate(
    [
      edited_importance(config, mesh, params, tree, batch_BxT)
      for batch_BxT in model.batches(tokens_SxT)
    ],
    1,
  )
  half = max(2, tokens_SxT.shape[1] // 2)
  rates_T = (alpha_NxSxHxT > EPSILON).mean((0, 1, 2))[:half]
  rates_T[report.sink_positions() - 1] = -1
  k = int(rates_T.argmax())
  before = float(report.sink_rates()[k])
  return {'moved_to': k + 1, 'moved_rate': float(rates_T[k]), 'rate_before': before}


def _massive_channels(
  model: Model, report: SinkReport, tokens_SxT: np.ndarray, controls: int
) -> list[Edit]:
  config, params = model.config, model.run.params
  options = RecordOptions(hidden=_sizes)
  sizes = [
    record(config, options, mesh_of(params), params, batch_BxT).layers.hidden
    for batch_BxT in model.batches(tokens_SxT)
  ]
  largest_MxSxD, median_MxSx1 = (np.concatenate(parts, 1) for parts in zip(*sizes))
  beyond_MxSxD = largest_MxSxD > BEYOND[0] * median_MxSx1
  massive_D = (beyond_MxSxD.mean(1) > 0.5).any(0)
  row = {'edit': 'cap the massive channels', 'targets': _number(massive_D.sum(), 'channel')}
  if not massive_D.any():
    return [Edit(row, {}, [])]
  caps_M = largest_MxSxD[..., ~massive_D].max((1, 2), initial=0)
  caps_Mx1 = caps_M[:, None]
  row |= {'cap': float(np.median(caps_Mx1))}
  caps_MxD = np.where(massive_D, caps_Mx1, np.inf)
  other = np.flatnonzero(~massive_D)
  count = massive_D.sum()
  size_D = largest_MxSxD.mean(1).max(0)
  order = np.argsort(-size_D[other], kind='stable')

  def zeros(channels: np.ndarray) -> np.ndarray:
    is_zero_D = np.isin(np.arange(massive_D.size), channels)
    return np.where(is_zero_D, 0, np.inf)

  random = [*map(zeros, _others(other, count, controls))]
  largest = zeros(other[order[:count]])
  at_T = np.arange(-config.sink_tokens, tokens_SxT.shape[1])
  is_sink_T = np.isin(at_T, report.sink_positions() - 1)
  edits = []
  for words, capped_T in (
    ('', is_sink_T | True),
    (' of sinks', is_sink_T),
    (' of others', ~is_sink_T),
  ):
    changes = lambda caps: {'caps_MxD': caps, 'capped_T': capped_T}
    named = row | {'edit': f'{row["edit"]}{words}'}
    others = [*map(changes, random)]
    edits.append(Edit(named, changes(caps_MxD), others, changes(largest)))
  return edits


def _sizes(hidden_BxTxD: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The largest |h| of each channel (B, D), and the median (B, 1) over all channels and tokens."""
  size_BxTxD = jnp.abs(hidden_BxTxD.astype(jnp.float32))
  size_Bxn = size_BxTxD.reshape(len(size_BxTxD), -1)
  return size_BxTxD.max(1), medians(size_Bxn)[:, None]


def _dormant_heads(report: SinkReport, controls: int) -> Edit:
  # Of every head over its block's mean; None without any output.
  norms = report.summary()['head_norm']
  dormant_NxH = np.array([[x is None or x < DORMANT for x in block] for block in norms])
  rng, kept = np.random.default_rng(0), []
  for _ in range(controls if dormant_NxH.mean() <= 0.5 else 0):
    chosen_NxH = np.zeros_like(dormant_NxH)
    for dormant_H, chosen_H in zip(dormant_NxH, chosen_NxH):
      chosen_H[rng.permutation(np.flatnonzero(~dormant_H))[: dormant_H.sum()]] = True
    rest = rng.permutation(np.flatnonzero(~dormant_NxH & ~chosen_NxH))
    chosen_NxH.flat[rest[: dormant_NxH.sum() - chosen_NxH.sum()]] = True
    kept.append({'heads_NxH': ~chosen_NxH})
  row = {'edit': 'remove the dormant heads', 'targets': _number(dormant_NxH.sum(), 'head')}
  return Edit(row, {'heads_NxH': ~dormant_NxH}, kept)


def _others(candidates: np.ndarray, count: int, controls: int) -> list[np.ndarray]:
  """`controls` draws of `count` candidates each; [] if there are fewer candidates."""
  rng = np.random.default_rng(0)
  return [
    rng.choice(candidates, count, replace=False)
    for _ in range(controls if candidates.size >= count else 0)
  ]


def _number(count: int, noun: str) -> str:
  return f'{count} {noun}{"s" if count > 1 else ""}' if count else 'none'


def _late_losses(model: Model, tokens_SxT: np.ndarray, changes: Changes) -> np.ndarray:
  """The loss (S,) of each sequence without token 2, which is predicted from the first one only."""
  return _losses(model, tokens_SxT, **changes)[:, 1:].mean(1)


def _losses(model: Model, tokens_SxT: np.ndarray, **changes: np.ndarray) -> np.ndarray:
  """The losses (S, T - 1) of tokens 2 to T, in nats, with the arrays of an `edit_tree`."""
  config, tree = _edit_tree(model, tokens_SxT, changes)
  mesh, params = mesh_of(model.run.params), model.run.params
  batches = model.batches(tokens_SxT)
  losses = [_batch_losses(config, mesh, params, tree, batch_BxT) for batch_BxT in batches]
  return np.concatenate(losses, dtype=np.float64)


def _edit_tree(
  model: Model, tokens_SxT: np.ndarray, changes: Changes
) -> tuple[ModelConfig, ParamTree]:
  """The config that hides keys, and the `edit_tree` of changes."""
  config = dataclasses.replace(model.config, implementation='chunked')
  length = tokens_SxT.shape[1] + config.sink_tokens
  return config, edit_tree(config, batch=1, length=length, **changes)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _batch_losses(
  config: ModelConfig,
  mesh: Mesh | None,
  params: ParamTree,
  edits: ParamTree,
  tokens_BxT: jax.Array,
) -> jax.Array:
  return next_token_losses(edited_logits(config, mesh, params, edits, tokens_BxT), tokens_BxT)


def _changes(
  base_S: np.ndarray,
  edited_S: np.ndarray,
  controls_CxS: list[np.ndarray],
  matched_S: np.ndarray | None = None,
) -> Row:
  """The columns about an edit and its controls."""
  change = lambda losses_S: float((losses_S - base_S).mean())
  low, high = t_interval(edited_S - base_S)
  control = [*map(change, controls_CxS)]
  row = {
    'baseline': float(base_S.mean()),
    'loss': float(edited_S.mean()),
    'change': change(edited_S),
    'low': float(low),
    'high': float(high),
    'controls': len(control),
    'control': float(np.mean(control)),
    'control_low': min(control),
    'control_high': max(control),
  }
  if matched_S is not None:
    row['matched'] = change(matched_S)
  beaten = max(*control, row.get('matched', -math.inf), _LEAST * base_S.mean())
  return row | {'beyond': bool(low > beaten)}
