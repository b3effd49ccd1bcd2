"""Imports without the garbage collector."""

import gc
import subprocess
import sys

import pytest

from sink_jax.io.quick_imports import quick_imports
from tests.train.runs import ROOT

# Prints how often it collected during the imports, whether it does now, and what it leaves alone.
PROGRAM = """
import gc
from sink_jax.io.quick_imports import quick_imports
collected = []
gc.callbacks.append(lambda *_: collected.append(1))
with quick_imports():
  import sink_jax.cli.train
print(len(collected), gc.isenabled(), gc.get_freeze_count() > 100_000)
"""


def test_nothing_is_collected_meanwhile_nor_what_was_imported_later():
  done = subprocess.run([sys.executable, '-c', PROGRAM], cwd=ROOT, capture_output=True, text=True)
  assert done.stdout.split() == ['0', 'True', 'True'], done.stderr


def test_an_error_leaves_the_collector_on():
  with pytest.raises(ValueError), quick_imports():
    assert not gc.isenabled()
    raise ValueError
  assert gc.isenabled()


def test_only_the_first_block_keeps_what_is_there():
  with quick_imports():
    pass
  frozen = gc.get_freeze_count()
  with quick_imports():
    kept = [[] for _ in range(1000)]
  assert frozen and gc.get_freeze_count() <= frozen and len(kept) == 1000
