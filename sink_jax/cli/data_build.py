"""Tokenizes and packs a corpus once, into a cache of fixed-length chunks.

    python -m sink_jax.data.build --source="Stdlib(split='content')" --context=64
    python -m sink_jax.data.build --verify FOLDER
"""

from __future__ import annotations

import argparse
import json
import pathlib
import signal
import sys
from collections.abc import Collection

from sink_jax.component import from_string, registry
from sink_jax.data import near_copies
from sink_jax.data.cache import Cache
from sink_jax.data.documents import DocumentSource, PackedDataset
from sink_jax.data.prepare import open_pair, verify
from sink_jax.data.tokenizer import Tokenizer
from sink_jax.io.exit_code import EXIT_SAVED

_COMPARED = 30_000_000  # characters of a source, which take some seconds


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


def main(argv: list[str] | None = None) -> None:
  """Builds a cache, or verifies one; ends with the exit codes of --help."""
  parser = argparse.ArgumentParser(
      prog='python -m sink_jax.data.build',
      description='Tokenizes and packs a corpus once, into a cache of fixed-length chunks.',
      epilog='The same command resumes a build that was stopped. Exit code 42: stopped by SIGTERM, '
             'to be started again; 1: no space, or a damaged file; 2: wrong options or input.')
  parser.add_argument('--source', default="Stdlib(split='content')",
                      help=f'one of: {", ".join(registry(DocumentSource))} (default %(default)s)')
  parser.add_argument('--valid_source', default='',
                      help='a source of its own for validation; then nothing of --source is held '
                           'out')
  parser.add_argument('--tokenizer', default='Bytes()',
                      help=f'one of: {", ".join(registry(Tokenizer))} (default %(default)s)')
  parser.add_argument('--context', type=int, default=64, help='tokens the model sees (default 64)')
  parser.add_argument('--bos', action='store_true', help='put BOS before each document')
  parser.add_argument('--no-eos', dest='eos', action='store_false',
                      help='do not put EOS after each document')
  parser.add_argument('--valid_fraction', type=float, default=0.05,
                      help='share of the documents held out (default %(default)s)')
  parser.add_argument('--cache_dir', default='',
                      help='a folder or gs://bucket/folder, to which the finished cache is copied '
                           '(default: $SINK_JAX_CACHE, else ~/.cache/sink_jax)')
  parser.add_argument('--workers', type=int, default=0,
                      help='processes that tokenize (default 0: this one, with the threads of '
                           'the tokenizer)')
  parser.add_argument('--verify', metavar='FOLDER', type=pathlib.Path,
                      help='build nothing, compare the files of a cache with their digests')
  args = parser.parse_args(argv)
  try:
    _refuse_unused(parser, args)
    if args.verify:
      _verify(parser, args.verify)
      return
    if not 0 < args.valid_fraction < 1:
      raise ValueError(f'--valid_fraction={args.valid_fraction} must be between 0 and 1.')
    source = from_string(DocumentSource, args.source)
    valid_source = from_string(DocumentSource, args.valid_source) if args.valid_source else None
    caches = open_pair(source, valid_source, from_string(Tokenizer, args.tokenizer),
                       args.context, args.bos, args.eos, args.valid_fraction, args.cache_dir,
                       args.workers)
    shared = _overlap(source, valid_source, args.valid_fraction, caches[0].domains_by_chunks())
  except ValueError as error:
    parser.exit(2, f'{parser.prog}: {error}\n')
  except (OSError, MemoryError, RuntimeError) as error:
    parser.exit(1, f'{parser.prog}: {error}\n')
  # Without a validation source both are the same cache, which is shown once.
  for cache in dict.fromkeys(caches):
    print(cache.folder)
    print(json.dumps(cache.manifest['domains'], indent=1))
  for line in [*dict.fromkeys(line for cache in caches for line in cache.remarks()), *shared]:
    print(line)


def _refuse_unused(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
  # argparse does not tell whether an option was written: a value that is not the default was.
  given = [name for name, value in vars(args).items() if value != parser.get_default(name)]
  unused, reason = [], ''
  if args.verify:
    unused, reason = [name for name in given if name != 'verify'], '--verify builds nothing'
  elif args.valid_source:
    unused, reason = ['valid_fraction'], 'with --valid_source nothing of --source is held out'
  elif isinstance(from_string(DocumentSource, args.source), PackedDataset):
    unused = ['valid_fraction', 'cache_dir', 'workers']
    reason = f'{args.source} is built already'
  for name in sorted(set(unused) & set(given)):
    raise ValueError(f'--{"no-eos" if name == "eos" else name} is not used: {reason}.')


def _verify(parser: argparse.ArgumentParser, folder: pathlib.Path) -> None:
  try:
    megabytes = verify(folder) / 1e6
    names = ', '.join(Cache(folder).manifest['files'])
    print(f'{folder}: {names}: {megabytes:.1f} MB read, every file is as it was built')
  except ValueError as error:
    parser.exit(1, f'{parser.prog}: {error}\n')


def _stop(signum, frame):
  sys.stderr.write('stopped by SIGTERM; the same command resumes the build\n')
  sys.exit(EXIT_SAVED)


def start() -> None:
  # In `start` alone: a program that calls `main` has signals of its own.
  signal.signal(signal.SIGTERM, _stop)
  try:
    main()
  except KeyboardInterrupt:
    sys.exit(130)
