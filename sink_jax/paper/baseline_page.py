"""The page of the search for a baseline: what was tried, what it met, and how the runs went."""

from __future__ import annotations

from collections.abc import Sequence

from sink_jax.io.paths import AnyPath, to_path
from sink_jax.io.tables import number
from sink_jax.paper import drawing
from sink_jax.paper.baseline import (
  CRITERIA,
  DESK,
  LARGE_RATIO,
  LARGE_SINK,
  Found,
  find,
  settings_met,
)
from sink_jax.paper.criteria import NO_SINK, SINK
from sink_jax.paper.drawing import SeedRows, seed_rows
from sink_jax.paper.pictures import Picture, course, seed_panel
from sink_jax.paper.report import without_paths
from sink_jax.report.images import png
from sink_jax.report.jsontext import finite, rounded, to_json
from sink_jax.report.parts import Parts
from sink_jax.report.probe_record import ProbeRecord
from sink_jax.report.records import RunRecord

TITLE = 'The search for a baseline'
# Columns of the table of runs: the key of `Found.numbers`, the heading, and how it is written.
_NUMBERS = {
    'valid_loss': ('valid loss', '.3f'), 'sink_1': ('Sink_1 %', '.1f'),
    'sink_star': ('Sink_* %', '.1f'), 'raw_mass_1': ('raw mass on token 1', '.3f'),
    'value_ratio': ('value ratio', '.2f'), 'hidden_ratio': ('hidden ratio', '.2f'),
    'max_over_median': ('max / median', '.0f')}


def baseline_report(runs: Sequence[RunRecord], out: str | AnyPath) -> str:
  """Writes index.html, report.md, report.json and PNGs, and returns the text.

  Raises:
    ValueError: there is no run of the search among the runs.
    OSError: `out` cannot be written.
  """
  found = find(runs)
  met, lines, page = settings_met(found), summary(found), Parts(TITLE)
  rows = [[it.words, str(len(of)), str(sum(seeds > 0 for seeds, _ in of.values()))]
          for it in CRITERIA for of in [met[it.key]]]
  page.paragraph(f'{sum(row[2] != "0" for row in rows)} of {len(rows)} criteria are met by a '
                 f'setting; {len(found)} runs of {len(set().union(*met.values()))} settings are '
                 'there.')
  page.table(['wanted', 'settings run', 'settings that meet it'], rows)
  for name, of in pictures(found).items():
    page.picture(name, of, _CAPTIONS[name])
  page.heading('In detail')
  page.items(lines)
  page.table(['run', 'seed', 'steps', 'training', *(heading for heading, _ in _NUMBERS.values()),
              'meets'], [_row(it) for it in found])
  record = rounded(finite({'criteria': {it.key: it.words for it in CRITERIA}, 'summary': lines,
                           'runs': [without_paths(it.as_dict()) for it in found]}))
  page.write(to_path(out), to_json(record))
  return '\n'.join(lines)


def summary(found: Sequence[Found]) -> list[str]:
  """What was found, in sentences: of each criterion, and of each setting."""
  lines, met = [], settings_met(found)
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
  searched = [it for it in found if it.setting != DESK]
  seconds = sum(it.seconds or 0 for it in searched)
  lines.append(f'The {len(searched)} runs of the search trained for '
               f'{seconds / 60:.0f} process-minutes, start-ups aside.')
  left = [f'{it.setting}-{it.kind}, seed {it.seed} ({it.run.status} at step {it.run.step:,})'
          for it in found if it.run.status != 'done']
  lines += [f'Not at their last step: {"; ".join(left)}.'] if left else []
  return lines


def _row(it: Found) -> list[str]:
  met = ', '.join(f'({key})' if yes else f'not ({key})' for key, yes in it.met.items())
  return [f'{it.setting}-{it.kind}', str(it.seed), f'{it.run.step:,}',
          number(it.seconds, '.0f') + ' s' * (it.seconds is not None),
          *(number(it.numbers.get(key), form) for key, (_, form) in _NUMBERS.items()),
          met or it.run.status]


_CAPTIONS = {
    'rates.png': 'Sink rates of each setting at the last probe, a mark for each seed; dotted: the '
                 'levels that are asked for.',
    'curves.png': 'Sink_1 and the largest hidden norm ratio of the softmax runs while they '
                  'trained: every seed as a thin line, and means of settings; dotted: the levels '
                  'that are asked for.'}


def pictures(found: Sequence[Found]) -> dict[str, bytes]:
  """{file: PNG}: rates by setting of the runs that are done, and the courses of softmax."""
  # Some settings are searched for massive activations alone: nothing is asked of their rates.
  asked = [it for it in found if set(it.met) - {'b'}]
  trained = [it for it in found if it.kind == 'softmax' and it.run.probe]
  return ({'rates.png': _rates(asked)} if asked else {}) | (
      {'curves.png': _curves(trained)} if trained else {})


def _rates(found: Sequence[Found]) -> bytes:
  """Sink_1 and Sink_* by setting, the strongest sinks of softmax first."""
  probes: dict[tuple[str, str], list[ProbeRecord]] = {}  # by setting and kind
  for it in found:
    if it.run.probe is not None:
      probes.setdefault((it.setting, it.kind), []).append(it.run.probe)
  strongest = lambda setting: max(
      (probe.sink_1 for probe in probes.get((setting, 'softmax'), ())), default=-1)
  settings = sorted({setting: None for setting, _ in probes}, key=strongest, reverse=True)
  # {title: {name in the legend: (kind, rate of a probe, level)}}
  panels = {
      'A sink is wanted on the first token': {
          f'softmax, at least {LARGE_SINK} %': ('softmax', 'sink_1', LARGE_SINK),
          f'normalised sigmoid, at least {SINK} %': ('sigmoid-normalized', 'sink_1', SINK)},
      'None is wanted on the first token': {
          f'sigmoid, below {NO_SINK} %': ('sigmoid', 'sink_1', NO_SINK),
          f'K bias, below {NO_SINK} %': ('k-bias', 'sink_1', NO_SINK),
          f'K bias, Sink_* of its key, at least {SINK} %': ('k-bias', 'sink_extra_key', SINK)}}
  return png(seed_rows([SeedRows(
      title, {setting: {name: [rate for probe in probes.get((setting, kind), ())
                               if (rate := getattr(probe, key)) is not None]
                        for name, (kind, key, _) in names.items()} for setting in settings},
      {name: level for name, (*_, level) in names.items()}) for title, names in panels.items()]))


def _curves(found: Sequence[Found]) -> bytes:
  """Sink_1 and the largest hidden norm ratio of a block while settings were trained."""
  runs: dict[str, list[RunRecord]] = {}
  for it in found:
    runs.setdefault(it.setting, []).append(it.run)
  return drawing.panels(Picture('curves.png', panels=[
      seed_panel('A sink on the first token', 'Sink_1 in % of heads', runs,
                 course('probe', 'sink_1'), levels=[LARGE_SINK]),
      seed_panel('Massive activations', 'largest hidden norm ratio of a block', runs,
                 course('probe', 'hidden_ratio'), levels=[LARGE_RATIO])]))
