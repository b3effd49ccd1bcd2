"""Caches on gs://: copied there and here, checked, shared; a folder stands in for the bucket."""

import json
import os
import pathlib
import shutil

import pytest
from etils.epath.testing import mock_epath

from sink_jax.data import remote
from sink_jax.data.sources import Jsonl, PackedDataset
from sink_jax.data.prepare import open_cache, packed_folder
from sink_jax.data.tokenizer import Bytes
from sink_jax.io.build_once import DiskFull
from tests.data.building import build

_URL = 'gs://bucket/corpora'


@pytest.fixture
def bucket(tmp_path):
  """The folder of gs://bucket, and the paths that were opened, with their mode."""
  folder, opened = tmp_path / 'bucket', []

  def local(path):
    return tmp_path / os.fspath(path).removeprefix('gs://')

  def opening(original, path, mode):
    if os.fspath(path).startswith('gs://'):
      opened.append((pathlib.Path(path).name, mode))
      local(path).parent.mkdir(parents=True, exist_ok=True)
    return original(local(path), mode)
  same = lambda original, path: original(local(path))
  with mock_epath(open=opening, exists=same, stat=same, remove=same):
    yield folder, opened


def _open(corpus, **options):
  return open_cache(corpus, Bytes(), 16, False, valid_fraction=0.2, **options)


def _files(folder):
  return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_a_build_is_copied_there_and_taken_from_there(corpus, bucket, cache_folder):
  folder, opened = bucket
  built = _open(corpus, cache_dir=_URL)
  there, = (folder / 'corpora').iterdir()
  assert _files(there) == _files(built.folder) and there.name == built.folder.name
  written = [name for name, mode in opened if 'w' in mode]
  assert written[0] == 'begun.json' and written[-1] == 'manifest.json'
  shutil.rmtree(cache_folder)  # another host
  opened.clear()
  assert _files(_open(corpus, cache_dir=_URL).folder) == _files(there)
  assert sum(name.endswith('.npy') for name, _ in opened) == 4
  opened.clear()
  assert len(_open(corpus, cache_dir=_URL).tables['train']) > 0  # as a second process
  assert {name for name, _ in opened} == {'manifest.json'}


def test_a_packed_dataset_is_copied_once_and_an_interrupted_copy_goes_on(corpus, bucket, monkeypatch):
  folder, opened = bucket
  there = folder / 'mine'
  shutil.copytree(_open(corpus).folder, there)
  source = PackedDataset(path='gs://bucket/mine')
  download, stop = remote._download, [3]

  def dying(*args):
    stop[0] -= 1
    if not stop[0]:
      raise KeyboardInterrupt
    download(*args)
  monkeypatch.setattr(remote, '_download', dying)
  with pytest.raises(KeyboardInterrupt):
    _open(source)
  cache = _open(source)
  assert _files(cache.folder) == _files(there)
  assert sum(name.endswith('.np' + kind) for name, _ in opened for kind in 'yz') == 5  # none twice
  assert packed_folder(source) == cache.folder
  manifest = json.loads((there / 'manifest.json').read_text())
  (there / 'manifest.json').write_text(json.dumps(manifest | {'note': 'built again'}))
  assert packed_folder(source) != cache.folder  # the new build, not the old copy


def test_an_interrupted_upload_goes_on(corpus, bucket, monkeypatch):
  folder, opened = bucket
  built = _open(corpus)
  upload, stop = remote._upload, [3]

  def dying(*args):
    stop[0] -= 1
    if not stop[0]:
      raise KeyboardInterrupt
    upload(*args)
  monkeypatch.setattr(remote, '_upload', dying)
  with pytest.raises(KeyboardInterrupt):
    _open(corpus, cache_dir=_URL)
  assert not remote.exists(f'{_URL}/{built.folder.name}')
  _open(corpus, cache_dir=_URL)
  assert _files(folder / 'corpora' / built.folder.name) == _files(built.folder)
  written = [name for name, mode in opened if 'w' in mode]
  assert len(written) == len(set(written))


def test_errors_name_the_address_and_the_remedy(corpus, bucket):
  folder, _ = bucket
  there = folder / 'mine'
  shutil.copytree(_open(corpus).folder, there)
  data = bytearray((there / 'valid.000.npy').read_bytes())
  data[-1] ^= 1
  (there / 'valid.000.npy').write_bytes(data)
  with pytest.raises(ValueError, match='gs://bucket/mine/valid.000.npy differs from the digest'):
    packed_folder(PackedDataset(path='gs://bucket/mine'))
  with pytest.raises(ValueError, match='gs://bucket/none is no complete chunk cache'):
    packed_folder(PackedDataset(path='gs://bucket/none'))
  with pytest.raises(ValueError, match='copy it to this machine first'):
    list(Jsonl(path='gs://bucket/a.jsonl').documents())
  assert 'use gs://bucket/folder' in build('--source', "PackedDataset(path='zz://bucket/none')")


def test_without_gcsfs_the_pip_line_is_named():
  try:
    import gcsfs  # noqa: F401
  except ImportError:
    with pytest.raises(ValueError, match=r'python -m pip install "etils\[epath-gcs\]"'):
      packed_folder(PackedDataset(path='gs://bucket/none'))


def test_a_copy_says_how_much_room_it_needs(corpus, bucket, monkeypatch):
  import errno
  folder, _ = bucket
  shutil.copytree(_open(corpus).folder, folder / 'mine')

  def full(*args):
    raise OSError(errno.ENOSPC, 'No space left on device')
  monkeypatch.setattr(remote, '_download', full)
  with pytest.raises(DiskFull, match=r'copies/mine-.*GB more are needed'):
    packed_folder(PackedDataset(path='gs://bucket/mine'))


def test_a_manifest_cannot_lead_out_of_the_folder(corpus, bucket, cache_folder):
  there = bucket[0] / 'mine'
  shutil.copytree(_open(corpus).folder, there)
  manifest = json.loads((there / 'manifest.json').read_text())
  name, file = next(iter(manifest['files'].items()))
  shutil.copy(there / name, bucket[0] / 'escaped')
  manifest['files'] |= {'../escaped': file}
  (there / 'manifest.json').write_text(json.dumps(manifest))
  with pytest.raises(ValueError, match='manifest.json is damaged'):
    _open(PackedDataset(path='gs://bucket/mine'))
  assert not list(cache_folder.rglob('escaped'))
