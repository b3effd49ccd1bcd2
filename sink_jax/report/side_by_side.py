"""The page that compares any runs, with a section for each data set."""
# pandas does not say whether an expression is a table or a column.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from sink_jax.evaluate.head_maps import HeadMaps, head_maps
from sink_jax.io.paths import AnyPath, inside
from sink_jax.io.terminal import code, escaped, markdown_table, short
from sink_jax.report import figures
from sink_jax.report.files import write_files
from sink_jax.report.html_page import to_html
from sink_jax.report.markdown import bullets, details, joined, picture, plural, spread, value
from sink_jax.report.model_page import read_page
from sink_jax.report.runs import EMERGED, Runs, table
from sink_jax.report.validity import probed
from sink_jax.train.checkpoint import CheckpointError
from sink_jax.train.load import load_run

Maps = dict[str, tuple[HeadMaps, bool]]  # as `figures.attention_maps` reads them
Settings = set[tuple[str, str]]  # (key, value)


class Group(NamedTuple):
  """The runs on one data set. pictures: names of files; notes: lines about what has no picture."""

  title: str
  runs: pd.DataFrame
  pictures: Sequence[str]
  notes: Sequence[str]

  @property
  def trials(self) -> list[str]:
    return list(dict.fromkeys(self.runs.trial))


def write(
  runs: Runs, out: AnyPath, root: AnyPath | None, evaluation: AnyPath | None
) -> tuple[list[AnyPath], list[str]]:
  """Writes report.md and index.html; returns all files, and the first sentences.

  The arguments are those of `pages.write`.
  """
  full = table(runs)
  full['trial'] = _named_by_folder(full)
  full['other'] = full.attention != 'softmax'  # softmax comes first
  full = full.sort_values(['other', 'trial', 'seed'])
  groups, pictures = _groups(full, runs, root)
  words = [sentence_about(group) for group in groups] or ['There are no runs yet.']
  together = 'Runs on different data are not compared: each data set has its own section.'
  model, of_model = read_page(evaluation) if evaluation else ('', {})
  page = joined(
    [
      model.strip(),
      '# Attention sinks side by side',
      *map(escaped, words),
      together if len(groups) > 1 else '',
      *map(_section, groups),
      _definitions(full),
    ]
  )
  pictures |= of_model
  html = to_html(page, pictures)
  return write_files(out, {'index.html': html, 'report.md': page, **pictures}), words


def _named_by_folder(full: pd.DataFrame) -> pd.Series:
  """The column `trial`, with the folder of a run where it is not named after the trial.

  Such a folder holds a changed trial, or a run without a trial.
  """
  folder = full.run.str.replace(r'-seed-\d+$', '', regex=True)
  name = folder.str.replace(r'.*/', '', regex=True)
  return folder.where(name != full.trial, full.trial)


def _groups(
  full: pd.DataFrame, runs: Runs, root: AnyPath | None
) -> tuple[list[Group], dict[str, bytes]]:
  """A group for each data set, and their pictures by the names of their files."""
  groups: list[Group] = []
  pictures: dict[str, bytes] = {}
  for i, (_, of_data) in enumerate(full.groupby(full.content.fillna(''), sort=False)):
    source = next(filter(pd.notna, of_data.source), 'Unknown data')
    title = re.sub(r'\(.*?\)', '', source)
    title += f' (data {i + 1})' * any(title == group.title for group in groups)
    key = re.split(r'\W', title)[0].lower()
    is_taken = any(f'curves-{key}.png' in group.pictures for group in groups)
    key += f'-{i}' * is_taken
    drawn = {}
    metrics = ['sink_1', 'valid_loss', 'train_loss']
    if of_data[metrics].notna().to_numpy().any():
      trials = list(dict.fromkeys(of_data.trial))
      drawn[f'curves-{key}'] = figures.curves(runs, of_data, trials, [*metrics, 'value_ratio'])
    maps, missing = _maps(of_data, root) if root else ({}, [])
    if maps:
      drawn[f'attention-{key}'] = figures.attention_maps(maps)
    files = figures.files_of(drawn)
    pictures |= files
    groups.append(Group(title, of_data, list(files), missing))
  return groups, pictures


