"""The compiler for TPUs, on machines without a TPU. What is private to libtpu is in this file.

The compiler is libtpu: an installed one, or one in a folder of its own, COMPILERS=DIR.
`bash launch/test.sh --compile=v5e` puts it beside the environment, where it needs no option.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from sink_jax.plan.chips import GIB

# The compiler writes GiB as G: its messages give the 15.75 GiB of a v5e as 15.75G.
_UNITS = {'': 1, 'K': 2**10, 'M': 2**20, 'G': GIB, 'T': 2**40}


class CompilerMissing(RuntimeError):
  """There is no compiler for TPUs here; the message says how to get it."""


class OutOfMemory(RuntimeError):
  """The compiler refuses a program that needs more memory than a device has.

  needed: the bytes that it names. temporaries: whether they leave out the program's arguments.
  """

  def __init__(self, needed: float, temporaries: bool):
    super().__init__(f'needs {needed / GIB:.2f} GiB')
    self.needed, self.temporaries = needed, temporaries

  def bytes_with(self, arguments: float) -> float:
    """All bytes that the program needs, where its arguments take so many."""
    return self.needed + arguments * self.temporaries


class Memory(NamedTuple):
  """Bytes that a program needs on one device.

  outputs: results that do not take the place of a donated argument; None where the compiler
  refused the program.
  """

  arguments: float
  temporaries: float
  total: float
  outputs: float | None = None


def memory(compiled: jax.stages.Compiled) -> Memory:
  """What a compiled program needs in the memory of a device, without its code."""
  m = compiled.memory_analysis()
  assert m is not None, 'compilers for TPUs, GPUs and CPUs have one'
  # An output that takes the place of a donated argument is in both sizes; the training step donates
  # its state, which would otherwise count twice.
  outputs = m.output_size_in_bytes - m.alias_size_in_bytes
  return Memory(m.argument_size_in_bytes, m.temp_size_in_bytes,
                m.argument_size_in_bytes + m.temp_size_in_bytes + outputs, outputs)


def topology_devices(name: str) -> Sequence[Any]:
  """The jax.Devices of a topology such as 'v5e:16x16', for which programs can be compiled.

  They are descriptions: nothing can be put on them or run.

  Raises:
    CompilerMissing: there is no libtpu; the message has the ways to get it.
    ValueError: the compiler has no such topology.
  """
  _prepare()
  # By default a host has 2 x 2 chips.
  host = {'chips_per_host_bounds': (1, 1, 1)} if re.fullmatch(r'\w+:1(x1)*', name) else {}
  try:
    return topologies.get_topology_desc(platform='tpu', topology_name=name, **host).devices
  except Exception as error:  # of private classes
    message = ' '.join(str(error).split())
    raise ValueError(f'The compiler has no topology {name}: {message[:200]}') from None


def compile_lowered(lowered: jax.stages.Lowered,
                    options: dict[str, str | bool] | None = None) -> jax.stages.Compiled:
  """`lowered.compile()`, where a lack of memory is an error of its own.

  Raises:
    OutOfMemory: the program needs more memory than a device has.
  """
  try:
    return lowered.compile(compiler_options=options)
  except jax.errors.JaxRuntimeError as error:
    message = str(error)
    # The compiler stops early where the temporaries alone are too large, and then names those.
    temporaries = re.search(r'required for HLO temporaries \(([\d.]+)([KMGT]?)\)', message)
    needed = temporaries or re.search(r'Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm', message)
    if not needed:
      raise
    raise OutOfMemory(float(needed[1]) * _UNITS[needed[2]], bool(temporaries)) from None


def fresh_compiles() -> None:
  """Makes JAX compile with default flags and without its cache.

  A program out of the compilation cache has no text to read, and the flags with which tests
  compile for CPUs are not for this compiler.
  """
  os.environ['XLA_FLAGS'] = ''
  jax.config.update('jax_enable_compilation_cache', False)
  # JAX decides once, at its first compilation, whether it uses the cache, and the option alone
  # comes too late for a process that has compiled; reset_cache lets it decide again.
  from jax.experimental.compilation_cache import compilation_cache
  compilation_cache.reset_cache()


@functools.cache
def _prepare():
  fresh_compiles()
  # libtpu reads these when it is loaded, so they are set before the first topology is asked for.
  os.environ |= {
      'TPU_LIBRARY_PATH': str(_library()),
      'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',  # several processes compile at a time
      'TPU_SKIP_MDS_QUERY': '1',  # no question to a metadata server
      'TPU_ACCELERATOR_TYPE': 'v5litepod-4', 'TPU_WORKER_HOSTNAMES': 'localhost',
      'TPU_LOG_DIR': 'disabled', 'TPU_STDERR_LOG_LEVEL': '3', 'TPU_MIN_LOG_LEVEL': '3'}


def _library() -> pathlib.Path:
  folder = os.environ.get('COMPILERS') or pathlib.Path(sys.prefix) / 'compilers'
  library = pathlib.Path(folder) / 'tpu' / 'libtpu' / 'libtpu.so'
  if library.is_file():
    return library
  installed = importlib.util.find_spec('libtpu')
  if installed and installed.origin:
    library = pathlib.Path(installed.origin).parent / 'libtpu.so'
    if library.is_file():
      return library
  # The pins of launch/compilers/tpu.txt: jax is pinned to another version below Python 3.12, and
  # each jax fits its own libtpu.
  version = '0.0.42.1' if sys.version_info < (3, 12) else '0.0.48.1'
  raise CompilerMissing(
      f'No compiler for TPUs in {folder}/tpu: bash launch/test.sh --compile=v5e gets it and '
      f'COMPILERS=DIR says where it lies; or pip install libtpu=={version} (0.7 GB; '
      'launch/compilers/tpu.txt).')
