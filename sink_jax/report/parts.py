"""A page that is written in Markdown and in HTML at once, part by part."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sink_jax.io.files import write_atomically
from sink_jax.io.paths import AnyPath
from sink_jax.report import markup
from sink_jax.report.jsontext import to_json


class Parts:
  """The parts of a page so far, in both forms, which say the same."""

  def __init__(self, title: str):
    self._title = title
    self._markdown, self._html = [f'# {title}', ''], ['<article>', f'<h1>{title}</h1>']

  def heading(self, words: str, level: int = 2) -> None:
    """level: 2 for a chapter, 3 for a part of one."""
    self._add([f'{"#" * level} {words}'], f'<h{level}>{markup.text(words)}</h{level}>')

  def paragraph(self, words: str) -> None:
    self._add([markup.escaped(words)], f'<p>{markup.text(words)}</p>')

  def code(self, words: str) -> None:
    """A line to be typed."""
    self._add(['```', words, '```'], f'<p>{markup.code(words)}</p>')

  def items(self, lines: Sequence[str]) -> None:
    self._add([f'- {markup.escaped(line)}' for line in lines],
              '<ul>' + ''.join(f'<li>{markup.text(line)}</li>' for line in lines) + '</ul>')

  def table(self, head: Sequence[str], rows: Sequence[Sequence[str]],
            left: Collection[int] = (0,)) -> None:
    """left: the columns of words, which begin at the left; numbers end at the right."""
    def cells(tag: str, row: Sequence[str]) -> str:
      return ''.join(f'<{tag}{" class=left" if i in left else ""}>{markup.text(cell)}</{tag}>'
                     for i, cell in enumerate(row))

    self._add(markup.markdown_table(head, rows, left), markup.table(
        f'<tr>{cells("th", head)}</tr>', (cells('td', row) for row in rows)))

  def picture(self, name: str, png: bytes, caption: str) -> None:
    """name: of its file, which stands beside the Markdown; HTML has the picture in it."""
    self._add([f'![{caption}]({name})'], markup.picture(png, caption))

  def markdown(self) -> str:
    return '\n'.join(self._markdown)

  def html(self) -> str:
    return markup.document(self._title, [*self._html, '</article>'])

  def write(self, out: AnyPath, record: Any, pictures: Mapping[str, bytes]) -> None:
    """Writes both forms to a folder, the record as report.json, and the pictures by name."""
    out.mkdir(parents=True, exist_ok=True)
    for name, png in pictures.items():
      write_atomically(out / name, png)
    write_atomically(out / 'report.json', to_json(record))
    write_atomically(out / 'report.md', self.markdown())
    write_atomically(out / 'index.html', self.html())

  def _add(self, lines: Sequence[str], html: str) -> None:
    self._markdown += [*lines, '']
    self._html.append(html)
