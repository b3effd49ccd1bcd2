"""What the claims say in a few sentences."""

from __future__ import annotations

from sink_jax.paper.analysed import Analysed
from sink_jax.paper.claims import FAILS, HOLDS, PLURAL, PRESUPPOSED, UNKNOWN
from sink_jax.paper.collect import Group, inconsistencies
from sink_jax.paper.metrics import summary
from sink_jax.report.records import split_notes

OPEN = 'open models'
_DEFAULT = ('sink_1', 'valid_loss', 'massive')
_JUDGED = ('Judged on runs that are done, by their mean over seeds; each criterion is ours and '
           'stands below its claim. "Close to the level": a number that decides is within 5 % of '
           'the level that it is held against.')
_SMOKE = ('At the smoke budget models and data are other ones, so what holds there and what does '
          'not says little about the paper, the one as little as the other.')


def in_short(claims: list[dict], groups: list[Group], of_open_models: list[str] = ()) -> dict:
  """{groups: [{name, lines}], notes: lines about all claims}. claims: with their verdicts."""
  parts = [{'name': group.name, 'lines': _lines(claims, group)} for group in groups]
  told = [f'{mark} presupposes that {words}.' for mark, words in PRESUPPOSED.values()
          if any(mark in claim['marks'] for claim in claims)]
  parts += [{'name': OPEN, 'lines': list(of_open_models)}] if of_open_models else []
  return {'groups': parts or [{'name': 'no runs', 'lines': ['Nothing has been run.']}],
          'notes': [_JUDGED, ' '.join(told)]}


def open_lines(tables: list[dict], figures: list[dict], analysed: Analysed) -> list[str]:
  """How much of the paper's open models there is, and what of the files is shown nowhere."""
  if not (analysed.files or analysed.lines):
    return []
  rows = [row for table in tables if table['needs'] == 'open models' for row in table['rows']]
  measured = [row['ours'][0]['measures'].values() for row in rows if row['ours']]
  compared = sum(any(cell['difference'] is not None for cell in cells) for cells in measured)
  waiting = [figure for figure in figures if figure['needs'] == 'open models']
  drawn = sum(bool(figure['pictures']) for figure in waiting)
  return [f'{sum(map(bool, measured))} of {len(rows)} rows are measured, {compared} of them in the '
          f"paper's protocol; {drawn} of {len(waiting)} figures are drawn.", *analysed.lines]


def _lines(claims, group):
  found = {verdict: [] for verdict in PLURAL}
  for claim in claims:
    for verdict in claim['verdicts']:
      if verdict['name'] == group.name:
        found[verdict['verdict']].append((claim['key'], verdict))
  lines = [_default(group)]
  asked = sum(map(len, found.values()))
  lines += [f'{len(members)} of {asked} claims {PLURAL[verdict]}'
            + (f': {", ".join(map(_named, members))}.' if members else '.')
            for verdict, members in found.items() if verdict in (HOLDS, FAILS)]
  reasons = {}
  for key, verdict in found[UNKNOWN]:
    reasons.setdefault(verdict['reason'], []).append(key)
  why = '; '.join(f'{words} ({", ".join(keys)})' for words, keys in reasons.items())
  lines.append(f'{len(found[UNKNOWN])} {PLURAL[UNKNOWN]}' + (f': {why}.' if why else '.'))
  lines += [_SMOKE] if group.rules == 'smoke' else []
  members = [run for runs in group.trials.values() for run in runs]
  return lines + split_notes(members) + inconsistencies(group)


def _default(group):
  done = group.done('default')
  found = [value for name in _DEFAULT if (value := summary(name, done))]
  told = ', '.join(f'{value.measure.heading.replace(" %", "")} '
                   f'{value.text(" %" if value.measure.unit == "percent" else "")}'
                   for value in found)
  return f'default: {told or group.status("default")}.'


def _named(member):
  key, verdict = member
  return key + (' (close to the level)' if verdict['close'] else '')
