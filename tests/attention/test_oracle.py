"""Every implementation in plain XLA against three nested loops in float64."""

import pytest

import sink_jax as sj
from sink_jax.attention.spec import COMPONENTS
from sink_jax.component import registry
from tests import attention_oracle as oracle
from tests.attention_checks import PLAIN, assert_close, check_gradient, check_values
from tests.attention_specs import (
  PAPER,
  attend,
  pairwise_specs,
  product_specs,
  random_inputs,
  slot_values,
)


@pytest.mark.every(2)
@pytest.mark.typed
@pytest.mark.parametrize('name', PAPER)
def test_paper_variants(name):
  check_values(PAPER[name], PLAIN, length=20, heads=2)
  check_values(PAPER[name], PLAIN, batch=2, kv_heads=1)
  for implementation in PLAIN:
    check_gradient(PAPER[name], implementation)


def test_every_pair_of_slot_values(request):
  """With --full all pairs, and their gradients below; otherwise every second of the specs that hold them."""
  specs, impossible = pairwise_specs()
  assert len(specs) > 50
  for number, spec in enumerate(specs[::1 if request.config.getoption('--full') else 2]):
    check_values(spec, PLAIN)
    if number % 6 == 0:
      check_gradient(spec, 'chunked')
  # The pairs that no spec can hold.
  names = {frozenset((type(x).__name__, type(y).__name__)) for _, x, _, y in impossible}
  without_value = {type(x).__name__ for x in slot_values()['kv_bias']
                   if x.acts_only_through_normalisation}
  assert without_value >= {'KBias', 'SinkLogit', 'ZeroSink', 'PseudoMask'}
  others = {type(x).__name__ for x in slot_values()['similarity']}
  others -= {'Exp', 'CappedExp'}
  assert names == {frozenset((exp, name)) for exp in ('Exp', 'CappedExp')
                   for name in ('Unnormalized', 'RowSum', 'Count')} | {
      frozenset((name, extra)) for name in ('Unnormalized', 'Count') for extra in without_value} | {
          frozenset((name, extra)) for extra in ('ZeroSink', 'PseudoMask')
          for name in (*others, 'RowSum', 'AbsSum')} | {frozenset(('Prefix', 'PseudoMask'))} | {
              frozenset((name, 'Clipped')) for name in others} | {
                  frozenset(('Softpick', name)) for name in registry(COMPONENTS['normalizer'])
                  if name != 'AbsSum'} | {
                      frozenset(('AbsSum', name)) for name in registry(COMPONENTS['similarity'])
                      if name != 'Softpick'}


@pytest.mark.parametrize('head', slot_values()['head'], ids=repr)
def test_heads_of_grouped_values(head):
  spec = sj.AttentionSpec(head=head, value='ValueScale()')
  check_values(spec, ['reference', 'chunked'], heads=4, kv_heads=2)


@pytest.mark.parametrize('value', [
    sj.ValueResidual(), sj.ValueResidual(own=2.0, first=-0.5, learned=False)])
def test_values_of_the_first_block_are_mixed_in(value):
  spec = sj.AttentionSpec(value=value, kv_bias=sj.KVBias())
  q, k, v, params = random_inputs(spec, heads=4, kv_heads=2)
  first = random_inputs(spec, heads=4, kv_heads=2, seed=1)[2]
  expected = oracle.attention(spec, q, k, v, params, first=first)[0]
  for implementation in PLAIN:
    out = sj.attend(spec, q, k, v, params, first_values_BxTxHkvxDh=first,
                    implementation=implementation)
    assert_close(out, expected, implementation)
  for other, words in ((spec, 'the shape of the values'), (sj.AttentionSpec(), 'only ValueResidual')):
    with pytest.raises(ValueError, match=words):
      sj.attend(other, q, k, v, params, first_values_BxTxHkvxDh=first[:, :3])


@pytest.mark.parametrize('spec', [
    # The bias and the score of k* are within the cap, too, and powers are sums of their own.
    sj.AttentionSpec('CappedExp(cap=1.5)', 'PNorm(p=2.0)', position='Alibi()', kv_bias='KBias()'),
    sj.AttentionSpec(head='Exclusive()'), sj.AttentionSpec(head='Exclusive()', mask='Window(size=1)'),
    sj.AttentionSpec(head="HeadGate(source='value', opening=0.25)")], ids=str)
def test_gradients_of_what_follows_a_score_or_a_row(spec):
  check_gradient(spec, 'chunked')


@pytest.mark.full
def test_gradients_of_every_pair_of_slot_values():
  for spec in pairwise_specs()[0]:
    check_gradient(spec, 'chunked')


@pytest.mark.full
@pytest.mark.parametrize('normalizer', registry(COMPONENTS['normalizer']))
@pytest.mark.parametrize('similarity', registry(COMPONENTS['similarity']))
def test_every_combination_of_slot_classes(similarity, normalizer):
  specs = list(product_specs(similarity, normalizer))
  if not specs:
    pytest.skip('refused, whatever the other slots are')
  for spec in specs:
    inputs = random_inputs(spec, length=5, heads=2)
    out = oracle.attention(spec, *inputs)[0]
    for implementation in PLAIN:
      assert_close(attend(spec, *inputs, implementation=implementation), out,
                   f'{implementation} {spec}')
    check_gradient(spec, 'chunked')
