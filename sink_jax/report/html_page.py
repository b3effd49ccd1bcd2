"""Markdown as one HTML file with its pictures."""

from __future__ import annotations

import base64
import html
import itertools
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from string import Template
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token

_FRAME = Template((resources.files('sink_jax.report') / 'page.html').read_text('utf-8'))


def to_html(markdown: str, pictures: Mapping[str, bytes]) -> str:
  """Markdown as one HTML page that fetches nothing: it holds the pictures, {name: PNG file}.

  Of HTML in the Markdown only folded parts, <details>, are markup, since names may hold anything.
  """
  parser = MarkdownIt('commonmark', {'html': True}).enable('table')
  for kind in ('html_block', 'html_inline'):
    parser.add_render_rule(kind, _folded_parts)
  tokens = parser.parse(markdown)
  headings = (after for token, after in itertools.pairwise(tokens) if token.type == 'heading_open')
  first = next(headings, None)
  title = ''.join(part.content for part in first.children or ()) if first else ''
  body = parser.renderer.render(tokens, parser.options, {})
  body = re.sub(r'src="([^"]*)"', lambda found: f'src="{_embedded(pictures, found[1])}"', body)
  body = body.replace('<table>', '<div class="wide"><table>').replace('</table>', '</table></div>')
  return _FRAME.substitute(title=html.escape(title), body=body).rstrip()


def _folded_parts(renderer: Any, tokens: Sequence[Token], at: int, options: Any, env: Any) -> str:
  """A rule of the renderer for HTML: all tags are text but those of folded parts."""
  return re.sub(r'&lt;(/?(?:details|summary))&gt;', r'<\1>', html.escape(tokens[at].content))


def _embedded(pictures: Mapping[str, bytes], name: str) -> str:
  """A picture as a URL that holds it; '' for one that is not there."""
  if name not in pictures:
    return ''
  return f'data:image/png;base64,{base64.b64encode(pictures[name]).decode()}'
