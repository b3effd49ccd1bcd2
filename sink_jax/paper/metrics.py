"""The metrics of tables and claims: how each is read off a run; means and spreads over seeds."""

from __future__ import annotations

import collections
import dataclasses
import math
import operator
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from sink_jax.paper.numbers import comparable_loss
from sink_jax.paper.pictures import course
from sink_jax.report.jsontext import UNWRITTEN
from sink_jax.report.probe_record import NormRatios, ProbeRecord
from sink_jax.report.records import Origin, RunRecord
from sink_jax.train.config import Label

_FIRST = 10  # positions among which a sink is looked for; late ones have few queries
ALONE = 'in a window of one token every query sees itself alone'
_Quantity = Callable[[RunRecord], float | None]  # of a run; None where it is unknown
_Blocks = Callable[[NormRatios], Sequence[float | None] | None]  # a ratio per block
_LEAST_RATIO = 1e-9  # has a logarithm, and lies below every level
_LONG = 1e9  # from where a number is written with an exponent
_LARGEST = 700.0  # logarithm of about the largest float
_LAST = 0.1  # share of the steps over which the mean is the training loss at the end


@dataclasses.dataclass(frozen=True)
class Metric:
  """A quantity of a run: of(run) is a number, True or False, or None where it is unknown.

  No run has those of open models alone, which come from analyses. unit: 'percent', 'points',
  'nats', 'steps', 'ratio', 'share', 'difference' or 'truth'. null: the key of `ProbeRecord.nulls`
  that says how large it is in models without training; '' without one.
  """

  heading: str
  unit: str
  of: Callable[[RunRecord], float | bool | None] = lambda run: None
  null: str = ''

  @property
  def name(self) -> str:
    """The heading without the unit."""
    return self.heading.replace(' %', '').replace(' in points', '')

  @property
  def sign(self) -> str:
    """What stands behind a number in a sentence; '' where the unit goes without saying."""
    return {'percent': ' %', 'points': ' points'}.get(self.unit, '')

  def scaled(self, value: float, last_step: float = math.inf) -> float:
    """A value on the scale on which means are compared and seeds spread alike.

    Logarithms of ratios, whose spread grows with them. A seed in which no sink emerges counts as
    its last step: the least that the step can be.
    """
    if self.unit == 'ratio':
      return math.log(max(value, _LEAST_RATIO))
    return min(value, last_step) if self.unit == 'steps' else value

  def unscaled(self, value: float) -> float:
    """The value that is scaled so; of a difference between ratios, the factor between them."""
    return math.exp(min(value, _LARGEST)) if self.unit == 'ratio' else value

  def text(self, value: float | None) -> str:
    """A value in the table's form, without the unit."""
    if value is None:
      return ''
    if self.unit == 'truth':
      # The mean of truths is the share of seeds.
      return 'yes' if value == 1 else 'no' if value == 0 else f'in {value:.0%} of runs'
    if value == math.inf:
      return 'never'
    form = {'percent': '.2f', 'nats': '.3f', 'steps': ',.0f', 'difference': '.1e',
            'share': '.3f'}
    # Ends of intervals may be of any size.
    return format(value, '.1e' if abs(value) >= _LONG else form.get(self.unit, '.2f'))


@dataclasses.dataclass(frozen=True)
class Statistics:
  """A metric over the seeds of a trial: numbers, and the text that shows them.

  text: '18.18', or '18.18 (17.20 to 19.30, n = 3)'; * marks proxy scores. mean: infinite where a
  seed never gets there, as where no sink emerges. standard_deviation: None for one seed. proxy: of
  scores that do not sum to one. runs: names of the folders. values: one per run. by_seed: on the
  scale of the metric; the mean of runs that repeat a seed. never: the seeds in which no sink
  emerged.
  """

  mean: float
  least: float
  largest: float
  standard_deviation: float | None
  n: int
  text: str
  proxy: bool
  runs: Sequence[str]
  metric: Metric = dataclasses.field(metadata=UNWRITTEN)
  values: Sequence[float] = dataclasses.field(metadata=UNWRITTEN)
  by_seed: Mapping[int, float] = dataclasses.field(metadata=UNWRITTEN)
  never: Sequence[int] = dataclasses.field(metadata=UNWRITTEN)

  @property
  def signed(self) -> str:
    """The text with the sign of the unit: '18.18 % (17.20 to 19.30, n = 3)'."""
    mean, *spread = self.text.partition(' (')
    return mean + self.metric.sign + ''.join(spread)


def single(name: str, value: float, source: str) -> Statistics:
  """One number that is no mean over runs. source: the file that has it."""
  metric = METRICS[name]
  return Statistics(value, value, value, None, 1, metric.text(value), False, [source], metric,
                    [value], {}, [])


def metric_summary(name: str, runs: Iterable[RunRecord]) -> Statistics | None:
  """The mean and spread over the runs that have the metric; None if none has it."""
  return summarize(METRICS[name], runs, starred=name in _OF_SCORES)


