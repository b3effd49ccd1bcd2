"""Paths of users: folders of a disk and of object stores are never mixed up."""

from pathlib import Path

import pytest

from sink_jax.io.paths import files_named, to_path
from sink_jax.pretrained.export_run import export_run


def test_a_path_of_a_bucket_that_pathlib_has_shortened_is_refused():
  with pytest.raises(ValueError, match='has lost a slash.* as text'):
    to_path(Path('gs://bucket/runs'))


def test_an_export_goes_to_a_disk(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(ValueError, match='--out=gs://bucket/x must be a folder on a disk'):
    export_run(tmp_path, 'gs://bucket/x')
  assert not list(tmp_path.iterdir())


def test_files_of_some_names_at_any_depth(tmp_path):
  for name in ('a/b/config.json', 'a/other.json', 'config.json', 'c/status.json'):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).touch()
  found = files_named(tmp_path, ('config.json', 'status.json'))
  assert [str(path.relative_to(tmp_path)) for path in found] == [
      'a/b/config.json', 'c/status.json', 'config.json']
