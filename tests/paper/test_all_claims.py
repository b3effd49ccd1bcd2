"""The trials that claims need."""

import pytest

from sink_jax.paper.all_claims import CLAIMS, trials_of


def test_trials_come_in_the_order_of_the_claims_and_once():
  trials = trials_of(['key-biases', 'emergence', 'value-biases'])
  assert trials == ['default', 'sink-token', 'kv-bias', 'k-bias', 'v-bias']
  everything = trials_of([claim.key for claim in CLAIMS])
  assert len(everything) == len(set(everything)) > 90


def test_what_a_claim_presupposes_is_needed_too():
  # That there is no sink says something only beside the counterpart with normalisation.
  assert {'default', 'sigmoid-normalized', 'sigmoid'} <= set(trials_of(['no-normalisation']))


def test_an_unknown_claim_lists_the_choices():
  with pytest.raises(ValueError, match="no claim .emergency.. Did you mean emergence.*: chain"):
    trials_of(['emergency'])
