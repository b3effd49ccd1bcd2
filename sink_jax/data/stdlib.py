"""Text that is on every machine: the Python standard library and the installed packages."""

from __future__ import annotations

import ast
import contextlib
import os
import pathlib
import sys
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator

from sink_jax.data.sources import Document, DocumentSource, File, digest_of, listing

_SKIPPED = {
  'test',
  'tests',
  'idle_test',
  'site-packages',
  'dist-packages',
  '__pycache__',
  '__phello__',
}


class Stdlib(DocumentSource):
  """The running Python's standard library, without its tests.

  Its domains are 'code', the source of each module, and 'docs', the docstrings of each module and
  of each of its top-level definitions with the methods inside. All modules of a package are held
  out together: they repeat parts of each other. `max_files` modules are read; 0 reads all.
  """

  _folder = 'stdlib'  # without an annotation it is not a field
  domains: str = 'code,docs'
  max_files: int = 0

  def __post_init__(self) -> None:
    if self.domains not in ('code', 'docs', 'code,docs'):
      raise ValueError(f"{self!r}: domains are 'code', 'docs' or 'code,docs'.")

  def documents(self, start: int = 0) -> Iterator[Document]:
    for name, text in modules(self.max_files, self._folder):
      package = name.split('/')[0].removesuffix('.py')
      texts = [('code', text)] if 'code' in self.domains else []
      texts += [('docs', part) for part in _docstrings(text)] if 'docs' in self.domains else []
      for domain, part in texts:
        if start <= 0:
          yield Document(part, domain, package)
        start -= 1

  def fingerprint(self) -> str:
    return digest_of(
      [sys.version]
      + [(name, path.stat().st_size) for name, path in _files(self.max_files, self._folder)]
    )


class InstalledPackages(Stdlib):
  """As `Stdlib`, for the packages installed for the running Python; only code by default."""

  domains: str = 'code'
  _folder = 'purelib'


def modules(most: int = 0, folder: str = 'stdlib') -> Iterator[tuple[str, str]]:
  """(name, source) of modules, such as 'json/decoder.py', of the first `most` if not 0."""
  for name, path in _files(most, folder):
    # A module is in the encoding that it declares, except examples of errors in some packages.
    with contextlib.suppress(SyntaxError, UnicodeDecodeError), tokenize.open(path) as file:
      yield name, file.read()


def _files(most: int, folder: str) -> list[File]:
  root, paths = pathlib.Path(sysconfig.get_paths()[folder]), []
  for top, folders, files in os.walk(root):
    folders[:] = set(folders) - _SKIPPED  # os.walk enters what is left
    paths += [pathlib.Path(top, file) for file in files if file.endswith('.py')]
  # config-* and _sysconfigdata* describe the machine that built this Python.
  return [
    (name, path)
    for name, path in listing(root, paths)
    if not name.startswith(('config-', '_sysconfigdata'))
  ][: most or None]


def _docstrings(source: str) -> Iterator[str]:
  """The docstrings of a module, then those of each top-level definition with all inside it."""
  with warnings.catch_warnings():
    warnings.simplefilter('ignore', SyntaxWarning)  # invalid escapes in the library itself
    try:
      module = ast.parse(source)
    except SyntaxError:  # a package's template
      return
  owners = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
  parts = [[module]]
  parts += [
    [node for node in ast.walk(top) if isinstance(node, owners)]
    for top in module.body
    if isinstance(top, owners)
  ]
  for part in parts:
    texts = [text for node in part if (text := ast.get_docstring(node))]
    if texts:
      yield '\n\n'.join(texts) + '\n'
