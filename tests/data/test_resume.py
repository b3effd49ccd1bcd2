"""A build that is stopped is resumed by the same call; its result is the same whatever happened."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from sink_jax.data import cache_builder, encoding, packing
from sink_jax.data.cache import Cache
from sink_jax.data.chat import ChatJsonl
from sink_jax.data.prepare import open_cache
from sink_jax.data.tokenizer import Bytes, TrainedBpe
from sink_jax.io.build_once import build_once
from sink_jax.io.files import write_atomically
from tests.data.building import build

# What builds were before they could be stopped, several processes wide.
_CONTENT = {(16, False): '3220f2bbf6f5060da36a141cf3be3bf0',
            (16, True): 'a7ae6a42ff7c0f31874e3ff1afaaacc9',
            (2500, False): 'ca91183685a28a8770709181ba61faf9'}  # cut by chunks in one domain


class Killed(BaseException):
  """The process is gone: nothing that catches errors sees it."""


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
  monkeypatch.setattr(encoding, '_CHARACTERS', 1500)  # about 15 groups
  monkeypatch.setattr(packing, '_BUFFER', 300)
  monkeypatch.setattr(cache_builder, '_SECONDS_BETWEEN_COMMITS', -1)


def _open(corpus, context=16, bos=False, tokenizer=Bytes(), **options):
  return open_cache(corpus, tokenizer, context, bos, valid_fraction=0.2, **options)


def _files(cache):
  return {p.name: p.read_bytes() for p in cache.folder.iterdir()}


def _answers(corpus, folder):
  """The documents of a corpus as answers, which alone have weights."""
  lines = {}
  for document in corpus.documents():
    messages = [{'role': role, 'content': document.text[cut]} for role, cut in (
        ('user', slice(9)), ('assistant', slice(9, None)))]
    lines.setdefault(document.domain, []).append(json.dumps({'messages': messages}) + '\n')
  for domain, of_domain in lines.items():
    (folder / domain).mkdir(parents=True)
    (folder / domain / 'a.jsonl').write_text(''.join(of_domain))
  return ChatJsonl(path=str(folder), loss='answers')


@pytest.mark.parametrize('kind,context,bos', [
    ('text', 16, False), ('text', 2500, False), ('answers', 2500, False),
    pytest.param('answers', 16, True, marks=pytest.mark.full),
    pytest.param('text', 16, True, marks=pytest.mark.full)])
def test_killed_at_every_moment_and_resumed(corpus, tmp_path, monkeypatch, kind, context, bos):
  if kind == 'answers':
    corpus = _answers(corpus, tmp_path / 'chat')
  whole = _open(corpus, context, bos, cache_dir=str(tmp_path / 'whole'))
  if kind == 'text':
    assert whole.manifest['content'] == _CONTENT[context, bos]
  else:
    assert {e['split_by'] for e in whole.manifest['domains'].values()} == (
        {'documents', 'chunks'} if context == 2500 else {'documents'})
  tokenized = []
  encode = encoding.ByteEncoder.encode_batch
  monkeypatch.setattr(encoding.ByteEncoder, 'encode_batch',
                      lambda self, texts: tokenized.append(len(texts)) or encode(self, texts))
  left = 0

  def dying(function):
    def call(*args, **options):
      nonlocal left
      left -= 1
      if left == 0:
        raise Killed
      return function(*args, **options)
    return call

  # Whatever reaches the disk goes through one of these.
  for name in ('fsync', 'replace', 'rename', 'mkdir'):
    monkeypatch.setattr(os, name, dying(getattr(os, name)))
  kills, resumed = 0, None
  while not resumed:
    assert kills < 500
    # More calls each time than a commit takes, else there is no progress.
    left = {'text': 5, 'answers': 12}[kind] + kills % 7
    try:
      resumed = _open(corpus, context, bos, cache_dir=str(tmp_path / 'killed'))
    except Killed:
      kills += 1
  assert kills > 8
  texts = {'text': 1, 'answers': 2}[kind]  # of a document, and those of the template of a group
  assert sum(tokenized) < texts * (100 + 2 * 15 * kills) + 8 * len(tokenized)  # documents of lost groups, not all of them again
  assert _files(resumed) == _files(whole)


@pytest.mark.parametrize('kind', ['text', pytest.param('answers', marks=pytest.mark.full)])
def test_workers_make_the_same_files(corpus, tmp_path, kind):
  corpus = corpus if kind == 'text' else _answers(corpus, tmp_path / 'chat')
  caches = [_open(corpus, 8, tokenizer=TrainedBpe(vocab_size=300), workers=workers,
                  cache_dir=str(tmp_path / str(workers))) for workers in (0, 2)]
  assert _files(caches[0]) == _files(caches[1])


_SLOW = """
import sys, time
from sink_jax.cli import command
from sink_jax.data import cache_builder, encoding
cache_builder._SECONDS_BETWEEN_COMMITS, encoding._CHARACTERS = -1, 1500
commit = cache_builder.CacheBuilder._commit
def slow(*args):
  commit(*args)
  print('committed', flush=True)
  time.sleep(0.2)
