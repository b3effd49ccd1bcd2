"""A type checker accepts the annotations; tests that are marked typed check them as they run."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from jaxtyping import TypeCheckError

import sink_jax as sj

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


@pytest.mark.typed
def test_what_does_not_fit_is_noticed():
  pytest.importorskip('beartype')
  x = np.zeros((1, 4, 2, 8), np.float32)
  with pytest.raises(TypeCheckError):
    sj.attend(sj.AttentionSpec(), x, x[:, :3], x)
  with pytest.raises(TypeCheckError):
    sj.attention_map(sj.AttentionSpec(), x.astype(np.int32), x)
