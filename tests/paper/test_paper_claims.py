"""Verdicts on the paper's claims follow from the numbers of the runs, and from nothing else."""

import functools
import math
import re

import pytest

from sink_jax.paper.all_claims import CLAIMS
from sink_jax.paper.claims import judge
from sink_jax.paper.collect import groups_of, inconsistencies
from sink_jax.paper.criteria import Every, Near, Onset, Ordered, Trains
from sink_jax.paper.metrics import METRICS
from tests.paper import paper_runs
from tests.paper.paper_runs import change, runs, write, write_not_expressible

CHAIN = lambda difference: {'first_token_chain': dict(largest_relative_difference=difference)}
BY_KEY = {claim.key: claim for claim in CLAIMS}


def verdict(root, key):
  group, = groups_of(runs(root))
  judged = judge(BY_KEY[key], group, None)
  return judged.verdict, judged.why


def test_the_paper_bears_its_own_claims_out(tmp_path):
  # Criteria that the paper's numbers would not meet are not criteria of its claims.
  group, = groups_of(runs(paper_runs.write_paper(tmp_path)))
  verdicts = {claim.key: judge(claim, group, None) for claim in CLAIMS}
  assert {key: v.why for key, v in verdicts.items() if v.verdict != 'holds'} == {}
  assert len(BY_KEY) == len(CLAIMS)
  for verdict_ in verdicts.values():  # every number names its runs
    assert verdict_.numbers and all(number.statistics.runs for number in verdict_.numbers)


# What a criterion calls a metric; the rates of a position k are Sink_k or have its number.
NAMES = {
    'sink_star': r'Sink_\*', 'first_sink_1': 'Sink_1', 'removed_sink_1': 'Sink_1',
    'largest_sink': 'largest Sink_k', 'prefix_sink': 'Sink_k summed', 'prefix_first': 'Sink_1',
    'prefix_share': 'strongest token', 'chain_difference': 'relative difference',
    'emergence_step': 'step at which', 'valid_loss': 'valid loss',
    'removed_loss': 'valid loss rises', 'overfitting': 'valid loss minus the training loss',
    'massive': 'ratio', 'massive_before_norm': 'ratio', 'massive_sink_token': 'ratio',
    'window_absolute': 'absolute first token', 'window_relative': 'first token of the window'}
SIDE = re.compile(r'(?:at least|below|at most|no more than|within) (?:a factor of )?'
                  r'\d+(?:\.\d+)?(?: (?:%|points?|nats))?')


def asked_of(check):
  """Regular expressions of what a criterion has to say, from the fields of a check alone."""
  metric = getattr(check, 'metric', 'valid_loss')
  of = f'{NAMES.get(metric, f"Sink_(?:{metric[-1]}|k)")}(?:(?!Sink_).)* '  # with no other between
  unit = {'percent': ' %', 'points': ' points', 'nats': ' nats'}.get(METRICS[metric].unit, '')
  match check:
    case Every(at_least=None):
      yield f'{of}below {check.below:g}{unit}'
    case Every():
      yield f'{of}at least {check.at_least:g}{unit}' + (
          ' above the largest' if metric.startswith('lead') else '')
    case Ordered():
      verb, other, than = ('falls', 'rises', 'below') if check.falls else (
          'rises', 'falls', 'above')
      whole = len(check.trials) > 2 and not check.ends
      least = f'at least a factor of {math.exp(check.margin):g}' if 'massive' in metric else (
          f'at least {check.margin:g}{unit.replace("%", "points")}')
      if not check.margin:
        yield f'{of}{verb} in all, and never {other}' if whole else f'is {than} that'
      elif whole:
        yield f'{of}{verb} by {least} in all, and {other} by no more than 1 point from one'
      else:
        yield f'{of}{least} {than}[ ,]'
    case Near():
      yield f'{of}lies within {check.margin:g}{unit} of that of the default'
    case Trains():
      yield 'very run .* ' + ('diverges' if check.diverges else 'reaches its last step')
      if check.within:
        yield f'{of}at most {check.within:g}{unit} above that of the default'
    case Onset():
      yield 'smallest has Sink_1 below 5 %, and the largest at least 10 %'
  if getattr(check, 'some', None):
    yield 'at least one'
  if getattr(check, 'sinks', False):
    yield 'whose Sink_1 is at least 10 %'


