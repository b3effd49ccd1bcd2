"""Text that is on every machine: the Python standard library and the installed packages."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import pathlib
import sys
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator

from sink_jax.data.sources import Document, DocumentSource, File, digest_of, listing

_SUFFIXES = {'.py': 'code', '.pyi': 'code', '.md': 'docs', '.rst': 'docs', '.txt': 'docs'}
_LONGEST = 1 << 20  # bytes of an installed file; longer ones are tables and generated code
_SKIPPED = {'test', 'tests', 'idle_test', 'site-packages', 'dist-packages', '__pycache__',
            '__phello__'}


@dataclasses.dataclass(frozen=True)
class Stdlib(DocumentSource):
  """The running Python's standard library, without its tests.

  Its domains are 'code', the source of each module, and 'docs', the docstrings of each module and of
  each of its top-level definitions with the methods inside. All modules of a package are held out
  together: they repeat parts of each other. `max_files` modules are read; 0 reads all.
  """
  domains: str = 'code,docs'
  max_files: int = 0

  def __post_init__(self) -> None:
    if self.domains not in ('code', 'docs', 'code,docs', 'docs,code') or self.max_files < 0:
      raise ValueError(f"{self!r}: domains are 'code', 'docs' or 'code,docs', max_files 0 (all) or "
                       'more.')

  def documents(self, start: int = 0) -> Iterator[Document]:
    for name, text in modules(self.max_files):
      package = name.split('/')[0].removesuffix('.py')
      texts = [('code', text)] if 'code' in self.domains else []
      texts += [('docs', part) for part in _docstrings(text)] if 'docs' in self.domains else []
      for domain, part in texts:
        if start <= 0:
          yield Document(part, domain, package)
        start -= 1

  def fingerprint(self) -> str:
    return digest_of([sys.version] + [(name, path.stat().st_size)
                                      for name, path in _files(self.max_files)])


def modules(most: int = 0) -> Iterator[tuple[str, str]]:
  """(name, source) of the library's modules, such as 'json/decoder.py', of the first `most` if not 0."""
  for name, path in _files(most):
    with tokenize.open(path) as file:  # in the encoding that the module declares
      yield name, file.read()


def _files(most: int) -> list[File]:
  root = pathlib.Path(sysconfig.get_paths()['stdlib'])
  # config-* and _sysconfigdata* describe the machine that built this Python.
  return [(name, path) for name, path in listing(root, root.rglob('*.py'))
          if not (_SKIPPED & set(name.split('/')) or name.startswith(('config-', '_sysconfigdata')))
          ][:most or None]


def _docstrings(source: str) -> Iterator[str]:
  """The docstrings of a module, then those of each top-level definition with all inside it."""
  with warnings.catch_warnings():
    warnings.simplefilter('ignore', SyntaxWarning)  # invalid escapes in the library itself
    module = ast.parse(source)
  owners = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
  parts = [[module]]
  parts += [[node for node in ast.walk(top) if isinstance(node, owners)]
            for top in module.body if isinstance(top, owners)]
  for part in parts:
    texts = [text for node in part if (text := ast.get_docstring(node))]
    if texts:
      yield '\n\n'.join(texts) + '\n'


@dataclasses.dataclass(frozen=True)
class InstalledPackages(DocumentSource):
  """Sources and documentation of the packages of the running Python, in UTF-8.

  Its domains are 'code' (.py, .pyi) and 'docs' (.md, .rst, .txt). A package is held out as a whole.
  Copies of a file count once; files of more than 1 MiB are left out.
  """

  def documents(self, start: int = 0) -> Iterator[Document]:
    known = set()
    for name, path in self._files():
      content = path.read_bytes()
      # Vendored copies and licences would else be in training and in validation text.
      digest = hashlib.blake2b(content, digest_size=16).digest()
      try:
        text = content.decode('utf-8')
      except UnicodeDecodeError:  # as a rule an example of another encoding
        continue
      if digest not in known and text.strip():
        known.add(digest)
        if start <= 0:
          yield Document(text, _SUFFIXES[path.suffix], name.split('/')[0])
        start -= 1

  def fingerprint(self) -> str:
    return digest_of([(name, path.stat().st_size) for name, path in self._files()])

  def _files(self) -> list[File]:
    root = pathlib.Path(sysconfig.get_paths()['purelib'])
    files = listing(root, (path for path in root.rglob('*') if path.suffix in _SUFFIXES))
    return [(name, path) for name, path in files if 0 < path.stat().st_size <= _LONGEST]
