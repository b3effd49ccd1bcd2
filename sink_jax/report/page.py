"""The report as one HTML page that needs nothing else, and as Markdown."""

from __future__ import annotations

import base64
import html
import re

from sink_jax.report import tables
from sink_jax.report.style import STYLE


def as_html(report: dict, images: dict[str, bytes]) -> str:
  """A page without scripts or outside resources. images: PNGs by file name."""
  parts = [f'<header><h1>{_text(report["title"])}</h1>', _facts(report), '</header>']
  for group in report['groups']:
    parts.append(_group(report, group, images))
  parts += ['<section><h2>How it was made</h2>', _made(report), '</section>']
  return (f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
          '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
          '<meta name="color-scheme" content="light dark">\n'
          f'<title>{html.escape(report["title"])}</title>\n<style>\n{STYLE}</style>\n</head>\n'
          '<body>\n' + '\n'.join(parts) + '\n</body>\n</html>\n')


def as_markdown(report: dict) -> str:
  lines = [f'# {report["title"]}', '']
  for group in report['groups']:
    runs = [report['runs'][name] for name in group['runs']]
    lines += [f'## {group["title"]}', '', _escape(group['overview']), '',
              tables.as_markdown(runs), '']
    lines += [f'- **{name}**{_operation(report["runs"][name])}: {_escape(text)}'
              for name, text in group['sentences'].items()]
    lines += ['', *(_escape(note) + '\n' for note in group['notes'])]
    for figure in group['figures']:
      lines += [f'![{figure["caption"]}]({figure["file"]})', '']
    lines += [_escape(f'{column.heading}: {column.meaning}') + '  '
              for column in tables.columns(runs)[1:]]
    lines += ['', *_markdown_settings(group)]
  lines += ['## How it was made', '']
  lines += [f'- {_upper(key)}: `{value}`' for key, value in report['provenance'].items()]
  return '\n'.join(lines) + '\n'


def _group(report, group, images):
  runs = [report['runs'][name] for name in group['runs']]
  shown = tables.columns(runs)
  parts = ['<section>', f'<h2>{_text(group["title"])}</h2>',
           f'<p class="overview">{_text(group["overview"])}</p>']
  head = ''.join(f'<th scope="col" title="{html.escape(column.meaning)}">{_text(column.heading)}</th>'
                 for column in shown)
  body = []
  for run, cells in zip(runs, tables.rows(runs, shown)):
    about = f'<small>{_text(run.get("attention", ""))}</small>'
    body.append(f'<tr><th scope="row">{_text(cells[0])}{about}</th>'
                + ''.join(f'<td>{_text(cell)}</td>' for cell in cells[1:]) + '</tr>')
  parts.append(f'<div class="wide"><table><thead><tr>{head}</tr></thead>'
               f'<tbody>{"".join(body)}</tbody></table></div>')
  parts.append('<ul>' + ''.join(f'<li><b>{_text(name)}</b>: {_text(text)}</li>'
                                for name, text in group['sentences'].items()) + '</ul>')
  parts += [f'<p class="note">{_text(note)}</p>' for note in group['notes']]
  for figure in group['figures']:
    data = base64.b64encode(images[figure['file']]).decode()
    caption = html.escape(figure['caption'], quote=True)
    parts.append(f'<figure><div class="wide"><img alt="{caption}" '
                 f'src="data:image/png;base64,{data}"></div>'
                 f'<figcaption>{_text(figure["caption"])}</figcaption></figure>')
  terms = ''.join(f'<dt>{_text(column.heading)}</dt><dd>{_text(column.meaning)}</dd>'
                  for column in shown[1:])
  parts.append(f'<details open><summary>Columns</summary><dl>{terms}</dl></details>')
  parts.append(_settings(group))
  return '\n'.join([*parts, '</section>'])


def _settings(group):
  different = ''.join(
      f'<tr><th scope="row">{_text(name)}</th><td class="left">'
      + ('<br>'.join(f'<code>{html.escape(f"{k} = {v}")}</code>' for k, v in settings.items())
         or 'as below') + '</td></tr>'
      for name, settings in group['different_settings'].items())
  shared = ''.join(f'<li><code>{html.escape(f"{k} = {v}")}</code></li>'
                   for k, v in group['shared_settings'].items())
  if not shared:
    return ''
  table = f'<div class="wide"><table>{different}</table></div>' if len(
      group['different_settings']) > 1 else ''
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
              'seed ' + ', '.join(map(str, span('seed'))),
              'epsilon ' + ', '.join(f'{e:g}' for e in span('epsilon'))]
  return f'<p>{_text(", ".join(facts))}; report of {_text(report["provenance"]["date"])}</p>'


def _made(report):
  items = ''.join(f'<dt>{_upper(key)}</dt><dd><code>{html.escape(value)}</code></dd>'
                  for key, value in report['provenance'].items())
  return f'<dl class="made">{items}</dl>'


def _operation(run):
  return f' ({run["attention"]})' if 'attention' in run else ''


def _text(text):
  """Escaped, with the paper's subscripts; a percent sign stays with its number."""
  text = re.sub(r'Sink_(1|\*)', r'Sink<sub>\1</sub>', html.escape(str(text)))
  return re.sub(r'(?<=\d) %', '&nbsp;%', text)


def _escape(text):
  return re.sub(r'([*_|<])', r'\\\1', text)


def _upper(text):
  return text[0].upper() + text[1:]
