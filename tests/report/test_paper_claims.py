"""Verdicts on the paper's claims follow from the numbers of the runs, and from nothing else."""

import functools

import pytest

from sink_jax.report.paper.claims import judge
from sink_jax.report.paper.collect import groups_of
from sink_jax.report.paper.report import CLAIMS
from tests.report import paper_runs
from tests.report.paper_runs import runs, write, write_not_expressible

CHAIN = lambda difference: {'first_token_chain': dict(largest_relative_difference=difference)}
BY_KEY = {claim.key: claim for claim in CLAIMS}


def verdict(root, key):
  group, = groups_of(runs(root))
  found = judge(BY_KEY[key], group)
  return found['verdict'], found['why']


def test_the_paper_bears_its_own_claims_out(tmp_path):
  # Criteria that the paper's numbers would not meet are not criteria of its claims.
  group, = groups_of(runs(paper_runs.write_paper(tmp_path)))
  found = {claim.key: judge(claim, group) for claim in CLAIMS}
  assert {key: v['why'] for key, v in found.items() if v['verdict'] != 'holds'} == {}
  assert len(BY_KEY) == len(CLAIMS)
  for verdict_ in found.values():  # every number names its runs
    assert verdict_['numbers'] and all(number['runs'] for number in verdict_['numbers'])


def test_every_claim_says_what_it_asks():
  for claim in CLAIMS:
    assert len(claim.criterion) > 20 and claim.criterion.endswith('.'), claim.key
    assert '1 points' not in claim.criterion


@pytest.mark.parametrize('key, trial, good, bad', [
    ('batch-size', 'batch-128', dict(sink=(12,)), dict(sink=(3,))),
    ('emergence', 'default', dict(), dict(sink=(9,))),
    ('value-biases', 'v-bias', dict(sink=(12,)), dict(sink=(0,))),
    ('no-weight-decay', 'weight-decay-0', dict(sink=(15,)), dict(sink=(9.9,))),
    ('weight-decay', 'weight-decay-0.5', dict(sink=(41,)), dict(sink=(21,))),
    ('random-both', 'random-1-2', dict(sink=(2, 14)), dict(sink=(14, 12))),
    ('post-norm', 'post-norm', dict(sink=(13.5,)), dict(sink=(1,))),
    ('chain', 'default', dict(analyses=CHAIN(1e-6)), dict(analyses=CHAIN(0.1))),
    ('prefix-anywhere', 'prefix-5', dict(sink=(5, 20)), dict(sink=(20,))),
    ('1b-massive', '1b-softmax', dict(hidden_ratio=[1, 1, 5]), dict(hidden_ratio=[9, 1, 1.9]))])
def test_a_verdict_flips_with_its_number(key, trial, good, bad, tmp_path):
  for name, numbers, expected in (('good', good, 'holds'), ('bad', bad, 'does not hold')):
    here = functools.partial(write, budget='tenth')
    here(tmp_path / name / 'default', **(numbers if trial == 'default' else {}))
    here(tmp_path / name / '1b-sigmoid', '1b-sigmoid', hidden_ratio=[1, 1, 1])
    for other in ('batch-256', 'batch-1024'):
      here(tmp_path / name / other, other)
    if trial != 'default':
      here(tmp_path / name / trial, trial, **numbers)
    assert verdict(tmp_path / name, key)[0] == expected


def test_without_a_sink_in_the_baseline_nothing_can_move(tmp_path):
  write(tmp_path / 'k-bias', 'k-bias', sink=(0,), sink_bias_slot=50.0)
  assert verdict(tmp_path, 'key-biases') == ('cannot be judged', 'No baseline: default is not run')
  write(tmp_path / 'default', sink=(9,))
  assert verdict(tmp_path, 'key-biases') == (
      'cannot be judged', 'No sink in the baseline: Sink_1 % of default is 9.00')


def test_a_fixed_first_token_decides_where_the_sink_stands(tmp_path):
  write(tmp_path / 'default')  # the smoke budget fixes it
  write(tmp_path / 'random-1', 'random-1', sink=(0,))
  found, why = verdict(tmp_path, 'random-first')
  assert found == 'cannot be judged' and 'are edited (FixedToken(position=1))' in why


