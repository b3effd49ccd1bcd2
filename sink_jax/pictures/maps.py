"""Values of heads by block, and attention maps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from sink_jax.pictures.style import (
  FONT,
  SINK_1,
  Columns,
  Row,
  canvas,
  colour_bar,
  groups,
  label,
  word,
)

_TICKS = 16  # numbers on an axis of a grid; more would touch one another
_CELLS = 8  # blocks or heads of a grid whose cells have room for numbers
_MAPS = 4  # in a line


def grid(rows: Sequence[Row], value: str) -> Figure:
  """Draws a value in [0, 1] of every head, blocks to the right and heads down (Figures 19 to 24).

  A panel for each model, all with the same colours; the white line is epsilon. Rows have the
  columns model, block, head, epsilon and `value`, and may have sink_1, whose mean is in the title.
  """
  panels = groups(rows, ('model',))
  figure, axes = canvas(len(panels), 2, 5.4, 3.4)
  for ax, (title, inside) in zip(axes, panels.items()):
    blocks = sorted({row['block'] for row in inside})
    heads = sorted({row['head'] for row in inside})
    values_HxN = np.full((len(heads), len(blocks)), np.nan)
    for row in inside:
      values_HxN[heads.index(row['head']), blocks.index(row['block'])] = row[value]
    look: dict[str, Any] = dict(cmap='viridis', aspect='auto', interpolation='nearest')
    image = ax.imshow(values_HxN, vmin=0, vmax=1, **look)
    if max(values_HxN.shape) <= _CELLS:
      _write_numbers(ax, values_HxN)
    for axis, numbers in ((ax.xaxis, blocks), (ax.yaxis, heads)):
      every = -(-len(numbers) // _TICKS)
      axis.set_ticks(range(0, len(numbers), every), labels=list(map(str, numbers[::every])))
    epsilon = inside[0]['epsilon']
    bar = colour_bar(ax, image, word(value))
    bar.axhline(epsilon, color='white', linewidth=2.5)
    bar.set_yticks([0, 0.5, 1, epsilon], labels=['0', '0.5', '1', f'ε = {epsilon:g}'])
    rates = [row['sink_1'] for row in inside if 'sink_1' in row]
    words = f': {SINK_1} = {np.mean(rates):.1f} %' if rates else ''
    label(ax, title + words, 'block', 'head')
  return figure


def _write_numbers(ax: Axes, values_HxN: Float[np.ndarray, 'H N']) -> None:
  """Writes each value into its cell."""
  for (head, block), value in np.ndenumerate(values_HxN):
    colour = 'black' if value > 0.6 else 'white'
    look: dict[str, Any] = dict(ha='center', va='center', fontsize=FONT - 1)
    ax.text(block, head, f'{value:.2f}', color=colour, **look)


def attention_maps(
  rows: Sequence[Row], columns: Columns, title: str, across: int = _MAPS
) -> Figure:
  """Draws the maps (T, T) in columns of rows; a row fills in the `title`.

  A column `extra` (T,) has the weights of an extra key. If every row has all of the columns, those
  of a row share a line.
  """
  shown = [(row, column) for row in rows for column in columns if row.get(column) is not None]
  drawn = {id(row) for row, _ in shown}
  if len(shown) == len(columns) * len(drawn) > len(drawn):
    across = len(columns)
  figure, axes = canvas(len(shown), across, 4.1, 3.9)
  for ax, (row, column) in zip(axes, shown):
    signed = column in ('cosine', 'score')
    words = title.format(**row)
    attention_map(ax, row[column], words, word(column), signed, row.get('extra'))
  return figure


def attention_map(
  ax: Axes,
  map_TxT: ArrayLike,
  title: str,
  kind: str,
  signed: bool = False,
  extra_T: ArrayLike | None = None,
) -> None:
  """Draws one map, queries down and keys to the right; positions count from 1, as in the paper.

  Args:
    kind: the name of the colours.
    signed: whether weights may be negative.
    extra_T: the weights of an extra key, the last column, `*`.
  """
  weights = np.array(map_TxT, float)
  length = width = len(weights)
  if not np.triu(weights, 1).any():  # causal: above the diagonal nothing is drawn
    weights[np.triu_indices(length, 1)] = np.nan
  ticks = {at: str(at) for at in (1, max(1, length // 2), length)}
  if extra_T is not None:
    extra = np.reshape(extra_T, (length, 1))
    weights = np.concatenate([weights, np.full_like(extra, np.nan, float), extra], 1)
    width += 2
    ticks[width] = '*'
  low, high = float(np.nanmin(weights)), float(np.nanmax(weights))
  signed = signed or low < 0
  extent = 0.5, width + 0.5, length + 0.5, 0.5
  look = _colours(low, high, signed)
  image = ax.imshow(weights, extent=extent, interpolation='nearest', **look)
  ax.set_facecolor('#e8e8e8')
  colour_bar(ax, image, kind, None if signed or high > 1 else [0, 0.1, 0.3, 0.6, 1])
  ax.set_xticks(list(ticks), list(ticks.values()))
  ax.set_yticks(sorted({1, max(1, length // 2), length}))
  label(ax, title, 'key', 'query')
  ax.title.set_fontsize(FONT - 1)


def _colours(low: float, high: float, signed: bool) -> dict[str, Any]:
  """Colours of weights: symmetrical if they may be negative, so that zero is in the middle.

  Otherwise by square roots, which show small weights; from 0 to 1, so that maps can be compared, or
  to larger raw weights.
  """
  limit = max(-low, high)
  if signed:
    return {'cmap': 'RdBu_r', 'vmin': -limit, 'vmax': limit}
  return {'cmap': 'viridis', 'norm': PowerNorm(0.5, 0, max(1, high))}