@pytest.mark.parametrize('claim', CLAIMS, ids=BY_KEY)
def test_a_criterion_says_what_its_checks_decide(claim):
  words = claim.criterion
  asked = [phrase for check in claim.checks for phrase in asked_of(check)]
  for phrase in asked:
    assert re.search(phrase, words), phrase
  # Nothing else is asked: each number with a side is one of a check.
  assert set(SIDE.findall(words)) == {side for phrase in asked for side in SIDE.findall(phrase)}
  assert words.endswith('.') and not any(f' {trial} ' in words for trial in claim.trials
                                         if re.search(r'\d', trial))


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
  answer, why = verdict(tmp_path, 'random-first')
  assert answer == 'cannot be judged' and 'are edited (FixedToken(position=1))' in why


@pytest.mark.parametrize('key, trial', [('prefix', 'prefix-2'), ('window', 'window-512')])
def test_so_it_does_in_prefixes_and_windows(key, trial, tmp_path):
  write(tmp_path / 'default')
  write(tmp_path / trial, trial, sink=(50, 50))
  assert 'are edited' in verdict(tmp_path, key)[1]


def test_no_sink_needs_a_counterpart_that_has_one(tmp_path):
  write(tmp_path / 'default', losses=2.96)
  for trial in ('mlp', 'mlp-normalized'):
    write(tmp_path / trial, trial, sink=(0,), losses=3.5 if trial == 'mlp' else 3.0)
  answer, why = verdict(tmp_path, 'mlp-kernel')
  assert (answer, why.split('.')[0]) == (
      'cannot be judged', 'No counterpart with normalisation: sigmoid-normalized is not run')
  assert why.endswith('Valid loss: mlp 3.500 against 2.960 of default: it also learns less')
  write(tmp_path / 'n0', 'sigmoid-normalized', sink=(4,))
  assert 'no sink in the counterpart' in verdict(tmp_path, 'mlp-kernel')[1].lower()
  write(tmp_path / 'n1', 'sigmoid-normalized', seed=1, sink=(40,))
  answer, why = verdict(tmp_path, 'mlp-kernel')
  assert answer == 'holds' and 'mlp 3.500 against 2.960' in why


def test_seeds_that_are_not_in_a_mean_are_named(tmp_path):
  write(tmp_path / 'default')
  write(tmp_path / 'default-1', seed=1, status='failed', details=dict(error='no memory'))
  write(tmp_path / 'v0', 'v-bias', sink=(20,))
  write(tmp_path / 'v1', 'v-bias', seed=1, status='diverged', step=300)
  answer, why = verdict(tmp_path, 'value-biases')
  # The others went well: their mean says nothing of how often a seed does not.
  assert answer == 'undecided' and why.endswith('A seed of v-bias diverged. Presupposed of those '
                                                'that are done; not in the means: default (failed '
                                                '(no memory), seed 1)')
  assert 'not in the means: v-bias (diverged (step 300 of 1,000), seed 1)' in why


def test_training_is_not_judged_while_a_seed_is_under_way(tmp_path):
  write(tmp_path / 'default', losses=3.0)
  names = ('softmax-p-half', 'softmax-p-third', 'softmax-p-quarter')
  for trial in names:
    write(tmp_path / trial, trial, losses=3.4)
  assert verdict(tmp_path, 'p-norm-trains')[0] == 'holds'
  write(tmp_path / 'again', names[0], seed=1, status='running', step=300)
  assert verdict(tmp_path, 'p-norm-trains')[0] == 'cannot be judged'
  write(tmp_path / 'third', names[0], seed=2, status='diverged', step=300)
  assert verdict(tmp_path, 'p-norm-trains')[0] == 'does not hold'


def test_to_train_is_to_learn(tmp_path):
  write(tmp_path / 'default', losses=3.0)
  for trial in ('softmax-p-half', 'softmax-p-third', 'softmax-p-quarter'):
    write(tmp_path / trial, trial, losses=3.7)
  answer, why = verdict(tmp_path, 'p-norm-trains')
  assert answer == 'does not hold' and 'Valid loss: default 3.000, softmax-p-half 3.700' in why


