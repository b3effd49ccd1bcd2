"""Files appear whole or not at all; folders of a disk and of object stores are never mixed up."""

import hashlib
import io
from pathlib import Path

import pytest

from sink_jax.io.files import (
  read_text_limited,
  remove_temporaries,
  replace_atomically,
  write_atomically,
)
from sink_jax.io.hashing import sha256, sha256_of_stream
from sink_jax.io.paths import files_named, to_path
from sink_jax.pretrained.export import export_workdir


def test_a_path_of_a_bucket_that_pathlib_has_shortened_is_refused():
  with pytest.raises(ValueError, match='has lost a slash.* as text'):
    to_path(Path('gs://bucket/runs'))


def test_a_url_that_is_no_bucket_is_refused(tmp_path):
  with pytest.raises(ValueError, match='file:///tmp/runs: name a folder of a disk, or gs://'):
    to_path('file:///tmp/runs')


def test_an_export_goes_to_a_disk(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(ValueError, match='--out=gs://bucket/x must be a folder on a disk'):
    export_workdir(tmp_path, 'gs://bucket/x')
  assert not list(tmp_path.iterdir())


def test_files_of_some_names_at_any_depth(tmp_path):
  for name in ('a/b/config.json', 'a/other.json', 'config.json', 'c/status.json'):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).touch()
  found = files_named(tmp_path, ('config.json', 'status.json'))
  assert [str(path.relative_to(tmp_path)) for path in found] == [
      'a/b/config.json', 'c/status.json', 'config.json']


class Killed(BaseException):
  """The process is gone: nothing that catches errors sees it."""


def killed_while_writing(path):
  with pytest.raises(Killed), replace_atomically(path) as file:
    file.write(b'half')
    raise Killed


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path):
  path = tmp_path / 'a.json'
  write_atomically(path, 'old')
  with replace_atomically(path) as file:
    file.write(b'new')
    assert path.read_text() == 'old'
  assert path.read_text() == 'new'
  with pytest.raises(ValueError, match='wrong'), replace_atomically(path) as file:
    file.write(b'half')
    raise ValueError('wrong')
  assert path.read_text() == 'new' and list(tmp_path.iterdir()) == [path]
  killed_while_writing(path)
  assert path.read_text() == 'new' and len(list(tmp_path.iterdir())) == 2
  remove_temporaries(tmp_path)
  assert list(tmp_path.iterdir()) == [path]


def test_digests_of_files_and_of_streams(tmp_path):
  content = bytes(range(256)) * (1 << 15)  # two blocks
  (tmp_path / 'a').write_bytes(content)
  sizes, blocks = [], []
  expected = hashlib.sha256(content).hexdigest()
  assert sha256(tmp_path / 'a', sizes.append) == sha256(tmp_path / 'a') == expected
  assert sha256_of_stream(io.BytesIO(content), blocks.append) == expected
  assert sizes == [len(block) for block in blocks] == [1 << 22] * 2 and b''.join(blocks) == content


def test_a_file_without_end_or_one_that_is_too_large_is_not_read(tmp_path):
  (tmp_path / 'a').write_text('abc')
  assert read_text_limited(tmp_path / 'a', 3) == 'abc'
  for path, words in ((tmp_path / 'a', 'at most 2 bytes'), ('/dev/zero', 'not a file')):
    with pytest.raises(ValueError, match=words):
      read_text_limited(path, 2)
