"""Configs: every key is listed, every trial can be built, differences are reported."""

import dataclasses

import pytest

from sink_jax.attention.position import Rope
from sink_jax.attention.spec import AttentionSpec
from sink_jax.component import from_string, registry
from sink_jax.data.dataset import Source
from sink_jax.data.token_edits import TokenEdit
from sink_jax.data.tokenizer import Tokenizer
from sink_jax.sweep.trials import load_trials
from sink_jax.models.config import ModelConfig
from sink_jax.train.optimizer import UpdateRule
from sink_jax.train.plugins import plugins_of
from sink_jax.train.config import (
  Experiment,
  ModelOptions,
  as_config_dict,
  as_dict,
  differences,
  from_dict,
  keys_as_text,
  known_part,
  resolved,
  where_keys,
)
from tests.train import runs


@pytest.mark.parametrize(
  'key, value, words',
  [
    ('optimizer__learning_rate', float('nan'), 'optimizer.learning_rate must be'),
    ('optimizer__final_fraction', 7.0, 'at least 0 and at most 1, not 7'),
    ('optimizer__decay', 'some', 'optimizer.decay .*all, matrices'),
    ('microbatches', 0, 'microbatches must be at least 1'),
    ('microbatches', 3, 'microbatches = 3 must divide'),
    ('seed', 3000000000, 'seed'),
    ('gradient_dtype', 'float16', 'gradient_dtype .*float32, bfloat16'),
    ('attention__normalizer', 'Unnormalized()', 'RowSum'),
    ('probe__length', 99, 'probe.length = 99 must be at most 17'),
    ('data__interventions', 'FixedToken(position=18)', 'rows have only 17 tokens'),
    ('model__pattern', '', 'multiple of the 0 blocks'),
    ('model__pattern', 'Layer(window=4)', "no argument 'window'.*mask, "),
    ('model__pattern', 'Layer(position=Alibi()); Layer()', 'blocks differ in rotary encodings'),
    ('model__pattern', 'Layer(experts=Experts(count=2))', 'Experts needs active'),
    ('model__pattern', 'Layer(experts=2)', 'Layer.experts = 2 must be Experts'),
  ],
)
def test_values_out_of_their_range_are_refused(key, value, words):
  with pytest.raises(ValueError, match=words):
    runs.config(**{key: value})


def test_keys_are_checked_by_name():
  config = as_dict(Experiment())
  with pytest.raises(ValueError, match=r'Unknown config key .optimizer\.momentum.*optimizer\.rule'):
    from_dict(config | {'optimizer': config['optimizer'] | {'momentum': 0.9}})
  with pytest.raises(ValueError, match='Missing config key steps'):
    from_dict({k: v for k, v in config.items() if k != 'steps'})
  # Keys that only say where a run computes may be missing.
  del config['mesh'], config['model']['remat'], config['log_every']
  assert from_dict(config) == Experiment()


def test_a_block_has_an_encoding_of_positions_of_its_own():
  text = 'Layer(mask=None, mamba=None, experts=None, position=Rope(base=5.0)); Layer()'
  experiment = runs.config(model__pattern=text, model__vocab_size=8)
  config = experiment.model_config()
  assert config.attention_of(config.pattern[0]).position == Rope(base=5.0)
  assert config.attention_of(config.pattern[1]) == config.attention
  assert from_dict(as_dict(experiment)) == experiment


def test_differences_name_the_key_and_leave_cadences_out():
  a, b = runs.config(), runs.config(steps=9, log_every=7, mesh__fsdp=2, model__ffn='relu')
  assert differences(a, b) == ['steps: 8 -> 9', "model.ffn: 'swiglu' -> 'relu'"]
  spelled = ('AdamW()', 'AdamW(b1=0.9, b2=0.95, eps=1e-8)', 'AdamW(eps=1e-08, b2=0.95)')
  old, *others = (runs.config(optimizer__rule=rule) for rule in spelled)
  assert [differences(old, other) for other in others] == [[], []]


@pytest.mark.parametrize('base_class', [Source, Tokenizer, TokenEdit, UpdateRule])
def test_the_repr_of_a_component_builds_it_again(base_class):
  found = registry(base_class)
  assert found
  for cls in found.values():
    assert from_string(base_class, repr(cls())) == cls()


def test_a_key_is_declared_once_and_listed():
  # A model that is trained has an unembedding.
  keys = {f.name for f in dataclasses.fields(ModelConfig)} - {'attention', 'unembedding'}
  assert {f.name for f in dataclasses.fields(ModelOptions)} == keys | {'size'}
  lines = dict(
    line.split(' = ', 1) if ' = ' in line else (line.split(' =')[0], '')
    for line in keys_as_text().splitlines()
  )
  assert {f'  {key}' for key in where_keys()} < set(lines) and len(lines) > 80
  assert {'mesh.data', 'model.remat', 'data.cache_dir'} < set(where_keys())
  # The dataclasses define the defaults, so the config derived from them gives them back.
  assert from_dict(as_config_dict(Experiment()).to_dict()) == Experiment()


class Data:
  vocab_size, input_features, output_features = 64, 0, 0


def test_resolved_configs_hold_the_sizes_of_the_data():
  whole = resolved(runs.config(), Data)
  assert whole.model.vocab_size == 64 and whole.model_config() == runs.config().model_config()
  assert differences(whole, runs.config()) == []  # empty: as the run began
  with pytest.raises(ValueError, match='have 64 ids, and model.vocab_size is 63'):
    resolved(runs.config(model__vocab_size=63), Data)


def test_a_config_names_the_files_of_its_components(tmp_path):
  file = tmp_path / 'mine.py'
  file.write_text(
    'from configs import base\nfrom sink_jax.attention import mask\n'
    'class MyMask(mask.Window):\n  pass\n'
    "TRIALS = {'mine': {'model.layers': 2,\n"
    "                   'model.pattern': 'Layer(mask=MyMask(size=4)); Layer()'}}\n"
    "get_config = lambda name: base.trial(TRIALS, name, 'mine')\n"
  )
  # For the processes of a sweep.
  assert plugins_of(load_trials(file)['mine'].experiment) == str(file)
  assert resolved(runs.config(attention__mask='MyMask(size=4)'), Data).plugins == str(file)


def test_components_that_are_not_imported_are_left_out(tmp_path):
  config = as_dict(
    runs.config(
      model__pattern='Layer(position=Nope()); Layer()',
      model__vocab_size=8,
      attention__position='Nope()',
      attention__similarity='Sigmoid()',
      attention__normalizer='Unnormalized()',
    )
  )
  whole, others = known_part(config)
  assert whole == from_dict(config) and not others
  # Softmax without a normalizer is refused: the parts that are left must fit each other.
  config['attention'] |= {'similarity': 'Other(power=3)'}
  part, others = known_part(config)
  assert others == {
    'attention.similarity': 'Other(power=3)',
    'attention.normalizer': 'Unnormalized()',
  }
  spec = AttentionSpec(position=whole.attention.position)
  assert part == dataclasses.replace(whole, attention=spec)
  config['data'] |= {'source': 'Documents()'}
  config['model'] |= {'pattern': 'Layer(mask=Other()); Layer()'}
  part, more = known_part(config)
  assert more == others | {
    'data.source': 'Documents()',
    'model.pattern': 'Layer(mask=Other()); Layer()',
  }
  assert part.model.pattern is None and part.steps == whole.steps
  config['attention'] |= {'similarity': 'Exp(7)'}  # known, but wrong
  with pytest.raises(ValueError, match='Exp'):
    known_part(config)
