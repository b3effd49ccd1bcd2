"""The plans of the repository's own models on common slices, as JSON and a table."""

from __future__ import annotations

import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

from sink_jax.io.files import write_atomically
from sink_jax.models.sizes import sized
from sink_jax.plan.chips import GIB, SHARE, SOURCE, parse
from sink_jax.plan.compiler import CompilerMissing
from sink_jax.plan.job import Job, plan
from sink_jax.train.optimizer import OptimizerConfig
from sink_jax.train.provenance import provenance
from sink_jax.train.sharding import mesh_sizes

CONTEXT, VOCAB = 2048, 50432
# Model, slice, fsdp, tensor ('data' is the rest), sequences of a step, micro-batches, remat.
CASES = (
    ('60m', 'v5e:4x4', 1, 1, 512, 8, 'none'),
    ('60m', 'v5e:16x16', 1, 1, 512, 1, 'none'),
    ('60m', 'v5p:2x2x2', 1, 1, 512, 4, 'none'),
    ('60m', 'v5p:4x4x4', 1, 1, 512, 1, 'none'),
    ('60m', 'v6e:4x4', 1, 1, 512, 4, 'none'),
    ('60m', 'v6e:16x16', 1, 1, 512, 1, 'none'),
    ('1b', 'v5e:4x4', 16, 1, 512, 16, 'blocks'),
    ('1b', 'v5e:16x16', 16, 1, 512, 1, 'blocks'),
    ('1b', 'v5p:2x2x2', 8, 1, 512, 16, 'none'),
    ('1b', 'v5p:4x4x4', 16, 1, 512, 2, 'none'),
    ('1b', 'v6e:4x4', 16, 1, 512, 8, 'none'),
    ('1b', 'v6e:16x16', 16, 1, 512, 1, 'none'),
    ('7b', 'v5p:8x8x8', 64, 1, 1024, 1, 'save_attention'),
    ('7b', 'v6e:16x16', 256, 1, 512, 1, 'blocks'),
    ('13b', 'v5p:8x8x8', 64, 1, 1024, 1, 'save_attention'),
    ('13b', 'v6e:16x16', 256, 1, 512, 1, 'blocks'),
)


def write(folder: pathlib.Path, say: Callable[[str], None]) -> None:
  """Plans all cases into plan.json and README.md of a folder; keeps those that are there.

  A case is kept where everything that its name says is the same. Remove plan.json after a
  change of the model or the training step.
  """
  folder.mkdir(parents=True, exist_ok=True)
  file = folder / 'plan.json'
  document = json.loads(file.read_text()) if file.is_file() else {'plans': []}
  there = {one['name']: one for one in document['plans'] if 'failed' not in one}
  names = {'/'.join(map(str, case)): case for case in CASES}
  for name, case in names.items():
    if name not in there:
      say(f'{name} ...')
      began = time.monotonic()
      try:
        there[name] = plan(_job(name, *case)) | {'where': provenance()}
      except CompilerMissing:
        raise
      except (ValueError, RuntimeError) as error:  # what the compiler refuses is a result too
        there[name] = {'name': name, 'failed': ' '.join(str(error).split())[:300]}
      say(f'{name}: {time.monotonic() - began:.0f} s')
    plans = [there[name] for name in names if name in there]
    write_atomically(file, json.dumps({'plans': plans}, indent=1) + '\n')
    write_atomically(folder / 'README.md', markdown(plans))


def _job(name, size, topology, fsdp, tensor, batch_size, microbatches, remat):
  where = parse(topology)
  model = sized(size, vocab_size=VOCAB)
  return Job(name, where, model, OptimizerConfig(), CONTEXT, batch_size, microbatches,
             mesh_sizes(-1, fsdp, tensor, where.devices)).with_remat(remat)


def markdown(plans: list[dict[str, Any]]) -> str:
  """The table, and what its columns are."""
  lines = [
      '# What training steps need on slices of TPUs', '',
      'Nothing here was measured on a TPU. Memory, traffic and bytes are those of the program '
      'that the compiler of each TPU made of the training step (**compiled**); times and MFU '
      f'are **computed** from them and from {SOURCE}. Matrix products and attention kernels '
      f'are taken to reach {SHARE:.0%} of the peak, which is an assumption.', '',
      'Again, after removing plan.json:', '',
      '```bash', 'python -m sink_jax.plan --table=results/plan', '```', '',
      f'Sequences have {CONTEXT:,} tokens, the vocabulary {VOCAB:,}. Mesh: data x fsdp x tensor. '
      'Sequences: of a step / micro-batches. Compiled: args and temps, GiB on a device that the '
      'program gets and that it needs beside, of those that programs may use; TFLOP, those of '
      'kernels by formula; links GB, what every device sends in a step. Computed: times of each '
      'alone, of links in brackets those that no work hides; step, MFU and tokens/s.', '',
      '| model | slice | mesh | sequences | remat | args | temps | of GiB | TFLOP | links GB | '
      'compute ms | HBM ms | links ms | step ms | MFU | tokens/s |',
      '|---|---|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|']
  lines += map(_row, plans)
  if any('failed' not in one and 'peaks' not in one for one in plans):
    lines += ['', 'These rows were made before validation and the probe were counted, and with our '
              'kernels in the place of splash attention, which training takes for softmax on TPUs.']
  if len(plans) < len(CASES):
    lines += ['', f'{len(CASES) - len(plans)} of {len(CASES)} cases have not been compiled yet: '
              + ', '.join(f'{size} on {topology}' for size, topology, *_ in CASES[len(plans):])
              + '.']
  return '\n'.join(lines) + '\n'


def _row(one):
  size, topology, *_ = one['name'].split('/')
  if 'failed' in one:
    return f'| {size} | {topology} | {one["failed"]} |' + ' |' * 13
  memory = one['memory']
  cells = [size, topology, 'x'.join(str(n) for n in one['mesh'].values()),
           f'{one["batch_size"]} / {one["microbatches"]}', one['remat'],
           f'{memory["arguments"] / GIB:.2f}', f'{memory["temporaries"] / GIB:.2f}',
           f'{one["usable"] / GIB:.1f}']
  if 'seconds' not in one:
    return _cells([*cells, 'does not fit', *[''] * 7])
  seconds = one['seconds']
  return _cells([
      *cells, f'{one["flops"] / 1e12:.1f}',
      f'{sum(row["moved"] for row in one["collectives"]) / 1e9:.2f}',
      f'{1e3 * seconds["compute"]:.0f}', f'{1e3 * seconds["memory"]:.0f}',
      f'{1e3 * (seconds["overlapped"] + seconds["exposed"]):.1f} '
      f'({1e3 * seconds["exposed"]:.1f})',
      f'{1e3 * seconds["step"]:.0f}' + ('' if one['fits'] else ' (does not fit)'),
      f'{one["mfu"]:.0%}', f'{one["tokens_per_second"]:,.0f}'])


def _cells(cells):
  return f'| {" | ".join(cells)} |'
