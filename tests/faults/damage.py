"""Files of a checkpoint that are not as they were written, and checkpoints of other models."""

from __future__ import annotations

import contextlib
import io
import logging
import shutil
from pathlib import Path

import jax
import numpy as np

from sink_jax.data.dataset import open_data
from sink_jax.train.checkpoint import CheckpointError, Checkpoints, restore_params
from sink_jax.train.checkpoint import saved_steps, step_folder
from sink_jax.train.config import from_dict
from sink_jax.train.probe_tokens import read_probe_tokens, write_probe_tokens
from sink_jax.train.record import read_record
from sink_jax.train.workdir import read_status, settle_finished
from sink_jax.train.sharding import make_mesh
from sink_jax.train.step import state_layout
from tests.faults.jobs import Job, compared, same, state_of
from tests.faults.table import Tally
from tests.train import runs

WAYS = ('one bit flipped', 'truncated', 'emptied', 'missing')
OLDER, NEWEST = 4, 8
_OTHERS = {
    'a wider ffn': dict(model__ffn_hidden=32), 'a wider model': dict(model__d_model=32),
    'more layers': dict(model__layers=3), 'fewer layers': dict(model__layers=1),
    'another ffn': dict(model__ffn='gelu'), 'another norm': dict(model__norm='layernorm'),
    'a key bias': dict(attention__kv_bias='KBias()'), 'a sink token': dict(model__sink_tokens=1),
    'a larger vocabulary': dict(model__vocab_size=300), 'sgd': dict(optimizer__rule='Sgd()'),
    'no clipping': dict(optimizer__clip=0.0), 'fewer key heads': dict(model__kv_heads=1),
}


def target_of(**changes):
  """The layout of the state of the small run on one device."""
  experiment = from_dict(runs.config(**changes))
  data = open_data(experiment.data)
  model = experiment.model_config(data.vocab_size, data.input_features, data.output_features)
  return state_layout(model, experiment.optimizer, make_mesh(data=1))


class Saved:
  """A finished small run, copies of it with damage, and what they restore."""

  def __init__(self, workdir, random, resume=True):
    """resume: also restores what a run would go on from, optimizer included."""
    self.workdir, self.random, self._resume = Path(workdir), random, resume
    self.states = {step: state_of(workdir, step) for step in (OLDER, NEWEST)}
    self.target = target_of()
    self.folder = step_folder(workdir, NEWEST)
    self.files = sorted(str(p.relative_to(self.folder)) for p in self.folder.rglob('*')
                        if p.is_file())

  @contextlib.contextmanager
  def copy(self):
    copy = self.workdir.with_name(f'{self.workdir.name}-copy')
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(self.workdir, copy)
    yield copy
    shutil.rmtree(copy)

  def harm(self, path, way):
    """Damages a file; False if it has nothing to damage in this way."""
    data = bytearray(path.read_bytes())
    if way == 'missing':
      path.unlink()
      return True
    if not data:
      return False
    place = int(self.random.integers(len(data)))
    if way == 'one bit flipped':
      data[place] ^= 1 << int(self.random.integers(8))
      place = len(data)
    path.write_bytes(data[:0 if way == 'emptied' else place])
    return True

  def restored(self, workdir):
    """(step, what was told) of what both ways to read give, after checking every value.

    Raises AssertionError if any value is not the one that was saved at that step.
    """
    with _told() as told:
      step, params = restore_params(workdir, self.target.params)
    assert same(params, self.states[step]['params']), f'wrong parameters of step {step}'
    if not self._resume:
      return step, ' '.join(told)
    checkpoints = Checkpoints(workdir)
    state = checkpoints.restore(self.target)
    checkpoints.close()
    # What the parameters alone do not need may be what a run cannot go on without.
    assert state is not None and int(state.step) in (step, OLDER), 'two ways to read, two steps'
    step = int(state.step)
    assert same(state.params, self.states[step]['params']), f'wrong parameters of step {step}'
    assert same(state.opt_state, self.states[step]['opt_state']), f'wrong optimizer of step {step}'
    assert bool(checkpoints.damaged) == bool(step == OLDER), 'damage was not told'
    return step, ' '.join(checkpoints.damaged + told)


