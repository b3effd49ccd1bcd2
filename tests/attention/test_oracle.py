"""Every implementation in plain XLA against three nested loops in float64."""

import pytest

import sink_jax as sj
from sink_jax.attention.spec import COMPONENTS
from sink_jax.component import registry
from tests import attention_oracle as oracle
from tests.attention_checks import PLAIN, assert_close, check_gradient, check_values
from tests.attention_specs import PAPER, pairwise_specs, random_inputs, slot_values


@pytest.mark.every(2)
@pytest.mark.typed
@pytest.mark.parametrize('name', PAPER)
def test_paper_variants(name):
  check_values(PAPER[name], PLAIN, length=20, heads=2)
  check_values(PAPER[name], PLAIN, batch=2, kv_heads=1)
  check_values(PAPER[name], PLAIN, length=1)
  for implementation in PLAIN:
    check_gradient(PAPER[name], implementation)


def test_every_pair_of_slot_values(request):
  """With --full all specs that hold the pairs, and their gradients; otherwise every fourth spec."""
  (specs, impossible), full = pairwise_specs(), request.config.getoption('--full')
  assert len(specs) > 50
  for number, spec in enumerate(specs[:: 1 if full else 4]):
    check_values(spec, PLAIN)
    if full or number % 4 == 0:
      check_gradient(spec, 'chunked')
  # The pairs that are impossible in any spec.
  of = lambda slot: set(registry(COMPONENTS[slot]))
  pairs = lambda some, others: {frozenset((x, y)) for x in some for y in others if x != y}
  softmax, without_value = {'Exp', 'CappedExp'}, {'KBias', 'SinkLogit', 'ZeroSink', 'PseudoMask'}
  assert {frozenset((type(x).__name__, type(y).__name__)) for _, x, _, y in impossible} == (
    pairs(softmax, {'Unnormalized', 'RowSum', 'Count'})
    | pairs({'Unnormalized', 'Count'}, without_value)
    | pairs({'ZeroSink', 'PseudoMask'}, of('similarity') - softmax | {'RowSum', 'AbsSum'})
    | pairs({'Clipped'}, of('similarity') - softmax)
    | pairs({'Softpick'}, of('normalizer') - {'AbsSum'})
    | pairs({'AbsSum'}, of('similarity') - {'Softpick'})
    | pairs({'Prefix'}, {'PseudoMask'})
  )


@pytest.mark.parametrize('head', slot_values()['head'], ids=repr)
def test_heads_of_grouped_values(head):
  spec = sj.AttentionSpec(head=head, value='ValueScale()')
  check_values(spec, ['reference', 'chunked'], heads=4, kv_heads=2)


@pytest.mark.parametrize(
  'value', [sj.ValueResidual(), sj.ValueResidual(own=2.0, first=-0.5, learned=False)]
)
def test_values_of_the_first_block_are_mixed_in(value):
  spec = sj.AttentionSpec(value=value, kv_bias=sj.KVBias())
  q, k, v, params = random_inputs(spec, heads=4, kv_heads=2)
  first = random_inputs(spec, heads=4, kv_heads=2, seed=1)[2]
  expected = oracle.attention(spec, q, k, v, params, first=first)[0]
  for implementation in PLAIN:
    out = sj.attend(
      spec, q, k, v, params, first_values_BxTxHkvxDh=first, implementation=implementation
    )
    assert_close(out, expected, implementation)


@pytest.mark.parametrize(
  'spec',
  [
    # The cap also applies to the bias and to the score of k*, and powers need a separate sum.
    sj.AttentionSpec('CappedExp(cap=1.5)', 'PNorm(p=2.0)', position='Alibi()', kv_bias='KBias()'),
    sj.AttentionSpec(head='Exclusive()'),
    sj.AttentionSpec(head='Exclusive()', mask='Window(size=1)'),
    sj.AttentionSpec(head="HeadGate(source='value', opening=0.25)"),
  ],
  ids=str,
)
def test_gradients_of_what_follows_a_score_or_a_row(spec):
  check_gradient(spec, 'chunked')
