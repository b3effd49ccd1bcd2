"""Builds a cache of chunks from a corpus, or verifies one."""

from __future__ import annotations

import json
import pathlib
import signal
import sys
from collections.abc import Collection

from sink_jax.cli.options import Build
from sink_jax.component import from_string
from sink_jax.data import near_copies
from sink_jax.data.cache import Cache
from sink_jax.data.sources import DocumentSource, PackedDataset
from sink_jax.data.prepare import open_pair, verify
from sink_jax.data.tokenizer import Tokenizer
from sink_jax.io.exit_code import EXIT_SAVED

_COMPARED = 30_000_000  # characters of a source, which take some seconds


def main(options: Build) -> None:
  """Builds a cache, or verifies one, and prints what is in it; SIGTERM ends it with its exit code.

  Raises:
    ValueError: an option, a source or a file cannot be used. OSError: no space.
  """
  signal.signal(signal.SIGTERM, _stop)
  if options.verify:
    folder = pathlib.Path(options.verify)
    megabytes, names = verify(folder) / 1e6, ', '.join(Cache(folder).manifest['files'])
    print(f'{folder}: {names}: {megabytes:.1f} MB read, every file is as it was built')
    return
  source = from_string(DocumentSource, options.source)
  if isinstance(source, PackedDataset) and not options.valid_source:
    options.unused(f'is not used: {options.source} is built already.', 'valid_fraction',
                   'cache_dir', 'workers')
  valid_source = (from_string(DocumentSource, options.valid_source) if options.valid_source
                  else None)
  caches = open_pair(source, valid_source, from_string(Tokenizer, options.tokenizer),
                     options.context, options.bos, options.eos, options.valid_fraction,
                     options.cache_dir, options.workers)
  shared = _overlap(source, valid_source, options.valid_fraction, caches[0].domains_by_chunks())
  # Without a validation source both are the same cache, which is shown once.
  for cache in dict.fromkeys(caches):
    print(cache.folder)
    print(json.dumps(cache.manifest['domains'], indent=1))
  for line in [*dict.fromkeys(line for cache in caches for line in cache.remarks()), *shared]:
    print(line)


def _overlap(source: DocumentSource, valid_source: DocumentSource | None, valid_fraction: float,
             left_out: Collection[str]) -> list[str]:
  """A line about the text that both sides of a split have; none where this machine has no text.

  left_out: domains whose documents are on both sides, since they are split by chunks.
  """
  if isinstance(source, PackedDataset) or isinstance(valid_source, PackedDataset):
    return []
  held, training, cut = [], [], False
  # Each side is read from its beginning, as far as the limit, so that a large corpus costs seconds.
  for side in filter(None, (source, valid_source)):
    read = 0
    for document in side.documents():
      if read >= _COMPARED:
        cut = True
        break
      read += len(document.text)
      if document.domain in left_out:
        continue
      # With a validation source everything of it is held out, and nothing of the other.
      is_held = side is valid_source or (
          not valid_source and side.held_out(document.name, valid_fraction))
      (held if is_held else training).append(document.text)
  share = near_copies.overlap(held, training)
  if share is None:
    return []
  sample = f', by the first {_COMPARED / 1e6:.0f} million characters' if cut else ''
  return [f'{share:.1%} of the windows of {near_copies.WINDOW} characters of validation text are '
          f'also in training text{sample}']


def _stop(signum, frame):
  sys.stderr.write('stopped by SIGTERM; the same command resumes the build\n')
  sys.exit(EXIT_SAVED)
