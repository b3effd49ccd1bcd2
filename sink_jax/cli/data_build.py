"""Tokenizes and packs a corpus once, into a cache of fixed-length chunks.

    python -m sink_jax data.build --source="Stdlib(split='content')" --context=64
    python -m sink_jax data.build --verify FOLDER

The same command resumes a build that was stopped. Exit code 42: stopped by SIGTERM, to be started
again; 1: no space, a damaged file, or wrong options or input.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import signal
import sys
from collections.abc import Collection

from sink_jax.cli import parser
from sink_jax.component import from_string
from sink_jax.data import near_copies
from sink_jax.data.cache import Cache
from sink_jax.data.documents import DocumentSource, PackedDataset
from sink_jax.data.prepare import open_pair, verify
from sink_jax.data.tokenizer import Tokenizer
from sink_jax.io.exit_code import EXIT_SAVED

_COMPARED = 30_000_000  # characters of a source, which take some seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(parser.CommandOptions):
  """The options of a build.

  Attributes:
    source: such as TextFolder(path='texts') or Jsonl(path='pile.jsonl'); another name lists them.
    valid_source: a source of its own for validation; then nothing of --source is held out.
    tokenizer: such as HuggingFace(path='tokenizer.json'); another name lists them.
    context: tokens the model sees.
    bos: put BOS before each document.
    eos: put EOS after each document.
    valid_fraction: share of the documents held out.
    cache_dir: a folder or gs://bucket/folder, to which the finished cache is copied; by default
      $SINK_JAX_CACHE, else ~/.cache/sink_jax.
    workers: processes that tokenize; 0: this one, with the threads of the tokenizer.
    verify: build nothing, compare the files of this folder of a cache with their digests.
  """

  source: str = "Stdlib(split='content')"
  valid_source: str = ''
  tokenizer: str = 'Bytes()'
  context: int = 64
  bos: bool = False
  eos: bool = True
  valid_fraction: float = 0.05
  cache_dir: str = ''
  workers: int = 0
  verify: str | None = None


def main(options: Options) -> None:
  """Builds a cache, or verifies one; SIGTERM ends it with an exit code of its own."""
  signal.signal(signal.SIGTERM, _stop)
  build(options)


def build(options: Options) -> None:
  """Builds a cache, or verifies one, and prints what is in it.

  Raises:
    ValueError: an option, a source or a file cannot be used. OSError: no space.
  """
  if options.verify:
    options.unused('is not used: --verify builds nothing.',
                   *sorted(options.given - {'verify'}))
    folder = pathlib.Path(options.verify)
    megabytes, names = verify(folder) / 1e6, ', '.join(Cache(folder).manifest['files'])
    print(f'{folder}: {names}: {megabytes:.1f} MB read, every file is as it was built')
    return
  source = from_string(DocumentSource, options.source)
  if options.valid_source:
    options.unused('is not used: with --valid_source nothing of --source is held out.',
                   'valid_fraction')
  elif isinstance(source, PackedDataset):
    options.unused(f'is not used: {options.source} is built already.', 'valid_fraction',
                   'cache_dir', 'workers')
  if not 0 < options.valid_fraction < 1:
    raise ValueError(f'--valid_fraction={options.valid_fraction} must be between 0 and 1.')
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