if 'slow' in sys.argv:
  sys.argv.remove('slow')
  cache_builder.CacheBuilder._commit = slow
if __name__ == '__main__':
  command.run('data.build', sys.argv[1:])
"""


@pytest.mark.parametrize('workers', [0, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize('sign,code', [(signal.SIGKILL, -9), (signal.SIGTERM, 42)])
def test_signals(corpus, tmp_path, sign, code, workers):
  command = [sys.executable, '-c', _SLOW, '--source', repr(corpus), '--context=8',
             '--valid_fraction=0.2', '--tokenizer=TrainedBpe(vocab_size=300)',
             f'--workers={workers}']
  with subprocess.Popen([*command, 'slow'], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                        text=True) as process:
    for _ in range(3):
      assert process.stdout.readline() == 'committed\n'
    process.send_signal(sign)
    assert process.wait() == code
    if code == 42:
      assert 'resumes the build' in process.stderr.read()
  assert build(*command[3:]) is None  # resumes
  whole = _open(corpus, 8, tokenizer=TrainedBpe(vocab_size=300), cache_dir=str(tmp_path / 'whole'))
  assert _files(_open(corpus, 8, tokenizer=TrainedBpe(vocab_size=300))) == _files(whole)


def test_another_tokenizer_of_the_same_name_starts_again(corpus, monkeypatch):
  def stopped(self, commit):
    raise Killed
  with monkeypatch.context() as patch:
    patch.setattr(cache_builder.CacheBuilder, '_finish', stopped)
    with pytest.raises(Killed):
      _open(corpus)
  monkeypatch.setattr(encoding.ByteEncoder, 'fingerprint', lambda self: 'other')
  monkeypatch.setattr(encoding.ByteEncoder, 'encode_batch',
                      lambda self, texts: [np.full(40, 7) for _ in texts])
  table = _open(corpus).tables['train']
  assert set(table.take(np.arange(len(table))).ravel().tolist()) == {0, 7}


@pytest.mark.parametrize('content', ['', '{"a": '])
def test_a_tokenizer_that_a_power_cut_left_damaged_is_written_again(corpus, cache_folder,
                                                                    monkeypatch, content):
  tokenizer = TrainedBpe(vocab_size=280)

  def stopped(self, commit):
    raise Killed
  with monkeypatch.context() as patch:
    patch.setattr(cache_builder.CacheBuilder, '_finish', stopped)
    with pytest.raises(Killed):
      _open(corpus, tokenizer=tokenizer)
  stored, = cache_folder.glob('*.partial/tokenizer.json')
  whole = stored.read_text()
  stored.write_text(content)
  cache = _open(corpus, tokenizer=tokenizer)
  assert (cache.folder / 'tokenizer.json').read_text() == whole
  assert cache.encoder.vocab_size == 280


def test_a_full_disk_is_named_and_the_build_goes_on(corpus, cache_folder, monkeypatch):
  whole = _open(corpus, cache_dir=str(cache_folder / 'whole'))
  sync, calls = os.fsync, []

  def full(descriptor):
    calls.append(descriptor)
    if len(calls) > 20:
      raise OSError(errno.ENOSPC, 'No space left on device')
    sync(descriptor)
  with monkeypatch.context() as patch:
    patch.setattr(os, 'fsync', full)
    error = build('--source', repr(corpus), '--context=16', '--valid_fraction=0.2')
  assert error.startswith('error: ') and '\n' not in error
  assert f'No space left on the disk of {cache_folder}' in error and 'GB more are needed' in error
  assert _files(_open(corpus)) == _files(whole)


def test_wrong_input_leaves_nothing_behind(corpus, cache_folder):
  with pytest.raises(ValueError, match='too few'):
    _open(corpus, context=50_000)
  assert list(cache_folder.iterdir()) == []


def test_verify_finds_a_flipped_byte(corpus, capsys):
  folder = _open(corpus).folder
  assert build('--verify', str(folder)) is None
  assert 'as it was built' in capsys.readouterr().out
  for name in ('train.001.npy', 'probe.npz'):
    data = bytearray((folder / name).read_bytes())
    data[-30] ^= 1
    (folder / name).write_bytes(data)
  assert 'probe.npz, train.001.npy changed' in build('--verify', str(folder))
  (folder / 'probe.npz').write_bytes(b'')
  with pytest.raises(ValueError, match=r'probe\.npz is missing or damaged \(0 bytes'):
    Cache(folder)


def test_others_wait_for_the_process_that_builds(tmp_path, caplog):
  made = []
  caplog.set_level('WARNING', 'sink_jax')

  def make(folder):
    made.append(folder)
    other.start()
    deadline = time.monotonic() + 20
    while 'waiting for it' not in caplog.text and time.monotonic() < deadline:
      time.sleep(0.01)
    assert other.is_alive()
    write_atomically(folder / 'manifest.json', '{}')
  other = threading.Thread(target=build_once, args=(tmp_path / 'final', made.append))
  build_once(tmp_path / 'final', make)
  other.join(20)
  assert not other.is_alive() and len(made) == 1
  assert [p.name for p in tmp_path.iterdir()] == ['final']
