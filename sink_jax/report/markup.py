"""Pieces of a page in HTML and Markdown, the same for every kind of report."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Iterable, Mapping, Sequence

from sink_jax.report.style import STYLE


def document(title: str, parts: Iterable[str]) -> str:
  """A page without scripts or outside resources."""
  return ('<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
          '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
          '<meta name="color-scheme" content="light dark">\n'
          f'<title>{html.escape(title)}</title>\n<style>\n{STYLE}</style>\n</head>\n'
          '<body>\n' + '\n'.join(parts) + '\n</body>\n</html>\n')


def text(words: object) -> str:
  """Words as HTML: escaped, with the paper's subscripts; a percent sign stays with its number."""
  # Escaped first: the tags that are put in here would be escaped as well.
  words = re.sub(r'Sink_(\w+|\*)', r'Sink<sub>\1</sub>', html.escape(str(words)))
  return re.sub(r'(?<=\d) %', '&nbsp;%', words)


def code(words: object) -> str:
  """Words as HTML in a fixed-width font."""
  return f'<code>{html.escape(str(words))}</code>'


def picture(png: bytes, caption: str, kind: str = 'wide') -> str:
  """A figure whose image is part of the page, which then is one file.

  kind: 'wide', or 'single' for one panel.
  """
  # A data URL: a page that is moved or mailed keeps its pictures.
  data, alt = base64.b64encode(png).decode(), html.escape(caption, quote=True)
  # The caption is also the text of the image, for those who do not see it.
  return (f'<figure><div class="{kind}"><img alt="{alt}" src="data:image/png;base64,{data}"></div>'
          f'<figcaption>{text(caption)}</figcaption></figure>')


def table(head: str, rows: Iterable[str]) -> str:
  """A table that scrolls sideways where the screen is narrow. head, rows: cells in HTML."""
  body = ''.join(f'<tr>{row}</tr>' for row in rows)
  top = f'<thead>{head}</thead>' if head else ''
  return f'<div class="wide"><table>{top}<tbody>{body}</tbody></table></div>'


def definitions(items: Mapping[str, str], kind: str = '') -> str:
  """A list of terms; the values are HTML."""
  body = ''.join(f'<dt>{text(key)}</dt><dd>{value}</dd>' for key, value in items.items())
  return f'<dl{f" class={chr(34)}{kind}{chr(34)}" if kind else ""}>{body}</dl>'


def escaped(words: object) -> str:
  """Words as Markdown: nothing in them is markup."""
  return re.sub(r'([\\`*_|<\[\]])', r'\\\1', str(words))


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]],
                   left: Iterable[int] = (0,)) -> list[str]:
  """Lines of a Markdown table; the columns in `left` are left-aligned, the others right-aligned."""
  lines = [head, ['---' if i in left else '---:' for i in range(len(head))], *rows]
  # The second line aligns the columns; every other one holds words.
  safe = lambda i, cell: cell if i == 1 else escaped(cell).replace('\n', ' ')
  return ['| ' + ' | '.join(safe(i, cell) for cell in line) + ' |' for i, line in enumerate(lines)]


def upper(words: str) -> str:
  """The words with a capital at their beginning."""
  return words[:1].upper() + words[1:]
