"""Pictures of runs, drawn from tables: a thin line or a dot for a run, a thick line for a mean.

Runs that are not valid evidence are grey, dashed and end in a cross; means leave them out.
"""
# pandas does not say whether an expression is a table or a column.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from sink_jax.evaluate import plots
from sink_jax.evaluate.plots import COLOURS, HeadMaps, canvas, label
from sink_jax.report.compare import LEAST, Measure
from sink_jax.report.events import EVENTS, THRESHOLDS, TRIALS
from sink_jax.report.runs import EMERGED, Runs

_LENGTH = 32  # tokens of an attention map
WIDTH = 6.2  # inches: with letters of 11 points a picture can be read on a phone
GREY = '#8a8a8a'
_VERDICTS = {'lower': COLOURS[0], 'removed': COLOURS[0], 'moved': COLOURS[2], 'higher': COLOURS[1]}
LINES = (*COLOURS, '#8C6D31', '#7B3294', '#00798C', '#555555')
_AXES = {
  'sink_1': 'Sink_1 in % of heads',
  'valid_loss': 'validation loss (nats)',
  'train_loss': 'training loss (nats)',
  'value_ratio': 'least value norm ratio',
  'max_over_median': 'largest activation / median',
  'hidden_ratio': 'hidden norm ratio',
  'grad_norm': 'gradient norm',
  'window': 'window (tokens)',
  'unique_tokens': 'different tokens',
  'block': 'block (0: the embedding)',
  'window_absolute': 'token 1 (times uniform)',
  'window_relative': 'first key (times uniform)',
}


