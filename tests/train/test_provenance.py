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
  for name in ('__init__.py', 'arguments.py', 'component.py', 'io/__init__.py', 'io/paths.py',
               'io/compile_cache.py', 'train/__init__.py', 'train/provenance.py'):
    (tmp_path / 'sink_jax' / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(PACKAGE / name, tmp_path / 'sink_jax' / name)
  return tmp_path


def test_a_package_without_a_checkout_has_its_version_and_a_hash_of_its_files(copied):
  first = code_of(copied)
  assert first.startswith('sink_jax 0.1.0, files ')
  (copied / 'sink_jax/train/more.py').write_text('x = 1\n')
  assert code_of(copied) != first


def test_a_checkout_has_its_commit_and_whether_the_package_or_a_config_differs(copied):
  git = lambda *words: subprocess.run(
      ['git', '-c', 'user.name=a', '-c', 'user.email=a@b.c', *words], cwd=copied, check=True,
      capture_output=True, text=True).stdout.strip()
  (copied / '.gitignore').write_text('__pycache__/\n')
  git('init')
  git('add', '.')
  git('commit', '-m', 'begun')
  commit = git('rev-parse', 'HEAD')
  assert code_of(copied) == f'commit {commit}, clean'
  (copied / 'runs').mkdir()
  (copied / 'runs/status.json').write_text('{}')  # what a run leaves behind is no change
  assert code_of(copied) == f'commit {commit}, clean'
  (copied / 'configs').mkdir()
  (copied / 'configs/mine.py').write_text('TRIALS = {}\n')
  assert code_of(copied) == f'commit {commit}, with uncommitted changes'


def test_every_record_has_it():
  assert provenance(devices=False)['code'].startswith(('commit ', 'sink_jax '))
