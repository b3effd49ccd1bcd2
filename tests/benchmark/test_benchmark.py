"""The benchmarks at tiny sizes: rows against what they should hold, and options that are refused."""

import json
import subprocess
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sink_jax.attention.mask import Causal, Window
from sink_jax.benchmark import attention, implementations, importance, kernel_blocks, rows, timing
from sink_jax.benchmark.implementations import IMPLEMENTATIONS, Work, random_inputs
from sink_jax.benchmark.loss import plain_cross_entropy
from sink_jax.cli import main
from sink_jax.kernels import gpu_layout
from sink_jax.kernels.dispatch import attend
from sink_jax.train.loss import cross_entropy

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(jax.default_backend() != 'cpu', reason='the rows are those of a CPU')


def ended(arguments):
  """Runs a command line to its end; returns what the process would end with."""
  with pytest.raises(SystemExit) as end:
    main.run('benchmark', arguments)
  return end.value.code


@pytest.fixture
def run(tmp_path, capsys):
  """Runs a benchmark; returns the rows of its JSON, and what it printed."""
  def run(*arguments):
    path = tmp_path / 'new' / 'rows.json'
    assert not ended([*arguments, f'--json={path}', '--seed=3', '--seconds=0.01'])
    content = json.loads(path.read_text())
    assert content['machine']['matmul_tflops'] > 0 and content['options']['seed'] == 3
    return content['rows'], capsys.readouterr().out

  return run


def check_times(row, prefix=''):
  get = lambda key: row[prefix + key]
  assert get('ms') > 0 and get('vs_floor') == pytest.approx(get('ms') / get('floor_ms'))
  assert get('bound') in ('FLOPs', 'bytes')


def test_attention(run):
  found, printed = run('attention', '--shape', '1', '2', '40', '16', '--variants', 'softmax', 'k-bias',
                       '--implementations', 'chunked', 'cudnn', 'xla', 'release')
  by_name = {(row.get('variant'), row['implementation']): row for row in found}
  assert list(by_name) == [('softmax', 'chunked'), ('softmax', 'xla'), ('softmax', 'release'),
                           ('k-bias', 'chunked'), (None, 'cudnn')]
  assert by_name[None, 'cudnn']['failed'] == 'needs cuda' and 'needs cuda' in printed
  for row in found[:-1]:
    for prefix in ('forward_', 'both_'):
      check_times(row, prefix)
      assert row[f'{prefix}mb'] > 0
    assert row['forward_tflops'] == pytest.approx(2 * 2 * 40**2 * 16 / row['forward_ms'] / 1e9)
    assert row['both_tflops'] == pytest.approx(3.5 * 2 * 2 * 40**2 * 16 / row['both_ms'] / 1e9)
  library = by_name['softmax', 'xla']
  assert library['both_ratio'] == library['forward_ratio'] == 1


def test_importance(run):
  found, _ = run('importance', '--length', '32', '48', '--keys=3', '--head_dim=16')
  assert [row['keys'] for row in found] == ['T x T', 'all', 'first 3'] * 2
  for row in found:
    check_times(row)
  for same in (found[:3], found[3:]):
    np.testing.assert_allclose([row['alpha_1'] for row in same], same[0]['alpha_1'], rtol=1e-5)
  assert found[3]['map_gb'] == 4 * 48**2 / 1e9


def test_loss(run):
  (plain, ours), _ = run('loss', '--tokens', '2', '8', '--d_model=16', '--vocab=32')
  for row in (plain, ours):
    check_times(row)
    assert row['tflops'] == pytest.approx(6 * 16 * 16 * 32 / row['ms'] / 1e9)
  assert ours['loss'] == pytest.approx(plain['loss'], rel=1e-5)


