"""What the search for a baseline found: settings that show the paper's phenomena, and their cost.

The runs are those of configs/baseline.py, SETTING-KIND, and those of the budget `desk`, which is
the setting that was chosen, with other seeds. A criterion is met where a number lies beyond its
level and beyond what an untrained model, or random target positions, have (see evaluate/nulls.py).
The page says what was tried, what it met, and how the runs went.
"""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from sink_jax.io.paths import AnyPath, to_path
from sink_jax.io.terminal import number
from sink_jax.paper import drawing
from sink_jax.paper.collect import Group, grouped
from sink_jax.paper.criteria import NO_SINK, SINK
from sink_jax.paper.drawing import SeedRows, seed_rows
from sink_jax.paper.metrics import METRICS, probed
from sink_jax.paper.pictures import Picture, course, seed_panel
from sink_jax.paper.report import without_paths
from sink_jax.report.images import png
from sink_jax.report.jsontext import rounded, to_json
from sink_jax.report.parts import Parts
from sink_jax.report.probe_record import ProbeRecord
from sink_jax.report.records import RunRecord

KINDS = ('softmax', 'sigmoid-normalized', 'sigmoid', 'k-bias')
DESK = 'desk'  # the budget that has the chosen setting
# The name of a setting has its number of blocks in it, which tells it from trials of other files
# whose names end alike. Longer kinds come first: '-sigmoid' ends none of them.
_TRIAL = re.compile(rf'(.*?\d.*?)-({"|".join(KINDS)})')
_OTHER_TASK = 'backcopy'  # searched for massive activations alone
LARGE_SINK = 30  # percent of heads: between the paper's default, 18.18, and its 1B model, 45.11
LARGE_RATIO = 5  # hidden norm ratio; the paper's 1B model has about 23
# Columns of the table of runs: the heading, how a number is written, and how it is read off a run.
_NUMBERS: Sequence[tuple[str, str, Callable[[RunRecord], float | None]]] = (
    ('valid loss', '.3f', METRICS['valid_loss'].of), ('Sink_1 %', '.1f', METRICS['sink_1'].of),
    ('Sink_* %', '.1f', METRICS['sink_star'].of),
    ('raw mass on token 1', '.3f', probed(lambda probe: probe.raw_mass_1)),
    ('value ratio', '.2f', METRICS['value_ratio'].of),
    ('hidden ratio', '.2f', METRICS['massive'].of),
    ('max / median', '.0f', probed(lambda probe: probe.curves.max_over_median[-1])))
_RATES = ('Sink rates of each setting at the last probe, a mark for each seed; dotted: the levels '
          'that are asked for.')
_CURVES = ('Sink_1 and the largest hidden norm ratio of the softmax runs while they trained: every '
           'seed as a thin line, and means of settings; dotted: the levels that are asked for.')
# {title of a panel: {name in the legend: (kind, metric, level that is asked for)}}
_PANELS = {
    'A sink is wanted on the first token': {
        f'softmax, at least {LARGE_SINK} %': ('softmax', 'sink_1', LARGE_SINK),
        f'normalised sigmoid, at least {SINK} %': ('sigmoid-normalized', 'sink_1', SINK)},
    'None is wanted on the first token': {
        f'sigmoid, below {NO_SINK} %': ('sigmoid', 'sink_1', NO_SINK),
        f'K bias, below {NO_SINK} %': ('k-bias', 'sink_1', NO_SINK),
        f'K bias, Sink_* of its key, at least {SINK} %': ('k-bias', 'sink_star', SINK)}}


@dataclasses.dataclass(frozen=True)
class Criterion:
  """What is wanted of one kind of attention. met: of the last probe of a run that is done."""

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


