"""Plans: slices, memory compiled for a CPU instead of a TPU, the estimate, options that fit."""

import dataclasses

import jax
import pytest

from sink_jax.cli import plan as command
from sink_jax.models.sizes import flops_per_token, parameter_count
from sink_jax.plan import chips, compiler, estimate, job
from sink_jax.plan.estimate import as_text
from sink_jax.train.config import Experiment, changed
from sink_jax.train.memory import Memory, memory

TINY = {
  'model.size': 'tiny',
  'model.d_model': 32,
  'model.ffn_hidden': 32,
  'model.layers': 1,
  'model.vocab_size': 300,
  'data.context': 32,
  'batch_size': 64,
  'probe.sequences': 50,
  'probe.length': 32,
}
ONE = chips.parse('v5e:1x1')


def config(**changes):
  return changed(Experiment(), TINY | {key.replace('__', '.'): x for key, x in changes.items()})


@pytest.fixture
def on_a_cpu(monkeypatch):
  monkeypatch.setattr(compiler, 'topology_devices', lambda name, slices: jax.devices()[:1])


def with_memory(monkeypatch, size):
  monkeypatch.setitem(chips.CHIPS, 'v5e', chips.CHIPS['v5e']._replace(usable=size))


@pytest.mark.parametrize(
  'call, words',
  [
    (lambda: chips.parse('h9:8'), 'v5e, v5p'),
    (lambda: chips.parse('h100:16'), 'h100:8'),
    (lambda: chips.parse('v5e'), '2 dimensions'),
    (lambda: chips.parse('v5p:4x4xx'), '3 dimensions'),
    (lambda: chips.parse('v5e:3x4'), 'even'),
    (lambda: chips.parse('v5e:32x32'), '256'),
    (
      lambda: chips.parse('v5litepod-12'),
      '--topology=v5litepod-12: accelerator types have a power of two',
    ),
    (lambda: command.Options(topology='v5e:1x1', slices=0), '--slices=0'),
    (lambda: job.plan(config(mesh__fsdp=3), ONE), 'mesh.fsdp'),
    (lambda: job.plan(config(batch_size=6), chips.parse('v5e:2x2')), 'batch_size'),
    (
      lambda: job.plan(
        config(model__vocab_size=None, data__tokenizer="HuggingFace(path='none')"), ONE
      ),
      '--config.model.vocab_size',
    ),
    (
      lambda: command.main(command.Options(topology='v5e:1x1'), config(init__train='new')),
      'init.train',
    ),
  ],
)
def test_what_cannot_be_planned(call, words, on_a_cpu):
  with pytest.raises(ValueError) as raised:
    call()
  assert words in str(raised.value)


@pytest.mark.parametrize(
  'name, count, compiler_name, devices, number',
  [
    ('V5P:16x16x16', 1, 'v5p:16x16x16', 4096, 4096),
    ('v7x:4x4x8', 1, 'tpu7x:4x4x8', 256, 128),
    ('v5e:16x16', 2, 'v5e:16x16', 512, 512),
    ('v5litepod-8', 1, 'v5e:2x4', 8, 8),
    ('v6e-64', 1, 'v6e:8x8', 64, 64),
    ('v5p-8', 1, 'v5p:2x2x1', 4, 4),
    ('v5p-32', 1, 'v5p:2x2x4', 16, 16),
    ('tpu7x-8', 1, 'tpu7x:2x2x1', 8, 4),
  ],
)
def test_slices(name, count, compiler_name, devices, number):
  where = chips.parse(name, count)
  assert (where.compiler_name, where.devices, where.chips) == (compiler_name, devices, number)


def test_a_plan_has_the_memory_of_training_validation_and_the_probe(on_a_cpu, monkeypatch):
  compiled = []
  monkeypatch.setattr(
    job, 'memory', lambda program: compiled.append(memory(program)) or compiled[-1]
  )
  whole = job.plan(config(), ONE)
  assert list(whole.peaks) == ['training', 'validation', 'probe']
  assert whole.fits
  training, *others = (needed.total for needed in compiled)
  # The others do not read the state of the optimizer, which stays in memory.
  assert list(whole.peaks.values()) == [training, *(x + whole.optimizer for x in others)]
  assert whole.parameters == 4 * parameter_count(whole.model)
  assert 2 <= whole.optimizer / whole.parameters < 2.01
  assert whole.peaks['training'] == whole.step.total > whole.parameters + whole.optimizer
  sliced = job.plan(config(microbatches=16), ONE)
  assert sliced.peaks['validation'] < 0.6 * whole.peaks['validation']
  assert sliced.peaks['probe'] == whole.peaks['probe'] > whole.parameters + whole.optimizer
  # The compiler accepts the probe, but the state of the optimizer is in memory at the same time.
  with_memory(monkeypatch, sliced.peaks['probe'] - 1)
  assert not job.plan(config(microbatches=16), ONE).fits


