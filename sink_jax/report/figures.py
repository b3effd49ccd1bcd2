"""Pictures of runs, drawn from tables: a thin line or a dot for a run, a thick line for a mean.

Runs that are not valid evidence are grey, dashed and end in a cross; means leave them out.
"""
# pandas does not say whether an expression is a table or a column.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from sink_jax.evaluate import plots
from sink_jax.evaluate.plots import COLOURS, HeadMaps, canvas, label, save
from sink_jax.io.paths import AnyPath
from sink_jax.report.compare import LEAST, Measure
from sink_jax.report.events import EVENTS, THRESHOLDS, TRIALS
from sink_jax.report.runs import EMERGED, Runs

_LENGTH = 32  # tokens of an attention map
WIDTH = 6.2  # inches: with letters of 11 points a picture can be read on a phone
GREY = '#8a8a8a'
_VERDICTS = {
  'lower': COLOURS[0],
  'removed': COLOURS[0],
  'moved': COLOURS[2],
  'higher': COLOURS[1],
}
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


def save_all(drawn: Mapping[str, Figure | None], folder: AnyPath) -> dict[str, str]:
  """Saves the figures that there are; returns {key: name of the file}."""
  names = {}
  for key, figure in drawn.items():
    if figure is not None:
      names[key] = f'{key}.png'
      save(figure, folder / names[key])
  return names


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
  of_trial = runs.metrics.run.isin(table.run[table.trial == trial])
  data = runs.metrics[runs.metrics.metric.eq(metric) & of_trial]
  data = data[data.block.notna() == (x == 'block')]
  if x == 'block':
    last = data.groupby('run').step.transform('max')
    data = data[data.step.eq(last) | data.step.isna()]
  if data.empty:
    return False
  # Stored curves may have only some of the steps; single steps of training losses are noise.
  values = data.pivot_table(index=x, columns='run', values='value')
  values = values.interpolate('index', limit_area='inside')
  if len(values) > 100:
    values = values.rolling(len(values) // 25, min_periods=1, center=True).mean()
  valid = table.set_index('run').valid.reindex(values.columns) == ''
  for run in values.columns:
    if valid[run]:
      _thin_line(ax, values[run].dropna(), colour, style)
    else:
      _crossed_line(ax, values[run].dropna())
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


def _thin_line(ax: Axes, course: pd.Series, colour: str, style: str) -> None:
  """Draws the course of a valid run."""
  ax.plot(
    course.index,
    course,
    color=colour,
    linewidth=0.9,
    alpha=0.55,
    linestyle=style,
    zorder=2,
  )


def _crossed_line(ax: Axes, course: pd.Series) -> None:
  """Draws the course of a run that is not evidence."""
  ax.plot(
    course.index,
    course,
    color=GREY,
    linewidth=0.9,
    alpha=0.9,
    linestyle=(0, (2, 2)),
    zorder=4,
  )
  if len(course):
    ax.plot(
      course.index[-1:],
      course[-1:],
      'x',
      color=GREY,
      markersize=7,
      markeredgewidth=1.8,
      zorder=4,
    )


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
  of_trials = table.run[table.trial.isin(trials)]
  known = set(runs.metrics.metric[runs.metrics.run.isin(of_trials)])
  shown = [metric for metric in metrics if metric in known] or metrics[:1]
  height = 2.7 * len(shown) + 0.6 + 0.2 * len(trials)
  figure, axes = canvas(WIDTH, height, len(shown))
  found = {}
  for ax, metric in zip(axes[:, 0], shown):
    for trial, colour in zip(trials, itertools.cycle(LINES)):
      if lines(ax, runs, table, trial, metric, colour, x):
        found.setdefault(trial, ax.get_lines()[-1])
      if metric == 'sink_1' or x == 'block':
        lines(ax, runs, table, trial, dotted, colour, x, ':')
    label(ax, title, _AXES.get(x, x), _AXES.get(metric, metric))
    title = ''  # only above the first panel
    _scale(ax, metric, x)
  columns = min(3, max(1, len(found)))
  if max(map(len, trials)) > 14:
    columns = 2
  figure.legend(
    handles=list(found.values()),
    loc='outside lower center',
    frameon=False,
    fontsize=9.5,
    ncols=columns,
  )
  return figure


def sweep(
  table: pd.DataFrame, trials: Sequence[str], x: str, metrics: Sequence[str], title: str
) -> Figure:
  """Final values of runs against a column, such as 'window': a dot for a run, a line for means."""
  figure, axes = canvas(WIDTH, 2.4 * len(metrics) + 0.3, len(metrics))
  of_trials = table[table.trial.isin(trials) & table[x].notna()]
  good = of_trials[of_trials.valid == '']
  bad = of_trials[of_trials.valid != '']
  for ax, metric in zip(axes[:, 0], metrics):
    mean = good.groupby(x)[metric].mean()
    ax.plot(good[x], good[metric], 'o', color=COLOURS[0], markersize=5)
    ax.plot(bad[x], bad[metric], 'x', color=GREY, markersize=5)
    ax.plot(mean.index, mean, color=COLOURS[0], linewidth=1.5)
    ax.set_xscale('log')
    label(ax, title, _AXES[x], _AXES[metric])
    title = ''  # only above the first panel
    _scale(ax, metric, x)
  return figure


def events(found: pd.DataFrame) -> Figure:
  """When each event comes: a panel for each trial, a dot for each seed. found: `events.events`."""
  shown = [trial for trial in TRIALS if trial in set(found.trial)]
  words = [event.words for event in EVENTS.values()]
  last = found.step[np.isfinite(found.step)].max()
  never = 1.6 * last if last == last else 1.0
  figure, axes = canvas(WIDTH, 1.9 * len(shown) + 0.4, len(shown))
  for ax, trial in zip(axes[:, 0], shown):
    of_trial = found[found.trial == trial].replace({'step': {np.inf: never}})
    for y, name in enumerate(reversed(EVENTS)):
      _event_dots(ax, of_trial[of_trial.event == name], y)
    ax.set_yticks(range(len(words)), words[::-1], fontsize=9)
    ax.set_ylim(-0.5, len(words) - 0.4)
    ax.set_xlim(0, 1.1 * never)
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
    ax.plot(
      steps,
      heights,
      'o',
      color=colour,
      markersize=5,
      markerfacecolor=inside,
    )


def positions(table: pd.DataFrame, trials: Sequence[str], title: str) -> Figure:
  """Sink_k of the first ten tokens against k, the mean of the valid runs of each trial."""
  figure, axes = canvas(WIDTH, 3.6)
  ax = axes[0, 0]
  places = range(1, 11)
  rates = [f'sink_{k}' for k in places]
  for trial, colour in zip(trials, LINES):
    good = table[table.trial.eq(trial) & table.valid.eq('')]
    ax.plot(
      places,
      good.reindex(columns=rates).mean(),
      'o-',
      color=colour,
      markersize=4,
      label=f'{trial} (n = {len(good)})',
    )
  label(ax, title, 'position k', 'Sink_k in % of heads')
  _scale(ax, 'sink_1', 'position')
  figure.legend(
    loc='outside lower center',
    frameon=False,
    fontsize=9.5,
    ncols=3,
  )
  return figure


def scatter(pairs: pd.DataFrame, title: str) -> Figure:
  """The paper's Sink_1 against ours, a dot for a trial.

  pairs: columns trial, value (the paper's), mean (ours), crossed (none of its runs is valid). Dots
  in the shaded quarters lie on different sides of that of emergence; up to 12 of them have names.
  """
  figure, axes = canvas(WIDTH, 5.6)
  ax = axes[0, 0]
  largest = np.nanmax(pairs[['value', 'mean']].to_numpy(float), initial=0)
  limit = max(60.0, 1.06 * largest)
  ax.set(xlim=(-2, limit), ylim=(-2, limit))
  shade: dict[str, Any] = {'color': '#f3e3d3', 'linewidth': 0, 'zorder': 0}
  ax.fill_between((-2, EMERGED), EMERGED, limit, **shade)
  ax.fill_between((EMERGED, limit), -2, EMERGED, **shade)
  diagonal = 0, limit
  ax.plot(
    diagonal,
    diagonal,
    color=GREY,
    linewidth=0.8,
    linestyle=':',
  )
  ax.axhline(EMERGED, color=GREY, linewidth=0.8)
  ax.axvline(EMERGED, color=GREY, linewidth=0.8)

  good = pairs[~pairs.crossed]
  bad = pairs[pairs.crossed]
  differs = (good.value >= EMERGED) != (good['mean'] >= EMERGED)
  alike = good[~differs]
  apart = good[differs]
  ax.plot(
    alike.value,
    alike['mean'],
    'o',
    color=COLOURS[0],
    markersize=5,
    alpha=0.75,
  )
  ax.plot(
    apart.value,
    apart['mean'],
    'o',
    color=COLOURS[1],
    markersize=5,
    alpha=0.9,
  )
  ax.plot(
    bad.value,
    bad['mean'],
    'x',
    color=GREY,
    markersize=6,
    markeredgewidth=1.6,
  )
  distance = (apart.value - apart['mean']).abs()
  farthest = distance.sort_values(ascending=False).index[:12]
  _names(ax, good.loc[farthest])
  label(ax, title, "the paper's Sink_1 in %", 'our Sink_1 in %, mean of seeds')
  return figure


class _Box(NamedTuple):
  """A rectangle by its middle and half of its width and height."""

  x: float
  y: float
  width: float
  height: float

  def overlaps(self, other: _Box) -> bool:
    """Whether the two have a point in common."""
    across = abs(self.x - other.x) <= self.width + other.width
    return across and abs(self.y - other.y) <= self.height + other.height

  def is_within(self, ax: Axes) -> bool:
    """Whether it lies inside of the axes."""
    left, right = ax.get_xlim()
    bottom, top = ax.get_ylim()
    across = left < self.x - self.width and self.x + self.width < right
    return across and bottom < self.y - self.height and self.y + self.height < top


def _names(ax: Axes, dots: pd.DataFrame) -> None:
  """Writes names next to dots, each at the nearest place where it covers no other name or dot."""
  w = np.ptp(ax.get_xlim()) / 100
  h = np.ptp(ax.get_ylim()) / 100
  taken = [
    _Box(x, y, 1.5 * w, 1.5 * h)
    for line in ax.get_lines()
    if line.get_linestyle() == 'None'
    for x, y in np.transpose(line.get_data())
  ]
  places = sorted(
    itertools.product(range(-60, 61, 3), range(-45, 61, 2)),
    key=lambda place: 2 * place[0] ** 2 + place[1] ** 2,
  )
  dots = dots.sort_values('mean', ascending=False)
  for name, x, y in zip(dots.trial, dots.value, dots['mean']):
    width, height = 0.78 * len(name) * w, 1.6 * h
    for dx, dy in places:
      middle = x + dx * w + width, y + dy * h + height
      box = _Box(*middle, width, height)
      if box.is_within(ax) and not any(map(box.overlaps, taken)):
        break
    else:
      continue  # there is no place for this name
    taken.append(box)
    ax.annotate(
      name,
      (x, y),
      (box.x, box.y),
      fontsize=8.5,
      ha='center',
      va='center',
      color='#333333',
      arrowprops={
        'arrowstyle': '-',
        'color': GREY,
        'linewidth': 0.6,
        'shrinkA': 5,
        'shrinkB': 2,
      },
    )


def forest(rows: pd.DataFrame, title: str, measures: Mapping[str, Measure]) -> Figure:
  """Differences from a baseline (of `compare.against`), a row for a trial; intervals at 99 %.

  The trials are sorted by the first measure. Intervals of few seeds are cut at the ends of the
  axis.
  """
  first = rows[rows.metric == next(iter(measures))]
  first = first.sort_values('difference', ascending=False, na_position='first')
  names = first.trial.tolist()
  height = 1.3 + 0.215 * len(names)
  figure, axes = canvas(WIDTH, height, 1, len(measures))
  for ax, (metric, measure) in zip(axes[0], measures.items()):
    of = rows[rows.metric == metric].set_index('trial')
    of = of.reindex(first.trial)
    largest = of.difference.abs().fillna(0).max()
    span = max(1.15 * largest, 1e-3)
    for y, row in enumerate(of.itertuples()):
      _interval(ax, y, row, span)
    ax.axvline(0, color='black', linewidth=0.8)
    ax.set_xlim(-1.06 * span, 1.06 * span)
    ax.set_ylim(-0.7, len(names) - 0.3)
    ax.set_yticks(range(len(names)), names, fontsize=9)
    names = [''] * len(names)  # only next to the first panel
    ax.set_xlabel(measure.heading, fontsize=9.5)
    ax.tick_params('x', labelsize=9)
    ax.grid(axis='both', alpha=0.2)
  figure.suptitle(title, fontsize=11.5)
  return figure


def _interval(ax: Axes, y: int, row: Any, span: float) -> None:
  """Draws a row of `compare.against` at a height; a cross has too few seeds for a verdict."""
  colour = _VERDICTS.get(str(row.verdict).split()[0], GREY)
  middle = row.difference if np.isfinite(row.difference) else 0  # without a valid pair
  ends = np.clip((row.low, row.high), -span, span)
  marker = 'x' if row.n < LEAST else 'o'
  ax.plot(ends, (y, y), color=colour, linewidth=1.4)
  ax.plot(middle, y, marker, color=colour, markersize=5)


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
    to_tokens = of.normalized.sum(-1).mean(-1)
    given = 1 - to_tokens if extra else of.importance
    layer, head = plots.strongest_and_weakest(given)[0]
    image = _attention_map(ax, of.normalized[layer, head], extra)
    what = '*' if extra else 'token 1'
    words = f'block {of.blocks[layer]}, head {head + 1}: {given[layer, head]:.2f} to {what}'
    label(ax, f'{name}\n{words}', 'key', 'query')
    ax.title.set_fontsize(9.5)
    ticks = [0, 0.3**0.5, 1]  # of square roots
    bar = figure.colorbar(image, ax=ax, shrink=0.8, ticks=ticks)
    bar.ax.set_yticklabels(['0', '0.3', '1'])
    bar.set_label('rows divided by their sums' if of.proxy else 'attention', fontsize=8.5)
  return figure


def _attention_map(ax: Axes, map_TxT: np.ndarray, extra: bool) -> AxesImage:
  """Draws the first rows and columns of a map; extra: and what they leave to the extra key."""
  weights = map_TxT[:_LENGTH, :_LENGTH].astype(float)
  rest = 1 - weights.sum(1, keepdims=True)
  size = len(weights)
  ticks = {0: '1', size // 2 - 1: str(size // 2)}
  if not np.triu(weights, 1).any():  # causal: above the diagonal nothing is drawn
    weights[np.triu_indices(size, 1)] = np.nan
  if extra:
    empty = np.full_like(rest, np.nan)
    weights = np.concatenate([weights, empty, rest], 1)
    ticks[size + 1] = '*'
  else:
    ticks[size - 1] = str(size)
  roots = np.sqrt(np.clip(weights, 0, 1))
  ax.set_facecolor('#e8e8e8')
  image = ax.imshow(roots, cmap='viridis', vmin=0, vmax=1)
  ax.set_xticks(list(ticks), list(ticks.values()))
  ax.set_yticks([])
  return image


def _scale(ax: Axes, metric: str, x: str) -> None:
  """The range and the ticks of both axes."""
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
