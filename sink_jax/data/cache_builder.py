"""Writes one chunk cache: tokenizes, packs, finishes; a build that was stopped is continued.

A build of a large corpus takes hours and may be killed at any moment. These files let the next
process continue, and give the same cache as a build in one go:

    train.000.npy, valid.000.npy   token streams, which only grow; see `AppendLog`
    train.000.weights.npy ...      a weight for each of their tokens, where the source has weights
    work/prompts.000               probe prompts of a domain, so far
    work/commit.json               how many documents are done, and how long each file was then

A commit first makes the files outlast a power cut and then replaces commit.json, so it never names
bytes that are not there. Whatever a kill leaves behind the committed lengths is cut off, and the
documents after the commit are tokenized again: a kill costs a few seconds of work.
"""

from __future__ import annotations

import json
import pathlib
import shutil
import time
from typing import Any

import numpy as np

from sink_jax.data.cache import SPLITS, content_hash, file_digests
from sink_jax.data.documents import Document, DocumentSource
from sink_jax.data.encoding import encode_documents
from sink_jax.data.packing import AppendLog, TokenStream, delimited, npy_size, seal, write_npy
from sink_jax.data.part_encoding import COUNTS, Encoded, answer_weights, counted
from sink_jax.data.probe_prompts import ProbePrompts
from sink_jax.data.tokenizer import TextTokenizer
from sink_jax.io.build_once import disk_full_named
from sink_jax.io.files import write_atomically
from sink_jax.io.progress import Progress

# Each has files and buffers of its own. More than these are rather the names of documents, in a
# field that was taken for the domain.
_MAX_DOMAINS = 256
_SECONDS_BETWEEN_COMMITS = 5
_WEIGHT = np.dtype(np.uint8)  # of the weights of tokens


