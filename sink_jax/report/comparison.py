"""A comparison of runs: numbers, sentences, tables and figures, as one page."""

from __future__ import annotations

import re
from textwrap import fill

from sink_jax.evaluate.maps import HeadMaps, head_maps
from sink_jax.io.paths import to_path
from sink_jax.pretrained.load import load_run
from sink_jax.report import figures
from sink_jax.report.jsontext import to_json
from sink_jax.report.page import as_html, as_markdown
from sink_jax.report.records import (
  EMERGENCE_LEVEL,
  baseline_of,
  differing_settings,
  read_runs,
  split_notes,
)
from sink_jax.report.sentences import overview, sentences, verdict
from sink_jax.report.tables import as_text as table_text
from sink_jax.train.checkpoint import CheckpointError
from sink_jax.train.provenance import provenance

_TITLES = {'BigramBackcopy': 'Bigram-Backcopy', 'TriggerAveraging': 'Trigger-conditional averaging'}


def compare(directory, out, with_maps: bool = True) -> dict:
  """Writes index.html, report.md, report.json and PNGs about all runs below a folder.

  Returns:
    What report.json holds.

  Raises:
    ValueError: no runs in `directory`. OSError: `out` cannot be written.
  """
  directory, out = to_path(directory), to_path(out)
  report = build(read_runs(directory))
  told = lambda key: ' and '.join(sorted(
      {run[key] for run in report['runs'].values() if run[key]})) or 'unknown'
  now = provenance()
  report['provenance'] = {
      'trained by': told('trained_by'), 'trained on': told('trained_on'),
      'trained with': told('trained_with'), 'reported by': now['command'], 'date': now['date'],
      'reported on': f'{now["hardware"]}; jax {now["jax"]}; Python {now["python"]}',
      'reported with': now['code']}
  out.mkdir(parents=True, exist_ok=True)
  for group in report['groups']:
    probed = [run for run in runs_of(report, group) if verdict(run) != 'unknown']
    if probed:
      group['figures'].append({
          'file': f'curves-{group["key"]}.png',
          'caption': 'Sink_1 and the largest importance of the first token over heads, against '
                     'step. Dashed lines and * are of proxy scores'
                     + (', dotted lines of the bias slot.' if any(
                         run['sink_bias_slot'] is not None for run in probed) else '.')})
      figures.sink_curves(probed, out / group['figures'][-1]['file'])
    maps, missing = _maps(directory, probed) if with_maps else ({}, [])
    if maps:
      group['figures'].append({
          'file': f'attention-{group["key"]}.png',
          'caption': 'The head of every variant with the largest importance of the first token: '
                     'its attention at the last checkpoint, averaged over the probe sequences '
                     f'({next(iter(maps.values())).sequences}).'})
      figures.strongest_heads(maps, out / group['figures'][-1]['file'])
    group['notes'] += missing
  images = {figure['file']: (out / figure['file']).read_bytes()
            for group in report['groups'] for figure in group['figures']}
  (out / 'report.json').write_text(to_json(report))
  (out / 'report.md').write_text(as_markdown(report))
  (out / 'index.html').write_text(as_html(report, images))
  return report


def build(runs: list[dict]) -> dict:
  """The content of a report about runs of `read_run`; everything said follows from them."""
  report = {'title': 'Attention sinks side by side', 'emergence_level': EMERGENCE_LEVEL,
            'runs': {run['name']: {key: value for key, value in run.items()
                                   if key not in ('courses', 'analyses')} for run in runs},
            'groups': []}
  sources = dict.fromkeys(run.get('source') for run in sorted(runs, key=_text_first))
  for source in sources:
    members = sorted((run for run in runs if run.get('source') == source), key=_plain_first)
    readable = [run for run in members if 'config' in run and run['status'] != 'unreadable']
    shared, different = differing_settings(readable) if readable else ({}, {})
    report['groups'].append({
        'key': _unique(source, report['groups']),
        'title': _title(members[0]),
        'runs': [run['name'] for run in members],
        'overview': overview(members),
        'sentences': {run['name']: sentences(run, baseline_of(run, members))
                      for run in members},
        'notes': _notes(members),
        'shared_settings': shared,
        'different_settings': different,
        'figures': [],
    })
  return report


def runs_of(report: dict, group: dict) -> list[dict]:
  return [report['runs'][name] for name in group['runs']]


def as_text(report: dict) -> str:
  """Tables and sentences for a terminal, within 100 columns."""
  blocks = []
  for group in report['groups']:
    runs = runs_of(report, group)
    lines = [group['title'], '=' * len(group['title']), '', table_text(runs), '',
             fill(group['overview'], 100)]
    lines += [fill(f'{name}: {text}', 100, initial_indent='- ', subsequent_indent='  ')
              for name, text in group['sentences'].items()]
    lines += [fill(note, 100) for note in group['notes']]
    blocks.append('\n'.join(lines))
  return '\n\n'.join(blocks)


def _text_first(run):
  return (run.get('source') is None, run.get('synthetic', False), run.get('source') or '')


def _plain_first(run):
  """Softmax before its variations, then by name."""
  return (run.get('attention') != 'softmax', run['name'])


def _title(run):
  if 'source' not in run:
    return 'Runs that could not be read'
  data = run['config']['data']
  source = data['source'].removesuffix('()')
  if run['synthetic']:
    return re.sub(r'^\w+', lambda name: _TITLES.get(name[0], name[0]), source)
  return f'Language-model text ({source}, {data["tokenizer"].removesuffix("()")})'


def _unique(source, groups):
  key = re.sub(r'[^a-z0-9]+', '-', (source or 'unread').split('(')[0].lower())
  taken = sum(group['key'].split('.')[0] == key for group in groups)
  return f'{key}.{taken + 1}' if taken else key


def _notes(members):
  notes = split_notes(members)
  if any(run.get('proxy') for run in members):
    notes.append('* of proxy scores: the rows of this attention do not sum to one, so its weights '
                 'are divided by the sums of their magnitudes before the metric, as in the paper.')
  optimum = next((run['facts']['bigram_entropy'] for run in members
                  if 'bigram_entropy' in run.get('facts', {})), None)
  if optimum is not None:
    notes.append(f'The least possible loss is {optimum:.3f} nats on bigram targets and 0 on '
                 'back-copies.')
  seeds = {run['seed'] for run in members if 'seed' in run}
  if len(seeds) == 1:
    notes.append(f'One seed ({seeds.pop()}): small differences between variants mean little.')
  return notes


def _maps(directory, runs) -> tuple[dict[str, HeadMaps], list[str]]:
  """Maps of the runs whose checkpoint can be read, and a line about every other."""
  maps, missing = {}, []
  for run in runs:
    folder = directory / run['name']
    try:
      model = load_run(folder if folder.is_dir() else directory)
      if model.probe_tokens is None:
        raise ValueError('it has no probe_tokens.npy.')
      maps[run['name']] = head_maps(model, model.probe_tokens)
    except (ValueError, CheckpointError) as error:
      missing.append(f'No attention map of {run["name"]}: {" ".join(str(error).split())}')
  return maps, missing
