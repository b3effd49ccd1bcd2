"""One hostile input: a text and files, as data that can be stored and played again."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple


class File(NamedTuple):
  """Content of a file: head, so many zero bytes (not stored on the disk), tail; or a link."""

  head: bytes = b''
  hole: int = 0
  tail: bytes = b''
  link: str = ''


@dataclasses.dataclass(frozen=True)
class Input:
  """text: what is typed. files: beside, or in place of, those of `base`, by their path.

  removed: files of `base` that are missing.
  """

  text: str = ''
  files: Mapping[str, File] = dataclasses.field(default_factory=dict)
  removed: tuple[str, ...] = ()
  base: str = ''

  def to_json(self) -> str:
    files = {name: [_packed(f.head), f.hole, _packed(f.tail), f.link]
             for name, f in self.files.items()}
    return json.dumps({'text': _packed(self.text.encode('utf-8', 'surrogatepass')), 'files': files,
                       'removed': self.removed, 'base': self.base})

  @classmethod
  def from_json(cls, text: str) -> Input:
    own = json.loads(text)
    files = {name: File(_unpacked(head), hole, _unpacked(tail), link)
             for name, (head, hole, tail, link) in own['files'].items()}
    return cls(_unpacked(own['text']).decode('utf-8', 'surrogatepass'), files,
               tuple(own['removed']), own['base'])

  def write(self, folder: Path, base: Mapping[str, bytes]) -> None:
    """Makes the folder anew, with the files of the base and those of the input."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    files = {name: File(data) for name, data in base.items() if name not in self.removed}
    for name, file in (files | dict(self.files)).items():
      path = os.path.join(folder, name)
      os.makedirs(os.path.dirname(path), exist_ok=True)
      if file.link:
        os.symlink(file.link, path)
        continue
      with open(path, 'wb') as out:
        out.write(file.head)
        out.seek(file.hole, os.SEEK_CUR)
        out.write(file.tail)
        out.truncate()


class Kind(NamedTuple):
  """One kind of input.

  prepare: (scratch folder) -> whatever the next two need; imports all that reading takes.
  inputs: (prepared) -> a hypothesis strategy of `Input`.
  run: (prepared, input, folder with its files) -> None; reads it by the library.
  refusals: names of the exceptions that are a proper answer.
  share: how many of all inputs, in proportion to the other kinds. batch: inputs a process.
  bases: (prepared) -> {name: files}, that inputs change.
  """

  prepare: Callable[[Path], Any]
  inputs: Callable[[Any], Any]
  run: Callable[[Any, Input, Path], None]
  refusals: tuple[str, ...] = ('ValueError',)
  share: int = 10
  batch: int = 1000
  bases: Callable[[Any], Mapping[str, Mapping[str, bytes]]] = lambda prepared: {'': {}}


def _packed(data):
  return base64.b85encode(zlib.compress(data, 1)).decode()


def _unpacked(text):
  return zlib.decompress(base64.b85decode(text))
