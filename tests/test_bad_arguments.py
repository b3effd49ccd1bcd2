"""Arguments of the public functions that cannot be: an error says so, and no number comes back."""

import dataclasses

import jax
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.models.transformer import init_params

TOKENS = np.arange(12).reshape(2, 6)


@pytest.fixture(scope='module')
def run():
  config = sj.sized('tiny', vocab_size=16, dtype='float32', sink_tokens=1)
  return sj.Run(config, init_params(config, 0))


@pytest.mark.parametrize('of', [sj.attention_map, sj.streaming_importance])
@pytest.mark.parametrize('dtypes', [('int32', 'int32'), ('float32', 'float16')])
def test_queries_and_keys_have_one_floating_point_dtype(of, dtypes):
  q, k = (np.ones((1, 8, 2, 16), dtype) for dtype in dtypes)
  with pytest.raises(ValueError, match='one floating-point dtype'):
    of(sj.AttentionSpec(), q, k)


@pytest.mark.parametrize('text, kind', [
    ('PNorm(p=1e999)', 'normalizer'), ('RowSum(scale=1e999)', 'normalizer'),
    ('AbsFloor(floor=1e999)', 'normalizer'), ('Rope(base=1e999)', 'position'),
    ('KBias(value="first", value_norm=1e999)', 'kv_bias'), (f'PNorm(p={10**400})', 'normalizer')])
def test_numbers_of_a_component_are_finite(text, kind):
  with pytest.raises(ValueError, match='must be finite|too large'):
    sj.AttentionSpec(**{kind: text})


def test_a_component_that_is_no_string_is_checked_as_well():
  with pytest.raises(ValueError, match='eps must be finite'):
    sj.AttentionSpec(normalizer=sj.RowSum(eps=float('nan')))


@pytest.mark.parametrize('make', [
    lambda: sj.QKNorm(eps=-1.0), lambda: sj.ProjectionQKNorm(eps=-1.0),
    lambda: sj.Sinusoidal(base=-1.0)])
def test_signs(make):
  with pytest.raises(ValueError, match='must be >=? 0'):
    make()


@pytest.mark.parametrize('fields, words', [
    (dict(head_dim=0), 'head_dim must be at least 1'), (dict(kv_heads=0), 'kv_heads must be'),
    (dict(attention='Exp()'), 'must be an AttentionSpec'), (dict(d_model=2**27), 'a head of .*d_model')])
def test_fields_of_a_model(fields, words):
  with pytest.raises(ValueError, match=words):
    sj.sized('tiny', vocab_size=16, **fields)


def test_lists_of_a_config_are_tuples():
  assert hash(sj.sized('tiny', vocab_size=16, biases=['qkv'])) == hash(
      sj.sized('tiny', vocab_size=16, biases=('qkv',)))


@pytest.mark.parametrize('tokens, words', [
    (TOKENS + 5, 'reach from 5 to 16'), (TOKENS - 1, 'reach from -1'), ([1, 2], r'shape \(B, T\)')])
def test_ids_outside_the_vocabulary_have_no_logits(run, tokens, words):
  for of in (run.logits, run.record):
    with pytest.raises(ValueError, match=words):
      of(tokens)
  assert jax.eval_shape(run.logits, jax.ShapeDtypeStruct((2, 6), 'int32')).shape == (2, 6, 16)


def test_continuous_inputs_have_their_features():
  config = sj.sized('tiny', vocab_size=0, input_features=3, output_features=2, dtype='float32')
  run = sj.Run(config, init_params(config, 0))
  assert run.logits(np.zeros((1, 4, 3))).shape == (1, 4, 2)
  with pytest.raises(ValueError, match=r'shape \(B, T, 3\)'):
    run.logits(np.zeros((1, 4, 5)))


def test_a_report_of_a_probe(run):
  with pytest.raises(ValueError, match='batch_size = -1'):
    sj.probe(run, TOKENS, batch_size=-1)
  report = sj.probe(run, TOKENS)
  with pytest.raises(ValueError, match='sink_token_ratio'):
    report.norm_ratio('sink_token')
  with pytest.raises(ValueError, match='epsilon'):
    report.nulls(5.0)
  # A block whose heads have no output: all of them are dormant.
  norms = report.norms | {'head': report.norms['head'] * (np.arange(2) > 0)[:, None, None]}
  heads = dataclasses.replace(report, norms=norms)
  assert heads.dormant_rate() == (1 + (report.head_norms()[1] < 0.25).mean()) / 2


@pytest.mark.parametrize('arguments', [dict(size=4.5), dict(size=8, sinks=1.5)])
def test_a_cache_has_whole_tokens(arguments):
  with pytest.raises(ValueError, match='whole numbers'):
    sj.CachePolicy(**arguments)


def test_what_stands_for_something_else(run):
  with pytest.raises(ValueError, match="size='60m'"):
    sj.parameter_count('60m')
  with pytest.raises(ValueError, match='must name its component'):
    sj.graft(run, attention='HeadGate(scale=2)', tokens=TOKENS)
  with pytest.raises(ValueError, match=r'lengths=8 must be several, such as \(8,\)'):
    sj.analyse('lengths', run, TOKENS, lengths=8)
  assert sj.from_string(sj.Causal, 'Causal()') == sj.Causal()
