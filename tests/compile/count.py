"""Counts bytes and products of the compiled training step of the 60M model, at some commits.

  python -m tests.compile.count --out=results/compiled [--at=877ade5] [--only=h200,v5e] [--new]

Compiles the steps of CASES, ahead of time, for an H200 and for slices of TPUs, each in a process
of its own, and writes their counts to DIR/compiled.json and DIR/README.md: a row per case and
tree. Rows that are there are kept, but for those of --only with --new, so that rows can be added
one at a time. --at measures the tree of a commit, by the code of this one. The compilers are
those of `bash launch/test.sh --compile=v5e,h200`: COMPILERS=DIR says where they lie.
"""

import argparse
import dataclasses
import io
import json
import os
import pathlib
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from typing import Any

from sink_jax.io.files import write_atomically
from tests.compile import step_counts
from tests.compile.step_program import Step

ROOT = pathlib.Path(__file__).parents[2]
CASES = {
    'h200': Step('h200', 16),
    'h200-vocab-8192': Step('h200', 32, vocab=8192),
    'v5e': Step('v5e:2x2', 4),
    'v6e': Step('v6e:2x2', 8),
    'v5e-4x4-microbatches': Step('v5e:4x4', 4, microbatches=8),
    **{f'{name}-loss-{n}': Step(where, n, part='loss') for n in (1, 2, 4, 8)
       for name, where in (('h200', 'h200'), ('v5e', 'v5e:2x2'))},
}
# Of README.md: key of a row, title, what it is divided by, format.
COLUMNS = {
    'step': (
        ('bytes', 'accessed GB', 1e9, ',.1f'), ('products', 'products TFLOP', 1e12, ',.2f'),
        ('temporaries', 'temporaries GB', 1e9, ',.2f'),
        ('filled_stacks', 'stacks filled GB', 1e9, ',.2f'),
        ('copied_residuals', 'residuals copied GB', 1e9, ',.2f'),
        ('moved', 'moved GB', 1e9, ',.2f'), ('loss_waste', 'loss waste', .01, '.1f'),
        ('all_reduces', 'all-reduces', 1, ',.0f'), ('sent', 'sent GB', 1e9, ',.3f'),
        ('compile_cpu_seconds', 'compiling, CPU s', 1, ',.0f')),
    'loss': (
        ('bytes', 'accessed GB', 1e9, ',.2f'), ('products', 'products TFLOP', 1e12, ',.3f'),
        ('temporaries', 'temporaries GB', 1e9, ',.2f'), ('loss_waste', 'waste', .01, '.1f')),
}
_TEXT = """# The compiled training step, counted

Of one device and one step, from the text of programs that were compiled ahead of time: nothing
on this page has run ([cpu_step.json](cpu_step.json), of `python -m tests.speed`, has times on a
CPU). The 60M model, sequences of 2,048 tokens, `remat` none; on an H200 with our Triton attention,
since cuDNN's cannot be compiled without a GPU, on TPUs with splash attention. `now` is
the code of the commit that wrote the row. Made again, a row at a time, by

    COMPILERS=DIR python -m tests.compile.count --out=results/compiled --only=h200 --new

- accessed: bytes to and from main memory, loops as often as they run. products: FLOPs of the
  matrix products, without the attention kernels.
- stacks filled: arrays of something of every token for every layer, for the backward pass, that
  are filled with zeros before the layers write to them. residuals copied: bytes read and written
  only to move a layer's residuals into such a stack or out of it. moved: the same of all data.
- loss waste: per cent more FLOPs in products with the unembedding than the positions need: all
  products beyond those of the model, since only the loss has positions of padding.
- all-reduces: how many are run. sent: bytes that a device sends.
"""


def measure(step: Step, tree: pathlib.Path) -> dict[str, Any]:
  """The counts of a step, compiled by the code in a folder."""
  with tempfile.TemporaryDirectory() as directory:
    done = subprocess.run(
        [sys.executable, '-P', ROOT / 'tests/compile/step_program.py',
         json.dumps(dataclasses.asdict(step)), directory], capture_output=True, text=True,
        env=os.environ | {'PYTHONPATH': str(tree), 'JAX_PLATFORMS': 'cpu'}, check=False)
    if done.returncode:
      raise RuntimeError(f'{step} of {tree.name}:\n{done.stderr[-2000:]}')
    memory = json.loads((pathlib.Path(directory) / 'memory.json').read_text())
    text = (pathlib.Path(directory) / 'program.txt').read_text()
  return step_counts.count(text, step.layers, step.sequences, step.length, step.blocks,
                           step.unembedding) | memory


def archived(commit: str, folder: str) -> pathlib.Path:
  """The tree of a commit, unpacked into a folder."""
  packed = subprocess.run(['git', 'archive', commit], cwd=ROOT, capture_output=True, check=True)
  with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
    archive.extractall(folder, filter='data')
  return pathlib.Path(folder)


def read(folder: pathlib.Path) -> dict[str, dict[str, Any]]:
  """The rows in a folder by names such as 'v5e at 877ade5'; none where there is no file."""
  file = folder / 'compiled.json'
  return json.loads(file.read_text()) if file.is_file() else {}


def table(rows: Mapping[str, dict[str, Any]]) -> str:
  """The README.md of the rows."""
  parts = [_TEXT]
  order = lambda row: (list(CASES).index(row['case']), row['code'] == 'now')
  for part, columns in COLUMNS.items():
    chosen = [row for row in rows.values() if row['step']['part'] == part]
    titles = ['case', 'code', 'sequences', *(title for _, title, *_ in columns)]
    lines = [titles, ['---'] * len(titles)] + [
        [row['case'], row['code'], str(row['step']['sequences'])] + [
            format(row[key] / unit, shown) for key, _, unit, shown in columns]
        for row in sorted(chosen, key=order)]
    title = 'The whole step' if part == 'step' else 'The loss and its gradients alone'
    parts.append('\n'.join([f'## {title}\n', *(f'| {" | ".join(line)} |' for line in lines), '']))
  return '\n'.join(parts)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  parser.add_argument('--out', required=True, type=pathlib.Path, metavar='DIR')
  parser.add_argument('--at', metavar='COMMIT', help='measure the tree of this commit')
  parser.add_argument('--only', metavar='CASES', help=f'some of {", ".join(CASES)}')
  parser.add_argument('--new', action='store_true', help='measure rows again that are there')
  options = parser.parse_args()
  names = options.only.split(',') if options.only else list(CASES)
  if unknown := set(names) - set(CASES):
    parser.error(f'--only={options.only}: no such case: {", ".join(sorted(unknown))}; choices: '
                 f'{", ".join(CASES)}')
  if 'COMPILERS' not in os.environ:
    parser.error('set COMPILERS=DIR: bash launch/test.sh --compile=v5e,h200 puts them there')
  options.out.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory() as folder:
    tree = archived(options.at, folder) if options.at else ROOT
    label = options.at or 'now'
    for name in names:
      if f'{name} at {label}' in read(options.out) and not options.new:
        continue
      print(f'{name} at {label} ...', file=sys.stderr)
      row = {'case': name, 'code': label, 'step': dataclasses.asdict(CASES[name]),
             **measure(CASES[name], tree)}
      rows = read(options.out) | {f'{name} at {label}': row}  # others may be at work here too
      write_atomically(options.out / 'compiled.json',
                       json.dumps(dict(sorted(rows.items())), indent=1) + '\n')
      write_atomically(options.out / 'README.md', table(rows))


if __name__ == '__main__':
  main()
