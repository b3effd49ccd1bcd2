"""From 8 to 4,096 chips: a written estimate from formulas, datasheets and compiled programs."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib

import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from sink_jax.io.tables import markdown_table
from sink_jax.models.sizes import SIZES, flops_per_token, parameter_count, sized
from sink_jax.plan import compiler, interconnect
from sink_jax.plan.chips import GIB, SHARE, SOURCE, Slice, parse
from sink_jax.plan.hlo_cost import Collective
from sink_jax.plan.job import AXES
from sink_jax.plan.records import Plan, StepCost
from sink_jax.plan.table import CONTEXT, VOCAB, read_plans

SLICES = ('v5p:2x2x2', 'v5p:4x4x4', 'v5p:8x8x8', 'v5p:16x16x16')


@dataclasses.dataclass(frozen=True)
class Study:
  """How a model is trained.

  fsdp: devices that split its parameters, at most. each: sequences of a device under weak
  scaling. batch: sequences of a step under strong scaling. work: matrix products that are
  computed, over those that the model needs; more than 1 where the backward pass repeats the
  forward pass.
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


@dataclasses.dataclass(frozen=True)
class Estimate:
  """A training step of so many sequences on a slice: bytes, milliseconds and shares, computed.

  each: sequences of a group of devices. low, high: efficiency, computation over the step, with
  traffic that no work hides and with traffic that work hides wherever it lasts longer.
  """

  model: str
  chips: int
  fsdp: int
  tensor: int
  sequences: int
  microbatches: int
  tokens: int
  each: float
  state_gib: float
  sent_gb: float
  links_ms: float
  compute_ms: float
  low: float
  high: float
  mfu: float


@dataclasses.dataclass(frozen=True)
class FormulaCheck:
  """Bytes that a device sends in a step: by the formula of `volumes`, and as compiled."""

  model: str
  topology: str
  mesh: str
  microbatches: int
  formula_gb: float
  compiled_gb: float


def critical_tokens(loss: float) -> float:
  """The batch in tokens at which a training needs twice the fewest tokens, by Kaplan et al."""
  return 2e8 / loss ** (1 / 0.21)


def volumes(size: str, fsdp: int, tensor: int, devices: int, tokens: int, microbatches: int,
            repeated: bool) -> list[tuple[str, str, float, int]]:
  """The traffic of a step by the sharding rule: (kind, axes, bytes of an array, times).

  Matrices of the blocks are gathered over 'fsdp' in bfloat16 for the forward pass and again for
  the backward pass, and their gradients scattered; both tables of embeddings are gathered too. All
  of that happens in every micro-batch. Over 'data' gradients are summed once a step, in bfloat16,
  each device the part that it keeps (`gradient_reduction` 'step' of the training step).

  The gradients of the tables are summed whole, in float32, in every micro-batch: over 'fsdp'
  alone where micro-batches come before the sum over 'data', and there the compiler gathers the
  gradients of the activations instead for the first of the tables; else over all devices, the sum
  over 'data' included. A tensor group sums activations twice in a block and twice in its backward
  pass, once more where that repeats the forward pass.
  """
  model = SIZES[size]
  layers = model['layers']
  blocks = parameter_count(size=size, vocab_size=VOCAB, embeddings=False) / tensor / layers
  table = VOCAB * model['d_model']
  every = layers * microbatches
  rows = devices // tensor
  data = rows // fsdp
  traffic: list[tuple[str, str, float, int]] = []
  if data > 1 and microbatches > 1:
    traffic.append(('all-reduce', 'data', 2.0 * (2 * table + layers * blocks) / fsdp, 1))
    if fsdp * tensor > 1:
      inside = '+'.join(AXES[1:2] if tensor == 1 else AXES[1:])
      traffic.append(('all-reduce', inside, 4.0 * table, microbatches))
    if fsdp > 1:
      activations = 4.0 * tokens / data / microbatches * model['d_model']
      traffic.append(('all-gather', 'fsdp', activations, microbatches))
  else:
    everywhere = '+'.join(AXES[:2] if tensor == 1 else AXES)
    traffic.append(('all-reduce', everywhere, 4.0 * table, 2 * microbatches))
    if data > 1:
      traffic.append(('all-reduce', 'data', 2.0 * blocks / fsdp, layers))
  if fsdp > 1:
    traffic += [('all-gather', 'fsdp', 2.0 * table, 2 * microbatches),
                ('all-gather', 'fsdp', 2.0 * blocks, 2 * every),
                ('reduce-scatter', 'fsdp', 2.0 * blocks, every)]
  if tensor > 1:
    activations = 2.0 * tokens / rows / microbatches * model['d_model']
    traffic.append(('all-reduce', 'tensor', activations, (6 if repeated else 4) * every))
  return traffic


