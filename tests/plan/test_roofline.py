"""Slices, links and times, against closed forms; errors in arguments."""

import dataclasses
import json
import pathlib
import types

import jax
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.attention.mask import Window
from sink_jax.models.config import Layer, Mamba
from sink_jax.models.sizes import attention_flops, flops_per_token, sized
from sink_jax.plan import (
  chips,
  compiler,
  format,
  interconnect,
  records,
  roofline,
  scaling,
  suggestions,
  table,
)
from sink_jax.plan.hlo_cost import Collective
from sink_jax.plan.job import Job, plan
from sink_jax.train.optimizer import OptimizerConfig
from sink_jax.train.sharding import mesh_sizes

ROOT = pathlib.Path(__file__).parents[2]


def job(topology='v5p:4x4x4', mesh=(4, 16, 1), batch_size=128, microbatches=1, remat='none'):
  return Job('1b', chips.parse(topology), sized('1b', vocab_size=50432, remat=remat),
             OptimizerConfig(), 2048, batch_size, microbatches, mesh)


def torus(topology, sizes):
  """A mesh over the chips of a slice, in the order of their coordinates."""
  where = chips.parse(topology)
  devices = np.empty(where.shape, object)
  for place in np.ndindex(where.shape):
    devices[place] = types.SimpleNamespace(coords=place + (0,) * (3 - len(place)))
  mesh = types.SimpleNamespace(devices=devices.reshape(sizes), axis_names=('data', 'fsdp'))
  return where, mesh


def group(mesh, axis):
  numbers = np.arange(mesh.devices.size).reshape(mesh.devices.shape)
  return tuple(int(n) for n in (numbers[0] if axis == 'fsdp' else numbers[:, 0]))


@pytest.mark.parametrize('topology, sizes, axis, links_used, hops', [
    ('v5e:16x16', (16, 16), 'fsdp', 2, 8),  # a ring in both directions
    ('v5e:4x4', (4, 4), 'fsdp', 1, 3),  # a line
    ('v5e:4x4', (1, 16), 'fsdp', 2, 6),  # two lines
    ('v5p:4x4x4', (1, 64), 'fsdp', 6, 6),  # three rings
    ('v5p:4x4x4', (4, 16), 'data', 2, 2),
    ('v5e:16x16', (64, 4), 'fsdp', 1, 3),  # a part of a ring
    ('v5p:2x2x2', (2, 4), 'fsdp', 2, 2),
    ('v5e:8x8', (4, 16), 'data', 1 / 2, 6),  # every other row: two groups share the links
])
def test_a_group_has_the_links_along_which_it_lies(topology, sizes, axis, links_used, hops):
  where, mesh = torus(topology, sizes)
  path = interconnect.path(group(mesh, axis), mesh, where)
  assert path.bandwidth == pytest.approx(links_used * where.chip.link)
  assert path.hops == hops


def test_seconds_of_traffic():
  where, mesh = torus('v5e:16x16', (16, 16))
  one = Collective('all-gather', 32e9, group(mesh, 'fsdp'), 3, False)
  assert interconnect.axes_of(one, mesh) == 'fsdp'
  assert interconnect.seconds(one, mesh, where) == pytest.approx(
      3 * (15 / 16 * 32e9 / 100e9 + 8 * chips.HOP_SECONDS))
  twice = dataclasses.replace(one, kind='all-reduce')
  seconds = interconnect.seconds(one, mesh, where)
  assert interconnect.seconds(twice, mesh, where) == pytest.approx(2 * seconds)
  assert interconnect.seconds(dataclasses.replace(one, group=(3,)), mesh, where) == 0


def test_the_step_waits_for_what_nothing_hides():
  chip = chips.CHIPS['v5e']
  line = roofline.make(flops=chip.peak, bytes_=chip.bandwidth / 2, overlapped=0.25, exposed=0.5,
                       chip=chip, share=0.5)
  assert (line.compute, line.peak, line.memory) == (2, 1, 0.5)
  assert (line.step, line.floor, line.bound) == (2.5, 1, 'compute')
  slow = dataclasses.replace(line, overlapped=3.0)
  assert (slow.step, slow.floor, slow.bound) == (3.5, 3.5, 'links')
  assert roofline.make(1, 1, 0, 0, chip, 0.5, compute=7.0).step == 7


def test_mfu_counts_the_models_flops():
  config, chip = sized('1b', vocab_size=50432), chips.CHIPS['v5p']
  flops = 1000 * flops_per_token(config, 2048)
  assert roofline.mfu(config, 2048, 1000, 4, chip, flops / (4 * chip.peak)) == pytest.approx(1)


