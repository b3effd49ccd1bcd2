"""What a process keeps of its memory, and who may change that."""

import ast
import ctypes
import subprocess
import sys

import pytest

from tests.documents import ROOT

# glibc maps blocks of more than 32 MB, and returns them to the kernel at once.
PROGRAM = '''
import resource
import numpy as np
from sink_jax.devices import keep_freed_memory

def resident():
  return int(open('/proc/self/statm').read().split()[1]) * resource.getpagesize()

if {kept}:
  keep_freed_memory()
before = resident()
block = np.ones(2**26, np.uint8)
del block
print(resident() - before)
'''


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), 'gnu_get_libc_version'), reason='not glibc')
@pytest.mark.parametrize('kept', [True, False])
def test_a_process_keeps_a_block_that_it_frees_if_it_asked_for_it(kept):
  done = subprocess.run([sys.executable, '-c', PROGRAM.format(kept=kept)], cwd=ROOT, check=True,
                        capture_output=True, text=True)
  assert (int(done.stdout) > 2**25) == kept


def test_only_commands_and_workers_of_sweeps_change_their_allocator():
  users = {str(path.relative_to(ROOT / 'sink_jax')) for path in (ROOT / 'sink_jax').rglob('*.py')
           for node in ast.walk(ast.parse(path.read_text()))
           if isinstance(node, ast.Name) and node.id == 'keep_freed_memory'}
  assert users == {'cli/train.py', 'cli/sweep.py', 'cli/benchmark.py', 'cli/analyses.py',
                   'cli/card.py', 'sweep/pool.py'}
