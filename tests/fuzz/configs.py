"""Experiments as dicts, `--set` on the command line of a sweep, trial names and budgets."""

from __future__ import annotations

import json

from hypothesis import strategies as st

from tests.fuzz import mutate, slots
from tests.fuzz.inputs import Input, Kind


def _prepare(folder):
  from configs import base
  from sink_jax.train.config import from_dict
  small = {'model.size': 'tiny', 'data.source': 'BigramBackcopy(length=16)', 'data.context': 16,
           'probe.length': 16}
  config = base.trial({'small': small}, 'small').to_dict()
  from_dict(config).model_config(64)
  texts = slots.KINDS['slots'].prepare(folder)
  for text in ('set|seed=1', 'name|sigmoid,budget=smoke', 'shard|1/2'):
    _run_settings(None, Input(text), None)
  return config, texts


def _inputs(prepared):
  config, families = prepared
  texts, sections = slots._texts(families), [k for k, v in config.items() if isinstance(v, dict)]
  word = st.text(mutate.LETTERS, max_size=5)
  weights = st.lists(st.tuples(word, st.floats() | word), max_size=4).map(
      lambda pairs: ','.join(f'{k}={v}' for k, v in pairs))

  def put(section, seed, value):
    keys = sorted(config[section])
    return config | {section: config[section] | {keys[seed % len(keys)]: value}}

  one = st.builds(put, st.sampled_from(sections), st.integers(0, 99),
                  mutate.hostile_values() | texts | weights)
  objects = mutate.changed_objects([config]) | one | st.builds(
      lambda text: put('data', 0, None) | {'data': config['data'] | {'domain_weights': text}},
      weights)
  return objects.map(lambda x: Input(json.dumps(x)))


def _run(prepared, input, folder):
  from sink_jax.models.sizes import parameter_shapes
  from sink_jax.train.config import from_dict
  # From data with 64 ids; without them where the config itself has sizes of the input.
  parameter_shapes.cache_clear()
  from_dict(json.loads(input.text)).model_config(64)


def _settings(prepared):
  config, families = prepared
  dotted = [f'{s}.{k}' for s, v in config.items() if isinstance(v, dict) for k in v]
  dotted += [k for k, v in config.items()]
  values = st.one_of(mutate.hostile_values().map(json.dumps), slots._texts(families),
                     st.sampled_from(mutate.STRINGS), st.text(mutate.LETTERS, max_size=20))
  pairs = st.builds(lambda k, v: f'{k}={v}',
                    st.sampled_from(dotted) | st.text(mutate.LETTERS, max_size=10), values)
  lines = st.one_of(pairs, pairs, pairs, values)
  names = st.sampled_from(['sigmoid', 'sigmoid,budget=smoke', 'sigmoid,budget=', '', ',', '=,=',
                           'sigmoid,protocol=released,budget=full']) | values
  shards = st.sampled_from(['1/1', '1/2', '2/1', '0/0', '1/', '²/3']) | values
  tell = lambda what: lambda text: Input(f'{what}|{text}')
  return st.one_of(lines.map(tell('set')), lines.map(tell('set')), names.map(tell('name')),
                   shards.map(tell('shard')))


def _run_settings(prepared, input, folder):
  from configs import attention_operation
  from sink_jax.sweep import trials
  from sink_jax.train.config import from_dict
  what, _, text = input.text.partition('|')
  read = {'set': lambda: _set(attention_operation, text, from_dict),
          'name': lambda: attention_operation.get_config(text),
          'shard': lambda: trials.select_shard({'a': 1, 'b': 2}, text)}[what]
  read()


def _set(module, line, from_dict):
  """As `load_trials` does, for one trial only and without loading its file again."""
  from sink_jax.sweep.config_keys import change_config, parse_settings
  config = module.get_config('sigmoid')
  change_config(config, parse_settings([line]))
  from_dict(config.to_dict())


KINDS = {'configs': Kind(_prepare, _inputs, _run, share=12),
         'settings': Kind(_prepare, _settings, _run_settings, share=8)}
