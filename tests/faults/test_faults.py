"""The rows that need no second process, and the table that all of them are written to."""

import json

import jax
import numpy as np
import pytest

from sink_jax.train.checkpoint import Checkpoints
from tests.faults import __main__ as command, damage
from tests.faults.plan import Plan
from tests.faults.table import Tally


@pytest.fixture(scope='module')
def given(tmp_path_factory):
  workdir, rng = tmp_path_factory.mktemp('faults') / 'run', np.random.default_rng(0)
  checkpoints = Checkpoints(workdir)
  for step in (damage.OLDER, damage.NEWEST):
    state = jax.tree.map(lambda x: jax.device_put(
        rng.normal(size=x.shape).astype(x.dtype), x.sharding), damage.target_of())
    checkpoints.save(step, state._replace(step=state.step * 0 + step))
  checkpoints.close()
  plan = Plan(workdir.parent, rounds=2)
  return plan, damage.Saved(workdir, plan.random('tests'), resume=False)


@pytest.mark.parametrize('fault', [
    damage.checksummed, damage.checksums,
    pytest.param(damage.unchecksummed, marks=pytest.mark.full),
    pytest.param(damage.other_model, marks=pytest.mark.full)])
def test_no_damage_gives_wrong_parameters(given, fault):
  plan, source = given
  row = fault(plan, tell=lambda line: None, given=source)
  assert row['passed'], row['failures']
  assert row['tried'] >= 8


def stub(name, log, fails=False):
  def fault(plan):
    log.append(name)
    tally = Tally(name, f'{name} happens', 'nothing is lost', lambda line: None)
    tally.count('survived', lost=3)
    if fails:
      tally.fail('it did not')
    return tally.as_row()

  return fault


def test_the_table_is_written_row_by_row_and_keeps_what_passed(tmp_path, monkeypatch):
  log = []
  for name in ('JAX_COMPILATION_CACHE_DIR', 'SINK_JAX_COMPILE_CACHE'):
    monkeypatch.setenv(name, '')  # the command sets them; afterwards they are what they were

  def broken_off(plan):
    raise KeyboardInterrupt

  def go(faults, *arguments):
    with pytest.raises((SystemExit, KeyboardInterrupt)) as ended:
      command.main([str(tmp_path), '--rounds=3', *arguments], faults)
    return getattr(ended.value, 'code', None)

  rows = {'good': stub('good', log), 'bad': stub('bad', log, fails=True)}
  go(rows | {'last': broken_off})
  table = json.loads((tmp_path / 'faults.json').read_text())['rows']
  assert [(row['name'], row['passed'], row['tried']) for row in table] == [
      ('good', True, 1), ('bad', False, 2)]
  assert go(rows | {'last': stub('last', log)}) == 1
  assert log == ['good', 'bad', 'bad', 'last']  # what passed is kept
  assert go(rows | {'bad': stub('bad', log), 'last': stub('last', log)}) == 0
  assert go(rows, '--seed=1', '--only=good') == 0
  assert log[4:] == ['bad', 'good']
  text = (tmp_path / 'README.md').read_text()
  assert '| good happens | 1 | survived: 1 | 3, 3 | nothing is lost | yes |' in text
  assert 'bad happens' in text and 'NO' not in text and str(tmp_path) not in text
