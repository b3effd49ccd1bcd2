"""The report of the whole paper: what it says, and the files it is written to."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Sequence
from textwrap import fill
from typing import Any

from sink_jax.io.paths import to_path
from sink_jax.paper import (
  claims_architecture,
  claims_training,
  drawing,
  numbers,
  open_protocol,
  synthetic,
)
from sink_jax.paper.analysed import Analysed
from sink_jax.paper.budgets import BUDGETS
from sink_jax.paper.claims import FAILS, PLURAL, UNKNOWN, judge
from sink_jax.paper.collect import (
  Group,
  groups_of,
  inconsistencies,
  is_of_the_paper,
  is_synthetic,
  synthetic_groups,
)
from sink_jax.paper.curves import figure_data
from sink_jax.paper.differences import CRITERION
from sink_jax.paper.markdown import as_markdown
from sink_jax.paper.metrics import summary
from sink_jax.paper.open_models import figure_of
from sink_jax.paper.page import as_html
from sink_jax.paper.summary import OPEN, in_short, open_lines
from sink_jax.paper.tables import tables
from sink_jax.report.jsontext import finite, rounded, to_json
from sink_jax.report.records import RunRecord
from sink_jax.train.provenance import provenance

CLAIMS = claims_training.CLAIMS + claims_architecture.CLAIMS
_PICTURES = 2_600_000  # bytes on the page, which holds them in base64
# An absolute path in a command or an error: all but its end is this machine's business.
_ROOT = r'(?:file://[\w.-]*)?(?:~[\w.-]*)?/'
_PART = r'(?:\\.|[^\s/\\\'"`=,;:<>()\[\]{}|])+'
_PATH = re.compile(rf'(?<![^\s\'"`=,;:<>()\[\]{{}}|]){_ROOT}(?:{_PART}/+)*({_PART})/?')
# In quotes a path may hold spaces.
_QUOTED = re.compile(rf'([\'"`])([\w.-]*=)?{_ROOT}(?:[^\'"`\n/]+/+)*([^\'"`\n/]+)/?\1')
_PROTOCOL_KEYS = ('optimizer.schedule', 'model.init', 'probe.dtype')


def paper_report(runs: Sequence[RunRecord], out, analysed: Analysed = Analysed()) -> dict:
  """Writes index.html, report.md, report.json and PNGs about runs and analyses.

  Args:
    runs: those to report on. analysed: of `read_analyses`.

  Returns:
    What report.json holds.

  Raises:
    OSError: `out` cannot be written.
  """
  report, pictures = build(runs, analysed)
  origins = [run.origin for run in runs]
  known = lambda values: sorted({value for value in values if value}) or ['unknown']
  now = provenance()
  report['provenance'] = without_paths(_analysed_by(analysed) | {
      'trained by': known(origin.command for origin in origins), 'trained on': known(origin.hardware for origin in origins),
      'trained with': known(origin.code for origin in origins), 'reported by': [now['command']], 'date': [now['date']],
      'reported on': [f'{now["hardware"]}; jax {now["jax"]}; Python {now["python"]}'],
      'reported with': [now['code']]})
  out = to_path(out)
  out.mkdir(parents=True, exist_ok=True)
  for file, picture in pictures.items():
    (out / file).write_bytes(picture)
  (out / 'report.json').write_text(to_json(report))
  (out / 'report.md').write_text(as_markdown(report))
  (out / 'index.html').write_text(as_html(report, drawing.shrunk(pictures, _PICTURES)))
  return report


def build(runs: Sequence[RunRecord], analysed: Analysed = Analysed()) -> tuple[dict, dict[str, bytes]]:
  """The content of a report, see `paper_report`, and its pictures as PNGs by file name."""
  groups = groups_of(runs)
  figures, pictures = _figures(groups, analysed)
  axis = synthetic.section(runs)
  if axis:
    drawn = [row for row in axis['rows'] if 'Sink_1 %' in row['cells']]
    axis['file'] = 'synthetic.png' if drawn else ''
    if drawn:
      pictures['synthetic.png'] = drawing.rates(
          [row['variant'] + ('*' if row['cells']['Sink_1 %']['proxy'] else '') for row in drawn],
          [{'sink_1': row['cells']['Sink_1 %'], 'sink_star': row['cells'].get('Sink_* %')}
           for row in drawn])
  judged = groups + synthetic_groups(runs)
  claims = [_claim(claim, judged) for claim in CLAIMS]
  shown = tables(groups, analysed)
  report = {
      'title': 'The paper beside our runs',
      'paper': numbers.title(),
      'groups': [_about(group) for group in groups],
      'statuses': dict(collections.Counter(run.status for run in runs)),
      'in_short': in_short(claims, judged, open_lines(shown, figures, analysed)),
      'claims': claims,
      'tables': shown,
      'figures': figures,
      'synthetic': axis,
      'comparison': f'{CRITERION} {open_protocol.CRITERION}',
      'budgets': {name: list(budget.rules) for name, budget in BUDGETS.items()},
      'notes': [line for group in judged for line in inconsistencies(group)],
      'runs': {run.name: _run(run) for run in runs},
      'analyses': analysed.files,
      'other_runs': [run.name for run in runs
                     if not is_of_the_paper(run) and not is_synthetic(run)],
  }
  return rounded(finite(without_paths(report))), pictures


def as_text(report: dict) -> str:
  """Counts of statuses and verdicts, for a terminal."""
  runs = report['statuses']
  lines = ['runs: ' + (', '.join(f'{n} {status}' for status, n in runs.items()) or 'none')]
  lines += [f'trials, {group["name"]}: {group["trials"]} of {len(numbers.trials())} have a run'
            for group in report['groups']]
  for name, counts, failed in verdict_counts(report):
    lines.append(f'claims, {name}: ' + ', '.join(
        f'{counts.get(verdict, 0)} {words}' for verdict, words in PLURAL.items()))
    lines += [fill(f'do not hold: {", ".join(failed)}', 100, initial_indent='  ',
                   subsequent_indent='    ')] if failed else []
  drawn = sum(bool(figure['pictures']) for figure in report['figures'])
  lines.append(f'figures: {drawn} of {len(report["figures"])} drawn')
  lines += report['notes']
  lines += [fill(line, 100, subsequent_indent='  ') for part in report['in_short']['groups']
            if part['name'] == OPEN for line in part['lines']]
  return '\n'.join(lines)


def verdict_counts(report: dict) -> list[tuple[str, dict[str, int], list[str]]]:
  """(budget and protocol, {verdict: how many}, keys of the claims that do not hold)."""
  found = {}
  for claim in report['claims']:
    for verdict in claim['verdicts']:
      found.setdefault(verdict['name'], []).append((claim['key'], verdict['verdict']))
  return [(name, dict(collections.Counter(verdict for _, verdict in verdicts)),
           [key for key, verdict in verdicts if verdict == FAILS])
          for name, verdicts in found.items()]


def without_paths(value):
  """The same with '.../NAME' in place of absolute paths, in every text."""
  if isinstance(value, dict):
    return {key: without_paths(item) for key, item in value.items()}
  if isinstance(value, (list, tuple)):
    return [without_paths(item) for item in value]
  if not isinstance(value, str):
    return value
  return _PATH.sub(r'.../\1', _QUOTED.sub(r'\1\2.../\3\1', value))


def _claim(claim, groups):
  # The synthetic axis has a part of the trials, and answers what it can answer.
  verdicts = [judge(claim, group) | {'name': group.name} for group in groups
              if group.protocol or set(claim.trials) <= set(group.trials)]
  nothing = {'key': claim.key, 'budget': '', 'protocol': '', 'verdict': UNKNOWN, 'close': False,
             'why': 'nothing has been run', 'reason': 'nothing has been run', 'numbers': [],
             'name': 'no runs'}
  return {'key': claim.key, 'section': claim.section, 'statement': claim.statement,
          'marks': claim.marks, 'criterion': claim.criterion, 'verdicts': verdicts or [nothing]}


def _figures(groups, analysed):
  """Every figure of the paper with its pictures, and the PNGs by file name."""
  found, pictures = [], {}
  for figure in numbers.figures():
    drawn = []
    if figure['kind'] == 'mask':
      file = f'{figure["key"]}.png'
      pictures[file] = drawing.masks('prefix' if figure['number'] == '5' else 'window')
      drawn = [{'file': file, 'name': '', 'missing': [], 'panels': []}]
    status = None
    if figure['needs'] == 'open models':
      content, png, status = figure_of(figure, analysed)
      if content:
        pictures[content['file']] = png
        drawn = [content]
    for group in groups if figure['needs'] == 'training' else ():
      content = figure_data(figure, group)
      if content:
        file = f'{figure["key"]}-{group.key}.png'
        pictures[file] = drawing.panels(content)
        for panel in content['panels']:
          panel.pop('map', None)  # the run's analyses.json has it
        drawn.append(content | {'file': file, 'name': group.name})
    found.append(figure | {'title': numbers.name_of(figure), 'pictures': drawn,
                           'status': status or _figure_status(figure, drawn, groups)})
  return found, pictures


def _figure_status(figure, drawn, groups):
  if figure['needs'] == 'fine-tuning':
    return 'not run: there is no config for fine-tuning the 1B models'
  if figure['kind'] == 'schematic':
    return 'no data: a schematic'
  if drawn:
    return 'drawn'
  told = [f'{trial} ({group.status(trial)})' for group in groups for trial in figure['trials']
          if group.runs(trial)]
  return f'nothing to draw: {", ".join(told)}' if told else 'not run'


def _analysed_by(analysed):
  by = sorted({f'{made["command"]} ({made["date"]}; {made["hardware"]}; {made["code"]})'
               for made in analysed.files.values()})
  return {'analysed by': by} if by else {}


def _about(group: Group):
  runs = [run for members in group.trials.values() for run in members]
  known = [run.setup.settings for run in runs if run.setup]
  settings = {key: sorted({str(own[key]) for own in known}) for key in _PROTOCOL_KEYS}
  return {'budget': group.budget, 'protocol': group.protocol, 'name': group.name,
          'settings': {key: ' or '.join(values) for key, values in settings.items() if values},
          'trials': len(group.trials), 'runs': len(runs),
          'statuses': dict(collections.Counter(run.status for run in runs))}


def _run(run: RunRecord) -> dict[str, Any]:
  """What a reader of a number needs to know of its run."""
  setup, probe = run.setup, run.probe
  train_loss = summary('train_loss', [run]) if setup else None
  return {**dataclasses.asdict(run.label), 'status': run.status, 'error': run.error,
          'reason': run.reason, 'step': run.step,
          'seed': setup and setup.seed, 'steps': setup and setup.steps,
          'tokens': setup and setup.tokens,
          'unique_tokens': run.text and run.text.unique_tokens,
          'attention': setup and setup.attention, 'proxy': setup and setup.proxy,
          'probe_step': probe and probe.step,
          'sink': probe and probe.sink[:10],  # later keys are seen by few queries
          'sink_bias_slot': probe and probe.sink_extra_key,
          'sink_bias_slot_released': probe and probe.sink_extra_key_official,
          'ratios': probe and dataclasses.asdict(probe.ratios), 'losses': run.losses,
          'train_loss': train_loss and train_loss.mean,
          'emergence_step': probe and probe.emergence_step, 'trained_on': run.origin.hardware}
