"""The commands at tiny sizes: tables, JSON, rows that fail, options that are refused."""

import dataclasses
import json
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sink_jax.attention.spec import AttentionSpec
from sink_jax.benchmark import (
  attention,
  baselines,
  baselines_torch,
  official,
  records,
  sweep,
  table,
  timing,
  train_step,
)
from sink_jax.benchmark.loss import plain_cross_entropy
from sink_jax.benchmark.variants import PAPER, VARIANTS
from sink_jax.benchmark.work import Work
from sink_jax.cli import command
from sink_jax.kernels import gpu_layout
from sink_jax.kernels.dispatch import attend
from sink_jax.train.loss import cross_entropy
from tests import attention_specs

ROOT = pathlib.Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    jax.default_backend() != 'cpu', reason='the rows are those of a CPU')

MACHINE = {'date', 'hardware', 'device_kind', 'device_count', 'jax', 'jaxlib', 'python', 'driver',
           'platform_version', 'command', 'seed', 'matmul_tflops', 'dtype'}
OPTIONAL = {'matmul_tflops', 'dtype'}  # where no number is compared with that rate
TIMING = ('ms', 'min_ms', 'spread_ms', 'repetitions', 'calls')


def main(arguments):
  """Runs a command line to its end; returns the exit code."""
  with pytest.raises(SystemExit) as end:
    command.run('benchmark', arguments)
  return end.value.code


# Trials of two tasks, and of one without softmax.
TABLE = '''
from configs import base
from tests.train.runs import SMALL

TRIALS = {'a-softmax': SMALL | {'data.source': 'TriggerAveraging(length=16)'},
          'a-relu': SMALL, 'a-log-length': SMALL | {'data.source': 'TriggerAveraging(length=16)',
                                   'attention.temperature': 'LogLength()'},
          'b-muon': SMALL | {'optimizer.rule': 'Muon()'}, 'b-softmax': SMALL,
          'x-softpick': SMALL}


def get_config(name):
  return base.trial(TRIALS, name)
'''


@pytest.fixture
def run(tmp_path, capsys):
  """Runs a command; returns its document, read back from JSON, and what it printed."""
  def run(command, *arguments):
    path = tmp_path / f'{command}.json'
    assert main([command, *arguments, f'--json={path}', '--seed=3']) == 0
    result = json.loads(path.read_text())
    printed = capsys.readouterr().out
    document = records.document_from_json(result)
    assert document.to_json() == result
    assert printed == table.render(document) + '\n'
    assert main(['show', str(path)]) == 0
    assert capsys.readouterr().out == printed
    assert result['command'] == command and result['complete'] and result['notes']
    assert MACHINE - OPTIONAL <= set(result['machine']) and result['machine']['seed'] == 3
    return result, printed

  return run


def assert_timed(row, *names):
  for name in names:
    for entry in TIMING:
      assert row[f'{name}_{entry}'] >= 0
    assert 0 < row[f'{name}_min_ms'] <= row[f'{name}_ms']


def test_attention(run):
  result, printed = run('attention', '--shape', '1,2,40,16', '--seconds=0.01',
                        '--variants=softmax,k-bias', '--implementations=chunked',
                        '--rivals=release,cudnn,xla')
  rows = {(row['variant'], row['implementation']): row for row in result['rows']}
  assert len(rows) == len(result['rows']) == 8
  for variant in ('softmax', 'k-bias'):
    assert 'NVIDIA' in rows[variant, 'cudnn']['failed']
    for name in ('chunked', 'release'):
      row = rows[variant, name]
      assert_timed(row, 'forward', 'both')
      assert row['both_bytes'] > 0 and row['forward_bytes'] > 0
      assert row['both_flops'] == 3.5 * row['forward_flops'] == 3.5 * 2 * 2 * 40**2 * 16
      assert row['both_tflops'] == pytest.approx(row['both_flops'] / row['both_ms'] / 1e9)
      library = rows['softmax', 'xla']
      assert row['both_vs_library'] == pytest.approx(row['both_ms'] / library['both_ms'])
  assert 'softmax, causal or in a window' in rows['k-bias', 'xla']['failed']
  assert rows['softmax', 'xla']['both_vs_library'] == 1
  assert printed.count('needs an NVIDIA GPU, not cpu') == 2


def test_our_kernels_are_left_out_on_a_cpu_and_the_table_says_so(run):
  result, printed = run('attention', '--shape', '1,1,16,16', '--seconds=0.01',
                        '--variants=sigmoid', '--rivals=none')
  assert [row['implementation'] for row in result['rows']] == ['chunked']
  assert "'pallas' is left out" in printed and '--implementations=pallas' in printed


