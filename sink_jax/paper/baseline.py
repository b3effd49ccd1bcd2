"""What the search for a baseline found: settings that show the paper's phenomena, and their cost.

The runs are those of configs/baseline.py, SETTING-KIND, and those of the budget `desk`, which is
the setting that was chosen, with other seeds. A criterion is met where a number lies beyond its
level and beyond what an untrained model, or random target positions, have (see evaluate/nulls.py).
The page says what was tried, what it met, and how the runs went.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sink_jax.evaluate.nulls import uniform_importance
from sink_jax.io.paths import AnyPath, to_path
from sink_jax.io.tables import number
from sink_jax.paper import drawing
from sink_jax.paper.criteria import NO_SINK, SINK
from sink_jax.paper.drawing import SeedRows, seed_rows
from sink_jax.paper.pictures import Picture, course, seed_panel
from sink_jax.paper.report import without_paths
from sink_jax.report.images import png
from sink_jax.report.jsontext import rounded, to_json
from sink_jax.report.parts import Parts
from sink_jax.report.probe_record import ProbeRecord
from sink_jax.report.records import RunRecord

KINDS = ('softmax', 'sigmoid-normalized', 'sigmoid', 'k-bias')
DESK = 'desk'  # the budget that has the chosen setting
_DESK = {'default': 'softmax', **{kind: kind for kind in KINDS[1:]}}
# The name of a setting has its number of blocks in it, which tells it from trials of other files
# whose names end alike. Longer kinds come first: '-sigmoid' ends none of them.
_TRIAL = re.compile(rf'(.*?\d.*?)-({"|".join(KINDS)})')
_OTHER_TASK = 'backcopy'  # searched for massive activations alone
LARGE_SINK = 30  # percent of heads: between the paper's default, 18.18, and its 1B model, 45.11
LARGE_RATIO = 5  # hidden norm ratio; the paper's 1B model has about 23
# Columns of the table of runs: the key in `Found.record`, the heading, and how it is written.
_NUMBERS = {
    'valid_loss': ('valid loss', '.3f'), 'sink_1': ('Sink_1 %', '.1f'),
    'sink_star': ('Sink_* %', '.1f'), 'raw_mass_1': ('raw mass on token 1', '.3f'),
    'value_ratio': ('value ratio', '.2f'), 'hidden_ratio': ('hidden ratio', '.2f'),
    'max_over_median': ('max / median', '.0f')}
_RATES = ('Sink rates of each setting at the last probe, a mark for each seed; dotted: the levels '
          'that are asked for.')
_CURVES = ('Sink_1 and the largest hidden norm ratio of the softmax runs while they trained: every '
           'seed as a thin line, and means of settings; dotted: the levels that are asked for.')
# {title of a panel: {name in the legend: (kind, rate of a probe, level that is asked for)}}
_PANELS = {
    'A sink is wanted on the first token': {
        f'softmax, at least {LARGE_SINK} %': ('softmax', 'sink_1', LARGE_SINK),
        f'normalised sigmoid, at least {SINK} %': ('sigmoid-normalized', 'sink_1', SINK)},
    'None is wanted on the first token': {
        f'sigmoid, below {NO_SINK} %': ('sigmoid', 'sink_1', NO_SINK),
        f'K bias, below {NO_SINK} %': ('k-bias', 'sink_1', NO_SINK),
        f'K bias, Sink_* of its key, at least {SINK} %': ('k-bias', 'sink_extra_key', SINK)}}


@dataclasses.dataclass(frozen=True)
class Criterion:
  """What is wanted of one kind of attention. met: of the last probe of a run that is done."""

  key: str
  kind: str
  words: str
  met: Callable[[ProbeRecord], bool]


def _beyond(value: float | None, level: float, probe: ProbeRecord, null: str) -> bool:
  """Whether a value is at a level, and at the 99th percentile of either model without a sink."""
  return (value or 0) >= max(level, probe.nulls.get(null, 0), probe.last_nulls.get(null, 0))


def _raw_excess(probe: ProbeRecord) -> float:
  """Mean raw weight on the first token over the mean raw weight of a visible key.

  A row i of T has i keys, so that the mean weight of a key is the mean row's sum over (T + 1) / 2.
  """
  mean = probe.raw_row_mass / ((len(probe.sink) + 1) / 2)
  return probe.raw_mass_1 / mean if mean else 0.0


CRITERIA = (
    Criterion('a', 'softmax', f'softmax: Sink_1 of {LARGE_SINK} % or more, and beyond its null',
              lambda probe: _beyond(probe.sink_1, LARGE_SINK, probe, 'sink_1')),
    Criterion('b', 'softmax', f'softmax: a hidden norm ratio of {LARGE_RATIO} or more in some '
              'block, and beyond its null', lambda probe: _beyond(
                  probe.curves.hidden_ratio[-1], LARGE_RATIO, probe, 'hidden_ratio')),
    Criterion('c', 'sigmoid-normalized', f'normalised sigmoid: Sink_1 of {SINK} % or more, and '
              'beyond its null', lambda probe: _beyond(probe.sink_1, SINK, probe, 'sink_1')),
    # A sigmoid that learned nothing gives every token half a weight: a sink stands out of the rest.
    Criterion('d', 'sigmoid', f'sigmoid without normalisation: Sink_1 below {NO_SINK} %, and no '
              "more raw weight on the first token than three times a row's mean",
              lambda probe: probe.sink_1 < NO_SINK and _raw_excess(probe) < 3),
    Criterion('e', 'k-bias', f'K bias: Sink_* of {SINK} % or more, and Sink_1 below {NO_SINK} %',
              lambda probe: (probe.sink_extra_key or 0) >= SINK and probe.sink_1 < NO_SINK),
)


@dataclasses.dataclass(frozen=True)
class Found:
  """A run of the search."""

  setting: str
  kind: str
  run: RunRecord

  @property
  def name(self) -> str:
    return f'{self.setting}-{self.kind}'

  @property
  def seed(self) -> int:
    return self.run.known_setup.seed

  @property
  def seconds(self) -> float | None:
    """Of training, by the median of its throughput; None if unknown."""
    rates = [rate for rate in self.run.train_course.get('tokens_per_second', ()) if rate]
    if not rates:
      return None
    setup = self.run.known_setup
    return setup.tokens * self.run.step / setup.steps / statistics.median_high(rates)

  @functools.cached_property
  def met(self) -> dict[str, bool]:
    """Which criteria of its kind it meets; none before it is done."""
    probe = self.run.probe
    if self.run.status != 'done' or probe is None:
      return {}
    return {criterion.key: criterion.met(probe) for criterion in CRITERIA
            if criterion.kind == self.kind
            and (criterion.key == 'b' or not self.setting.startswith(_OTHER_TASK))}

  @functools.cached_property
  def record(self) -> dict[str, Any]:
    """All that the search looks at, as report.json has it; without a probe the loss alone."""
    run, probe = self.run, self.run.probe
    record = {
        'setting': self.setting, 'kind': self.kind, 'seed': self.seed, 'status': run.status,
        'steps': run.step, 'training_seconds': self.seconds, 'met': self.met,
        'trained_on': run.origin.hardware, 'trained_by': run.origin.command,
        'trained_with': run.origin.code, 'valid_loss': (run.losses or {}).get('valid')}
    if probe is None:
      return record
    largest = max(probe.activations, key=lambda block: block.max_over_median or 0, default=None)
    return record | {
        'sink_1': probe.sink_1, 'sink_star': probe.sink_extra_key,
        'largest_importance': probe.largest_importance,
        'uniform_importance': uniform_importance(len(probe.sink)), 'raw_mass_1': probe.raw_mass_1,
        'raw_row_mass': probe.raw_row_mass, 'value_ratio': probe.value_ratio,
        'hidden_ratio': probe.curves.hidden_ratio[-1],
        'largest_hidden_ratio_ever': max(filter(None, probe.curves.hidden_ratio), default=None),
        'max_over_median': largest and largest.max_over_median,
        'kurtosis_moment': largest and largest.kurtosis_moment,
        'massive_block': largest and largest.block, 'massive_channel': largest and largest.channel,
        'null_untrained': dict(probe.nulls), 'null_trained': dict(probe.last_nulls)}

  def row(self) -> list[str]:
    """The run in the table of runs."""
    met = ', '.join(f'({key})' if yes else f'not ({key})' for key, yes in self.met.items())
    return [self.name, str(self.seed), f'{self.run.step:,}',
            number(self.seconds, '.0f') + ' s' * (self.seconds is not None),
            *(number(self.record.get(key), form) for key, (_, form) in _NUMBERS.items()),
            met or self.run.status]


def find(runs: Iterable[RunRecord]) -> list[Found]:
  """The runs of the search among others, by setting, kind and seed.

  Raises:
    ValueError: there is none; with the command that makes them.
  """
  found = [Found(*named, run) for run in runs if run.setup is not None and (named := _named(run))]
  if not found:
    raise ValueError('no run of configs/baseline.py, nor one of the budget desk, is there. To '
                     'train them: python -m sink_jax.sweep --config=configs/baseline.py '
                     '--workdir=runs/baseline')
  return sorted(found, key=lambda it: (it.setting == DESK, it.setting, KINDS.index(it.kind),
                                       it.seed))


def _named(run: RunRecord) -> tuple[str, str] | None:
  """(setting, kind) of a run of the search; None for any other."""
  if (run.label.budget, run.label.protocol) == (DESK, 'paper'):
    kind = _DESK.get(run.label.trial)
    return (DESK, kind) if kind else None
  match = None if run.label.budget else _TRIAL.fullmatch(run.label.trial)
  return (match[1], match[2]) if match else None


def settings_met(found: Sequence[Found]) -> dict[str, dict[str, tuple[int, int]]]:
  """{criterion: {setting: (seeds that meet it, seeds that are done)}} of the settings asked for."""
  counts: dict[str, dict[str, tuple[int, int]]] = {criterion.key: {} for criterion in CRITERIA}
  for it in found:
    for key, met in it.met.items():
      yes, n = counts[key].get(it.setting, (0, 0))
      counts[key][it.setting] = yes + met, n + 1
  return counts


def baseline_report(runs: Sequence[RunRecord], out: str | AnyPath) -> str:
  """Writes index.html, report.md, report.json and PNGs, and returns the text.

  Raises:
    ValueError: there is no run of the search among the runs.
    OSError: `out` cannot be written.
  """
  found = find(runs)
  met, page = settings_met(found), Parts('The search for a baseline')
  lines = _summary(found, met)
  rows = [[it.words, str(len(of)), str(sum(seeds > 0 for seeds, _ in of.values()))]
          for it, of in zip(CRITERIA, met.values())]
  page.paragraph(f'{sum(row[2] != "0" for row in rows)} of {len(rows)} criteria are met by a '
                 f'setting; {len(found)} runs of {len(set().union(*met.values()))} settings are '
                 'there.')
  page.table(['wanted', 'settings run', 'settings that meet it'], rows)
  # Some settings are searched for massive activations alone: nothing is asked of their rates.
  if asked := [it for it in found if set(it.met) - {'b'}]:
    page.picture('rates.png', _rates(asked), _RATES)
  if trained := [it for it in found if it.kind == 'softmax' and it.run.probe]:
    page.picture('curves.png', _curves(trained), _CURVES)
  page.heading('In detail')
  page.items(lines)
  page.table(['run', 'seed', 'steps', 'training', *(heading for heading, _ in _NUMBERS.values()),
              'meets'], [it.row() for it in found])
  record = {'criteria': {it.key: it.words for it in CRITERIA}, 'summary': lines,
            'runs': [without_paths(it.record) for it in found]}
  page.write(to_path(out), to_json(rounded(record)))
  return '\n'.join(lines)


def _summary(found: Sequence[Found], met: Mapping[str, Mapping[str, tuple[int, int]]]) -> list[str]:
  """What was found, in sentences: of each criterion, and of each setting."""
  lines = []
  for criterion in CRITERIA:
    of = met[criterion.key]
    yes = [f'{name} ({seeds} of {n} seeds)' if n > 1 else name
           for name, (seeds, n) in of.items() if seeds]
    no = [f'{name} (0 of {n} seeds)' for name, (seeds, n) in of.items() if n > 1 and not seeds]
    words = (f'met by {", ".join(yes)}' if yes else 'met by none within this budget') if of else (
        'not run')
    words += f', not by {", ".join(no)}' if no else ''
    # The budget has the setting that was chosen: its seeds are another look at one of them.
    tried = len(set(of) - {DESK})
    lines.append(f'({criterion.key}) {criterion.words}: {words}; {tried} '
                 f'setting{"s were" if tried != 1 else " was"} tried.')
  searched = [it.seconds or 0 for it in found if it.setting != DESK]
  lines.append(f'The {len(searched)} runs of the search trained for {sum(searched) / 60:.0f} '
               'process-minutes, start-ups aside.')
  left = [f'{it.name}, seed {it.seed} ({it.run.status} at step {it.run.step:,})'
          for it in found if it.run.status != 'done']
  return lines + ([f'Not at their last step: {"; ".join(left)}.'] if left else [])


def _rates(found: Sequence[Found]) -> bytes:
  """Sink_1 and Sink_* by setting, the strongest sinks of softmax first."""
  def rates(setting: str, kind: str, key: str) -> list[float]:
    return [rate for it in found if it.run.probe and (it.setting, it.kind) == (setting, kind)
            if (rate := getattr(it.run.probe, key)) is not None]

  settings = sorted(dict.fromkeys(it.setting for it in found), reverse=True, key=lambda setting: (
      max(rates(setting, 'softmax', 'sink_1'), default=-1)))
  return png(seed_rows([SeedRows(
      title, {setting: {name: rates(setting, kind, key) for name, (kind, key, _) in names.items()}
              for setting in settings},
      {name: level for name, (*_, level) in names.items()}) for title, names in _PANELS.items()]))


def _curves(found: Sequence[Found]) -> bytes:
  """Sink_1 and the largest hidden norm ratio of a block while settings were trained."""
  runs = {setting: [it.run for it in found if it.setting == setting]
          for setting in dict.fromkeys(it.setting for it in found)}
  return drawing.panels(Picture('curves.png', panels=[
      seed_panel('A sink on the first token', 'Sink_1 in % of heads', runs,
                 course('probe', 'sink_1'), levels=[LARGE_SINK]),
      seed_panel('Massive activations', 'largest hidden norm ratio of a block', runs,
                 course('probe', 'hidden_ratio'), levels=[LARGE_RATIO])]))
