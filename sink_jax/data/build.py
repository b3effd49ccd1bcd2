"""Builds packed data: documents are tokenized, joined, and cut into the rows of a shard.

The documents of a corpus are divided into groups of a fixed number of characters, and each group
becomes one shard, the same from every process. A shard is complete when its rows have their name,
by one rename (in gs://, by the upload); what describes it is written before, and the manifest after
all shards. So a killed build keeps its complete shards, and the next build makes the others: a
process loses at most a shard of work.

Within a shard, the tokens of the documents of a domain and split are one stream (Figure 1, right);
its last, incomplete row is dropped, and the manifest counts the tokens.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import multiprocessing
import os
import sys
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import fsspec
import numpy as np
from filelock import FileLock

from sink_jax.data.chat import encode
from sink_jax.data.packed import SPLITS, row_type
from sink_jax.data.sources import Document, DocumentSource
from sink_jax.data.tokenizer import TextTokenizer
from sink_jax.io.files import read_text_limited, remove_temporaries, write_atomically
from sink_jax.io.paths import AnyPath, import_file, is_local
from sink_jax.io.process import end_with_parent
from sink_jax.io.terminal import Progress

SHARD_CHARACTERS = 1 << 26  # of its documents: 13 s of work, 30 MB of tokens
_AT_ONCE = 1 << 20  # characters that are tokenized by one call: ids take much more memory
_PROMPTS = 512  # validation documents of each length and domain that can be probes

Info = dict[str, Any]  # what describes a shard, or a domain
_Run = tuple[int, int, int]


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
  def token_type(self) -> str:
    """The type of a token in a row; two bytes hold the ids 0 to 65535."""
    return '<u2' if self.tokenizer.vocab_size <= 65536 else '<u4'

  @property
  def row_type(self) -> np.dtype:
    return row_type(self.context + 1, self.token_type, self.source.answers_only)


def build(folder: AnyPath, layout: Layout, settings: dict[str, Any], workers: int = 0) -> None:
  """Builds or completes a folder of packed data; does nothing if it is complete.

  On a disk, other processes that want the folder wait. `settings`, which settings.json and the
  manifest keep, must equal the settings of an unfinished build.

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
    manifest = settings | _manifest(layout, shards)
    write_atomically(folder / 'manifest.json', json.dumps(manifest) + '\n')


def check(folder: AnyPath, settings: dict[str, Any]) -> None:
  """A ValueError if the folder holds data of other settings, complete or not."""
  begun = folder / 'settings.json'
  if begun.exists() and json.loads(begun.read_text()) != settings:
    raise ValueError(f'{folder} holds other data: choose another folder, or delete it.')


def _shards(folder: AnyPath, layout: Layout, workers: int) -> Iterator[Info]:
  """Yields the info of each shard of a build, in order, once the shard is there."""
  done = []
  while (path := folder / _name(len(done))).exists():
    done.append(_read_info(path, layout))
  yield from done
  documents, characters = sum(info['documents'] for info in done), 0
  groups = enumerate(_groups(layout.source.documents(documents), SHARD_CHARACTERS), len(done))
  tasks = ((folder / _name(number), layout, group) for number, group in groups)
  made = _in_processes(tasks, layout, workers) if workers else (_shard(*task) for task in tasks)
  with contextlib.closing(Progress('tokenizing')) as progress:
    for info in made:
      documents += info['documents']
      characters += info['characters']
      progress.update(characters, documents=documents)
      yield info


