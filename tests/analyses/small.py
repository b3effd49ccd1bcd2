"""Small models for tests, and the maps and importances of a model."""

import dataclasses
import functools

import numpy as np
import pytest

import sink_jax as sj
from sink_jax.analyses.models import InputOptions, Model
from sink_jax.data.tokenizer import Bytes
from sink_jax.evaluate.inputs import random_tokens, stored
from sink_jax.models.config import Layer, Mamba
from tests.random_params import random_params

VOCABULARY = 258
near = functools.partial(pytest.approx, rel=1e-5)  # a result of some float32 roundings
HYBRID = (
  Layer(
    mamba=Mamba(
      inner=16,
      state=2,
      conv=2,
      rank=1,
    )
  ),
  Layer(),
)


def small_run(name='small', sharp=1.0, **changes):
  """Two blocks, four query heads on two key/value heads, random parameters; reads bytes.

  sharp: a factor on the queries that gives some heads sinks in some sequences.
  """
  config = sj.ModelConfig(
    **dict(
      layers=2,
      d_model=16,
      heads=4,
      kv_heads=2,
      ffn_hidden=16,
      vocab_size=VOCABULARY,
      dtype='float32',
    )
    | changes
  )
  params = random_params(config)
  if 'query' in params['blocks'].get('attention', ()):
    params['blocks']['attention']['query']['kernel'] *= sharp
  return sj.Run(config, params, name, read_tokenizer=lambda run: Bytes().open().beginning_with(0))


def tokens(sequences=4, length=12, repeat=False):
  return random_tokens(
    VOCABULARY,
    sequences=sequences,
    length=length,
    repeat=repeat,
  ).tokens


def model(run, ids, **options):
  """Prepares a run and its input ids for an analysis."""
  return Model(run, InputOptions(**options), stored(ids, VOCABULARY, 'a test'))


def maps(run, ids):
  """Normalised weights (N, S, H, T, T), float64."""
  run = dataclasses.replace(run, config=dataclasses.replace(run.config, dtype='float32'))
  return np.asarray(
    run.record(ids, sj.RecordOptions(attention=sj.maps)).layers.attention.proxy_BxHxTxT, np.float64
  )


def importance(run, ids):
  """alpha (N, S, H, T) from full maps: means over the queries that may see a key."""
  weights = maps(run, ids)
  return weights.sum(-2) / np.arange(weights.shape[-1], 0, -1)