def test_flops_of_attention_kernels():
  config = sized('60m', vocab_size=100)
  seen = (2048 + 1) / 2
  assert attention_flops(config, 2048) == pytest.approx(4 * 10 * 768 * seen)
  narrow = dataclasses.replace(config, attention=sj.AttentionSpec(mask=Window(size=1)))
  assert attention_flops(narrow, 2048) == pytest.approx(4 * 10 * 768)
  forward = 7 * attention_flops(config, 2048)
  kernels = lambda calls, micro: roofline.kernel_flops(config, 2048, 7, calls, micro)
  assert kernels(30, 1) == pytest.approx(4.5 * forward)
  assert kernels(80, 2) == pytest.approx(5.5 * forward)  # the forward pass twice
  assert kernels(0, 1) == 0
  mixed = dataclasses.replace(config, pattern=(Layer(), Layer(mamba=Mamba(64, 4, 3, 2))))
  assert roofline.kernel_flops(mixed, 2048, 7, 15, 1) == pytest.approx(4.5 * forward / 2)


@pytest.mark.parametrize('topology, message', [
    ('v9:4x4', 'Choices: v5e:16x16'), ('h200:8', 'only TPUs'), ('v5e', 'such as v5e:16x16'),
    ('v5e:4x4x4', '2 dimensions'), ('v5p:16', '3 dimensions'), ('v5e:3x4', 'must be even'),
    ('v5e:1x2', 'one chip alone is v5e:1x1'), ('v5e:0x2', 'must be even'),
    ('v5e:32x32', '256 at most'), ('v5p:4x4xx', 'such as v5p:')])
def test_topologies_that_do_not_exist(topology, message):
  with pytest.raises(ValueError, match=message):
    chips.parse(topology)


def test_topologies():
  where = chips.parse('tpu7x:4x4x8')
  assert (where.name, where.compiler_name, where.devices) == ('v7x:4x4x8', 'tpu7x:4x4x8', 256)
  assert chips.parse('V5P:16x16x16').devices == 4096
  assert [chips.parse(name).devices for name in ('v5e:1x1', 'v5p:1x1x1', 'v7x:1x1x1')] == [1, 1, 2]
  assert [chips.parse('v5p:2x4x4').closed(d) for d in range(3)] == [False] * 3
  assert [chips.parse('v6e:8x16').closed(d) for d in range(2)] == [False, True]


@pytest.mark.parametrize('options, message', [
    (dict(mesh=(3, 16, 1)), 'their product must be 64'),
    (dict(batch_size=100), 'use --batch_size=128'),
    (dict(batch_size=96, microbatches=5), 'must divide'),
    (dict(microbatches=4), 'use --microbatches=2 or --batch_size=256')])
def test_what_does_not_divide(options, message):
  with pytest.raises(ValueError, match=message):
    job(**options)


def test_the_rest_of_the_mesh():
  assert mesh_sizes(-1, 16, 2, 64) == (2, 16, 2)
  assert mesh_sizes(4, 16, 1, 64) == (4, 16, 1)