def test_train_step(run):
  found, printed = run('train_step', '--size=tiny', '--batch', '2', '1', '--length=12', '--vocab=32',
                       '--variant=sigmoid', '--implementation', 'default', 'cudnn')
  assert [(row['batch'], row['implementation']) for row in found] == [
      (2, 'default'), (2, 'cudnn'), (1, 'default'), (1, 'cudnn')]
  row, failed = found[:2]
  check_times(row)
  assert row['tokens_per_second'] == pytest.approx(2 * 12 * 1000 / row['ms'])
  assert row['gb'] > 12e-9 * row['parameters']  # parameters and two moments
  assert 3 < row['loss'] < 4  # log(32) = 3.5
  assert 'NVIDIA' in failed['failed'] and 'NVIDIA' in printed


def test_block_sizes_leave_the_table_as_it_was(run, monkeypatch):
  before = {kernel: dict(table) for kernel, table in gpu_layout.BLOCKS.items()}
  monkeypatch.setattr(kernel_blocks, 'CANDIDATES', ((16, 16, 4, 1),))
  found, _ = run('attention', '--sweep', '--shape', '1', '1', '32', '16')
  assert gpu_layout.BLOCKS == before
  assert [row['kernel'] for row in found] == ['forward', 'forward', 'dq', 'dq', 'dkv', 'dkv']
  assert found[0]['own'] == before['forward'][64].own and found[0]['ratio'] == 1
  assert found[1]['own'] == 16 and found[1]['ratio'] > 0


def test_programs_are_timed_in_turns():
  made = []

  def program(name, seconds, repeats=1):
    return timing.Program(lambda: made.append(name) or time.sleep(seconds), lambda result: None, repeats)

  def broken():
    raise RuntimeError('RESOURCE_EXHAUSTED: no room')

  times, failed = timing.compare({
      'a': program('a', 0.02), 'b': program('b', 0.02, repeats=2), 'long': program('long', 0.3),
      'broken': timing.Program(broken)}, seconds=0.1)
  assert failed == {'broken': 'out of memory'}
  assert made == ['a', 'a', 'b', 'b', 'long', 'long', *9 * ['a', 'b']]
  assert [len(times[name]) for name in ('a', 'b', 'long')] == [9, 9, 1]
  assert 0.02 <= min(times['a']) and 0.01 <= min(times['b']) < 0.02


def test_the_interval_of_a_median():
  assert timing.interval([5, 1, 9, 2, 8, 3, 7, 4, 6]) == (5, 2, 8)
  assert timing.interval([3.0]) == (3.0, None, None)


def test_ratios_are_with_the_first_base_that_runs():
  def case(seconds, base=False, prefix=''):
    def prepare():
      if not seconds:
        raise MemoryError('out of memory: needs 9 of 8 GB')
      return timing.Program(lambda: time.sleep(seconds), lambda result: None)

    return rows.Case({}, prepare, 1e9, 2e9, base, prefix)

  cases = [case(0, base=True), case(0.01, base=True), case(0.001, base=True), case(0.001, True, 'other_')]
  rows.time_group(cases, 0.02, rows.Rates(flops=1e12, bytes=1e12))
  none, base, less, other = (case.row for case in cases)
  assert none == {'failed': 'out of memory: needs 9 of 8 GB'}
  assert base['ratio'] == 1 and less['ratio'] < 1
  assert less['ratio_low'] <= less['ratio'] <= less['ratio_high'] and other['other_ratio'] == 1
  assert base['floor_ms'] == 2 and base['bound'] == 'bytes'
  assert base['tflops'] == pytest.approx(1 / base['ms'])


def test_an_operation_of_a_program_that_makes_several_is_made_every_time():
  made = []

  def count(x):
    made.append(1)
    return x + 1

  # A compiler could make one call, since all have the same inputs.
  call = lambda x: jax.pure_callback(count, jax.ShapeDtypeStruct((3,), np.float32), x)
  assert jax.jit(implementations.repeated(call, 5))(np.ones(3, np.float32)) == 10
  assert len(made) == 5


