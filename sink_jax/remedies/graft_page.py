"""The page on grafts: HTML, Markdown, JSON and two pictures, from the same records."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any

from sink_jax.io.paths import AnyPath, to_path
from sink_jax.paper import drawing
from sink_jax.paper.metrics import Statistics
from sink_jax.paper.pictures import Picture, course, seed_panel, series, thinned
from sink_jax.paper.spread import CONFIDENCE
from sink_jax.remedies import grafts
from sink_jax.remedies.grafts import CONTINUED, GRAFTS, LOSS, SCRATCH, SINK, Grafts, Standings
from sink_jax.remedies.page import standing_record
from sink_jax.remedies.standings import NOT_JUDGED, SAME, UNDECIDED
from sink_jax.report.jsontext import rounded, to_json
from sink_jax.report.markup import listed
from sink_jax.report.parts import Parts
from sink_jax.report.records import RunRecord

TITLE = 'Another attention for a trained model'
_POINTS = 50  # of a training loss, of which each is a mean over a stretch of steps
_WORDS = {grafts.LOWER: 'lower with', grafts.HIGHER: 'higher with',
          SAME: 'without a difference with', UNDECIDED: 'undecided with',
          NOT_JUDGED: 'not judged with'}
METHOD = (
    'Each graft begins with the parameters of the default run of its seed. It is compared, seed by '
    f'seed, with the default that is trained on for as long ({CONTINUED}), and with the same '
    'variant from scratch at the steps of both. Loss at step 0: on the inputs of the probe; the '
    'function is kept where the model computes the same by construction. Sink_1 before: of the '
    'default, before any further step. Steps: to the first probe from which on Sink_1 stays below '
    'half of that; under a window few queries see the first token at all. "Lower" and "higher": '
    f'the interval of the mean difference, at {100 * CONFIDENCE:g} % divided among the grafts by '
    "Holm's method, lies beyond the margin, "
    f'{SINK.margin:g} points of Sink_1 or {LOSS.margin:g} nats of the validation loss; "no '
    'difference": the whole 90 % interval lies inside it. The sink has moved to the extra key '
    f'where Sink_1 is lower and the whole interval of Sink_* lies above {SINK.present:g} %. '
    'Variances are joined with those of the other trials. Margins and rules are those of the '
    'leaderboard.')
_CAPTIONS = {
    'sink.png': f'Sink_1 of each graft and of {CONTINUED}, every seed as a thin line; dashed: '
                'Sink_* of the extra key; dotted: half of what the default had.',
    'loss.png': f'Training loss of each graft minus that of {CONTINUED} with the same seed and '
                'batches, means over stretches of steps, every seed as a thin line.'}


def graft_report(runs: Sequence[RunRecord], out: str | AnyPath) -> str:
  """Writes the report of the runs of configs/graft.py, and returns its answer.

  Raises:
    ValueError: as `grafts_of`.
    OSError: `out` cannot be written.
  """
  found = grafts.grafts_of(runs)
  group, words, page = found.group, answer(found), Parts(TITLE)
  page.paragraph(words[0])
  page.table(*_verdicts(found), range(6))
  for picture in _pictures(found):
    page.picture(picture.file, drawing.panels(picture), _CAPTIONS[picture.file])
  page.heading('In detail')
  page.items(words[1:])
  page.heading('What was measured')
  quantities, trials = found.quantities(), (CONTINUED, *GRAFTS, *SCRATCH)
  cells = {trial: [found.summary(trial, key) for key in quantities] for trial in trials}
  page.table(['trial', 'runs', *(metric.heading for metric in quantities.values())],
             [[trial, group.status(trial), *(cell.text if cell else '-' for cell in row)]
              for trial, row in cells.items()], (0, 1))
  changed = {name: run.graft.changed for name in GRAFTS for run in group.runs(name) if run.graft}
  page.items([*(f'{name} changes {"; ".join(lines)}' for name, lines in changed.items()),
              *(f'{trial} is not compared: {why}' for trial, why in found.misfits.items())])
  for title, of in (('Beside the default, trained on', found.continued),
                    ('Beside the same variant from scratch', found.scratch)):
    page.heading(title)
    page.table(*_comparison(of), (0, 2, 3, 5, 6, 7))
  page.heading('How it is judged')
  page.paragraph(METHOD)
  missing = {', '.join(names): grafts.command(names, group)
             for of in ((CONTINUED, *GRAFTS), SCRATCH)
             if (names := [name for name in of if not group.runs(name)])}
  for names, command in missing.items():
    page.paragraph(f'Not run: {names}. To train them:')
    page.code(command)
  records = lambda of: {name: {key: standing_record(it) for key, it in standings.items()}
                        for name, standings in of.items()}
  record: dict[str, Any] = {
      'answer': words, 'grafts': {trial: {'status': group.status(trial)} | {
          key: {'runs': cell.runs, 'values': cell.values, 'text': cell.text}
          for key, cell in zip(quantities, row) if cell} for trial, row in cells.items()},
      'moved': found.moved, 'beside_continued': records(found.continued),
      'beside_scratch': records(found.scratch), 'misfits': found.misfits, 'not_run': missing}
  page.write(to_path(out), to_json(rounded(record)))
  return '\n'.join(words)


def answer(found: Grafts) -> list[str]:
  """Says whether the sink moves, in how many steps and at what loss, first in short."""
  judged = {name: of for name, of in found.continued.items() if of[SINK.key].verdict != NOT_JUDGED}
  if not judged:
    return ['No graft can be judged beside further training alone.', *_details(found)]
  lower = [name for name, of in judged.items() if of[SINK.key].verdict == grafts.LOWER]
  costs = [cell.mean for name in lower if (cell := found.summary(name, 'steps'))]
  after = f' (below half of before from step {min(costs):,.0f} to {max(costs):,.0f} on)' if (
      costs and max(costs) < math.inf) else ''
  loss = [of[LOSS.key].verdict for of in judged.values()]
  ends = [f'{words} {loss.count(verdict)}' for verdict, words in _WORDS.items() if verdict in loss]
  first = (f'With {len(lower)} of {len(judged)} grafts that can be judged Sink_1 ends lower than '
           f'with further training alone{after}. The loss ends {listed(ends)} of them.')
  return [first, *_details(found)]


def _verdicts(found: Grafts) -> tuple[list[str], list[list[str]]]:
  """What each graft does beside further training alone, in words, with the cost in steps."""
  rows = []
  for name, of in found.continued.items():
    moved, steps = name in found.moved, found.summary(name, 'steps')
    before, after = (found.summary(name, key) for key in ('loss_before', 'loss_after'))
    rows.append([name, of[SINK.key].verdict, _from(steps) if steps else '-',
                 ('yes' if moved else 'not beyond doubt') if found.summary(
                     name, 'extra_key_end') else 'has none',
                 f'{after.mean - before.mean:+.3f}' if before and after else '-',
                 of[LOSS.key].verdict])
  return ['graft', 'Sink_1 at the end', 'below half of before', 'sink on the extra key',
          'loss at step 0', 'loss at the end'], rows


def _details(found: Grafts) -> list[str]:
  """The numbers of that answer, graft by graft."""
  group, begun = found.group, [name for name in GRAFTS if found.group.runs(name)]
  steps = {run.setup.steps for name in begun for run in group.runs(name) if run.setup}
  lines = [f'{len(begun)} of {len(GRAFTS)} grafts onto the default run were begun at {group.name}, '
           f'for {" or ".join(f"{n:,}" for n in sorted(steps)) or "an unknown number of"} steps.']
  before, after = (found.summary(CONTINUED, key) for key in ('sink_before', 'sink_end'))
  if before is None or after is None:
    lines.append(f'{CONTINUED}: {group.status(CONTINUED)}. What grafts do beside it is open.')
  else:
    lines.append(f'Sink_1 of the default is {before.signed} before, and {after.signed} '
                 'where it is trained on for as long without a graft.')
    if before.mean < (SINK.present or 0):
      lines.append(f'Below {SINK.present:g} % there is no sink that could move.')
    lines.append('Beside that, Sink_1 ends '
                 f'{_found(found.continued, SINK.key)}.')
  if keys := [f'{cell.signed} with {name}' for name in begun
              if (cell := found.summary(name, 'extra_key_end'))]:
    lines.append(f'The extra key ends with a Sink_* of {"; ".join(keys)}; the sink has moved there '
                 f'with {listed(found.moved) if found.moved else "none beyond doubt"}.')
  if costs := [f'{_from(cell)} with {name}' for name in begun
               if (cell := found.summary(name, 'steps'))]:
    lines.append(f'Sink_1 stays below half of before {"; ".join(costs)}.')
  ends = ((name, *(found.summary(name, key) for key in ('loss_before', 'loss_after')))
          for name in begun)
  if changes := [f'{b.mean - a.mean:+.3f} with {name}' for name, a, b in ends if a and b]:
    lines.append(f'At step 0 a graft changes the loss by {", ".join(changes)}.')
  scratch = {name: of for name, of in found.scratch.items() if GRAFTS[name]}
  lines += [f'Beside the default that was trained on, the loss ends '
            f'{_found(found.continued, LOSS.key)}.',
            f'Beside the same variant from scratch, at the steps of both, the loss ends '
            f'{_found(scratch, LOSS.key)}; and Sink_1 {_found(scratch, SINK.key)}.']
  return lines


def _found(standings: Standings, key: str) -> str:
  """'lower with graft-k-bias (-23.4) and graft-gate (-20.1); undecided with ...'."""
  parts = []
  for verdict, words in _WORDS.items():
    names = [name if (mean := of[key].difference) is None else
             f'{name} ({of[key].axis.text(mean)})' for name, of in standings.items()
             if of[key].verdict == verdict]
    if names:
      nowhere = verdict == NOT_JUDGED and len(names) == len(standings)
      parts.append(f'{words} {"any" if nowhere else listed(names)}')
  return '; '.join(parts)


def _from(steps: Statistics) -> str:
  """'from step 233 (100 to 400) on', or 'never'."""
  words, text = steps.text, steps.metric.text
  if words.startswith('never'):
    return words
  ends = f' ({text(steps.least)} to {text(steps.largest)})' if steps.least < steps.largest else ''
  return f'from step {text(steps.mean)}{ends} on'


def _comparison(standings: Standings) -> tuple[list[str], list[list[str]]]:
  """Differences with their intervals, seed by seed, and verdicts, of Sink_1 and of the loss."""
  head, rows = ['graft'], []
  for axis in (SINK, LOSS):
    head += [f'{axis.heading}: difference (interval)', 'seed by seed', 'verdict']
  for name, of in standings.items():
    row = [name]
    for it in of.values():
      seeds = ', '.join(map(it.axis.text, it.differences.values()))
      row += [it.text() if seeds else '-', seeds or '-', it.verdict]
    rows.append([*row, '; '.join(dict.fromkeys(filter(None, (it.reason for it in of.values()))))])
  return [*head, 'because'], rows


def _pictures(found: Grafts) -> list[Picture]:
  """Sink_1 of each graft with that of `continued`, and the training loss minus that of it."""
  group = found.group
  half = [statistics.fmean(found.before.values()) / 2] if found.before else []
  losses = course('train', 'loss')
  of_continued = {run.known_setup.seed: dict(losses(run)) for run in group.measured(CONTINUED)}

  def loss(run: RunRecord) -> list[tuple[float, float]]:
    its = of_continued.get(run.known_setup.seed, {})
    return thinned([(step, x - its[step]) for step, x in losses(run) if step in its], _POINTS)

  pictures = []
  for file, y, points, dashed, levels in (
      ('sink.png', 'Sink_1 in % of heads', course('probe', 'sink_1'),
       course('probe', 'sink_extra_key'), half),
      ('loss.png', 'loss minus that of the default', loss, None, [])):
    panels = []
    for name in filter(group.runs, GRAFTS):
      panel = seed_panel(name, y, {trial: group.measured(trial) for trial in (CONTINUED, name)},
                         points, levels=levels)
      extra = series(name, group.measured(name), dashed, dashed=True) if dashed else None
      panels.append(dataclasses.replace(panel, series=[*panel.series, extra]) if extra else panel)
    if any(panel.series for panel in panels):
      pictures.append(Picture(file=file, name=group.name, panels=panels))
  return pictures
