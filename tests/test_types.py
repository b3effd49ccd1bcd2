"""A type checker accepts the annotations; tests that are marked typed check them as they run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_a_false_annotation_is_noticed():
  checker = pytest.importorskip('tests.typed')

  @checker.checked
  def halves(x: int) -> int:
    return x / 2

  with pytest.raises(Exception, match='halves.*violates type hint'):
    halves(3)


@pytest.mark.full
def test_the_type_checker_finds_nothing():
  pytest.importorskip('basedpyright')
  done = subprocess.run(
    [sys.executable, '-P', '-m', 'basedpyright', '--pythonpath', sys.executable, '--outputjson'],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  found = json.loads(done.stdout)
  lines = [
    f'{item["file"]}:{item["range"]["start"]["line"] + 1}: {item["message"]}'
    for item in found['generalDiagnostics']
    if item['severity'] == 'error'
  ]
  assert not lines, '\n'.join(lines)
  assert found['summary']['filesAnalyzed'] > 150
