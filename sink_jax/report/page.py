"""The report as one HTML page that needs nothing else, and as Markdown."""

from __future__ import annotations

import html

from sink_jax.report import markup, tables
from sink_jax.report.markup import escaped, text, upper


def as_html(report: dict, images: dict[str, bytes]) -> str:
  """A page without scripts or outside resources. images: PNGs by file name."""
  parts = [f'<header><h1>{text(report["title"])}</h1>', _facts(report), '</header>']
  for group in report['groups']:
    parts.append(_group(report, group, images))
  made = {upper(key): markup.code(value) for key, value in report['provenance'].items()}
  parts += ['<section><h2>How it was made</h2>', markup.definitions(made, 'made'), '</section>']
  return markup.document(report['title'], parts)


def as_markdown(report: dict) -> str:
  lines = [f'# {report["title"]}', '']
  for group in report['groups']:
    runs = [report['runs'][name] for name in group['runs']]
    lines += [f'## {group["title"]}', '', escaped(group['overview']), '',
              tables.as_markdown(runs), '']
    lines += [f'- **{name}**{_operation(report["runs"][name])}: {escaped(words)}'
              for name, words in group['sentences'].items()]
    lines += ['', *(escaped(note) + '\n' for note in group['notes'])]
    for figure in group['figures']:
      lines += [f'![{figure["caption"]}]({figure["file"]})', '']
    lines += [escaped(f'{column.heading}: {column.meaning}') + '  '
              for column in tables.columns(runs)[1:]]
    lines += ['', *_markdown_settings(group)]
  lines += ['## How it was made', '']
  lines += [f'- {upper(key)}: `{value}`' for key, value in report['provenance'].items()]
  return '\n'.join(lines) + '\n'


def _group(report, group, images):
  runs = [report['runs'][name] for name in group['runs']]
  shown = tables.columns(runs)
  parts = ['<section>', f'<h2>{text(group["title"])}</h2>',
           f'<p class="overview">{text(group["overview"])}</p>']
  head = '<tr>' + ''.join(
      f'<th scope="col" title="{html.escape(column.meaning)}">{text(column.heading)}</th>'
      for column in shown) + '</tr>'
  body = []
  for run, cells in zip(runs, tables.rows(runs, shown)):
    about = f'<small>{text(run.get("attention", ""))}</small>'
    body.append(f'<th scope="row">{text(cells[0])}{about}</th>'
                + ''.join(f'<td>{text(cell)}</td>' for cell in cells[1:]))
  parts.append(markup.table(head, body))
  parts.append('<ul>' + ''.join(f'<li><b>{text(name)}</b>: {text(words)}</li>'
                                for name, words in group['sentences'].items()) + '</ul>')
  parts += [f'<p class="note">{text(note)}</p>' for note in group['notes']]
  parts += [markup.picture(images[figure['file']], figure['caption'])
            for figure in group['figures']]
  terms = {column.heading: text(column.meaning) for column in shown[1:]}
  parts.append(f'<details open><summary>Columns</summary>{markup.definitions(terms)}</details>')
  parts.append(_settings(group))
  return '\n'.join([*parts, '</section>'])


def _settings(group):
  different = [
      f'<th scope="row">{text(name)}</th><td class="left">'
      + ('<br>'.join(markup.code(f'{k} = {v}') for k, v in settings.items()) or 'as below')
      + '</td>' for name, settings in group['different_settings'].items()]
  shared = ''.join(f'<li>{markup.code(f"{k} = {v}")}</li>'
                   for k, v in group['shared_settings'].items())
  if not shared:
    return ''
  table = markup.table('', different) if len(different) > 1 else ''
  return (f'<details><summary>Settings</summary>{table}<p>Shared by all:</p>'
          f'<ul class="settings">{shared}</ul></details>')


def _markdown_settings(group):
  lines = ['<details><summary>Settings</summary>', '']
  if len(group['different_settings']) > 1:
    for name, settings in group['different_settings'].items():
      lines.append(f'- **{name}**: ' + ', '.join(f'`{k} = {v}`' for k, v in settings.items()))
    lines.append('')
  lines += [', '.join(f'`{k} = {v}`' for k, v in group['shared_settings'].items()), '',
            '</details>', '']
  return lines if group['shared_settings'] else []


def _facts(report):
  """What was run, in a line: variants, steps, tokens, seeds."""
  runs = report['runs'].values()
  known = [run for run in runs if 'steps' in run]
  span = lambda key: sorted({run[key] for run in known})
  facts = [f'{len(runs)} runs']
  if known:
    facts += [' and '.join(f'{n:,}' for n in span('steps')) + ' steps',
              ' and '.join(f'{n / 1e6:.1f} M' for n in span('tokens')) + ' tokens each',
              *_amounts(known),
              'seed ' + ', '.join(map(str, span('seed'))),
              'epsilon ' + ', '.join(f'{e:g}' for e in span('epsilon'))]
  return f'<p>{text(", ".join(facts))}; report of {text(report["provenance"]["date"])}</p>'


def _amounts(runs):
  """Unique tokens of their texts and how often these were seen, where they are texts."""
  found = sorted({(run['unique_tokens'], run['epochs']) for run in runs if run['unique_tokens']})
  return [f'{unique / 1e6:.1f} M unique tokens seen {epochs:.2g} times' for unique, epochs in found]


def _operation(run):
  return f' ({run["attention"]})' if 'attention' in run else ''
