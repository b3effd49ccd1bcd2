"""The metrics of tables and claims: how each is read off a run; means and spreads over seeds."""

from __future__ import annotations

import dataclasses
import math
import operator
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from sink_jax.attention.mask import Mask
from sink_jax.paper.cells import Statistics
from sink_jax.paper.differences import comparable_loss
from sink_jax.report.probe_record import NormRatios, ProbeRecord
from sink_jax.report.records import RunRecord

_FIRST = 10  # positions among which a sink is looked for; late ones have few queries
ALONE = 'in a window of one token every query sees itself alone'
_Quantity = Callable[[RunRecord], float | None]  # of a run; None where it is unknown
_Blocks = Callable[[NormRatios], Sequence[float | None] | None]  # a ratio per block
_LEAST_RATIO = 1e-9  # has a logarithm, and lies below every level
_LONG = 1e9  # from where a number is written with an exponent
_LARGEST = 700.0  # logarithm of about the largest float
_LAST = 0.1  # share of the training rows whose mean is the training loss at the end


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
class MetricSummary:
  """A metric of the seeds of a trial.

  proxy: of scores that do not sum to one. by_seed: the values on the scale of the metric, one per
  seed; the mean of runs that repeat one. never: the seeds in which no sink emerged.
  """

  metric: Metric
  values: tuple[float, ...]
  proxy: bool
  runs: tuple[str, ...]
  by_seed: Mapping[int, float]
  never: tuple[int, ...] = ()

  @property
  def mean(self) -> float:
    return statistics.fmean(self.values) if math.inf not in self.values else math.inf

  def statistics(self) -> Statistics:
    """The numbers and the text as the report has them."""
    # A seed without a sink emerges at no step: its step, and so the mean, is infinite.
    finite = len(self.values) > 1 and self.mean < math.inf
    spread = statistics.stdev(self.values) if finite else None
    return Statistics(self.mean, min(self.values), max(self.values), spread, len(self.values),
                      self.text(), self.proxy, list(self.runs))

  def text(self, unit: str = '') -> str:
    """'18.18', or '18.18 (17.20 to 19.30, n = 3)'; * marks proxy scores."""
    # Behind the number and not behind its range, which the table shows as small print.
    star = ('*' if self.proxy else '') + unit
    if self.mean == math.inf and len(self.values) > 1:
      never = self.values.count(math.inf)
      return f'never in {never} of {len(self.values)}{star}'
    words = self.metric.text(self.mean) + star
    if len(self.values) > 1 and self.metric.unit != 'truth':
      words += (f' ({self.metric.text(min(self.values))} to '
                f'{self.metric.text(max(self.values))}, n = {len(self.values)})')
    return words


def metric_summary(name: str, runs: Iterable[RunRecord]) -> MetricSummary | None:
  """The mean and spread over the runs that have the metric; None if none has it."""
  return summarize(METRICS[name], runs, starred=name in _OF_SCORES)


def summarize(metric: Metric, runs: Iterable[RunRecord], starred: bool = False
              ) -> MetricSummary | None:
  """The same of any metric; starred: proxies are marked."""
  measured = [(run, float(value)) for run in runs if (value := metric.of(run)) is not None]
  if not measured:
    return None
  proxy = starred and any(run.proxy for run, _ in measured)
  scaled: dict[int, list[float]] = {}
  for run, value in measured:
    seed, last = (run.setup.seed, run.setup.steps) if run.setup else (-1, math.inf)
    scaled.setdefault(seed, []).append(metric.scaled(value, last))
  return MetricSummary(metric, tuple(value for _, value in measured), proxy,
                       tuple(run.name for run, _ in measured),
                       {seed: statistics.fmean(values) for seed, values in scaled.items()},
                       tuple(dict.fromkeys(run.setup.seed for run, value in measured
                                           if value == math.inf and run.setup)))


def impossible(name: str, run: RunRecord) -> str:
  """Why a run can never have a metric; '' if it can."""
  alone = name in ('window_absolute', 'window_relative') and window_size(run) == 1
  return ALONE if alone else ''


def window_size(run: RunRecord) -> int | None:
  """Tokens of the attention window; None where the mask is no window."""
  return _mask(run).window


def _mask(run: RunRecord) -> Mask:
  return run.known_setup.experiment.attention.mask


def probed(of: Callable[[ProbeRecord], float | None]) -> _Quantity:
  """A quantity of the probe; None for a run without probe rows."""
  return lambda run: None if run.probe is None else of(run.probe)


def _rates(run: RunRecord) -> Sequence[float]:
  """Sink_k in percent, k = 1, 2, ...; none without probe rows."""
  return run.probe.sink if run.probe else ()


def _sink(position: int) -> _Quantity:
  return lambda run: _rates(run)[position - 1] if len(_rates(run)) >= position else None


def _lead(position: int) -> _Quantity:
  """By how much Sink_k exceeds the largest of the other first positions, in points."""
  def of(run: RunRecord) -> float | None:
    rates = _rates(run)[:_FIRST]
    if len(rates) < max(position, 2):
      return None
    # Compared with all others of the first positions: a sink that has moved stands on one of them.
    return rates[position - 1] - max([*rates[:position - 1], *rates[position:]])
  return of