class CacheBuilder:
  """A cache while it is built in `folder`, by one process at a time.

  Everything after the last document (sealing, probe prompts, digests, manifest) can be done again
  without harm, so that no commits are needed there.

  Args:
    settings: what the key of the cache is made of; it becomes the head of the manifest.
  """

  def __init__(self, folder: pathlib.Path, source: DocumentSource, encoder: TextTokenizer,
               settings: dict[str, Any]):
    self._folder, self._work = folder, folder / 'work'
    self._source, self._encoder, self._settings = source, encoder, settings
    self._length = settings['context'] + 1
    # Two bytes hold the ids 0 to 65535.
    self._dtype = np.dtype(np.uint16 if encoder.vocab_size <= 65536 else np.uint32)

  def run(self, workers: int = 0) -> None:
    """Makes the cache complete.

    Args:
      workers: processes that tokenize; 0 is this one alone.

    Raises:
      ValueError: the corpus is unfit. DiskFull: names the space that is needed.
    """
    # With a manifest only the removal of `work` is left: a process was killed right before it.
    if not (self._folder / 'manifest.json').exists():
      commit = self._last_commit()
      if not commit['complete']:
        commit = self._tokenize(commit, workers)
      self._finish(commit)
    shutil.rmtree(self._work, ignore_errors=True)

  def _last_commit(self) -> dict[str, Any]:
    """What the last process has committed; a first commit of nothing where there is none."""
    try:
      commit = json.loads((self._work / 'commit.json').read_text())
    except (OSError, ValueError):
      commit = {}
    # Ids of another encoder, such as one trained by another version, must not be mixed in.
    if commit.get('encoder') != self._encoder.digest:
      for path in self._folder.glob('*.*'):  # all but the lock
        path.unlink()
      shutil.rmtree(self._work, ignore_errors=True)
      self._work.mkdir()
      commit = {'encoder': self._encoder.digest, 'documents': 0, 'position': 0,
                'complete': False, 'domains': []}
    self._encoder.save(self._folder, digest=self._encoder.digest)
    return commit

  def _tokenize(self, commit: dict[str, Any], workers: int) -> dict[str, Any]:
    """Writes the documents after a commit into the streams; returns the last commit."""
    domains = {entry['name']: self._domain(number, entry)
               for number, entry in enumerate(commit['domains'])}
    size = self._source.size()
    state = dict(commit)
    last = time.monotonic()
    documents = self._source.documents_from(commit['documents'])
    with (Progress('tokenizing', size, commit['position']) as progress,
          disk_full_named(self._folder, lambda: _needed(domains, state['position'], size))):
      for group, encoded in encode_documents(documents, self._encoder, self._folder, workers):
        for document, ids in zip(group.documents, encoded, strict=True):
          if document.domain not in domains:
            _check_domain(document.domain, domains)
            domains[document.domain] = self._domain(len(domains), _new_entry(document.domain))
          held = self._source.held_out(document.name, self._settings['valid_fraction'])
          domains[document.domain].add(document, ids, held)
        # Between groups only: a commit counts documents, and half a group is none.
        state |= {'documents': state['documents'] + group.count, 'position': group.position}
        progress.update(group.position, documents=state['documents'],
                        tokens=sum(d.tokens for d in domains.values()))
        if time.monotonic() - last > _SECONDS_BETWEEN_COMMITS:
          self._commit(state, domains)
          last = time.monotonic()
      if not domains:
        raise ValueError(f'{self._source!r} has no documents with any text.')
      return self._commit(state | {'complete': True}, domains)

  def _domain(self, number: int, entry: dict[str, Any]) -> _Domain:
    return _Domain(self._folder, number, self._length, self._dtype, entry, self._source,
                   self._encoder.bos_id if self._settings['bos'] else None,
                   self._encoder.eos_id if self._settings['eos'] else None)

  def _commit(self, state: dict[str, Any], domains: dict[str, _Domain]) -> dict[str, Any]:
    # The streams are on the disk before the file that counts on them is.
    commit = state | {'domains': [domain.commit() for domain in domains.values()]}
    write_atomically(self._work / 'commit.json', json.dumps(commit))
    return commit

  def _finish(self, commit: dict[str, Any]) -> None:
    entries, prompts = {}, {}
    for number, domain in enumerate(commit['domains']):
      name = domain['name']
      entries[name], prompts[name] = self._finish_domain(number, domain)
    # By name, which is the order of rows and of prompts. Files keep the numbers under which their
    # domains first occurred.
    names = sorted(entries)
    ProbePrompts.save(self._folder / 'probe.npz', [prompts[n] for n in names], self._encoder.eos_id)
    files = file_digests(self._folder)
    manifest = self._settings | {
        'vocab_size': self._encoder.vocab_size, 'dtype': self._dtype.name,
        'special_ids': {'eos': self._encoder.eos_id, 'bos': self._encoder.bos_id,
                        'pad': self._encoder.pad_id},
        'content': content_hash(files), 'files': files,
        'domains': {name: entries[name] for name in names}}
    write_atomically(self._folder / 'manifest.json', json.dumps(manifest, indent=1) + '\n')

  def _finish_domain(self, number: int, domain: dict[str, Any]
                     ) -> tuple[dict[str, Any], ProbePrompts]:
    """Seals the files of a domain; returns its entry of the manifest and its probe prompts."""
    kinds = {'': self._dtype} | ({'.weights': _WEIGHT} if self._source.answers_only else {})
    paths = _paths(self._folder, number)
    rows = {s: domain['tokens'][s] // self._length for s in SPLITS}
    # One of a pair of caches, of training or of validation text alone, may have an empty split.
    only = {0: ['train'], 1: ['valid']}.get(self._settings['valid_fraction'])
    # Where the documents of a side do not fill a single chunk, chunks are divided in their place.
    split_by = 'documents' if all(rows[s] for s in only or SPLITS) else 'chunks'
    if only and split_by == 'chunks':
      raise ValueError(f'{self._too_few(domain)} a chunk of context + 1 = {self._length}; add '
                       'text, lower the context, or merge the domain into another.')
    if split_by == 'documents':
      for kind, dtype in kinds.items():
        for split, path in _paths(self._folder, number, kind).items():
          seal(path, rows[split], self._length, dtype)
      prompts = _stored_prompts(self._folder, number, self._length)
    else:
      full = 'train' if rows['train'] else 'valid'
      rows = self._rows_by_chunks(domain, rows)
      for kind, dtype in kinds.items():
        self._split_chunks(_paths(self._folder, number, kind), full, rows, dtype)
      prompts = ProbePrompts(self._length)
      # No document is held out as a whole, so that prompts begin where the held-out chunks do.
      for chunk in np.load(paths['valid'], mmap_mode='r'):
        prompts.add(chunk)
    entry = {s: {'file': paths[s].name, 'documents': domain['documents'][s],
                 'tokens': domain['tokens'][s], 'chunks': rows[s]} for s in SPLITS}
    for split, path in _paths(self._folder, number, '.weights').items():
      if self._source.answers_only:
        entry[split]['weights'] = _weights_entry(path)
    chat = {'chat': domain['chat']} if 'chat' in domain else {}
    return {'split_by': split_by} | entry | chat, prompts

  def _too_few(self, domain: dict[str, Any]) -> str:
    dropped = domain.get('chat', {}).get('dropped', 0)
    without = f" ({dropped} longer ones were dropped, long='parts' keeps them)" if dropped else ''
    return (f'{self._settings["source"]}: domain {domain["name"]!r} has '
            f'{sum(domain["tokens"].values())} tokens in {sum(domain["documents"].values())} '
            f'documents{without}, too few for')

  def _rows_by_chunks(self, domain: dict[str, Any], rows: dict[str, int]) -> dict[str, int]:
    """The chunks of each split where all documents are on one side, as with few, long ones."""
    total = sum(rows.values())
    if total < 2:
      raise ValueError(
          f'{self._too_few(domain)} a training and a validation chunk of context + 1 = '
          f'{self._length}; add text, lower the context, or merge the domain into another.')
    valid = max(1, min(total - 1, round(total * self._settings['valid_fraction'])))
    return {'train': total - valid, 'valid': valid}

  def _split_chunks(self, paths: dict[str, pathlib.Path], full: str, rows: dict[str, int],
                    dtype: np.dtype) -> None:
    """Splits the chunks, which are all in the file of split `full`: the last are for validation."""
    empty = SPLITS[1 - SPLITS.index(full)]
    done = npy_size(rows[full] * self._length, self._length, dtype)
    if paths[full].stat().st_size != done:  # else a process that was killed has done it
      seal(paths[full], sum(rows.values()), self._length, dtype)
      chunks = np.load(paths[full], mmap_mode='r')
      parts = {'train': chunks[:rows['train']], 'valid': chunks[rows['train']:]}
      write_npy(paths[empty], parts[empty])
      write_npy(paths[full], parts[full])  # last, since it holds all chunks until now


def _weights_entry(path: pathlib.Path) -> dict[str, Any]:
  """The entry of a file of weights: their sum, and that of the tokens that a chunk predicts.

  The first token of a chunk is predicted by none.
  """
  total = predicted = 0
  chunks = np.load(path, mmap_mode='r')
  for first in range(0, len(chunks), 4096):  # a part at a time in memory
    part = np.asarray(chunks[first:first + 4096])
    total += int(part.sum(dtype=np.int64))
    predicted += int(part[:, 1:].sum(dtype=np.int64))
  return {'file': path.name, 'sum': total, 'predicted': predicted}


class _Domain:
  """The two token streams of one domain while they grow, their weights, and its probe prompts."""

  def __init__(self, folder: pathlib.Path, number: int, length: int, dtype: np.dtype,
               entry: dict[str, Any], source: DocumentSource, bos_id: int | None,
               eos_id: int | None):
    self._name, self._documents = entry['name'], dict(entry['documents'])
    self._counts: dict[str, int] = dict(entry.get('chat', {}))
    self._length, self._drops_long = length, source.drops_long
    self._bos_id, self._eos_id = bos_id, eos_id
    self._streams = {s: TokenStream(path, length, dtype, entry['tokens'][s])
                     for s, path in _paths(folder, number).items()}
    # As many weights as tokens, in every commit.
    self._weights = {s: TokenStream(path, length, _WEIGHT, entry['tokens'][s])
                     for s, path in _paths(folder, number, '.weights').items()
                     if source.answers_only}
    self._prompts = AppendLog(_prompts_path(folder, number), entry['probes'])
    self._kept = _stored_prompts(folder, number, length)

  @property
  def tokens(self) -> int:
    return sum(stream.tokens for stream in self._streams.values())

  @property
  def size(self) -> int:
    """Bytes of all streams."""
    return sum(stream.size for stream in (*self._streams.values(), *self._weights.values()))

  def add(self, document: Document, ids: Encoded, held: bool) -> None:
    """Appends a document, and says whether it is for validation."""
    split = 'valid' if held else 'train'
    stream, tokens = self._streams[split], delimited(ids.ids, self._bos_id, self._eos_id)
    if ids.lengths is not None:
      self._counts = self._counts or dict.fromkeys(COUNTS, 0)
      is_long = len(tokens) > self._length
      self._counts['long'] += is_long
      if is_long and self._drops_long:
        self._counts['dropped'] += 1
        return
      start = stream.tokens + (self._bos_id is not None)
      for name, count in counted(document.parts, ids.lengths, start, self._length).items():
        self._counts[name] += count
    if self._weights:
      assert ids.lengths is not None, 'a source of answers yields conversations alone'
      # What delimits documents is no part of an answer.
      delimiters = (None if id_ is None else 0 for id_ in (self._bos_id, self._eos_id))
      self._weights[split].add(delimited(answer_weights(document, ids.lengths), *delimiters))
    self._documents[split] += 1
    stream.add(tokens)
    prompt = self._kept.add(ids.ids) if held else None
    if prompt is not None:
      self._prompts.append(np.uint32(len(prompt)).tobytes() + prompt.tobytes())

  def commit(self) -> dict[str, Any]:
    """Makes what was added outlast a power cut; returns the entry of the commit."""
    for file in (*self._streams.values(), *self._weights.values(), self._prompts):
      file.commit()
    chat = {'chat': dict(self._counts)} if self._counts else {}
    return {'name': self._name, 'documents': dict(self._documents),
            'tokens': {s: stream.tokens for s, stream in self._streams.items()},
            'probes': self._prompts.size} | chat


def _new_entry(name: str) -> dict[str, Any]:
  return {'name': name, 'documents': dict.fromkeys(SPLITS, 0),
          'tokens': dict.fromkeys(SPLITS, 0), 'probes': 0}


def _paths(folder: pathlib.Path, number: int, kind: str = '') -> dict[str, pathlib.Path]:
  """The files of the tokens of a domain, or, of the kind '.weights', of their weights."""
  return {split: folder / f'{split}.{number:03}{kind}.npy' for split in SPLITS}


def _prompts_path(folder: pathlib.Path, number: int) -> pathlib.Path:
  return folder / 'work' / f'prompts.{number:03}'


def _stored_prompts(folder: pathlib.Path, number: int, length: int) -> ProbePrompts:
  """The committed prompts of a domain: in the file each follows its length, all as uint32."""
  prompts = ProbePrompts(length)
  stored = np.fromfile(_prompts_path(folder, number), np.uint32)
  start = 0
  while start < len(stored):
    stop = start + 1 + int(stored[start])
    # Offered again in their order, so that later documents are kept or not as without a stop.
    prompts.add(stored[start + 1:stop])
    start = stop
  return prompts


def _check_domain(name: str, domains: dict[str, _Domain]) -> None:
  """Raises a ValueError where a new domain of this name cannot be."""
  if name == 'valid':
    raise ValueError("A domain (a sub-folder) is called 'valid', the name of the whole "
                     'validation set; rename it.')
  if len(domains) == _MAX_DOMAINS:
    raise ValueError(f'More than {_MAX_DOMAINS} domains, such as {name!r}: does domain_field '
                     'name a domain, or the documents?')


def _needed(domains: dict[str, _Domain], position: int, size: int) -> float:
  """The bytes that the rest of the source will take; 0 where its size is not known."""
  written = sum(domain.size for domain in domains.values())
  return written * (size - position) / position if position and size else 0
