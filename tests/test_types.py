"""Annotations are true: a part of the suite runs once more with functions that check them."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_functions_take_and_return_what_their_annotations_say():
  pytest.importorskip('beartype')
  # In its own process: modules must not be loaded before the hook that adds the checks.
  done = subprocess.run(
      [sys.executable, '-P', '-m', 'pytest', '--typed', '-q', '--tb=short',
       '-p', 'no:cacheprovider', 'tests/attention', 'tests/evaluate', 'tests/models'],
      cwd=ROOT, capture_output=True, text=True)
  assert done.returncode == 0, done.stdout[-8000:] + done.stderr


def test_a_false_annotation_is_noticed():
  checker = pytest.importorskip('tests.typed')

  @checker.checked
  def halves(x: int) -> int:
    return x / 2

  with pytest.raises(Exception, match='halves.*violates type hint'):
    halves(3)