def _maps(runs: pd.DataFrame, root: AnyPath) -> tuple[Maps, list[str]]:
  """Maps of the first run of each trial, and a line about each that has no checkpoint to load."""
  maps, missing = {}, []
  for trial, of_trial in runs.groupby('trial', sort=False):
    first = of_trial.sort_values(['valid', 'seed']).iloc[0]
    try:
      folder = inside(root, str(first.run))
      run = load_run(folder if folder.is_dir() else root)  # of one workdir
      if run.probe_tokens is None:
        raise ValueError('it has no probe_tokens.npy')
      has_extra_key = pd.notna(first.sink_star)
      maps[f'{trial}, seed {first.seed:.0f}'] = head_maps(run, run.probe_tokens), has_extra_key
    except (ValueError, OSError, CheckpointError) as error:  # no checkpoint yet, or none any more
      missing.append(f'No attention map of {first.run}: {" ".join(str(error).split())}')
  return maps, missing


def sentence_about(group: Group) -> str:
  """In how many trials on one data set a sink stands."""
  least = probed(group.runs).groupby('trial').sink_1.min()
  if len(least):
    sinks = [trial for trial in group.trials if least.get(trial, -1) >= EMERGED]
    named = f' ({", ".join(sinks)})' if sinks else ''
    words = (
      f'{group.title}: a sink stands on the first token in every valid seed of {len(sinks)} of '
      f'{len(group.trials)} trials{named}.'
    )
  else:
    words = f'{group.title}: no valid run was probed, so that nothing can be said of a sink.'
  if bad := group.runs.valid.ne('').sum():
    words += f' {bad} of {len(group.runs)} runs are invalid and crossed out.'
  return words


def _section(group: Group) -> str:
  of_trial = {trial: group.runs[group.runs.trial == trial] for trial in group.trials}
  proxy = ''
  if group.runs.proxy.any():
    proxy = (
      ' \\* Of proxy scores: rows of these weights do not sum to one, so that they are divided by '
      'their sums, as in the paper.'
    )
  findings = [f'**{escaped(trial)}**: {escaped(finding(runs))}' for trial, runs in of_trial.items()]
  return '\n\n'.join(
    [
      f'## {escaped(group.title)}',
      _extent(group.runs),
      *map(_picture, group.pictures),
      _trials_table(of_trial),
      f'Means of the valid runs (least to largest).{proxy}',
      bullets([*findings, *map(escaped, group.notes)]),
      details('Every run', _runs_table(group.runs)),
      details('Settings that differ from the defaults', _settings(group.runs)),
    ]
  )


def _extent(runs: pd.DataFrame) -> str:
  """How many runs, steps, tokens and heads there are."""
  words = f'{plural(len(runs), "run")} of {plural(runs.trial.nunique(), "trial")}, '
  words += plural(runs.seed.nunique(), 'seed')
  if runs.steps.notna().any():
    words += f'; {runs.steps.median():,.0f} steps, {short(runs.tokens.median())} tokens'
  if runs.unique_tokens.notna().any():
    words += f' of a text of {short(runs.unique_tokens.median())}'
  if runs.heads.notna().any():
    heads = runs.heads.median()
    words += f'; {plural(heads, "head")}, so that one head is {100 / heads:.3g} points of a rate'
  return words + '.' + ' Data: unknown.' * bool(runs.content.isna().any())


def _picture(name: str) -> str:
  if name.startswith('curves'):
    words = (
      'Thin lines are seeds, thick lines their means, dotted lines Sink\\_\\* of an extra key; '
      'grey dashed lines that end in a cross are invalid runs.'
    )
    return picture('Sink\\_1 and losses against steps', name, words)
  words = (
    'The head of each trial, in its first seed, that attends most to the first token, or to the '
    'extra key (column \\*) where there is one; mean of the probe sequences.'
  )
  return picture('Attention maps', name, words)