def test_a_missing_compiler_is_named(monkeypatch):
  monkeypatch.setenv('COMPILERS', '/disk/none')
  monkeypatch.setattr(compiler.importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(compiler.CompilerMissing, match='launch/test.sh --compile=v5e'):
    compiler._library()


@pytest.mark.parametrize('message, needed', [
    ('total memory required for HLO temporaries (43.70G) exceeds available HBM (15.75G).', 44.7),
    ('Ran out of memory in memory space hbm. Used 21.30G of 15.75G hbm.', 21.3)])
def test_what_the_compiler_says_about_memory(message, needed):
  def refuse(compiler_options):
    raise compiler.jax.errors.JaxRuntimeError(f'RESOURCE_EXHAUSTED: {message}')

  with pytest.raises(compiler.OutOfMemory) as error:
    compiler.compile_lowered(types.SimpleNamespace(compile=refuse))
  assert error.value.bytes_with(1 * chips.GIB) == pytest.approx(needed * chips.GIB)


def test_options_come_with_the_memory_that_they_need():
  lines = suggestions.memory_options(job(batch_size=512), compiler.Memory(
      1 * chips.GIB, 200 * chips.GIB, 201 * chips.GIB))
  named = [line.split(':')[0].strip() for line in lines]
  assert named[:2] == ['--remat=save_matmuls', '--remat=save_attention']
  assert '--microbatches=2' in named
  fits = [line for line in lines if line.endswith('fits')]
  assert fits and all('--remat=none' not in line for line in lines)


@pytest.mark.parametrize('options, changes, logits, summed', [
    (dict(batch_size=512), dict(), 1, 0), (dict(batch_size=512), dict(loss_logits=2**20), 2**-8, 0),
    (dict(batch_size=128), dict(model=sized('1b', vocab_size=2**15)), 1 / 2, 0),
    (dict(batch_size=512, microbatches=2), dict(), 1, 10)])  # has the sum of gradients already
def test_what_more_microbatches_need(options, changes, logits, summed):
  """In GiB: the state, what stays (tables, logits, a sum of gradients), and half of the rest."""
  asked = dataclasses.replace(job(**options), **changes)
  stays = 3 * 4 * asked.model.vocab_size * 2048 / chips.GIB + logits
  lines = suggestions.memory_options(asked, compiler.Memory(
      30 * chips.GIB, 200 * chips.GIB, 230 * chips.GIB))
  line = next(line for line in lines if f'--microbatches={2 * asked.microbatches}:' in line)
  assert f'about {30 + stays + 10 + (200 - stays - summed) / 2:.1f} GiB' in line


def test_alternatives_have_the_same_batch():
  given = job()
  found = list(suggestions.alternatives(given))
  assert found[0] == given and len(found) == len(set((o.mesh, o.model.remat) for o in found))
  assert {o.tokens for o in found} == {given.tokens}


def test_a_plan_is_of_the_blocks_and_the_remat_that_a_run_chooses():
  shown = lambda one: (one.model.remat, one.model.unroll)
  assert shown(job('v5e:16x16', (16, 16, 1), 512).with_remat(None)) == ('none', 22)
  assert shown(job('v5e:4x4', (1, 16, 1), 512).with_remat(None)) == ('blocks', 1)
  assert shown(job().with_remat('blocks')) == ('blocks', 1)
  assert shown(job().with_remat('none', 11)) == ('none', 11)


def test_the_volumes_of_the_estimate():
  layers, width, hidden, vocab = 22, 2048, 5632, 50432
  parts = {(kind, axes): 0.0 for kind, axes, *_ in scaling.volumes('1b', 16, 1, 64, 0, 1, False)}
  for kind, axes, payload, times in scaling.volumes('1b', 16, 1, 64, 0, 1, False):
    parts[kind, axes] += payload * times
  matrices = layers * (4 * width**2 + 3 * width * hidden)
  assert parts['reduce-scatter', 'fsdp'] == pytest.approx(2 * matrices, rel=1e-3)  # and gains
  assert parts['all-reduce', 'data'] == pytest.approx(2 * matrices / 16, rel=1e-3)
  assert parts['all-reduce', 'data+fsdp'] == 2 * 4 * vocab * width
  assert scaling.critical_tokens(1.0) == 2e8


@pytest.mark.parametrize('fsdp, tensor', [(1, 1), (16, 1), (16, 2)])
def test_in_the_estimate_gradients_of_micro_batches_cross_data_once(fsdp, tensor):
  tokens, microbatches = 2**20, 4
  traffic = scaling.volumes('1b', fsdp, tensor, 64, tokens, microbatches, False)
  [crossing] = [row for row in traffic if 'data' in row[1]]
  matrices = 22 * (4 * 2048**2 + 3 * 2048 * 5632) / tensor
  assert crossing == ('all-reduce', 'data', pytest.approx(
      2 * (matrices + 2 * 50432 * 2048) / fsdp, rel=1e-3), 1)
  assert len(traffic) == 1 or {times % microbatches for *_, times in traffic[1:]} == {0}
  # With one group along 'data' nothing crosses it, and micro-batches repeat all of the traffic.
  one, several = ({(kind, axes, payload): times for kind, axes, payload, times in scaling.volumes(
      '1b', 64, 1, 64, 0, n, False)} for n in (1, microbatches))
  assert several == {key: microbatches * times for key, times in one.items()}


# Bytes that the compiler of a v5e lets each of 4x4 devices send in a step of 60m.
@pytest.mark.parametrize('mesh, sequences, microbatches, compiled', [
    ((16, 1), 128, 4, 511.7e6), ((4, 4), 128, 4, 2375.7e6), ((1, 16), 128, 4, 4192.6e6)])
def test_the_estimate_is_near_what_was_compiled(mesh, sequences, microbatches, compiled):
  members = {'data': mesh[0], 'fsdp': mesh[1], 'data+fsdp': 16}
  sent = sum(Collective(kind, payload, tuple(range(members[axes])), times, False).moved * times
             for kind, axes, payload, times in scaling.volumes(
                 '60m', mesh[1], 1, 16, sequences * 2048, microbatches, False))
  assert sent == pytest.approx(compiled, rel=0.15)


def test_the_page_of_the_estimate_is_in_plain_words():
  page = scaling._markdown({'weak': [], 'strong': []}, [])
  assert 'Their models and data were others' in page
  assert not {'ours', 'honest'} & set(page.replace('.', ' ').replace(':', ' ').split())


def test_every_row_of_the_table_has_all_its_columns():
  mesh = {'data': 4, 'fsdp': 16, 'tensor': 1}
  traffic = records.Traffic('all-gather', 'fsdp', 16, False, 1, 2.5e9, 2.5e9, 0.02)
  counted = records.Plan(
      name='1b/v5p:4x4x4/16', topology='v5p:4x4x4', devices=64, mesh=mesh, batch_size=128,
      microbatches=1, context=2048, remat='none', unroll=1, vocab=1, parameters=1, tokens=1,
      usable=95 * chips.GIB, capacity=96 * chips.GIB, model_flops=1e13, attention='splash',
      memory=compiler.Memory(chips.GIB, 30 * chips.GIB, 31 * chips.GIB, 0), peaks={'training': 1},
      compile_seconds=1, cost=records.StepCost(
          flops=1e13, kernel_flops=0, bytes=1, compiler_flops=None, compiler_bytes=None,
          unknown_loops=0, collectives=[traffic], share=0.6, tokens_per_second=1e6, mfu=0.5,
          roofline=roofline.Roofline(0.2, 0.1, 0.1, overlapped=0.01, exposed=0.02)))
  assert counted.fits and records.plan_from_json(counted.to_json()) == counted
  refused = dataclasses.replace(counted, cost=None, memory=compiler.Memory(
      chips.GIB, 95 * chips.GIB, 96 * chips.GIB))
  assert not refused.fits and records.plan_from_json(refused.to_json()) == refused
  failed = table.Refused('1b/v5p:4x4x4/16', 'no such topology')
  shown = [line for line in table.markdown([counted, refused, failed]).splitlines()
           if line.startswith('| ') and '---' not in line]
  assert [row.count('|') for row in shown] == [17] * 4
  assert '4x16x1' in shown[1] and '30.0 (20.0)' in shown[1] and '2.50' in shown[1]
  assert 'does not fit' in shown[2] and 'no such topology' in shown[3]


def test_the_page_names_the_cases_that_are_missing_wherever_they_stand():
  # The first case is not known, and two later ones are.
  known = [table.Refused('/'.join(map(str, table.CASES[i])), 'no such topology') for i in (1, 3)]
  page = table.markdown(known)
  assert f'14 of {len(table.CASES)} cases have not been compiled yet: 60m on v5e:4x4, ' in page
  missing = page[page.index('yet: ') + 5:]
  assert '60m on v5e:16x16' not in missing and missing.count(' on ') == 14
  assert 'yet' not in table.markdown([table.Refused('/'.join(map(str, case)), '')
                                      for case in table.CASES])


def test_stored_plans_are_read_whole():
  file = ROOT / 'results' / 'plan' / 'plan.json'
  stored = [one for one in json.loads(file.read_text())['plans'] if 'failed' not in one]
  assert stored and [plan.to_json() for plan in table.read_plans(file)] == stored


def test_a_plan_counts_training_validation_and_the_probe(monkeypatch):
  """The programs are compiled for a CPU: which are counted can be tested, not their sizes."""
  monkeypatch.setattr(compiler, 'topology_devices', lambda name: jax.devices()[:1])
  tiny = sized('tiny', vocab_size=64, d_model=32, ffn_hidden=32, layers=1)
  planned = lambda **options: plan(Job(**{
      'name': 'tiny', 'where': chips.parse('v5e:1x1'), 'model': tiny,
      'optimizer': OptimizerConfig(), 'context': 32, 'batch_size': 64,
      'microbatches': 1, 'mesh': (1, 1, 1), **options}))
  whole = planned()
  assert list(whole.peaks) == ['training', 'validation', 'probe'] and whole.fits
  assert whole.peaks['training'] == whole.memory.total
  assert records.plan_from_json(whole.to_json()) == whole
  assert whole.attention == 'chunked'  # the choice of the devices that are planned for
  sliced = planned(microbatches=16)
  assert sliced.peaks['validation'] < 0.6 * whole.peaks['validation']
  assert sliced.peaks['probe'] == whole.peaks['probe'] > 3 * 4 * whole.parameters

  name, peak = sliced.largest_peak
  assert name == 'probe'
  small = chips.CHIPS['v5e']._replace(usable=peak - 1)
  monkeypatch.setitem(chips.CHIPS, 'v5e', small)
  refused = planned(microbatches=16)
  assert not refused.fits and refused.largest_peak == (name, peak)
  assert 'in probe: training' in format.as_text(refused, chips.parse('v5e:1x1'))
