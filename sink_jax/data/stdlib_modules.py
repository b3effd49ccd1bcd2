"""The modules of the running Python's standard library, as `Stdlib` needs them."""

from __future__ import annotations

import ast
import functools
import hashlib
import pathlib
import tokenize
import warnings
from collections.abc import Iterator

from sink_jax.data import near_copies


@functools.cache
def modules(root: pathlib.Path, max_files: int = 0) -> list[tuple[str, pathlib.Path]]:
  """(name, file) of all modules but the tests, or the first of them, ordered by name."""
  skipped = {'test', 'tests', 'idle_test', 'site-packages', 'dist-packages', '__pycache__',
             '__phello__'}
  found = []
  for path in root.rglob('*.py'):
    parts = path.relative_to(root).parts
    # config-* and _sysconfigdata* describe the machine that built this Python.
    if not (skipped & set(parts) or parts[0].startswith(('config-', '_sysconfigdata'))):
      found.append(('/'.join(parts), path))
  return sorted(found)[:max_files or None]


def read(path: pathlib.Path) -> str:
  """The source of a module, in the encoding that it declares."""
  with tokenize.open(path) as file:
    return file.read()


@functools.cache
def held_out(root: pathlib.Path, max_files: int, fraction: float) -> frozenset[str]:
  """The modules for validation: whole groups of near copies, in the order of a stable hash.

  A group that would exceed `fraction` of the characters is passed over.
  """
  first, sizes = _groups(root, max_files)
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
def _groups(root, max_files):
  """({module: the first one of its group}, {module: its characters})."""
  texts = {name: read(path) for name, path in modules(root, max_files)}
  return near_copies.groups(texts), {name: len(text) for name, text in texts.items()}


def docstrings(source: str) -> Iterator[str]:
  """The docstrings of a module and of each of its top-level definitions, with all inside."""
  with warnings.catch_warnings():
    warnings.simplefilter('ignore', SyntaxWarning)
    module = ast.parse(source)
  owners = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
  parts = [[module]]
  parts += [[node for node in ast.walk(top) if isinstance(node, owners)]
            for top in module.body if isinstance(top, owners)]
  for part in parts:
    texts = [text for node in part if (text := ast.get_docstring(node))]
    if texts:
      yield '\n\n'.join(texts) + '\n'


def splits_by_name(source: str) -> bool:
  """Whether a config string is of a `Stdlib` that holds modules out by their names alone."""
  return source.replace(' ', '').startswith('Stdlib') and 'content' not in source
