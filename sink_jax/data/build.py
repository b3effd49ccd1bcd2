"""Tokenizes and packs a corpus once, into a cache of fixed-length chunks.

    python -m sink_jax.data.build --source 'Stdlib()' --tokenizer 'Bytes()' --context 64
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import socket
import time
import uuid
from collections.abc import Iterator

import numpy as np

import sink_jax.data.packages  # noqa: F401  a source is a choice once its module is imported
from sink_jax.data.cache import FORMAT, SPLITS, Cache, cache_root
from sink_jax.data.documents import Document, DocumentSource, Prepared, held_out
from sink_jax.data.packing import ChunkWriter, Packer, delimited
from sink_jax.data.probe_pool import ProbePool
from sink_jax.data.tokenizer import Encoder, Tokenizer
from sink_jax.slot import build, choices

_MAX_DOMAINS = 256  # each keeps two files open
_STALE_SECONDS = 24 * 3600


def open_cache(source: DocumentSource, tokenizer: Tokenizer, context: int, bos: bool,
               eos: bool = True, valid_fraction: float = 0.05, cache_dir: str = '') -> Cache:
  """The cache of a corpus, built now if it is not there yet.

  Safe with several processes: each builds in a folder of its own and renames it,
  the first wins. A folder appears under its final name only when it is complete.

  Args:
    context: C, tokens the model sees; chunks have C + 1.
    bos, eos: whether BOS precedes and EOS follows each document.
    valid_fraction: share of the documents held out, by a hash of their names.

  Raises:
    ValueError: the corpus is missing, damaged or too small; says what to change.
  """
  settings = {'tokenizer': repr(tokenizer), 'context': context, 'bos': bos, 'eos': eos}
  if isinstance(source, Prepared):
    return _open_prepared(source, settings)
  if context < 1 or not 0 < valid_fraction < 1:
    raise ValueError(f'context={context} must be at least 1, and valid_fraction={valid_fraction} '
                     'between 0 and 1 (0.05 holds out a twentieth of the documents).')
  settings |= {
      'format': FORMAT, 'source': repr(source), 'source_fingerprint': source.fingerprint(),
      'tokenizer_fingerprint': tokenizer.fingerprint(), 'valid_fraction': valid_fraction}
  key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
  root = cache_root(cache_dir)
  final = root / f'{type(source).__name__.lower()}-{context}-{key}'
  if not (final / 'manifest.json').exists():
    root.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(root, final)
    encoder = tokenizer.resolve(source, valid_fraction, root)
    owner = f'{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}'
    partial = root / f'{final.name}.partial-{owner}'
    partial.mkdir()
    try:
      _write(partial, source, encoder, settings)
      _publish(partial, final)
    finally:
      shutil.rmtree(partial, ignore_errors=True)
  return Cache(final)


def _open_prepared(source, settings):
  cache = Cache(source.folder())
  for name, wanted in settings.items():
    found = cache.manifest[name]
    if found != wanted:
      raise ValueError(f'{cache.folder} was built with {name}={found!r}, not {wanted!r}; '
                       f'set {name}={found!r} or build another cache.')
  return cache


def _remove_leftovers(root, final):
  if final.exists() and not (final / 'manifest.json').exists():
    shutil.rmtree(final)  # a copy that was broken off: our own builds appear complete
  for partial in root.glob('*.partial-*'):  # of builds that were killed
    try:
      newest = max(f.stat().st_mtime for f in [partial, *partial.iterdir()])
    except FileNotFoundError:  # another process has just finished or removed it
      continue
    if newest < time.time() - _STALE_SECONDS:
      shutil.rmtree(partial, ignore_errors=True)


def _publish(partial, final):
  try:
    os.rename(partial, final)
  except OSError:
    if not (final / 'manifest.json').exists():  # else another process was faster
      raise


def _write(folder, source, encoder, settings):
  """Writes a complete cache into an empty folder, the manifest last."""
  length = settings['context'] + 1
  bos_id = encoder.bos_id if settings['bos'] else None
  eos_id = encoder.eos_id if settings['eos'] else None
  domains = {}
  for document, tokens in _encoded(source, encoder):
    if document.domain not in domains:
      _check_domain(document.domain, domains)
      domains[document.domain] = _Domain(folder, len(domains), length, encoder)
    held = held_out(document.name, settings['valid_fraction'])
    domains[document.domain].add(tokens, delimited(tokens, bos_id, eos_id), held)
  if not domains:
    raise ValueError(f'{source!r} has no documents with any text.')
  domains = dict(sorted(domains.items()))
  entries = {name: domain.finish(name, settings) for name, domain in domains.items()}
  ProbePool.save(folder / 'probe.npz', [d.probes for d in domains.values()], encoder.pad_id)
  encoder.save(folder)
  manifest = settings | {
      'vocab_size': encoder.vocab_size, 'dtype': _dtype(encoder).name,
      'special_ids': {'eos': encoder.eos_id, 'bos': encoder.bos_id, 'pad': encoder.pad_id},
      'content': _digest(folder), 'domains': entries}
  (folder / 'manifest.json').write_text(json.dumps(manifest, indent=1) + '\n')


def _digest(folder) -> str:
  """Identifies the chunks and probe prompts by what they hold."""
  digest = hashlib.sha256()
  for path in sorted(folder.glob('*.npy')):
    with open(path, 'rb') as file:
      digest.update(hashlib.file_digest(file, 'sha256').digest())
  return digest.hexdigest()[:32]


def _encoded(source, encoder) -> Iterator[tuple[Document, np.ndarray]]:
  """Documents with text, and their ids; a progress bar counts them on a terminal."""
  import tqdm
  with tqdm.tqdm(desc='tokenizing', unit=' documents', disable=None) as bar:
    for group in _grouped(source.documents()):
      ids = encoder.encode_batch([document.text for document in group])
      yield from zip(group, ids, strict=True)
      bar.update(len(group))


def _grouped(documents, characters=1 << 20):
  """Lists of documents large enough for the tokenizer's threads, small enough for memory."""
  group, size = [], 0
  for document in documents:
    if document.text:
      group.append(document)
      size += len(document.text)
    if size >= characters:
      yield group
      group, size = [], 0
  if group:
    yield group


