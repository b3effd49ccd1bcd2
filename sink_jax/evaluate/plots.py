"""Pictures of a probe, of a run's metrics and of a model's attention, as PNG files.

Figures are made without pyplot, so that nothing global changes and no display is needed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import IO, Any

import numpy as np
from etils import epath
from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colorbar import Colorbar
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox, BboxBase
from numpy.typing import ArrayLike

from sink_jax.evaluate.maps import HeadMaps, head_maps
from sink_jax.evaluate.threshold import EPSILON
from sink_jax.models.run import ModelInputs, Run

# Okabe and Ito (2008): these differ for any colour vision, and in print by their lightness.
COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#000000')
SINK_1 = r'$\mathrm{Sink}_1^{\epsilon}$'
SINK_EXTRA_KEY = r'$\mathrm{Sink}_*^{\epsilon}$'
# A path, on a disk or gs://, or a binary stream.
File = str | os.PathLike | IO[bytes]
# Events of metrics.jsonl: kind, step, and the numbers of that kind.
Rows = Sequence[Mapping[str, Any]]
_CELLS_WITH_NUMBERS = 128  # more would be too small to read
_TICKS = 16  # numbers on an axis of an importance map; more would touch one another
_FONT = 11
DPI = 150  # of every picture
PANELS = 'panels'  # the key of their places in a PNG
_LINES = ('-', '--', ':', '-.')


def importance_map(values_NxH: ArrayLike, path: File | None, *, rate: float, blocks: list[int],
                   name: str = '', epsilon: float = EPSILON, ax: Axes | None = None) -> Figure:
  """Draws the importance of the first token, blocks across and heads down (Figures 19 to 24).

  path: the file to write; None writes none. rate: Sink_1 at epsilon, a share. blocks: numbers of
  the N blocks. name: of the model. ax: axes to draw on; by default those of a new figure.
  """
  values_HxN = np.asarray(values_NxH).T
  heads, layers = values_HxN.shape
  numbers = values_HxN.size <= _CELLS_WITH_NUMBERS and max(heads, layers) <= _TICKS
  if ax is None:
    # Inches: cells with numbers have room for them, and the others share a picture of one size.
    width, height = (0.62 * layers, 0.62 * heads) if numbers else (5.2, 3.0)
    ax = new_axes(max(4.6, 2.0 + width), max(2.6, 1.3 + height))
  figure = figure_of(ax)
  image = ax.imshow(values_HxN, vmin=0, vmax=1, cmap='viridis', aspect='auto',
                    interpolation='nearest')
  if numbers:
    for (head, layer), value in np.ndenumerate(values_HxN):
      ax.text(layer, head, f'{value:.2f}', ha='center', va='center', fontsize=_FONT - 1,
              color='black' if value > 0.6 else 'white')
  for axis, names in ((ax.xaxis, blocks), (ax.yaxis, range(1, heads + 1))):
    every = -(-len(names) // _TICKS)
    axis.set_ticks(range(0, len(names), every), labels=list(map(str, names[::every])))
  bar = _colour_bar(figure, ax, image, 'importance of\nthe first token')
  bar.ax.axhline(epsilon, color='white', linewidth=2.5)
  bar.set_ticks([0, 0.5, 1, epsilon], labels=['0', '0.5', '1', f'ε = {epsilon:g}'])
  label(ax, f'{name or "model"}: {SINK_1} = {100 * rate:.1f} %', 'block', 'head')
  if path is not None:
    save(figure, path)
  return figure


def training_curves(rows: Rows, path: File, epsilon: float = EPSILON,
                    unit: str = 'nats per token') -> None:
  """Draws loss, Sink_1 and the largest importance against step (Figure 4 middle).

  rows: the events of `read_metrics`. unit: of the loss. The largest importance of the first token
  over heads moves long before Sink_1 leaves 0 %, or without it ever doing so.
  """
  of = lambda kind: [row for row in rows if row['kind'] == kind]
  train, valid, probed = of('train'), of('valid'), of('probe')
  sets = [key for key in (valid[-1] if valid else ()) if key not in ('kind', 'step')]
  # The names of many sets would cover their curves: they stand below the axes, four in a row.
  many = len(sets) > len(COLOURS)
  figure, axes = canvas(10.5, 3.6 + 0.25 * many * -(-len(sets) // 4), columns=3)
  loss, rate, importance = axes[0]
  _curve(loss, train, 'loss', 'train', '#9a9a9a', marker='')
  for i, key in enumerate(sets):
    # Texts such as the Pile have more sets than there are colours: each round of the colours has
    # lines of another style.
    again, colour = divmod(i, len(COLOURS))
    _curve(loss, valid, key, 'valid' if key == 'valid' else f'valid: {key}', COLOURS[colour],
           line=_LINES[again % len(_LINES)])
  _curve(rate, probed, 'sink_1', f'{SINK_1}, first token', COLOURS[0])
  _curve(rate, probed, 'sink_bias_slot', f'{SINK_EXTRA_KEY}, extra key', COLOURS[1], line='--')
  _curve(importance, probed, 'largest_importance', 'largest over heads', COLOURS[0])
  # With a single head the mean is the largest, and one curve suffices.
  if any(row['mean_importance'] != row['largest_importance'] for row in probed):
    _curve(importance, probed, 'mean_importance', 'mean over heads', COLOURS[5], line='--')
  threshold(importance, epsilon)
  # Room for whole markers at 0 % and at 100 %.
  rate.set_ylim(-4, 104)
  importance_limits(importance, epsilon)
  label(loss, 'Loss', 'step', unit)
  label(rate, 'Sink rate', 'step', '% of heads')
  label(importance, 'Importance of the first token', 'step', 'importance')
  for ax in axes[0]:
    ax.grid(alpha=0.25)
    if many and ax is loss:
      figure.legend(*ax.get_legend_handles_labels(), loc='outside lower center', ncols=4,
                    fontsize=_FONT - 2, frameon=False, handlelength=4)  # shows dashes and dots
    elif ax.get_legend_handles_labels()[0]:
      ax.legend(fontsize=_FONT - 2, frameon=False)
  save(figure, path)


def attention_maps(run: Run, tokens: ModelInputs, path: File) -> None:
  """Draws maps of the strongest and the weakest sink head, averaged over the sequences.

  tokens: (S, T); the first 64 positions are shown. Where the rows of the attention weights
  do not sum to one, the row-normalised proxy and the weights themselves get a panel each.
  """
  maps = head_maps(run, tokens)
  strongest, weakest = maps.head(strongest=True), maps.head(strongest=False)
  names = {strongest: 'strongest head', weakest: 'weakest head'}
  if maps.importance.size == 1:
    names = {strongest: 'only head'}
  panels = [(head, proxy) for head in names for proxy in ((True, False) if maps.proxy else (True,))]
  rows = 2 if len(panels) == 4 else 1
  figure, axes = canvas(8.4 if len(panels) > 1 else 5.2, 4.1 * rows, rows, -(-len(panels) // rows))
  for ax, (head, proxy) in zip(axes.flat, panels):
    head_panel(figure, ax, maps, head, proxy, names[head])
  figure.suptitle(f'{run.name or "model"}: mean of {maps.sequences} sequences', fontsize=_FONT + 1)
  save(figure, path)


def token_map(run: Run, tokens_T: ArrayLike, words: Sequence[str], path: File) -> None:
  """Draws the head that attends most to the first token, on one text, with its tokens as ticks.

  tokens_T: ids (T,), of which few can be read. words: what stands at each.
  """
  tokens_T = np.asarray(tokens_T)
  maps = head_maps(run, tokens_T[None])
  head = maps.head(strongest=True)
  figure, axes = canvas(7.2, 6.4)
  ax = axes[0, 0]
  head_panel(figure, ax, maps, head, True, run.name or 'model')
  places = range(1, len(tokens_T) + 1)
  ax.set_xticks(places, labels=words, rotation=90)
  ax.set_yticks(places, labels=words)
  ax.tick_params(labelsize=_FONT - 2)
  save(figure, path)


def norm_ratios(ratios: Mapping[str, np.ndarray], path: File, *, blocks: list[int],
                name: str = '') -> None:
  """Draws the l2 norm of the first token over the mean of the others, by block (Figures 7 and 8).

  ratios: 'value' and 'key' of the N blocks with attention, 'hidden' of the embedding and of every
  block, 'hidden_before_norm' of every block. blocks: numbers of the N. name: of the model.
  """
  figure, axes = canvas(6.6, 3.8)
  ax = axes[0, 0]
  kinds = [('hidden', 'hidden state'), ('value', 'value'), ('key', 'key')]
  before = ratios['hidden_before_norm']
  if not np.allclose(before, ratios['hidden'][1:], rtol=1e-3):  # a post-norm block
    kinds.append(('hidden_before_norm', 'hidden state before its norm'))
  for colour, marker, (kind, words) in zip(COLOURS, 'os^D', kinds):
    ratio = ratios[kind]
    x = blocks if kind in ('value', 'key') else np.arange(len(ratio)) + (kind != 'hidden')
    ax.plot(x, ratio, color=colour, marker=marker, markersize=6, linewidth=2, label=words)
  # At 1 the first token is like the others.
  ax.axhline(1, color='#777777', linewidth=1, linestyle=':')
  ax.set_yscale('log')
  # Ratios that all lie near 1 would otherwise fill the axis and look large.
  low, high = ax.get_ylim()
  ax.set_ylim(min(low, 0.5), max(high, 2))
  ax.yaxis.set_major_formatter(lambda y, _: f'{y:g}')
  # 2 and 5 are labelled beside the powers of ten, of which the axis may have no more than one.
  ax.yaxis.set_minor_formatter(lambda y, _: f'{y:g}' if f'{y:.0e}'[0] in '25' else '')
  ax.tick_params(which='minor', labelsize=_FONT - 2)
  ax.xaxis.set_major_locator(MaxNLocator(integer=True))
  ax.grid(alpha=0.25)
  ax.legend(fontsize=_FONT - 1, frameon=False)
  label(ax, f'{name or "model"}: norm of the first token',
        'block (0: the embedding)', 'ratio to the mean of the others')
  save(figure, path)


def head_panel(figure: Figure, ax: Axes, maps: HeadMaps, head: tuple[int, int], proxy: bool,
               name: str) -> None:
  """Draws one head's map: its row-normalised scores, or (not `proxy`) the weights themselves."""
  kind = 'raw weights'
  if proxy:
    kind = 'proxy: rows made to sum to 1' if maps.proxy else 'attention'
  alpha = f'{maps.importance[head]:.2f}' + ('*' if maps.proxy else '')
  extra = '' if maps.extra_key_weight is None else f', extra key {maps.extra_key_weight[head]:.2f}'
  attention_panel(figure, ax, (maps.normalized if proxy else maps.raw)[head],
                  f'{name}: block {maps.blocks[head[0]]}, head {head[1] + 1}\n'
                  f'importance: first token {alpha}{extra}', kind)