def planned(topology='v5p:4x4x4', count=1, remat='none', mesh=(4, 16, 1), **changes):
  """A plan without compilation."""
  experiment = changed(
    Experiment(), {'model.size': '1b', 'model.vocab_size': 50432, 'batch_size': 128} | changes
  )
  model = dataclasses.replace(experiment.model_config(), remat=remat)
  step = Memory(2 * chips.GIB, 10 * chips.GIB, 0)
  return job.Plan(
    experiment,
    chips.parse(topology, count),
    model,
    dict(zip(('data', 'fsdp', 'tensor'), mesh)),
    'splash',
    chips.GIB,
    chips.GIB,
    step,
    {'training': step.total},
  )


def test_the_estimate_is_that_of_a_roofline():
  plan, chip = planned(), chips.CHIPS['v5p']
  seconds = estimate.step_seconds(plan)
  flops = 128 * 2048 * flops_per_token(plan.model, 2048) / 64
  assert seconds['compute'] == pytest.approx(flops / (0.6 * chip.peak))
  assert seconds['memory'] == pytest.approx(24 * chips.GIB / chip.bandwidth)

  # Two slices sum float32 gradients over the network, 4 bytes for each parameter of a device.
  assert seconds['network'] == 0
  slices, half = (
    estimate.step_seconds(planned(count=2, mesh=(8, 16, 1), gradient_dtype=dtype))['network']
    for dtype in ('float32', 'bfloat16')
  )
  assert slices == pytest.approx(parameter_count(plan.model) / 16 / chip.network)
  assert half == slices / 2

  # The blocks are computed again, but not the unembedding.
  again = estimate.step_seconds(planned(remat='blocks', microbatches=2))
  assert 1.25 < again['compute'] / seconds['compute'] < 4 / 3
  assert again['links'] > seconds['links']
  assert again['memory'] > seconds['memory']

  # Three passes have sums over the tensor axis, instead of two.
  two, three = (
    estimate.step_seconds(planned(mesh=(1, 1, 64), remat=remat))['links']
    for remat in ('none', 'blocks')
  )
  assert three == pytest.approx(1.5 * two)


def test_the_text_has_totals_and_smaller_configs_keep_the_batch():
  plan = planned('v5e:16x16', mesh=(16, 16, 1), steps=40_000)
  hours = 40_000 * max(estimate.step_seconds(plan).values()) / 3600
  assert f'40,000 steps: {hours:,.1f} h, {256 * hours:,.0f} chip-hours' in as_text(plan)
  plan = planned('v5e:2x2', mesh=(4, 1, 1), batch_size=64)
  found = list(job.smaller(plan))
  assert [(e.model.remat, e.mesh.fsdp, e.microbatches) for e in found] == [
    ('blocks', 1, 1),
    (None, 4, 1),
    ('blocks', 4, 1),
    *(('blocks', 4, n) for n in (2, 4, 8, 16)),
  ]
  assert {e.batch_size for e in found} == {64}
  first = planned(
    'v5e:2x2', mesh=(4, 1, 1), **{'batch_size': 64, 'mesh.fsdp': 4, 'model.remat': 'blocks'}
  )
  # None is compiled again.
  assert [e.microbatches for e in job.smaller(first)] == [2, 4, 8, 16]


def test_what_does_not_fit_is_compiled_with_options_until_some_do(on_a_cpu, monkeypatch, capsys):
  given = config(probe__sequences=1)
  most = max(job.plan(given, ONE).peaks.values())
  with_memory(monkeypatch, most - 1)
  assert command.main(command.Options(topology='v5e:1x1'), given) == 0
  printed = capsys.readouterr()
  assert 'error: it does not fit' in printed.err
  assert '--config.model.remat=blocks' in printed.out.partition('ARGUMENTS=(')[2]
  with_memory(monkeypatch, 100)
  assert command.main(command.Options(topology='v5e:1x1'), config(batch_size=1)) == 1


def test_a_refusal_of_the_compiler_is_quoted(on_a_cpu, monkeypatch):
  def refuse(*_, **__):
    raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Ran out of memory: 43.70G of 15.75G')

  monkeypatch.setattr(jax.stages.Lowered, 'compile', refuse)
  plan = job.plan(config(), ONE)
  assert not plan.fits
  assert plan.step is None
  assert not plan.peaks
  assert 'training: RESOURCE_EXHAUSTED: Ran out of memory: 43.70G' in as_text(plan)
