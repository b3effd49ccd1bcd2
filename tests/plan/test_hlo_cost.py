"""Traffic and products of compiled programs, against what is known of them in closed form."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from sink_jax.plan import hlo_cost

HERE = pathlib.Path(__file__).parent
LAYERS, D, ROWS = 5, 64, 16


@pytest.fixture(scope='module')
def compiled():
  shown = subprocess.run(
      [sys.executable, '-P', HERE / 'programs.py'], capture_output=True, text=True, check=True,
      env=os.environ | {'PYTHONPATH': str(HERE.parents[1])})
  return json.loads(shown.stdout)


def total(one, kind, axes, what='payload'):
  return sum(c['count'] * c[what] for c in one['collectives']
             if (c['kind'], c['axes']) == (kind, axes))


def test_data_parallel_gradients_are_summed_once(compiled):
  parameters = 4 * LAYERS * D * D
  assert total(compiled['data'], 'all-reduce', 'data') == parameters
  assert total(compiled['data'], 'all-reduce', 'data', 'moved') == 2 * 7 / 8 * parameters
  assert {c['kind'] for c in compiled['data']['collectives']} == {'all-reduce'}


def test_split_weights_are_gathered_twice_and_their_gradients_summed(compiled):
  parameters = 4 * LAYERS * D * D
  assert total(compiled['fsdp'], 'all-gather', 'fsdp') == 2 * parameters
  assert total(compiled['fsdp'], 'all-gather', 'fsdp', 'moved') == 2 * 3 / 4 * parameters
  assert total(compiled['fsdp'], 'all-reduce', 'data') == parameters / 4


@pytest.mark.parametrize('layout', ['data', 'fsdp'])
def test_loops_count_as_often_as_they_run(compiled, layout):
  forward = LAYERS * 2 * ROWS / 8 * D * D
  assert compiled[layout]['products'] == 3 * forward
  assert compiled[layout]['unknown'] == 0
  assert compiled[layout]['bytes'] > 4 * LAYERS * D * D  # every weight is read


def test_the_training_step_sums_its_gradients_and_two_numbers(compiled):
  numbers = 2  # the loss, and the weights of all positions
  assert total(compiled['step'], 'all-reduce', 'data') == 4 * (compiled['parameters'] + numbers)


def test_the_gradients_of_micro_batches_are_summed_over_data_once(compiled):
  numbers = 2  # as without micro-batches
  assert total(compiled['slices'], 'all-reduce', 'data') == 4 * (compiled['parameters'] + numbers)
  assert {(c['kind'], c['count']) for c in compiled['slices']['collectives']} == {('all-reduce', 1)}


def test_over_fsdp_every_micro_batch_is_summed_and_over_data_its_part_once(compiled):
  found = compiled['split slices']['collectives']
  crossing = [c for c in found if 'data' in c['axes']]
  assert {c['count'] for c in crossing} == {1}
  # A quarter of all gradients but of the last gain, which every device has whole; and the loss.
  assert total(compiled['split slices'], 'all-reduce', 'data') == 4 * (
      (compiled['parameters'] - 16) / 4 + 16 + 1)
  assert {c['count'] for c in found if (c['kind'], c['axes']) == ('all-reduce', 'fsdp')} >= {4}


def test_a_program_of_a_tpu():
  cost = hlo_cost.read((HERE / 'tpu_program.txt').read_text())
  found = {c.kind: c for c in cost.collectives}
  assert len(cost.collectives) == len(found) == 3
  gather, scatter, reduce = (found[k] for k in ('all-gather', 'reduce-scatter', 'all-reduce'))
  # One gather, though three fusions name it; other work goes on in the second.
  assert (gather.count, gather.payload, gather.overlapped) == (10, 2 * 768 * 768, True)
  # A sum of which every device keeps its part.
  assert (scatter.count, scatter.moved, scatter.overlapped) == (10, 3 / 4 * 2 * 768 * 768, False)
  assert (reduce.count, reduce.moved) == (1, 2 * 15 / 16 * 4 * 50432 * 768)
  assert gather.group == scatter.group == (0, 1, 2, 3) and len(reduce.group) == 16
  assert cost.matmul_flops == pytest.approx(10 * 2 * 4 * 2048 * 768 * 768)
  # A fusion reads one layer of the stacked weights; arrays with S(1) are not in main memory.
  layer, out, gathered = 2 * 768 * 768, 4 * 4 * 2048 * 768, 2 * 768 * 768
  assert cost.bytes == pytest.approx(
      10 * (layer + out + gathered + 2 * 768 * 768) + 2 * 4 * 50432 * 768)


@pytest.mark.parametrize('groups, first', [
    ('{{4,5},{6,7}}', (4, 5)),
    ('[2,4]<=[8]', (0, 1, 2, 3)),
    ('[4,2]<=[2,4]T(1,0)', (0, 4)),
    ("mesh['a'=2,'b'=4] {'b'}", (0, 1, 2, 3)),
    ("mesh['a'=2,'b'=4] {'a'}", (0, 4)),
    ("mesh['a'=2,'b'=4] {'b':(2)2}", (0, 1)),
    ("mesh['a'=2,'b'=4] {'b':(1)2}", (0, 2)),
    ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}", (0, 1)),
    ('{}', tuple(range(8))),
])
def test_replica_groups(groups, first):
  text = ('HloModule m, num_partitions=8\n\nENTRY %main (x: f32[8]) -> f32[8] {\n'
          '  %x = f32[8]{0} parameter(0)\n'
          f'  ROOT %r = f32[8]{{0}} all-reduce(%x), channel_id=1, replica_groups={groups}, '
          'to_apply=%add\n}\n')
  [one] = hlo_cost.read(text).collectives
  assert one.group == first


def test_what_starts_and_is_done_counts_once():
  text = '''HloModule m, num_partitions=8

%wrapped (p: f32[16]) -> f32[2] {
  %p = f32[16]{0} parameter(0)
  ROOT %rs = f32[2]{0} reduce-scatter(%p), channel_id=3, replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%add
}

ENTRY %main (x: f32[2]) -> f32[2] {
  %x = f32[2]{0} parameter(0)
  %ag = (f32[2]{0}, f32[16]{0}) all-gather-start(%x), channel_id=1, replica_groups=[1,8]<=[8], dimensions={0}
  %agd = f32[16]{0} all-gather-done(%ag)
  %cp = (f32[16]{0}, f32[16]{0}, u32[], u32[]) collective-permute-start(%agd), channel_id=2, source_target_pairs={{0,1},{1,2}}
  %cpd = f32[16]{0} collective-permute-done(%cp)
  %s = ((f32[16]{0}), f32[2]{0}) async-start(%cpd), calls=%wrapped
  ROOT %sd = f32[2]{0} async-done(%s)
}
'''
  found = {c.kind: c for c in hlo_cost.read(text).collectives}
  assert found['all-gather'].payload == 64 and found['all-gather'].moved == 56
  assert found['reduce-scatter'].moved == 56
  assert found['collective-permute'].moved == pytest.approx(64, abs=8)  # and two flags
  assert all(c.overlapped and c.count == 1 for c in found.values())


@pytest.mark.parametrize('at_once, started, moved', [
    ('%y = f32[16]{0} all-gather(%x)', '%y = (f32[2]{0}, f32[16]{0}) all-gather-start(%x)', 72),
    ('%y = f32[2]{0} collective-permute(%x)',
     '%y = (f32[2]{0}, f32[2]{0}, u32[], u32[]) collective-permute-start(%x)', 16),
    ('%y = (f32[16]{0}, f32[32]{0}) all-gather(%x, %z)',
     '%y = ((f32[2]{0}, f32[4]{0}), (f32[16]{0}, f32[32]{0})) all-gather-start(%x, %z)', 216)])
def test_what_starts_reads_and_writes_as_much_as_at_once(at_once, started, moved):
  for line in (at_once, started):
    text = ('HloModule m, num_partitions=8\n\nENTRY %main (x: f32[2]) -> f32[16] {\n'
            '  %x = f32[2]{0} parameter(0)\n  %z = f32[4]{0} parameter(1)\n'
            f'  {line}, channel_id=1\n}}\n')
    assert hlo_cost.read(text).bytes == moved


@pytest.mark.parametrize('step, trips', [(1, 8), (2, 4), (3, 3)])
def test_loops_may_count_by_twos(step, trips):
  text = f'''HloModule m, num_partitions=4

%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {{
  %p = (s32[], f32[4]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[4]{{0}} get-tuple-element(%p), index=1
  %by = s32[] constant({step})
  %next = s32[] add(%i, %by)
  %y = f32[4]{{0}} all-reduce(%x), channel_id=1, replica_groups={{{{0,1,2,3}}}}, to_apply=%add
  ROOT %t = (s32[], f32[4]{{0}}) tuple(%next, %y)
}}

%condition (p: (s32[], f32[4])) -> pred[] {{
  %p.1 = (s32[], f32[4]{{0}}) parameter(0)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  %n = s32[] constant(8)
  ROOT %lt = pred[] compare(%i.1, %n), direction=LT
}}

ENTRY %main (x: (s32[], f32[4])) -> (s32[], f32[4]) {{
  %x.1 = (s32[], f32[4]{{0}}) parameter(0)
  ROOT %w = (s32[], f32[4]{{0}}) while(%x.1), condition=%condition, body=%body
}}
'''
  [collective] = hlo_cost.read(text).collectives
  assert collective.count == trips


def test_attributes_of_a_kernel_may_take_several_lines():
  text = '''HloModule m

ENTRY %main (x: f32[8,4]) -> f32[8,8] {
  %x = f32[8,4]{1,0} parameter(0)
  %k = f32[8,4]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{}"
}}, metadata={op_name="splash"}
  ROOT %dot = f32[8,8]{1,0} dot(%k, %x), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}
'''
  cost = hlo_cost.read(text)
  assert (cost.kernel_calls, cost.matmul_flops) == (1, 2 * 8 * 8 * 4)
