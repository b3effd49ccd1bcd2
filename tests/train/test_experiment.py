"""Configs: every key listed, every trial buildable, differences found."""

import dataclasses
import json

import pytest

from configs import base, quickstart
from sink_jax.attention.position import Rope
from sink_jax.attention.temperature import Fixed, Llama4
from sink_jax.attention.value import PlainValue
from sink_jax.component import from_string, registry
from sink_jax.data.dataset import Source
from sink_jax.data.token_edits import TokenEdit
from sink_jax.data.tokenizer import Tokenizer
from sink_jax.models.config import ModelConfig
from sink_jax.models.pattern import pattern_from_text, pattern_text
from sink_jax.train.config import differences, from_dict, resolved
from sink_jax.train.model_options import ModelOptions
from sink_jax.train.old_keys import with_components, with_update_rule
from sink_jax.train.optimizer import AdamW, Sgd
from tests.commands import run_here
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
  with pytest.raises(ValueError, match=r'Unknown config key optimizer\.momentum.*optimizer\.rule'):
    from_dict(config | {'optimizer': config['optimizer'] | {'momentum': 0.9}})
  with pytest.raises(ValueError, match='Missing config key steps'):
    from_dict({k: v for k, v in config.items() if k != 'steps'})
  with pytest.raises(ValueError, match='Unknown trial .* text-softmax'):
    quickstart.get_config('soft')
  with pytest.raises((KeyError, AttributeError)):
    base.get_config().stepz = 3


@pytest.mark.parametrize('name, words', [
    ('weight_decay', 'weight_decay must be >= 0 and finite, not inf.'),
    ('final_fraction', 'final_fraction must be >= 0 and finite, not inf.'),
    ('clip', 'clip must be >= 0 and finite, not inf; 0 does not clip.')])
def test_numbers_of_the_optimizer_are_finite(name, words):
  with pytest.raises(ValueError, match=words):
    from_dict(runs.config(**{f'optimizer__{name}': float('inf')}))


def test_a_schedule_ends_at_most_at_its_learning_rate():
  with pytest.raises(ValueError, match='final_fraction must be at most 1.*not 7'):
    from_dict(runs.config(optimizer__final_fraction=7.0))
  assert from_dict(runs.config(optimizer__final_fraction=1.0)).optimizer.final_fraction == 1


@pytest.mark.parametrize('older, rule', [
    (dict(name='adamw', beta1=0.8, beta2=0.99, eps=1e-6), AdamW(b1=0.8, b2=0.99, eps=1e-6)),
    (dict(name='sgd', beta1=0.9, beta2=0.95, eps=1e-8), Sgd())])
def test_the_four_keys_of_older_configs_are_read_as_a_rule(older, rule):
  config = base.get_config().to_dict()
  rest = {key: value for key, value in config['optimizer'].items() if key != 'rule'}
  read = with_update_rule(config | {'optimizer': rest | older})
  assert read == config | {'optimizer': rest | {'rule': repr(rule)}} and list(read) == list(config)
  assert from_dict(config | {'optimizer': rest | older}).optimizer.rule == rule
  assert with_update_rule(config) == config


def test_an_older_config_has_the_components_that_it_does_not_name():
  config = base.get_config().to_dict()
  named = {**config['attention'], 'temperature': 'Llama4()'}
  for attention, temperature in ((config['attention'], Fixed()), (named, Llama4())):
    older = {name: text for name, text in attention.items()
             if name != 'value' and (name, text) != ('temperature', 'Fixed()')}
    read = from_dict(config | {'attention': older}).attention
    assert (read.temperature, read.value) == (temperature, PlainValue())
    younger = ('linear', 'head_dim', 'pattern', 'parallel_residual', 'biases', 'embedding_dim',
               'tied', 'logit_cap')
    model = {key: value for key, value in config['model'].items() if key not in younger}
    rest = {key: value for key, value in config.items() if key != 'init'}
    assert with_components(rest | {'attention': older, 'model': model}) == config | {
        'attention': attention}


@pytest.mark.parametrize('older, words', [
    (dict(name='adam', beta1=0.8, beta2=0.99, eps=1e-6), "UpdateRule 'adam'.*Choices: .*AdamW"),
    (dict(name='adamw', beta1='x', beta2=0.99, eps=1e-6), 'optimizer.beta1.*one key now'),
    (dict(name='adamw', beta1=None, beta2=0.99, eps=[]), 'optimizer.beta1.*optimizer.rule'),
    (dict(name='adamw', beta1=0.9, beta2=0.99, eps=0), 'eps must be > 0'),
    (dict(beta2=0.99, rule='AdamW()'), 'optimizer.beta2.*optimizer.rule=')])
