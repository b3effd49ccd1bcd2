"""Configs: every key listed, every trial buildable, differences found."""

import json
import subprocess
import sys

import pytest

from configs import base, quickstart
from sink_jax.component import from_string, registry
from sink_jax.data.dataset import Source
from sink_jax.data.token_edits import TokenEdit
from sink_jax.data.tokenizer import Tokenizer
from sink_jax.train.experiment import differences, from_dict, resolved
from tests.train import runs


def test_the_defaults_are_the_papers():
  experiment = from_dict(base.get_config().to_dict())
  model = experiment.model_config(50432)
  assert (model.layers, model.d_model, model.heads, model.ffn_hidden) == (10, 768, 8, 1536)
  assert experiment.batch_size * experiment.data.context == 2**20
  optimizer = experiment.optimizer
  assert (optimizer.learning_rate, optimizer.weight_decay, optimizer.clip) == (4e-4, 0.1, 1.0)
  assert (experiment.steps, optimizer.warmup_steps, optimizer.schedule) == (20000, 100, 'cosine')
  probe = experiment.probe
  assert (probe.sequences, probe.length, probe.epsilon) == (100, 64, 0.3)


def test_a_config_survives_json():
  config = base.get_config().to_dict()
  again = json.loads(json.dumps(config))
  assert again == config and from_dict(again) == from_dict(config)
  assert differences(config, again) == []


def test_keys_are_checked_by_name():
  config = base.get_config().to_dict()
  with pytest.raises(ValueError, match=r'Unknown config key optimizer\.momentum.*optimizer\.beta1'):
    from_dict(config | {'optimizer': config['optimizer'] | {'momentum': 0.9}})
  with pytest.raises(ValueError, match='Missing config key steps'):
    from_dict({k: v for k, v in config.items() if k != 'steps'})
  with pytest.raises(ValueError, match='Unknown trial .* text-softmax'):
    quickstart.get_config('soft')
  with pytest.raises((KeyError, AttributeError)):
    base.get_config().stepz = 3


def test_differences_name_the_key_and_leave_cadences_out():
  a, b = runs.config(), runs.config(steps=9, log_every=7, mesh__fsdp=2, model__ffn='relu')
  assert differences(a, b) == ["model.ffn: 'swiglu' -> 'relu'", 'steps: 8 -> 9']


def test_resolved_configs_hold_the_sizes_of_the_data():
  class Data:
    vocab_size, input_features, output_features = 64, 0, 0

  config = resolved(runs.config(), Data)
  assert config['model']['vocab_size'] == 64
  assert from_dict(config).model_config() == from_dict(runs.config()).model_config(64)


@pytest.mark.parametrize('base_class', [Source, Tokenizer, TokenEdit])
def test_the_repr_of_a_data_slot_builds_it_again(base_class):
  found = registry(base_class)
  assert found
  for cls in found.values():
    assert from_string(base_class, repr(cls())) == cls()


@pytest.mark.parametrize('key', ['budget', 'model.layer'])
def test_an_unknown_key_on_the_command_line_is_named(key):
  done = subprocess.run(
      [sys.executable, '-m', 'sink_jax.train', f'--config={runs.ROOT}/configs/window.py:window-32',
       f'--config.{key}=1', '--workdir=none'], cwd=runs.ROOT, capture_output=True, text=True)
  assert done.returncode == 1 and 'Traceback' not in done.stderr
  assert f"'{key.split('.')[-1]}'" in done.stderr and 'budget=smoke' in done.stderr
