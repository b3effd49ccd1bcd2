"""Chunk caches on gs://: copied here once for each host, since reading maps files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib

from sink_jax.io.build_once import build_once, disk_full_named
from sink_jax.io.files import replace_atomically, write_atomically
from sink_jax.io.hashing import sha256_of_stream
from sink_jax.io.paths import cache_root
from sink_jax.io.progress import Progress

_BLOCK = 1 << 23


def is_remote(path: str) -> bool:
  return '://' in path


def exists(url: str) -> bool:
  """Whether a complete cache is there."""
  with _reached(url):
    return (_path(url) / 'manifest.json').exists()


def local_copy(url: str) -> pathlib.Path:
  """The copy of a remote cache below `cache_root()`, made now if there is none."""
  text = _manifest(url)
  key = hashlib.sha256(text.encode()).hexdigest()[:16]  # another build there is another copy here
  folder = cache_root() / 'copies' / f'{_path(url).name}-{key}'
  copy_here(url, folder)
  return folder


def copy_here(url: str, folder: pathlib.Path) -> None:
  """Copies a remote cache into a folder, unless it is there; others wait meanwhile.

  Every file is compared with its digest. An interrupted copy goes on with the next file.

  Raises:
    ValueError: there is no cache, its files are not those of its manifest, or the folder
      holds another one.
    DiskFull: says how much is needed.
  """
  text = _manifest(url)
  files = _files(text, url)
  total = sum(file['bytes'] for file in files.values())
  done = 0

  def make(partial):
    nonlocal done
    with Progress(f'copying {url}', total) as progress:
      with disk_full_named(partial, lambda: total - done):
        for name, file in files.items():
          path = partial / name
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
    OSError: it cannot be written; the same call goes on with the next file.
  """
  text = (folder / 'manifest.json').read_text()
  files = _files(text, folder)
  with _reached(url), Progress(f'copying to {url}', sum(f['bytes'] for f in files.values())) as bar:
    target = _path(url)
    begun = target / 'begun.json'  # of which build the files are that are there already
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


def _upload(path, there, done, progress):
  with path.open('rb') as source, there.open('wb') as target:
    while block := source.read(_BLOCK):
      target.write(block)
      done += len(block)
      progress.update(done)


def _download(there, path, digest, done, progress):
  with _reached(there), there.open('rb') as source, replace_atomically(path) as target:

    def keep(block):
      nonlocal done
      target.write(block)
      done += len(block)
      progress.update(done)

    if sha256_of_stream(source, keep) != digest:
      raise ValueError(f'{there} differs from the digest in the manifest beside it: it was damaged '
                       'or replaced; build and upload the cache again.')


def _manifest(url):
  with _reached(url):
    path = _path(url) / 'manifest.json'
    if not path.exists():
      raise ValueError(f'{url} is no complete chunk cache (it has no manifest.json): check the '
                       'path, or build it with python -m sink_jax.data.build --cache_dir=gs://...')
    return path.read_text()


def _files(text, where):
  try:
    files = json.loads(text)['files']
    if any(os.path.basename(name) != name or name in ('', '.', '..') for name in files):
      raise ValueError('a name that leads out of the folder')
    return files
  except (ValueError, KeyError, TypeError):
    raise ValueError(f'{where}: its manifest.json is damaged, or older than the digests of all '
                     'files; build it again.') from None


def _path(url):
  from etils import epath
  return epath.Path(url)


@contextlib.contextmanager
def _reached(url):
  """Names the address in errors of libraries that raise all kinds of them."""
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
    if error.errno is not None:  # of a disk here
      raise
    raise OSError(f'{url}: {error}') from None
  except Exception as error:
    raise OSError(f'{url} cannot be read or written: {type(error).__name__}: {error}. Are the '
                  'bucket and the rights of this account right (gcloud auth application-default '
                  'login)?') from None