def saved(plan, name):
  """The small run, made by the command."""
  workdir = plan.workdir(name)
  job = Job(workdir, steps=NEWEST, checkpoint_every=OLDER)
  if job.wait() != [0]:
    raise RuntimeError(job.output())
  return Saved(workdir, plan.random(name))


def checksummed(plan, tell=None, given=None):
  """Every file of the newest checkpoint, harmed in every way."""
  tally = Tally('damage', 'a file of the newest checkpoint is damaged, each in turn',
                'the file is named, the older checkpoint used; never wrong parameters', tell)
  source = given or saved(plan, tally.name)

  def judge(workdir, name, way):
    step, told = source.restored(workdir)
    if step != OLDER or name not in told:
      return f'{name} {way}: restored {step}, told: {told}'
    tally.count(way)

  return _each(plan, tally, source, judge)


def unchecksummed(plan, tell=None, given=None):
  """The same where the job was killed before it could write the checksums."""
  tally = Tally('power-cut', 'a file is damaged, and the checksums were not written yet',
                'the older checkpoint where the newest cannot be read; never wrong parameters, '
                'but for flipped bits', tell)
  tally.notes.append('without checksums a flipped bit cannot be seen: a known limit. A power cut '
                     'does not flip bits, it leaves files short, empty or missing.')
  source = given or saved(plan, tally.name)

  def judge(workdir, name, way):
    (workdir / 'checksums' / f'{NEWEST}.json').unlink()
    try:
      step, _ = source.restored(workdir)
    except AssertionError as error:
      if way != WAYS[0] or 'wrong' not in str(error):
        raise
      return tally.count('one bit flipped: wrong values (known limit)')
    tally.count(f'{way}: older one used' if step == OLDER else f'{way}: plays no part')

  return _each(plan, tally, source, judge)


def checksums(plan, tell=None, given=None):
  """The file of checksums itself."""
  tally = Tally('damage-json', 'the file of checksums of the newest checkpoint is damaged',
                'the checkpoint is used as it is, told to be unverified; or the older one', tell)
  source = given or saved(plan, tally.name)
  total = 4 * plan.rounds
  for done in range(total):
    way = WAYS[done % len(WAYS)]
    with source.copy() as workdir:
      source.harm(workdir / 'checksums' / f'{NEWEST}.json', way)
      _judged(tally, workdir, f'checksums, {way}', lambda: _judge_sums(
          tally, way, *source.restored(workdir)))
  return tally.as_row()


def _judge_sums(tally, way, step, told):
  if not told and way != 'missing':  # a missing one is no damage: the job was killed
    return f'{way}: nothing was told'
  tally.count('older one used' if step == OLDER else
              'used, told' if told else 'used: as after a kill')


def records(plan, tell=None, given=None):
  """What a run has recorded beside its checkpoints: the rows of metrics, the probe inputs."""
  tally = Tally('damage-record', 'metrics.jsonl or probe_tokens.npy of a run is damaged',
                'rows that were changed are left out and kept in damaged/, the status says from '
                'where the record is whole; probe inputs are refused, and made again from the data',
                tell)
  source = given or saved(plan, tally.name)
  names = {'metrics.jsonl': _judge_rows, 'probe_tokens.npy': _judge_probe}
  total = 4 * plan.rounds
  for done in range(total):
    way = WAYS[done % len(WAYS)]
    for name, judge in names.items():
      with source.copy() as workdir:
        before = (workdir / name).read_bytes()
        source.harm(workdir / name, way)
        _judged(tally, workdir, f'{name}, {way}', lambda: judge(tally, workdir, way, before))
    tally.progress(done + 1, total)
  return tally.as_row()


def _judge_rows(tally, workdir, way, before):
  harmed = workdir / 'metrics.jsonl'
  harmed = harmed.read_bytes() if harmed.exists() else None
  told = settle_finished(workdir, NEWEST)
  whole_from, after = read_status(workdir).get('record_whole_from'), (
      workdir / 'metrics.jsonl').read_bytes()
  older = before[:read_record(workdir, OLDER)['metrics.jsonl']['bytes']]
  if whole_from != NEWEST or str(NEWEST) not in told:
    return f'metrics.jsonl {way}: whole from {whole_from}, told: {told}'
  if after not in (older, b''):
    return f'metrics.jsonl {way}: rows are left that no checkpoint vouches for'
  if harmed is not None and (workdir / 'damaged' / 'metrics.jsonl').read_bytes() != harmed:
    return f'metrics.jsonl {way}: the damaged file was not kept'
  tally.count('rows: older ones kept' if after else 'rows: all left out')


