"""Documents to token ids, in order: in this process, or by worker processes.

Whichever process encodes a group, groups come out in the order of the documents, so that the cache
does not depend on the number of workers.
"""

from __future__ import annotations

import collections
import multiprocessing
import os
import pathlib
import signal
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

import numpy as np

from sink_jax.data.documents import Document, Part
from sink_jax.data.part_encoding import Encoded, encoded
from sink_jax.data.tokenizer import TextTokenizer
from sink_jax.io.parent_process import end_with_parent

_CHARACTERS = 1 << 20  # of a group: worth sending to a process, and small enough for memory
_encoder: TextTokenizer | None = None  # of a worker process


class Group(NamedTuple):
  """Consecutive documents, which are encoded by one call and committed together."""
  documents: list[Document]  # those with text
  count: int                 # of the documents, those without text included
  position: int              # in the source, behind the last of them


def encode_documents(documents: Iterable[Document], encoder: TextTokenizer, folder: pathlib.Path,
                     workers: int = 0) -> Iterator[tuple[Group, list[Encoded]]]:
  """Yields groups of documents with their ids, in the order of the documents.

  Args:
    folder: where the encoder is saved, for the workers to load it.
    workers: processes that tokenize; 0 is this one, with the threads of the tokenizer.

  Raises:
    RuntimeError: a worker died.
  """
  groups = _grouped(documents)
  if not workers:
    for group in groups:
      yield group, encoded(_contents(group), encoder)
    return
  # 'spawn', since the threads of the tokenizers library do not survive a fork.
  pool = ProcessPoolExecutor(workers, multiprocessing.get_context('spawn'), _start_worker,
                             (os.fspath(folder),))
  pending: collections.deque[tuple[Group, Future]] = collections.deque()
  try:
    for group in groups:
      pending.append((group, pool.submit(_encode, _contents(group))))
      if len(pending) > workers + 2:  # enough that no worker waits; more would fill the memory
        yield _oldest(pending)
    while pending:
      yield _oldest(pending)
  except BrokenProcessPool:
    # A Ctrl-C or SIGTERM to all processes ends workers first: leave it the time to end this one.
    time.sleep(1)
    raise RuntimeError('a process that tokenizes died, perhaps for lack of memory: run the same '
                       'command with fewer --workers, it continues from its last commit.') from None
  finally:
    pool.shutdown(wait=False, cancel_futures=True)


def _oldest(pending: collections.deque[tuple[Group, Future]]) -> tuple[Group, list[Encoded]]:
  group, future = pending.popleft()
  return group, future.result()


def _grouped(documents: Iterable[Document]) -> Iterator[Group]:
  group, count, size, position = [], 0, 0, 0
  for document in documents:
    # Documents without text count as well: a build that continues passes over that many of the
    # source.
    count, position = count + 1, document.position
    if document.text:
      group.append(document)
      size += len(document.text)
    if size >= _CHARACTERS:
      yield Group(group, count, position)
      group, count, size = [], 0, 0
  if count:
    yield Group(group, count, position)


def _start_worker(folder: str) -> None:
  global _encoder
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends the others
  os.environ['TOKENIZERS_PARALLELISM'] = 'false'  # the workers share the cores
  _encoder = TextTokenizer.from_path(folder)
  end_with_parent()


def _contents(group: Group) -> list[str | tuple[Part, ...]]:
  """What is tokenized of each document of a group."""
  return [document.parts or document.text for document in group.documents]


def _encode(contents: list[str | tuple[Part, ...]]) -> list[Encoded]:
  """The ids of documents, in a worker; of a small type, since they go to the first process."""
  assert _encoder is not None, '_start_worker comes first'
  kind = np.uint16 if _encoder.vocab_size <= 65536 else np.int32
  return [Encoded(ids.astype(kind), lengths) for ids, lengths in encoded(contents, _encoder)]
