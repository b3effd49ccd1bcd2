"""Packed data: rows of C + 1 tokens in flat files, read in place from a disk or gs://.

A folder of packed data, which is never changed once it is complete, holds:

    00000.bin ...    the shards, each of consecutive documents: the rows of its domains in the
                     order of their names, those for training before those for validation
    00000.json ...   what a stopped build needs to know of a shard, see `build`
    tokenizer.json   says what the ids mean
    manifest.json    settings, and rows per shard, domain and split. Written last: a folder
                     without it is not complete.

All rows have one `row_type`, and nothing lies between them: row i of a shard begins at byte
i * itemsize, and `np.fromfile(path, row_type)` reads all. Only the bytes of the rows that are asked
for are read, on a disk and on gs:// alike.
"""

from __future__ import annotations

import functools
import itertools
import json
import mmap
import os
import zlib
from collections.abc import Iterator
from typing import Any

import fsspec
import numpy as np

from sink_jax.data.tokenizer import TextTokenizer
from sink_jax.io.files import read_text_limited
from sink_jax.io.paths import AnyPath, inside, is_local

FORMAT = 5  # raise it when the files change their meaning
SPLITS = ('train', 'valid')


def row_type(length: int, token_type: str, weighted: bool) -> np.dtype:
  """A row: tokens, weights if only answers count in the loss, and the CRC32 of both."""
  weights = [('weights', 'u1', length)] if weighted else []
  return np.dtype([('tokens', token_type, length), *weights, ('crc32', '<u4')])