@pytest.mark.parametrize('name', [name for name, one in IMPLEMENTATIONS.items()
                                  if not one.missing() and one.package == 'jax' and name != 'reference'])
def test_every_implementation_computes_the_variants_that_it_names(name):
  one = IMPLEMENTATIONS[name]
  for variant in one.variants or attention.VARIANTS:
    work = Work(attention.VARIANTS[variant], (1, 2, 24, 8), 'float32', 0)
    inputs, do = random_inputs(work)
    out, pull = jax.vjp(lambda *x: attend(work.spec, *x, implementation='reference'), *inputs)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4),
                 one.program({}, work, True).call(), (out, pull(do)))


def test_the_plain_loss_is_the_loss():
  rng = np.random.default_rng(0)
  h, w = rng.standard_normal((2, 5, 4)), rng.standard_normal((4, 7))
  arrays = jnp.float32(h), jnp.float32(w), rng.integers(0, 7, (2, 5)), jnp.ones((2, 5))
  assert float(plain_cross_entropy(*arrays)) == pytest.approx(float(cross_entropy(*arrays)))


@pytest.mark.parametrize('shape, forward, backward', [  # GFLOP, causal
    ((8, 8, 2048, 64), 34, 86), ((8, 8, 2048, 96), 52, 129), ((8, 16, 2048, 128), 137, 344)])
def test_flops_of_attention(shape, forward, backward):
  one, both = attention.attention_flops(shape, Causal())
  assert round(one / 1e9) == forward and round((both - one) / 1e9) == backward


def test_a_window_counts_what_it_leaves():
  assert attention.scores(2048, Window(size=256)) == 256 * 2048 - 256**2 / 2
  assert attention.scores(2048, Window(size=4096)) == attention.scores(2048, Causal()) == 2048**2 / 2


def test_flops_of_importance():
  one_head = (1, 1, 131072, 128)
  both = importance.importance_flops(one_head, Causal())
  assert both / 2 == pytest.approx(2.2e12, rel=0.01)  # per pass
  assert importance.importance_flops(one_head, Causal(), keys=4) == both / 2 + 2 * 128 * 131072 * 4


@pytest.mark.parametrize('arguments, name', [
    (['attention', '--shape', '8', '8', '0', '64'], '--shape'),
    (['attention', '--variants', 'tanh'], '--variants'),
    (['attention', '--implementations', 'flash3'], '--implementations'),
    (['attention', '--implementations', 'xla', '--variants', 'sigmoid'], '--implementations=xla'),
    (['attention', '--sweep', '--variants', 'softmax', 'sigmoid'], '--sweep'),
    (['attention', '--sweep', '--implementations', 'xla'], '--sweep'),
    (['importance', '--variant=tanh'], '--variant'), (['importance', '--length', '2'], '--keys=4'),
    (['train_step', '--size=70b'], '13b'), (['train_step', '--implementation', 'flash'], 'chunked'),
    (['train_step', '--variant', 'tanh'], '--variant'), (['loss', f'--json={ROOT}'], '--json')])
def test_options_that_do_not_fit_are_refused(arguments, name):
  text = ended(arguments)
  assert text.startswith('error: ') and name in text and '\n' not in text


def test_the_script_of_a_gpu_skips_what_is_there(tmp_path):
  dry = lambda: subprocess.run(['bash', ROOT / 'launch' / 'gpu.sh', '--dry_run', tmp_path], check=True,
                               capture_output=True, text=True).stdout
  words = ('test_device.py', 'benchmark attention', 'benchmark loss', 'benchmark importance',
           'benchmark train_step', 'sweep', 'report')
  assert [word for word in words if word in dry()] == list(words)
  (tmp_path / 'loss.json').touch()
  (tmp_path / 'kernels.passed').touch()
  assert 'benchmark loss' not in dry() and 'test_device' not in dry() and 'benchmark importance' in dry()