CRITERIA = {
    'a': Criterion('softmax', f'softmax: Sink_1 of {LARGE_SINK} % or more, and beyond its null',
                   lambda probe: _beyond(probe.sink_1, LARGE_SINK, probe, 'sink_1')),
    'b': Criterion('softmax', f'softmax: a hidden norm ratio of {LARGE_RATIO} or more in some '
                   'block, and beyond its null', lambda probe: _beyond(
                       probe.curves.hidden_ratio[-1], LARGE_RATIO, probe, 'hidden_ratio')),
    'c': Criterion('sigmoid-normalized', f'normalised sigmoid: Sink_1 of {SINK} % or more, and '
                   'beyond its null', lambda probe: _beyond(probe.sink_1, SINK, probe, 'sink_1')),
    # A sigmoid that learned nothing gives every token half a weight: a sink stands out of the rest.
    'd': Criterion('sigmoid', f'sigmoid without normalisation: Sink_1 below {NO_SINK} %, and no '
                   "more raw weight on the first token than three times a row's mean",
                   lambda probe: probe.sink_1 < NO_SINK and _raw_excess(probe) < 3),
    'e': Criterion('k-bias', f'K bias: Sink_* of {SINK} % or more, and Sink_1 below {NO_SINK} %',
                   lambda probe: (probe.sink_extra_key or 0) >= SINK and probe.sink_1 < NO_SINK),
}


@dataclasses.dataclass(frozen=True)
class SearchRun:
  """A run of the search. training_seconds: without start-ups; None before its first step.

  met: {key of CRITERIA: whether it is met}, of what is asked of a run; {} before it is done.
  """

  setting: str
  kind: str
  run: RunRecord
  training_seconds: float | None
  met: Mapping[str, bool]


def find(runs: Iterable[RunRecord]) -> list[Group]:
  """The runs of the search among others, by setting and kind; the chosen setting comes last.

  Raises:
    ValueError: there is none; with the command that makes them.
  """
  groups = grouped(runs, _named)
  if not groups:
    raise ValueError('no run of configs/baseline.py, nor one of the budget desk, is there. To '
                     'train them: python -m sink_jax sweep --config=configs/baseline.py '
                     '--workdir=runs/baseline')
  return sorted(groups, key=lambda group: (group.budget == DESK, group.budget))


def _named(run: RunRecord) -> tuple[str, str, str] | None:
  """(setting, '', kind) of a run of the search; None for any other."""
  label = run.label
  if run.setup is None:
    return None
  if (label.budget, label.protocol) == (DESK, 'paper'):
    kind = 'softmax' if label.trial == 'default' else label.trial
    return (DESK, '', kind) if kind in KINDS else None
  match = None if label.budget else _TRIAL.fullmatch(label.trial)
  return (match[1], '', match[2]) if match else None


def search_runs(groups: Iterable[Group]) -> list[SearchRun]:
  """The runs of the search, each with what it meets."""
  return [_search_run(group.budget, kind, run)
          for group in groups for kind in KINDS for run in group.runs(kind)]


def _search_run(setting: str, kind: str, run: RunRecord) -> SearchRun:
  setup, probe = run.known_setup, run.probe
  rates = [rate for rate in run.train_course.get('tokens_per_second', ()) if rate]
  seconds = setup.tokens * run.step / setup.steps / statistics.median_high(rates) if rates else None
  return SearchRun(setting, kind, run, seconds, {
      key: criterion.met(probe) for key, criterion in CRITERIA.items()
      if probe and run.status == 'done' and criterion.kind == kind
      and (key == 'b' or not setting.startswith(_OTHER_TASK))})


def settings_met(found: Iterable[SearchRun]) -> dict[str, dict[str, list[bool]]]:
  """{criterion: {setting: whether each seed that is done meets it}} of the settings asked for."""
  asked: dict[str, dict[str, list[bool]]] = {key: {} for key in CRITERIA}
  for it in found:
    for key, met in it.met.items():
      asked[key].setdefault(it.setting, []).append(met)
  return asked


