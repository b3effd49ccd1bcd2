"""Training from a checkpoint: what it begins with, resumes with, and refuses."""

import json
import shutil

import jax
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.pretrained import load
from sink_jax.pretrained.export import export_workdir
from sink_jax.sweep.summary import cost_of
from sink_jax.train import loop
from sink_jax.train.checkpoint import step_folder
from sink_jax.train.start import parameter_paths
from sink_jax.train.multihost import Interrupted
from sink_jax.train.workdir import read_config
from tests.train import runs
from tests.train.test_loop import stop_after

QUIET = dict(steps=4, checkpoint_every=2, probe__every=0, validation__every=0)


def go(config, workdir):
  return loop.train(config, workdir, show_progress=False, open_source=load.open_source)


@pytest.fixture(scope='module')
def text(tmp_path_factory):
  """Changes of a config to a small text, in bytes."""
  folder = tmp_path_factory.mktemp('text')
  for i in range(20):
    (folder / f'{i}.txt').write_text(f'{i} a quick brown fox jumps over the lazy dog. ' * 8)
  return dict(data__source=f'TextFolder(path={str(folder)!r})', data__tokenizer='Bytes()',
              data__valid_fraction=0.2, data__cache_dir=str(folder / 'cache'))


@pytest.fixture(scope='module')
def first(text, tmp_path_factory):
  """The workdir of the run that others begin with."""
  workdir = tmp_path_factory.mktemp('first') / 'run'
  go(runs.config(**QUIET, **text), workdir)
  return workdir


def fine(first, text, **changes):
  """A run that begins with `first`, with all sizes of the model left to it."""
  sizes = dict.fromkeys(('model__d_model', 'model__ffn_hidden'))
  return runs.config(**QUIET | text | sizes | dict(
      seed=1, model__size='60m', init__source=str(first)) | changes)


@pytest.fixture(scope='module')
def whole(first, text, tmp_path_factory):
  """A run of four steps that trains attention only, in one go."""
  workdir = tmp_path_factory.mktemp('whole') / 'run'
  return workdir, go(fine(first, text, init__train='attention'), workdir)


def test_a_run_begins_where_its_source_ended(first, text, tmp_path):
  go(fine(first, text), tmp_path / 'run')
  last, begun = runs.rows(first, 'valid')[-1], runs.rows(tmp_path / 'run', 'valid')[0]
  assert (last['step'], begun['step']) == (4, 0)
  assert begun['valid'] == pytest.approx(last['valid'], rel=1e-6)
  saved = read_config(tmp_path / 'run')
  assert saved['model'] | {'size': 'tiny'} == read_config(first)['model'] | dict(
      layers=2, heads=4, d_model=16, ffn_hidden=24)
  # Sweeps know the size, and so what a trial costs, before it begins.
  assert cost_of(fine(first, text)).parameters == sj.parameter_count(sj.load_run(first).config)
  # Killed before its first checkpoint it begins with its source again.
  shutil.rmtree(tmp_path / 'run' / 'checkpoints')
  rows = runs.rows(tmp_path / 'run')
  go(fine(first, text), tmp_path / 'run')
  assert runs.rows(tmp_path / 'run') == rows
  # The export of the source is another folder of the same parameters, here that of a seed.
  export_workdir(first, tmp_path / 'exported-1')
  go(fine(tmp_path / 'exported-{seed}', text), tmp_path / 'other')
  assert runs.rows(tmp_path / 'other') == runs.rows(tmp_path / 'run')
  assert read_config(tmp_path / 'other')['init']['source'] == str(tmp_path / 'exported-1')
  # The same command goes on with it.
  shutil.rmtree(tmp_path / 'other' / 'checkpoints' / '4')
  go(fine(tmp_path / 'exported-{seed}', text), tmp_path / 'other')
  assert runs.rows(tmp_path / 'other') == runs.rows(tmp_path / 'run')


def test_stopped_and_resumed_equals_in_one_go(whole, first, text, tmp_path, monkeypatch):
  config = fine(first, text, init__train='attention')
  for step in (1, 3):
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
      stop_after(patch, step)
      go(config, tmp_path)
  go(config, tmp_path)
  assert runs.rows(tmp_path) == runs.rows(whole[0])
  jax.tree.map(np.testing.assert_array_equal, sj.load_run(tmp_path).params, whole[1].params)


def test_what_is_not_trained_stays_and_has_no_state(whole, first):
  before, after = sj.load_run(first).params, sj.load_run(whole[0]).params
  moved = {path for path, a, b in zip(
      parameter_paths(whole[1].config), jax.tree.leaves(before), jax.tree.leaves(after),
      strict=True) if np.any(a != b)}
  assert moved == {f'blocks/attention/{name}/kernel' for name in ('query', 'key', 'value', 'out')}
  saved = json.loads((step_folder(whole[0], 4) / 'state' / '_METADATA').read_text())
  moments = {name for name in saved['tree_metadata'] if "'mu'" in name}
  assert len(moments) == 4 and all("'attention'" in name for name in moments)


@pytest.mark.parametrize('changes, words', [
    (dict(init__source='no/such/model'), 'init.source'),
    (dict(model__layers=3, model__d_model=8), r'model.layers: 3 -> 2\n.*model.d_model: 8 -> 16.*'),
    (dict(attention__mask='Window(size=4)'), '--config.init.graft=identity'),
    (dict(init__train='none'), 'all, new, attention'),
    (dict(init__train='new'), 'nothing would be trained'),
    (dict(init__source='', init__train='attention', model__size='tiny'), "init.train.*init.source"),
    (dict(init__kept='model.norm'), 'init.kept.*init.graft'),
    (dict(data__tokenizer='TrainedBpe(vocab_size=260)'), 'another tokenizer|260')], ids=str)
def test_what_does_not_fit_its_source_is_refused(first, text, tmp_path, changes, words):
  with pytest.raises(ValueError, match=f'(?s){words}'):
    go(fine(first, text, **changes), tmp_path / 'run')
  assert not (tmp_path / 'run').exists()


def test_a_source_that_its_caller_cannot_open(first, text, tmp_path):
  with pytest.raises(ValueError, match='has not said how to open it'):
    loop.train(fine(first, text), tmp_path / 'run', show_progress=False)
