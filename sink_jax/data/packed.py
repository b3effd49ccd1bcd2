"""Packed data: rows of C + 1 tokens in ArrayRecord shards, read in place from a disk or gs://.

A folder of packed data, which is never changed once it is complete, holds:

    00000.array_record ...   the shards, each of consecutive documents. Its records are the rows of
                             its domains in the order of their names, those for training before
                             those for validation; the last record is JSON, see `build`.
    tokenizer.json           says what the ids mean; missing if they are bytes
    manifest.json            settings, and rows per shard, domain and split. Written last: a folder
                             without it is not complete.

A row is its tokens (uint16 or uint32, little-endian), then its weights (uint8) if only answers
count in the loss, then the CRC32 of both. All rows have one length and lie uncompressed in groups of one, so
the manifest gives the byte range of each row, and only these bytes are read, on a disk and on gs:// alike.
(The reader of ArrayRecord, Grain's source, takes the same rows from a disk. Its requests to gs:// are
open-ended, so that a row of 4 KB costs 150 KB: https://github.com/google/array_record/pull/209.)
"""

from __future__ import annotations

import functools
import json
import mmap
import os
import zlib

import fsspec
import numpy as np

from sink_jax.data.tokenizer import TextTokenizer
from sink_jax.io.files import read_text_limited
from sink_jax.io.paths import AnyPath, inside, is_local

FORMAT = 4  # raise it when the files change their meaning
SPLITS = ('train', 'valid')
# A file of ArrayRecord has a header of 24 bytes at each multiple of 64 KiB, also within a record:
# https://github.com/google/riegeli/blob/master/doc/riegeli_records_file_format.md
_BLOCK, _BLOCK_HEADER = 1 << 16, 24


