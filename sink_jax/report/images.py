"""Pictures of a page: runs side by side, and PNGs as small as a page that holds them needs."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from PIL import Image

from sink_jax.evaluate import plots
from sink_jax.evaluate.plots import HeadMaps, strongest_and_weakest
from sink_jax.report.records import RunRecord

_COLOURS = 64  # with a palette a picture takes a quarter of the space


def sink_curves(runs: Sequence[RunRecord]) -> bytes:
  """Sink_1 and the largest importance of the first token against step, a line per run, as a PNG.

  Runs without probe rows are left out. Dashed lines are of proxy scores, dotted ones of the extra
  key.
  """
  probed = [(run, run.probe) for run in runs if run.probe is not None]
  # The legend below the axes has three names in a row.
  figure, axes = plots.canvas(10.5, 4.0 + 0.22 * -(-len(probed) // 3), columns=2)
  rate, importance = axes[0]
  for i, (run, probe) in enumerate(probed):
    curves, name = probe.curves, run.name + '*' * run.proxy
    style = dict(color=plots.COLOURS[i % len(plots.COLOURS)], linewidth=2,
                 linestyle='--' if run.proxy else '-', marker='osD^vPX'[i % 7], markersize=6,
                 markevery=(i, len(probed)))  # lines that coincide stay apart by markers
    rate.plot(curves.step, curves.sink_1, label=name, **style)
    if probe.sink_extra_key is not None:  # the same colour as the run's Sink_1
      rate.plot(curves.step, curves.sink_extra_key, label=f'{name}: {plots.SINK_EXTRA_KEY}',
                **style | dict(linestyle=':', marker=''))
    importance.plot(curves.step, curves.largest_importance, **style)
  # Runs of one group may have been probed with thresholds of their own; every one gets a line.
  epsilons = sorted({run.known_setup.epsilon for run, _ in probed})
  for epsilon in epsilons:
    importance.axhline(epsilon, color='#555555', linewidth=1.2, linestyle=':')
    importance.annotate(f'ε = {epsilon:g}', (1, epsilon), (-3, 3), ha='right', fontsize=9, color='#555555',
                        xycoords=('axes fraction', 'data'), textcoords='offset points')
  rate.set_ylim(-4, 104)  # whole markers at 0 % and at 100 %
  largest = max((value for _, probe in probed for value in probe.curves.largest_importance), default=0)
  importance.set_ylim(0, max(1.5 * max(epsilons), 1.08 * largest))
  for ax, title, y in (
      (rate, f'Sink rate {plots.SINK_1} of the first token', '% of heads'),
      (importance, 'Largest importance of the first token', 'importance')):
    plots.label(ax, title, 'step', y)
    ax.grid(alpha=0.25)
  figure.legend(loc='outside lower center', ncols=min(3, len(rate.lines)), frameon=False,
                fontsize=10.5)
  return png(figure)


def strongest_heads(maps: Mapping[str, HeadMaps]) -> bytes:
  """The strongest sink head of every run; the raw weights too where they differ. A PNG."""
  # The proxy comes first, because the head was chosen by it.
  panels = [(name, heads, proxy) for name, heads in maps.items()
            for proxy in ((True, False) if heads.proxy else (True,))]
  across = min(3, len(panels))
  down = -(-len(panels) // across)
  figure, axes = plots.canvas(max(5.2, 3.7 * across), 3.6 * down, down, across, len(panels))
  for ax, (name, heads, proxy) in zip(axes.flat, panels):
    plots.head_panel(ax, heads, strongest_and_weakest(heads.importance)[0], proxy, name)
  return png(figure)


def png(figure: Figure) -> bytes:
  """A picture with a palette."""
  raw = io.BytesIO()
  plots.save(figure, raw)
  return with_palette(raw)


def with_palette(raw: io.BytesIO) -> bytes:
  """The same picture in a quarter of the space."""
  return _encoded(Image.open(raw))


def shrunk(pictures: Mapping[str, bytes], limit: int) -> Mapping[str, bytes]:
  """Pictures by name, made smaller together until they take about `limit` bytes at most."""
  while (total := sum(map(len, pictures.values()))) > limit:
    # A picture's bytes grow with its area, so that the root of the ratio nearly suffices.
    scale = max(0.5, min(0.9, (limit / total) ** 0.5))
    smaller = {}
    for name, picture in pictures.items():
      image = Image.open(io.BytesIO(picture))
      size = [max(1, round(scale * side)) for side in image.size]
      # Resampling mixes colours, which a palette cannot hold: it is RGB here, and gets one anew.
      small = image.convert('RGB').resize(size, Image.Resampling.LANCZOS)
      smaller[name] = _encoded(small)
    pictures = smaller
  return pictures


def webp(picture: bytes) -> tuple[int, bytes]:
  """The width of a picture in pixels, and the picture as a WebP without loss, a fifth smaller than a PNG."""
  image, drawn = Image.open(io.BytesIO(picture)), io.BytesIO()
  image.convert('RGB').save(drawn, 'webp', lossless=True)
  return image.width, drawn.getvalue()


def _encoded(image: Image.Image) -> bytes:
  """A PNG with a palette."""
  small = io.BytesIO()
  # Without transparency, which the median cut of `quantize` cannot take.
  image.convert('RGB').quantize(_COLOURS).save(small, 'png', optimize=True)
  return small.getvalue()