@pytest.mark.parametrize('settings', [
    {'data.source': "Stdlib(domains='code')"}, {'data.tokenizer': 'Bytes()'}, {'data.context': 128},
    {'batch_size': 8}, {'model.d_model': 32}, {'probe.epsilon': 0.5}, {'probe.length': 32}])
def test_runs_that_are_not_comparable_decide_nothing(settings, tmp_path):
  for trial in ('default', 'v-bias', 'batch-128'):
    write(tmp_path / trial, trial)
  assert verdict(tmp_path, 'value-biases')[0] == 'holds'
  change(tmp_path / 'v-bias', settings)
  answer, why = verdict(tmp_path, 'value-biases')
  key, = settings
  assert answer == 'cannot be judged' and f'v-bias: {key} {settings[key]} instead of ' in why
  group, = groups_of(runs(tmp_path))
  assert list(group.incomparable) == ['v-bias']  # batch-128 is about its batches
  line, = inconsistencies(group)
  assert line.startswith('v-bias is not comparable')


def test_seeds_of_other_runs_are_no_seeds(tmp_path):
  for seed in (0, 1, 2):
    write(tmp_path / f'd{seed}', seed=seed)
  assert verdict(tmp_path, 'emergence')[0] == 'holds'
  change(tmp_path / 'd1', {'optimizer.learning_rate': 0.5})
  answer, why = verdict(tmp_path, 'emergence')
  assert answer == 'cannot be judged' and 'its runs differ in optimizer.learning_rate' in why


def test_the_content_of_the_data_is_compared(tmp_path):
  for trial, content in (('default', 'a'), ('heads-2', 'a'), ('v-bias', 'b')):
    write(tmp_path / trial, trial)
    (tmp_path / trial / 'data.json').write_text(f'{{"content": "{content}"}}')
  group, = groups_of(runs(tmp_path))
  assert group.incomparable == {'v-bias': 'other content of its data'}


def test_massive_activations_are_presupposed_too(tmp_path):
  write(tmp_path / 'default', hidden_ratio=[9.0, 1.5, 1.25])
  assert 'largest hidden norm ratio of default is 1.50' in verdict(tmp_path, 'biases-massive')[1]


def test_what_is_not_done_is_awaited_and_what_cannot_be_is_left_out(tmp_path):
  write(tmp_path / 'default')
  for trial in ('heads-4', 'heads-2'):
    write(tmp_path / trial, trial, sink=(15,))
  write(tmp_path / 'heads-added', 'heads-added', status='running', step=300)
  write_not_expressible(tmp_path / 'heads-1', 'heads-1', 'no head is left')
  answer, why = verdict(tmp_path, 'heads')
  assert answer == 'cannot be judged' and 'missing: heads-added (running (step 300 of' in why
  assert 'left out: heads-1 (not expressible (no head is left))' in why
  write(tmp_path / 'again/heads-added', 'heads-added', sink=(15,))
  assert verdict(tmp_path, 'heads')[0] == 'holds'


def test_a_counterexample_decides_before_all_is_done(tmp_path):
  write(tmp_path / 'default')
  write(tmp_path / 'batch-128', 'batch-128', sink=(0,))
  answer, why = verdict(tmp_path, 'batch-size')
  assert answer == 'does not hold' and 'missing: batch-256 (not run)' in why


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
  verdicts = [(group.key, judge(BY_KEY['emergence'], group, None).verdict)
           for group in groups_of(runs(tmp_path))]
  assert verdicts == [('tenth-paper', 'holds'), ('smoke-paper', 'holds'),
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
  assert judge(BY_KEY['small-window'], smoke, None).verdict == 'cannot be judged'
  assert judge(BY_KEY['small-window'], tenth, None).verdict == 'holds'


def test_a_sink_that_is_there_needs_no_counterpart(tmp_path):
  write(tmp_path / 'default')
  for trial, sink in (('sigmoid', 60), ('elu', 0), ('identity', 0), ('mlp', 0)):
    write(tmp_path / trial, trial, sink=(sink,))
  assert verdict(tmp_path, 'no-normalisation')[0] == 'does not hold'
