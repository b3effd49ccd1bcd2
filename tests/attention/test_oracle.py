"""Attention in plain XLA against three nested loops in float64."""

import pytest

import sink_jax as sj
from sink_jax.attention.spec import COMPONENTS
from sink_jax.component import registry
from tests.attention_checks import SIZES, check_gradient, check_values
from tests.attention_specs import PAPER, pairwise_specs

# A row for every branch; the test of pairs has the other values.
NAMES = [
  'softmax',
  'relative (Table 3)',
  'alibi (Table 3)',
  'window (Figure 6)',
  'prefix (Figure 5)',
  'kv bias (Table 4)',
  'k bias (Table 4)',
  'v bias (Table 4)',
  'v* = 5 v1 (Table 5)',
  'd_a = 2 (Table 13)',
  'shared kv bias (Table 12)',
  'p-norm softmax 1/2 (Figure 29)',
  'p-norm sigmoid 2 (Figure 29)',
  'sigmoid (Table 15)',
  'normalized sigmoid (Table 15)',
  'elu (Table 15)',
  'normalized elu map (Table 15)',
  'normalized identity (Table 15)',
  'mlp (Table 15)',
  'softpick',
]
BEYOND = {
  # The cap also applies to the bias and to the score of k*, and powers need a separate sum.
  'capped p-norm': sj.AttentionSpec(
    'CappedExp(cap=1.5)', 'PNorm(p=2.0)', position='Alibi()', kv_bias='KBias()'
  ),
  'clipped': sj.AttentionSpec(normalizer='Clipped(low=-0.2, high=1.1)', kv_bias='SinkLogit()'),
  'projection norm': sj.AttentionSpec(qk_norm='ProjectionQKNorm()', temperature='LogLength()'),
  'head norm': sj.AttentionSpec(qk_norm='QKNorm()', head='HeadNorm(eps=0.1)'),
  'gate of values': sj.AttentionSpec(
    value='ValueScale()', head="HeadGate(source='value', opening=0.25)"
  ),
  'gate of the input': sj.AttentionSpec(position='YarnRope()', head='ElementGate(scale=2.0)'),
  'exclusive': sj.AttentionSpec(head='Exclusive()'),
  'exclusive of one key': sj.AttentionSpec(head='Exclusive()', mask='Window(size=1)'),
}


@pytest.mark.typed
@pytest.mark.parametrize('name', [*NAMES, *BEYOND])
def test_values_gradients_and_importance(name):
  check_gradient((PAPER | BEYOND)[name], 'chunked', importance=True, **SIZES)


@pytest.mark.parametrize('name', ['kv bias (Table 4)', 'normalized elu (Table 15)'])
def test_one_token(name):
  check_gradient(PAPER[name], 'chunked', importance=True, length=1)


def test_every_pair_of_classes_and_every_value():
  specs, impossible = pairwise_specs()
  assert len(specs) > 50
  for spec in specs:
    check_values(spec, **SIZES)
  of = lambda component: set(registry(COMPONENTS[component]))
  pairs = lambda some, others: {frozenset((x, y)) for x in some for y in others if x != y}
  softmax, constant = {'Exp', 'CappedExp'}, {'ZeroSink', 'PseudoMask'}
  assert {frozenset(cls.__name__ for _, cls in pair) for pair in impossible} == (
    pairs(softmax, {'Unnormalized', 'Count'})
    | pairs({'Unnormalized', 'Count'}, constant | {'SinkLogit'})
    | pairs(constant, of('similarity') - softmax | {'AbsSum'})
    | pairs({'Clipped'}, of('similarity') - softmax)
    | pairs({'Softpick'}, of('normalizer') - {'AbsSum'})
    | pairs({'AbsSum'}, of('similarity') - {'Softpick'})
    | pairs({'Prefix'}, {'PseudoMask'})
  )