class Packed:
  """The rows of a complete folder of packed data.

  Attributes:
    manifest: what manifest.json holds. domains: names of the domains, sorted.
    bounds: by split, rows bounds[d], ..., bounds[d + 1] - 1 are those of domain d.

  Raises:
    ValueError: the folder is not packed data, or not complete.
  """

  def __init__(self, folder: AnyPath):
    self.folder = folder
    try:
      self.manifest = json.loads(read_text_limited(inside(folder, 'manifest.json')))
      if self.manifest['format'] != FORMAT:
        raise ValueError(f'format {self.manifest["format"]}, not {FORMAT}')
    except (OSError, ValueError, KeyError, TypeError) as error:
      raise ValueError(f'{folder} is not a complete folder of packed data ({error}): build it with '
                       'python -m sink_jax data_build.') from None
    self.domains = sorted(self.manifest['domains'])
    self.weighted: bool = self.manifest['weighted']
    self._length = self.manifest['context'] + 1
    self._dtype = np.dtype(self.manifest['dtype']).newbyteorder('<')
    self.row_bytes = self._length * (self._dtype.itemsize + self.weighted) + 4
    self._store, self._root = fsspec.url_to_fs(os.fspath(folder))
    self._maps: dict[str, mmap.mmap] = {}  # of files on a disk that were read
    # All rows are numbered by domain, then training before validation, then shard.
    runs = []  # of consecutive rows: (domain, split, shard, number of its first record, rows)
    for number, shard in enumerate(self.manifest['shards']):
      inside(folder, shard['file'])  # the manifest may be somebody else's
      first = 0
      for domain, counts in sorted(shard['rows'].items()):
        for split, count in enumerate(counts):
          runs.append((domain, split, number, first, count))
          first += count
    self._runs = np.array([run[2:] for run in sorted(runs)], np.int64).reshape(-1, 3)
    self._starts = np.append(0, np.cumsum(self._runs[:, 2]))
    self.bounds: dict[str, list[int]] = {split: [0] for split in SPLITS}
    self._before: dict[str, list[int]] = {split: [] for split in SPLITS}  # rows before a domain's
    for domain in self.domains:
      sizes = [self.manifest['domains'][domain][split]['rows'] for split in SPLITS]
      if self.split_by_rows(domain):
        valid = max(1, min(sum(sizes) - 1, round(sum(sizes) * self.manifest['valid_fraction'])))
        sizes = [sum(sizes) - valid, valid]
      before = self.bounds['train'][-1] + self.bounds['valid'][-1]
      for split, size, rows in zip(SPLITS, sizes, (before, before + sizes[0]), strict=True):
        self._before[split].append(rows)
        self.bounds[split].append(self.bounds[split][-1] + size)

  def size(self, split: str) -> int:
    """The number of rows of 'train' or 'valid'."""
    return self.bounds[split][-1]

  def split_by_rows(self, domain: str) -> bool:
    """True if its last rows are for validation, since the split puts all its documents on one side."""
    rows = [self.manifest['domains'][domain][split]['rows'] for split in SPLITS]
    return self.manifest['valid_fraction'] not in (0, 1) and sum(rows) > 1 and not all(rows)

  def rows(self, split: str, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Tokens (n, C+1) int32 of these rows of 'train' or 'valid', and their weights (n, C+1) uint8.

    Raises:
      ValueError: a shard is missing or damaged; names it.
    """
    bounds, before = np.array(self.bounds[split]), np.array(self._before[split])
    domain = np.searchsorted(bounds, numbers, side='right') - 1
    numbers = numbers - bounds[domain] + before[domain]
    run = np.searchsorted(self._starts, numbers, side='right') - 1
    shard_n, first, _ = self._runs[run].T
    records = self._read(shard_n, first + numbers - self._starts[run])
    content = np.frombuffer(b''.join(records), np.uint8).reshape(len(records), self.row_bytes)
    size = self._length * self._dtype.itemsize
    tokens = np.ascontiguousarray(content[:, :size]).view(self._dtype).astype(np.int32)
    return tokens, content[:, size:-4] if self.weighted else None

  def prompts(self, count: int, length: int) -> np.ndarray:
    """Up to `count` pieces of validation text (n, length) int32, as varied as possible.

    First come beginnings of held-out documents, alternating between domains, in the order of the documents.
    If they are too few, validation rows are cut into pieces.
    """
    listed = []  # of each domain: (turn, domain, first row, first token of it)
    for d, domain in enumerate(self.domains):
      fitting = [] if self.split_by_rows(domain) else [
          (row, token) for row, token, size in self.manifest['domains'][domain]['prompts']
          if size >= length]
      listed += [(turn, d, self.bounds['valid'][d] + row, token)
                 for turn, (row, token) in enumerate(fitting)]
    chosen: dict[bytes, np.ndarray] = {}  # each once
    for _, _, row, token in sorted(listed):
      if len(chosen) >= count:
        break
      last = row + (token + length - 1) // self._length
      tokens = self.rows('valid', np.arange(row, last + 1))[0].ravel()[token:token + length]
      chosen[tokens.tobytes()] = tokens
    for row in range(self.size('valid')):
      if len(chosen) >= count:
        break
      tokens = self.rows('valid', np.array([row]))[0][0]
      for piece in tokens[:self._length // length * length].reshape(-1, length):
        chosen.setdefault(piece.tobytes(), piece)
    return np.array(list(chosen.values()), np.int32).reshape(-1, length)[:count]

  @functools.cached_property
  def tokenizer(self) -> TextTokenizer:
    """The tokenizer that made the ids; a ValueError if its file is not the one of the build."""
    return TextTokenizer.from_path(inside(self.folder, 'tokenizer.json'))

  def _read(self, shard_n: np.ndarray, record_n: np.ndarray) -> list[bytes]:
    """The records of these numbers in these shards."""
    files = [self.manifest['shards'][shard]['file'] for shard in shard_n]
    first_n = self.manifest['first'] + record_n * self.manifest['stride']
    begins, ends = in_file(first_n), in_file(first_n + self.row_bytes - 1) + 1
    records = []
    for file, content, begin in zip(files, self._parts(files, begins, ends), begins, strict=True):
      row = without_block_headers(content, begin)
      if len(row) != self.row_bytes or zlib.crc32(row[:-4]) != int.from_bytes(row[-4:], 'little'):
        raise ValueError(f'{self.folder / file} is missing or damaged. Delete it and '
                         'manifest.json, and build again: the other shards are kept.')
      records.append(row)
    return records


  def _parts(self, files: list[str], begins: np.ndarray, ends: np.ndarray) -> list[bytes]:
    """Bytes `begin` to `end` of each file; fewer where it is shorter, none where it is missing."""
    if is_local(self.folder):
      return [self._mapped(file)[begin:end] for file, begin, end in zip(files, begins, ends)]
    # One call, so that the requests to a store run side by side.
    read = self._store.cat_ranges([f'{self._root}/{file}' for file in files], begins.tolist(),
                                  ends.tolist(), on_error='return')
    for content in read:
      if isinstance(content, Exception) and not isinstance(content, FileNotFoundError):
        raise content  # of the network
    return [content if isinstance(content, bytes) else b'' for content in read]

  def _mapped(self, file: str) -> mmap.mmap | bytes:
    """A file of the folder, mapped into memory: opening it for each row takes longer than a small step."""
    if file not in self._maps:
      path = self.folder / file
      if not path.is_file() or not os.path.getsize(path):  # there is no map of an empty file
        return b''
      with path.open('rb') as opened:
        self._maps[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    return self._maps[file]


def in_file(position: np.ndarray) -> np.ndarray:
  """Where bytes of the content of a file of ArrayRecord lie in the file."""
  return position + _BLOCK_HEADER * (position // (_BLOCK - _BLOCK_HEADER) + 1)


def without_block_headers(content: bytes, begin: int = 0) -> bytes:
  """The content of a file of ArrayRecord, or of a part of it that begins at byte `begin`."""
  first = -begin % _BLOCK  # of the next block header
  parts = [content[:first]] + [content[at + _BLOCK_HEADER:at + _BLOCK]
                               for at in range(first, len(content), _BLOCK)]
  return b''.join(parts)
