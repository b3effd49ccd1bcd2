"""Builds packed data: documents are tokenized, joined, and cut into the rows of a shard.

The documents of a corpus are divided into groups of a fixed number of characters, and each group becomes one
shard, the same from every process. One rename (in gs://, the upload) gives a shard its name, and the manifest
comes last. So a killed build keeps its complete shards, and the next build makes the others: a process loses
at most a shard of work.

Within a shard, the tokens of the documents of a domain and split are one stream (Figure 1, right);
its last, incomplete row is dropped, and the manifest counts the tokens.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import json
import multiprocessing
import os
import pathlib
import sys
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter
from filelock import FileLock

from sink_jax.data.chat import encode
from sink_jax.data.packed import SPLITS, without_block_headers
from sink_jax.data.sources import Document, DocumentSource
from sink_jax.data.tokenizer import TextTokenizer
from sink_jax.io.files import remove_temporaries, write_atomically
from sink_jax.io.paths import AnyPath, import_file, is_local
from sink_jax.io.process import end_with_parent
from sink_jax.io.terminal import Progress

SHARD_CHARACTERS = 1 << 26  # of its documents: 13 s of work, 30 MB of tokens
_AT_ONCE = 1 << 20  # characters that are tokenized by one call: ids take much more memory
_PROMPTS = 512  # validation documents of each length and domain that can be probes

Info = dict[str, Any]  # the last record of a shard, which describes it


@dataclasses.dataclass(frozen=True)
class Layout:
  """The settings that, with its documents, decide the rows of a shard."""
  tokenizer: TextTokenizer
  source: DocumentSource
  context: int
  bos: bool
  eos: bool
  valid_fraction: float

  @property
  def dtype(self) -> np.dtype:
    """The type of the tokens; two bytes hold the ids 0 to 65535."""
    return np.dtype('<u2' if self.tokenizer.vocab_size <= 65536 else '<u4')


def build(folder: AnyPath, layout: Layout, settings: dict[str, Any], workers: int = 0) -> None:
  """Builds or completes a folder of packed data; does nothing if it is complete.

  On a disk, other processes that want the folder wait. `settings`, which settings.json and the manifest keep,
  must equal the settings of an unfinished build.

  Args:
    workers: processes that tokenize; 0 is only this one, with the threads of the tokenizer.

  Raises:
    ValueError: the corpus cannot be packed with these settings.
    OSError: the disk is full; once there is space, the same call continues.
  """
  if is_local(folder):
    folder.mkdir(parents=True, exist_ok=True)
  with FileLock(folder / 'lock') if is_local(folder) else contextlib.nullcontext():
    check(folder, settings)
    if (folder / 'manifest.json').exists():
      return
    remove_temporaries(folder)  # of a process that was killed here
    layout.tokenizer.save(folder, digest=layout.tokenizer.digest)
    write_atomically(folder / 'settings.json', json.dumps(settings, indent=1))
    shards = list(_shards(folder, layout, workers))
    write_atomically(folder / 'manifest.json', json.dumps(_manifest(settings, layout, shards)) + '\n')


def check(folder: AnyPath, settings: dict[str, Any]) -> None:
  """A ValueError if the folder holds data of other settings, complete or not."""
  begun = folder / 'settings.json'
  if begun.exists() and json.loads(begun.read_text()) != settings:
    raise ValueError(f'{folder} holds other data: choose another folder, or delete it.')


def _shards(folder: AnyPath, layout: Layout, workers: int) -> Iterator[Info]:
  """Yields the info of each shard of a build, in order, once the shard is there."""
  done = []
  while (path := folder / _name(len(done))).exists():
    done.append(_info(path))
  yield from done
  documents, read = sum(info['documents'] for info in done), 0
  groups = enumerate(_groups(layout.source.documents(documents), SHARD_CHARACTERS), len(done))
  tasks = ((folder / _name(number), layout, group) for number, group in groups)
  with contextlib.closing(Progress('tokenizing')) as progress:
    for info in _in_processes(tasks, layout, workers) if workers else (_shard(*task) for task in tasks):
      documents, read = documents + info['documents'], read + info['characters']
      progress.update(read, documents=documents)
      yield info


def _in_processes(tasks: Iterable[tuple[AnyPath, Layout, list[Document]]], layout: Layout,
                  workers: int) -> Iterator[Info]:
  module = type(layout.source).__module__
  file = sys.modules[module].__file__ if module.startswith('configs.') else None
  # 'spawn', since the threads of the tokenizers library do not survive a fork.
  with concurrent.futures.ProcessPoolExecutor(
      workers, multiprocessing.get_context('spawn'), _start_worker, (file,)) as pool:
    pending: collections.deque[concurrent.futures.Future] = collections.deque()
    for task in tasks:
      pending.append(pool.submit(_shard, *task))
      if len(pending) > workers + 1:  # enough that no worker waits; more would fill the memory
        yield pending.popleft().result()
    while pending:
      yield pending.popleft().result()


def _start_worker(file: str | None) -> None:
  if file:  # that defines the source
    import_file(file)
  os.environ['TOKENIZERS_PARALLELISM'] = 'false'  # the workers share the cores
  end_with_parent()


def _name(number: int) -> str:
  return f'{number:05}.array_record'


def _groups(documents: Iterable[Document], characters: int) -> Iterator[list[Document]]:
  group, size = [], 0
  for document in documents:
    group.append(document)
    size += len(document.text)
    if size >= characters:
      yield group
      group, size = [], 0
  if group:
    yield group


class _Stream:
  """The tokens of one domain and split of a shard."""

  def __init__(self, layout: Layout):
    self._layout, self._length = layout, layout.context + 1
    self._tokens, self._weights = [], []
    self.documents = self.size = 0

  def add(self, ids: np.ndarray, weights: np.ndarray) -> None:
    """Appends a document, with BOS and EOS, whose weight is 0."""
    before, behind = int(self._layout.bos), int(self._layout.eos)
    tokenizer = self._layout.tokenizer
    tokens = np.concatenate([np.full(before, tokenizer.bos_id), ids, np.full(behind, tokenizer.eos_id)])
    self._tokens.append(tokens.astype(self._layout.dtype))
    if self._layout.source.answers_only:
      self._weights.append(np.pad(weights, (before, behind)).astype(np.uint8))
    self.size += len(tokens)
    self.documents += 1

  def rows(self) -> tuple[list[bytes], int]:
    """The records of the complete rows, and the sum of the weights of the tokens that they predict."""
    count = self.size // self._length
    if not count:
      return [], 0
    tables = [np.concatenate(kind)[:count * self._length].reshape(count, self._length)
              for kind in (self._tokens, self._weights) if kind]
    # The first token of a row is not predicted by the row.
    weight = int(tables[1][:, 1:].sum()) if self._weights else count * (self._length - 1)
    content = np.concatenate([table.view(np.uint8) for table in tables], 1)
    return [row.tobytes() + zlib.crc32(row).to_bytes(4, 'little') for row in content], weight


def _shard(path: AnyPath, layout: Layout, documents: list[Document]) -> Info:
  """Writes the shard of a group of documents, if it is not there; returns its info."""
  if path.exists():
    return _info(path)
  streams: dict[str, dict[str, _Stream]] = {}
  starts: dict[str, list[tuple[int, int]]] = {}  # of validation documents: first token, tokens
  for group in _groups((d for d in documents if d.text), _AT_ONCE):
    for document, (ids, weights) in zip(group, encode(group, layout.tokenizer), strict=True):
      if document.domain not in streams:
        streams[document.domain] = {split: _Stream(layout) for split in SPLITS}
        starts[document.domain] = []
      held = layout.source.held_out(document.name, layout.valid_fraction)
      stream = streams[document.domain]['valid' if held else 'train']
      if held:
        size = min(len(ids), layout.context + 1)
        starts[document.domain].append((stream.size + layout.bos, size))
      stream.add(ids, weights)
  if 'valid' in streams:
    raise ValueError("A domain (a sub-folder) is called 'valid', the name of the whole validation set; "
                     'rename it.')
  info: Info = {'documents': len(documents), 'domains': {},
                'characters': sum(len(document.text) for document in documents)}
  records = []
  for domain in sorted(streams):
    entry: dict[str, Any] = {'starts': starts[domain]}
    for split, stream in streams[domain].items():
      rows, weight = stream.rows()
      records += rows
      entry[split] = {'documents': stream.documents, 'tokens': stream.size, 'rows': len(rows),
                      'weight': weight}
    info['domains'][domain] = entry
  return _write(path, records, info)


def _write(path: AnyPath, rows: list[bytes], info: Info) -> Info:
  """Writes a shard and gives it its name; returns the info with the digest of the rows."""
  info |= {'file': path.name, 'sha256': hashlib.sha256(b''.join(rows)).hexdigest()}
  data = _array_record([*rows, json.dumps(info).encode()])
  content, places = without_block_headers(data), _places(len(rows[0])) if rows else {}
  for i, row in enumerate(rows):
    at = places['first'] + i * places['stride']
    assert content[at:at + len(row)] == row, 'this ArrayRecord places records differently'
  write_atomically(path, data)
  return info


@functools.cache
def _places(size: int) -> dict[str, int]:
  """Where the first record of a shard begins, and how far apart records of a size are."""
  sample = [os.urandom(size), os.urandom(size)]
  first, second = map(without_block_headers(_array_record(sample)).index, sample)
  return {'first': first, 'stride': second - first}


def _array_record(records: list[bytes]) -> bytes:
  """A file of ArrayRecord."""
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder, 'shard')
    writer = ArrayRecordWriter(str(path), 'group_size:1,uncompressed')
    try:
      for record in records:
        writer.write(record)
      writer.close()
    except RuntimeError as error:
      raise OSError(f'{folder} cannot be written: {error}. Make room, then run the same command '
                    'again: it keeps the shards that are there.') from None
    return path.read_bytes()


def _info(path: AnyPath) -> Info:
  """The info of a shard that an earlier process made."""
  reader = ArrayRecordReader(os.fspath(path))
  try:
    return json.loads(reader.read([reader.num_records() - 1])[0])
  except (RuntimeError, IndexError, ValueError, TypeError) as error:
    raise ValueError(f'{path} is damaged ({error}): delete it, and it is built again.') from None


def _manifest(settings: dict[str, Any], layout: Layout, shards: list[Info]) -> dict[str, Any]:
  """The content of manifest.json; a ValueError if there is too little text, or no answer in it."""
  domains: dict[str, dict[str, Any]] = {}
  length = layout.context + 1
  for name in sorted({name for info in shards for name in info['domains']}):
    entries = [info['domains'][name] for info in shards if name in info['domains']]
    domains[name] = {split: {key: sum(entry[split][key] for entry in entries)
                             for key in ('documents', 'tokens', 'rows', 'weight')} for split in SPLITS}
    # For every length the first 512 documents at least that long: they serve a probe of 64 tokens
    # as well as one of the full context, and short documents do not displace later long ones.
    prompts, before, kept = [], 0, np.zeros(length + 1, np.int64)
    for entry in entries:
      for start, size in entry['starts']:
        if 0 < size <= entry['valid']['rows'] * length - start and kept[size] < _PROMPTS:
          kept[:size + 1] += 1
          prompts.append((before + start // length, start % length, size))
      before += entry['valid']['rows']
    domains[name]['prompts'] = prompts

  total = lambda key, splits=SPLITS: sum(
      entry[split][key] for entry in domains.values() for split in splits)
  if total('rows') < (1 if layout.valid_fraction in (0, 1) else 2):
    raise ValueError(f'{layout.source!r} has {total("tokens")} tokens in {total("documents")} '
                     'documents, too few for a training and a validation row of data.context + 1 = '
                     f'{length} tokens: add text, or lower data.context.')
  for split in SPLITS:
    if total('rows', [split]) and not total('weight', [split]):
      raise ValueError(f'{layout.source!r} has no answer in its text for {split}, so the loss would '
                       "have no token: add conversations, or use loss='all'.")
  row_bytes = length * (layout.dtype.itemsize + layout.source.answers_only) + 4  # and the CRC32
  return settings | {
      'ids': layout.tokenizer.digest, 'vocab_size': layout.tokenizer.vocab_size,
      'dtype': layout.dtype.name, **_places(row_bytes),
      'weighted': layout.source.answers_only,
      'content': hashlib.sha256(''.join(info['sha256'] for info in shards).encode()).hexdigest()[:32],
      'domains': domains,
      'shards': [{'file': info['file'],
                  'rows': {name: [entry[split]['rows'] for split in SPLITS]
                           for name, entry in info['domains'].items()}} for info in shards]}
