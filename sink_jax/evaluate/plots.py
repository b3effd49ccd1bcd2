"""Attention maps of every head, and pictures of them and of a probe, as PNG files.

Figures are made without pyplot, so that nothing global changes and no display is needed.
"""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from etils import epath
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.layout_engine import ConstrainedLayoutEngine
from numpy.typing import ArrayLike
from PIL import Image

from sink_jax.evaluate.activations import not_finite
from sink_jax.models.record import Maps, RecordOptions, maps
from sink_jax.models.run import ModelInputs, Run

# Okabe and Ito (2008): these differ for any colour vision, and in print by their lightness.
COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#000000')
SINK_1 = r'$\mathrm{Sink}_1^{\epsilon}$'
DPI = 115  # of every picture
_TICKS = 16  # numbers on an axis of an importance map; more would touch one another
FONT = 11
_LENGTH = 64  # positions of a map, as in the paper's probes; more is hard to read
_BUDGET = 2**24  # elements of maps that are recorded at a time


@dataclasses.dataclass(frozen=True, eq=False)
class HeadMaps:
  """Maps of N layers and H heads between T tokens, mean of `sequences` sequences."""

  raw: Float[np.ndarray, 'N H T T']  # the attention weights, queries then keys
  normalized: Float[np.ndarray, 'N H T T']  # the proxy scores; the same for softmax
  sequences: int
  blocks: tuple[int, ...]  # from 1

  @property
  def importance(self) -> Float[np.ndarray, 'N H']:
    """Importance of the first token, from the normalised maps."""
    return self.normalized[..., 0].mean(-1)

  @property
  def proxy(self) -> bool:
    """True if the proxy scores differ from the attention weights."""
    return not np.allclose(self.raw, self.normalized, atol=1e-4)


def strongest_and_weakest(importance_NxH: np.ndarray) -> list[tuple[int, int]]:
  """(n, h), from 0, of the two heads with the largest importance and the two with the smallest."""
  order = np.argsort(-importance_NxH, axis=None, kind='stable').tolist()
  chosen = dict.fromkeys([*order[:2], *order[-2:]])  # a small model has some of them twice
  return [divmod(i, importance_NxH.shape[1]) for i in chosen]


