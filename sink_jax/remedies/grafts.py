"""Another attention for a trained model: does the sink move, and at what cost in steps and loss?

Each graft of configs/graft.py is compared seed by seed with `continued`, the default run trained on
for as long, and with the same variant from scratch (configs/remedies.py) at the steps of both. The
margins and the method are those of the leaderboard. `graft_page` writes the report.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from sink_jax.evaluate.sinks import emergence_step
from sink_jax.paper.collect import Group, seed_and_name, unlike
from sink_jax.paper.metrics import METRICS, Metric, Statistics, summarize
from sink_jax.paper.spread import MIN_SEEDS, Spread
from sink_jax.remedies import standings
from sink_jax.remedies.axes import AXES, EXTRA_KEY, Axis
from sink_jax.remedies.standings import NOT_JUDGED, UNDECIDED, Standing
from sink_jax.report.records import RunRecord

CONTINUED = 'continued'
# The grafts of configs/graft.py, and the trial of configs/remedies.py that is the same variant from
# scratch; '' where there is none. Nothing here imports configs: a test compares the names.
GRAFTS = {
    'graft-gate': 'desk-head-gate', 'graft-gate-random': 'desk-head-gate',
    'graft-sink-logit': 'desk-sink-logit', 'graft-k-bias': 'desk-k-bias',
    'graft-k-bias-window': '', 'graft-zero-sink': 'desk-zero-sink'}
SCRATCH = tuple(dict.fromkeys(filter(None, GRAFTS.values())))
SINK, LOSS = (axis for axis in AXES if axis.key in ('concentration', 'loss'))
LOWER, HIGHER = 'lower', 'higher'
# What a graft may change of the default, and a run from scratch of both.
_SOURCE = ('init.source',)
_OF_GRAFT = ('attention.', 'init.graft', 'init.kept', *_SOURCE)
_OF_SCRATCH = ('attention.', 'init.', 'steps')
_ENDS = {'sink_end': dataclasses.replace(METRICS['sink_1'], heading='Sink_1 % at the end'),
         'largest_end': METRICS['largest_sink'],
         'extra_key_end': dataclasses.replace(METRICS[EXTRA_KEY], heading='Sink_* % at the end'),
         'loss_end': dataclasses.replace(METRICS['valid_loss'], heading='valid loss at the end')}

# {graft: {axis: its standing, whose values are differences by seed}}
Standings = Mapping[str, Mapping[str, Standing]]


@dataclasses.dataclass(frozen=True)
class Grafts:
  """What the runs of a page say.

  misfits: {trial: in what its runs differ that may not}. continued, scratch: standings beside
  either. before: {seed: Sink_1 of the default in percent, before any further step}. moved: the
  grafts whose extra key has what the first token has lost.
  """

  group: Group
  misfits: Mapping[str, str]
  continued: Standings
  scratch: Standings
  before: Mapping[int, float]
  moved: Sequence[str]

  def quantities(self) -> dict[str, Metric]:
    """What is shown of each trial, by its key in report.json."""
    of = lambda key: lambda run: getattr(run.graft, key) if run.graft else None
    return {
        'loss_before': Metric('loss at step 0 before', 'nats', of('loss_before')),
        'loss_after': Metric('loss at step 0 grafted', 'nats', of('loss_after')),
        'exact': Metric('function kept', 'truth', of('exact')),
        'sink_before': Metric('Sink_1 % before', 'percent', self._before),
        'sink_grafted': dataclasses.replace(METRICS['first_sink_1'], heading='Sink_1 % grafted'),
        **_ENDS, 'steps': Metric('steps to below half of before', 'steps', self._steps)}

  def summary(self, trial: str, quantity: str) -> Statistics | None:
    """A quantity over the seeds: of all runs what is at step 0, else of those that are done."""
    if trial in SCRATCH and quantity not in _ENDS:
      return None  # it begins with nothing that could be changed
    ended = quantity in _ENDS or quantity == 'steps'
    runs = self.group.done(trial) if ended else self.group.runs(trial)
    return summarize(self.quantities()[quantity], runs)

  def _before(self, run: RunRecord) -> float | None:
    return self.before.get(run.setup.seed) if run.setup else None

  def _steps(self, run: RunRecord) -> float | None:
    """The first probed step from which Sink_1 stays below half of the default's; or infinity."""
    before = self._before(run)
    if not before or run.probe is None:
      return None
    below = [float(rate < before / 2) for rate in run.probe.curves.sink_1]
    step = emergence_step(run.probe.curves.step, below, 1.0)
    return math.inf if step is None else step


def grafts_of(runs: Sequence[RunRecord]) -> Grafts:
  """The runs of configs/graft.py with what they are compared with.

  Raises:
    ValueError: there is none, they are of several budgets, or two repeat a seed of a trial.
  """
  group = _group(runs)
  misfits = _misfits(group)
  spread = standings.spread_without(group, misfits)
  continued = _compared(dict.fromkeys(GRAFTS, CONTINUED), group, misfits, spread)
  moved = [name for name, of in continued.items() if of[SINK.key].verdict == LOWER
           and standings.moved(name, group, spread, group.done(CONTINUED))]
  before = {run.setup.seed: run.probe.curves.sink_1[0] for run in group.runs(CONTINUED)
            if run.setup and run.probe and run.probe.curves.step[0] == 0}
  return Grafts(group, misfits, continued, _compared(GRAFTS, group, misfits, spread), before, moved)


