"""A chunk cache on disk, opened for reading: manifest, memory-mapped chunks, probe prompts.

A cache is a folder, named after a hash of all that decides its content, and never changed again:

    manifest.json    settings of the build; per domain and split the file, its documents, tokens
                     and chunks; sizes and SHA-256 of all other files. Written last: a folder
                     without it is no cache.
    train.000.npy    (chunks, context + 1) uint16 or uint32, one file for each domain and split,
    valid.000.npy    numbered in the order in which the domains first occurred
    train.000.weights.npy ...  uint8, the weight in the loss of each token of such a file, where
                     answers alone count; without it every token has the weight 1
    probe.npz        beginnings of validation documents, see `ProbePrompts`
    tokenizer.json   what the ids mean, with tokenizer_config.json
    verified.json    which files were found right, see cache_check.py; not a part of the build

Rows of one length need no index: a row number is a place in the file. The arrays are mapped, not
read, so that a process starts at once, holds what it touches, and shares it with the others of its
host; a batch of a shuffled order costs one seek for each row.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pathlib
import tokenize
import zipfile
import zlib
from typing import Any

import numpy as np

from sink_jax.data.stdlib import splits_by_name
from sink_jax.data.tokenizer import TextTokenizer
from sink_jax.io.files import read_text_limited
from sink_jax.io.hashing import sha256

FORMAT = 3  # raise it when the files change their meaning
SPLITS = ('train', 'valid')


def _largest(ids: np.ndarray) -> int:
  """The largest of int32 ids, where a negative id counts as larger than all others.

  So one pass over a batch finds ids on both sides of the vocabulary.
  """
  return int(ids.view(np.uint32).max())


class ChunkTable:
  """The chunks of several domains as one table of rows; reading a row costs one seek.

  Attributes:
    offsets: rows offsets[d], ..., offsets[d + 1] - 1 are those of domain d.
  """

  def __init__(self, arrays: list[np.ndarray]):
    self._arrays = arrays
    self.offsets = np.cumsum([0] + [len(a) for a in arrays])

  def __len__(self) -> int:
    return int(self.offsets[-1])

  def take(self, rows: np.ndarray) -> np.ndarray:
    """The chunks of these row numbers, (n, C+1) int32."""
    if len(self._arrays) == 1:
      return self._arrays[0][rows].astype(np.int32)
    chunks = np.empty((len(rows), self._arrays[0].shape[1]), np.int32)
    # 'right', since row offsets[d] is the first of domain d, and not the last of the one before.
    domain = np.searchsorted(self.offsets, rows, side='right') - 1
    for d in np.unique(domain):
      of_domain = domain == d
      chunks[of_domain] = self._arrays[d][rows[of_domain] - self.offsets[d]]
    return chunks


class Cache:
  """One complete cache folder.

  Opening it checks the manifest and the sizes of the files. Their content is compared with the
  digests by `cache_check`, since reading all of it would hold up the start of every run.

  Attributes:
    manifest: what manifest.json holds. domains: names of the domains, sorted.
    tables: the chunks of 'train' and of 'valid'. weight_tables: their weights; None where every
      token has the weight 1.

  Raises:
    ValueError: the directory is no cache, of another version, or damaged.
  """

  def __init__(self, folder: pathlib.Path):
    self.folder = folder
    try:
      self.manifest = json.loads(read_text_limited(folder / 'manifest.json'))
    except (OSError, ValueError, RecursionError) as error:
      raise ValueError(f'{folder} is not a chunk cache, or damaged ({error}): name the folder '
                       'of a cache, or build one with python -m sink_jax.data.build.') from None
    if not isinstance(self.manifest, dict):
      raise ValueError(f'{folder / "manifest.json"} is damaged; {self._remedy()}')
    # Before anything else of it is read: in another format the keys may have other meanings.
    if self.manifest.get('format') != FORMAT:
      raise ValueError(f'{folder} has cache format {self.manifest.get("format")}, this program '
                       f'reads {FORMAT}; delete the folder and build it again.')
    if not ({'source', 'domains', 'content', 'vocab_size', 'context', 'dtype'} <= set(self.manifest)
            and isinstance(self.manifest['vocab_size'], int)):
      raise ValueError(f'{folder / "manifest.json"} is damaged; {self._remedy()}')
    try:
      self._check_sizes()
      self.domains = list(self.manifest['domains'])
      self.tables = {split: ChunkTable([self._chunks(d, split) for d in self.domains])
                     for split in SPLITS}
      weighted = any('weights' in self.manifest['domains'][d][s]
                     for d in self.domains for s in SPLITS)
      self.weight_tables = {split: ChunkTable([self._weights(d, split) for d in self.domains])
                            for split in SPLITS} if weighted else None
      # One of a pair of caches, of training or of validation text alone, has an empty split.
      may_be_empty = {0: 'valid', 1: 'train'}.get(self.manifest.get('valid_fraction', -1))
      if not all(len(table) for split, table in self.tables.items() if split != may_be_empty):
        raise KeyError('chunks')
    except (KeyError, TypeError, AttributeError) as error:
      raise ValueError(f'{folder / "manifest.json"} is damaged ({type(error).__name__}: {error}); '
                       f'{self._remedy()}') from None

  @functools.cached_property
  def encoder(self) -> TextTokenizer:
    """The encoder that made the ids.

    Raises:
      ValueError: the tokenizer's file is damaged, or not the one of the build.
    """
    return TextTokenizer.from_path(self.folder)

  def probes(self, length: int) -> np.ndarray:
    """The first tokens (n, length) of all stored validation documents that are long enough.

    The domains take turns, each in the order of its documents, so that the first few prompts are
    of all domains.

    Raises:
      ValueError: the file is damaged; names it.
    """
    path = self.folder / 'probe.npz'
    try:
      with np.load(path) as stored:
        long_enough = stored['lengths'] >= length
        tokens, domains = stored['tokens'][long_enough], stored['domains'][long_enough]
    # All of them are raised by NumPy or zipfile for damaged bytes, of the archive or of its arrays.
    except (OSError, EOFError, ValueError, KeyError, IndexError, TypeError, OverflowError,
            MemoryError, zlib.error, NotImplementedError, RuntimeError, tokenize.TokenError,
            zipfile.BadZipFile) as error:
      raise ValueError(f'{path} is missing or damaged ({error}); {self._remedy()}') from None
    rank = np.zeros(len(domains), np.int64)  # of a prompt among those of its domain
    for d in np.unique(domains):
      rank[domains == d] = np.arange((domains == d).sum())
    # lexsort takes its last key first: by rank, and by domain among those of a rank.
    probes = tokens[np.lexsort((domains, rank)), :length].astype(np.int32)
    if probes.size and _largest(probes) >= self.manifest['vocab_size']:
      raise ValueError(f'{path} holds the token {_largest(probes)} of a vocabulary of '
                       f'{self.manifest["vocab_size"]}; {self._remedy()}')
    return probes

  def chunks(self, split: str, rows: np.ndarray) -> np.ndarray:
    """The chunks of these row numbers of 'train' or 'valid', (n, C+1) int32.

    Raises:
      ValueError: a token is not in the vocabulary; names the file and its row.
    """
    chunks = self.tables[split].take(rows)
    # Looked for here, since a compiled program raises no error for an index that is out of range.
    if chunks.size and _largest(chunks) >= self.manifest['vocab_size']:
      raise self._outside_vocabulary(split, rows, chunks)
    return chunks

  def _outside_vocabulary(self, split: str, rows: np.ndarray, chunks: np.ndarray) -> ValueError:
    """The error that names the file and the row of the first wrong one of these chunks."""
    ids = chunks.view(np.uint32)
    first = int((ids >= self.manifest['vocab_size']).any(1).argmax())
    offsets = self.tables[split].offsets
    domain = int(np.searchsorted(offsets, rows[first], side='right')) - 1
    file = self.manifest['domains'][self.domains[domain]][split]['file']
    return ValueError(f'{self.folder / file}, row {rows[first] - offsets[domain]} holds the token '
                      f'{ids[first].max()}, outside its vocabulary of '
                      f'{self.manifest["vocab_size"]}; {self._remedy()}')

  def remarks(self) -> list[str]:
    """What the validation set and the digests of this cache cannot promise, a line each."""
    lines = []
    divided = self.manifest.get('valid_fraction') not in (0, 1)
    if divided and splits_by_name(str(self.manifest.get('source'))):
      lines.append(f'{self.manifest["source"]} holds modules out by their names, and a part of '
                   "their text is trained on, too: Stdlib(split='content') keeps near copies on "
                   'one side.')
    cut = self.domains_by_chunks()
    if cut:
      lines.append(f'{", ".join(cut)}: too few documents to hold some out, so the last chunks '
                   'are for validation; they go on where the training text ends.')
    for name, entry in self.manifest['domains'].items():
      if entry.get('chat'):
        lines += _chat_remarks(name, entry['chat'], self.manifest['context'])
    if 'files' not in self.manifest:
      lines.append(f'{self.folder} was built before digests of its files were kept: a damaged '
                   'chunk would not be noticed. Delete it, and it is built again.')
    return lines

  def domains_by_chunks(self) -> list[str]:
    """The domains whose last chunks are for validation, for want of documents to hold out."""
    return [name for name, entry in self.manifest['domains'].items()
            if entry.get('split_by') == 'chunks']

  def _check_sizes(self) -> None:
    for name, file in self.manifest.get('files', {}).items():
      path = self.folder / self._inside(name)
      size = path.stat().st_size if path.is_file() else None
      if size != file['bytes']:
        raise ValueError(f'{path} is missing or damaged ({size or 0} bytes, not {file["bytes"]}); '
                         f'{self._remedy()}')

  def _chunks(self, domain: str, split: str) -> np.ndarray:
    entry = self.manifest['domains'][domain][split]
    return self._mapped(entry['file'], entry['chunks'], self.manifest['dtype'])

  def _weights(self, domain: str, split: str) -> np.ndarray:
    entry = self.manifest['domains'][domain][split]
    return self._mapped(entry['weights']['file'], entry['chunks'], 'uint8')

  def _mapped(self, name: str, chunks: int, dtype: str) -> np.ndarray:
    path = self.folder / self._inside(name)
    try:
      # Not np.load, which takes other files than arrays, too.
      rows = np.lib.format.open_memmap(path, mode='r')
    except (OSError, EOFError, ValueError, OverflowError, TypeError, tokenize.TokenError) as error:
      raise ValueError(f'{path} is missing or damaged ({error}); {self._remedy()}') from None
    wanted = (chunks, self.manifest['context'] + 1)
    if rows.shape != wanted or rows.dtype != dtype:
      raise ValueError(f'{path} holds {rows.dtype} {rows.shape}, not {dtype} {wanted}; '
                       f'{self._remedy()}')
    return np.asarray(rows)  # the same mapped pages, without memmap's slow indexing

  def _inside(self, name: str) -> str:
    """The name, unless it leads out of the folder: a manifest may be from anywhere."""
    if os.path.basename(name) != name:
      raise ValueError(f'{self.folder / "manifest.json"} names the file {name!r}; '
                       f'{self._remedy()}')
    return name

  def _remedy(self) -> str:
    return f'delete {self.folder} and build it again.'


def _chat_remarks(domain: str, counts: dict[str, int], context: int) -> list[str]:
  """What became of the conversations of a domain that do not fit the chunks, a line each."""
  lines = []
  whole = counts['conversations'] + counts['dropped']
  if counts['long']:
    fate = ("left out: long='parts' keeps them" if counts['dropped'] else
            "kept in parts: a larger context holds them, long='drop' leaves them out")
    lines.append(f'{domain}: {counts["long"]} of {whole} conversations are longer than a chunk of '
                 f'{context} + 1 tokens, and {fate}.')
  if counts['turns_cut']:
    lines.append(f'{domain}: {counts["turns_cut"]} of {counts["turns"]} turns go on in the next '
                 'chunk, without the text of the template before them; '
                 f'{counts["templates_cut"]} of them are cut within the text of the template.')
  return lines


def file_digests(folder: pathlib.Path) -> dict[str, dict[str, Any]]:
  """{name: {'bytes', 'sha256'}} of the files that a finished cache has beside its manifest.

  The digests cover whole files, headers of arrays included. They find a flipped bit, a file that
  was cut off, and one of another build; they are no protection against somebody who can rewrite
  the manifest as well.
  """
  paths = [*folder.glob('*.np[yz]'), *folder.glob('tokenizer*.json')]
  return {path.name: {'bytes': path.stat().st_size, 'sha256': sha256(path)}
          for path in sorted(paths)}


def content_hash(files: dict[str, dict[str, Any]]) -> str:
  """Identifies the chunks of a cache by what they hold.

  A run records it, and is resumed only with data of the same content. It covers the arrays of
  tokens and of weights alone, in the order of their names.

  Args:
    files: what `file_digests` returns.
  """
  digest = hashlib.sha256()
  for name in sorted(files):
    if name.endswith('.npy'):
      digest.update(bytes.fromhex(files[name]['sha256']))
  return digest.hexdigest()[:32]
