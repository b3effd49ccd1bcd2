"""A comparison of runs as one HTML page that needs no other file, and as Markdown."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping

from sink_jax.report import markup, tables
from sink_jax.report.comparison import Comparison, RunGroup
from sink_jax.report.markup import escaped, text, upper
from sink_jax.report.records import RunRecord


def as_html(report: Comparison, images: Mapping[str, bytes]) -> str:
  """A comparison as a page without scripts or outside resources. images: PNGs by file name."""
  parts = [f'<header><h1>{text(report.title)}</h1>', _facts(report), '</header>']
  for group in report.groups:
    parts.append(_group(group, images))
  made = {upper(key): markup.code(value) for key, value in report.provenance.items()}
  parts += ['<section><h2>How it was made</h2>', markup.definitions(made, 'made'), '</section>']
  return markup.document(report.title, parts)


def as_markdown(report: Comparison) -> str:
  """The same as Markdown, which names the PNGs beside it."""
  lines = [f'# {report.title}', '']
  for group in report.groups:
    lines += [f'## {group.title}', '', escaped(group.overview), '',
              tables.as_markdown(group.runs), '']
    lines += [f'- **{run.name}**{_operation(run)}: {escaped(group.sentences[run.name])}'
              for run in group.runs]
    lines += ['', *(escaped(note) + '\n' for note in group.notes)]
    for picture in group.pictures:
      lines += [f'![{picture.caption}]({picture.file})', '']
    # Two blanks at its end break a line of Markdown.
    lines += [escaped(f'{column.heading}: {column.meaning}') + '  '
              for column in tables.columns(group.runs)[1:]]
    lines += ['', *_markdown_settings(group)]
  lines += ['## How it was made', '']
  lines += [f'- {upper(key)}: `{value}`' for key, value in report.provenance.items()]
  return '\n'.join(lines) + '\n'


def _group(group: RunGroup, images: Mapping[str, bytes]) -> str:
  columns = tables.columns(group.runs)
  parts = ['<section>', f'<h2>{text(group.title)}</h2>',
           f'<p class="overview">{text(group.overview)}</p>']
  head = '<tr>' + ''.join(
      f'<th scope="col" title="{html.escape(column.meaning)}">{text(column.heading)}</th>'
      for column in columns) + '</tr>'
  body = []
  for run, cells in zip(group.runs, tables.rows(group.runs, columns)):
    about = f'<small>{text(run.setup.attention if run.setup else "")}</small>'
    body.append(f'<th scope="row">{text(cells[0])}{about}</th>'
                + ''.join(f'<td>{text(cell)}</td>' for cell in cells[1:]))
  parts.append(markup.table(head, body))
  parts.append('<ul>' + ''.join(f'<li><b>{text(name)}</b>: {text(words)}</li>'
                                for name, words in group.sentences.items()) + '</ul>')
  parts += [f'<p class="note">{text(note)}</p>' for note in group.notes]
  parts += [markup.picture(images[picture.file], picture.caption) for picture in group.pictures]
  # Also in words: the title of a heading is shown to a mouse alone.
  terms = {column.heading: text(column.meaning) for column in columns[1:]}
  parts.append(f'<details open><summary>Columns</summary>{markup.definitions(terms)}</details>')
  parts.append(_settings(group))
  return '\n'.join([*parts, '</section>'])


def _settings(group: RunGroup) -> str:
  different = [
      f'<th scope="row">{text(name)}</th><td class="left">'
      + ('<br>'.join(markup.code(f'{k} = {v}') for k, v in settings.items()) or 'as below')
      + '</td>' for name, settings in group.different_settings.items()]
  shared = ''.join(f'<li>{markup.code(f"{k} = {v}")}</li>'
                   for k, v in group.shared_settings.items())
  if not shared:
    return ''
  # A single run differs from none.
  table = markup.table('', different) if len(different) > 1 else ''
  return (f'<details><summary>Settings</summary>{table}<p>Shared by all:</p>'
          f'<ul class="settings">{shared}</ul></details>')


def _markdown_settings(group: RunGroup) -> list[str]:
  if not group.shared_settings:
    return []
  lines = ['<details><summary>Settings</summary>', '']
  if len(group.different_settings) > 1:
    for name, settings in group.different_settings.items():
      lines.append(f'- **{name}**: ' + ', '.join(f'`{k} = {v}`' for k, v in settings.items()))
    lines.append('')
  return [*lines, ', '.join(f'`{k} = {v}`' for k, v in group.shared_settings.items()), '',
          '</details>', '']


def _facts(report: Comparison) -> str:
  """What was run, in a line: variants, steps, tokens, seeds."""
  setups = [run.setup for run in report.runs if run.setup is not None]
  facts = [f'{len(report.runs)} runs']
  if setups:
    # A set, so that what all runs have in common is named once.
    facts += [' and '.join(f'{n:,}' for n in sorted({setup.steps for setup in setups})) + ' steps',
              ' and '.join(f'{n / 1e6:.1f} M' for n in sorted({setup.tokens for setup in setups}))
              + ' tokens each',
              *_amounts(report.runs),
              'seed ' + ', '.join(map(str, sorted({setup.seed for setup in setups}))),
              'epsilon ' + ', '.join(
                  f'{epsilon:g}' for epsilon in sorted({setup.epsilon for setup in setups}))]
  return f'<p>{text(", ".join(facts))}; report of {text(report.provenance["date"])}</p>'


def _amounts(runs: Iterable[RunRecord]) -> list[str]:
  """Unique tokens of the texts, and how many times they are passed over where that is known."""
  # 0 stands for an unknown number of times, since None has no place in an order.
  amounts = sorted({(run.text.unique_tokens, run.text.epochs or 0.0) for run in runs
                    if run.text and run.text.unique_tokens})
  return [f'{unique / 1e6:.1f} M unique tokens' + (f' seen {epochs:.2g} times' if epochs else '')
          for unique, epochs in amounts]


def _operation(run: RunRecord) -> str:
  return f' ({run.setup.attention})' if run.setup else ''
