"""The plans of the repository's own models on common slices, as JSON and a table."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Sequence

from sink_jax.io.files import write_atomically
from sink_jax.io.tables import markdown_table
from sink_jax.models.sizes import sized
from sink_jax.plan.chips import GIB, SHARE, SOURCE, parse
from sink_jax.plan.compiler import CompilerMissing
from sink_jax.plan.job import Job, plan
from sink_jax.plan.records import Plan, plan_from_json
from sink_jax.train.optimizer import OptimizerConfig
from sink_jax.train.provenance import provenance
from sink_jax.train.sharding import mesh_sizes

CONTEXT, VOCAB = 2048, 50432
_HEAD = ('model', 'slice', 'mesh', 'sequences', 'remat', 'args', 'temps', 'of GiB', 'TFLOP',
         'links GB', 'compute ms', 'HBM ms', 'links ms', 'step ms', 'MFU', 'tokens/s')


@dataclasses.dataclass(frozen=True)
class Refused:
  """A case that the compiler or the mesh refuses, with the reason."""

  name: str
  failed: str


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

  A case is kept under its name, which has all of CASES in it. Remove plan.json after a change
  of the model or the training step.

  Args:
    say: takes lines about the progress.
  """
  folder.mkdir(parents=True, exist_ok=True)
  file = folder / 'plan.json'
  plans: dict[str, Plan | Refused] = {plan.name: plan for plan in read_plans(file)}
  names = {_name(case): case for case in CASES}
  for name, case in names.items():
    if name not in plans:
      say(f'{name} ...')
      began = time.monotonic()
      try:
        plans[name] = dataclasses.replace(plan(_job(name, *case)), made=provenance())
      # It is a RuntimeError as well, but no property of the case: every other case would fail
      # alike.
      except CompilerMissing:
        raise
      except (ValueError, RuntimeError) as error:  # a refusal of the compiler is a result, too
        plans[name] = Refused(name, ' '.join(str(error).split())[:300])
      say(f'{name}: {time.monotonic() - began:.0f} s')
    # After every case: compiling one takes minutes, and a table that is stopped goes on from here.
    known = [plans[name] for name in names if name in plans]
    write_atomically(file, json.dumps({'plans': [
        one.to_json() if isinstance(one, Plan) else vars(one) for one in known]}, indent=1) + '\n')
    write_atomically(folder / 'README.md', markdown(known))


def read_plans(file: pathlib.Path) -> list[Plan]:
  """The plans of a plan.json, without what was refused; none where there is no such file."""
  # What was refused is not read, so that `write` tries it again: another compiler may accept it.
  entries = json.loads(file.read_text())['plans'] if file.is_file() else []
  return [plan_from_json(one) for one in entries if 'failed' not in one]


def _name(case):
  return '/'.join(map(str, case))


def _job(name, size, topology, fsdp, tensor, batch_size, microbatches, remat):
  where = parse(topology)
  model = sized(size, vocab_size=VOCAB)
  return Job(name, where, model, OptimizerConfig(), CONTEXT, batch_size, microbatches,
             mesh_sizes(-1, fsdp, tensor, where.devices)).with_remat(remat)


def markdown(plans: Sequence[Plan | Refused]) -> str:
  """A Markdown page: the table, and the meaning of its columns."""
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
      *markdown_table(_HEAD, map(_row, plans), left=range(5))]
  if any(isinstance(one, Plan) and not one.peaks for one in plans):
    lines += ['', 'These rows were made before validation and the probe were counted, and with our '
              'kernels in the place of splash attention, which training takes for softmax on TPUs.']
  known = {one.name for one in plans}
  missing = [case for case in CASES if _name(case) not in known]
  if missing:
    lines += ['', f'{len(missing)} of {len(CASES)} cases have not been compiled yet: '
              + ', '.join(f'{size} on {topology}' for size, topology, *_ in missing) + '.']
  return '\n'.join(lines) + '\n'


def _row(plan: Plan | Refused) -> list[str]:
  size, topology, *_ = plan.name.split('/')
  if isinstance(plan, Refused):  # the message takes the third column, and the others stay empty
    return [size, topology, plan.failed] + [''] * (len(_HEAD) - 3)
  cells = [size, topology, 'x'.join(str(n) for n in plan.mesh.values()),
           f'{plan.batch_size} / {plan.microbatches}', plan.remat,
           f'{plan.memory.arguments / GIB:.2f}', f'{plan.memory.temporaries / GIB:.2f}',
           f'{plan.usable / GIB:.1f}']
  if plan.cost is None:
    return [*cells, 'does not fit', *[''] * 7]
  seconds = plan.cost.roofline
  return [
      *cells, f'{plan.cost.flops / 1e12:.1f}',
      f'{sum(row.moved for row in plan.cost.collectives) / 1e9:.2f}',
      f'{1e3 * seconds.compute:.0f}', f'{1e3 * seconds.memory:.0f}',
      f'{1e3 * (seconds.overlapped + seconds.exposed):.1f} '
      f'({1e3 * seconds.exposed:.1f})',
      f'{1e3 * seconds.step:.0f}' + ('' if plan.fits else ' (does not fit)'),
      f'{plan.cost.mfu:.0%}', f'{plan.cost.tokens_per_second:,.0f}']
