"""A page about one model: what `python -m sink_jax evaluate` measured."""

from __future__ import annotations

import base64
import html
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from string import Template
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token

from sink_jax.evaluate.sink_report import table_rows
from sink_jax.io.files import read_text_limited
from sink_jax.io.paths import AnyPath, inside
from sink_jax.io.terminal import escaped, markdown_table

PICTURES = {
  'importance.png': 'Mean attention of all queries to the first token, by block and head.',
  'attention_maps.png': (
    'Attention of heads with the most and the least attention to the first token.'
  ),
  'norms.png': (
    'Norms of hidden states, keys and values: the first token, and the mean of the others.'
  ),
}
_FRAME = Template((resources.files('sink_jax.report') / 'page.html').read_text('utf-8'))


def model_page(folder: AnyPath) -> str:
  """The page of a folder that `evaluate` wrote, as Markdown; ValueError if it is not one."""
  try:
    result = json.loads(read_text_limited(inside(folder, 'sink_report.json')))
    rows = table_rows(result['summary'], result['protocol'], result['epsilon'])
    parts = [
      f'# {escaped(result["protocol"]["run"] or "model")}',
      ' '.join(sentences(result)),
      '\n'.join(markdown_table(('metric', 'value', 'meaning'), rows, (0, 2))),
    ]
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise ValueError(
      f'{folder} does not hold what python -m sink_jax evaluate writes ({error}): run it again.'
    ) from None
  parts += [
    f'![{words}]({name})\n\n*{words}*'
    for name, words in PICTURES.items()
    if (folder / name).exists()
  ]
  return '\n\n'.join(parts) + '\n'


def sentences(result: Mapping[str, Any]) -> list[str]:
  """How many heads have a sink, and how the first token differs from the others."""
  summary, protocol = result['summary'], result['protocol']
  uniform = sum(1 / n for n in range(1, protocol['length'] + 1)) / protocol['length']
  heads, sequences = sum(map(len, result['importance_1'])), protocol['sequences']
  found = [
    f'In {summary["sink_1"]:.1f} % of {heads * sequences:,} pairs of a head and a sequence '
    f'({heads} heads, {sequences} sequences) the first token gets more than '
    f'{result["epsilon"]:g} of the attention; uniform causal attention would give it '
    f'{uniform:.2f}.'
  ]
  hidden = [
    (ratio, block) for block, ratio in enumerate(summary['hidden_ratio']) if block and ratio
  ]
  values = [
    (ratio, block) for ratio, block in zip(summary['value_ratio'], protocol['blocks']) if ratio
  ]
  if hidden and values:
    (longest, at), (shortest, there) = max(hidden), min(values)
    found.append(
      f'Compared with the other tokens, its hidden state is {longest:.3g} times as long '
      f'after block {at}, and its value {shortest:.2g} times in block {there}.'
    )
  return found


def to_html(markdown: str, folder: AnyPath) -> str:
  """Markdown as one HTML page that fetches nothing: it holds the pictures of the folder.

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
  body = re.sub(r'src="([^"]*)"', lambda found: f'src="{_embedded(folder, found[1])}"', body)
  body = body.replace('<table>', '<div class="wide"><table>').replace('</table>', '</table></div>')
  return _FRAME.substitute(title=html.escape(title), body=body).rstrip()


def _folded_parts(renderer: Any, tokens: Sequence[Token], at: int, options: Any, env: Any) -> str:
  """A rule of the renderer for HTML: all tags are text but those of folded parts."""
  return re.sub(r'&lt;(/?(?:details|summary))&gt;', r'<\1>', html.escape(tokens[at].content))


def _embedded(folder: AnyPath, name: str) -> str:
  """A picture of the folder as a URL that holds it; '' for one of another place."""
  try:
    file = inside(folder, name)
  except ValueError:
    return ''
  if ':' in name:  # a URL
    return ''
  return f'data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}'