def _check_domain(name, domains):
  if name == 'valid':
    raise ValueError("A domain (a sub-folder) is called 'valid', the name of the whole "
                     'validation set; rename it.')
  if len(domains) == _MAX_DOMAINS:
    raise ValueError(f'More than {_MAX_DOMAINS} domains, such as {name!r}: does domain_field '
                     'name a domain, or the documents?')


def _dtype(encoder: Encoder) -> np.dtype:
  return np.dtype(np.uint16 if encoder.vocab_size <= 65536 else np.uint32)


class _Domain:
  """The two packed streams of one domain while they are written."""

  def __init__(self, folder, number, length, encoder):
    self._dtype = _dtype(encoder)
    self._length = length
    self._paths = {s: folder / f'{s}.{number:03}.npy' for s in SPLITS}
    self._writers = {s: ChunkWriter(p, length, self._dtype) for s, p in self._paths.items()}
    self._packers = {s: Packer(length) for s in SPLITS}
    self._documents = dict.fromkeys(SPLITS, 0)
    self.probes = ProbePool(length)

  def add(self, tokens, stream_tokens, held):
    split = 'valid' if held else 'train'
    self._documents[split] += 1
    self._writers[split].write(self._packers[split].add(stream_tokens))
    if held:
      self.probes.add(tokens)

  def finish(self, name, settings):
    """Closes the files; returns the domain's entry in the manifest."""
    for writer in self._writers.values():
      writer.close()
    rows = {s: w.rows for s, w in self._writers.items()}
    split_by = 'documents'
    if not all(rows.values()):
      rows, split_by = self._split_chunks(name, rows, settings), 'chunks'
    entry = {s: {'file': self._paths[s].name, 'documents': self._documents[s],
                 'tokens': self._packers[s].tokens, 'chunks': rows[s]} for s in SPLITS}
    return {'split_by': split_by} | entry

  def _split_chunks(self, name, rows, settings):
    """Few, long documents can leave one split empty: then the last chunks are for validation."""
    total = sum(rows.values())
    if total < 2:
      tokens = sum(p.tokens for p in self._packers.values())
      raise ValueError(
          f'{settings["source"]}: domain {name!r} has {tokens} tokens in '
          f'{sum(self._documents.values())} documents, too few for a training and a validation '
          f'chunk of context + 1 = {self._length}; add text, lower the context, '
          'or merge the domain into another.')
    chunks = [np.load(self._paths[s], mmap_mode='r') for s in SPLITS]
    valid = max(1, min(total - 1, round(total * settings['valid_fraction'])))
    writers = {s: ChunkWriter(p.with_suffix('.new'), self._length, self._dtype)
               for s, p in self._paths.items()}
    written = 0
    for block in (c[i:i + 4096] for c in chunks for i in range(0, len(c), 4096)):
      train = max(0, min(len(block), total - valid - written))
      writers['train'].write(block[:train])
      writers['valid'].write(block[train:])
      written += len(block)
    del chunks
    for split, writer in writers.items():
      writer.close()
      os.replace(self._paths[split].with_suffix('.new'), self._paths[split])
    self.probes = ProbePool(self._length)
    for chunk in np.load(self._paths['valid'], mmap_mode='r'):
      self.probes.add(chunk)
    return {s: w.rows for s, w in writers.items()}


def main(argv: list[str] | None = None) -> None:
  parser = argparse.ArgumentParser(
      prog='python -m sink_jax.data.build', description=__doc__.splitlines()[0])
  parser.add_argument('--source', default='Stdlib()',
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
                      help='default: $SINK_JAX_CACHE, else ~/.cache/sink_jax')
  args = parser.parse_args(argv)
  try:
    cache = open_cache(build(DocumentSource, args.source), build(Tokenizer, args.tokenizer),
                       args.context, args.bos, args.eos, args.valid_fraction, args.cache_dir)
  except (ValueError, OSError, MemoryError, RuntimeError) as error:
    parser.exit(2, f'{parser.prog}: {error}\n')
  print(cache.folder)
  print(json.dumps(cache.manifest['domains'], indent=1))


if __name__ == '__main__':
  main()
