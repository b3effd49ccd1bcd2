"""Writes the tables about the arithmetic of the GPU kernels.

  python -m tests.kernels.tables results/kernels
  COMPILERS=DIR python -m tests.kernels.tables results/kernels --before=877ade5

The first computes the errors, the second also counts the instructions, of this working tree
and of a commit before; DIR is where `bash launch/test.sh --compile=h200` put the compilers.
"""

import argparse
import io
import json
import os
import pathlib
import subprocess
import sys
import tarfile
import tempfile

ROOT = pathlib.Path(__file__).parents[2]
INTRODUCTION = '''\
# The arithmetic of the GPU kernels

Nothing here was measured on a GPU. For bfloat16 inputs the kernels for GPUs take exp2 and \
reciprocals by one instruction each, `ex2.approx.ftz.f32` and `rcp.approx.ftz.f32`, exponents by \
one multiply-add, and the slope of a sigmoid as f - f^2 by another one. Float32 inputs and all \
other back ends have the exact forms (`sink_jax/kernels/arithmetic.py`). Again:

```bash
bash launch/test.sh --compile=h200                                 # for its compilers
COMPILERS=.venv/compilers python -m tests.kernels.tables results/kernels --before=877ade5
```
'''
ERRORS = '''
## Errors

Largest errors between two scores, in a model of the instructions (`tests/kernels/errors.py`) \
against float64; head dimension 96. Exact: the same with functions that are right to the last \
bit. m is the largest score of a row. An error that all keys of a row share leaves with the sum: \
`exp(s - m) / sum`. Weights are rounded to bfloat16 next, by up to 2^-9 = 2.0e-03 of each. As \
f goes to 1, f - f^2 keeps the absolute error of f in either form. A masked score counts for \
exactly 0.

| function | s, s - m, s - lse | relative error | exact | absolute error | exact | of its bound |
|---|---|---:|---:|---:|---:|---:|
'''
INSTRUCTIONS = '''
## Instructions

Compiled for an H200 by {compilers}, disassembled: instructions of a warp in one round of the \
loop over tiles without masked scores, before (commit {before}) and after. No kernel spills a \
register. Cycles of a block in a round: one instruction a cycle and scheduler, 4096 operations \
of matrix products, 16 of exp2 or reciprocal. Cap: the share of the time that the tensor cores \
can be busy by these three counts; reads of shared memory and waiting come on top.

| kernel | Dh | warps | registers | instructions | cycles to issue | special | matrix | cap |
|---|---:|---:|---:|---:|---:|---:|---:|---:|
'''


def errors_table(found):
  def number(x):
    return '0' if not x else '1 and more' if x >= 1 else f'{x:.1e}'

  return ERRORS + ''.join(
      f'| {row["what"]} | {row["low"]:g} to {row["high"]:g} | {number(row["relative"])} '
      f'| {number(row["relative_exact"])} | {number(row["absolute"])} '
      f'| {number(row["absolute_exact"])} | {row["of_bound"]:.0%} |\n' for row in found['rows'])


def instructions_table(found):
  text = INSTRUCTIONS.format(**found)
  for old, new in zip(found['rows_before'], found['rows'], strict=True):
    arrow = lambda key, form='{:.0f}': ' → '.join(
        dict.fromkeys(form.format(row[key]) for row in (old, new)))
    text += (f'| {new["similarity"]} {new["kernel"]} | {new["head_dim"]} | {arrow("warps")} '
             f'| {arrow("registers")} | {arrow("instructions")} | {arrow("issue_cycles")} '
             f'| {arrow("special_cycles")} | {arrow("matrix_cycles")} '
             f'| {arrow("matrix_share", "{:.0%}")} |\n')
  return text


TABLES = {'instructions.json': instructions_table, 'errors.json': errors_table}


def count(package):
  """Rows of instructions of the kernels in a folder that holds a `sink_jax`."""
  environment = os.environ | {
      'PYTHONPATH': f'{package}{os.pathsep}{ROOT}', 'JAX_PLATFORMS': 'cpu',
      'COMPILE_TARGETS': 'h200'}
  done = subprocess.run([sys.executable, '-P', '-m', 'tests.compile.instructions'],
                        env=environment, stdout=subprocess.PIPE, text=True, check=True)
  return json.loads(done.stdout)


def count_both(before):
  """The instructions of a commit and of the working tree."""
  import jax

  with tempfile.TemporaryDirectory() as directory:
    archive = subprocess.run(['git', '-C', ROOT, 'archive', before, 'sink_jax'],
                             capture_output=True, check=True).stdout
    tarfile.open(fileobj=io.BytesIO(archive)).extractall(directory, filter='data')
    [ptxas] = pathlib.Path(os.environ['COMPILERS']).glob('cuda/nvidia_cuda_nvcc*.dist-info')
    name = f'jax {jax.__version__} and ptxas {ptxas.stem.rpartition("-")[2]}'
    return {'before': before, 'compilers': name,
            'rows_before': count(directory), 'rows': count(ROOT)}


def write(directory, before=None):
  """Errors always, instructions where a commit before is named; README.md of both."""
  from tests.kernels import errors

  directory = pathlib.Path(directory)
  directory.mkdir(parents=True, exist_ok=True)
  save = lambda name, found: (directory / name).write_text(
      json.dumps(found, indent=1, default=float) + '\n')
  save('errors.json', {'rows': errors.rows()})
  if before:
    save('instructions.json', count_both(before))
  text = INTRODUCTION
  for name, table in TABLES.items():
    if (directory / name).exists():
      text += table(json.loads((directory / name).read_text()))
  (directory / 'README.md').write_text(text)


if __name__ == '__main__':
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  parser.add_argument('directory')
  parser.add_argument('--before', help='a commit whose instructions are counted as well')
  arguments = parser.parse_args()
  write(arguments.directory, arguments.before)