def _in_processes(
  tasks: Iterable[tuple[AnyPath, Layout, list[Document]]], layout: Layout, workers: int
) -> Iterator[Info]:
  module = type(layout.source).__module__
  file = sys.modules[module].__file__ if module.startswith('configs.') else None
  # 'spawn', since the threads of the tokenizers library do not survive a fork.
  context = multiprocessing.get_context('spawn')
  with concurrent.futures.ProcessPoolExecutor(workers, context, _start_worker, (file,)) as pool:
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
  return f'{number:05}.bin'


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
  """The tokens of one domain and split of a shard.

  starts: of each document, its first token in the stream and how many follow, at most a row.
  """

  def __init__(self, layout: Layout):
    self._layout = layout
    self._tokens, self._weights = [], []
    self.starts: list[tuple[int, int]] = []
    self.size = 0

  def add(self, ids: np.ndarray, weights: np.ndarray) -> None:
    """Appends a document, with BOS and EOS, whose weight is 0."""
    layout, tokenizer = self._layout, self._layout.tokenizer
    around = int(layout.bos), int(layout.eos)
    ends: Any = tokenizer.bos_id, tokenizer.eos_id  # one that a corpus opens has both
    tokens = np.pad(ids, around, constant_values=ends)
    self._tokens.append(tokens.astype(layout.token_type))
    if layout.source.answers_only:
      self._weights.append(np.pad(weights, around).astype('u1'))
    self.starts.append((self.size + around[0], min(len(ids), layout.context + 1)))
    self.size += len(tokens)

  def rows(self) -> np.ndarray:
    """The complete rows."""
    length = self._layout.context + 1
    rows = np.zeros(self.size // length, self._layout.row_type)
    for name, parts in (('tokens', self._tokens), ('weights', self._weights)):
      if parts:
        rows[name] = np.concatenate(parts)[: len(rows) * length].reshape(-1, length)
    rows['crc32'] = [zlib.crc32(row.tobytes()[:-4]) for row in rows]
    return rows


def _shard(path: AnyPath, layout: Layout, documents: list[Document]) -> Info:
  """Writes the shard of a group of documents, if it is not there; returns its info."""
  if path.exists():
    return _read_info(path, layout)
  streams = collections.defaultdict(lambda: _Stream(layout))  # by domain and split
  for group in _groups((d for d in documents if d.text), _AT_ONCE):
    for document, (ids, weights) in zip(group, encode(group, layout.tokenizer), strict=True):
      held = layout.source.held_out(document.name, layout.valid_fraction)
      streams[document.domain, 'valid' if held else 'train'].add(ids, weights)
  info: Info = {
    'documents': len(documents),
    'domains': {},
    'characters': sum(len(document.text) for document in documents),
  }
  parts, first = [], 0
  for domain in sorted({domain for domain, _ in streams}):
    if domain == 'valid':
      raise ValueError(
        "A domain (a sub-folder) is called 'valid', the name of the whole "
        'validation set; rename it.'
      )
    info['domains'][domain] = {'starts': streams[domain, 'valid'].starts}
    for split in SPLITS:
      stream = streams[domain, split]
      rows = stream.rows()
      # The first token of a row is not predicted by the row.
      weight = (
        int(rows['weights'][:, 1:].sum())
        if layout.source.answers_only
        else len(rows) * layout.context
      )
      info['domains'][domain][split] = {
        'documents': len(stream.starts),
        'tokens': stream.size,
        'rows': len(rows),
        'weight': weight,
        'first': first,
      }
      first += len(rows)
      parts.append(rows.tobytes())
  _write(path, b''.join(parts), info)
  return info


def _write(path: AnyPath, rows: bytes, info: Info) -> None:
  """Writes a shard, whose info comes first: the shard is there when its rows have their name."""
  info['sha256'] = hashlib.sha256(rows).hexdigest()
  sealed = info | {'crc32': _crc32(info)}
  try:
    write_atomically(path.with_suffix('.json'), json.dumps(sealed))
    write_atomically(path, rows)
  except OSError as error:
    raise OSError(
      f'{path} cannot be written: {error}. Make room if the disk is full, then run '
      'the same command again: it keeps the shards that are there.'
    ) from None


def _read_info(path: AnyPath, layout: Layout) -> Info:
  """The info of a shard that an earlier process made."""
  try:
    info = json.loads(read_text_limited(path.with_suffix('.json')))
    if info.pop('crc32') != _crc32(info):
      raise ValueError(f'the checksum of {path.stem}.json differs')
    rows = sum(entry[split]['rows'] for entry in info['domains'].values() for split in SPLITS)
    store, name = fsspec.url_to_fs(os.fspath(path))
    if store.size(name) != rows * layout.row_type.itemsize:
      raise ValueError(f'it should have {rows} rows')
  except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
    raise ValueError(f'{path} is damaged ({error}): delete it, and it is built again.') from None
  return info


def _crc32(info: Info) -> int:
  return zlib.crc32(json.dumps(info).encode())


def _manifest(layout: Layout, shards: list[Info]) -> dict[str, Any]:
  """The entries of manifest.json besides the settings.

  Raises:
    ValueError: there is too little text, or no answer in it.
  """
  names = sorted({name for info in shards for name in info['domains']})
  domains = {name: _domain(name, layout, shards) for name in names}
  _check_enough(layout, domains)
  digests = ''.join(info['sha256'] for info in shards)
  return {
    'ids': layout.tokenizer.digest,
    'vocab_size': layout.tokenizer.vocab_size,
    'token_type': layout.token_type,
    'weighted': layout.source.answers_only,
    'content': hashlib.sha256(digests.encode()).hexdigest()[:32],
    'shards': [_name(number) for number in range(len(shards))],
    'domains': domains,
  }


def _domain(name: str, layout: Layout, shards: list[Info]) -> Info:
  """The entries of a domain in the manifest.

  By split: the sums over the shards, and `runs` of consecutive rows: (shard, first row in it,
  number of rows). If the split puts all documents on one side, the last rows are for validation.
  """
  entries = {
    number: info['domains'][name] for number, info in enumerate(shards) if name in info['domains']
  }
  totals = {
    split: {
      key: sum(entry[split][key] for entry in entries.values())
      for key in ('documents', 'tokens', 'rows', 'weight')
    }
    for split in SPLITS
  }
  runs = {
    split: [
      (number, entry[split]['first'], entry[split]['rows']) for number, entry in entries.items()
    ]
    for split in SPLITS
  }
  rows = [totals[split]['rows'] for split in SPLITS]
  by_rows = layout.valid_fraction not in (0, 1) and sum(rows) > 1 and not all(rows)
  if by_rows:
    valid = max(1, min(sum(rows) - 1, round(sum(rows) * layout.valid_fraction)))
    runs = _divided(runs['train'] + runs['valid'], sum(rows) - valid)
  prompts = [] if by_rows else _prompts(entries.values(), layout.context + 1)
  return totals | {'runs': runs, 'split_by_rows': by_rows, 'prompts': prompts}


def _divided(runs: list[_Run], size: int) -> dict[str, list[_Run]]:
  """The runs of the first `size` rows, for training, and those of the others."""
  divided = {split: [] for split in SPLITS}
  for shard, first, count in runs:
    taken = min(count, size)
    divided['train'].append((shard, first, taken))
    divided['valid'].append((shard, first + taken, count - taken))
    size -= taken
  return divided


def _prompts(entries: Iterable[Info], length: int) -> list[tuple[int, int, int]]:
  """(row, token, tokens) of beginnings of validation documents of a domain, in their order.

  For every length the first 512 documents at least that long: they serve a probe of 64 tokens as
  well as one of the full context, and short documents do not displace later long ones.
  """
  prompts, before, kept = [], 0, np.zeros(length + 1, np.int64)
  for entry in entries:
    rows = entry['valid']['rows']
    for start, size in entry['starts']:
      if 0 < size <= rows * length - start and kept[size] < _PROMPTS:
        kept[: size + 1] += 1
        prompts.append((before + start // length, start % length, size))
    before += rows
  return prompts


def _check_enough(layout: Layout, domains: dict[str, Info]) -> None:
  total = lambda key, *splits: sum(
    domain[split][key] for domain in domains.values() for split in splits
  )
  if total('rows', *SPLITS) < (1 if layout.valid_fraction in (0, 1) else 2):
    raise ValueError(
      f'{layout.source!r} has {total("tokens", *SPLITS)} tokens in '
      f'{total("documents", *SPLITS)} documents, too few for a training and a '
      f'validation row of data.context + 1 = {layout.context + 1} tokens: add text, '
      'or lower data.context.'
    )
  for split in SPLITS:
    if total('rows', split) and not total('weight', split):
      raise ValueError(
        f'{layout.source!r} has no answer in its text for {split}, so the loss '
        "would have no token: add conversations, or use loss='all'."
      )
