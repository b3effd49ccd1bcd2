"""Chunk caches on gs://: copied here once for each host, since reading maps files.

An object store has no renames: a folder cannot be made complete under another name and then appear
at once. It has no locks and no appending either, but an object appears whole or not at all. So a
cache is complete when its manifest is there, which is written last; until then begun.json holds the
manifest that the files will belong to. The next upload of the same build keeps the files that are
there; one of another build, such as after a change of the corpus, writes them all again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from etils import epath

from sink_jax.io.build_once import build_once, disk_full_named
from sink_jax.io.files import replace_atomically, write_atomically
from sink_jax.io.hashing import sha256_of_stream
from sink_jax.io.paths import cache_root
from sink_jax.io.progress import Progress

_BLOCK_BYTES = 1 << 23  # of an upload


def is_remote(path: str) -> bool:
  """Whether a path is in an object store."""
  return '://' in path


def exists(url: str) -> bool:
  """Whether a complete cache is at this address."""
  with _reached(url):
    return (_path(url) / 'manifest.json').exists()


def local_copy(url: str) -> pathlib.Path:
  """The copy of a remote cache below `cache_root()`, made now if there is none."""
  text = _manifest(url)
  # Another build at the same address becomes another copy, which runs on the old one do not notice.
  key = hashlib.sha256(text.encode()).hexdigest()[:16]
  folder = cache_root() / 'copies' / f'{_path(url).name}-{key}'
  copy_here(url, folder)
  return folder


def copy_here(url: str, folder: pathlib.Path) -> None:
  """Copies a remote cache into a folder, unless it is there; other processes wait meanwhile.

  Every file is compared with its digest. An interrupted copy continues with the next file.

  Raises:
    ValueError: there is no cache, its files are not those of its manifest, or the folder holds
      another cache.
    DiskFull: names how much is needed.
  """
  text = _manifest(url)
  files = _files(text, url)
  total = sum(file['bytes'] for file in files.values())
  done = 0

  def make(partial: pathlib.Path) -> None:
    nonlocal done
    with Progress(f'copying {url}', total) as progress:
      with disk_full_named(partial, lambda: total - done):
        for name, file in files.items():
          path = partial / name
          # A file here has passed its digest before it got this name.
          if not (path.exists() and path.stat().st_size == file['bytes']):
            _download(_path(url) / name, path, file['sha256'], done, progress)
          done += file['bytes']
        write_atomically(partial / 'manifest.json', text)

  build_once(folder, make)
  if json.loads((folder / 'manifest.json').read_text()) != json.loads(text):
    raise ValueError(f'{folder} is another build than {url}; delete one of them.')


def copy_there(folder: pathlib.Path, url: str) -> None:
  """Copies a complete cache to a remote folder, its manifest last.

  Raises:
    OSError: it cannot be written; the same call continues with the next file.
  """
  text = (folder / 'manifest.json').read_text()
  files = _files(text, folder)
  with _reached(url), Progress(f'copying to {url}', sum(f['bytes'] for f in files.values())) as bar:
    target = _path(url)
    begun = target / 'begun.json'  # the manifest of the build that files there belong to
    # A file of the right size may be of another build, unless the same manifest was begun with.
    resumed = begun.exists() and begun.read_text() == text
    if not resumed:
      begun.write_text(text)
    done = 0
    for name, file in files.items():
      there = target / name
      if not (resumed and there.exists() and there.stat().length == file['bytes']):
        _upload(folder / name, there, done, bar)
      done += file['bytes']
    (target / 'manifest.json').write_text(text)
    begun.unlink()


def _upload(path: pathlib.Path, there: epath.Path, done: int, progress: Progress) -> None:
  with path.open('rb') as source, there.open('wb') as target:
    while block := source.read(_BLOCK_BYTES):
      target.write(block)
      done += len(block)
      progress.update(done)


def _download(there: epath.Path, path: pathlib.Path, digest: str, done: int,
              progress: Progress) -> None:
  with _reached(there), there.open('rb') as source, replace_atomically(path) as target:

    def keep(block: bytes) -> None:
      nonlocal done
      target.write(block)
      done += len(block)
      progress.update(done)

    if sha256_of_stream(source, keep) != digest:
      raise ValueError(f'{there} differs from the digest in the manifest beside it: it was damaged '
                       'or replaced; build and upload the cache again.')


def _manifest(url: str) -> str:
  """The text of the manifest of a remote cache."""
  with _reached(url):
    path = _path(url) / 'manifest.json'
    if not path.exists():
      raise ValueError(f'{url} is no complete chunk cache (it has no manifest.json): check the '
                       'path, or build it with python -m sink_jax.data.build --cache_dir=gs://...')
    return path.read_text()


def _files(text: str, where: str | pathlib.Path) -> dict[str, dict[str, Any]]:
  """The files that a manifest lists, with their sizes and digests."""
  try:
    files = json.loads(text)['files']
    if any(os.path.basename(name) != name or name in ('', '.', '..') for name in files):
      raise ValueError('a name that leads out of the folder')
    return files
  except (ValueError, KeyError, TypeError):
    raise ValueError(f'{where}: its manifest.json is damaged, or older than the digests of all '
                     'files; build it again.') from None


def _path(url: str) -> epath.Path:
  return epath.Path(url)


@contextlib.contextmanager
def _reached(url: str | epath.Path) -> Iterator[None]:
  """Turns the errors of the libraries behind a path, of all kinds, into ones that name it."""
  try:
    yield
  except (ValueError, FileNotFoundError):
    raise
  except ImportError as error:
    raise ValueError(f'{url}: {error}. Install it with: python -m pip install '
                     '"etils[epath-gcs]"') from None
  except KeyError as error:
    raise ValueError(f'{url}: no paths of the kind {error} are known; use gs://bucket/folder or '
                     'a folder of a file system.') from None
  except OSError as error:
    if error.errno is not None:  # an error of the disk of this machine
      raise
    raise OSError(f'{url}: {error}') from None
  except Exception as error:
    raise OSError(f'{url} cannot be read or written: {type(error).__name__}: {error}. Are the '
                  'bucket and the rights of this account right (gcloud auth application-default '
                  'login)?') from None