def estimate(study: Study, where: Slice, sequences: int) -> Estimate:
  """The estimate of a training step of so many sequences on a slice."""
  devices, tokens = where.devices, sequences * CONTEXT
  # More devices than sequences: groups of them share a sequence and split its heads.
  tensor = max(1, devices // sequences)
  rows = devices // tensor
  # A small slice has fewer groups of devices than the study splits parameters over.
  fsdp = min(study.fsdp, rows)
  microbatches = max(1, sequences // rows // study.each)
  # As `make_mesh` of the training lays it out: an axis of the mesh may take a part of an axis of
  # the torus, such as the 16 devices of fsdp in a torus of 8x8x8.
  mesh = Mesh(mesh_utils.create_device_mesh(
      (rows // fsdp, fsdp, tensor), compiler.topology_devices(where.compiler_name),
      allow_split_physical_axes=True), AXES, axis_types=(AxisType.Auto,) * 3)
  traffic = [Collective(kind, payload, _first_group(mesh, axes), times, False)
             for kind, axes, payload, times in volumes(
                 study.size, fsdp, tensor, devices, tokens, microbatches, study.work > 1)]
  sent = sum(collective.count * collective.moved for collective in traffic)
  waiting = sum(interconnect.seconds(collective, mesh, where) for collective in traffic)
  work = tokens * flops_per_token(sized(study.size, vocab_size=VOCAB), CONTEXT) / devices
  # The computation includes what is repeated; MFU below counts the needed work alone.
  compute = study.work * work / (where.chip.peak * SHARE)
  # float32 parameters and two moments.
  state = 12 * parameter_count(size=study.size, vocab_size=VOCAB) / fsdp / tensor
  return Estimate(
      model=study.size, chips=devices, fsdp=fsdp, tensor=tensor,
      sequences=sequences, microbatches=microbatches, tokens=tokens,
      each=sequences / rows, state_gib=state / GIB, sent_gb=sent / 1e9,
      links_ms=1e3 * waiting, compute_ms=1e3 * compute,
      # Low: traffic comes after all computation. High: both go on together, and the longer counts.
      low=compute / (compute + waiting), high=compute / max(compute, waiting),
      mfu=work / where.chip.peak / (compute + waiting))


def _first_group(mesh: Mesh, axes: str) -> tuple[int, ...]:
  """The first group of partitions along axes such as 'data+fsdp'."""
  partitions = np.arange(math.prod(mesh.devices.shape)).reshape(mesh.devices.shape)
  index = tuple(slice(None) if name in axes.split('+') else 0 for name in mesh.axis_names)
  return tuple(partitions[index].ravel().tolist())


def write(folder: pathlib.Path) -> None:
  """Writes scaling.json, README.md and scaling.png into a folder."""
  rows: dict[str, list[Estimate]] = {'weak': [], 'strong': []}
  for study in STUDIES:
    for name in SLICES:
      where = parse(name)
      rows['weak'].append(estimate(study, where, study.each * where.devices))
      rows['strong'].append(estimate(study, where, study.batch))
  plans = read_plans(folder.parent / 'plan' / 'plan.json')
  checks = [_check(plan, plan.cost) for plan in plans if plan.cost]
  folder.mkdir(parents=True, exist_ok=True)
  (folder / 'scaling.json').write_text(json.dumps(
      {name: [dataclasses.asdict(row) for row in listed]
       for name, listed in (rows | {'checks': checks}).items()}, indent=1) + '\n')
  (folder / 'README.md').write_text(_markdown(rows, checks))
  _figure(rows, folder / 'scaling.png')


def _check(plan: Plan, cost: StepCost) -> FormulaCheck:
  """The formula beside a compiled program."""
  mesh, size = plan.mesh, plan.name.split('/')[0]
  devices = lambda axes: math.prod(mesh[name] for name in axes.split('+'))
  # The bytes of a collective depend on the number of its members alone, so that any numbers serve
  # as a group.
  formula = sum(
      times * Collective(kind, payload, tuple(range(devices(axes))), times, False).moved
      for kind, axes, payload, times in volumes(
          size, mesh['fsdp'], mesh['tensor'], plan.devices, plan.tokens, plan.microbatches,
          plan.remat != 'none'))
  return FormulaCheck(
      model=size, topology=plan.topology, mesh='x'.join(map(str, mesh.values())),
      microbatches=plan.microbatches, formula_gb=formula / 1e9,
      compiled_gb=sum(row.moved for row in cost.collectives) / 1e9)


def _markdown(rows: dict[str, list[Estimate]], checks: list[FormulaCheck]) -> str:
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
    lines += [f'## {title}', '', *markdown_table(
        ['model', 'chips', 'fsdp x tensor', 'sequences', 'of a group / micro-batches',
         'state GiB (computed)', 'sent GB a step (computed)', 'links ms (computed)',
         'compute ms (computed)', 'efficiency low-high (computed)', 'MFU (computed)'],
        map(_row, rows[kind])), '']
  lines += [
      'A group is the devices that have the same sequences: one, but where a slice has more '
      'devices than a step has sequences; there mesh.tensor splits the heads. Traffic within '
      'such groups is of the formula alone where no compiled program below has them.', '',
      '## The formula beside compiled programs', '',
      'Mesh: data x fsdp x tensor.', '',
      *markdown_table(
          ['model', 'slice', 'mesh', 'micro-batches', 'sent GB, formula (computed)',
           'sent GB (compiled)', 'ratio'],
          [[check.model, check.topology, check.mesh, check.microbatches, f'{check.formula_gb:.2f}',
            f'{check.compiled_gb:.2f}', f'{check.compiled_gb / check.formula_gb:.2f}']
           for check in checks], left=(0, 1, 2)), '',
      'Above 1 the compiler sends more than the formula: a table gathered in float32, or products '
      'taken apart into rings of permutations, part by part. Near 2 it would gather by summing '
      'arrays of zeros with a device\'s part in its place. The times above are lower by that.',
      '',
      '## What more chips do to the training itself', '',
      'Weak scaling enlarges the batch. Beyond a critical batch more sequences no longer save '
      'steps in proportion (McCandlish et al. 2018). Kaplan et al. 2020 fit it for language '
      'models as 2e8 tokens / loss^4.76, at losses in nats per token; a batch of B tokens then '
      'needs 1 + B / critical times the fewest tokens. Their models and data were others: only '
      'the order of magnitude carries over.', '',
      *markdown_table(
          ['loss', 'critical batch, million tokens (computed)', 'tokens needed at 1M', 'at 4M',
           'at 16M'],
          [[loss, f'{critical_tokens(loss) / 1e6:.1f}',
            *(f'{1 + n * 2**20 / critical_tokens(loss):.1f}x' for n in (1, 4, 16))]
           for loss in _LOSSES], left=()), '',
      'At 4,096 chips, four sequences on each are 34 million tokens a step: the slice is busy, '
      'and most of its tokens are wasted on a 1B model. There the rows of strong scaling are the '
      'ones to go by.']
  return '\n'.join(lines) + '\n'


def _row(row: Estimate) -> list[str]:
  return [row.model, f'{row.chips:,}', f'{row.fsdp} x {row.tensor}', f'{row.sequences:,}',
          f'{row.each:g} / {row.microbatches}', f'{row.state_gib:.1f}', f'{row.sent_gb:.1f}',
          f'{row.links_ms:.0f}', f'{row.compute_ms:,.0f}', f'{row.low:.0%}-{row.high:.0%}',
          f'{row.mfu:.0%}']


def _figure(rows: dict[str, list[Estimate]], path: pathlib.Path) -> None:
  import matplotlib
  matplotlib.use('Agg')
  from matplotlib import pyplot

  figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.5), sharey=True, layout='constrained')
  for axis, kind in zip(axes, rows):
    for i, study in enumerate(STUDIES):
      estimates = [row for row in rows[kind] if row.model == study.size]
      chips = [row.chips for row in estimates]
      low, high = [row.low for row in estimates], [row.high for row in estimates]
      axis.fill_between(chips, low, high, alpha=0.15, color=f'C{i}')
      axis.plot(chips, low, 'o-', color=f'C{i}', label=study.size)
    axis.set(xscale='log', title=f'{kind} scaling', xlabel='chips (TPU v5p)', ylim=(0, 1.05),
             xticks=[8, 64, 512, 4096], xticklabels=['8', '64', '512', '4,096'])
    axis.grid(alpha=0.3)
  axes[0].set_ylabel('efficiency, computed')
  axes[0].legend(title='model')
  # Without the name of the software, equal figures are equal files under any version.
  figure.savefig(path, dpi=110, metadata={'Software': None})
  pyplot.close(figure)
