"""Pictures of runs, drawn from tables: a thin line or a dot for a run, a thick line for a mean.

Runs that are not valid evidence are grey, dashed and end in a cross; means leave them out.
"""
# pandas does not say whether an expression is a table or a column.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sink_jax.evaluate.head_maps import HeadMaps, strongest_and_weakest
from sink_jax.pictures import charts, maps
from sink_jax.pictures.style import (
  COLOURS,
  GREY,
  LINES,
  WIDTH,
  Row,
  canvas,
  label,
  legend,
  logarithmic,
  png,
  word,
)
from sink_jax.report.compare import LEAST, Measure
from sink_jax.report.events import EVENTS, THRESHOLDS, TRIALS
from sink_jax.report.runs import EMERGED, Runs

_LENGTH = 32  # tokens of an attention map
_LOGARITHMIC = 'hidden_ratio', 'value_ratio', 'grad_norm'
_VERDICTS = {
  'lower': COLOURS[0],
  'removed': COLOURS[0],
  'moved': COLOURS[2],
  'higher': COLOURS[1],
}


def files_of(drawn: Mapping[str, Figure | None]) -> dict[str, bytes]:
  """{name of a file: picture} of the figures that there are."""
  return {f'{key}.png': png(figure) for key, figure in drawn.items() if figure is not None}


def curves(
  runs: Runs,
  table: pd.DataFrame,
  trials: Sequence[str],
  metrics: Sequence[str],
  x: str = 'step',
  title: str = '',
  dotted: str = 'sink_star',
) -> Figure:
  """A panel for each available metric by 'step' or 'block', a colour for each trial.

  dotted: the metric that is drawn into the panel of Sink_1, and into every panel of blocks.
  """
  of_trials = table.run[table.trial.isin(trials)]
  known = set(runs.metrics.metric[runs.metrics.run.isin(of_trials)])
  shown = [metric for metric in metrics if metric in known] or metrics[:1]
  figure, axes = canvas(len(shown), 1, WIDTH, 2.7, below=0.6 + 0.2 * len(trials))
  for ax, metric in zip(axes, shown):
    for trial, colour in zip(trials, itertools.cycle(LINES)):
      _courses(ax, runs, table, trial, metric, x, colour)
      if metric == 'sink_1' or x == 'block':
        _courses(ax, runs, table, trial, dotted, x, colour, ':')
    _name_panel(ax, metric, x, title if ax is axes[0] else '')
  legend(figure, 2 if max(map(len, trials)) > 14 else 3)
  return figure