def _judge_probe(tally, workdir, way, before):
  try:
    if read_probe_tokens(workdir) is not None:
      return f'probe_tokens.npy {way}: read all the same'
  except ValueError as error:
    if 'probe_tokens.npy' not in str(error):
      return f'probe_tokens.npy {way}: {error}'
  write_probe_tokens(workdir, np.lib.format.read_array(io.BytesIO(before), allow_pickle=False))
  if (workdir / 'probe_tokens.npy').read_bytes() != before:
    return f'probe_tokens.npy {way}: not made again'
  tally.count('probe inputs: made again')


def through_the_command(plan, tell=None):
  """Damage that the training command meets."""
  tally = Tally('damage-command', 'a damaged file, met by the training command',
                'told in a line; trains again from the older one; ends bit for bit the same', tell)
  source = saved(plan, tally.name)
  total = max(4, plan.fraction(10))
  for done in range(total):
    name = str(source.random.choice(source.files))
    workdir = plan.workdir(tally.name, done + 1)
    shutil.copytree(source.workdir, workdir)
    source.harm(step_folder(workdir, NEWEST) / name, WAYS[done % len(WAYS)])
    job = Job(workdir, steps=NEWEST, checkpoint_every=OLDER)
    codes, told = job.wait(), f'checkpoint {NEWEST} is damaged'
    problem = (f'{codes}: {job.output()[-300:]}' if codes != [0] or told not in job.output()
               else compared(workdir, source.workdir, NEWEST))
    tally.fail(f'{name}, {WAYS[done % 4]}: {problem}', workdir) if problem else tally.count(
        WAYS[done % len(WAYS)], NEWEST - OLDER)
    tally.progress(done + 1, total)
  return tally.as_row()


def other_model(plan, tell=None, given=None):
  """A checkpoint of another model is an error, and no damage."""
  tally = Tally('other-model', 'the config asks for another model or optimizer than was saved',
                'an error that names what differs; nothing is moved or removed', tell)
  source = given or saved(plan, tally.name)
  for name, changes in _OTHERS.items():
    target = target_of(**changes)
    for verified in (True, False):
      with source.copy() as workdir:
        if not verified:
          shutil.rmtree(workdir / 'checksums')
        _judged(tally, workdir, name, lambda: _judge_other(tally, workdir, target, source))
  return tally.as_row()


def _judge_other(tally, workdir, target, source):
  checkpoints = Checkpoints(workdir)
  ways = [lambda: checkpoints.restore(target)]
  own = jax.tree.leaves(jax.tree.map(lambda x: x.shape, source.target.params))
  if jax.tree.leaves(jax.tree.map(lambda x: x.shape, target.params)) != own:
    ways.append(lambda: restore_params(workdir, target.params))
  for restore in ways:
    try:
      restore()
      return 'it was restored all the same'
    except CheckpointError as error:
      if 'does not fit this config' not in str(error):
        return f'taken for something else: {error}'
  checkpoints.close()
  if saved_steps(workdir) != [NEWEST, OLDER] or (workdir / 'damaged').exists():
    return 'a checkpoint was moved'
  tally.count('refused, all kept')


def _each(plan, tally, source, judge):
  total = max(1, plan.rounds // 10)
  for done in range(total):
    for name in source.files:
      for way in WAYS:
        with source.copy() as workdir:
          if source.harm(step_folder(workdir, NEWEST) / name, way):
            _judged(tally, workdir, f'{name}, {way}', lambda: judge(workdir, name, way))
    tally.progress(done + 1, total)
  return tally.as_row()


def _judged(tally, workdir, what, judge):
  """Any exception is a failure: one case must not hide the others."""
  try:
    problem = judge()
  except Exception as error:
    problem = f'{what}: {type(error).__name__}: {error}'
  if problem:
    tally.fail(problem, workdir)


@contextlib.contextmanager
def _told():
  lines = []
  handler = logging.Handler()
  handler.emit = lambda record: lines.append(record.getMessage())
  logger = logging.getLogger('sink_jax')
  logger.addHandler(handler)
  try:
    yield lines
  finally:
    logger.removeHandler(handler)
