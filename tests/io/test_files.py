"""Files appear completely or not at all; folders on a disk and in object stores are told apart."""

import errno
import hashlib
import os
import resource
import signal
from pathlib import Path

import pytest

from sink_jax.io.files import (
  WrongContent,
  check_downloaded,
  decoded,
  named_in_errors,
  read_text_limited,
  refused,
  remove_temporaries,
  replace_atomically,
  sha256_of_files,
  write_atomically,
)
from sink_jax.io.paths import cache_root, files_below, import_file, move_folder, to_path


@pytest.mark.parametrize(
  'call, words',
  [
    (lambda: to_path(Path('gs://bucket/runs')), 'has lost a slash.* as text'),
    (lambda: to_path('file:///tmp/runs'), 'file:///tmp/runs: name a folder of a disk, or gs://'),
    (lambda: read_text_limited('/dev/zero', 2), 'not a file of at most 2 bytes'),
    (lambda: read_text_limited(__file__, 2), 'not a file of at most 2 bytes'),
    (lambda: import_file('no/such.py'), 'no file no/such.py'),
    (lambda: import_file('README.md'), 'README.md.* end in .py'),
  ],
)
def test_what_is_refused(call, words):
  with pytest.raises(ValueError, match=words):
    call()


def test_a_byte_order_mark_at_the_start_is_not_text(tmp_path):
  for text in ('', 'naïve', 'a\ufeffb', '\ufeff'):
    assert decoded(text.encode('utf-8-sig'), 'name') == text
    (tmp_path / 'file').write_text(text, encoding='utf-8-sig')
    assert read_text_limited(tmp_path / 'file') == text


POINTER = b'version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n'


@pytest.mark.parametrize(
  'data, remedy',
  [
    ('naïve'.encode('utf-16'), 'iconv -f UTF-16 '),
    ('naïve'.encode('utf-16-le'), 'iconv -f UTF-16LE '),
    ('naïve'.encode('utf-16-be'), 'iconv -f UTF-16BE '),
    ('naïve'.encode('utf-32'), 'iconv -f UTF-32 '),
    ('naïve'.encode('latin-1'), 'at byte 2'),
    (POINTER, 'git lfs pull'),
  ],
)
def test_what_is_not_utf_8_is_named_with_its_remedy(data, remedy):
  with pytest.raises(ValueError, match=remedy) as caught:
    decoded(data, 'folder/file')
  assert 'folder/file' in str(caught.value)
  assert '\n' not in str(caught.value)


def test_an_error_that_has_a_remedy_gets_no_other(tmp_path):
  path = tmp_path / 'weights'
  path.write_bytes(POINTER)
  with pytest.raises(WrongContent, match='git lfs pull') as caught, refused('download it again'):
    check_downloaded(path)
  assert 'download it again' not in str(caught.value)
  path.write_bytes(b'')  # what is empty is not a pointer
  check_downloaded(path)


def test_a_user_without_a_home_hears_of_the_variable(monkeypatch, tmp_path):
  def nobody(*_):
    raise KeyError('no such user')

  for name in ('HOME', 'SINK_JAX_CACHE'):
    monkeypatch.delenv(name, raising=False)
  monkeypatch.setattr('pwd.getpwuid', nobody)
  for call in (cache_root, lambda: to_path('~/runs')):
    with pytest.raises(ValueError, match='~/.*write the path in full.*SINK_JAX_CACHE=/PATH'):
      call()
  monkeypatch.setenv('SINK_JAX_CACHE', str(tmp_path))
  assert cache_root() == tmp_path


def test_files_at_any_depth_and_folders_that_move(tmp_path):
  for name in ('a/b/config.json', 'config.json', 'c/status.json'):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).touch()
  named = lambda: [str(path.relative_to(tmp_path)) for path in files_below(tmp_path)]
  assert named() == ['a/b/config.json', 'c/status.json', 'config.json']
  for name in 'ac':
    move_folder(tmp_path / name, tmp_path / 'x/7')
  assert named() == ['config.json', 'x/7/b/config.json', 'x/7.again/status.json']


def test_a_file_is_replaced_completely_or_not_at_all(tmp_path):
  class Killed(BaseException):
    """Stands for the end of the process, which no error handling sees."""

  path = tmp_path / 'a.json'
  write_atomically(path, 'old')
  with replace_atomically(path) as file:
    file.write(b'new')
    assert path.read_text() == 'old'
  for error, left in ((ValueError, 1), (Killed, 2)):
    with pytest.raises(error), replace_atomically(path) as file:
      file.write(b'half')
      raise error
    assert path.read_text() == 'new'
    assert len(list(tmp_path.iterdir())) == left
  remove_temporaries(tmp_path)
  assert list(tmp_path.iterdir()) == [path]
  assert read_text_limited(path, 3) == 'new'
  assert sha256_of_files([path, path]) == [hashlib.sha256(b'new').hexdigest()] * 2


def test_an_error_of_the_system_names_the_file(tmp_path):
  handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
  try:
    with pytest.raises(OSError, match='tokens.npy') as error:
      write_atomically(tmp_path / 'tokens.npy', bytes(1 << 17))
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)
  assert error.value.errno == errno.EFBIG
  assert os.path.basename(error.value.filename) == 'tokens.npy'
  for other in (FileNotFoundError(errno.ENOENT, 'no', 'there'), OSError('words')):
    with pytest.raises(OSError) as caught, named_in_errors('here'):
      raise other
    assert caught.value is other
