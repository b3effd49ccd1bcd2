"""The kernels that XLA writes for an NVIDIA GPU, assembled by ptxas: registers and spills."""

import pathlib
import re
import subprocess
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from tests.compile.targets import compile_for, compiler_directory

_SERIALIZED = 'wgmma.mma_async instructions are serialized'


class Kernel(NamedTuple):
  name: str
  pallas: bool  # a Pallas kernel, not one that XLA made for other operations
  registers: int  # of a thread, at most 255
  spilled_bytes: int  # registers that had to be stored in memory
  wgmma: bool  # uses the matrix instructions of Hopper
  serialized: bool  # waits after each of them: ptxas warns, such as with C7515


def ptx_report(f: Callable[..., Any], *args: Any) -> tuple[jax.stages.Compiled, list[Kernel]]:
  """Compiles a function for an H200; returns the program and its Kernels, sorted by name."""
  with tempfile.TemporaryDirectory() as directory:
    dump = pathlib.Path(directory)
    options = {'xla_dump_to': directory}
    if jax.__version_info__ >= (0, 11):
      options['xla_dump_emitter_re'] = 'ptx'
    compiled = compile_for('h200', f, *args, options=options)
    pallas = set(re.findall(r'"__gpu\$xla\.gpu\.triton".* name = "(\w+)"', compiled.as_text()))
    kernels = [kernel for path in sorted(dump.glob('*.ptx')) if '.entry' in path.read_text()
               for kernel in _assemble(path, pallas)]
  return compiled, sorted(kernels)


def _assemble(path, pallas):
  done = _run('ptxas', '-v', '-arch=sm_90a', path, '-o', path.with_suffix('.cubin'))
  text = path.read_text()
  for name, printed in _by_kernel(done.stdout + done.stderr).items():
    body = text[re.search(rf'\.entry {re.escape(name)}\b', text).start():].partition('\n}')[0]
    number = lambda pattern: sum(map(int, re.findall(pattern, printed)))
    ours = name.partition('__')[0] in pallas or name in pallas  # a second one ends in __1
    yield Kernel(
        name, ours, number(r'Used (\d+) registers'), number(r'(\d+) bytes spill stores'),
        'wgmma.mma_async' in body, _SERIALIZED in printed)


def _run(tool, *arguments):
  [path] = compiler_directory('cuda').glob(f'nvidia/*/bin/{tool}')
  done = subprocess.run([path, *arguments], capture_output=True, text=True, check=False)
  if done.returncode:
    raise RuntimeError(f'{tool} {arguments[-1]}:\n{done.stdout}{done.stderr}')
  return done


def _by_kernel(output: str) -> dict[str, str]:
  """What ptxas prints about every kernel, by its name."""
  parts = re.split(r"Compiling entry function '(\S+)'", output)
  printed = dict(zip(parts[1::2], parts[2::2]))
  # The warning stands outside of these parts and names its function.
  for line in output.splitlines():
    if _SERIALIZED in line:
      for name in printed:
        if f"'{name}'" in line:
          printed[name] += line
  return printed