def baseline_report(runs: Sequence[RunRecord], out: str | AnyPath) -> str:
  """Writes index.html, report.md, report.json and PNGs, and returns the text.

  Raises:
    ValueError: there is no run of the search among the runs.
    OSError: `out` cannot be written.
  """
  groups = find(runs)
  found = search_runs(groups)
  met, page = settings_met(found), Parts('The search for a baseline')
  lines = _summary(found, met)
  rows = [[CRITERIA[key].words, str(len(of)), str(sum(map(any, of.values())))]
          for key, of in met.items()]
  page.paragraph(f'{sum(row[2] != "0" for row in rows)} of {len(rows)} criteria are met by a '
                 f'setting; {len(found)} runs of {len(set().union(*met.values()))} settings are '
                 'there.')
  page.table(['wanted', 'settings run', 'settings that meet it'], rows)
  # Some settings are searched for massive activations alone: nothing is asked of their rates.
  if asked := [it for it in found if set(it.met) - {'b'}]:
    page.picture('rates.png', _rates(asked), _RATES)
  softmax = {group.budget: group.runs('softmax') for group in groups}
  if any(run.probe for of in softmax.values() for run in of):
    page.picture('curves.png', drawing.panels(Picture('curves.png', panels=[
        seed_panel('A sink on the first token', 'Sink_1 in % of heads', softmax,
                   course('probe', 'sink_1'), levels=[LARGE_SINK]),
        seed_panel('Massive activations', 'largest hidden norm ratio of a block', softmax,
                   course('probe', 'hidden_ratio'), levels=[LARGE_RATIO])])), _CURVES)
  page.heading('In detail')
  page.items(lines)
  page.table(['run', 'seed', 'steps', 'training', *(heading for heading, *_ in _NUMBERS),
              'meets'], [_row(it) for it in found])
  page.write(to_path(out), to_json(rounded({
      'criteria': {key: it.words for key, it in CRITERIA.items()}, 'summary': lines,
      'runs': without_paths(found)})))
  return '\n'.join(lines)


def _row(it: SearchRun) -> list[str]:
  """A run in the table of runs."""
  met = ', '.join(f'({key})' if yes else f'not ({key})' for key, yes in it.met.items())
  return [f'{it.setting}-{it.kind}', str(it.run.known_setup.seed), f'{it.run.step:,}',
          '-' if it.training_seconds is None else f'{it.training_seconds:.0f} s',
          *(number(of(it.run), form) for _, form, of in _NUMBERS), met or it.run.status]


def _summary(found: Sequence[SearchRun], met: Mapping[str, Mapping[str, Sequence[bool]]]
             ) -> list[str]:
  """What was found, in sentences: of each criterion, and of each setting."""
  lines = []
  for key, of in met.items():
    yes = [f'{name} ({sum(seeds)} of {len(seeds)} seeds)' if len(seeds) > 1 else name
           for name, seeds in of.items() if any(seeds)]
    no = [f'{name} (0 of {len(seeds)} seeds)' for name, seeds in of.items()
          if len(seeds) > 1 and not any(seeds)]
    words = (f'met by {", ".join(yes)}' if yes else 'met by none within this budget') if of else (
        'not run')
    words += f', not by {", ".join(no)}' if no else ''
    # The budget has the setting that was chosen: its seeds are another look at one of them.
    tried = len(set(of) - {DESK})
    lines.append(f'({key}) {CRITERIA[key].words}: {words}; {tried} '
                 f'setting{"s were" if tried != 1 else " was"} tried.')
  searched = [it.training_seconds or 0 for it in found if it.setting != DESK]
  lines.append(f'The {len(searched)} runs of the search trained for {sum(searched) / 60:.0f} '
               'process-minutes, start-ups aside.')
  left = [f'{it.setting}-{it.kind}, seed {it.run.known_setup.seed} ({it.run.status} at step '
          f'{it.run.step:,})' for it in found if it.run.status != 'done']
  return lines + ([f'Not at their last step: {"; ".join(left)}.'] if left else [])


def _rates(found: Sequence[SearchRun]) -> bytes:
  """Sink_1 and Sink_* by setting, the strongest sinks of softmax first."""
  def rates(setting: str, kind: str, key: str) -> list[float]:
    return [rate for it in found if (it.setting, it.kind) == (setting, kind)
            and (rate := METRICS[key].of(it.run)) is not None]

  settings = sorted(dict.fromkeys(it.setting for it in found), reverse=True,
                    key=lambda setting: max(rates(setting, 'softmax', 'sink_1'), default=-1))
  return png(seed_rows([SeedRows(
      title, {setting: {name: rates(setting, kind, key) for name, (kind, key, _) in names.items()}
              for setting in settings},
      {name: level for name, (*_, level) in names.items()}) for title, names in _PANELS.items()]))