def test_without_names_only_what_fits_and_once_what_is_missing():
  cases = attention.plan([(1, 1, 16, 16)], ['all'], ['all'], None, 'float32', 0)
  names = {(case.variant, case.implementation) for case in cases}
  assert ('linear', 'linear') in names and ('softmax', 'linear') not in names
  assert ('softmax', 'cudnn') in names and ('window', 'cudnn') not in names
  assert ('sigmoid', 'xla') not in names and ('window', 'xla') in names
  assert {name for _, name in names} == set(baselines.BASELINES) - {'pallas'}


def test_a_row_that_breaks_down_says_why(monkeypatch):
  def broken(name, work):
    raise RuntimeError('RESOURCE_EXHAUSTED: no room')

  monkeypatch.setattr(baselines, 'prepare', broken)
  saved = []
  result = attention.run([(1, 1, 16, 16)], ['softmax'], ['xla'], ['chunked'], 'float32', 0, 0.01,
                         save=lambda result: saved.append(result.complete))
  assert [row.failed for row in result.rows] == ['out of memory'] * 2
  assert saved == [False, False] and result.complete
  assert 'out of memory' in table.render(result)


def test_a_call_of_a_program_that_makes_several_is_made_every_time():
  made = []

  def count(x):
    made.append(1)
    return x + 1

  # A compiler could make one call, since all have the same inputs.
  call = lambda x: jax.pure_callback(count, jax.ShapeDtypeStruct((3,), np.float32), x)
  assert jax.jit(baselines.repeated(call, 5))(np.ones(3, np.float32)) == 10
  assert len(made) == 5
  work = Work(AttentionSpec(), (1, 1, 16, 16), 'float32', 0)
  assert attention._calls(work, 1e12) == 20 and attention._calls(work, None) == 1
  assert attention._calls(work._replace(shape=(8, 16, 2048, 128)), 8e14) == 1
  assert attention._calls(work._replace(shape=(8, 8, 2048, 64)), 8e14) == 20


def test_rows_for_which_there_is_no_time_are_named():
  result = attention.run([(1, 1, 16, 16)], ['softmax'], ['xla'], ['chunked'], 'float32', 0, 0.01,
                         limit=-1)
  assert not result.rows and len(result.not_run) == 2
  assert '2 rows were not run' in table.render(result)


def test_group(run, capsys):
  result, printed = run('group', '--trials', '2', '--batch=2', '--length=16', '--steps=2',
                        '--dtype=float32')
  row, = result['rows']
  assert row['trials'] == 2 and row['group_ms'] > 0 and row['alone_ms'] > 0
  assert row['ratio'] == pytest.approx(row['group_ms'] / row['alone_ms'])
  assert '--steps=51 must be at most 50' in main(['group', '--steps=51'])


def test_trials_are_timed_in_turns_with_softmax(run, tmp_path):
  config = tmp_path / 'table.py'
  config.write_text(TABLE)
  result, printed = run('trials', f'--config={config}', '--only=b,a-log-length', '--seconds=0.001')
  rows = {(row['task'], row['variant']): row for row in result['rows']}
  assert list(rows) == [('a', 'softmax'), ('a', 'log-length'), ('b', 'softmax'), ('b', 'muon')]
  for row in rows.values():
    assert_timed(row, 'step', 'softmax')
    assert 0 < row['ratio_low'] <= row['ratio'] <= row['ratio_high']
    assert row['step_repetitions'] == row['softmax_repetitions'] == row['pairs']
  more = lambda task, of: rows[task, of]['parameters'] - rows[task, 'softmax']['parameters']
  assert more('b', 'muon') == 0 and more('a', 'log-length') > 0
  for task, words in (('c', '--only=c: the config file has no such'),
                      ('x', 'no trial x-softmax')):
    assert words in main(['trials', f'--config={config}', f'--only={task}'])


def test_importance(run):
  result, _ = run('importance', '--length', '32', '48', '--seconds=0.01', '--keys=3',
                  '--head_dim', '16')
  rows = {(row['shape'], row['what']): row for row in result['rows']}
  assert set(what for _, what in rows) == {'all keys', 'first 3 keys', 'T x T'} and len(rows) == 6
  for row in rows.values():
    assert_timed(row, 'call')
    assert row['bytes'] > 0 and row['tflops'] > 0
    assert row['seconds'] == row['call_ms'] / 1000
  for shape in ('1,1,32,16', '1,1,48,16'):
    first = [rows[shape, what]['alpha_1'] for what in ('all keys', 'first 3 keys', 'T x T')]
    np.testing.assert_allclose(first, first[2], rtol=1e-5)
  assert rows['1,1,48,16', 'T x T']['map_gb'] == 4 * 48**2 / 1e9


