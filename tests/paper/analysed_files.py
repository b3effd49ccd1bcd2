"""Files of analyses, written by hand as `python -m sink_jax analyses` writes them."""

import copy
import json

import sink_jax
from sink_jax.paper.numbers import PILE
from sink_jax.pretrained.hub import known_model

DATE = '2026-11-21T19:51:26+00:00'
TEXT = "Jsonl(path='probe_valid_natural.jsonl')"


def inputs(kind='natural', sequences=100, length=64, bos=None, source=TEXT):
  """A description of inputs, by default as the paper's."""
  bos = bos or ('tokenizer' if kind == 'natural' else 'none')
  return {'kind': kind, 'sequences': sequences, 'length': length,
          'bos': {'protocol': bos, 'applied': 'none'},
          'source': source if kind == 'natural' else None}


def square(value, size=4):
  return [[value] * size for _ in range(size)]


def content(analysis, model, made=None, dtype='float32', **changes):
  """What an analysis finds in one of the paper's models; made: of `inputs`."""
  published, made = known_model(model), made or inputs()
  size = round(1e9 * published.billions) if published else 10
  rate = {'epsilon': 0.3, 'sink_1': 80.0}
  head = {'layer': 1, 'head': 0, 'importance': 0.5}
  if analysis == 'kinds':
    own = [inputs(kind, made['sequences'], made['length'])
           for kind in ('natural', 'random', 'repeat')]
    made = made | {'kinds': own}
  results = {
      'kinds': {'epsilon': 0.3, 'sink_1': {'natural': 80.0, 'random': 70.0, 'repeat': 60.0}},
      'chat': rate,
      'positions': {'epsilon': 0.3, 'rows': [
          {'change': 'no', 'position': None, 'sink_1': 62.0, 'sink_t': None},
          {'change': 'replaced', 'position': 5, 'sink_1': 1.2, 'sink_t': 0.0},
          {'change': 'swapped', 'position': 5, 'sink_1': 1.44, 'sink_t': 50.0}]},
      'lengths': {'lengths': [16, 64], 'epsilons': [0.2, 0.3], 'sink': [
          [[90.0, 1.0], [80.0, 1.0]], [[70.0, 1.0], [60.0, 1.0]]]},
      'scale': rate | {'parameters': size, 'family': 'whatever'},
      'hellaswag': rate | {
          'parameters': size, 'family': 'whatever', 'acc': 30.0, 'acc_norm': 35.0,
          'acc_stderr': 0.5, 'acc_norm_stderr': 0.5, 'questions': 10042,
          'hellaswag': {'bos': 'none', 'file': '', 'limit': None}},
      'domains': {'epsilons': [0.2, 0.3, 0.4], 'domains': list(PILE), 'missing': [],
                  'sequences': [100] * len(PILE), 'sink_1': [[50.0] * len(PILE)] * 3},
      'heads': rate | {'layers': [0, 1], 'importance': [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]]},
      'maps': {'heads': [head | {'map': square(0.25)}]},
      'norms': {'layers': [0, 1], 'hidden': {key: [1.0, 2.0, 3.0] for key in (
          'first', 'others', 'ratio')}, **{kind: {key: [1.0, 2.0] for key in (
              'first', 'others', 'ratio')} for kind in ('key', 'value')}},
      'angles': {'layers': [0, 1], 'importance': [[0.5, 0.1]] * 2, **{
          f'{name}_{key}': [[0.5, 0.1]] * 2 for name in ('cosine', 'norm_product', 'score')
          for key in ('first', 'others')}, 'maps': [head | {
              name: square(0.5) for name in ('cosine', 'norm_product', 'score')}]},
      'last_query': {'length': made['length'], 'sequences': made['sequences'], 'layers': [0, 1],
                     'mean': [0.1, 0.8], 'deviation': [0.1, 0.2]},
  }[analysis]
  own = {'model': model, 'inputs': made, 'options': {'dtype': dtype},
         'checkpoint': {'folder': model, 'step': None, 'dtype': dtype, 'parameters': size}}
  return copy.deepcopy(own | results | changes)


def write(file, analysis, results, failed=(), **changes):
  """NAME.json of results."""
  file.parent.mkdir(parents=True, exist_ok=True)
  record = {'analysis': analysis, 'figure': '', 'date': DATE, 'hardware': 'cpu, 2 cores',
            'command': f'python -m sink_jax analyses {analysis}', 'code': 'commit 1f3a, clean',
            'versions': {'sink_jax': sink_jax.__version__, 'jax': '0.10.2'},
            'results': list(results), 'failed': list(failed)} | changes
  file.write_text(json.dumps(record))
