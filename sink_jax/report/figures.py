"""Pictures of runs, drawn from their tables: a thin line or a dot for a run, a thick line for the mean of seeds.

Runs that are no valid evidence are grey, dashed and end in a cross; no mean has them.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from PIL import Image

from sink_jax.attention.mask import Prefix, Window
from sink_jax.evaluate import plots
from sink_jax.evaluate.plots import COLOURS, HeadMaps, canvas, label
from sink_jax.report.runs import Runs

WIDTH = 6.2  # inches: with letters of 11 points a picture can be read on a phone
GREY = '#8a8a8a'
_COLOURS = (*COLOURS, '#8C6D31', '#7B3294', '#00798C', '#555555')
AXES = {'sink_1': 'Sink_1 in % of heads', 'sink_star': 'Sink_* in % of heads', 'valid_loss': 'validation loss (nats)',
        'train_loss': 'training loss (nats)', 'largest_importance': 'largest importance of token 1',
        'value_ratio': 'least value norm ratio', 'hidden_ratio': 'hidden norm ratio', 'grad_norm': 'gradient norm',
        'window_absolute': 'weight of token 1', 'window_relative': 'weight of first key of the window'}
_RATES = ('sink_1', 'sink_star')


def save(figure: Figure, path: Path) -> None:
  """Writes a PNG of 64 colours, which takes a fifth of the space."""
  raw = io.BytesIO()
  figure.savefig(raw, dpi=125, format='png', bbox_inches='tight')
  Image.open(raw).convert('RGB').quantize(64, Image.Quantize.MAXCOVERAGE, 3, dither=Image.Dither.NONE).save(
      path, optimize=True)


def lines(ax: Axes, runs: Runs, table: pd.DataFrame, trial: str, metric: str, colour: str, name: str,
          x: str = 'step', style: str = '-') -> bool:
  """Draws a metric of a trial against 'step', or 'block' at the last probe; whether there was any."""
  data = runs.metrics[(runs.metrics.metric == metric) & runs.metrics.run.isin(table.run[table.trial == trial])]
  data = data[data.block.notna() == (x == 'block')]
  if x == 'block':
    data = data[data.step.eq(data.groupby('run').step.transform('max')) | data.step.isna()]
  if data.empty:
    return False
  # Stored curves may have only some of the steps; single steps of training losses are noise.
  values = data.pivot_table(index=x, columns='run', values='value').interpolate('index', limit_area='inside')
  if len(values) > 100:
    values = values.rolling(len(values) // 25, min_periods=1, center=True).mean()
  valid = table.set_index('run').valid.reindex(values.columns) == ''
  for run in values.columns:
    one, good = values[run].dropna(), valid[run]
    ax.plot(one.index, one, color=colour if good else GREY, linewidth=0.9, alpha=0.55 if good else 0.9,
            linestyle=style if good else (0, (2, 2)), zorder=2 if good else 4)
    if not good and len(one):
      ax.plot(one.index[-1:], one[-1:], 'x', color=GREY, markersize=7, markeredgewidth=1.8, clip_on=False, zorder=4)
  mean = values.loc[:, valid].dropna().mean(axis=1)
  crossed = f', {(~valid).sum()} crossed out' * bool((~valid).any())
  ax.plot(mean.index, mean, color=colour if valid.any() else GREY, linewidth=2.3, linestyle=style,
          marker='o' if len(mean) < 12 else '', markersize=4, label=f'{name} (n = {valid.sum()}{crossed})')
  return True


def curves(runs: Runs, table: pd.DataFrame, trials: Mapping[str, str], metrics: Sequence[str], x: str = 'step',
           title: str = '') -> Figure:
  """A panel for each metric, a colour for each trial; trials: {trial: its name in the legend}."""
  known = set(runs.metrics.metric[runs.metrics.run.isin(table.run[table.trial.isin(list(trials))])])
  shown = [metric for metric in metrics if metric in known] or list(metrics[:1])
  figure, axes = canvas(WIDTH, 2.7 * len(shown) + 0.6 + 0.2 * len(trials), len(shown))
  found = {}
  for ax, metric in zip(axes[:, 0], shown):
    for i, (trial, name) in enumerate(trials.items()):
      if lines(ax, runs, table, trial, metric, _COLOURS[i % len(_COLOURS)], name, x):
        found[trial] = found.get(trial) or ax.get_lines()[-1]
      if metric == 'sink_1':  # the extra key's, in the colour of its trial
        lines(ax, runs, table, trial, 'sink_star', _COLOURS[i % len(_COLOURS)], '', x, ':')
    label(ax, title if ax is axes[0, 0] else '', {'block': 'block (0: the embedding)'}.get(x, x), AXES.get(metric, metric))
    _scale(ax, metric, x)
  figure.legend(handles=list(found.values()), loc='outside lower center', frameon=False, fontsize=9.5,
                ncols=2 if max(map(len, trials.values())) > 14 else min(3, max(1, len(found))))
  return figure


def panels(runs: Runs, table: pd.DataFrame, trials: Mapping[str, str], title: str) -> Figure:
  """Sink_1 against steps, a panel for each trial, and dotted Sink_* of its extra key."""
  figure, axes = canvas(WIDTH, 2.5 * -(-len(trials) // 2) + 0.4, -(-len(trials) // 2), 2, len(trials))
  for ax, (trial, name), colour in zip(axes.flat, trials.items(), COLOURS):
    lines(ax, runs, table, trial, 'sink_1', colour, 'Sink_1')
    star = lines(ax, runs, table, trial, 'sink_star', colour, 'Sink_*', style=':')
    of = table[(table.trial == trial) & (table.valid == '')]
    bad = len(table[table.trial == trial]) - len(of)
    words = f'{of.sink_1.mean():.0f} %' if len(of) else 'not testable'
    words += f', Sink_* of the key {of.sink_star.mean():.0f} %' * (star and len(of) > 0)
    label(ax, f'{name}\n{words} (n = {len(of)}' + f', {bad} crossed out' * bool(bad) + ')', 'step', 'Sink_1 in % of heads')
    ax.title.set_fontsize(10)
    _scale(ax, 'sink_1', 'step')
    ax.set_ylim(-4, max(60.0, ax.get_ylim()[1]))
  figure.suptitle(title, fontsize=12)
  return figure


def sweep(table: pd.DataFrame, trials: Sequence[str], x: str, metrics: Sequence[str], title: str) -> Figure:
  """Ends of runs against a column of the table, such as 'unique_tokens': a dot for a run, a line for means."""
  figure, axes = canvas(WIDTH, 2.4 * len(metrics) + 0.3, len(metrics))
  of = table[table.trial.isin(list(trials)) & table[x].notna()]
  for ax, metric in zip(axes[:, 0], metrics):
    for good, colour, marker in ((True, COLOURS[0], 'o'), (False, GREY, 'x')):
      some = of[(of.valid == '') == good]
      ax.plot(some[x], some[metric], marker, color=colour, markersize=5)
    mean = of[of.valid == ''].groupby(x)[metric].mean()
    ax.plot(mean.index, mean, color=COLOURS[0], linewidth=1.5)
    ax.set_xscale('log')
    label(ax, title if ax is axes[0, 0] else '', x.replace('_', ' '), AXES.get(metric, metric))
    _scale(ax, metric, x)
  return figure


def scatter(pairs: pd.DataFrame, title: str, level: float = 10) -> Figure:
  """The paper's Sink_1 against ours, a dot for a trial; columns trial, paper, ours, crossed (no valid run).

  Dots in the shaded quarters lie on different sides of the level; up to 12 of them have names.
  """
  figure, axes = canvas(WIDTH, 5.6)
  ax = axes[0, 0]
  limit = max(60.0, 1.06 * np.nanmax(pairs[['paper', 'ours']].to_numpy(float), initial=0))
  ax.set(xlim=(-2, limit), ylim=(-2, limit))
  for box in (((-2, level), (level, limit)), ((level, limit), (-2, level))):
    ax.fill_between(*box[0:1], *box[1], color='#f3e3d3', linewidth=0, zorder=0)
  ax.plot((0, limit), (0, limit), color=GREY, linewidth=0.8, linestyle=':')
  ax.axhline(level, color=GREY, linewidth=0.8)
  ax.axvline(level, color=GREY, linewidth=0.8)
  good, bad = pairs[~pairs.crossed], pairs[pairs.crossed]
  apart = (good.paper >= level) != (good.ours >= level)
  ax.plot(good.paper[~apart], good.ours[~apart], 'o', color=COLOURS[0], markersize=5, alpha=0.75)
  ax.plot(good.paper[apart], good.ours[apart], 'o', color=COLOURS[1], markersize=5, alpha=0.9)
  ax.plot(bad.paper, bad.ours, 'x', color=GREY, markersize=6, markeredgewidth=1.6)
  named = good[apart].assign(far=(good.paper - good.ours).abs()).sort_values('far', ascending=False).head(12)
  _names(ax, named.trial, named.paper, named.ours)
  label(ax, title, "the paper's Sink_1 in %", 'our Sink_1 in %, mean of valid seeds')
  return figure


def _names(ax: Axes, names: Sequence[str], xs: Sequence[float], ys: Sequence[float]) -> None:
  """Writes names next to dots, each at the nearest place where it covers no other name and no dot."""
  per_x, per_y = np.diff(ax.get_xlim())[0] / 100, np.diff(ax.get_ylim())[0] / 100
  taken = [(line.get_xdata()[i], line.get_ydata()[i], 1.5 * per_x, 1.5 * per_y)  # type: ignore[index]
           for line in ax.get_lines() if line.get_linestyle() == 'None' for i in range(len(line.get_xdata()))]  # type: ignore[arg-type]
  for name, x, y in sorted(zip(names, xs, ys), key=lambda row: -row[1]):
    width, height = 1.55 * len(name) * per_x, 3.2 * per_y
    places = sorted(((dx, dy) for dx in range(-60, 61, 3) for dy in range(-45, 61, 2)),
                    key=lambda d: 2 * d[0] ** 2 + d[1] ** 2)
    for dx, dy in places:  # of the left lower corner
      left, low = x + dx * per_x, y + dy * per_y
      inside = ax.get_xlim()[0] < left and left + width < ax.get_xlim()[1] and ax.get_ylim()[0] < low
      if inside and low + height < ax.get_ylim()[1] and not any(
          left < a + w and a - w < left + width and low < b + h and b - h < low + height for a, b, w, h in taken):
        ax.annotate(name, (x, y), (left, low), fontsize=8.5, va='bottom', color='#333333',
                    arrowprops=dict(arrowstyle='-', color=GREY, linewidth=0.6, shrinkA=0, shrinkB=2))
        taken.append((left + width / 2, low + height / 2, width / 2, height / 2))
        break


def forest(rows: pd.DataFrame, title: str, measures: Mapping[str, tuple[str, bool]]) -> Figure:
  """Differences from a baseline, a row for a trial, sorted by the first measure, with 99 % intervals.

  rows: as `compare.against` returns them. measures: {metric: (name of its axis, whether it is a factor)}.
  """
  first = next(iter(measures))
  order = rows[rows.metric == first].sort_values('difference', ascending=False, na_position='first').trial.tolist()
  figure, axes = canvas(WIDTH, 1.3 + 0.215 * len(order), 1, len(measures))
  for ax, (metric, (name, factor)) in zip(axes[0], measures.items()):
    of = rows[rows.metric == metric].set_index('trial').reindex(order)
    seen = of.difference.dropna()
    span = max(1.15 * seen.abs().max() if len(seen) else 0, 1e-3)
    for y, (_, row) in enumerate(of.iterrows()):
      if not np.isfinite(row.difference):
        ax.plot(0, y, 'x', color=GREY, markersize=6, markeredgewidth=1.6)
        continue
      colour = {'lower': COLOURS[0], 'removed': COLOURS[0], 'moved': COLOURS[2], 'higher': COLOURS[1]}.get(
          row.verdict.split()[0], GREY)
      # An interval of few seeds may be wider than the axis.
      ax.plot(np.clip((row.low, row.high), -span, span), (y, y), color=colour, linewidth=1.4)
      ax.plot(row.difference, y, 'x' if row.verdict == 'not testable' else 'o', color=colour, markersize=5)
    ax.axvline(0, color='black', linewidth=0.8)
    ax.set_xlim(-1.06 * span, 1.06 * span)
    ax.set_yticks(range(len(order)), order if ax is axes[0, 0] else [''] * len(order), fontsize=9)
    ax.set_ylim(-0.7, len(order) - 0.3)
    if factor:
      ticks = [t for t in (0.1, 0.2, 0.5, 1, 2, 5, 10) if abs(np.log(t)) <= span]
      ax.set_xticks(np.log(ticks), [f'{t:g}' for t in ticks])
    ax.set_xlabel(name, fontsize=9.5)
    ax.tick_params('x', labelsize=9)
    ax.grid(axis='both', alpha=0.2)
  figure.suptitle(title, fontsize=11.5)
  return figure


def masks() -> Figure:
  """Which keys a query sees: causal, with a prefix (Figure 5 left) and in a window (Figure 6 left)."""
  figure, axes = canvas(WIDTH, 2.5, 1, 3)
  query, key = np.mgrid[:12, :12]
  for ax, (name, mask) in zip(axes[0], {'causal': Window(12), 'prefix of 5': Prefix(5), 'window of 5': Window(5)}.items()):
    ax.imshow(mask.keep(query, key), cmap='Blues', vmin=0, vmax=1.3, extent=(0.5, 12.5, 12.5, 0.5))
    label(ax, name, 'key', 'query')
  return figure


def attention_maps(maps: Mapping[str, tuple[HeadMaps, bool]], length: int = 32) -> Figure:
  """The head of each run with the largest importance of token 1: weights of its first tokens.

  maps: {name: (its maps, whether it has an extra key)}. An extra key has the last column, `*`: what the row
  has left of 1. Rows of unnormalised weights are divided by their sums.
  """
  across = min(2, len(maps))
  figure, axes = canvas(WIDTH, 3.1 * -(-len(maps) // across), -(-len(maps) // across), across, len(maps))
  for ax, (name, (of, extra)) in zip(axes.flat, maps.items()):
    # With an extra key the head that attends most to that.
    taken = 1 - of.raw.sum(-1).mean(-1) if extra else of.importance
    layer, head = plots.strongest_and_weakest(taken)[0]
    weights = (of.raw if extra else of.normalized)[layer, head][:length, :length].astype(float)
    star = 1 - weights.sum(1, keepdims=True)
    weights[np.triu_indices(len(weights), 1)] = np.nan
    if extra:
      weights = np.concatenate([weights, np.full_like(star, np.nan), star], 1)
    image = ax.imshow(np.sqrt(np.clip(weights, 0, 1)), cmap='viridis', vmin=0, vmax=1, interpolation='nearest')
    ax.set_facecolor('#e8e8e8')
    ax.set_xticks([0, len(weights) // 2 - 1, len(weights) - 1] + [len(weights) + 1] * extra,
                  ['1', str(len(weights) // 2), str(len(weights))] + ['*'] * extra)
    ax.set_yticks([])
    kind = 'rows divided by their sums' if of.proxy and not extra else 'attention'
    label(ax, f'{name}\nblock {of.blocks[layer]}, head {head + 1}, importance {of.importance[layer, head]:.2f}', 'key', 'query')
    ax.title.set_fontsize(9.5)
    bar = figure.colorbar(image, ax=ax, shrink=0.8, ticks=[0, 0.3 ** 0.5, 1])
    bar.ax.set_yticklabels(['0', '0.3', '1'])
    bar.set_label(kind, fontsize=8.5)
  return figure


def _scale(ax: Axes, metric: str, x: str) -> None:
  settings: dict[str, Any] = {}
  if metric in _RATES:
    settings = {'ylim': (-4, max(30, ax.get_ylim()[1]))}
  elif metric in ('hidden_ratio', 'value_ratio', 'grad_norm'):
    settings = {'yscale': 'log'}
  ax.set(**settings)
  if settings.get('yscale'):
    ax.yaxis.set(major_locator=LogLocator(subs=(1, 2, 5)), minor_locator=NullLocator(),
                 major_formatter=FuncFormatter(lambda value, _: f'{value:g}'))
  ax.grid(alpha=0.25)
  if x == 'block':
    ax.xaxis.get_major_locator().set_params(integer=True)
