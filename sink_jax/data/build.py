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
from sink_jax.data import near_copies, remote
from sink_jax.data.assembly import Assembly
from sink_jax.data.cache import FORMAT, Cache
from sink_jax.data.cache_check import check
from sink_jax.data.documents import DocumentSource, Prepared
from sink_jax.data.once import DiskFull, make_once
from sink_jax.data.progress import Progress
from sink_jax.data.tokenizer import Encoder, Tokenizer
from sink_jax.places import cache_root
from sink_jax.slot import build, choices

_COMPARED = 30_000_000  # characters of a source, which take some seconds
_EXIT_SAVED = 42  # "start me again"


def open_cache(source: DocumentSource, tokenizer: Tokenizer, context: int, bos: bool,
               eos: bool = True, valid_fraction: float = 0.05, cache_dir: str = '',
               workers: int = 0, encoder: Encoder | None = None) -> Cache:
  """The cache of a corpus, built now if it is not there yet.

  Safe with several processes: one builds, the others wait. A folder appears under its
  final name only when it is complete, and a build that was killed goes on where it was.

  Args:
    context: C, tokens the model sees; chunks have C + 1.
    bos, eos: whether BOS precedes and EOS follows each document.
    valid_fraction: share of the documents held out, which the source chooses: 0 for a source
      of training text alone, 1 for one of validation text.
    cache_dir: a folder or gs://bucket/folder; what is built is copied there, what is there
      already is copied here once. '' = $SINK_JAX_CACHE, else ~/.cache/sink_jax.
    workers: processes that tokenize; 0 is this one alone, with the tokenizer's threads.
    encoder: of the training text, for the validation text; None to make it of `tokenizer`.

  Raises:
    ValueError: the corpus is missing, damaged or too small; says what to change.
    DiskFull: the same call goes on once there is room.
  """
  settings = {'tokenizer': repr(tokenizer), 'context': context, 'bos': bos, 'eos': eos}
  if encoder:
    settings |= {'encoder': encoder.fingerprint()}
  if isinstance(source, Prepared):
    return _open_prepared(source, settings, valid_fraction)
  if context < 1 or not 0 <= valid_fraction <= 1:
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
    made = encoder or tokenizer.resolve(source, valid_fraction, root)
    Assembly(folder, source, made, settings).run(workers)

  if not remote.is_remote(cache_dir):
    make_once(final, make)
  elif remote.exists(f'{cache_dir}/{name}'):
    remote.copy_here(f'{cache_dir}/{name}', final)
  else:
    make_once(final, make)
    remote.copy_there(final, f'{cache_dir}/{name}')
  return Cache(final)


def open_pair(source: DocumentSource, valid_source: DocumentSource | None, tokenizer: Tokenizer,
              context: int, bos: bool, eos: bool, valid_fraction: float, cache_dir: str = '',
              workers: int = 0) -> tuple[Cache, Cache]:
  """The caches of the training and of the validation text, in one encoding; see `open_cache`.

  Without a validation source both are one cache, which holds out a part of its documents.
  """
  options = tokenizer, context, bos, eos
  if valid_source is None:
    cache = open_cache(source, *options, valid_fraction, cache_dir, workers)
    return cache, cache
  training = open_cache(source, *options, 0, cache_dir, workers)
  return training, open_cache(valid_source, *options, 1, cache_dir, workers, training.encoder)


def _open_prepared(source, settings, valid_fraction):
  cache = Cache(source.folder())
  if valid_fraction in (0, 1):  # one of a pair
    settings = settings | {'valid_fraction': valid_fraction}
    if any(cache.manifest.get(n) != settings.get(n) for n in ('valid_fraction', 'encoder')):
      raise ValueError(f'{cache.folder} was not built as one of this pair of a training and a '
                       'validation source: build both with python -m sink_jax.data.build '
                       '--source=... --valid_source=...')
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


def _overlap(source, valid_source, valid_fraction, left_out):
  """A line about the text that both sides of a split have; none where there is no text here.

  left_out: domains whose documents are on both sides.
  """
  if isinstance(source, Prepared) or isinstance(valid_source, Prepared):
    return []
  held, training, cut = [], [], False
  for side in filter(None, (source, valid_source)):
    read = 0
    for document in side.documents():
      if read >= _COMPARED:
        cut = True
        break
      read += len(document.text)
      if document.domain in left_out:
        continue
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
  parser = argparse.ArgumentParser(
      prog='python -m sink_jax.data.build', description=__doc__.splitlines()[0],
      epilog='Run again, it goes on where it was. Exit code 42: stopped by SIGTERM, to be '
             'started again; 1: no space, or a damaged file; 2: wrong options or input.')
  parser.add_argument('--source', default="Stdlib(split='content')",
                      help=f'one of: {", ".join(choices(DocumentSource))} (default %(default)s)')
  parser.add_argument('--valid_source', default='',
                      help='a source of its own for validation; then nothing of --source is held '
                           'out')
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
    _refuse_unused(parser, args)
    if args.verify:
      _verify(parser, args.verify)
      return
    if not 0 < args.valid_fraction < 1:
      raise ValueError(f'--valid_fraction={args.valid_fraction} must be between 0 and 1.')
    sources = [build(DocumentSource, text) if text else None
               for text in (args.source, args.valid_source)]
    caches = open_pair(*sources, build(Tokenizer, args.tokenizer), args.context, args.bos,
                       args.eos, args.valid_fraction, args.cache_dir, args.workers)
    shared = _overlap(*sources, args.valid_fraction, caches[0].domains_by_chunks())
  except ValueError as error:
    parser.exit(2, f'{parser.prog}: {error}\n')
  except (OSError, MemoryError, RuntimeError) as error:
    parser.exit(1, f'{parser.prog}: {error}\n')
  for cache in dict.fromkeys(caches):
    print(cache.folder)
    print(json.dumps(cache.manifest['domains'], indent=1))
  for line in [*dict.fromkeys(line for cache in caches for line in cache.remarks()), *shared]:
    print(line)


def _refuse_unused(parser, args):
  given = [name for name, value in vars(args).items() if value != parser.get_default(name)]
  unused, reason = [], ''
  if args.verify:
    unused, reason = [name for name in given if name != 'verify'], '--verify builds nothing'
  elif args.valid_source:
    unused, reason = ['valid_fraction'], 'with --valid_source nothing of --source is held out'
  elif isinstance(build(DocumentSource, args.source), Prepared):
    unused = ['valid_fraction', 'cache_dir', 'workers']
    reason = f'{args.source} is built already'
  for name in sorted(set(unused) & set(given)):
    raise ValueError(f'--{"no-eos" if name == "eos" else name} is not used: {reason}.')


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