def test_massive_activations_are_presupposed_too(tmp_path):
  write(tmp_path / 'default', hidden_ratio=[9.0, 1.5, 1.25])
  assert 'largest hidden norm ratio of default is 1.50' in verdict(tmp_path, 'biases-massive')[1]


def test_what_is_not_done_is_awaited_and_what_cannot_be_is_left_out(tmp_path):
  write(tmp_path / 'default')
  for trial in ('heads-4', 'heads-2'):
    write(tmp_path / trial, trial, sink=(15,))
  write(tmp_path / 'heads-added', 'heads-added', status='running', step=300)
  write_not_expressible(tmp_path / 'heads-1', 'heads-1', 'no head is left')
  found, why = verdict(tmp_path, 'heads')
  assert found == 'cannot be judged' and 'missing: heads-added (running (step 300 of' in why
  assert 'left out: heads-1 (not expressible (no head is left))' in why
  write(tmp_path / 'again/heads-added', 'heads-added', sink=(15,))
  assert verdict(tmp_path, 'heads')[0] == 'holds'


def test_a_counterexample_decides_before_all_is_done(tmp_path):
  write(tmp_path / 'default')
  write(tmp_path / 'batch-128', 'batch-128', sink=(0,))
  found, why = verdict(tmp_path, 'batch-size')
  assert found == 'does not hold' and 'missing: batch-256 (not run)' in why


def test_means_of_seeds_decide(tmp_path):
  write(tmp_path / 'default')
  write(tmp_path / 'v0', 'v-bias', seed=0, sink=(4,))
  assert verdict(tmp_path, 'value-biases')[0] == 'does not hold'
  write(tmp_path / 'v1', 'v-bias', seed=1, sink=(18,))
  assert verdict(tmp_path, 'value-biases') == (
      'holds', 'Sink_1: v-bias 11.00 % (4.00 to 18.00, n = 2)')


def test_budgets_and_protocols_are_judged_apart(tmp_path):
  write(tmp_path / 'a', sink=(20,))
  write(tmp_path / 'b', sink=(0,), protocol='released')
  write(tmp_path / 'c', sink=(30,), budget='tenth')
  found = [(group.key, judge(BY_KEY['emergence'], group)['verdict'])
           for group in groups_of(runs(tmp_path))]
  assert found == [('tenth-paper', 'holds'), ('smoke-paper', 'holds'),
                   ('smoke-released', 'does not hold')]


@pytest.mark.parametrize('sinks, expected', [
    ((30, 20, 10, 3), 'holds'), ((30, 20, 20.5, 3), 'holds'), ((30, 20, 22, 3), 'does not hold'),
    ((20, 20, 20, 19), 'does not hold'), ((100, 99, 98, 96), 'cannot be judged')])
def test_an_order_allows_noise_and_needs_room(sinks, expected, tmp_path):
  for trial, sink in zip(('lr-8e-4', 'default', 'lr-2e-4', 'lr-1e-4'), sinks):
    write(tmp_path / trial, trial, sink=(sink,))
  assert verdict(tmp_path, 'learning-rate')[0] == expected


def test_divergence_is_a_result(tmp_path):
  names = ('softmax-p-2', 'softmax-p-3', 'softmax-p-4')
  for trial in names:
    write(tmp_path / trial, trial, status='diverged', step=300)
  assert verdict(tmp_path, 'p-norm-diverges')[0] == 'holds'
  write(tmp_path / 'again', 'softmax-p-2', seed=1)
  assert verdict(tmp_path, 'p-norm-diverges')[0] == 'does not hold'


def test_windows_that_cannot_show_a_sink_are_no_evidence(tmp_path):
  for size in (32, 64, 128, 256, 512, 1024):
    write(tmp_path / f's{size}', f'window-{size}', sink=(20 if size > 500 else 0,))
    write(tmp_path / f't{size}', f'window-{size}', budget='tenth', sink=(20 if size > 500 else 0,))
  write(tmp_path / 'default')
  write(tmp_path / 'tenth', budget='tenth')
  tenth, smoke = groups_of(runs(tmp_path))
  # A window of 1 to 16 of 64 tokens keeps the importance below 0.3, however strong the sink.
  assert judge(BY_KEY['small-window'], smoke)['verdict'] == 'cannot be judged'
  assert judge(BY_KEY['small-window'], tenth)['verdict'] == 'holds'
