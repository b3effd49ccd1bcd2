"""Files of a cache that changed since the build: found in the background, and by their ids."""

import json
import os

import numpy as np
import pytest

from sink_jax.data import cache_check
from sink_jax.data.cache import Cache
from sink_jax.data.cache_check import CacheCheck, DamagedCache
from sink_jax.data.corpus import CorpusDataset
from sink_jax.data.sources import TextFolder
from sink_jax.data.prepare import open_cache
from sink_jax.data.tokenizer import Bytes, TrainedBpe
from tests.data.building import build


def _open(corpus, context=16, **options):
  return open_cache(corpus, options.pop('tokenizer', Bytes()), context, False, valid_fraction=0.2,
                    **options)


def _flip(path, keep_times=False):
  stat, data = path.stat(), bytearray(path.read_bytes())
  data[-30] ^= 1
  path.write_bytes(data)
  if keep_times:
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.fixture
def cache(corpus):
  return _open(corpus)


@pytest.fixture
def read(monkeypatch):
  """Names of the files that were read for their digest."""
  names, sha256 = [], cache_check.sha256

  def counted(path, *args):
    names.append(path.name)
    return sha256(path, *args)
  monkeypatch.setattr(cache_check, 'sha256', counted)
  return names


def test_a_flipped_bit_is_found_and_files_that_did_not_change_are_read_once(cache, read):
  files = sorted(cache.manifest['files'])
  CacheCheck(cache).start().wait()
  assert sorted(read) == files and len(files) == 5
  CacheCheck(cache).start().wait()
  assert len(read) == 5
  assert set(json.loads((cache.folder / 'verified.json').read_text())) == set(files)
  assert not (cache.folder / 'verified.lock').exists()
  _flip(cache.folder / 'train.001.npy')
  for _ in range(2):  # what is wrong is never stamped
    with pytest.raises(DamagedCache, match=r'train\.001\.npy changed since the build; delete'):
      CacheCheck(Cache(cache.folder)).start().wait()
  assert read[5:] == ['train.001.npy'] * 2


def test_verify_ignores_the_stamp_and_writes_it(cache, read, capsys):
  assert build('--verify', str(cache.folder)) is None
  out = capsys.readouterr().out
  assert all(name in out for name in cache.manifest['files']) and 'as it was built' in out
  CacheCheck(cache).start().wait()
  assert len(read) == 5
  _flip(cache.folder / 'valid.000.npy', keep_times=True)
  CacheCheck(cache).start().wait()  # this is what a stamp cannot see
  assert 'valid.000.npy changed' in build('--verify', str(cache.folder))


def test_whatever_stops_the_check_is_raised_by_who_waits_for_it(cache, monkeypatch):
  def broken(path, *args):
    raise RuntimeError('broken')
  monkeypatch.setattr(cache_check, 'sha256', broken)
  with pytest.raises(RuntimeError, match='broken'):
    CacheCheck(cache).start().wait()


@pytest.mark.parametrize('content', ['', '[]', '{"train.000.npy": 3}'])
def test_a_damaged_stamp_counts_as_none(cache, read, content):
  (cache.folder / 'verified.json').write_text(content)
  CacheCheck(cache).start().wait()
  assert len(read) == 5


def test_the_stamp_of_a_read_only_cache_is_with_the_user(cache, cache_folder, read):
  for name in ('verified.json', 'verified.lock'):
    (cache.folder / name).mkdir()  # so that nobody can write there, not even root
  CacheCheck(cache).start().wait()
  CacheCheck(cache).start().wait()
  assert len(read) == 5
  stamp, = (cache_folder / 'verified').iterdir()
  assert set(json.loads(stamp.read_text())) == set(cache.manifest['files'])


@pytest.mark.parametrize('locks', [True, False])
def test_one_process_of_a_host_reads_the_files(cache, read, monkeypatch, locks):
  reading, sha256 = [], cache_check.sha256
  second = CacheCheck(Cache(cache.folder))

  def overtaken(path, *args):
    if not reading:
      reading.append(path)
      second.start()
      second._thread.join(0.2)
    return sha256(path, *args)
  monkeypatch.setattr(cache_check, 'sha256', overtaken)
  if not locks:
    def refused(file, kind):
      raise OSError('no locks')
    monkeypatch.setattr(cache_check.fcntl, 'flock', refused)
  CacheCheck(cache).start().wait()
  second.wait()
  assert len(read) == (5 if locks else 10)


def test_names_in_a_manifest_do_not_lead_out_of_the_folder(cache):
  manifest = json.loads((cache.folder / 'manifest.json').read_text())
  for name in ('/dev/zero', '../x'):
    files = manifest['files'] | {name: {'bytes': 0, 'sha256': ''}}
    (cache.folder / 'manifest.json').write_text(json.dumps(manifest | {'files': files}))
    with pytest.raises(ValueError, match=f"names the file '{name}'"):
      Cache(cache.folder)


@pytest.mark.parametrize('split,row,token', [('train', 3, 65535), ('valid', 0, 258)])
def test_ids_outside_the_vocabulary_name_file_row_and_id(cache, split, row, token):
  chunks = np.load(cache.folder / f'{split}.001.npy', mmap_mode='r+')
  chunks[row, 5] = token
  chunks.flush()
  data = CorpusDataset(Cache(cache.folder))
  rows = len(data._cache.tables[split])
  with pytest.raises(ValueError, match=rf'{split}\.001\.npy, row {row} holds the token {token}, '
                                       'outside its vocabulary of 258; delete'):
    list(data.validation(8)['verse']) if split == 'valid' else next(data.batches(0, rows, 0))


def test_ids_of_wide_tokens_that_turn_negative_are_refused(cache):
  cache.tables['train'].take = lambda rows: np.full((len(rows), 17), -1, np.int32)
  with pytest.raises(ValueError, match='holds the token 4294967295'):
    cache.chunks('train', np.array([0]))


def test_probe_ids_are_checked(cache):
  with np.load(cache.folder / 'probe.npz') as stored:
    arrays = dict(stored)
  arrays['tokens'][0, 2] = 300
  np.savez(cache.folder / 'probe.npz', **arrays)
  with pytest.raises(ValueError, match=r'probe\.npz holds the token 300'):
    cache.probes(3)


def test_a_changed_tokenizer_of_a_cache_is_refused(corpus):
  folder = _open(corpus, tokenizer=TrainedBpe(vocab_size=280)).folder
  text = (folder / 'tokenizer.json').read_text()
  (folder / 'tokenizer.json').write_text(text.replace('"merges"', '"Merges"'))
  with pytest.raises(ValueError, match=r'tokenizer\.json changed since the build; delete'):
    Cache(folder).encoder  # noqa: B018


def test_remarks(corpus, tmp_path, cache):
  assert cache.remarks() == []
  (tmp_path / 'one').mkdir()
  (tmp_path / 'one' / 'a.txt').write_text('letters ' * 200)
  one = _open(TextFolder(path=str(tmp_path / 'one')))
  line, = CorpusDataset(one).remarks()
  assert line.startswith('text: too few documents to hold some out')
  del cache.manifest['files']
  cache.manifest['source'] = 'Stdlib()'
  assert ['by their names' in line for line in cache.remarks()] == [True, False]
  assert 'before digests' in cache.remarks()[1]