def _courses(
  ax: Axes,
  runs: Runs,
  table: pd.DataFrame,
  trial: str,
  metric: str,
  x: str,
  colour: str,
  style: str = '-',
) -> None:
  """Draws a trial's metric by 'step', or by 'block' at the last probe, if it exists."""
  of_trial = runs.metrics.run.isin(table.run[table.trial == trial])
  data = runs.metrics[runs.metrics.metric.eq(metric) & of_trial]
  data = data[data.block.notna() == (x == 'block')]
  if x == 'block':
    last = data.groupby('run').step.transform('max')
    data = data[data.step.eq(last) | data.step.isna()]
  if data.empty:
    return
  # Stored curves may have only some of the steps; single steps of training losses are noise.
  values = data.pivot_table(index=x, columns='run', values='value')
  values = values.interpolate('index', limit_area='inside')
  if len(values) > 100:
    values = values.rolling(len(values) // 25, min_periods=1, center=True).mean()
  valid = table.set_index('run').valid.reindex(values.columns) == ''
  name = trial if style == '-' else '_'  # a dotted line is not in the legend
  charts.courses(ax, values.index, values.to_numpy().T, valid.to_numpy(), name, colour, style)


def sweep(
  table: pd.DataFrame, trials: Sequence[str], x: str, metrics: Sequence[str], title: str
) -> Figure:
  """Final values of runs against a column, such as 'window': a dot for a run, a line for means."""
  figure, axes = canvas(len(metrics), 1, WIDTH, 2.5)
  of_trials = table[table.trial.isin(trials) & table[x].notna()]
  good = of_trials[of_trials.valid == '']
  bad = of_trials[of_trials.valid != '']
  for ax, metric in zip(axes, metrics):
    mean = good.groupby(x)[metric].mean()
    ax.plot(good[x], good[metric], 'o', color=COLOURS[0], markersize=5)
    ax.plot(bad[x], bad[metric], 'x', color=GREY, markersize=5)
    ax.plot(mean.index, mean, color=COLOURS[0], linewidth=1.5)
    ax.set_xscale('log')
    _name_panel(ax, metric, x, title if ax is axes[0] else '')
  return figure


def _name_panel(ax: Axes, metric: str, x: str, title: str) -> None:
  """Sets names, range and ticks of the axes of a metric."""
  across = 'block (0: the embedding)' if x == 'block' else word(x)
  label(ax, title, across, word(metric))
  if metric == 'sink_1':
    ax.set_ylim(-4, max(30, ax.get_ylim()[1]))
  if metric in _LOGARITHMIC:
    logarithmic(ax)
  if x == 'block':
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
  ax.grid(alpha=0.25)


def events(found: pd.DataFrame) -> Figure:
  """When each event comes: a panel for each trial, a dot for each seed. found: `events.events`."""
  shown = [trial for trial in TRIALS if trial in set(found.trial)]
  words = [event.words for event in EVENTS.values()]
  last = found.step[np.isfinite(found.step)].max()
  never = 1.6 * last if last == last else 1.0
  figure, axes = canvas(len(shown), 1, WIDTH, 2.0)
  for ax, trial in zip(axes, shown):
    of_trial = found[found.trial == trial].replace({'step': {np.inf: never}})
    for y, name in enumerate(reversed(EVENTS)):
      _event_dots(ax, of_trial[of_trial.event == name], y)
    ax.set_yticks(range(len(words)), words[::-1])
    ax.set_ylim(-0.5, len(words) - 0.4)
    ax.set_xlim(0, 1.1 * never)
    ax.xaxis.set_major_locator(MaxNLocator(6))
    ax.axvline(1.25 * last, color=GREY, linewidth=0.8)
    ax.grid(axis='x', alpha=0.25)
    label(ax, trial, 'step' if trial == shown[-1] else '', '')
  return figure


def _event_dots(ax: Axes, of_event: pd.DataFrame, y: int) -> None:
  """Draws the steps of an event at a height: filled for the written threshold, hollow below."""
  colour = COLOURS[y]
  for threshold, above, inside in zip(THRESHOLDS, (0.12, -0.22), (colour, 'none')):
    steps = of_event[of_event.threshold == threshold].step
    # Seeds lie one below the other, so that equal steps do not hide each other.
    heights = y + above + np.linspace(0, 0.18, len(steps))
    ax.plot(steps, heights, 'o', color=colour, markersize=5, markerfacecolor=inside)


def positions(table: pd.DataFrame, trials: Sequence[str], title: str) -> Figure:
  """Sink_k of the first ten tokens against k, the mean of the valid runs of each trial."""
  rows: list[Row] = []
  for trial in trials:
    good = table[table.trial.eq(trial) & table.valid.eq('')]
    common = {'title': title, 'trial': f'{trial} (n = {len(good)})'}
    places = range(1, 11)
    means = good.reindex(columns=[f'sink_{k}' for k in places]).mean()
    rows += [common | {'position k': k, 'rate': rate} for k, rate in zip(places, means)]
  name = 'Sink_k in % of heads'
  return charts.lines(rows, 'position k', 'rate', ('trial',), ('title',), name=name)


def scatter(pairs: pd.DataFrame, title: str) -> Figure:
  """The paper's Sink_1 against ours, a dot for a trial.

  pairs: columns trial, value (the paper's), mean (ours), crossed (none of its runs is valid). Dots
  in the shaded quarters lie on different sides of that of emergence; up to 12 of them have names.
  """
  figure, [ax] = canvas(1, 1, WIDTH, 5.6)
  largest = np.nanmax(pairs[['value', 'mean']].to_numpy(float), initial=0)
  limit = max(60.0, 1.06 * largest)
  ax.set(xlim=(-2, limit), ylim=(-2, limit))
  shade: dict[str, Any] = {'color': '#f3e3d3', 'linewidth': 0, 'zorder': 0}
  ax.fill_between((-2, EMERGED), EMERGED, limit, **shade)
  ax.fill_between((EMERGED, limit), -2, EMERGED, **shade)
  ax.plot((0, limit), (0, limit), color=GREY, linewidth=0.8, linestyle=':')
  ax.axhline(EMERGED, color=GREY, linewidth=0.8)
  ax.axvline(EMERGED, color=GREY, linewidth=0.8)

  good = pairs[~pairs.crossed]
  bad = pairs[pairs.crossed]
  differs = (good.value >= EMERGED) != (good['mean'] >= EMERGED)
  apart = good[differs]
  for dots, colour in ((good[~differs], COLOURS[0]), (apart, COLOURS[1])):
    ax.plot(dots.value, dots['mean'], 'o', color=colour, markersize=5, alpha=0.8)
  ax.plot(bad.value, bad['mean'], 'x', color=GREY, markersize=6, markeredgewidth=1.6)
  distance = (apart.value - apart['mean']).abs()
  farthest = distance.sort_values(ascending=False).index[:12]
  _names(ax, good.loc[farthest])
  label(ax, title, "the paper's Sink_1 in %", 'our Sink_1 in %, mean of seeds')
  return figure


def _names(ax: Axes, dots: pd.DataFrame) -> None:
  """Writes names in a column at the right, where they cover nothing, with a line to each dot."""
  dots = dots.sort_values('mean')
  heights = np.linspace(*ax.get_ylim(), len(dots) + 2)[1:-1]
  arrow = {'arrowstyle': '-', 'color': GREY, 'linewidth': 0.6, 'relpos': (0, 0.5)}
  for name, x, y, height in zip(dots.trial, dots.value, dots['mean'], heights):
    place = 1.02 * ax.get_xlim()[1], height
    ax.annotate(name, (x, y), place, va='center', fontsize=8.5, arrowprops=arrow)


def forest(rows: pd.DataFrame, title: str, measures: Mapping[str, Measure]) -> Figure:
  """Differences from a baseline (of `compare.against`), a row for a trial; intervals at 99 %.

  The trials are sorted by the first measure. Intervals of few seeds are cut. A cross has too few
  seeds for a verdict.
  """
  first = rows[rows.metric == next(iter(measures))]
  first = first.sort_values('difference', na_position='last')
  drawn: list[Row] = []
  for metric, measure in measures.items():
    of_metric = rows[rows.metric == metric].set_index('trial').reindex(first.trial)
    largest = of_metric.difference.abs().fillna(0).max()
    span = max(1.15 * largest, 1e-3)
    for row in of_metric.itertuples():
      low, high = np.clip((row.low, row.high), -span, span)
      drawn.append(
        {
          'trial': row.Index,
          'measure': measure.heading,
          'change': row.difference if np.isfinite(row.difference) else 0,  # without a valid pair
          'low': low,
          'high': high,
          'colour': _VERDICTS.get(str(row.verdict).split()[0], GREY),
          'marker': 'x' if row.n < LEAST else 'o',
        }
      )
  figure = charts.intervals(drawn, ('trial',), ('measure',), across=len(measures))
  figure.suptitle(title, fontsize=11.5)
  return figure


def attention_maps(recorded: Mapping[str, tuple[HeadMaps, bool]]) -> Figure:
  """One head of each run: the weights of its first tokens.

  recorded: {name: (its maps, whether it has an extra key)}. The head is the one that gives most to
  token 1, or to the extra key, which is the last column, `*`: one minus the row's sum. Rows of
  unnormalised weights, those of the extra key among them, are divided by their sums.
  """
  rows: list[Row] = []
  for name, (of, has_extra_key) in recorded.items():
    rest_NxHxT = 1 - of.normalized.sum(-1)
    given = rest_NxHxT.mean(-1) if has_extra_key else of.importance
    layer, head = strongest_and_weakest(given)[0]
    rows.append(
      {
        'name': name,
        'block': of.blocks[layer],
        'head': head + 1,
        'given': given[layer, head],
        'to': '*' if has_extra_key else 'token 1',
        'proxy_map' if of.proxy else 'map': of.normalized[layer, head, :_LENGTH, :_LENGTH],
        'extra': rest_NxHxT[layer, head, :_LENGTH] if has_extra_key else None,
      }
    )
  title = '{name}\nblock {block}, head {head}: {given:.2f} to {to}'
  return maps.attention_maps(rows, ('map', 'proxy_map'), title, across=2)
