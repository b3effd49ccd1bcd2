"""The sources of installed packages: the largest real text on a machine without a network."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import pathlib
import sysconfig
from collections.abc import Iterator

from sink_jax.data.documents import Document, DocumentSource, File, digest_of, total_size

_DOMAINS = {'.py': 'code', '.pyi': 'code', '.md': 'docs', '.rst': 'docs', '.txt': 'docs'}
_LONGEST = 1 << 20  # bytes; longer files are tables and generated code


@dataclasses.dataclass(frozen=True)
class InstalledPackages(DocumentSource):
  """Sources and documentation of the packages of the running Python, in UTF-8.

  It has two domains, 'code' (.py, .pyi) and 'docs' (.md, .rst, .txt). A package is held out as a
  whole. Copies of a file count once; files of more than 1 MiB are left out. Where `max_files` is
  not 0, that many files are read only.
  """
  max_files: int = 0

  def __post_init__(self) -> None:
    if self.max_files < 0:
      raise ValueError(f'InstalledPackages(max_files={self.max_files}) must be 0 (all) or more.')

  def documents(self) -> Iterator[Document]:
    known, position = set(), 0
    for name, path in self._files():
      content = path.read_bytes()
      position += len(content)
      # Vendored copies and licences would else be in training and in validation text.
      digest = hashlib.blake2b(content, digest_size=16).digest()
      try:
        text = content.decode('utf-8')
      except UnicodeDecodeError:  # an example of another encoding, as a rule
        continue
      if digest not in known and text.strip():
        known.add(digest)
        yield Document(text, _DOMAINS[path.suffix], name.split('/')[0], position)

  def size(self) -> int:
    return total_size(self._files())

  def fingerprint(self) -> str:
    return digest_of([(name, path.stat().st_size) for name, path in self._files()])

  def _files(self) -> list[File]:
    files = _package_files(sysconfig.get_paths()['purelib'])
    if not files:
      raise ValueError('This Python has no packages with sources; use another source, such as '
                       "TextFolder(path='...').")
    return files[:self.max_files or None]


@functools.cache
def _package_files(folder: str) -> list[File]:
  root = pathlib.Path(folder)
  files = (path for path in root.rglob('*') if path.suffix in _DOMAINS and path.is_file())
  return sorted((path.relative_to(root).as_posix(), path) for path in files
                if 0 < path.stat().st_size <= _LONGEST)
