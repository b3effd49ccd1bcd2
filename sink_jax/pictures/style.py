"""The style of all pictures: sizes, colours, words for quantities, axes, PNG files.

Figures are made without pyplot, so that nothing global changes and no display is needed.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from PIL import Image

Row = dict[str, Any]
Columns = tuple[str, ...]
# Okabe and Ito (2008): these differ for any colour vision, and in print by their lightness.
COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#000000')
LINES = (*COLOURS, '#8C6D31', '#7B3294', '#00798C', '#555555')
GREY = '#8a8a8a'
SINK_1 = r'$\mathrm{Sink}_1^{\epsilon}$'
FONT = 11
WIDTH = 6.2  # inches: with letters of 11 points a picture can be read on a phone
_DPI = 115
_WORDS = {
  'sink_1': f'{SINK_1} (% of heads)',
  'sink_t': r'$\mathrm{Sink}_t^{\epsilon}$',
  'epsilon': 'ε',
  'length': 'T (tokens)',
  'percent': '%',
  'norm_product': r'$\|q\|\|k\|$',
  'score': r'$q k^\top / \sqrt{d_h}$',
  'map': 'attention',
  'raw_map': 'raw weights',
  'proxy_map': 'rows divided by their sums',
  'importance': 'importance of the first token',
  'position': 'position t',
  'first': 'first token',
  'others': 'mean of the others',
  'tokens': 'tokens read',
  'size': 'cache (tokens)',
  'attention': 'attention on the first token',
  'valid_loss': 'validation loss (nats)',
  'train_loss': 'training loss (nats)',
  'value_ratio': 'least value norm ratio',
  'max_over_median': 'largest activation / median',
  'grad_norm': 'gradient norm',
  'window': 'window (tokens)',
  'unique_tokens': 'different tokens',
  'window_absolute': 'token 1 (times uniform)',
  'window_relative': 'first key (times uniform)',
}


def word(column: str) -> str:
  """A column of a table in words."""
  return _WORDS.get(column, column.replace('_', ' '))


def groups(rows: Iterable[Row], columns: Columns) -> dict[str, list[Row]]:
  """Rows by the words for their values of columns, in the order in which they come."""
  found: dict[str, list[Row]] = {}
  for row in rows:
    words = []
    for name in columns:
      value = row[name]
      is_number = isinstance(value, (int, float))
      words.append(f'{word(name)} = {value}' if is_number else value or 'unchanged')
    found.setdefault(', '.join(words), []).append(row)
  return found


def canvas(
  panels: int, across: int, width: float, height: float, below: float = 0.0
) -> tuple[Figure, list[Axes]]:
  """A white figure, and its axes from left to right.

  Args:
    panels: how many, at most `across` in a line.
    width, height: of a panel, in inches; below: more height, for a legend.
  """
  across = max(1, min(across, panels))
  down = -(-panels // across)
  layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08)
  size = width * across, height * down + below
  figure = Figure(size, facecolor='white', layout=layout)
  axes = figure.subplots(down, across, squeeze=False)
  for ax in axes.flat[panels:]:
    ax.set_axis_off()
  return figure, list(axes.flat[:panels])


def label(ax: Axes, title: str, x: str, y: str) -> None:
  """Sets the title and the names of both axes."""
  ax.set_title(title, fontsize=FONT)
  ax.set_xlabel(x, fontsize=FONT)
  ax.set_ylabel(y, fontsize=FONT)
  ax.tick_params(labelsize=FONT - 1)


def legend(figure: Figure, columns: int) -> None:
  """Draws one legend below all panels, with each name once."""
  handles = {}
  for ax in figure.axes:
    for handle, name in zip(*ax.get_legend_handles_labels()):
      handles.setdefault(name, handle)
  if handles:
    figure.legend(
      handles=list(handles.values()),
      labels=list(handles),
      loc='outside lower center',
      frameon=False,
      fontsize=FONT - 1.5,
      ncols=min(columns, len(handles)),
    )


def logarithmic(ax: Axes) -> None:
  """Makes the axis of y logarithmic, with plain numbers."""
  ax.set_yscale('log')
  ax.yaxis.set(
    major_locator=LogLocator(subs=(1, 2, 5)),
    minor_locator=NullLocator(),
    major_formatter=FuncFormatter(lambda value, _: f'{value:g}'),
  )


def colour_bar(ax: Axes, image: AxesImage, name: str, ticks: Sequence[float] | None = None) -> Axes:
  """Draws a colour bar as high as the picture next to it, and returns its axes."""
  figure = ax.get_figure()
  assert figure is not None
  bar = figure.colorbar(image, cax=ax.inset_axes((1.03, 0, 0.05, 1)), ticks=ticks)
  bar.set_label(name, fontsize=FONT - 1)
  bar.ax.tick_params(labelsize=FONT - 2)
  return bar.ax


def png(figure: Figure) -> bytes:
  """A figure as a PNG file.

  It has 64 colours, which takes a fifth of the space, and does not name Matplotlib's version, so
  that equal figures are equal files.
  """
  raw, file = io.BytesIO(), io.BytesIO()
  figure.savefig(raw, dpi=_DPI, format='png', bbox_inches='tight')
  image = Image.open(raw).convert('RGB')
  image = image.quantize(64, Image.Quantize.MAXCOVERAGE, 3, dither=Image.Dither.NONE)
  image.save(file, 'png', optimize=True)
  return file.getvalue()
