"""Figures that set runs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sink_jax.evaluate import plots
from sink_jax.evaluate.maps import HeadMaps
from sink_jax.report.images import png
from sink_jax.report.records import RunRecord


def sink_curves(runs: Sequence[RunRecord]) -> bytes:
  """Sink_1 and the largest importance of the first token against step, a line per run, as a PNG.

  Runs without probe rows are left out. Dashed lines are of proxy scores, dotted ones of the extra
  key.
  """
  probed = [(run, run.probe) for run in runs if run.probe is not None]
  # The legend below the axes has three names in a row.
  height = 4.0 + 0.22 * -(-len(probed) // 3)
  figure, axes = plots.canvas(10.5, height, columns=2)
  rate, importance = axes[0]
  for i, (run, probe) in enumerate(probed):
    curves, mark = probe.curves, '*' if run.proxy else ''
    style = dict(color=plots.COLOURS[i % len(plots.COLOURS)], linewidth=2,
                 linestyle='--' if run.proxy else '-', marker='osD^vPX'[i % 7], markersize=6,
                 markevery=(i, len(probed)))  # lines that coincide stay apart by markers
    rate.plot(curves.step, curves.sink_1, label=run.name + mark, **style)
    if probe.sink_extra_key is not None:  # the same colour as the run's Sink_1
      rate.plot(curves.step, curves.sink_extra_key,
                label=f'{run.name}{mark}: {plots.SINK_EXTRA_KEY}',
                **style | dict(linestyle=':', marker=''))
    importance.plot(curves.step, curves.largest_importance, **style)
  # Runs of one group may have been probed with thresholds of their own; every one gets a line.
  epsilons = sorted({run.known_setup.epsilon for run, _ in probed})
  for epsilon in epsilons:
    plots.threshold(importance, epsilon)
  # Room for whole markers at 0 % and at 100 %.
  rate.set_ylim(-4, 104)
  plots.importance_limits(importance, max(epsilons))
  plots.label(rate, f'Sink rate {plots.SINK_1} of the first token', 'step', '% of heads')
  plots.label(importance, 'Largest importance of the first token', 'step', 'importance')
  for ax in (rate, importance):
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
  figure, axes = plots.canvas(max(5.2, 3.7 * across), 3.6 * down, down, across)
  # The grid may have more axes than there are panels.
  for ax in axes.flat[len(panels):]:
    ax.set_axis_off()
  for ax, (name, heads, proxy) in zip(axes.flat, panels):
    plots.head_panel(figure, ax, heads, heads.head(strongest=True), proxy, name)
  return png(figure)
