"""A corpus, tokenized and packed once into a cache of fixed-length chunks.

The folder of a cache is named after a hash of everything that decides its content: the config
strings of source and tokenizer, their fingerprints, context, delimiters, share of validation. So a
run finds what an earlier one has built, and a changed corpus or option is another folder.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
from typing import Any

# chat, packages, stdlib: a source is a choice of configs once its module is imported.
from sink_jax.data import chat, packages, remote, stdlib  # noqa: F401
from sink_jax.data.cache import FORMAT, Cache
from sink_jax.data.cache_builder import CacheBuilder
from sink_jax.data.cache_check import check
from sink_jax.data.documents import DocumentSource, PackedDataset, existing_path
from sink_jax.data.tokenizer import TextTokenizer, Tokenizer
from sink_jax.io.build_once import build_once
from sink_jax.io.paths import cache_root
from sink_jax.io.progress import Progress


def open_cache(source: DocumentSource, tokenizer: Tokenizer, context: int, bos: bool,
               eos: bool = True, valid_fraction: float = 0.05, cache_dir: str = '',
               workers: int = 0, encoder: TextTokenizer | None = None) -> Cache:
  """Opens the cache of a corpus; builds it first where there is none.

  Several processes may call it at once: one builds, the others wait. A folder appears under its
  final name only when it is complete, and a build that was killed is continued.

  Args:
    context: C, tokens the model sees; chunks have C + 1.
    bos, eos: whether BOS precedes and EOS follows each document.
    valid_fraction: the share of the documents that are held out, which the source chooses: 0 for a
      source of training text alone, 1 for one of validation text.
    cache_dir: a folder, or gs://bucket/folder: a cache that is there is copied to this host once,
      and one that is built here is copied there. '' = $SINK_JAX_CACHE, else ~/.cache/sink_jax.
    workers: processes that tokenize; 0 is this one alone, with the tokenizer's threads.
    encoder: that of the training text, for its validation text; None makes one of `tokenizer`.

  Raises:
    ValueError: the corpus is missing, damaged or too small; names what to change.
    DiskFull: there is no room; the same call continues once there is.
  """
  # Neither `workers` nor `cache_dir` is among the settings: the content does not depend on them.
  settings = {'tokenizer': repr(tokenizer), 'context': context, 'bos': bos, 'eos': eos}
  if encoder:
    settings |= {'encoder': encoder.digest}
  if isinstance(source, PackedDataset):
    return _open_packed(source, settings, valid_fraction)
  if context < 1 or not 0 <= valid_fraction <= 1:
    raise ValueError(f'context={context} must be at least 1, and valid_fraction={valid_fraction} '
                     'between 0 and 1 (0.05 holds out a twentieth of the documents).')
  if workers < 0:
    raise ValueError(f'workers={workers} must be 0 (this process) or more.')
  # These, in this spelling, are the key of every cache that was ever built: a new setting is added
  # only where it differs from what those were built with.
  settings |= {
      'format': FORMAT, 'source': repr(source), 'source_fingerprint': source.fingerprint(),
      'tokenizer_fingerprint': tokenizer.fingerprint(), 'valid_fraction': valid_fraction}
  key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
  name = f'{type(source).__name__.lower()}-{context}-{key}'
  root = cache_root(cache_dir)
  final = root / name

  def make(folder: pathlib.Path) -> None:
    resolved = encoder or tokenizer.open(source, valid_fraction)
    CacheBuilder(folder, source, resolved, settings).run(workers)

  if not remote.is_remote(cache_dir):
    build_once(final, make)
  elif remote.exists(f'{cache_dir}/{name}'):
    remote.copy_here(f'{cache_dir}/{name}', final)
  else:
    build_once(final, make)
    remote.copy_there(final, f'{cache_dir}/{name}')
  return Cache(final)


def open_pair(source: DocumentSource, valid_source: DocumentSource | None, tokenizer: Tokenizer,
              context: int, bos: bool, eos: bool, valid_fraction: float, cache_dir: str = '',
              workers: int = 0) -> tuple[Cache, Cache]:
  """Opens the caches of the training and of the validation text, in one encoding.

  Without a validation source both are one cache, which holds out a part of its documents. See
  `open_cache` for the arguments and errors.
  """
  options = tokenizer, context, bos, eos
  if valid_source is None:
    cache = open_cache(source, *options, valid_fraction, cache_dir, workers)
    return cache, cache
  training = open_cache(source, *options, 0, cache_dir, workers)
  return training, open_cache(valid_source, *options, 1, cache_dir, workers, training.encoder)


def packed_folder(source: PackedDataset) -> pathlib.Path:
  """The folder on this machine that the source names; one on gs:// is copied here first.

  Raises:
    ValueError: there is no such folder, or no complete cache in the object store.
    DiskFull: there is no room for the copy.
  """
  if remote.is_remote(source.path):
    return remote.local_copy(source.path)
  return existing_path(source.path, "PackedDataset(path='...')")


def _open_packed(source: PackedDataset, settings: dict[str, Any], valid_fraction: float) -> Cache:
  """Opens a cache that a config names itself, if it was built with these settings."""
  cache = Cache(packed_folder(source))
  if valid_fraction in (0, 1):  # one of a pair
    settings = settings | {'valid_fraction': valid_fraction}
    if any(cache.manifest.get(n) != settings.get(n) for n in ('valid_fraction', 'encoder')):
      raise ValueError(f'{cache.folder} was not built as one of this pair of a training and a '
                       'validation source: build both with python -m sink_jax.data.build '
                       '--source=... --valid_source=...')
  for name, wanted in settings.items():
    built = cache.manifest.get(name)
    if built != wanted:
      raise ValueError(f'{cache.folder} was built with {name}={built!r}, not {wanted!r}; '
                       f'set {name}={built!r} or build another cache.')
  return cache


def verify(folder: pathlib.Path) -> int:
  """Compares every file of a cache with its digest, and stamps them; returns the bytes read.

  Raises:
    ValueError: names the files that are missing or differ.
  """
  cache = Cache(folder)
  files = cache.manifest.get('files')
  if files is None:
    raise ValueError(f'{folder} was built before digests of all files were kept; build it again '
                     'to have them.')
  read = 0
  with Progress('verifying', sum(file['bytes'] for file in files.values())) as progress:
    def count(size: int) -> None:
      nonlocal read
      read += size
      progress.update(read)
    check(cache, afresh=True, on_read=count)
  return read
