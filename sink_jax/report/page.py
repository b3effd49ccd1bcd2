"""A comparison of runs as a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from sink_jax.report import tables
from sink_jax.report.comparison import Comparison, RunGroup
from sink_jax.report.markup import bold, code, joined, line
from sink_jax.report.parts import Parts
from sink_jax.report.records import RunRecord
from sink_jax.report.sentences import verdict

# Verdicts in words, in the order of the table.
_VERDICTS = {'sink': 'sink', 'proxy only': 'of proxy scores alone', 'faded': 'faded',
             'faint': 'faint', 'none': 'no sink', 'unknown': 'not probed'}


def page(report: Comparison) -> Parts:
  """The whole report: what was found first, how it was made last."""
  parts = Parts(report.title)
  groups = report.groups
  parts.paragraph(' '.join(
      f'{group.title}: {group.overview}' if len(groups) > 1 else group.overview
      for group in groups))
  counts = [Counter(map(verdict, group.runs)) for group in groups]
  found = [key for key in _VERDICTS if any(count[key] for count in counts)]
  parts.table(['data', 'runs', *(_VERDICTS[key] for key in found)],
              [[group.title, str(len(group.runs)), *(str(count[key]) for key in found)]
               for group, count in zip(groups, counts)])
  for group in groups:
    _add_group(parts, group)
  parts.heading('How it was made')
  parts.paragraph(_facts(report))
  parts.facts(report.provenance)
  return parts


def _add_group(parts: Parts, group: RunGroup) -> None:
  parts.heading(group.title)
  for picture in group.pictures:
    parts.picture(picture.file, picture.png, picture.caption)
  columns = tables.columns(group.runs)
  rows = tables.rows(group.runs, columns)
  # The operation of a run stands below its name.
  parts.table([column.heading for column in columns],
              [[(name, run.setup.attention if run.setup else ''), *cells]
               for run, (name, *cells) in zip(group.runs, rows)])
  parts.items([line(bold(name), ': ', words) for name, words in group.sentences.items()])
  parts.paragraphs(group.notes)
  with parts.details('Columns'):
    parts.items([line(bold(column.heading), ': ', column.meaning) for column in columns[1:]])
  if group.shared_settings:
    settings = lambda of: joined([code(f'{key} = {value}') for key, value in of.items()])
    with parts.details('Settings'):
      # A single run differs from none.
      if len(group.different_settings) > 1:
        parts.items([line(bold(name), ': ', settings(of) or 'as below')
                     for name, of in group.different_settings.items()])
      parts.paragraph(line('Shared by all: ', settings(group.shared_settings)))


def _facts(report: Comparison) -> str:
  """What was run, in a line: variants, steps, tokens, seeds."""
  runs = report.runs.values()
  setups = [run.setup for run in runs if run.setup is not None]
  facts = [f'{len(runs)} runs']
  if setups:
    # A set, so that what all runs have in common is named once.
    facts += [' and '.join(f'{n:,}' for n in sorted({setup.steps for setup in setups})) + ' steps',
              ' and '.join(f'{n / 1e6:.1f} M' for n in sorted({setup.tokens for setup in setups}))
              + ' tokens each',
              *_amounts(runs),
              'seed ' + ', '.join(map(str, sorted({setup.seed for setup in setups}))),
              'epsilon ' + ', '.join(
                  f'{epsilon:g}' for epsilon in sorted({setup.epsilon for setup in setups}))]
  return f'{", ".join(facts)}; report of {report.provenance["date"][0]}'


def _amounts(runs: Iterable[RunRecord]) -> list[str]:
  """Unique tokens of the texts, and how many times they are passed over where that is known."""
  # 0 stands for an unknown number of times, since None has no place in an order.
  amounts = sorted({(run.text.unique_tokens, run.text.epochs or 0.0) for run in runs
                    if run.text and run.text.unique_tokens})
  return [f'{unique / 1e6:.1f} M unique tokens' + (f' seen {epochs:.2g} times' if epochs else '')
          for unique, epochs in amounts]
