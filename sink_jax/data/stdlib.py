"""The running Python's standard library as a corpus: text that is on every machine."""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import pathlib
import sys
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator

from sink_jax.data import near_copies
from sink_jax.data.documents import Document, DocumentSource, File, digest_of, total_size


@dataclasses.dataclass(frozen=True)
class Stdlib(DocumentSource):
  """The running Python's standard library, without its tests.

  It has two domains. 'code' holds the source of each module. 'docs' holds the docstrings of each
  module, and those of each of its top-level definitions (with the methods inside), a document
  each. Both carry the module as their name, so that they are held out together.

  Attributes:
    max_files: this many modules are read only; 0 reads all.
    split: 'content' holds out groups of modules that are near copies of each other, so that 2 % of
      the held-out windows of 64 characters also occur in training text. 'name', as older runs
      split, holds out modules one by one, and 15 to 20 % do.
  """
  domains: str = 'code,docs'
  max_files: int = 0
  split: str = 'name'

  def __post_init__(self) -> None:
    unknown = set(self._domains()) - {'code', 'docs'}
    if unknown or not self.domains:
      raise ValueError(f"Stdlib(domains={self.domains!r}): choose 'code', 'docs' or 'code,docs'.")
    if self.max_files < 0:
      raise ValueError(f'Stdlib(max_files={self.max_files}) must be 0 (all) or more.')
    if self.split not in ('name', 'content'):
      raise ValueError(f"Stdlib(split={self.split!r}): choose 'content', or 'name' for the split "
                       'of older runs.')

  def __repr__(self) -> str:
    # The keys of caches are made of this text, and those that were built before `split` was an
    # option are still to be found: it is left out where it has the value they were built with.
    split = '' if self.split == 'name' else f', split={self.split!r}'
    return f'Stdlib(domains={self.domains!r}, max_files={self.max_files}{split})'

  def documents(self) -> Iterator[Document]:
    position = 0
    for name, path in self._modules():
      position += path.stat().st_size
      text = _read(path)
      if 'code' in self._domains():
        yield Document(text, 'code', name, position)
      if 'docs' in self._domains():
        for docstrings in _docstrings(text):
          yield Document(docstrings, 'docs', name, position)

  def held_out(self, name: str, fraction: float) -> bool:
    if self.split == 'name':
      return super().held_out(name, fraction)
    return name in _held_out_modules(_root(), self.max_files, fraction)

  def size(self) -> int:
    return total_size(self._modules())

  def fingerprint(self) -> str:
    return digest_of([sys.version] + [(name, path.stat().st_size)
                                      for name, path in self._modules()])

  def _domains(self) -> list[str]:
    return self.domains.split(',')

  def _modules(self) -> list[File]:
    modules = _module_files(_root(), self.max_files)
    if not modules:
      raise ValueError(f'{_root()} holds no .py files (a zipped or stripped Python?); '
                       "use another source, such as TextFolder(path='...').")
    return modules


def splits_by_name(source: str) -> bool:
  """Whether a config string is of a `Stdlib` that holds modules out by their names alone."""
  return source.partition('(')[0].strip() == 'Stdlib' and 'content' not in source


def _root() -> pathlib.Path:
  return pathlib.Path(sysconfig.get_paths()['stdlib'])


@functools.cache
def _module_files(root: pathlib.Path, max_files: int = 0) -> list[File]:
  """(name, path) of all modules but the tests, or of the first of them, ordered by name."""
  skipped = {'test', 'tests', 'idle_test', 'site-packages', 'dist-packages', '__pycache__',
             '__phello__'}
  modules = []
  for path in root.rglob('*.py'):
    parts = path.relative_to(root).parts
    # config-* and _sysconfigdata* describe the machine that built this Python.
    if not (skipped & set(parts) or parts[0].startswith(('config-', '_sysconfigdata'))):
      modules.append(('/'.join(parts), path))
  return sorted(modules)[:max_files or None]


def _read(path: pathlib.Path) -> str:
  """The source of a module, in the encoding that it declares."""
  with tokenize.open(path) as file:
    return file.read()


@functools.cache
def _held_out_modules(root: pathlib.Path, max_files: int, fraction: float) -> frozenset[str]:
  """The modules for validation: whole groups of near copies, in the order of a stable hash.

  A group that would exceed `fraction` of the characters is passed over.
  """
  first, sizes = _groups(root, max_files)
  # The order of hashes is a shuffle that needs no seed and is the same on every machine.
  order = sorted(set(first.values()), key=lambda name: hashlib.blake2b(name.encode()).digest())
  members = {name: [m for m in first if first[m] == name] for name in order}
  held, left = [], fraction * sum(sizes.values())
  for name in order:
    size = sum(sizes[m] for m in members[name])
    if size <= left:
      held += members[name]
      left -= size
  return frozenset(held)


@functools.cache
def _groups(root: pathlib.Path, max_files: int) -> tuple[dict[str, str], dict[str, int]]:
  """({module: the first module of its group}, {module: its characters})."""
  texts = {name: _read(path) for name, path in _module_files(root, max_files)}
  return near_copies.groups(texts), {name: len(text) for name, text in texts.items()}


def _docstrings(source: str) -> Iterator[str]:
  """The docstrings of a module, then those of each top-level definition with all inside it."""
  with warnings.catch_warnings():
    warnings.simplefilter('ignore', SyntaxWarning)  # of the library's own invalid escapes
    module = ast.parse(source)
  owners = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
  parts = [[module]]
  parts += [[node for node in ast.walk(top) if isinstance(node, owners)]
            for top in module.body if isinstance(top, owners)]
  for part in parts:
    texts = [text for node in part if (text := ast.get_docstring(node))]
    if texts:
      yield '\n\n'.join(texts) + '\n'