def _trials_table(of_trial: Mapping[str, pd.DataFrame]) -> str:
  head = ['trial', 'attention', 'n', 'Sink_1 %', 'Sink_* %', 'sink from step', 'validation loss']
  head += ['least value ratio', 'largest activation, times the median']
  rows = []
  for trial, runs in of_trial.items():
    good = runs[runs.valid == '']
    mean = lambda metric, digits: spread(good[metric], digits, count=False)
    rows.append(
      [
        escaped(trial),
        escaped(runs.attention.iloc[0] or '-'),
        f'{len(good)} of {len(runs)}',
        mean('sink_1', 1) + '\\*' * bool(good.proxy.any()),
        mean('sink_star', 1),
        mean('emergence_step', 0),
        mean('valid_loss', 3),
        mean('value_ratio', 2),
        mean('max_over_median', 0),
      ]
    )
  return markdown_table(head, rows, left=(0, 1))


def finding(runs: pd.DataFrame) -> str:
  """Sentences about the runs of one trial, with n. runs: rows of `runs.table`."""
  good = probed(runs)
  bad = Counter(runs.valid[runs.valid != ''])
  left = ', '.join(f'{n} of {len(runs)} runs {why}' for why, n in bad.items())
  if good.empty:
    return f'Nothing can be said of a sink: {left or "not probed"}.'
  sinks, star = good[good.sink_1 >= EMERGED], good.sink_star.dropna()
  proxy = bool(good.proxy.any())
  rate = f'Sink_1{"*" * proxy} {spread(good.sink_1)} (in %)'
  words = [f'A sink in {len(sinks)} of {len(good)} seeds: {rate}']
  steps = sinks.emergence_step[np.isfinite(sinks.emergence_step)]
  if len(steps):
    words[0] += f', at {EMERGED} % or more from step {spread(steps, 0, False)} on'
  if len(star):
    words.append(f'The extra key has Sink_* {spread(star)} (in %)')
  if len(sinks):
    words.append(
      f'The first value is {sinks.value_ratio.mean():.2f} times as long as those of the others'
    )
  if proxy and good.raw_row_mass.notna().any():
    words.append(
      f'The weights give the first token {good.raw_mass_1.mean():.3f} of the '
      f'{good.raw_row_mass.mean():.3f} in a row'
    )
  if left:
    words.append(f'Left out: {left}')
  return '. '.join(words) + '.'


def _runs_table(runs: pd.DataFrame) -> str:
  rows = []
  for run in runs.itertuples():
    reason = f': {escaped(run.reason)}' if isinstance(run.reason, str) else ''
    valid = escaped(run.valid) or ('yes' if run.known else 'not known')
    status = escaped(run.status) + reason
    numbers = f'{run.step:.0f}', value(run.sink_1), value(run.valid_loss, 3)
    rows.append([escaped(run.run), f'{run.seed:.0f}', status, valid, *numbers])
  head = ['run', 'seed', 'status', 'valid', 'step', 'Sink_1 %', 'validation loss']
  return markdown_table(head, rows, left=(0, 2, 3))


def _settings(runs: pd.DataFrame) -> str:
  """The settings that differ from the defaults: of each trial, and those that all share."""
  settings = settings_of(runs)
  shared = set.intersection(*settings.values()) if settings else set()
  own = [
    f'**{escaped(trial)}**: {_codes(of_trial - shared)}'
    for trial, of_trial in settings.items()
    if of_trial - shared
  ]
  return '\n\n'.join(filter(None, [bullets(own), f'Shared: {_codes(shared)}']))


def _codes(settings: Iterable[tuple[str, str]]) -> str:
  return ', '.join(code(f'{key} = {value}') for key, value in sorted(settings))


def settings_of(runs: pd.DataFrame) -> dict[str, Settings]:
  """{trial: what differs from the defaults, without the seed}."""
  settings = {}
  for trial, text in zip(runs.trial, runs.settings):
    if isinstance(text, str):
      changed = json.loads(text)
      changed.pop('seed', None)
      settings[trial] = {(key, str(value)) for key, value in changed.items()}
  return settings


def _definitions(full: pd.DataFrame) -> str:
  """When a run is dead and a sink has emerged, and with what the runs were made."""
  if full.empty:
    return ''
  made = ''.join(f' Made with {escaped(commit)}' for commit in full.code.dropna().unique())
  where = ''.join(f', on {escaped(place)}' for place in full.hardware.dropna().unique())
  return (
    f'A run is dead where every head attends uniformly. A sink has emerged once Sink\\_1 stays at '
    f'{EMERGED} % or more (our definition).{made}{where}.'
  )