def attention_panel(figure: Figure, ax: Axes, map_TxT: ArrayLike, title: str, kind: str) -> None:
  """Draws one map, queries down and keys across, with `kind` beside its colours.

  Weights that are never negative get a square-root scale, which shows the small ones.
  """
  weights_TxT = np.array(map_TxT, float)
  length = len(weights_TxT)
  if not np.triu(weights_TxT, 1).any():  # causal: above the diagonal nothing is drawn
    weights_TxT[np.triu_indices(length, 1)] = np.nan
  low, high, ticks = float(np.nanmin(weights_TxT)), float(np.nanmax(weights_TxT)), None
  if low < 0:
    # Symmetrical, so that a weight of zero has the colour in the middle.
    limit = max(-low, high)
    colours: dict[str, Any] = dict(cmap='RdBu_r', vmin=-limit, vmax=limit)
  # Raw weights may exceed one. All others have the scale from 0 to 1, by which maps can be
  # compared.
  elif high > 1:
    colours = dict(cmap='viridis', norm=PowerNorm(0.5, 0, high))
  else:
    colours = dict(cmap='viridis', norm=PowerNorm(0.5, 0, 1))
    ticks = [0, 0.1, 0.3, 0.6, 1]
  # Positions count from 1, as in the paper; imshow would count from 0.
  image = ax.imshow(weights_TxT, extent=(0.5, length + 0.5, length + 0.5, 0.5),
                    interpolation='nearest', **colours)
  ax.set_facecolor('#e8e8e8')
  _colour_bar(figure, ax, image, kind, ticks)
  for axis in (ax.xaxis, ax.yaxis):
    axis.set_ticks(sorted({1, max(1, length // 2), length}))
  label(ax, title, 'key', 'query')
  ax.title.set_fontsize(_FONT - 1)


def canvas(width: float, height: float, rows: int = 1, columns: int = 1,
           panels: int | None = None) -> tuple[Figure, np.ndarray]:
  """A white figure of a size in inches, and its axes (rows, columns).

  panels: how many of the axes are used; None for all. The others are switched off.
  """
  figure = Figure(figsize=(width, height), facecolor='white',
                  layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08))
  axes = figure.subplots(rows, columns, squeeze=False)
  for ax in axes.flat[panels:] if panels else ():
    ax.set_axis_off()
  return figure, axes


def new_axes(width: float, height: float) -> Axes:
  """The axes of a new figure of a size in inches."""
  return canvas(width, height)[1][0, 0]


def figure_of(ax: Axes) -> Figure:
  """The figure that axes are of, also where they are in a part of it."""
  figure = ax.get_figure(root=True)
  assert isinstance(figure, Figure), 'axes that have been removed from their figure'
  return figure


def label(ax: Axes, title: str, x: str, y: str) -> None:
  """Sets the title and the names of both axes."""
  ax.set_title(title, fontsize=_FONT + 1)
  ax.set_xlabel(x, fontsize=_FONT)
  ax.set_ylabel(y, fontsize=_FONT)
  ax.tick_params(labelsize=_FONT - 1)


def mathematical(text: str) -> str:
  """'Sink_1' as the symbol of the paper."""
  return re.sub(r'Sink_(\w|\*)', r'$\\mathrm{Sink}_{\1}^{\\epsilon}$', text)


def threshold(ax: Axes, epsilon: float) -> None:
  """Draws the line above which a head counts as a sink."""
  ax.axhline(epsilon, color='#555555', linewidth=1.2, linestyle=':')
  ax.annotate(f'ε = {epsilon:g}', (1, epsilon), (-3, 3), ha='right', fontsize=_FONT - 2,
              color='#555555', xycoords=('axes fraction', 'data'), textcoords='offset points')


def importance_limits(ax: Axes, epsilon: float) -> None:
  """Limits the axis to 0 up to the largest value that is drawn, and shows epsilon in any case."""
  drawn = [y for line in ax.lines for y in np.asarray(line.get_ydata())]
  ax.set_ylim(0, max(1.5 * epsilon, 1.08 * max(drawn, default=0)))


def save(figure: Figure, file: File) -> None:
  """Writes a figure as PNG to a path, on a disk or gs://, or to a binary stream."""
  opened = (epath.Path(file).open('wb') if isinstance(file, (str, os.PathLike)) else
            contextlib.nullcontext(file))
  with opened as to:
    figure.set_dpi(DPI)
    # Around all that is drawn, because colour bars lie outside the axes that the layout arranges.
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    box = figure.get_tightbbox(renderer).padded(0.1)
    panels = _panels(figure, box, renderer)
    # Without the name of the software, equal figures are equal files under any version of
    # Matplotlib.
    figure.savefig(to, dpi=DPI, format='png', bbox_inches=box, metadata={
        'Software': None, **({PANELS: json.dumps(panels)} if panels else {})})


def _panels(figure: Figure, box: BboxBase, renderer: RendererBase) -> list[list[float]]:
  """Where the panels and the legend of a figure of several columns are; [] of any other.

  Each is (left, top, right, bottom) as shares of the picture, row by row, so that a page can set
  them below one another where it is narrow.
  """
  places: dict[tuple[int, int], list[BboxBase]] = {}
  for ax in figure.axes:
    spec = ax.get_subplotspec()
    if spec is not None and ax.axison:  # the empty places of a grid are switched off
      place = spec.rowspan.start, spec.colspan.start
      places.setdefault(place, []).append(ax.get_tightbbox(renderer) or ax.bbox)
  if len({column for _, column in places}) < 2:
    return []
  cells = {place: Bbox.union(boxes) for place, boxes in places.items()}
  # The panels of a row are equally high.
  rows = {row: Bbox.union([cell for (own, _), cell in cells.items() if own == row])
          for row, _ in cells}
  found = [Bbox.from_extents(cell.x0, rows[row].y0, cell.x1, rows[row].y1)
           for (row, _), cell in sorted(cells.items(), key=lambda pair: pair[0])]
  found += [legend.get_window_extent(renderer) for legend in figure.legends]
  share = lambda value, start, size: round(min(max((value - start) / size, 0), 1), 4)
  panels = []
  for one in found:
    inches = Bbox.from_extents(*(edge / DPI for edge in one.extents)).padded(0.04)
    panels.append([share(inches.x0, box.x0, box.width), 1 - share(inches.y1, box.y0, box.height),
                   share(inches.x1, box.x0, box.width), 1 - share(inches.y0, box.y0, box.height)])
  return panels


def _colour_bar(figure: Figure, ax: Axes, image: AxesImage, name: str,
                ticks: Sequence[float] | None = None) -> Colorbar:
  """A colour bar as high as the picture beside it."""
  bar = figure.colorbar(image, cax=ax.inset_axes((1.03, 0, 0.05, 1)), ticks=ticks)
  bar.set_label(name, fontsize=_FONT - 1)
  bar.ax.tick_params(labelsize=_FONT - 2)
  return bar


def _curve(ax: Axes, rows: Rows, key: str, name: str, colour: str, marker: str = 'o',
           line: str = '-') -> None:
  """Draws a key of metric rows against step; nothing where no row has it."""
  points = [(row['step'], row[key]) for row in rows if isinstance(row.get(key), (int, float))]
  if points:
    ax.plot(*zip(*points), color=colour, linewidth=2, label=name, marker=marker, markersize=3.5,
            linestyle=line)
