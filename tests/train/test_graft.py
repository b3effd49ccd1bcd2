"""Training with another attention than the source's: what starts where, and what moves."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.attention.head import HeadGate
from sink_jax.attention.mask import Causal
from sink_jax.pretrained.load import open_source
from sink_jax.train import loop
from sink_jax.train.metrics import read_metrics
from sink_jax.train.workdir import read_config
from sink_jax.train.start import parameter_paths
from tests.train import runs

QUIET = dict(steps=4, checkpoint_every=10, probe__every=0, validation__every=0)
GATE = 'HeadGate(scale=2.0)'


def go(config, workdir):
  return loop.train(config, workdir, show_progress=False, open_source=open_source)


@pytest.fixture(scope='module')
def first(tmp_path_factory):
  """The workdir of the run that others begin with."""
  workdir = tmp_path_factory.mktemp('first') / 'run'
  go(runs.config(**QUIET), workdir)
  return workdir


def grafted(first, **changes):
  return runs.config(**QUIET | dict(seed=1, init__source=str(first), init__graft='identity')
                     | changes)


def moved(before, after):
  """{path: norm of the change} of the parameters that are not what they were."""
  pairs = zip(parameter_paths(after.config), jax.tree.leaves(before.params),
              jax.tree.leaves(after.params), strict=True)
  return {path: np.linalg.norm(a - b) for path, a, b in pairs if np.any(a != b)}


def test_a_graft_is_measured_and_what_is_new_is_trained_alone(first, tmp_path, caplog):
  source, workdir = tmp_path / 'source', tmp_path / 'run'
  shutil.copytree(first, source)
  attention = {'kv_bias': 'KBias()', 'mask': 'Window(size=4)'}
  config = grafted(source, steps=20, init__graft='random', init__train='new',
                   attention__kv_bias='KBias()', attention__mask='Window(size=4)')
  after = go(config, workdir)
  row, = read_metrics(workdir, 'graft')
  assert (row['step'], row['exact'], row['new']) == (0, False, ['blocks/attention/kv_bias_key'])
  assert 'by construction' in caplog.text  # a window of 4 tokens of 16
  changed = '; '.join(row['changed'])
  assert changed in caplog.text and 'NoBias() -> KBias(' in changed
  tokens = sj.load_run(workdir).probe_tokens
  before = sj.graft(sj.load_run(source), attention=attention, tokens=tokens, seed=1, start='random')
  loss = lambda r: -np.mean(np.take_along_axis(np.asarray(jax.nn.log_softmax(
      r.logits(tokens[:, :-1])), np.float64), tokens[:, 1:, None], -1))
  assert row['loss_after'] == pytest.approx(loss(before), rel=1e-6)
  assert row['loss_before'] == pytest.approx(loss(sj.load_run(source)), rel=1e-6)
  assert abs(row['loss_after'] - row['loss_before']) > 1e-3
  changes = moved(before, after)
  assert list(changes) == ['blocks/attention/kv_bias_key'] and changes.popitem()[1] > 0.01
  rows = runs.rows(workdir)
  shutil.rmtree(workdir / 'checkpoints' / '20')
  again = go(config, workdir)
  assert runs.rows(workdir) == rows and not moved(after, again)


@pytest.mark.full
def test_a_graft_keeps_what_the_config_leaves_at_its_default(tmp_path):
  source, workdir = tmp_path / 'source', tmp_path / 'run'
  go(runs.config(**QUIET, attention__position='Rope(base=100.0)', attention__mask='Window(size=4)',
                 model__norm='layernorm'), source)
  # 1e-5 as it stands in the files of models in float32.
  change = dict(attention__head=GATE, model__norm_eps=9.999999747378752e-06)
  config = grafted(source, **change)
  after = go(config, workdir)
  before = sj.load_run(source).config
  assert after.config.attention == dataclasses.replace(before.attention, head=HeadGate(scale=2.0))
  assert after.config.norm == 'layernorm'
  row, = read_metrics(workdir, 'graft')
  assert row['exact'] and row['loss_after'] == pytest.approx(row['loss_before'], rel=1e-5)
  assert 'base=100.0' in read_config(workdir)['attention']['position']
  # The command that began the run goes on with it, and a config that names another value does not.
  with pytest.raises(ValueError, match='attention.mask'):
    go(config | {'attention': config['attention'] | {'mask': 'Prefix()'}}, workdir)
  shutil.rmtree(workdir / 'checkpoints' / '4')
  assert go(config, workdir).config == after.config
  # With nothing kept, a graft can put a default in the place of another value.
  bare = go(grafted(source, **change, init__kept='attention.position, model.norm'),
            tmp_path / 'bare').config
  assert (bare.attention.mask, bare.norm) == (Causal(), 'layernorm')


@pytest.mark.full
def test_gates_and_sink_logits_begin_with_the_sources_loss_and_all_move(first, tmp_path):
  attention = {'head': GATE, 'kv_bias': 'SinkLogit()'}
  after = go(grafted(first, steps=20, **{
      f'attention__{name}': value for name, value in attention.items()}), tmp_path)
  last, begun = runs.rows(first, 'valid')[-1], runs.rows(tmp_path, 'valid')[0]
  assert (last['step'], begun['step']) == (4, 0)
  assert begun['valid'] == pytest.approx(last['valid'], rel=1e-3)  # e^-8 of a row is gone
  before = sj.graft(sj.load_run(first), attention=attention, tokens=after.probe_tokens, seed=1)
  changes = moved(before, after)
  assert set(changes) == set(parameter_paths(after.config)) and min(changes.values()) > 0.01


@pytest.mark.parametrize('changes, words', [
    (dict(init__graft='', attention__head=GATE, model__sink_tokens=1),
     r'model.sink_tokens: 1 -> 0.*attention.head: .*init.graft=identity'),
    (dict(attention__head=GATE, model__heads=2), 'model.heads: 2 -> 4'),
    ({}, 'The graft changes nothing'),
    (dict(attention__kv_bias='ZeroSink()', init__train='new'), 'nothing would be trained'),
    (dict(init__source='', attention__head=GATE), 'init.graft.*init.source'),
    (dict(init__graft='zero'), "init.graft 'zero'.*identity, random")], ids=str)
def test_what_is_refused(first, tmp_path, changes, words):
  with pytest.raises(ValueError, match=f'(?s){words}') as error:
    go(grafted(first, **changes), tmp_path / 'run')
  assert ('init.graft=' in str(error.value)) == (changes.get('init__graft') == '')
  assert not (tmp_path / 'run').exists()


@pytest.mark.full
def test_devices_graft_as_one_device_does(first, tmp_path):
  sections = dict(attention__kv_bias='SinkLogit()', attention__head=GATE, init__train='attention')
  go(grafted(first, **sections), tmp_path / 'alone')
  process = runs.start(tmp_path / 'mesh', devices=8, **QUIET, **sections, **{
      'init.source': str(first), 'init.graft': 'identity', 'seed': 1, 'mesh.fsdp': 2,
      'mesh.tensor': 2})
  errors = process.communicate(timeout=300)[1]
  assert process.returncode == 0 and 'not usable' not in errors, errors  # laid out for the state
  numbers = lambda row: {key: x for key, x in row.items() if not isinstance(x, (str, list))}
  for kind in ('graft', 'train'):
    pairs = zip(*(runs.rows(tmp_path / name, kind) for name in ('mesh', 'alone')), strict=True)
    assert all(numbers(here) == pytest.approx(numbers(there), rel=1e-5) for here, there in pairs)
