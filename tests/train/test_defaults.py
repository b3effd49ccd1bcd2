"""What a config leaves empty: chosen when a run begins, written down, kept when it is resumed."""

import json
import logging
import shutil

import pytest

from sink_jax.models.sizes import sized
from sink_jax.train import defaults, loop
from sink_jax.train.experiment import from_dict
from sink_jax.train.workdir import has_ended, read_config
from tests.train import runs


@pytest.mark.parametrize('platform, options, unroll', [
    ('gpu', {}, 10), ('tpu', {}, 10), ('cpu', {}, 1), ('gpu', dict(remat='save_matmuls'), 1),
    ('tpu', dict(layers=100), 1)])
def test_small_models_are_compiled_without_a_loop_on_gpus_and_tpus(platform, options, unroll):
  assert defaults.unrolled(sized('60m', vocab_size=11, **options), platform) == unroll


def test_a_loop_that_remat_keeps_costs_one_line(caplog):
  config = runs.config(model__unroll=2, model__remat='blocks')
  model = from_dict(config).model_config(64)
  with caplog.at_level(logging.WARNING, 'sink_jax'):
    assert defaults.completed(config, model, 'gpu')['model']['unroll'] == 2
  assert [record.message for record in caplog.records] == [
      'model.unroll = 2 has no effect with model.remat = blocks: the loop over the blocks is kept']


@pytest.fixture(scope='module')
def begun(tmp_path_factory):
  """A run as a GPU begins it, stopped by its length."""
  workdir = tmp_path_factory.mktemp('begun')
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(loop, 'completed', lambda config, model, platform: defaults.completed(
        config, model, 'gpu'))
    run = loop.train(runs.config(), workdir, show_progress=False)
  return workdir, run


def test_what_was_chosen_is_recorded_and_kept_when_a_run_is_resumed(begun, tmp_path):
  workdir, run = begun
  assert read_config(workdir)['model']['unroll'] == 2
  assert run.config.unroll == 1  # of a probe, which keeps nothing
  assert has_ended(workdir, runs.config())
  copy = tmp_path / 'copy'
  shutil.copytree(workdir, copy)
  shutil.rmtree(copy / 'checkpoints' / '8')
  loop.train(runs.config(), copy, show_progress=False)  # on a CPU, which would choose 1
  assert read_config(copy)['model']['unroll'] == 2
  assert runs.rows(copy) == runs.rows(workdir)
  with pytest.raises(ValueError, match='model.unroll: 2 -> 1'):
    loop.train(runs.config(model__unroll=1), copy, show_progress=False)


def test_older_runs_go_on_with_what_they_did(begun, tmp_path):
  copy = tmp_path / 'copy'
  shutil.copytree(begun[0], copy)
  config = json.loads((copy / 'config.json').read_text())
  del config['model']['unroll']
  (copy / 'config.json').write_text(json.dumps(config))
  assert read_config(copy)['model']['unroll'] == 1
  assert has_ended(copy, runs.config())
