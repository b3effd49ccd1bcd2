"""Figures that set runs side by side."""

from __future__ import annotations

from sink_jax.evaluate import plots
from sink_jax.evaluate.maps import HeadMaps


def sink_curves(runs: list[dict], path) -> None:
  """Sink_1 and the largest importance of the first token against step, a line per run.

  runs: those of `read_run` that have probe rows. Dashed lines are of proxy scores,
  dotted ones of the bias slot.
  """
  height = 4.0 + 0.22 * -(-len(runs) // 3)
  figure, axes = plots.canvas(10.5, height, columns=2)
  rate, importance = axes[0]
  for i, run in enumerate(runs):
    curves = run['curves']
    style = dict(color=plots.COLOURS[i % len(plots.COLOURS)], linewidth=2,
                 linestyle='--' if run['proxy'] else '-', marker='osD^vPX'[i % 7], markersize=6,
                 markevery=(i, max(1, len(runs))))  # lines that coincide stay apart by markers
    name = run['name'] + ('*' if run['proxy'] else '')
    rate.plot(curves['step'], curves['sink_1'], label=name, **style)
    if run['sink_bias_slot'] is not None:
      rate.plot(curves['step'], curves['sink_bias_slot'], label=f'{name}: {plots.SINK_EXTRA_KEY}',
                **style | dict(linestyle=':', marker=''))
    importance.plot(curves['step'], curves['largest_importance'], **style)
  for epsilon in sorted({run['epsilon'] for run in runs}):
    plots.threshold(importance, epsilon)
  rate.set_ylim(-4, 104)
  plots.importance_limits(importance, max(run['epsilon'] for run in runs))
  plots.label(rate, f'Sink rate {plots.SINK_1} of the first token', 'step', '% of heads')
  plots.label(importance, 'Largest importance of the first token', 'step', 'importance')
  for ax in (rate, importance):
    ax.grid(alpha=0.25)
  figure.legend(loc='outside lower center', ncols=min(3, len(rate.lines)), frameon=False, fontsize=10.5)
  plots.save(figure, path)


def strongest_heads(maps: dict[str, HeadMaps], path) -> None:
  """The strongest sink head of every run; the raw weights too where they are not the same."""
  panels = [(name, of, proxy) for name, of in maps.items()
            for proxy in ((True, False) if of.proxy else (True,))]
  across = min(3, len(panels))
  down = -(-len(panels) // across)
  figure, axes = plots.canvas(max(5.2, 3.7 * across), 3.6 * down, down, across)
  for ax in axes.flat[len(panels):]:
    ax.set_axis_off()
  for ax, (name, of, proxy) in zip(axes.flat, panels):
    plots.head_panel(figure, ax, of, of.head(strongest=True), proxy, name)
  plots.save(figure, path)
