"""From 8 to 4,096 chips: a written estimate from formulas, datasheets and compiled programs."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from typing import Any

import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from sink_jax.models.sizes import SIZES, flops_per_token, parameter_count, sized
from sink_jax.plan import compiler, interconnect
from sink_jax.plan.chips import GIB, SHARE, SOURCE, Slice, parse
from sink_jax.plan.hlo_cost import Collective
from sink_jax.plan.job import AXES
from sink_jax.plan.table import CONTEXT, VOCAB

SLICES = ('v5p:2x2x2', 'v5p:4x4x4', 'v5p:8x8x8', 'v5p:16x16x16')


@dataclasses.dataclass(frozen=True)
class Study:
  """How a model is trained.

  fsdp: devices that split its parameters, at most. each: sequences of a device under weak
  scaling. batch: sequences of a step under strong scaling. work: products computed, over those
  of the model's count; more than 1 where the backward pass repeats the forward pass.
  """

  size: str
  fsdp: int
  each: int
  batch: int
  work: float


STUDIES = (Study('1b', 16, 4, 512, 1.0), Study('7b', 64, 2, 2048, 4 / 3),
           Study('13b', 64, 2, 2048, 4 / 3))
# Sequences of a step at which data parallelism pays half: Kaplan et al. 2020 give 2e8 tokens
# / loss^(1 / 0.21) for language models.
_LOSSES = (3.0, 2.5, 2.0)


def critical_tokens(loss: float) -> float:
  """Tokens of a step at which twice the steps' worth of tokens is spent, by Kaplan et al."""
  return 2e8 / loss ** (1 / 0.21)


def volumes(size: str, fsdp: int, tensor: int, devices: int, tokens: int, microbatches: int,
            repeated: bool) -> list[tuple[str, str, float, int]]:
  """(kind, axes, bytes of an array, times) of a step, as the sharding rule has it.

  Matrices of the blocks are gathered in bfloat16 for the forward pass and again for the
  backward pass, and their gradients scattered; the part of a device is then summed over
  'data'. Both tables of embeddings are gathered too, but their gradients are summed whole, in
  float32, over all devices. All of it happens in every micro-batch, but for the gradient of
  the embeddings. A tensor group sums activations twice in a block and twice in its backward
  pass, once more where that repeats the forward pass.
  """
  model = SIZES[size]
  layers = model['layers']
  blocks = parameter_count(size=size, vocab_size=VOCAB, embeddings=False) / tensor / layers
  table = VOCAB * model['d_model']
  every = layers * microbatches
  rows = devices // tensor
  everywhere = '+'.join(AXES[:2] if tensor == 1 else AXES)
  found = [('all-reduce', everywhere, 4.0 * table, 1 + microbatches)]
  if fsdp > 1:
    found += [('all-gather', 'fsdp', 2.0 * table, 2),
              ('all-gather', 'fsdp', 2.0 * blocks, 2 * every),
              ('reduce-scatter', 'fsdp', 2.0 * blocks, every)]
  if rows > fsdp:
    found.append(('all-reduce', 'data', 2.0 * blocks / fsdp, every))
  if tensor > 1:
    activations = 2.0 * tokens / rows / microbatches * model['d_model']
    found.append(('all-reduce', 'tensor', activations, (6 if repeated else 4) * every))
  return found