def summarize(metric: Metric, runs: Iterable[RunRecord], starred: bool = False
              ) -> Statistics | None:
  """The same of any metric; starred: proxies are marked."""
  measured = [(run, float(value)) for run in runs if (value := metric.of(run)) is not None]
  if not measured:
    return None
  proxy = starred and any(run.proxy for run, _ in measured)
  values, scaled = [value for _, value in measured], collections.defaultdict[int, list[float]](list)
  for run, value in measured:
    seed, last = (run.setup.seed, run.setup.steps) if run.setup else (-1, math.inf)
    scaled[seed].append(metric.scaled(value, last))
  # A seed without a sink emerges at no step: its step, and so the mean, is infinite.
  mean, n = statistics.fmean(values), len(values)
  spread = statistics.stdev(values) if n > 1 and mean < math.inf else None
  # The star stands behind the number and not behind its range, which tables show as small print.
  star = '*' if proxy else ''
  text = metric.text(mean) + star
  if mean == math.inf and n > 1:
    text = f'never in {values.count(math.inf)} of {n}{star}'
  elif n > 1 and metric.unit != 'truth':
    text += f' ({metric.text(min(values))} to {metric.text(max(values))}, n = {n})'
  return Statistics(mean, min(values), max(values), spread, n, text, proxy,
                    [run.name for run, _ in measured], metric, values,
                    {seed: statistics.fmean(of) for seed, of in scaled.items()},
                    list(dict.fromkeys(run.setup.seed for run, value in measured
                                       if value == math.inf and run.setup)))


def window_size(run: RunRecord) -> int | None:
  """Tokens of the attention window; None where the mask is no window."""
  return run.known_setup.experiment.attention.mask.window


def probed(of: Callable[[ProbeRecord], float | None]) -> _Quantity:
  """A quantity of the probe; None for a run without probe rows."""
  return lambda run: None if run.probe is None else of(run.probe)


def _sink(position: int) -> _Quantity:
  return probed(lambda probe: probe.sink[position - 1] if len(probe.sink) >= position else None)


def _lead(position: int) -> _Quantity:
  """By how much Sink_k exceeds the largest of the other first positions, in points."""
  def of(probe: ProbeRecord) -> float | None:
    rates = probe.sink[:_FIRST]
    if len(rates) < max(position, 2):
      return None
    # Compared with all others of the first positions: a sink that has moved stands on one of them.
    return rates[position - 1] - max([*rates[:position - 1], *rates[position:]])
  return probed(of)


def over_blocks(pick: Callable[..., float | None], of: _Blocks, skip: int = 0) -> _Quantity:
  """The largest or smallest ratio over blocks. pick: max or min. skip: 1 omits the embedding."""
  def quantity(run: RunRecord) -> float | None:
    ratios = (of(run.probe.ratios) if run.probe else None) or ()
    # default=None: a model may have no such vectors, and a ratio by zero is None.
    return pick((ratio for ratio in ratios[skip:] if ratio is not None), default=None)
  return quantity


def _analysis(name: str, *keys: str, change: Callable[..., float | None] = float) -> _Quantity:
  """What numbers of an analysis of the run are changed to; None where one of them is unknown."""
  def of(run: RunRecord) -> float | None:
    found = [run.analyses.get(name, {}).get(key) for key in keys]
    return change(*found) if all(isinstance(value, (int, float)) for value in found) else None
  return of


def _times_uniform(weight: float, uniform: float) -> float | None:
  """How many times the weight that it would have if a query saw all of its keys alike."""
  # Few keys share the weight of a small window, so that only the ratio compares windows.
  return weight / uniform if uniform else None


def _valid_loss(run: RunRecord) -> float | None:
  """On Pile-CC where that is the paper's, else on all validation text there is."""
  pile_cc = comparable_loss(run)
  return (run.losses or {}).get('valid') if pile_cc is None else pile_cc


def _train_loss(run: RunRecord) -> float | None:
  """Mean over the last tenth of the steps."""
  # The loss of a single step is that of one batch, and noisy.
  points = course('train', 'loss')(run)
  return statistics.fmean(loss for step, loss in points
                          if step > (1 - _LAST) * points[-1][0]) if points else None


def _overfitting(run: RunRecord) -> float | None:
  valid, train = (run.losses or {}).get('valid'), _train_loss(run)
  return None if valid is None or train is None else valid - train


def _overfit_step(run: RunRecord) -> float | None:
  """The step of the least validation loss."""
  # Of equal losses the earlier step.
  return min(((loss, step) for step, loss in course('valid', 'valid')(run)), default=(0, None))[1]


def _of_prefix(change: Callable[[Sequence[float]], float | None]) -> _Quantity:
  """What Sink_k of the tokens of the prefix are changed to; None where there is no prefix."""
  def of(run: RunRecord) -> float | None:
    prefix = run.known_setup.experiment.attention.mask.prefix or 0
    return change(run.probe.sink[:prefix]) if prefix and run.probe and run.probe.sink else None
  return of