def test_loss(run):
  result, _ = run('loss', '--tokens=2,8', '--d_model=16', '--vocab=32', '--seconds=0.01')
  ours, plain = result['rows']
  for row in (ours, plain):
    assert_timed(row, 'both')
    assert row['bytes'] > 0 and row['flops'] == 6 * 16 * 16 * 32
  assert ours['loss'] == pytest.approx(plain['loss'], rel=1e-5)
  assert plain['vs_plain'] == 1 and ours['vs_plain'] == ours['both_ms'] / plain['both_ms']


def test_train_step(run):
  result, printed = run(
      'train_step', '--size=tiny', '--batch', '2', '--length=12', '--vocab=32', '--steps=3',
      '--attention.similarity=Sigmoid', '--attention.normalizer=Unnormalized()',
      '--implementation=default,cudnn', '--unroll=2')
  assert [(row['remat'], row['unroll']) for row in result['rows']] == [('none', 2)] * 2
  row, failed = result['rows']
  assert_timed(row, 'step')
  assert row['implementation'] == 'chunked (default)' and row['loss'] < row['loss_after_warmup']
  assert row['tokens_per_second'] == pytest.approx(2 * 12 * 1000 / row['step_ms'])
  per_token, peak = result['machine']['flops_per_token'], result['machine']['matmul_tflops']
  assert row['mfu'] == pytest.approx(row['tokens_per_second'] * per_token / peak / 1e12)
  assert row['vs_floor'] == pytest.approx(1 / row['mfu'])
  assert row['mfu_datasheet'] is None and row['mfu_datasheet_text'] == 'n/a'
  assert row['bytes'] > 12 * result['machine']['parameters']  # parameters and two moments
  assert 'NVIDIA' in failed['failed']
  assert result['options']['attention']['similarity'] == 'Sigmoid()' and 'no peak' in printed


def test_the_first_batch_is_timed_with_every_implementation_first(run, monkeypatch):
  step = timing.Timing(1.0, 1.0, 0.0, 3, 1)
  monkeypatch.setattr(train_step, '_timed',
                      lambda row, *arguments: dataclasses.replace(row, step=step))
  result, _ = run('train_step', '--size=tiny', '--batch', '2', '1', '--length=8', '--vocab=32',
                  '--implementation=reference,chunked')
  assert [(row['batch'], row['implementation']) for row in result['rows']] == [
      (2, 'reference'), (2, 'chunked'), (1, 'reference'), (1, 'chunked')]


def test_sweep_leaves_the_table_as_it_was():
  before = {kernel: dict(table) for kernel, table in gpu_layout.BLOCKS.items()}
  result = sweep.run([(1, 1, 32, 16)], 'softmax', 0, 0.001, kernels=('forward',),
                     candidates=((16, 16, 4, 1), (16, 12, 4, 1)))
  assert gpu_layout.BLOCKS == before
  assert [row.own for row in result.rows] == [before['forward'][64].own, 16, 16]
  assert result.rows[0].call and result.rows[1].call
  assert sum(row.best == 'best' for row in result.rows) == 1
  assert "'forward': {16: Blocks(" in result.notes[-1]


def test_the_best_blocks_are_those_of_a_shape():
  def row(kernel, length, own, milliseconds):
    call = timing.Timing(milliseconds, milliseconds, 0.0, 3, 1)
    return records.SweepRow(shape=f'1,1,{length},64', head_dim=64, kernel=kernel, own=own, other=64,
                            warps=4, stages=3, call=call)

  # A long shape takes longer with every choice of blocks, which says nothing of a short one.
  rows = sweep._mark_best([
      row('dq', 32, 64, 1.0), row('dq', 32, 128, 2.0), row('dq', 64, 64, 9.0),
      row('dq', 64, 128, 8.0), row('dkv', 32, 64, 1.0), row('dkv', 32, 128, 2.0),
      row('dkv', 64, 64, 8.0), row('dkv', 64, 128, 9.0)])
  assert [number for number, own in enumerate(rows) if own.best] == [0, 3, 4, 6]
  said, table = sweep.paste(rows)
  assert said == ('dq at head dimension 64: the best blocks depend on the shape (Blocks(64, 64, 4, '
                  '3) at 1,1,32,64; Blocks(128, 64, 4, 3) at 1,1,64,64): choose by the shape that '
                  'matters.')
  assert table.endswith(":\n    'dkv': {64: Blocks(64, 64, 4, 3)},")


