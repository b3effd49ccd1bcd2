"""Compiles for TPUs and NVIDIA GPUs that this machine does not have.

The compilers are those of the real devices: libtpu, and the CUDA plugin of jax with ptxas.
`bash launch/test.sh --compile` installs them next to the environment and sets

  COMPILERS         their folder, which contains tpu/ and cuda/
  COMPILE_TARGETS   which targets to compile for, separated by commas

They are loaded when a target is first used; jax itself stays on the CPU. All code that uses
private parts of jax is in this file.
"""

import contextlib
import functools
import os
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from jax.typing import DTypeLike

from sink_jax.plan import compiler
from sink_jax.plan.chips import CHIPS, GIB
from sink_jax.train.memory import memory  # noqa: F401, used by the tests

TOPOLOGIES = {'v5e': 'v5e:2x2', 'v5p': 'v5p:2x2x1', 'v6e': 'v6e:2x2', 'v7x': 'tpu7x:2x2x1'}
TPUS = tuple(TOPOLOGIES)
TARGETS = (*TPUS, 'h200')

# Memory per device. A device is a chip, but on v7x it is one of the two cores of a chip. HBM is
# what the compiler lets a program use, a little less than the chip has.
HBM_BYTES = {kind: chip.usable for kind, chip in CHIPS.items()} | {'h200': 139 * GIB}
VMEM_BYTES = {'v5e': 128 * 2**20, 'v5p': 64 * 2**20, 'v6e': 128 * 2**20, 'v7x': 64 * 2**20}


def asked_for() -> list[str]:
  """The targets of this run; an ordinary run of the tests has none."""
  asked = os.environ.get('COMPILE_TARGETS', '').split(',')
  return [target for target in TARGETS if target in asked]


def compile_for(
  target: str, f: Callable[..., Any], *args: Any, options: dict[str, str | bool] | None = None
) -> jax.stages.Compiled:
  """Compiles a function for a device of the target, a jitted one for those of its shardings.

  options: for the compiler, such as {'xla_dump_to': directory}.
  """
  if not hasattr(f, 'lower'):
    sharding = SingleDeviceSharding(topology_devices(target)[0])
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    f = jax.jit(f)
  _topology(target)
  with compiler.tracing_for_gpus() if target == 'h200' else contextlib.nullcontext():
    lowered = f.lower(*args)
  return lowered.compile(compiler_options=options)


def topology_devices(target: str, count: int | None = None) -> Sequence[Any]:
  """The first devices of the target's topology, which has 4 (v7x: 8). Nothing runs on them."""
  return _topology(target)[:count]


def lowered_text(platform: str, f: Callable[..., Any], *args: Any) -> str:
  """The lowered program for 'tpu' or 'cuda', without a compiler, which may refuse more."""
  with _abstract_gpu() if platform == 'cuda' else contextlib.nullcontext():
    return jax.jit(f).trace(*args).lower(lowering_platforms=(platform,)).as_text()


@functools.cache
def _topology(target):
  # Compilers read the flags when they are loaded. The flags of the tests are for CPUs and would
  # change the kernels. Also, a program from the compilation cache would not be dumped.
  compiler.fresh_compiles()
  return (
    compiler.gpu_devices(4) if target == 'h200' else compiler.topology_devices(TOPOLOGIES[target])
  )


def _abstract_gpu():
  if jax.__version_info__ < (0, 11):
    return contextlib.nullcontext()
  from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

  device = AbstractDevice(device_kind='NVIDIA H200', num_cores=132, platform='gpu')
  return use_abstract_mesh(AbstractMesh((1,), ('x',), (AxisType.Auto,), abstract_device=device))


def struct(*shape: int, dtype: DTypeLike = jnp.bfloat16) -> jax.ShapeDtypeStruct:
  """The shape and dtype of an argument."""
  return jax.ShapeDtypeStruct(shape, dtype)


# The kernels that XLA writes for an NVIDIA GPU, assembled by ptxas.
_SERIALIZED = 'wgmma.mma_async instructions are serialized'


class Kernel(NamedTuple):
  name: str
  pallas: bool  # by Pallas, not by XLA for other operations
  registers: int  # per thread, at most 255
  spilled_bytes: int  # registers that did not fit and went to memory
  wgmma: bool  # uses the matrix instructions of Hopper
  serialized: bool  # waits after each matrix instruction; ptxas then warns, for example with C7515


def ptx_report(f: Callable[..., Any], *args: Any) -> tuple[jax.stages.Compiled, list[Kernel]]:
  """Compiles a function for an H200; returns the program and its Kernels, sorted by name."""
  with tempfile.TemporaryDirectory() as directory:
    dump = pathlib.Path(directory)
    options = {'xla_dump_to': directory}
    if jax.__version_info__ >= (0, 11):
      options['xla_dump_emitter_re'] = 'ptx'
    with mock.patch.dict(os.environ, MOSAIC_GPU_DUMP_PTX='1', MOSAIC_GPU_DUMP_TO=directory):
      compiled = compile_for('h200', f, *args, options=options)
    pallas = set(re.findall(r'"__gpu\$xla\.gpu\.triton".* name = "(\w+)"', compiled.as_text()))
    kernels = [
      kernel
      for path in sorted(dump.glob('*.ptx'))
      if '.entry' in path.read_text()
      for kernel in _assemble(path, pallas)
    ]
  return compiled, sorted(kernels)


def _assemble(path, pallas):
  [ptxas] = compiler.cuda_directory().glob('nvidia/*/bin/ptxas')
  done = subprocess.run(
    [ptxas, '-v', '-arch=sm_90a', path, '-o', path.with_suffix('.cubin')],
    capture_output=True,
    text=True,
  )
  assert not done.returncode, done.stderr
  text = path.read_text()
  for name, printed in _by_kernel(done.stdout + done.stderr).items():
    body = text[re.search(rf'\.entry {re.escape(name)}\b', text).start() :].partition('\n}')[0]
    number = lambda pattern: sum(map(int, re.findall(pattern, printed)))
    # Triton adds __1 to a second kernel's name. The names of Mosaic GPU kernels contain mosaic_gpu.
    ours = name.partition('__')[0] in pallas or name in pallas or '_mosaic_gpu_' in name
    yield Kernel(
      name,
      ours,
      number(r'Used (\d+) registers'),
      number(r'(\d+) bytes spill stores'),
      'wgmma.mma_async' in body,
      _SERIALIZED in printed,
    )


def _by_kernel(output: str) -> dict[str, str]:
  """{name of a kernel: what ptxas prints about it}."""
  parts = re.split(r"Compiling entry function '(\S+)'", output)
  printed = dict(zip(parts[1::2], parts[2::2]))
  # This warning appears outside the parts above, and it names its function.
  for line in output.splitlines():
    if _SERIALIZED in line:
      for name in printed:
        if f"'{name}'" in line:
          printed[name] += line
  return printed
