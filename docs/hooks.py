"""Hooks of mkdocs: the site begins with README.md and includes linked files outside of docs/.

Pages link such files, as in `../results/plan/README.md`, by paths that also work on a disk and on a
code host. In the site the files keep the paths of the repository, with docs/ as its top; only links
of Markdown files are followed.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r'(\]\()([^)#:\s]+)(?=[)#])')


def on_files(files: Files, config: MkDocsConfig) -> Files:
  """Adds README.md and, from page to page, each file outside of docs/ that is linked."""
  left = ['README.md', *(f'docs/{file.src_uri}' for file in files.documentation_pages())]
  done = set()
  while left:
    path = left.pop()
    if path in done or not (ROOT / path).is_file():
      continue
    done.add(path)
    if not path.startswith('docs/'):
      files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    if path.endswith('.md'):
      left += [
        posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        for _, target in _LINK.findall((ROOT / path).read_text())
      ]
  return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
  """Rewrites links between docs/ and the rest, which share a top in the site; renders <details>."""
  path = page.file.src_uri
  inside = (ROOT / 'docs' / path).is_file()
  folder = posixpath.dirname(f'docs/{path}' if inside else path)

  def moved(link: re.Match) -> str:
    target = posixpath.normpath(posixpath.join(folder, link[2])).removeprefix('docs/')
    return link[1] + posixpath.relpath(target, posixpath.dirname(path) or '.')

  return _LINK.sub(moved, markdown).replace('<details>', '<details markdown="1">')