@pytest.mark.parametrize('arguments, said', [
    (['attention', '--shape', '8,8,2048'], '--shape=8,8,2048: write 4 numbers'),
    (['attention', '--shape', '8,8,0,64'], '--shape=8,8,0,64 must be at least 1'),
    (['attention', '--variants=softmax,tanh'], "--variants: unknown 'tanh'. Choices: all, softmax"),
    (['attention', '--rivals=flash3'], '--rivals: unknown'),
    (['attention', '--implementations=cudnn'], '--implementations: unknown'),
    (['attention', '--seconds=0'], 'not greater than 0'),
    (['importance', '--variant=tanh'], '--variant: unknown'),
    (['importance', '--length', '2'], '--keys=4'),
    (['loss', '--tokens=8'], '--tokens=8: write 2 numbers'),
    (['train_step', '--size=70b'], 'tiny, 60m, 1b, 7b, 13b'),
    (['train_step', '--implementation=flash'], 'chunked'),
    (['train_step', '--attention.mask=Block()'], 'Causal'),
    (['correctness', '--share=4/4'], '0/4'),
    (['correctness', '--variants', 'tanh'], 'Choices'),
    (['speed'], 'train_step'),
    (['attention', '--sweep', '--rivals=cudnn'], '--sweep times block sizes'),
    (['attention', '--sweep', '--variants=softmax,sigmoid'], 'one variant'),
    (['attention', '--sweep', '--variants=none'], 'one variant: --variants=softmax'),
    (['check', '--parts=loss', '--tolerance=0.1'], 'not among --parts'),
    (['correctness', '--tolerance=-2'], 'from 0 on'), (['loss', '--seed=-1'], 'between 0 and'),
])
def test_options_that_do_not_fit_are_refused_with_the_remedy(arguments, said):
  assert re.match(f'error: .*{re.escape(said)}', main(arguments))


@pytest.mark.parametrize('name', VARIANTS)
def test_the_official_computation_gives_the_same_or_says_why_not(name):
  spec = VARIANTS[name]
  (q, k, v, params), _ = baselines.random_inputs(Work(spec, (1, 2, 24, 8), 'float32', 0))
  if name == 'softpick':
    with pytest.raises(NotImplementedError, match='official code has no Softpick'):
      official.attend(spec, q, k, v, params)
    return
  expected = attend(spec, q, k, v, params, implementation='reference')
  np.testing.assert_allclose(official.attend(spec, q, k, v, params), expected, rtol=1e-4, atol=1e-5)


def test_what_compares_with_softmax_knows_that_a_cap_is_another_operation():
  capped = AttentionSpec('CappedExp()')
  assert not any(baseline.covers(capped) for baseline in baselines.BASELINES.values()
                 if baseline.kind == 'library')
  assert not official.covers(capped) and not baselines_torch.eager_covers(capped)


def test_the_plain_loss_is_the_loss():
  rng = np.random.default_rng(0)
  h, w = rng.standard_normal((2, 5, 4)), rng.standard_normal((4, 7))
  arrays = jnp.float32(h), jnp.float32(w), rng.integers(0, 7, (2, 5)), jnp.ones((2, 5))
  assert float(plain_cross_entropy(*arrays)) == pytest.approx(float(cross_entropy(*arrays)))


def test_all_that_the_paper_trains_is_checked():
  # Position embeddings are added before attention, which then is that of NoPE.
  same = {'absolute (Table 3)', 'learnable (Table 3)'}
  kinds = lambda specs: {tuple(type(x).__name__ for x in vars(spec).values()) for spec in specs}
  wanted = [spec for name, spec in attention_specs.PAPER.items() if name not in same]
  assert kinds(wanted) <= kinds(PAPER.values())


def test_no_number_of_a_document_is_lost(tmp_path):
  row = lambda what, **numbers: records.LossRow(shape='1', what=what, **numbers)
  result = records.Document(
      'loss', {'hardware': 'h', 'jax': '1', 'date': 'd', 'command': 'c'}, {},
      [records.Column('what', 'A'), records.Column('loss', 'B', '.1f'), records.Column('note', '')],
      [row('one', loss=math.pi), row('two', failed='x' * 500)], ['n'])
  table.write_json(result.to_json(), tmp_path / 'new' / 'x.json')
  again = records.document_from_json(json.loads((tmp_path / 'new' / 'x.json').read_text()))
  assert again == result and table.render(again) == table.render(result)
  assert '3.1' in table.render(result) and 'x...' in table.render(result)
  assert '| two | - | xxx' in table.markdown(result)
  with pytest.raises(ValueError):
    table.write_json(row('three', loss=math.nan).to_json(), tmp_path / 'nan.json')


@pytest.mark.parametrize('path', sorted((ROOT / 'results' / 'benchmark_cpu').glob('*.json')))
def test_stored_documents_are_read_whole(path):
  stored = json.loads(path.read_text())
  assert records.document_from_json(stored).to_json() == stored


def test_documents_of_another_kind_are_refused():
  with pytest.raises(ValueError, match='not one of attention, importance'):
    records.document_from_json({'command': 'speed'})
  with pytest.raises(ValueError, match='LossRow has no speed'):
    records.row_from_json(records.LossRow, {'shape': '1', 'what': 'a', 'speed': 1})
  with pytest.raises(ValueError, match='what'):
    records.row_from_json(records.LossRow, {'shape': '1'})
