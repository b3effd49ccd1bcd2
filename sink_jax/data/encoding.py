"""Documents to token ids, in order: in this process, or by worker processes."""

from __future__ import annotations

import collections
import multiprocessing
import os
import pathlib
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

import numpy as np

from sink_jax.data.documents import Document
from sink_jax.data.tokenizer import ByteEncoder, Encoder, load_encoder
from sink_jax.io.parent_process import end_with_parent

_CHARACTERS = 1 << 20  # of a group: large enough for a process, small enough for memory
_encoder = None  # of a worker process


class Group(NamedTuple):
  documents: list[Document]  # those with text
  count: int                 # with those that have none
  position: int              # in the source, behind the last of them


def encoded(documents: Iterable[Document], encoder: Encoder, folder: pathlib.Path,
            workers: int = 0) -> Iterator[tuple[Group, list[np.ndarray]]]:
  """Groups of documents with their ids, in the order of the documents.

  Args:
    folder: where the encoder is saved, for the workers to load it.
    workers: processes that tokenize; 0 is this one, with the threads of the tokenizer.

  Raises:
    RuntimeError: a worker died.
  """
  groups = _grouped(documents)
  if not workers or isinstance(encoder, ByteEncoder):  # bytes cost less than sending them
    for group in groups:
      yield group, encoder.encode_batch([d.text for d in group.documents])
    return
  ids = encoder.eos_id, encoder.bos_id, encoder.pad_id
  pool = ProcessPoolExecutor(workers, multiprocessing.get_context('spawn'), _begin,
                             (os.fspath(folder), ids))
  waiting = collections.deque()
  try:
    for group in groups:
      waiting.append((group, pool.submit(_encode, [d.text for d in group.documents])))
      if len(waiting) > workers + 2:
        yield _first(waiting)
    while waiting:
      yield _first(waiting)
  except BrokenProcessPool:
    time.sleep(1)  # a signal to all processes reaches some of them first
    raise RuntimeError('a process that tokenizes died, perhaps for lack of memory: run the same '
                       'command with fewer --workers, it goes on where it was.') from None
  finally:
    pool.shutdown(wait=False, cancel_futures=True)


def _first(waiting):
  group, future = waiting.popleft()
  return group, future.result()


def _grouped(documents):
  group, count, size, document = [], 0, 0, None
  for document in documents:
    count += 1
    if document.text:
      group.append(document)
      size += len(document.text)
    if size >= _CHARACTERS:
      yield Group(group, count, document.position)
      group, count, size = [], 0, 0
  if count:
    yield Group(group, count, document.position)


def _begin(folder: str, special_ids: Sequence[int]) -> None:
  global _encoder
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends the others
  os.environ['TOKENIZERS_PARALLELISM'] = 'false'
  _encoder = load_encoder(folder, *special_ids)
  end_with_parent()


def _encode(texts: list[str]) -> list[np.ndarray]:
  kind = np.uint16 if _encoder.vocab_size <= 65536 else np.int32
  return [ids.astype(kind) for ids in _encoder.encode_batch(texts)]
