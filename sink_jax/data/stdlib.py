"""Text that is on every machine: Python's library and manual, and the installed packages."""

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
from pydoc_data.topics import topics

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
      package = _package(name)
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


class PythonManual(DocumentSource):
  """The chapters of Python's language reference that `help()` of the running Python shows."""

  def documents(self, start: int = 0) -> Iterator[Document]:
    for name, text in sorted(topics.items())[start:]:
      yield Document(text, 'manual', name)

  def fingerprint(self) -> str:
    return digest_of([sys.version])


class StdlibFunctions(DocumentSource):
  """Code without prose: of each module of the standard library the longest function.

  Functions with a docstring do not count, nor do methods. `Stdlib(domains='code')` has whole
  modules, which begin with prose.
  """

  def documents(self, start: int = 0) -> Iterator[Document]:
    for name, text in modules():
      module = _parsed(text)
      found = [
        ast.get_source_segment(text, node) or ''
        for node in (module.body if module else ())
        if isinstance(node, ast.FunctionDef) and not ast.get_docstring(node)
      ]
      if found:
        if start <= 0:
          yield Document(max(found, key=len), 'code', _package(name))
        start -= 1

  def fingerprint(self) -> str:
    return Stdlib().fingerprint()


def modules(most: int = 0, folder: str = 'stdlib') -> Iterator[tuple[str, str]]:
  """(name, source) of modules, such as 'json/decoder.py', of the first `most` if not 0."""
  for name, path in _files(most, folder):
    # A module is in the encoding that it declares, except examples of errors in some packages.
    with contextlib.suppress(SyntaxError, UnicodeDecodeError), tokenize.open(path) as file:
      yield name, file.read()


def _package(name: str) -> str:
  """The package of a module: its modules are held out together."""
  return name.split('/')[0].removesuffix('.py')


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
  module = _parsed(source)
  if module is None:
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


def _parsed(source: str) -> ast.Module | None:
  """The syntax tree of a module; None for a package's template."""
  with warnings.catch_warnings():
    warnings.simplefilter('ignore', SyntaxWarning)  # invalid escapes in the library itself
    try:
      return ast.parse(source)
    except SyntaxError:
      return None