def over_blocks(pick: Callable[..., float | None], of: _Blocks, skip: int = 0) -> _Quantity:
  """The largest or smallest ratio over blocks. pick: max or min. skip: 1 omits the embedding."""
  def quantity(run: RunRecord) -> float | None:
    ratios = (of(run.probe.ratios) if run.probe else None) or ()
    # default=None: a model may have no such vectors, and a ratio by zero is None.
    return pick((ratio for ratio in ratios[skip:] if ratio is not None), default=None)
  return quantity


def _analysis(name: str, key: str) -> _Quantity:
  """A number that an analysis of the run wrote."""
  def of(run: RunRecord) -> float | None:
    value = (run.analyses.get(name) or {}).get(key)
    return value if isinstance(value, (int, float)) else None
  return of


def _of(change: Callable[..., float | None], *quantities: _Quantity) -> _Quantity:
  """A function of quantities; None where one of them is unknown."""
  def of(run: RunRecord) -> float | None:
    values = [quantity(run) for quantity in quantities]
    return None if None in values else change(*values)
  return of


def _of_uniform(weight: str, uniform: str) -> _Quantity:
  """How many times the weight that it would have if a query saw all of its keys alike."""
  # Few keys share the weight of a small window, so that only the ratio compares windows.
  return _of(lambda measured, even: measured / even if even else None,
             _analysis('window', weight), _analysis('window', uniform))


def _all_text_loss(run: RunRecord) -> float | None:
  return (run.losses or {}).get('valid')


def _valid_loss(run: RunRecord) -> float | None:
  """On Pile-CC where that is the paper's, else on all validation text there is."""
  pile_cc = comparable_loss(run)
  return _all_text_loss(run) if pile_cc is None else pile_cc


def _train_loss(run: RunRecord) -> float | None:
  """Mean of the last tenth of the logged steps."""
  # The loss of a single step is that of one batch, and noisy.
  losses = [loss for loss in run.train_course.get('loss', ()) if loss is not None]
  return statistics.fmean(losses[-max(1, round(_LAST * len(losses))):]) if losses else None


def _overfit_step(run: RunRecord) -> float | None:
  """The step of the least validation loss."""
  course = run.valid_course
  points = [(loss, step) for step, loss in zip(course.get('step', ()), course.get('valid', ()))
            if loss is not None]
  # Of equal losses the earlier step.
  return min(points)[1] if points else None


def _in_prefix(run: RunRecord) -> Sequence[float]:
  """Sink_k in percent of the tokens of the prefix; none where there is no prefix."""
  return _rates(run)[:_mask(run).prefix or 0]


def _first_in_prefix(run: RunRecord) -> float | None:
  """Share of the sinks of the prefix that stand on its first token, in percent."""
  rates = _in_prefix(run)
  return 100 * rates[0] / sum(rates) if rates and sum(rates) else None


METRICS = {
    'sink_1': Metric('Sink_1 %', 'percent', probed(lambda probe: probe.sink_1), 'sink_1'),
    'sink_star': Metric('Sink_* %', 'percent', probed(lambda probe: probe.sink_extra_key)),
    **{f'sink_{k}': Metric(f'Sink_{k} %', 'percent', _sink(k)) for k in (2, 3, 4)},
    **{f'lead_{k}': Metric(f'lead of Sink_{k} in points', 'points', _lead(k)) for k in (1, 2, 3)},
    'largest_sink': Metric(f'largest Sink_k % of the first {_FIRST} tokens', 'percent',
                           lambda run: max(_rates(run)[:_FIRST], default=None)),
    'first_sink_1': Metric('Sink_1 % before training', 'percent', probed(
        lambda probe: None if probe.curves.step[0] else probe.curves.sink_1[0]), 'sink_1'),
    'valid_loss': Metric('valid loss', 'nats', _valid_loss),
    'train_loss': Metric('training loss', 'nats', _train_loss),
    'overfitting': Metric('valid loss minus training loss', 'nats', _of(
        operator.sub, _all_text_loss, _train_loss)),
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
    'removed_loss': Metric('rise of the valid loss by removal', 'nats', _of(
        operator.sub, _analysis('removed', 'valid_loss'),
        _analysis('removed', 'valid_loss_before'))),
    'window_absolute': Metric('attention to the absolute first token, times uniform', 'ratio',
                              _of_uniform('absolute_first', 'absolute_uniform')),
    'window_relative': Metric('attention to the first token of the window, times uniform',
                              'ratio', _of_uniform('relative_first', 'uniform')),
    'prefix_share': Metric('share of sink heads whose strongest token is in the prefix', 'percent',
                           _of(lambda share: 100 * share, _analysis(
                               'prefix', 'strongest_in_prefix'))),
    'prefix_sink': Metric('sum of Sink_k % over the prefix', 'percent', lambda run: (
        sum(_in_prefix(run)) if _in_prefix(run) else None)),
    'prefix_first': Metric("share of the prefix's sinks on its first token", 'percent',
                           _first_in_prefix),
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