def command(trials: Sequence[str], group: Group | None = None) -> str:
  """What trains these trials, all of configs/graft.py or all from scratch, with the group's seeds.

  Those from scratch have the budget desk, as their names say.
  """
  known = {run.setup.seed for of in group.trials.values() for run in of if run.setup
           } if group else set()
  seeds = f'--seeds={",".join(map(str, sorted(known) or (1, 2, 3)))}'
  options = f'remedies.py {seeds} --config.steps={_whole(group)}' if group and set(trials) <= {
      *SCRATCH} else f'graft.py --budget={group.rules if group else "desk"} {seeds}'
  return (f'python -m sink_jax sweep --config=configs/{options} --only={",".join(trials)} '
          '--workdir=runs/graft')


def _group(runs: Sequence[RunRecord]) -> Group:
  trials = {name: tuple(sorted((run for run in runs if run.label.trial == name), key=seed_and_name))
            for name in (CONTINUED, *GRAFTS, *SCRATCH)}
  labels = {(run.label.budget, run.label.protocol or 'paper')
            for name, members in trials.items() if name not in SCRATCH for run in members}
  if not labels:
    raise ValueError('no run of configs/graft.py is there. To train them: '
                     + command((CONTINUED, *GRAFTS)))
  if len(labels) > 1:
    raise ValueError(
        'the runs of configs/graft.py are of several budgets or protocols, and a page is of one: '
        f'{", ".join(map(" ".join, sorted(labels)))}. Give each a folder of its own.')
  for members in trials.values():
    seeds = [run.setup.seed for run in members if run.setup]
    if len(set(seeds)) < len(seeds):
      raise ValueError(f'{" and ".join(run.name for run in members)} repeat a seed. Take one of '
                       'them out of the folder.')
  return Group(*labels.pop(), {name: members for name, members in trials.items() if members})


def _first(group: Group) -> RunRecord | None:
  """The run that all others are compared with: of `continued`, if there is one."""
  return next((run for trial in (CONTINUED, *GRAFTS) for run in group.runs(trial) if run.readable),
              None)


def _whole(group: Group) -> int:
  """The steps of the default and of a graft together, which one from scratch is given."""
  first = _first(group)
  # Without a readable run: those of the budget desk.
  return 2 * first.known_setup.steps if first else 8000


def _misfits(group: Group) -> dict[str, str]:
  """{trial: in what its runs are unlike `continued` and may not be}, of trials that are."""
  first, sources, misfits = _first(group), {}, {}
  for trial, runs in group.trials.items():
    words: list[str] = []
    for run in runs:
      if first is None or not run.readable:
        continue
      setup, scratch = run.known_setup, trial in SCRATCH
      # A run that begins with a source has sizes written out which others leave to model.size.
      empty = [key for key, value in setup.settings.items() if value is None]
      words += unlike(trial, run, first, (*_OF_SCRATCH, *empty) if scratch else _OF_GRAFT)
      if scratch and setup.steps != _whole(group):
        words.append(f'steps {setup.steps} instead of {_whole(group)}, those of both')
      source = [setup.settings.get(key) for key in _SOURCE]
      if not scratch and source != sources.setdefault(setup.seed, source):
        words.append(f'another source of seed {setup.seed}: {source} instead of '
                     f'{sources[setup.seed]}')
    if words:
      misfits[trial] = ', '.join(dict.fromkeys(words))
  return misfits


def _compared(others: Mapping[str, str], group: Group, misfits: Mapping[str, str], spread: Spread,
              ) -> Standings:
  """The standings of grafts, each beside its other trial, judged over all grafts by axis."""
  found: dict[str, dict[str, Standing]] = {name: {} for name in others}
  for axis in (SINK, LOSS):
    of = [_standing(axis, (other, name), group, misfits, spread) for name, other in others.items()]
    for it in standings.decided(of, spread, lambda it, share: (
        LOWER if (it.difference or 0) < 0 else HIGHER)):
      found[it.trials[1]][axis.key] = it
  return found


def _standing(axis: Axis, trials: tuple[str, str], group: Group, misfits: Mapping[str, str],
              spread: Spread) -> Standing:
  """The differences with their interval: undecided as yet, or why they get no verdict."""
  it = standings.paired(axis, trials, group, spread, not misfits.keys() & {*trials})
  few, reasons = len(it.differences) < MIN_SEEDS, []
  for trial in reversed(trials):
    gone = sum(run.status == 'diverged' for run in group.runs(trial))
    if not group.runs(trial):
      reasons.append(f'{trial or "the variant from scratch"}: not run')
    elif trial in misfits:
      reasons.append(f'{trial}: {misfits[trial]}')
    elif gone:
      reasons.append(f'{trial}: {gone} of {len(group.runs(trial))} runs diverged')
    elif few and (left := group.not_done(trial)):
      reasons.append(f'{trial}: {left}')
  if few:
    reasons = reasons or [f'{len(it.differences)} of {MIN_SEEDS} seeds']
  return dataclasses.replace(it, verdict=NOT_JUDGED if reasons else UNDECIDED,
                             reason='; '.join(reasons))
