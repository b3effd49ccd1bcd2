"""The benchmarks at tiny sizes: what their rows contain, and which options are refused."""

import functools
import json
import statistics
import subprocess
import time

import jax
import numpy as np
import pytest

from sink_jax.attention.mask import Causal, Prefix, Window
from sink_jax.benchmark import attention, implementations, measure
from sink_jax.benchmark.implementations import IMPLEMENTATIONS, Work, random_inputs
from sink_jax.kernels.dispatch import attend
from sink_jax.models.sizes import visible_flops
from tests.attention_checks import worst_error
from tests.commands import run_here
from tests.documents import ROOT

pytestmark = pytest.mark.skipif(jax.default_backend() != 'cpu', reason='rows are those of a CPU')


NOT_RUN = 'does not fit'
RATES = functools.cache(measure.measured_rates)


@pytest.fixture(autouse=True)
def _rates_measured_once(monkeypatch):
  monkeypatch.setattr(measure, 'measured_rates', RATES)


@pytest.fixture
def run(tmp_path):
  """Runs a benchmark; returns the rows of its JSON and the printed text."""

  def run(*arguments):
    path = tmp_path / 'new' / 'rows.json'
    code, out, error = run_here('benchmark', *arguments, f'--json={path}', '--seconds=0.01')
    assert code == 0, error
    content = json.loads(path.read_text())
    assert content['machine']['matmul_tflops'] > 0 and content['options']['seconds'] == 0.01
    for row in content['rows']:
      if 'failed' not in row:
        assert row['ms'] > 0 and row['vs_floor'] == pytest.approx(row['ms'] / row['floor_ms'])
        assert row['bound'] in ('FLOPs', 'bytes')
    return content['rows'], out

  return run


def test_attention(run):
  found, printed = run(
    *'attention --shape 1 2 40 16 --variants softmax k-bias'.split(),
    *'--implementations chunked cudnn xla release'.split(),
  )
  assert [(row.get('passes'), row.get('variant'), row['implementation']) for row in found] == [
    *(
      (passes, *names)
      for passes in ('forward', 'both')
      for names in (
        ('softmax', 'chunked'),
        ('softmax', 'xla'),
        ('softmax', 'release'),
        ('k-bias', 'chunked'),
      )
    ),
    (None, None, 'cudnn'),
  ]
  assert found[-1]['failed'] == 'needs cuda' and 'needs cuda' in printed
  for row, times in zip(found, 4 * [1] + 4 * [3.5]):
    assert row['mb'] > 0
    # Two products of two FLOPs of 2 heads with 16 channels, for 40 (40 + 1) / 2 scores.
    assert row['tflops'] == pytest.approx(times * 4 * 2 * 16 * 820 / row['ms'] / 1e9)
  assert found[1]['ratio'] == found[5]['ratio'] == 1


def test_importance(run):
  plain, streamed = run('importance', '--length', '32')[0]
  assert (plain['form'], streamed['form']) == ('T x T', 'streamed')
  np.testing.assert_allclose(plain['alpha_1'], streamed['alpha_1'], rtol=1e-5)
  # One product for each of the 32 (32 + 1) / 2 scores that the mask leaves.
  assert plain['tflops'] == pytest.approx(2 * 64 * 528 / plain['ms'] / 1e9)


def test_loss(run):
  plain, ours = run('loss', '--shape', '2', '8', '16', '32')[0]
  for row in (plain, ours):
    assert row['tflops'] == pytest.approx(6 * 16 * 16 * 32 / row['ms'] / 1e9)
  assert ours['loss'] == pytest.approx(plain['loss'], rel=1e-5)


def test_train_step(run):
  options = '--size=tiny --batch 2 --length=12 --vocab=32 --implementation default cudnn'
  (row, failed), printed = run('train_step', *options.split())
  assert [(one['batch'], one['implementation']) for one in (row, failed)] == [
    (2, 'default'),
    (2, 'cudnn'),
  ]
  assert row['tokens_per_second'] == pytest.approx(2 * 12 * 1000 / row['ms'])
  assert row['gb'] > 12e-9 * row['parameters']  # parameters and two moments
  assert 3 < row['loss'] < 4  # log(32) = 3.5
  assert 'NVIDIA' in failed['failed'] and 'NVIDIA' in printed


