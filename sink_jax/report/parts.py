"""A report that is written part by part as Markdown, of which its page is made: one HTML file."""

from __future__ import annotations

import base64
import contextlib
import html
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token

from sink_jax.io.files import write_atomically
from sink_jax.io.paths import AnyPath
from sink_jax.io.terminal import Markdown, escaped, markdown_table
from sink_jax.report.images import shrunk, webp
from sink_jax.report.markup import anchor, bold, code, joined, line, upper
from sink_jax.report.style import STYLE

_PICTURES = 2_600_000  # bytes on a page, where base64 makes a third more of them
_PIXELS = 1.5  # of a picture in one of the page
_PICTURE = re.compile(r'<p><img src="(.*?)" alt="(.*?)">\n<em>(.*)</em></p>')
# What becomes of HTML tags, which no words have. The first cell of a row heads it, for those who
# hear the page read, and stays in sight; tables scroll where they are wide.
_TAGS = {r'<th( .*?)?>': r'<th\1 scope="col">',
         r'<tr>\n<td( .*?)?>(.*?)</td>': r'<tr>\n<th\1 scope="row">\2</th>',
         r'<table>': r'<div class="wide"><table>', r'</table>': r'</table></div>'}
Cell = object | tuple[object, str]  # words or Markdown; with small print


class Parts:
  """The parts of a report so far.

  Words are shown as they are, whatever is in them; `markup` has pieces that are Markdown.
  """

  def __init__(self, title: str):
    self._title = title
    self._lines: list[str] = [f'# {escaped(title)}', '']
    self._images: dict[str, bytes] = {}

  def heading(self, words: object, level: int = 2) -> None:
    """level: 2 for a chapter, 3 for a part of one."""
    self._add(f'{"#" * level} {escaped(words)}')

  def paragraph(self, words: object) -> None:
    if words:
      self._add(_begun(escaped(words)))

  def paragraphs(self, lines: Iterable[object]) -> None:
    for words in lines:
      self.paragraph(words)

  def code(self, words: str) -> None:
    """A line to be typed."""
    words = ' '.join(words.split())
    # A line of as many backticks would end the block.
    fence = '`' * max(3, 1 + max(map(len, re.findall('`+', words)), default=0))
    self._add(fence, words, fence)

  def items(self, lines: Sequence[object]) -> None:
    if lines:
      self._add(*(f'- {_begun(escaped(line))}' for line in lines))

  def facts(self, facts: Mapping[str, Iterable[object]]) -> None:
    """An item for each: its name, and its values as they would be typed."""
    self.items([line(bold(upper(name)), ': ', joined(map(code, values), '; '))
                for name, values in facts.items()])

  def table(self, head: Sequence[object], rows: Sequence[Sequence[Cell]],
            left: Collection[int] = (0,)) -> None:
    """left: the columns of words, which begin at the left; numbers end at the right."""
    self._add(*markdown_table(head, [[_cell(cell) for cell in row] for row in rows], left))

  def picture(self, name: str, png: bytes, caption: str) -> None:
    """name: of its file, which stands beside the Markdown; the page has the picture in it."""
    self._images[name] = png
    # The text of the image is its first sentence: the whole caption stands below.
    first = escaped(re.split(r'(?<=\w)[.:;] ', caption)[0].removesuffix('.'))
    self._add(f'![{first}]({name})', f'*{escaped(caption)}*')

  @contextlib.contextmanager
  def details(self, summary: str) -> Iterator[None]:
    """What is added within is folded away below a line of words."""
    words = re.sub(r'[<>&\\]', ' ', ' '.join(summary.split()))
    self._add(f'<details><summary>{words}</summary>')
    yield
    self._add('</details>')

  def markdown(self) -> str:
    return '\n'.join(self._lines)

  def html(self) -> str:
    """A page without scripts or outside resources."""
    # The one HTML within the Markdown is that of `details`: `escaped` lets no words begin any.
    parser = MarkdownIt('commonmark', {'html': True, 'xhtmlOut': False})
    parser.enable('table').disable('html_inline').add_render_rule('text', _text)
    tokens = parser.parse(self.markdown())
    _name_headings(tokens)
    body = parser.renderer.render(tokens, parser.options, {})
    for tag, with_more in _TAGS.items():
      body = re.sub(tag, with_more, body)
    images = shrunk(self._images, _PICTURES)
    body = _PICTURE.sub(lambda found: _figure(images[found[1]], *found.groups()[1:]), body)
    return ('<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            '<meta name="color-scheme" content="light dark">\n'
            f'<title>{html.escape(self._title)}</title>\n<style>\n{STYLE}</style>\n</head>\n'
            f'<body>\n<main>\n{body}</main>\n</body>\n</html>\n')

  def write(self, folder: AnyPath, record: str) -> None:
    """Writes report.md, index.html, the pictures, and as report.json `record`.

    Raises:
      OSError: `folder` cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Pictures first: a page names no picture that is not there. They keep their full size; only
    # the copies in the page are made smaller.
    for name, png in self._images.items():
      write_atomically(folder / name, png)
    write_atomically(folder / 'report.json', record)
    write_atomically(folder / 'report.md', self.markdown())
    write_atomically(folder / 'index.html', self.html())

  def _add(self, *lines: str) -> None:
    self._lines += [*lines, '']


def _begun(line: str) -> str:
  """The same line of words, which begins no heading, list, quotation or fence."""
  line = re.sub(r'^(?=[-+](\s|$)|---|#{1,6}(\s|$)|>|~~~)', r'\\', line)
  return re.sub(r'^(\d{1,9})(?=[.)](\s|$))', r'\1\\', line)


def _cell(cell: Cell) -> object:
  if not isinstance(cell, tuple):
    return cell
  words, more = cell
  return Markdown(f'{escaped(words)} *({escaped(more)})*') if more else words


def _text(_: Any, tokens: Sequence[Token], i: int, *options: Any) -> str:
  """The HTML of words, as the rule of a renderer."""
  # Escaped first: the tags that are put in here would be escaped as well.
  words = re.sub(r'Sink_(\w+|\*)', r'Sink<sub>\1</sub>', html.escape(tokens[i].content))
  # A percent sign stays with its number.
  return re.sub(r'(?<=\d) %', '&nbsp;%', words)


def _name_headings(tokens: Sequence[Token]) -> None:
  """Gives headings the anchors that `markup.link` leads to."""
  seen: Counter[str] = Counter()
  for heading, inline in zip(tokens, tokens[1:]):
    if heading.type == 'heading_open':
      key = anchor(''.join(child.content for child in inline.children or ()))
      heading.attrSet('id', f'{key}-{seen[key]}' if seen[key] else key)
      seen[key] += 1


def _figure(png: bytes, alt: str, caption: str) -> str:
  """A figure with the picture in it."""
  width, picture = webp(png)
  # A data URL: a page that is moved or mailed keeps its pictures. As large as it was drawn, where there is room.
  return (f'<figure style="max-width: {round(width / _PIXELS)}px">'
          f'<img src="data:image/webp;base64,{base64.b64encode(picture).decode()}" alt="{alt}">'
          f'<figcaption>{caption}</figcaption></figure>')
