"""What the compiled training step spends on residuals, on the loss and between devices."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from tests.compile import count as command, targets
from tests.compile.step_counts import count
from tests.compile.step_program import Step, compile_step

WHERE = dict(targets.TOPOLOGIES, h200='h200')
SIXTEEN = {'v5e': 'v5e:4x4', 'v5p': 'v5p:2x2x4', 'v6e': 'v6e:4x4', 'v7x': 'tpu7x:2x2x2'}


def counts(step):
  compiled = compile_step(step)
  found = count(compiled.as_text(), step.layers, step.sequences, step.length, step.blocks,
                step.unembedding)
  assert found['unknown_loops'] == 0
  return found | {'temporaries': targets.memory(compiled).temporaries}


@pytest.mark.parametrize('layers', [2, pytest.param(10, marks=pytest.mark.full)])
def test_no_residual_is_copied_into_a_stack(target, layers, note):
  found = counts(Step(WHERE[target], 4, layers=layers, vocab=8192))
  note(target=target, layers=layers, **found)
  assert found['filled_stacks'] == 0
  assert found['copied_residuals'] == 0
  assert 0 <= found['loss_waste'] < .01


@pytest.mark.parametrize('sequences', [1, 2, 4, 8])
def test_the_loss_wastes_no_products(target, sequences, note):
  found = counts(Step(WHERE[target], sequences, part='loss'))
  note(target=target, sequences=sequences, **found)
  assert 0 <= found['loss_waste'] < .01


def test_gradients_cross_the_data_axis_once_a_step(tpu, note):
  """Eight micro-batches send what one does: an eighth of what reducing each of them would."""
  step = Step(SIXTEEN[tpu], 1, layers=2, vocab=8192, length=512, microbatches=8)
  parts, whole = counts(step), counts(dataclasses.replace(step, microbatches=1))
  note(target=tpu, eight=parts, one=whole)
  assert whole['sent'] > 0
  assert 7 * parts['sent'] <= 8 * whole['sent']


@pytest.mark.parametrize('unroll, spent', [(1, True), (3, False)])
def test_stacks_of_a_loop_are_seen(unroll, spent):
  """On the CPU, whose compiler fills stacks and copies into them too."""
  LAYERS, B, T, D, V = 3, 2, 16, 8, 40

  def loss(w, kernel, h):
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w) + h, None), h, w, unroll=unroll)
    return jax.nn.logsumexp(h @ kernel)

  shapes = (LAYERS, D, D), (D, V), (B, T, D)
  compiled = jax.jit(jax.grad(lambda *x: loss(*x).sum(), (0, 1, 2))).lower(
      *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).compile()
  found = count(compiled.as_text(), LAYERS, B, T, 6 * LAYERS * B * T * D**2, 6 * B * T * D * V)
  stack = 4 * LAYERS * B * T * D
  assert (found['filled_stacks'] > 0, found['filled_stacks'] % stack) == (spent, 0)
  assert found['loss_waste'] == 0  # three products with the unembedding, of all positions
  with pytest.raises(ValueError, match='must differ'):
    count('', 2, 2, T, 1, 1)


def test_rows_are_kept_and_added_one_at_a_time(tmp_path, monkeypatch, capsys):
  measured = []

  def measure(step, tree):
    measured.append((step, tree == command.ROOT))
    keys = {key for columns in command.COLUMNS.values() for key, *_ in columns}
    return dict.fromkeys(keys, len(measured))

  def run(*options):
    monkeypatch.setattr('sys.argv', ['count', f'--out={tmp_path}', *options])
    command.main()
    return json.loads((tmp_path / 'compiled.json').read_text())

  monkeypatch.setattr(command, 'measure', measure)
  monkeypatch.setattr(command, 'archived', lambda commit, folder: tmp_path)
  monkeypatch.setenv('COMPILERS', str(tmp_path))
  run('--only=h200', '--at=877ade5')
  rows = run('--only=h200,v5e-loss-1')
  assert list(rows) == ['h200 at 877ade5', 'h200 at now', 'v5e-loss-1 at now']
  assert measured == [(command.CASES['h200'], False), (command.CASES['h200'], True),
                      (command.CASES['v5e-loss-1'], True)]
  assert run('--only=h200') == rows and len(measured) == 3
  assert run('--only=h200', '--new')['h200 at now']['products'] == 4
  lines = (tmp_path / 'README.md').read_text().splitlines()
  assert [line[:20] for line in lines if line.startswith(('| h200', '| v5e'))] == [
      '| h200 | 877ade5 | 1', '| h200 | now | 16 | ', '| v5e-loss-1 | now |']
  with pytest.raises(SystemExit):
    run('--only=h100')
  assert '--only=h100: no such case: h100; choices: h200, ' in capsys.readouterr().err


def test_the_committed_table_is_that_of_the_committed_rows():
  folder = command.ROOT / 'results/compiled'
  assert (folder / 'README.md').read_text() == command.table(command.read(folder))