def test_older_configs_that_make_no_rule_are_explained(older, words):
  config = base.get_config().to_dict()
  rest = {key: value for key, value in config['optimizer'].items() if key != 'rule'}
  with pytest.raises(ValueError, match=words):
    from_dict(config | {'optimizer': rest | older})


def test_the_options_of_a_model_are_the_fields_that_a_config_can_set():
  keys = {f.name for f in dataclasses.fields(ModelConfig)} - {'attention'}
  options = {f.name for f in dataclasses.fields(ModelOptions)}
  assert options == keys | {'size'} == set(base.get_config().model)


@pytest.mark.parametrize('text, words', [
    ('', "cannot read the block ''.*Layer"), ('Layer(window=4)', "no argument 'window'.*mask, "),
    ('Layer(); Window()', 'it is no Layer'), ('Layer(mask=Windw())', 'Did you mean Window'),
    ('Layer(position=Alibi()); Layer()', 'blocks differ in rotary encodings'),
    ('Layer(experts=Experts(count=2))', 'active'), ('Layer(experts=2)', 'it is no Experts'),
    ("Layer(mamba=Mamba(inner='8', state=2, conv=2, rank=1))", 'inner = 8 cannot be'),
    ('Layer(experts=Experts(count=9999, active=1))', 'count = 9999 cannot be'),
    ('Layer(); Layer(); Layer()', 'multiple of the 3 blocks')])
def test_a_pattern_that_cannot_be_is_explained(text, words):
  with pytest.raises(ValueError, match=words):
    from_dict(runs.config(model__pattern=text))


def test_a_block_has_an_encoding_of_positions_of_its_own():
  text = 'Layer(mask=None, mamba=None, experts=None, position=Rope(base=5.0)); Layer()'
  config = from_dict(runs.config(model__pattern=text, model__vocab_size=8)).model_config()
  assert config.attention_of(config.pattern[0]).position == Rope(base=5.0)
  assert config.attention_of(config.pattern[1]) == config.attention
  assert pattern_from_text(pattern_text(config.pattern)) == config.pattern
  # A block without one is written as in the configs of older runs.
  assert pattern_text(config.pattern[1:]) == 'Layer(mask=None, mamba=None, experts=None)'


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


@pytest.mark.parametrize('key, remedy', [
    ('budget', 'window-32,budget=smoke, and is --budget of'), ('protocol', 'protocol=released'),
    ('model.layer', 'Did you mean model.layers?'), ('optimizer.beta2', 'optimizer.rule=')])
def test_an_unknown_key_on_the_command_line_is_named(key, remedy):
  code, _, told = run_here('train', f'--config={runs.ROOT}/configs/window.py:window-32',
                           f'--config.{key}=1', '--workdir=none')
  assert code == 1 and 'Traceback' not in told
  assert f"no such key: '{key}'" in told and remedy in told


def test_another_spelling_of_a_rule_is_no_difference():
  spelled = ('AdamW()', 'AdamW(b1=0.9, b2=0.95, eps=1e-8)', 'AdamW(eps=1e-08, b2=0.95)')
  old, *others = (runs.config(optimizer__rule=rule) for rule in spelled)
  assert [differences(old, other) for other in others] == [[], []]
  assert differences(old, runs.config(optimizer__rule='Sgd()')) == [
      "optimizer.rule: 'AdamW()' -> 'Sgd()'"]


def test_a_renamed_component_is_no_difference():
  old, new = (runs.config(data__source=f"{name}(path='a')", data__valid_source=f"{name}(path='b')")
              for name in ('Prepared', 'PackedDataset'))
  assert from_dict(old) == from_dict(new) and differences(old, new) == differences(new, old) == []
  other = runs.config(data__source="PackedDataset(path='c')", data__valid_source='')
  assert differences(old, other) == [
      """data.source: "Prepared(path='a')" -> "PackedDataset(path='c')\"""",
      """data.valid_source: "Prepared(path='b')" -> ''"""]
  damaged = runs.config(data__source='Prepared(')
  assert differences(damaged, new)[0].startswith("data.source: 'Prepared(' -> ")
