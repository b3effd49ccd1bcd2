"""What a process keeps of its memory, and who may change that; no silent CPU."""

import ast
import contextlib
import ctypes
import types

import jax
import pytest

from sink_jax import devices
from tests.commands import run_here
from tests.documents import ROOT
from tests.train.runs import SMALL, run_python

# glibc maps blocks of more than 32 MB, and returns them to the kernel at once.
PROGRAM = """
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
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), 'gnu_get_libc_version'), reason='not glibc')
@pytest.mark.parametrize('kept', [True, False])
def test_a_process_keeps_a_block_that_it_frees_if_it_asked_for_it(kept):
  assert (int(run_python('-c', PROGRAM.format(kept=kept))) > 2**25) == kept


@pytest.mark.parametrize(
  'gpu, tpu, variables, words',
  [
    (True, False, {}, 'jax\\[cuda'),
    (False, True, {}, 'jax\\[tpu\\]'),
    (False, False, {}, ''),
    (True, False, {'CUDA_VISIBLE_DEVICES': ''}, ''),
  ],
)
def test_a_machine_that_falls_back_to_its_cpu_is_refused(
  monkeypatch, tmp_path, gpu, tpu, variables, words
):
  asked = jax.config.jax_platforms
  monkeypatch.setattr(
    devices,
    'hardware_utils',
    types.SimpleNamespace(
      has_visible_nvidia_gpu=lambda: gpu,
      num_available_tpu_chips_and_device_id=lambda: (4 * tpu, None),
    ),
  )
  monkeypatch.setattr('sink_jax.train.multihost.init_distributed', lambda: None)  # JAX runs already
  for name, value in variables.items():
    monkeypatch.setenv(name, value)
  devices.refuse_silent_cpu()  # the tests ask for the CPU
  jax.config.update('jax_platforms', None)
  try:
    with pytest.raises(ValueError, match=words) if words else contextlib.nullcontext():
      devices.refuse_silent_cpu()
    options = [f'--config.{key}={value}' for key, value in (SMALL | {'steps': 2}).items()]
    config = f'--config={ROOT}/configs/base.py'
    code, _, error = run_here('train', config, f'--workdir={tmp_path}', *options)
    said = 'JAX_PLATFORMS=cpu' if words else ' on 1 x cpu,'
    assert code == bool(words) and said in error, error
  finally:
    jax.config.update('jax_platforms', asked)


def test_only_commands_and_workers_of_sweeps_change_their_allocator():
  users = {
    str(path.relative_to(ROOT / 'sink_jax'))
    for path in (ROOT / 'sink_jax').rglob('*.py')
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.Name) and node.id == 'keep_freed_memory'
  }
  assert users == {
    'cli/train.py',
    'cli/sweep.py',
    'cli/benchmark.py',
    'cli/analyses.py',
    'cli/card.py',
    'sweep/pool.py',
  }
