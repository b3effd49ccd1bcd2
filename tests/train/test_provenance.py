"""Which source code a result was made with."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sink_jax.train.provenance import provenance

PACKAGE = Path(__file__).parents[2] / 'sink_jax'


def code_of(root):
  """`code()` of the package below `root`, in a process of its own."""
  shown = subprocess.run(
      [sys.executable, '-c', 'from sink_jax.train.provenance import code; print(code())'],
      cwd=root, capture_output=True, text=True, check=True)
  return shown.stdout.strip()


@pytest.fixture
def copied(tmp_path):
  """A folder with the little of the package that the question takes."""
  for name in ('__init__.py', 'train/__init__.py', 'train/provenance.py', 'train/commit.txt'):
    (tmp_path / 'sink_jax' / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(PACKAGE / name, tmp_path / 'sink_jax' / name)
  return tmp_path


def test_a_package_without_a_checkout_has_its_version_or_the_commit_of_its_archive(copied):
  assert code_of(copied) == 'sink_jax 0.1.0'
  (copied / 'sink_jax/train/commit.txt').write_text('1f3a\n')
  assert code_of(copied) == 'commit 1f3a'


def test_a_checkout_has_its_commit_and_whether_a_file_differs(copied):
  git = lambda *words: subprocess.run(
      ['git', '-c', 'user.name=a', '-c', 'user.email=a@b.c', *words], cwd=copied, check=True,
      capture_output=True, text=True).stdout.strip()
  (copied / '.gitignore').write_text('__pycache__/\n')
  git('init')
  git('add', '.')
  git('commit', '-m', 'begun')
  commit = git('rev-parse', 'HEAD')
  assert code_of(copied) == f'commit {commit}'
  (copied / 'sink_jax/train/__init__.py').write_text('x = 1\n')
  assert code_of(copied) == f'commit {commit}-dirty'


def test_every_record_has_it():
  assert provenance(devices=False)['code'].startswith(('commit ', 'sink_jax '))
