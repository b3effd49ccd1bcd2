"""The page of a report: its Markdown as one HTML file that needs no other."""

from __future__ import annotations

import base64
import html
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token

from sink_jax.report.images import tiles
from sink_jax.report.markup import anchor
from sink_jax.report.style import STYLE

_PIXELS = 1.5  # of a picture in one of the page
# The one HTML that Markdown is taken at its word for, and that `escaped` lets no name begin.
_FOLDED = re.compile(r'<details><summary>[^<>&]*</summary>|</details>')


def web_page(title: str, markdown: str, images: Mapping[str, bytes]) -> str:
  """A page without scripts or outside resources.

  images: PNGs by the names that the Markdown has for them.
  """
  options = {'html': True, 'xhtmlOut': False}
  parser = MarkdownIt('commonmark', options, renderer_cls=_Page).enable('table')
  tokens = parser.parse(markdown)
  _name_headings(tokens)
  _head_rows(tokens)
  _frame_pictures(tokens, images)
  body = parser.renderer.render(tokens, parser.options, {})
  return ('<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
          '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
          '<meta name="color-scheme" content="light dark">\n'
          f'<title>{html.escape(title)}</title>\n<style>\n{STYLE}</style>\n</head>\n'
          f'<body>\n<main>\n{body}</main>\n</body>\n</html>\n')


class _Page(RendererHTML):
  """The HTML of tokens: raw HTML is shown as text, and tables scroll where they are wide."""

  def text(self, tokens: Sequence[Token], i: int, options: Any, env: Any) -> str:
    # Escaped first: the tags that are put in here would be escaped as well.
    words = re.sub(r'Sink_(\w+|\*)', r'Sink<sub>\1</sub>', html.escape(tokens[i].content))
    # A percent sign stays with its number.
    return re.sub(r'(?<=\d) %', '&nbsp;%', words)

  def html_block(self, tokens: Sequence[Token], i: int, options: Any, env: Any) -> str:
    content = tokens[i].content.strip()
    return f'{content}\n' if _FOLDED.fullmatch(content) else f'<p>{html.escape(content)}</p>\n'

  def html_inline(self, tokens: Sequence[Token], i: int, options: Any, env: Any) -> str:
    return html.escape(tokens[i].content)

  def table_open(self, tokens: Sequence[Token], i: int, options: Any, env: Any) -> str:
    return '<div class="wide"><table>\n'

  def table_close(self, tokens: Sequence[Token], i: int, options: Any, env: Any) -> str:
    return '</table></div>\n'


def _name_headings(tokens: Sequence[Token]) -> None:
  """Gives headings the anchors that `markup.link` leads to."""
  seen: Counter[str] = Counter()
  for heading, inline in zip(tokens, tokens[1:]):
    if heading.type == 'heading_open':
      key = anchor(''.join(child.content for child in inline.children or ()))
      heading.attrSet('id', f'{key}-{seen[key]}' if seen[key] else key)
      seen[key] += 1


def _head_rows(tokens: Sequence[Token]) -> None:
  """The first cell of a row heads it, for those who hear the page read, and stays in sight."""
  for i, token in enumerate(tokens):
    if token.type == 'th_open':
      token.attrSet('scope', 'col')
    if token.type == 'tr_open' and tokens[i + 1].type == 'td_open':
      first = tokens[i + 1]
      first.tag = tokens[i + 3].tag = 'th'
      first.attrSet('scope', 'row')


def _frame_pictures(tokens: Sequence[Token], images: Mapping[str, bytes]) -> None:
  """Makes figures of paragraphs that are a picture and its caption, with the picture in them.

  Panels are images of their own, which stand below one another where the page is narrow.
  """
  for i, token in enumerate(tokens):
    children = token.children or []
    if not children or children[0].type != 'image':
      continue
    first, *caption = children
    tokens[i - 1].tag = tokens[i + 1].tag = 'figure'
    width, parts = tiles(images[str(first.attrs['src'])])
    # Shown as large as it was drawn, where there is room.
    tokens[i - 1].attrSet('style', f'max-width: {round(width / _PIXELS)}px')
    drawn = []
    for part, share in parts:
      # A data URL: a page that is moved or mailed keeps its pictures.
      png = base64.b64encode(part).decode()
      drawn.append(Token('image', 'img', 0, children=[] if drawn else first.children, attrs={
          'src': f'data:image/png;base64,{png}', 'alt': '',
          'style': f'width: {100 * share:.1f}%'}))
    for child in caption:
      child.tag = 'figcaption' if child.tag == 'em' and child.level == 0 else child.tag
    token.children = [*drawn, *(child for child in caption if child.type != 'softbreak')]