class Packed:
  """The rows of a complete folder of packed data.

  Attributes:
    manifest: what manifest.json holds. domains: names of the domains, sorted.
    bounds: by split, rows bounds[d], ..., bounds[d + 1] - 1 are those of domain d.

  Raises:
    ValueError: the folder is not packed data, not complete, or of another version.
  """

  def __init__(self, folder: AnyPath):
    self.folder, self.manifest = folder, _manifest(folder)
    self.domains = sorted(self.manifest['domains'])
    self._row = row_type(
      self.manifest['context'] + 1, self.manifest['token_type'], self.manifest['weighted']
    )
    self._files: list[str] = self.manifest['shards']
    for file in self._files:
      inside(folder, file)  # the manifest may be somebody else's
    self._store, self._root = fsspec.url_to_fs(os.fspath(folder))
    self._maps: dict[str, mmap.mmap] = {}  # of files on a disk that were read
    self.bounds: dict[str, list[int]] = {}
    self._runs: dict[str, np.ndarray] = {}  # by split: shard, first row in it, number of rows
    for split in SPLITS:
      runs = [self.manifest['domains'][domain]['runs'][split] for domain in self.domains]
      sizes = [sum(count for _, _, count in of_domain) for of_domain in runs]
      self.bounds[split] = [0, *itertools.accumulate(sizes)]
      self._runs[split] = np.array([*itertools.chain(*runs)], np.int64).reshape(-1, 3)

  def size(self, split: str) -> int:
    """The number of rows of 'train' or 'valid'."""
    return self.bounds[split][-1]

  def counts(self) -> dict[str, dict[str, dict[str, int]]]:
    """The numbers of documents, tokens and rows of each domain and split."""
    return {
      name: {split: domain[split] for split in SPLITS}
      for name, domain in self.manifest['domains'].items()
    }

  def rows(self, split: str, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Tokens (n, C+1) int32 of these rows of 'train' or 'valid', and weights (n, C+1) uint8.

    Raises:
      ValueError: a row is missing or damaged; names it and its file.
    """
    runs = self._runs[split]
    ends = np.cumsum(runs[:, 2])
    run_n = np.searchsorted(ends, numbers, side='right')
    shard_n, first_n, count_n = runs[run_n].T
    row_n = first_n + numbers - (ends[run_n] - count_n)
    rows = np.frombuffer(self._read(shard_n.tolist(), row_n.tolist()), self._row)
    weights = rows['weights'] if self.manifest['weighted'] else None
    return rows['tokens'].astype(np.int32), weights

  def prompts(self, count: int, length: int) -> np.ndarray:
    """Up to `count` pieces of validation text (n, length) int32, as varied as possible.

    First come beginnings of held-out documents, alternating between domains, in the order of the
    documents. If they are too few, validation rows are cut into pieces.
    """
    chosen: dict[bytes, np.ndarray] = {}  # each once
    for piece in self._pieces(length):
      if len(chosen) == count:
        break
      chosen.setdefault(piece.tobytes(), piece)
    return np.array(list(chosen.values()), np.int32).reshape(-1, length)

  @functools.cached_property
  def tokenizer(self) -> TextTokenizer:
    """The tokenizer that made the ids; a ValueError if its file is not the one of the build."""
    return TextTokenizer.from_path(inside(self.folder, 'tokenizer.json'))

  def _pieces(self, length: int) -> Iterator[np.ndarray]:
    row_length = self.manifest['context'] + 1
    beginnings = []  # turn, domain, row, token
    for d, domain in enumerate(self.domains):
      prompts = self.manifest['domains'][domain]['prompts']
      fitting = [(row, token) for row, token, size in prompts if size >= length]
      beginnings += [(turn, d, *place) for turn, place in enumerate(fitting)]
    for _, d, row, token in sorted(beginnings):
      first = self.bounds['valid'][d] + row
      last = first + (token + length - 1) // row_length
      tokens, _ = self.rows('valid', np.arange(first, last + 1))
      yield tokens.ravel()[token : token + length]
    for row in range(self.size('valid')):
      tokens, _ = self.rows('valid', np.array([row]))
      yield from tokens[0, : row_length // length * length].reshape(-1, length)

  def _read(self, shard_n: list[int], row_n: list[int]) -> bytes:
    """The bytes of these rows of these shards, each row checked."""
    size = self._row.itemsize
    files, begins = [self._files[shard] for shard in shard_n], [row * size for row in row_n]
    if is_local(self.folder):
      read = [self._mapped(file)[at : at + size] for file, at in zip(files, begins, strict=True)]
    else:
      read = self._fetched(files, begins)
    for file, number, row in zip(files, row_n, read, strict=True):
      if len(row) < size or zlib.crc32(row[:-4]) != int.from_bytes(row[-4:], 'little'):
        raise ValueError(
          f'{self.folder / file}: row {number} is missing or damaged. Delete the '
          'file and manifest.json, and build again: the other shards are kept.'
        )
    return b''.join(read)

  def _mapped(self, file: str) -> mmap.mmap | bytes:
    """A file, mapped into memory: opening it for each row takes longer than a small step."""
    if file not in self._maps:
      path = self.folder / file
      if not path.is_file() or not os.path.getsize(path):  # there is no map of an empty file
        return b''
      with path.open('rb') as opened:
        self._maps[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    return self._maps[file]

  def _fetched(self, files: list[str], begins: list[int]) -> list[bytes]:
    """A row of each file of a store; less where the file ends, nothing where it is missing."""
    paths = [f'{self._root}/{file}' for file in files]
    ends = [begin + self._row.itemsize for begin in begins]
    # One call, so that the requests run side by side.
    answers = self._store.cat_ranges(paths, begins, ends, on_error='return')
    for answer in answers:
      if isinstance(answer, Exception) and not isinstance(answer, FileNotFoundError):
        raise answer  # of the network
    return [answer if isinstance(answer, bytes) else b'' for answer in answers]


def _manifest(folder: AnyPath) -> dict[str, Any]:
  try:
    manifest = json.loads(read_text_limited(inside(folder, 'manifest.json')))
    version = manifest['format']
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise ValueError(
      f'{folder} is not a complete folder of packed data ({error}): build it with '
      'python -m sink_jax data_build.'
    ) from None
  if version != FORMAT:
    keys = ['source', 'tokenizer', 'context', 'bos', 'eos']
    if manifest.get('valid_fraction') not in (0, 1):  # those of a pair
      keys.append('valid_fraction')
    options = ' '.join(f'--config.data.{key}="{manifest.get(key)}"' for key in keys)
    raise ValueError(
      f'{folder} was packed by another version (format {version}, not {FORMAT}). '
      'Delete it and pack its text again: '
      f'python -m sink_jax data_build --out={folder} {options}'
    )
  return manifest