METRICS = {
    'sink_1': Metric('Sink_1 %', 'percent', probed(lambda probe: probe.sink_1), 'sink_1'),
    'sink_star': Metric('Sink_* %', 'percent', probed(lambda probe: probe.sink_extra_key)),
    **{f'sink_{k}': Metric(f'Sink_{k} %', 'percent', _sink(k)) for k in (2, 3, 4)},
    **{f'lead_{k}': Metric(f'lead of Sink_{k} in points', 'points', _lead(k)) for k in (1, 2, 3)},
    'largest_sink': Metric(f'largest Sink_k % of the first {_FIRST} tokens', 'percent',
                           probed(lambda probe: max(probe.sink[:_FIRST], default=None))),
    'first_sink_1': Metric('Sink_1 % before training', 'percent', probed(
        lambda probe: None if probe.curves.step[0] else probe.curves.sink_1[0]), 'sink_1'),
    'valid_loss': Metric('valid loss', 'nats', _valid_loss),
    'train_loss': Metric('training loss', 'nats', _train_loss),
    'overfitting': Metric('valid loss minus training loss', 'nats', _overfitting),
    'overfit_step': Metric('step of the least valid loss', 'steps', _overfit_step),
    # Infinite and not None: that no sink emerged is a result, and later than any step.
    'emergence_step': Metric('step of emergence', 'steps', probed(
        lambda probe: math.inf if probe.emergence_step is None else probe.emergence_step)),
    # A run under way has not shown yet whether it converges.
    'converges': Metric('converges', 'truth', lambda run: {'done': True, 'diverged': False}.get(
        run.status)),
    'massive': Metric('largest hidden norm ratio', 'ratio',
                      over_blocks(max, lambda ratios: ratios['hidden'], skip=1), 'hidden_ratio'),
    'massive_before_norm': Metric('largest hidden norm ratio before the norm', 'ratio',
                                  over_blocks(max, lambda ratios: ratios['hidden_before_norm'])),
    'value_ratio': Metric('least value norm ratio', 'ratio', probed(
        lambda probe: probe.value_ratio)),
    'massive_sink_token': Metric('largest hidden norm ratio of the sink token', 'ratio',
                                 over_blocks(max, lambda ratios: ratios['sink_token'], skip=1)),
    'removed_sink_1': Metric('Sink_1 % after removal', 'percent', _analysis('removed', 'sink_1')),
    'removed_loss': Metric('rise of the valid loss by removal', 'nats', _analysis(
        'removed', 'valid_loss', 'valid_loss_before', change=operator.sub)),
    'window_absolute': Metric('attention to the absolute first token, times uniform', 'ratio',
                              _analysis('window', 'absolute_first', 'absolute_uniform',
                                        change=_times_uniform)),
    'window_relative': Metric('attention to the first token of the window, times uniform',
                              'ratio', _analysis('window', 'relative_first', 'uniform',
                                                 change=_times_uniform)),
    'prefix_share': Metric('share of sink heads whose strongest token is in the prefix', 'percent',
                           _analysis('prefix', 'strongest_in_prefix',
                                     change=lambda share: 100 * share)),
    'prefix_sink': Metric('sum of Sink_k % over the prefix', 'percent', _of_prefix(sum)),
    'prefix_first': Metric("share of the prefix's sinks on its first token", 'percent', _of_prefix(
        lambda sinks: 100 * sinks[0] / sum(sinks) if sum(sinks) else None)),
    'chain_difference': Metric('largest relative difference', 'difference', _analysis(
        'first_token_chain', 'largest_relative_difference')),
    # Of open models alone.
    'sink_1_natural': Metric('Sink_1 % on text', 'percent'),
    'sink_1_random': Metric('Sink_1 % on random tokens', 'percent'),
    'sink_1_repeat': Metric('Sink_1 % on a repeated token', 'percent'),
    'sink_1_base': Metric('Sink_1 % of the base model', 'percent'),
    'sink_1_chat': Metric('Sink_1 % of the chat model', 'percent'),
    'sink_t': Metric('Sink_t %', 'percent'),
}
# Of normalised scores, which are proxies where the rows of an operation do not sum to one.
_OF_SCORES = {name for name in METRICS
              if name.startswith(('sink_', 'lead_', 'largest_sink', 'prefix_'))}


@dataclasses.dataclass(frozen=True)
class MeasuredRun:
  """What a report has of each of its runs: how it ended, and its numbers by the keys of METRICS.

  why: what explains the status, or ''. proxy: whether rates of sinks are of proxy scores. numbers:
  those that are known; where no sink emerged the step of emergence is infinite, in JSON null.
  """

  label: Label
  seed: int | None
  status: str
  why: str
  step: int
  origin: Origin
  proxy: bool
  numbers: Mapping[str, float | bool]

  @classmethod
  def of(cls, run: RunRecord) -> MeasuredRun:
    numbers = {key: value for key, metric in METRICS.items()
               if run.setup and (value := metric.of(run)) is not None}
    return cls(run.label, run.setup and run.setup.seed, run.status, run.error or run.reason or '',
               run.step, run.origin, run.proxy, numbers)