def test_programs_are_timed_in_turns():
  made = []

  def program(name, seconds, repeats=1):
    call = lambda: made.append(name) or time.sleep(seconds)
    return measure.Program(call, lambda result: None, repeats)

  def broken():
    raise RuntimeError('RESOURCE_EXHAUSTED: no room')

  times, failed = measure.compare(
    {
      'a': program('a', 0.02),
      'b': program('b', 0.02, repeats=2),
      'long': program('long', 0.3),
      'broken': measure.Program(broken),
    },
    seconds=0.1,
  )
  assert failed == {'broken': 'out of memory'}
  assert made == ['a', 'a', 'b', 'b', 'long', 'long', *measure.ROUNDS * ['a', 'b']]
  assert [len(times[name]) for name in ('a', 'b', 'long')] == [measure.ROUNDS, measure.ROUNDS, 1]
  assert 0.02 <= min(times['a']) and 0.01 <= min(times['b']) < 0.02


def test_an_operation_of_a_program_that_makes_several_is_made_every_time():
  made = []

  def count(x):
    made.append(1)
    return x + 1

  # All inputs are the same, so a compiler could merge the calls into one.
  call = lambda x: jax.pure_callback(count, jax.ShapeDtypeStruct((3,), np.float32), x)
  assert jax.jit(implementations.repeated(call, 5))(np.ones(3, np.float32)) == 10
  assert len(made) == 5


@pytest.mark.parametrize(
  'name, variant, backward',
  [
    ('chunked', 'k-bias', True),
    *(('xla', variant, False) for variant in IMPLEMENTATIONS['xla'].variants),
    *(('release', variant, False) for variant in IMPLEMENTATIONS['release'].variants),
  ],
)
def test_implementations_compute_the_variants_that_they_name(name, variant, backward):
  work = Work(attention.VARIANTS[variant], (1, 2, 24, 8), 'float32', backward)
  inputs, do = random_inputs(work)

  @jax.jit
  def definition(*inputs):
    out, pull = jax.vjp(lambda *x: attend(work.spec, *x, implementation='reference'), *inputs)
    return (out, pull(do)) if backward else out

  found = IMPLEMENTATIONS[name].program({}, work).call()
  assert worst_error(found, definition(*inputs)) < 1e-4


@pytest.mark.parametrize('mask', [Causal(), Window(size=5), Window(size=99), Prefix(length=4)])
def test_flops_count_the_scores_that_a_mask_leaves(mask):
  i, j = np.ogrid[:20, :20]
  assert visible_flops(mask, 20, 24) == 4 * 24 * np.sum(mask.keep(i, j) & (j < 20))


@pytest.mark.parametrize(
  'arguments, name',
  [
    (['attention', '--shape', '8', '8', '0', '64'], '--shape'),
    (['attention', '--implementations', 'xla', '--variants', 'sigmoid'], '--implementations=xla'),
    (['train_step', '--size=70b'], '13b'),
    (['loss', f'--json={ROOT}'], '--json'),
  ],
)
def test_options_that_do_not_fit_are_refused(arguments, name):
  code, _, text = run_here('benchmark', *arguments, '--seconds=0.01')
  assert code == 1 and name in text.splitlines()[-1] and text.splitlines()[-1].startswith('error: ')


def test_the_script_of_a_gpu_skips_what_is_there(tmp_path):
  command = ['bash', ROOT / 'launch' / 'gpu.sh', '--dry_run', tmp_path]
  dry = lambda: subprocess.run(command, check=True, capture_output=True, text=True).stdout
  words = (
    'test_device.py',
    'benchmark attention',
    'benchmark loss',
    'benchmark importance',
    'benchmark train_step',
    'sweep',
    'report',
  )
  assert [word for word in words if word in dry()] == list(words)
  (tmp_path / 'loss.json').touch()
  (tmp_path / 'kernels.passed').touch()
  assert 'benchmark loss' not in dry() and 'test_device' not in dry()
  assert 'benchmark importance' in dry()


def _shown(seconds):
  return f'{seconds:.0f} s' if seconds >= 100 else f'{seconds:.1f} s'


def test_the_pages_have_the_numbers_of_long_texts():
  page = (ROOT / 'results/benchmark_cpu/README.md').read_text()
  rows = json.loads((ROOT / 'results/benchmark_cpu/long_texts.json').read_text())['rows']
  for row in rows:
    ours, theirs = row['ours'], row['theirs']
    after = [statistics.median(side['seconds'][1:]) for side in (ours, theirs) if side != NOT_RUN]
    assert f'{row["tokens"]:,} | {_shown(after[0])}, {ours["gb"]:.1f} GB' in page
    if theirs == NOT_RUN:
      assert f'{NOT_RUN}: its maps are {row["maps_gb"]:.0f} GB | {100 * ours["sink_1"]:.1f}' in page
      said = f'{row["tokens"]:,} tokens takes {after[0]:.0f} s and {ours["gb"]:.1f} GB'
      assert said in (ROOT / 'README.md').read_text()
      continue
    assert f'{_shown(after[1])}, {theirs["gb"]:.1f} GB' in page
    np.testing.assert_allclose(ours['sink_1'], theirs['sink_1'], atol=1e-6)