def head_maps(run: Run, tokens: ModelInputs) -> HeadMaps:
  """Records the model on tokens (S, T) in float32, the first 64 positions of each sequence."""
  tokens = np.asarray(tokens)[:, :_LENGTH]
  # bfloat16 would round every weight to two or three digits.
  run = dataclasses.replace(
    run, config=(config := dataclasses.replace(run.config, dtype='float32'))
  )
  # Maps grow with the square of the length: as many sequences at a time as fit, and one at least.
  size = max(1, _BUDGET // (config.layers * config.heads * tokens.shape[1] ** 2))
  means = np.zeros(())  # of raw and normalised maps: all maps of all sequences would not fit
  for i in range(0, len(tokens), size):
    part = tokens[i : i + size]
    recorded: Maps = run.record(part, RecordOptions(attention=maps)).layers.attention
    means = means + np.stack([np.asarray(x, np.float64).sum(1) / len(tokens) for x in recorded])
  if not (finite := np.isfinite(means).all((0, 3, 4))).all():
    layer, head = np.argwhere(~finite)[0]
    block = config.attention_layers[layer] + 1
    raise not_finite(run, f'the attention map of block {block}, head {head + 1}', 'float32')
  return HeadMaps(means[0], means[1], len(tokens), tuple(n + 1 for n in config.attention_layers))


def importance_map(report: Any, epsilon: float) -> Figure:
  """Draws first-token importance of a SinkReport, blocks across, heads down (Figures 19 to 24)."""
  values_HxN, blocks = report.head_importance().T, report.protocol['blocks']
  heads, layers = values_HxN.shape
  numbers = (
    values_HxN.size <= 128 and max(heads, layers) <= _TICKS
  )  # more would be too small to read
  # Inches: cells with numbers have room for them, the others share one size.
  width, height = (0.62 * layers, 0.62 * heads) if numbers else (5.2, 3.0)
  figure, [[ax]] = canvas(max(4.6, 2.0 + width), max(2.6, 1.3 + height))
  image = ax.imshow(
    values_HxN, vmin=0, vmax=1, cmap='viridis', aspect='auto', interpolation='nearest'
  )
  if numbers:
    for (head, layer), value in np.ndenumerate(values_HxN):
      ax.text(
        layer,
        head,
        f'{value:.2f}',
        ha='center',
        va='center',
        fontsize=FONT - 1,
        color='black' if value > 0.6 else 'white',
      )
  for axis, names in ((ax.xaxis, blocks), (ax.yaxis, range(1, heads + 1))):
    every = -(-len(names) // _TICKS)
    axis.set_ticks(range(0, len(names), every), labels=list(map(str, names[::every])))
  bar = _colour_bar(ax, image, 'importance of\nthe first token')
  bar.ax.axhline(epsilon, color='white', linewidth=2.5)
  bar.set_ticks([0, 0.5, 1, epsilon], labels=['0', '0.5', '1', f'ε = {epsilon:g}'])
  label(
    ax,
    f'{report.protocol["run"] or "model"}: {SINK_1} = {100 * report.sink_rate(1, epsilon):.1f} %',
    'block',
    'head',
  )
  return figure


def attention_panel(
  ax: Axes, map_TxT: ArrayLike, title: str, kind: str, signed: bool = False
) -> None:
  """Draws one map, queries down and keys across.

  kind: the name of the colours. signed: whether weights may be negative.
  """
  weights_TxT = np.array(map_TxT, float)
  length = len(weights_TxT)
  if not np.triu(weights_TxT, 1).any():  # causal: above the diagonal nothing is drawn
    weights_TxT[np.triu_indices(length, 1)] = np.nan
  low, high = float(np.nanmin(weights_TxT)), float(np.nanmax(weights_TxT))
  signed = signed or low < 0
  # Symmetrical if weights may be negative, so that zero has the colour in the middle. Otherwise by
  # square roots, which show small weights; from 0 to 1, so that maps can be compared, or to larger
  # raw weights.
  limit = max(-low, high)
  colours: dict[str, Any] = (
    dict(cmap='RdBu_r', vmin=-limit, vmax=limit)
    if signed
    else dict(cmap='viridis', norm=PowerNorm(0.5, 0, max(1, high)))
  )
  # Positions count from 1, as in the paper.
  image = ax.imshow(
    weights_TxT, extent=(0.5, length + 0.5, length + 0.5, 0.5), interpolation='nearest', **colours
  )
  ax.set_facecolor('#e8e8e8')
  _colour_bar(ax, image, kind, None if signed or high > 1 else [0, 0.1, 0.3, 0.6, 1])
  for axis in (ax.xaxis, ax.yaxis):
    axis.set_ticks(sorted({1, max(1, length // 2), length}))
  label(ax, title, 'key', 'query')
  ax.title.set_fontsize(FONT - 1)


def canvas(
  width: float, height: float, rows: int = 1, columns: int = 1, panels: int | None = None
) -> tuple[Figure, np.ndarray]:
  """A white figure (inches) and its axes (rows, columns); panels: how many are switched on."""
  figure = Figure(
    (width, height), facecolor='white', layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08)
  )
  axes = figure.subplots(rows, columns, squeeze=False)
  for ax in axes.flat[panels:] if panels else ():
    ax.set_axis_off()
  return figure, axes


def label(ax: Axes, title: str, x: str, y: str) -> None:
  """Sets the title and the names of both axes."""
  ax.set_title(title, fontsize=FONT + 1)
  ax.set_xlabel(x, fontsize=FONT)
  ax.set_ylabel(y, fontsize=FONT)
  ax.tick_params(labelsize=FONT - 1)


def save(figure: Figure, path: str | os.PathLike) -> None:
  """Writes a figure to a path, on a disk or gs://, as a PNG.

  The file has 64 colours, which takes a fifth of the space, and does not name Matplotlib's version,
  so that equal figures are equal files.
  """
  raw = io.BytesIO()
  figure.savefig(raw, dpi=DPI, format='png', bbox_inches='tight')
  image = (
    Image.open(raw)
    .convert('RGB')
    .quantize(64, Image.Quantize.MAXCOVERAGE, 3, dither=Image.Dither.NONE)
  )
  with epath.Path(path).open('wb') as stream:
    image.save(stream, 'png', optimize=True)


def _colour_bar(ax: Axes, image: AxesImage, name: str, ticks: Sequence[float] | None = None) -> Any:
  """A colour bar as high as the picture next to it."""
  bar = ax.figure.colorbar(image, cax=ax.inset_axes((1.03, 0, 0.05, 1)), ticks=ticks)
  bar.set_label(name, fontsize=FONT - 1)
  bar.ax.tick_params(labelsize=FONT - 2)
  return bar
