"""The record of which source code made a result."""

import shutil
import subprocess
import sys

from tests.train.runs import ROOT


def test_code_is_a_version_the_commit_of_an_archive_or_that_of_a_checkout(tmp_path):
  for name in ('__init__.py', 'train/__init__.py', 'train/provenance.py', 'train/commit.txt'):
    (tmp_path / 'sink_jax' / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / 'sink_jax' / name, tmp_path / 'sink_jax' / name)
  told = lambda *words: subprocess.run(
    words, cwd=tmp_path, check=True, capture_output=True, text=True
  ).stdout.strip()
  code = lambda: told(
    sys.executable, '-c', 'from sink_jax.train.provenance import code; print(code())'
  )
  git = lambda *words: told('git', '-c', 'user.name=a', '-c', 'user.email=a@b.c', *words)
  assert code() == 'sink_jax 0.1.0'
  (tmp_path / 'sink_jax/train/commit.txt').write_text('1f3a\n')
  assert code() == 'commit 1f3a'
  (tmp_path / '.gitignore').write_text('__pycache__/\n')
  git('init')
  git('add', '.')
  git('commit', '-m', 'begun')
  commit = git('rev-parse', 'HEAD')
  assert code() == f'commit {commit}'
  (tmp_path / 'sink_jax/train/__init__.py').write_text('x = 1\n')
  assert code() == f'commit {commit}-dirty'
