"""A new similarity or mask needs no change of a kernel."""

import subprocess
import sys

import pytest

from tests.train.runs import ROOT


@pytest.mark.full
def test_own_slots_run_everywhere():
  done = subprocess.run([sys.executable, '-m', 'tests.kernels.own_slots'], cwd=ROOT,
                        capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
