"""Training from a checkpoint, with its attention or another: what moves, what is refused."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.attention.head import HeadGate
from sink_jax.attention.mask import Causal, Prefix
from sink_jax.sweep.summary import cost_of
from sink_jax.train import loop
from sink_jax.train.checkpoint import step_folder
from sink_jax.train.config import changed
from sink_jax.train.export import export_workdir
from sink_jax.train.metrics import read_metrics
from sink_jax.train.start import completed, parameter_paths
from sink_jax.train.workdir import changes, read_config
from tests.random_params import next_token_losses
from tests.train import runs

QUIET = dict(steps=4, checkpoint_every=2, probe__every=0, validation__every=0)
GATE = 'HeadGate(scale=2.0)'


def go(config, workdir):
  return loop.train(config, workdir, show_progress=False)


@pytest.fixture(scope='module')
def text(tmp_path_factory):
  """Config changes that select a small text, in bytes."""
  folder = tmp_path_factory.mktemp('text')
  for i in range(20):
    (folder / f'{i}.txt').write_text(f'{i} a quick brown fox jumps over the lazy dog. ' * 8)
  return dict(
    data__source=f'TextFolder(path={str(folder)!r})',
    data__tokenizer='Bytes()',
    data__valid_fraction=0.2,
    data__cache_dir=str(folder / 'cache'),
  )


@pytest.fixture(scope='module')
def first(text, tmp_path_factory):
  """The workdir of the run that other runs begin with."""
  workdir = tmp_path_factory.mktemp('first') / 'run'
  go(runs.config(**QUIET, **text), workdir)
  return workdir


@pytest.fixture(scope='module')
def fine(first, text):
  """The config of a run that begins with `first` and takes all sizes of the model from it."""
  sizes = dict.fromkeys(('model__d_model', 'model__ffn_hidden'))
  return lambda **changes: runs.config(
    **QUIET | text | sizes | dict(seed=1, model__size='60m', init__source=str(first)) | changes
  )


def moved(before, after):
  """{path: norm of the change} of the parameters that changed."""
  pairs = zip(
    parameter_paths(after.config),
    jax.tree.leaves(before.params),
    jax.tree.leaves(after.params),
    strict=True,
  )
  return {path: np.linalg.norm(a - b) for path, a, b in pairs if np.any(a != b)}


def test_a_run_begins_where_its_source_ended(first, fine, tmp_path):
  go(fine(), tmp_path / 'run')
  last, begun = runs.rows(first, 'valid')[-1], runs.rows(tmp_path / 'run', 'valid')[0]
  assert (last['step'], begun['step']) == (4, 0)
  assert begun['valid'] == pytest.approx(last['valid'], rel=1e-6)
  saved = read_config(tmp_path / 'run')
  assert saved['model'] | {'size': 'tiny'} == read_config(first)['model'] | dict(
    layers=2, heads=4, d_model=16, ffn_hidden=24
  )
  # A sweep knows the model's size before a trial begins, and so what the trial costs.
  assert cost_of(fine()).parameters == sj.parameter_count(sj.load_run(first).config)
  # The export of the source has the same parameters in another folder, here in that of a seed.
  export_workdir(first, tmp_path / 'exported-1')
  go(fine(init__source=str(tmp_path / 'exported-{seed}')), tmp_path / 'other')
  assert runs.rows(tmp_path / 'other') == runs.rows(tmp_path / 'run')
  saved = read_config(tmp_path / 'other')
  assert saved['init']['source'] == str(tmp_path / 'exported-1')
  config = fine(init__source=str(tmp_path / 'exported-{seed}'))
  assert changes(tmp_path / 'other', completed(config)[0]) == []  # a sweep skips it
  # If killed before its first checkpoint, a run begins with its source again.
  shutil.rmtree(tmp_path / 'other' / 'checkpoints')
  go(fine(init__source=str(tmp_path / 'exported-{seed}')), tmp_path / 'other')
  assert runs.rows(tmp_path / 'other') == runs.rows(tmp_path / 'run')


def test_what_is_not_trained_stays_and_has_no_state(first, fine, tmp_path):
  after = go(fine(init__train='attention'), tmp_path)
  names = {f'blocks/attention/{name}/kernel' for name in ('query', 'key', 'value', 'out')}
  assert moved(sj.load_run(first), after).keys() == names
  saved = json.loads((step_folder(tmp_path, 4) / 'state' / '_METADATA').read_text())
  moments = {name for name in saved['tree_metadata'] if "'mu'" in name}
  assert len(moments) == 4 and all("'attention'" in name for name in moments)


def test_a_graft_is_measured_and_what_is_new_is_trained_alone(first, fine, tmp_path, caplog):
  source, workdir = tmp_path / 'source', tmp_path / 'run'
  shutil.copytree(first, source)
  attention = {'kv_bias': 'KBias()', 'mask': 'Window(size=4)'}
  config = fine(
    steps=20,
    init__source=str(source),
    init__graft='random',
    init__train='new',
    attention__kv_bias='KBias()',
    attention__mask='Window(size=4)',
  )
  after = go(config, workdir)
  (row,) = (row for row in read_metrics(workdir) if row['kind'] == 'graft')
  assert (row['step'], row['exact'], row['new']) == (0, False, ['blocks/attention/kv_bias_key'])
  changed = '; '.join(row['changed'])
  assert changed in caplog.text and 'NoBias() -> KBias(' in changed
  tokens = sj.load_run(workdir).probe_tokens
  before = sj.graft(sj.load_run(source), attention=attention, tokens=tokens, seed=1, start='random')
  loss = lambda run: next_token_losses(run.logits(tokens), tokens).mean()
  assert row['loss_after'] == pytest.approx(loss(before), rel=1e-6)
  assert row['loss_before'] == pytest.approx(loss(sj.load_run(source)), rel=1e-6)
  assert abs(row['loss_after'] - row['loss_before']) > 1e-3
  changes = moved(before, after)
  assert list(changes) == ['blocks/attention/kv_bias_key'] and changes.popitem()[1] > 0.01
  rows = runs.rows(workdir)
  shutil.rmtree(workdir / 'checkpoints' / '20')
  again = go(config, workdir)
  assert runs.rows(workdir) == rows and not moved(after, again)


def test_a_graft_keeps_what_the_config_leaves_at_its_default(text, fine, tmp_path):
  source, workdir = tmp_path / 'source', tmp_path / 'run'
  attention = dict(attention__position='Rope(base=100.0)', attention__mask='Window(size=4)')
  go(runs.config(**QUIET, **text, **attention, model__norm='layernorm'), source)
  change = dict(init__source=str(source), init__graft='identity', attention__head=GATE)
  change['model__norm_eps'] = 9.999999747378752e-06  # 1e-5 as model files store it, in float32
  config = fine(**change)
  after = go(config, workdir)
  before = sj.load_run(source).config
  assert after.config.attention == dataclasses.replace(before.attention, head=HeadGate(scale=2.0))
  assert after.config.norm == 'layernorm'
  (row,) = (row for row in read_metrics(workdir) if row['kind'] == 'graft')
  assert row['exact'] and row['loss_after'] == pytest.approx(row['loss_before'], rel=1e-5)
  # The command that began the run continues it. A config with a different value is refused.
  with pytest.raises(ValueError, match='attention.mask'):
    go(changed(config, {'attention.mask': Prefix()}), workdir)
  shutil.rmtree(workdir / 'checkpoints' / '4')
  assert go(config, workdir).config == after.config
  # A graft can replace the source's mask by the default if `init.kept` does not list the mask.
  bare = go(fine(**change, init__kept='attention.position, model.norm'), tmp_path / 'bare').config
  assert (bare.attention.mask, bare.norm) == (Causal(), 'layernorm')


@pytest.mark.parametrize(
  'changes, words',
  [
    (dict(init__source='no/such/model'), 'init.source'),
    (dict(model__layers=3, model__d_model=8), r'model.layers: 3 -> 2\n.*model.d_model: 8 -> 16.*'),
    (dict(attention__mask='Window(size=4)'), '--config.init.graft=identity'),
    (dict(init__train='none'), 'all, new, attention'),
    (dict(init__train='new'), 'nothing would be trained'),
    (dict(init__source='', init__train='attention', model__size='tiny'), 'init.train.*init.source'),
    (dict(init__kept='model.norm'), 'init.kept.*init.graft'),
    (dict(data__tokenizer='TrainedBpe(vocab_size=260)'), 'another tokenizer|260'),
    (
      dict(attention__head=GATE, model__sink_tokens=1),
      r'model.sink_tokens: 1 -> 0.*attention.head: .*init.graft=identity',
    ),
    (dict(init__graft='identity', attention__head=GATE, model__heads=2), 'model.heads: 2 -> 4'),
    (dict(init__graft='identity'), 'The graft changes nothing'),
    (
      dict(init__graft='identity', init__source='', model__size='tiny', attention__head=GATE),
      'init.graft.*init.source',
    ),
    (dict(init__graft='zero'), "init.graft 'zero'.*identity, random"),
  ],
  ids=str,
)
def test_what_does_not_fit_its_source_is_refused(fine, tmp_path, changes, words):
  with pytest.raises(ValueError, match=f'(?s){words}'):
    go(fine(**changes), tmp_path / 'run')
  assert not (tmp_path / 'run').exists()