def lines(
  ax: Axes,
  runs: Runs,
  table: pd.DataFrame,
  trial: str,
  metric: str,
  colour: str,
  x: str,
  style: str = '-',
) -> bool:
  """Draws a trial's metric by 'step', or by 'block' at the last probe; True if it exists."""
  data = runs.metrics[
    runs.metrics.metric.eq(metric) & runs.metrics.run.isin(table.run[table.trial == trial])
  ]
  data = data[data.block.notna() == (x == 'block')]
  if x == 'block':
    data = data[data.step.eq(data.groupby('run').step.transform('max')) | data.step.isna()]
  if data.empty:
    return False
  # Stored curves may have only some of the steps; single steps of training losses are noise.
  values = data.pivot_table(index=x, columns='run', values='value').interpolate(
    'index', limit_area='inside'
  )
  if len(values) > 100:
    values = values.rolling(len(values) // 25, min_periods=1, center=True).mean()
  valid = table.set_index('run').valid.reindex(values.columns) == ''
  for run in values.columns:
    one, good = values[run].dropna(), valid[run]
    ax.plot(
      one.index,
      one,
      color=colour if good else GREY,
      linewidth=0.9,
      alpha=0.55 if good else 0.9,
      linestyle=style if good else (0, (2, 2)),
      zorder=2 if good else 4,
    )
    if not good and len(one):
      ax.plot(
        one.index[-1:], one[-1:], 'x', color=GREY, markersize=7, markeredgewidth=1.8, zorder=4
      )
  mean = values.loc[:, valid].dropna().mean(axis=1)
  crossed = f', {(~valid).sum()} crossed out' * bool((~valid).any())
  ax.plot(
    mean.index,
    mean,
    color=colour if valid.any() else GREY,
    linewidth=2.3,
    linestyle=style,
    marker='o' if len(mean) < 12 else '',
    markersize=4,
    label=f'{trial} (n = {valid.sum()}{crossed})',
  )
  return True


def curves(
  runs: Runs,
  table: pd.DataFrame,
  trials: Sequence[str],
  metrics: Sequence[str],
  x: str = 'step',
  title: str = '',
  dotted: str = 'sink_star',
) -> Figure:
  """A panel for each available metric, a colour for each trial.

  dotted: the metric that is drawn into the panel of Sink_1, and into every panel of blocks.
  """
  known = set(runs.metrics.metric[runs.metrics.run.isin(table.run[table.trial.isin(trials)])])
  shown = [metric for metric in metrics if metric in known] or metrics[:1]
  figure, axes = canvas(WIDTH, 2.7 * len(shown) + 0.6 + 0.2 * len(trials), len(shown))
  found = {}
  for ax, metric in zip(axes[:, 0], shown):
    for i, trial in enumerate(trials):
      colour = LINES[i % len(LINES)]
      if lines(ax, runs, table, trial, metric, colour, x):
        found.setdefault(trial, ax.get_lines()[-1])
      if metric == 'sink_1' or x == 'block':
        lines(ax, runs, table, trial, dotted, colour, x, ':')
    label(ax, title if ax is axes[0, 0] else '', _AXES.get(x, x), _AXES.get(metric, metric))
    _scale(ax, metric, x)
  figure.legend(
    handles=list(found.values()),
    loc='outside lower center',
    frameon=False,
    fontsize=9.5,
    ncols=2 if max(map(len, trials)) > 14 else min(3, max(1, len(found))),
  )
  return figure


def sweep(
  table: pd.DataFrame, trials: Sequence[str], x: str, metrics: Sequence[str], title: str
) -> Figure:
  """Final values of runs against a column, such as 'window': a dot for a run, a line for means."""
  figure, axes = canvas(WIDTH, 2.4 * len(metrics) + 0.3, len(metrics))
  of = table[table.trial.isin(trials) & table[x].notna()]
  for ax, metric in zip(axes[:, 0], metrics):
    good, bad = of[of.valid == ''], of[of.valid != '']
    ax.plot(good[x], good[metric], 'o', color=COLOURS[0], markersize=5)
    ax.plot(bad[x], bad[metric], 'x', color=GREY, markersize=5)
    mean = good.groupby(x)[metric].mean()
    ax.plot(mean.index, mean, color=COLOURS[0], linewidth=1.5)
    ax.set_xscale('log')
    label(ax, title if ax is axes[0, 0] else '', _AXES[x], _AXES[metric])
    _scale(ax, metric, x)
  return figure


def events(found: pd.DataFrame) -> Figure:
  """When each event comes: a panel for each trial, a dot for each seed. found: `events.events`."""
  shown = [trial for trial in TRIALS if trial in set(found.trial)]
  names = {name: event.words for name, event in EVENTS.items()}
  last = found.step[np.isfinite(found.step)].max()
  never = 1.6 * last if last == last else 1.0
  figure, axes = canvas(WIDTH, 1.9 * len(shown) + 0.4, len(shown))
  for ax, trial in zip(axes[:, 0], shown):
    for y, name in enumerate(reversed(names)):
      for threshold, filled in zip(THRESHOLDS, (True, False)):
        of_event = found[found.trial.eq(trial) & found.event.eq(name)]
        steps = of_event[of_event.threshold == threshold].step.replace(np.inf, never)
        # Seeds lie one below the other, so that equal steps do not hide each other.
        heights = y + (0.12 if filled else -0.22) + np.linspace(0, 0.18, len(steps))
        ax.plot(
          steps,
          heights,
          'o',
          color=COLOURS[y],
          markersize=5,
          markerfacecolor=COLOURS[y] if filled else 'none',
        )
    ax.set_yticks(range(len(names)), list(reversed(names.values())), fontsize=9)
    ax.axvline(1.25 * last, color=GREY, linewidth=0.8)
    ax.set(xlim=(0, 1.1 * never), ylim=(-0.5, len(names) - 0.4))
    label(ax, trial, 'step' if trial == shown[-1] else '', '')
    ax.grid(axis='x', alpha=0.25)
  return figure


def positions(table: pd.DataFrame, trials: Sequence[str], title: str) -> Figure:
  """Sink_k of the first ten tokens against k, the mean of the valid runs of each trial."""
  figure, axes = canvas(WIDTH, 3.6)
  for trial, colour in zip(trials, LINES):
    of = table[table.trial.eq(trial) & table.valid.eq('')]
    means = of.reindex(columns=[f'sink_{k}' for k in range(1, 11)]).mean()
    axes[0, 0].plot(
      range(1, 11), means, 'o-', color=colour, markersize=4, label=f'{trial} (n = {len(of)})'
    )
  label(axes[0, 0], title, 'position k', 'Sink_k in % of heads')
  _scale(axes[0, 0], 'sink_1', 'position')
  figure.legend(loc='outside lower center', frameon=False, fontsize=9.5, ncols=3)
  return figure


def scatter(pairs: pd.DataFrame, title: str) -> Figure:
  """The paper's Sink_1 against ours, a dot for a trial.

  pairs: columns trial, value (the paper's), mean (ours), crossed (none of its runs is valid). Dots
  in the shaded quarters lie on different sides of that of emergence; up to 12 of them have names.
  """
  figure, axes = canvas(WIDTH, 5.6)
  ax = axes[0, 0]
  limit = max(60.0, 1.06 * np.nanmax(pairs[['value', 'mean']].to_numpy(float), initial=0))
  ax.set(xlim=(-2, limit), ylim=(-2, limit))
  ax.fill_between((-2, EMERGED), EMERGED, limit, color='#f3e3d3', linewidth=0, zorder=0)
  ax.fill_between((EMERGED, limit), -2, EMERGED, color='#f3e3d3', linewidth=0, zorder=0)
  ax.plot((0, limit), (0, limit), color=GREY, linewidth=0.8, linestyle=':')
  ax.axhline(EMERGED, color=GREY, linewidth=0.8)
  ax.axvline(EMERGED, color=GREY, linewidth=0.8)
  good, bad = pairs[~pairs.crossed], pairs[pairs.crossed]
  apart = (good.value >= EMERGED) != (good['mean'] >= EMERGED)
  ax.plot(good.value[~apart], good['mean'][~apart], 'o', color=COLOURS[0], markersize=5, alpha=0.75)
  ax.plot(good.value[apart], good['mean'][apart], 'o', color=COLOURS[1], markersize=5, alpha=0.9)
  ax.plot(bad.value, bad['mean'], 'x', color=GREY, markersize=6, markeredgewidth=1.6)
  farthest = (good.value - good['mean'])[apart].abs().sort_values(ascending=False).index[:12]
  _names(ax, good.loc[farthest])
  label(ax, title, "the paper's Sink_1 in %", 'our Sink_1 in %, mean of seeds')
  return figure


def _names(ax: Axes, dots: pd.DataFrame) -> None:
  """Writes names next to dots, each at the nearest place where it covers no other name or dot."""
  (left, right), (bottom, top) = ax.get_xlim(), ax.get_ylim()
  w, h = (right - left) / 100, (top - bottom) / 100
  taken = [
    (x, y, 1.5 * w, 1.5 * h)
    for line in ax.get_lines()
    if line.get_linestyle() == 'None'
    for x, y in np.transpose(line.get_data())
  ]  # middle, half of the width and of the height
  places = sorted(
    ((dx, dy) for dx in range(-60, 61, 3) for dy in range(-45, 61, 2)),
    key=lambda place: 2 * place[0] ** 2 + place[1] ** 2,
  )
  dots = dots.sort_values('mean', ascending=False)
  for name, x, y in zip(dots.trial, dots.value, dots['mean']):
    a, b = 0.78 * len(name) * w, 1.6 * h
    for dx, dy in places:
      mx, my = x + dx * w + a, y + dy * h + b
      if (
        left < mx - a
        and mx + a < right
        and bottom < my - b
        and my + b < top
        and all(abs(mx - tx) > a + tw or abs(my - ty) > b + th for tx, ty, tw, th in taken)
      ):
        ax.annotate(
          name,
          (x, y),
          (mx, my),
          fontsize=8.5,
          ha='center',
          va='center',
          color='#333333',
          arrowprops=dict(arrowstyle='-', color=GREY, linewidth=0.6, shrinkA=5, shrinkB=2),
        )
        taken.append((mx, my, a, b))
        break


def forest(rows: pd.DataFrame, title: str, measures: Mapping[str, Measure]) -> Figure:
  """Differences from a baseline (of `compare.against`), a row for a trial; intervals at 99 %.

  The trials are sorted by the first measure. Intervals of few seeds are cut at the ends of the
  axis.
  """
  first = rows[rows.metric == next(iter(measures))]
  order = first.sort_values('difference', ascending=False, na_position='first').trial.tolist()
  figure, axes = canvas(WIDTH, 1.3 + 0.215 * len(order), 1, len(measures))
  for ax, (metric, measure) in zip(axes[0], measures.items()):
    of = rows[rows.metric == metric].set_index('trial').reindex(order)
    span = max(1.15 * of.difference.abs().fillna(0).max(), 1e-3)
    for y, row in enumerate(of.itertuples()):
      middle = row.difference if np.isfinite(row.difference) else 0  # without a valid pair
      colour = _VERDICTS.get(str(row.verdict).split()[0], GREY)
      ax.plot(np.clip((row.low, row.high), -span, span), (y, y), color=colour, linewidth=1.4)
      ax.plot(middle, y, 'x' if row.n < LEAST else 'o', color=colour, markersize=5)
    ax.axvline(0, color='black', linewidth=0.8)
    ax.set(xlim=(-1.06 * span, 1.06 * span), ylim=(-0.7, len(order) - 0.3))
    ax.set_yticks(range(len(order)), order if ax is axes[0, 0] else [''] * len(order), fontsize=9)
    ax.set_xlabel(measure.heading, fontsize=9.5)
    ax.tick_params('x', labelsize=9)
    ax.grid(axis='both', alpha=0.2)
  figure.suptitle(title, fontsize=11.5)
  return figure


def attention_maps(maps: Mapping[str, tuple[HeadMaps, bool]]) -> Figure:
  """One head of each run: the weights of its first tokens.

  maps: {name: (its maps, whether it has an extra key)}. The head is the one that gives most to
  token 1, or to the extra key, which is the last column, `*`: one minus the row's sum. Rows of
  unnormalised weights, those of the extra key among them, are divided by their sums.
  """
  across = min(2, len(maps))
  down = -(-len(maps) // across)
  figure, axes = canvas(WIDTH, 3.1 * down, down, across, len(maps))
  for ax, (name, (of, extra)) in zip(axes.flat, maps.items()):
    taken = 1 - of.normalized.sum(-1).mean(-1) if extra else of.importance
    layer, head = plots.strongest_and_weakest(taken)[0]
    weights = of.normalized[layer, head][:_LENGTH, :_LENGTH].astype(float)
    rest, size = 1 - weights.sum(1, keepdims=True), len(weights)
    if not np.triu(weights, 1).any():  # causal: above the diagonal nothing is drawn
      weights[np.triu_indices(size, 1)] = np.nan
    ticks = {0: '1', size // 2 - 1: str(size // 2), size - 1: str(size)}
    if extra:
      weights = np.concatenate([weights, np.full_like(rest, np.nan), rest], 1)
      ticks = {0: '1', size // 2 - 1: str(size // 2), size + 1: '*'}
    image = ax.imshow(np.sqrt(np.clip(weights, 0, 1)), cmap='viridis', vmin=0, vmax=1)
    ax.set_facecolor('#e8e8e8')
    ax.set_xticks(list(ticks), list(ticks.values()))
    ax.set_yticks([])
    words = f'block {of.blocks[layer]}, head {head + 1}: {taken[layer, head]:.2f} to'
    label(ax, f'{name}\n{words} {"*" if extra else "token 1"}', 'key', 'query')
    ax.title.set_fontsize(9.5)
    bar = figure.colorbar(image, ax=ax, shrink=0.8, ticks=[0, 0.3**0.5, 1])
    bar.ax.set_yticklabels(['0', '0.3', '1'])
    bar.set_label('rows divided by their sums' if of.proxy else 'attention', fontsize=8.5)
  return figure


def _scale(ax: Axes, metric: str, x: str) -> None:
  if metric == 'sink_1':
    ax.set_ylim(-4, max(30, ax.get_ylim()[1]))
  if metric in ('hidden_ratio', 'value_ratio', 'grad_norm'):
    ax.set_yscale('log')
    ax.yaxis.set(
      major_locator=LogLocator(subs=(1, 2, 5)),
      minor_locator=NullLocator(),
      major_formatter=FuncFormatter(lambda value, _: f'{value:g}'),
    )
  if x == 'block':
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
  ax.grid(alpha=0.25)