def estimate(study: Study, where: Slice, sequences: int) -> dict[str, Any]:
  """Of a step of so many sequences on a slice: bytes, seconds and shares."""
  devices, tokens = where.devices, sequences * CONTEXT
  tensor = max(1, devices // sequences)
  rows = devices // tensor
  fsdp = min(study.fsdp, rows)
  microbatches = max(1, sequences // rows // study.each)
  mesh = Mesh(mesh_utils.create_device_mesh(
      (rows // fsdp, fsdp, tensor), compiler.topology_devices(where.compiler_name),
      allow_split_physical_axes=True), AXES, axis_types=(AxisType.Auto,) * 3)
  traffic = [Collective(kind, payload, _first(mesh, axes), times, False)
             for kind, axes, payload, times in volumes(
                 study.size, fsdp, tensor, devices, tokens, microbatches, study.work > 1)]
  sent = sum(one.count * one.moved for one in traffic)
  waiting = sum(interconnect.seconds(one, mesh, where) for one in traffic)
  work = tokens * flops_per_token(sized(study.size, vocab_size=VOCAB), CONTEXT) / devices
  compute = study.work * work / (where.chip.peak * SHARE)
  state = 12 * parameter_count(size=study.size, vocab_size=VOCAB) / fsdp / tensor
  return {
      'model': study.size, 'chips': devices, 'fsdp': fsdp, 'tensor': tensor,
      'sequences': sequences, 'microbatches': microbatches, 'tokens': tokens,
      'each': sequences / rows, 'state_gib': state / GIB, 'sent_gb': sent / 1e9,
      'links_ms': 1e3 * waiting, 'compute_ms': 1e3 * compute,
      'low': compute / (compute + waiting), 'high': compute / max(compute, waiting),
      'mfu': work / where.chip.peak / (compute + waiting)}


def _first(mesh, axes):
  numbers = np.arange(math.prod(mesh.devices.shape)).reshape(mesh.devices.shape)
  index = tuple(slice(None) if name in axes.split('+') else 0 for name in mesh.axis_names)
  return tuple(numbers[index].ravel().tolist())


def write(folder: pathlib.Path) -> None:
  """scaling.json, README.md and scaling.png of a folder."""
  rows = {'weak': [], 'strong': []}
  for study in STUDIES:
    for name in SLICES:
      where = parse(name)
      rows['weak'].append(estimate(study, where, study.each * where.devices))
      rows['strong'].append(estimate(study, where, study.batch))
  checks = _checks(folder.parent / 'plan' / 'plan.json')
  folder.mkdir(parents=True, exist_ok=True)
  (folder / 'scaling.json').write_text(json.dumps(rows | {'checks': checks}, indent=1) + '\n')
  (folder / 'README.md').write_text(_markdown(rows, checks))
  _figure(rows, folder / 'scaling.png')


def _checks(file):
  """The formula beside compiled programs."""
  found = []
  for one in json.loads(file.read_text())['plans'] if file.is_file() else []:
    if 'collectives' not in one:
      continue
    mesh, sizes = one['mesh'], one['name'].split('/')
    groups = lambda axes: math.prod(mesh[name] for name in axes.split('+'))
    ideal = sum(
        times * Collective(kind, payload, tuple(range(groups(axes))), times, False).moved
        for kind, axes, payload, times in volumes(
            sizes[0], mesh['fsdp'], mesh['tensor'], one['devices'], one['tokens'],
            one['microbatches'], one['remat'] != 'none'))
    found.append({'model': sizes[0], 'topology': one['topology'],
                  'mesh': 'x'.join(map(str, mesh.values())), 'microbatches': one['microbatches'],
                  'formula_gb': ideal / 1e9,
                  'compiled_gb': sum(row['moved'] for row in one['collectives']) / 1e9})
  return found


def _markdown(rows, checks):
  lines = [
      '# From 8 to 4,096 chips: an estimate', '',
      '**No number on this page was measured on hardware**, not even that of a single device. '
      'Every column says what it is: *computed* from a formula and from datasheets '
      f'({SOURCE}), or *compiled*: counted in the program that the compiler of the TPU made. '
      f'Computation is taken to reach {SHARE:.0%} of the peak, an assumption; a measured time '
      'replaces it in a plan, `--step_seconds=`. Again:', '',
      '```bash', 'python -m sink_jax.plan --scaling=results/scaling', '```', '',
      'TPU v5p, sequences of 2,048 tokens. Parameters, float32 with two moments, are split over '
      'fsdp devices; data is the rest. Efficiency is computation over the step, between traffic '
      'that no work hides (low) and traffic that work hides wherever it lasts longer (high). '
      'MFU is with the low one. What the backward pass repeats counts as computation (7B, 13B: '
      'remat), but not in MFU.', '', '![efficiency](scaling.png)', '']
  titles = {'weak': 'Weak scaling: the same sequences on every device',
            'strong': 'Strong scaling: the same sequences in every step'}
  for kind, title in titles.items():
    lines += [
        f'## {title}', '',
        '| model | chips | fsdp x tensor | sequences | of a group / micro-batches | state GiB '
        '(computed) | sent GB a step (computed) | links ms (computed) | compute ms (computed) | '
        'efficiency low-high (computed) | MFU (computed) |',
        '|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|', *map(_row, rows[kind]), '']
  lines += [
      'A group is the devices that have the same sequences: one, but where a slice has more '
      'devices than a step has sequences; there mesh.tensor splits the heads. Traffic within '
      'such groups is of the formula alone where no compiled program below has them.', '',
      '## The formula beside compiled programs', '',
      'Mesh: data x fsdp x tensor.', '',
      '| model | slice | mesh | micro-batches | sent GB, formula (computed) | sent GB (compiled) | '
      'ratio |', '|---|---|---|---:|---:|---:|---:|',
      *(f'| {c["model"]} | {c["topology"]} | {c["mesh"]} | {c["microbatches"]} | '
        f'{c["formula_gb"]:.2f} | '
        f'{c["compiled_gb"]:.2f} | {c["compiled_gb"] / c["formula_gb"]:.2f} |' for c in checks), '',
      'Above 1 the compiler sends more than the formula: a table gathered in float32, or products '
      'taken apart into rings of permutations, part by part. Near 2 it would gather by summing '
      'arrays of zeros with a device\'s part in its place. The times above are lower by that.',
      '',
      '## What more chips do to the training itself', '',
      'Weak scaling enlarges the batch. Beyond a critical batch more sequences no longer save '
      'steps in proportion (McCandlish et al. 2018). Kaplan et al. 2020 fit it for language '
      'models as 2e8 tokens / loss^4.76, at losses in nats per token; a batch of B tokens then '
      'needs 1 + B / critical times the fewest tokens. Their models and data are not ours: an '
      'order of magnitude.', '',
      '| loss | critical batch, million tokens (computed) | tokens needed at 1M | at 4M | at 16M |',
      '|---:|---:|---:|---:|---:|',
      *(f'| {loss} | {critical_tokens(loss) / 1e6:.1f} | ' + ' | '.join(
          f'{1 + n * 2**20 / critical_tokens(loss):.1f}x' for n in (1, 4, 16)) + ' |'
        for loss in _LOSSES), '',
      'At 4,096 chips, four sequences on each are 34 million tokens a step: the slice is busy, '
      'and most of its tokens are wasted on a 1B model. Strong scaling is the honest one there.']
  return '\n'.join(lines) + '\n'


def _row(row):
  return (f'| {row["model"]} | {row["chips"]:,} | {row["fsdp"]} x {row["tensor"]} | '
          f'{row["sequences"]:,} | {row["each"]:g} / {row["microbatches"]} | '
          f'{row["state_gib"]:.1f} | {row["sent_gb"]:.1f} | {row["links_ms"]:.0f} | '
          f'{row["compute_ms"]:,.0f} | {row["low"]:.0%}-{row["high"]:.0%} | {row["mfu"]:.0%} |')


def _figure(rows, path):
  import matplotlib
  matplotlib.use('Agg')
  from matplotlib import pyplot

  figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.5), sharey=True, layout='constrained')
  for axis, kind in zip(axes, rows):
    for i, study in enumerate(STUDIES):
      own = [row for row in rows[kind] if row['model'] == study.size]
      chips = [row['chips'] for row in own]
      low, high = [row['low'] for row in own], [row['high'] for row in own]
      axis.fill_between(chips, low, high, alpha=0.15, color=f'C{i}')
      axis.plot(chips, low, 'o-', color=f'C{i}', label=study.size)
    axis.set(xscale='log', title=f'{kind} scaling', xlabel='chips (TPU v5p)', ylim=(0, 1.05),
             xticks=[8, 64, 512, 4096], xticklabels=['8', '64', '512', '4,096'])
    axis.grid(alpha=0.3)
  axes[0].set_ylabel('efficiency, computed')
  axes[0].legend(title='model')
  figure.savefig(path, dpi=110, metadata={'Software': None})
  pyplot.close(figure)
