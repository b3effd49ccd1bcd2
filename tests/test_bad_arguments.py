"""Public functions refuse arguments out of range: an error names them, no number comes back."""

import jax
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.models.transformer import init_params

TOKENS = np.arange(12).reshape(2, 6)
SPEC, X = sj.AttentionSpec(), np.ones((1, 8, 2, 16), np.float32)


def small(**fields):
  return sj.sized('tiny', vocab_size=16, dtype='float32', **fields)


@pytest.fixture(scope='module')
def run():
  config = small(sink_tokens=1)
  return sj.Run(config, init_params(config, 0))


@pytest.mark.parametrize(
  'call, named',
  [
    (lambda _: sj.AttentionSpec(normalizer=f'PNorm(p={10**400})'), 'finite'),
    (lambda _: sj.AttentionSpec(normalizer=sj.RowSum(eps=float('nan'))), 'eps'),
    (lambda _: small(kv_heads=0), 'kv_heads'),
    (lambda _: sj.CachePolicy(size=8, sinks=1.5), 'sinks'),
    (lambda _: sj.attend(SPEC, X, X, X.astype('float16')), 'dtype'),
    (lambda _: sj.attention_map(SPEC, X.astype(int), X.astype(int)), 'dtype'),
    (lambda _: sj.streaming_importance(SPEC, X, X.astype('float16')), 'dtype'),
    (lambda run: run.logits(TOKENS + 5), '16'),
    (lambda run: run.record(TOKENS - 1), '-1'),
    (lambda run: run.logits([[1, 2], [3]]), 'tokens is a list'),
    (lambda run: sj.probe(run, [[1], [2, 3]]), 'tokens is a list'),
    (lambda run: sj.analyse('signature', run, [[1, 2], [3]]), 'tokens is a list'),
    (lambda run: run.generate(np.ma.masked_less(TOKENS, 2), 3), 'masked'),
    (lambda run: run.logits([1, 2]), r'\(S, T\)'),
    (lambda run: run.logits(TOKENS * 1.0), 'integers'),
    (lambda run: sj.probe(run, TOKENS, batch_size=-1), 'batch_size'),
    (lambda run: sj.probe(run, TOKENS).norm_ratio('sink_token'), 'sink_token'),
    (lambda run: sj.graft(run, attention='HeadGate(scale=2)', tokens=TOKENS), 'component'),
    (lambda run: sj.analyse('lengths', run, TOKENS, lengths=(99,)), '99'),
  ],
)
def test_values_out_of_range_are_named(run, call, named):
  with pytest.raises(ValueError, match=named):
    call(run)


def test_shapes_are_checked_without_values(run):
  assert jax.eval_shape(run.logits, jax.ShapeDtypeStruct((2, 6), 'int32')).shape == (2, 6, 16)
  config = sj.sized('tiny', vocab_size=0, input_features=3, output_features=2, dtype='float32')
  continuous = sj.Run(config, init_params(config, 0))
  assert continuous.logits(np.zeros((1, 4, 3))).shape == (1, 4, 2)
  with pytest.raises(ValueError, match=r'\(S, T, 3\)'):
    continuous.logits(np.zeros((1, 4, 5)))
