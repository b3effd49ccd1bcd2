"""The kernels that XLA writes for an NVIDIA GPU, assembled by ptxas: registers, spills, loops."""

import pathlib
import re
import subprocess
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from tests.compile.sass import Loop, loops
from tests.compile.targets import compile_for, compiler_directory

_SERIALIZED = 'wgmma.mma_async instructions are serialized'


class Kernel(NamedTuple):
  """One kernel on the GPU, by its name in the program."""

  name: str
  pallas: bool  # a Pallas kernel, not one that XLA made for other operations
  threads: int  # of a block
  registers: int  # of a thread, at most 255
  spilled_bytes: int  # registers that had to be stored in memory
  shared_bytes: int  # of a block
  wgmma: bool  # uses the matrix instructions of Hopper
  serialized: bool  # waits after each of them: ptxas warns, such as with C7515
  loop: Loop | None  # the shortest with matrix products: in our kernels that over full tiles


def ptx_report(f: Callable[..., Any], *args: Any) -> tuple[jax.stages.Compiled, list[Kernel]]:
  """Compiles a function for an H200; returns the program and its Kernels, sorted by name."""
  with tempfile.TemporaryDirectory() as directory:
    dump = pathlib.Path(directory)
    options = {'xla_dump_to': directory}
    if jax.__version_info__ >= (0, 11):
      options['xla_dump_emitter_re'] = 'ptx'
    compiled = compile_for('h200', f, *args, options=options)
    launches = _launches('\n'.join(p.read_text() for p in dump.glob('*.thunk_sequence.txt')))
    pallas = set(re.findall(r'"__gpu\$xla\.gpu\.triton".* name = "(\w+)"', compiled.as_text()))
    kernels = [kernel for path in sorted(dump.glob('*.ptx')) if '.entry' in path.read_text()
               for kernel in _assemble(path, launches, pallas)]
  return compiled, sorted(kernels)


def _launches(text: str) -> dict[str, tuple[int, int]]:
  """{kernel: (threads of a block, bytes of shared memory)} of XLA's list of what it runs."""
  line = re.compile(r' (\S+) +grid: .*threads: \[(\d+), (\d+), (\d+)\].*shared_memory: (\d+)')
  return {m[1]: (int(m[2]) * int(m[3]) * int(m[4]), int(m[5]))
          for m in map(line.search, text.splitlines()) if m}


def _assemble(path, launches, pallas):
  done = _run('ptxas', '-v', '-arch=sm_90a', path, '-o', path.with_suffix('.cubin'))
  text = path.read_text()
  code = _run('nvdisasm', '-c', path.with_suffix('.cubin')).stdout if 'wgmma' in text else ''
  for name, printed in _by_kernel(done.stdout + done.stderr).items():
    body = text[re.search(rf'\.entry {re.escape(name)}\b', text).start():].partition('\n}')[0]
    number = lambda pattern: sum(map(int, re.findall(pattern, printed)))
    threads, shared = launches[name]
    ours = name.partition('__')[0] in pallas or name in pallas  # a second one ends in __1
    wgmma = 'wgmma.mma_async' in body
    yield Kernel(
        name, ours, threads, number(r'Used (\d+) registers'),
        number(r'(\d+) bytes spill stores'), max(shared, number(r'(\d+) bytes smem')),
        wgmma, _SERIALIZED in printed,
        min(loops(code, name, threads), default=None) if wgmma else None)


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
