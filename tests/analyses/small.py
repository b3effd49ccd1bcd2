"""Small models, and what the analyses are given, for tests."""

import json
import struct

import sink_jax as sj
from sink_jax.analyses.options import Options
from sink_jax.cli import analyses
from sink_jax.evaluate import inputs
from sink_jax.evaluate import plots
from sink_jax.paper.open_protocol import EXPECTED, check_result
from sink_jax.io.jsontext import rounded, to_json
from tests.random_params import random_params

VOCABULARY = 13


def small_run(name='small', **changes):
  """Two blocks, four query heads on two key/value heads, random parameters."""
  config = sj.ModelConfig(**dict(layers=2, d_model=16, heads=4, kv_heads=2, ffn_hidden=16,
                                 vocab_size=VOCABULARY, dtype='float32') | changes)
  return sj.Run(config, random_params(config), name)


def random_inputs(sequences=3, length=9):
  return inputs.random_tokens(VOCABULARY, sequences=sequences, length=length)


def repeated_inputs(sequences=2, length=12):
  return inputs.random_tokens(VOCABULARY, sequences=sequences, length=length, repeat=True)


def options(**changes):
  return Options(**dict(batch_size=1) | changes)


def analyse_models(name, checkpoints, workdirs, out, **given):
  """The command on models, with the options that are given."""
  return analyses.analyse_models(analyses.Options(
      name=name, checkpoint=tuple(map(str, checkpoints)), workdir=tuple(workdirs), out=out, **given),
      given)


def check_rows(module, results):
  """The table for the terminal is one, with a line per model at least; a report can read it."""
  table, name = module.rows(results), module.__name__.split('.')[-1]
  for result in results if name in EXPECTED else ():
    made = {'checkpoint': {'dtype': 'float32'}, 'options': {'dtype': 'float32'}}
    check_result(name, json.loads(to_json(rounded(result | made))))
  assert len(table) > len(results) and len({len(row) for row in table}) == 1
  assert all(isinstance(cell, str) for row in table for cell in row)
  return table


def drawn(module, results, monkeypatch):
  """The figure that a module draws of results, before it becomes a file."""
  kept = []
  monkeypatch.setattr(plots, 'save', lambda figure, path: kept.append(figure))
  module.draw(results, None)
  return kept[0]


def lines(ax):
  """{label: points (n, 2)} of what is plotted."""
  return {line.get_label(): line.get_xydata() for line in ax.get_lines()}


def check_png(path):
  data = path.read_bytes()
  assert data[:8] == b'\x89PNG\r\n\x1a\n' and data[-8:-4] == b'IEND'
  width, height = struct.unpack('>II', data[16:24])
  assert 400 <= width <= 2500 and 300 <= height <= 4000 and len(data) > 5_000
