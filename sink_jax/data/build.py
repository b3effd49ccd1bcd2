"""Tokenizes and packs a corpus once, into a cache of fixed-length chunks.

    python -m sink_jax.data.build --source="Stdlib(split='content')" --context=64
    python -m sink_jax.data.build --verify FOLDER
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pathlib
import signal
import sys

import sink_jax.data.packages  # noqa: F401  a source is a choice once its module is imported
from sink_jax.data import remote
from sink_jax.data.assembly import Assembly
from sink_jax.data.cache import FORMAT, Cache, cache_root
from sink_jax.data.cache_check import check
from sink_jax.data.documents import DocumentSource, Prepared
from sink_jax.data.once import DiskFull, make_once
from sink_jax.data.progress import Progress
from sink_jax.data.tokenizer import Tokenizer
from sink_jax.slot import build, choices

_EXIT_SAVED = 42  # "start me again"


def open_cache(source: DocumentSource, tokenizer: Tokenizer, context: int, bos: bool,
               eos: bool = True, valid_fraction: float = 0.05, cache_dir: str = '',
               workers: int = 0) -> Cache:
  """The cache of a corpus, built now if it is not there yet.

  Safe with several processes: one builds, the others wait. A folder appears under its
  final name only when it is complete, and a build that was killed goes on where it was.

  Args:
    context: C, tokens the model sees; chunks have C + 1.
    bos, eos: whether BOS precedes and EOS follows each document.
    valid_fraction: share of the documents held out, by a hash of their names.
    cache_dir: a folder or gs://bucket/folder; what is built is copied there, what is there
      already is copied here once. '' = $SINK_JAX_CACHE, else ~/.cache/sink_jax.
    workers: processes that tokenize; 0 is this one alone, with the tokenizer's threads.

  Raises:
    ValueError: the corpus is missing, damaged or too small; says what to change.
    DiskFull: the same call goes on once there is room.
  """
  settings = {'tokenizer': repr(tokenizer), 'context': context, 'bos': bos, 'eos': eos}
  if isinstance(source, Prepared):
    return _open_prepared(source, settings)
  if context < 1 or not 0 < valid_fraction < 1:
    raise ValueError(f'context={context} must be at least 1, and valid_fraction={valid_fraction} '
                     'between 0 and 1 (0.05 holds out a twentieth of the documents).')
  if workers < 0:
    raise ValueError(f'workers={workers} must be 0 (this process) or more.')
  settings |= {
      'format': FORMAT, 'source': repr(source), 'source_fingerprint': source.fingerprint(),
      'tokenizer_fingerprint': tokenizer.fingerprint(), 'valid_fraction': valid_fraction}
  key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
  name = f'{type(source).__name__.lower()}-{context}-{key}'
  root = cache_root(cache_dir)
  final = root / name

  def make(folder):
    encoder = tokenizer.resolve(source, valid_fraction, root)
    Assembly(folder, source, encoder, settings).run(workers)

  if not remote.is_remote(cache_dir):
    make_once(final, make)
  elif remote.exists(f'{cache_dir}/{name}'):
    remote.copy_here(f'{cache_dir}/{name}', final)
  else:
    make_once(final, make)
    remote.copy_there(final, f'{cache_dir}/{name}')
  return Cache(final)


def _open_prepared(source, settings):
  cache = Cache(source.folder())
  for name, wanted in settings.items():
    found = cache.manifest.get(name)
    if found != wanted:
      raise ValueError(f'{cache.folder} was built with {name}={found!r}, not {wanted!r}; '
                       f'set {name}={found!r} or build another cache.')
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
    def seen(size):
      nonlocal read
      read += size
      progress.update(read)
    check(cache, afresh=True, seen=seen)
  return read


def main(argv: list[str] | None = None) -> None:
  parser = argparse.ArgumentParser(
      prog='python -m sink_jax.data.build', description=__doc__.splitlines()[0],
      epilog='Run again, it goes on where it was. Exit code 42: stopped by SIGTERM, to be '
             'started again; 1: no space, or a damaged file; 2: wrong options or input.')
  parser.add_argument('--source', default="Stdlib(split='content')",
                      help=f'one of: {", ".join(choices(DocumentSource))} (default %(default)s)')
  parser.add_argument('--tokenizer', default='Bytes()',
                      help=f'one of: {", ".join(choices(Tokenizer))} (default %(default)s)')
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
    if args.verify:
      _verify(parser, args.verify)
      return
    cache = open_cache(build(DocumentSource, args.source), build(Tokenizer, args.tokenizer),
                       args.context, args.bos, args.eos, args.valid_fraction, args.cache_dir,
                       args.workers)
  except ValueError as error:
    parser.exit(2, f'{parser.prog}: {error}\n')
  except (OSError, MemoryError, RuntimeError) as error:
    parser.exit(1, f'{parser.prog}: {error}\n')
  print(cache.folder)
  print(json.dumps(cache.manifest['domains'], indent=1))


def _verify(parser, folder):
  try:
    megabytes = verify(folder) / 1e6
    names = ', '.join(Cache(folder).manifest['files'])
    print(f'{folder}: {names}: {megabytes:.1f} MB read, every file is as it was built')
  except ValueError as error:
    parser.exit(1, f'{parser.prog}: {error}\n')


def _stop(signum, frame):
  sys.stderr.write('stopped by SIGTERM; the same command goes on where this one was\n')
  sys.exit(_EXIT_SAVED)


if __name__ == '__main__':
  signal.signal(signal.SIGTERM, _stop)
  try:
    main()
  except KeyboardInterrupt:
    sys.exit(130)
