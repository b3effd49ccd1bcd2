"""What a config leaves empty: chosen when a run begins, written down, kept when it is resumed."""

import dataclasses
import json
import logging
import shutil

import pytest

from sink_jax.models.sizes import sized
from sink_jax.train import loop, prepare
from sink_jax.train.defaults import DeviceLoad, needed_bytes, with_chosen_keys, with_defaults
from sink_jax.train.experiment import from_dict
from sink_jax.train.run_dir import has_ended, read_config
from tests.train import runs

GIB = 2**30


@pytest.mark.parametrize('size, share, remat, unroll, expected', [
    ('60m', DeviceLoad('cpu', None, 2**20), None, None, ('none', 1)),
    ('60m', DeviceLoad('cuda', 139 * GIB, 32 * 2048), None, None, ('none', 10)),
    ('60m', DeviceLoad('tpu', 15.75 * GIB, 8 * 2048), None, None, ('none', 10)),
    ('60m', DeviceLoad('tpu', None, 8 * 2048), None, None, ('none', 10)),
    ('60m', DeviceLoad('tpu', 15.75 * GIB, 64 * 2048), None, None, ('save_attention', 1)),
    ('60m', DeviceLoad('tpu', 15.75 * GIB, 1024 * 2048), None, None, ('blocks', 1)),
    ('1b', DeviceLoad('cuda', 139 * GIB, 8 * 2048), None, None, ('none', 22)),
    ('1b', DeviceLoad('cuda', 78 * GIB, 20 * 2048), None, None, ('save_matmuls', 1)),
    ('1b', DeviceLoad('tpu', 15.75 * GIB, 2 * 2048, 16), None, None, ('none', 22)),
    ('7b', DeviceLoad('tpu', 95 * GIB, 2048, 64), None, None, ('save_matmuls', 1)),
    ('60m', DeviceLoad('tpu', 15.75 * GIB, 28 * 2048), None, None, ('none', 10)),
    ('60m', DeviceLoad('tpu', 15.75 * GIB, 28 * 2048, kept=3.1), None, None, ('save_attention', 1)),
    ('60m', DeviceLoad('tpu', 15.75 * GIB, 28 * 2048, kept=0.0), None, None, ('none', 10)),
    ('60m', DeviceLoad('tpu', 15.75 * GIB, 2048), 'blocks', None, ('blocks', 1)),
    ('60m', DeviceLoad('tpu', 15.75 * GIB, 2048), 'blocks', 5, ('blocks', 5)),
    ('60m', DeviceLoad('tpu', 15.75 * GIB, 2048), None, 1, ('save_matmuls', 1)),
    ('60m', DeviceLoad('cuda', 15.75 * GIB, 2048), None, 5, ('none', 5)),
    ('60m', DeviceLoad('cuda', 15.75 * GIB, 2048), 'none', 5, ('none', 5))], ids=str)
def test_what_is_chosen_for_a_size_and_a_device(size, share, remat, unroll, expected):
  model = with_defaults(sized(size, vocab_size=50432), share, remat, unroll)
  assert (model.remat, model.unroll) == expected


V5E = DeviceLoad('tpu', None, 8 * 2048, logits=2**26)
H200 = [DeviceLoad('cuda', None, sequences * 2048) for sequences in (4, 8, 16, 32)]


@pytest.mark.parametrize('size, options, share, compiled', [
    ('60m', dict(layers=2, vocab_size=8192), V5E, 1.222e9),
    ('60m', dict(layers=4, vocab_size=8192), V5E, 2.040e9),
    ('60m', dict(layers=2, vocab_size=8192, remat='save_matmuls'), V5E, 1.743e9),
    ('60m', dict(layers=4, vocab_size=8192, remat='save_matmuls'), V5E, 2.504e9),
    ('60m', {}, H200[1], 6.841e9), ('60m', {}, H200[2], 10.449e9), ('60m', {}, H200[3], 17.663e9),
    ('60m', dict(remat='save_matmuls'), H200[2], 8.311e9),
    ('60m', dict(remat='save_matmuls'), H200[3], 14.037e9),
    ('60m', dict(remat='save_attention'), H200[3], 5.694e9),
    ('60m', dict(remat='blocks'), H200[3], 4.865e9),
    ('60m', {}, dataclasses.replace(H200[1], microbatches=4), 7.389e9),
    ('1b', {}, H200[0], 32.293e9), ('1b', {}, H200[1], 44.404e9),
    ('1b', dict(remat='save_matmuls'), H200[1], 39.412e9)], ids=str)
def test_estimates_are_a_little_above_what_the_compilers_say(size, options, share, compiled):
  model = sized(size, **{'vocab_size': 50432} | options)
  assert 1 < needed_bytes(model, share) / compiled < 1.2


def test_a_loop_that_remat_keeps_costs_one_line(caplog):
  config = runs.config(model__unroll=2, model__remat='blocks')
  model = from_dict(config).model_config(64)
  with caplog.at_level(logging.WARNING, 'sink_jax'):
    assert with_chosen_keys(config, model, DeviceLoad('cuda', 80e9, 128))['model']['unroll'] == 2
  assert [record.message for record in caplog.records] == [
      'model.unroll = 2 has no effect with model.remat = blocks: the loop over the blocks is kept']


@pytest.mark.parametrize('value', [0, 2.0, 2**50])
def test_a_number_of_logits_that_cannot_be_is_explained(value):
  with pytest.raises(ValueError, match='loss_logits = .* must be a whole number from 1'):
    from_dict(runs.config() | {'loss_logits': value})


@pytest.fixture(scope='module')
def begun(tmp_path_factory):
  """A run as a GPU begins it."""
  workdir = tmp_path_factory.mktemp('begun')
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(prepare, 'DeviceLoad', lambda *_: DeviceLoad('cuda', 80e9, 128))
    run = loop.train(runs.config(), workdir, show_progress=False)
  return workdir, run


def chosen(workdir):
  config = read_config(workdir)
  return (config['model']['remat'], config['model']['unroll'], config['loss_logits'],
          config['gradient_reduction'])


def test_what_was_chosen_is_recorded_and_kept_when_a_run_is_resumed(begun, tmp_path):
  workdir, run = begun
  assert chosen(workdir) == ('none', 2, 2**28, 'step')
  assert run.config.unroll == 1  # of a probe, which keeps nothing
  assert has_ended(workdir, runs.config())
  copy = tmp_path / 'copy'
  shutil.copytree(workdir, copy)
  shutil.rmtree(copy / 'checkpoints' / '8')
  loop.train(runs.config(mesh__data=1), copy, show_progress=False)  # a CPU would choose others
  assert chosen(copy) == ('none', 2, 2**28, 'step') and runs.rows(copy) == runs.rows(workdir)
  with pytest.raises(ValueError, match='loss_logits: 268435456 -> 1000\n.*model.unroll: 2 -> 1'):
    loop.train(runs.config(model__unroll=1, loss_logits=1000), copy, show_progress=False)


def test_older_runs_go_on_with_what_they_did(begun, tmp_path):
  copy = tmp_path / 'copy'
  shutil.copytree(begun[0], copy)
  config = json.loads((copy / 'config.json').read_text())
  del config['model']['unroll'], config['loss_logits'], config['gradient_reduction']
  del config['attention']['head']
  config['model']['remat'] = 'blocks'
  (copy / 'config.json').write_text(json.dumps(config))
  assert chosen(copy) == ('blocks', 1, 2**26, 'microbatch')
  assert read_config(copy)['attention']['head'] == 'PlainOutput()'
  assert has_ended(copy, runs.config())
