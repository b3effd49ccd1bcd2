"""Annotations are true: for a type checker, and in a part of the suite that checks them."""

import json
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


def test_the_type_checker_finds_nothing():
  pytest.importorskip('basedpyright')
  done = subprocess.run(
      [sys.executable, '-P', '-m', 'basedpyright', '--pythonpath', sys.executable, '--outputjson'],
      cwd=ROOT, capture_output=True, text=True)
  found = json.loads(done.stdout)
  lines = [f'{item["file"]}:{item["range"]["start"]["line"] + 1}: {item["message"]}'
           for item in found['generalDiagnostics'] if item['severity'] == 'error']
  assert not lines, '\n'.join(lines)
  assert found['summary']['filesAnalyzed'] > 200
