"""Claims: rows say what they are made of, and planted runs get the verdict that they deserve."""

import collections
import json
import math

import pandas as pd
import pytest

from configs import paper as trials
from sink_jax.pretrained.hub import MODELS
from sink_jax.report import claims, paper
from sink_jax.report.claims import Claim, Verdict
from sink_jax.report.conditions import (
  above,
  below,
  diverges,
  equal,
  greater,
  less,
  ordered,
  trains,
)
from sink_jax.report.paper_claims import CLAIMS, SINK, UNEDITED
from sink_jax.report.runs import read_runs, table

# By seed, with the columns of `runs.table`. The untrained model has no sink.
COLUMNS = dict(
  budget='desk',
  protocol='paper',
  content='text',
  status='done',
  valid='',
  heads=8,
  steps=100,
  settings='{}',
  untrained_sink_1=0.0,
  converges=1.0,
  window=math.nan,
  length=64,
)


def runs(trial, values=(26.0, 25.0, 27.0), metric='sink_1', **columns):
  return [
    COLUMNS | {'trial': trial, 'seed': seed, metric: value} | columns
    for seed, value in enumerate(values, 1)
  ]


NO_SINK_WITH_K_BIAS = below('sink_1', 'k-bias', 5)


def judged(says, rows, needs=()):
  return claims.judge(Claim('key', '4', 'A sentence.', says, needs), pd.DataFrame(rows))


def test_every_trial_and_metric_is_known():
  known = {*table(read_runs('results')), 'edited_sequences'}
  for claim in CLAIMS:
    assert claim.says
    assert claim.sentence.endswith('.')
    for metric, names, _, _, other, _ in [*claim.says, *claim.needs]:
      for name in filter(None, (*names, other)):
        if name in MODELS:
          assert metric.split('_')[0] in ('kinds', 'norms', 'angles', 'domains', 'positions'), (
            claim.key
          )
        else:
          assert name in {*trials.TRIALS, 'untrained'} and metric in known, claim.key

  assert len({claim.key for claim in CLAIMS}) == len(CLAIMS)


def test_conditions():
  says = below('massive', ['c', 'd'], 5) + greater('massive', 'e', 'f', times=1.25)
  assert [condition[:5] for condition in says] == [
    ('massive', ('c', 'd'), '<', math.log(5), ''),
    ('massive', ('e',), '>', math.log(1.25), 'f'),
  ]
  assert Claim('a', '4', 'B.', says).criterion == 'massive: c, d < 5 and e > f * 1.25'

  row = ordered('sink_1', ['c', 'd', 'e'], by=2)
  assert [condition[:5] for condition in row] == [
    ('sink_1', ('c',), '>', -1, 'd'),
    ('sink_1', ('d',), '>', -1, 'e'),
    ('sink_1', ('c',), '>', 2, 'e'),
  ]
  assert Claim('a', '4', 'B.', row).criterion == 'sink_1: c > d > e + 2'

  rising = ordered('emergence_step', ['c', 'd'], rising=True)
  assert Claim('a', '4', 'B.', rising).criterion == 'emergence_step: c < d'

  rising = ordered('valid_loss', ['c', 'd'], by=2, rising=True)
  assert [condition[:5] for condition in rising] == [
    ('valid_loss', ('c',), '<', 0.1, 'd'),
    ('valid_loss', ('c',), '<', -2, 'd'),
  ]
  assert Claim('a', '4', 'B.', rising).criterion == 'valid_loss: c < d - 2'

  says = diverges('f') + trains('g', 'h') + equal('valid_loss', 'c', 'd', within=0.1)
  says += less('valid_loss', 'c', 'd', plus=0.5) + less('valid_loss', 'c', 'd', plus=-2)

  assert [condition[:5] for condition in says] == [
    ('converges', ('f',), '<', 0.5, ''),
    ('converges', ('g', 'h'), '>', 0.5, ''),
    ('valid_loss', ('c',), '=', 0.1, 'd'),
    ('valid_loss', ('c',), '<', 0.5, 'd'),
    ('valid_loss', ('c',), '<', -2, 'd'),
  ]
  assert Claim('a', '4', 'B.', says).criterion == (
    'diverges: f and trains: g, h and valid_loss: c = d +- 0.1 and c < d + 0.5 and c < d - 2'
  )


def test_a_margin_that_does_not_fit_the_quantity_is_an_error():
  with pytest.raises(ValueError, match='sink_1 is not a ratio'):
    greater('sink_1', 'a', 'b', times=2)
  with pytest.raises(ValueError, match='massive is a ratio'):
    greater('massive', 'a', 'b', by=2)
  with pytest.raises(ValueError, match='massive is a ratio'):
    less('massive', 'a', 'b', plus=2)
  with pytest.raises(ValueError, match='massive is a ratio'):
    ordered('massive', ['a', 'b'], by=2)


@pytest.mark.parametrize(
  ('values', 'verdict'),
  [
    ((26, 25, 27), Verdict.REPRODUCED),
    ((0, 0, 0), Verdict.NOT_REPRODUCED),
    ((0, 27, 26), Verdict.OPEN),
    ((26, 27), Verdict.OPEN),
  ],
)
def test_a_level(values, verdict):
  found = judged(
    above('sink_1', 'default', 10) + below('sink_1', 'untrained', 10), runs('default', values)
  )
  assert (found.verdict, found.n) == (verdict, len(values))
  assert f'{sum(values) / len(values):.2f}' in found.measured
  assert '18.18' in found.paper


def test_a_comparison_is_paired_by_seed():
  # seeds differ widely, but each gains 30 points
  base = (10.0, 40.0, 70.0)
  shifted = (40.2, 70.0, 100.0)
  rows = runs('default', base) + runs('v-bias', shifted)

  assert judged(greater('sink_1', 'v-bias', 'default', by=2), rows).verdict == Verdict.REPRODUCED
  assert judged(less('sink_1', 'v-bias', 'default'), rows).verdict == Verdict.NOT_REPRODUCED

  other = runs('default', base) + [
    row | {'seed': row['seed'] + 3} for row in runs('v-bias', shifted)
  ]
  assert judged(greater('sink_1', 'v-bias', 'default', by=2), other).verdict == Verdict.OPEN


def test_no_difference_of_losses_and_of_rates():
  rows = runs('default', (3.0, 3.1, 3.2), 'valid_loss') + runs(
    'k-bias', (3.01, 3.09, 3.2), 'valid_loss'
  )
  assert (
    judged(equal('valid_loss', 'k-bias', 'default', within=0.1), rows).verdict == Verdict.REPRODUCED
  )

  rows = runs('default', (25, 25, 25)) + runs('k-bias', (25, 25, 25))
  found = judged(equal('sink_1', 'k-bias', 'default', within=2), rows)

  # three seeds cannot exclude this
  assert found.verdict == Verdict.OPEN
  assert '63 %' in found.why


def test_the_rule_reproduces_the_paper():
  """The paper's means, as if of three seeds with its 80 heads, are what its claims say."""
  numbers = collections.defaultdict(dict)
  for item in paper.TABLES:
    for row in item['rows']:
      for metric, value in row['values'].items():
        if row['trial'] and value is not None:
          # A range of a rate: its end, as in "below 1".
          numbers[row['trial']][metric] = value[1] if isinstance(value, list) else value

  ours = [
    row | {'heads': 80, **numbers[trial], 'lead_1': numbers[trial].get('sink_1')}
    for trial in numbers
    for row in runs(trial, metric='unused')
  ]
  judged = {}
  lacking = {}

  for claim in CLAIMS:
    if claim.headline and claim.section != '3.3':
      found = claims.judge(claim, pd.DataFrame(ours))
      judged[claim.key], lacking[claim.key] = found.verdict, found.why

  undecided = {
    key: lacking[key] for key, verdict in judged.items() if verdict != Verdict.REPRODUCED
  }
  # Not decided are those of which the text gives no number.
  assert all('not measured' in why for why in undecided.values()), undecided
  assert sum(verdict == Verdict.REPRODUCED for verdict in judged.values()) >= 9, undecided


def test_dead_and_other_invalid_runs_are_no_evidence():
  good = runs('default')
  bad = runs('sigmoid', (0, 0, 0), valid='dead')
  found = judged(below('sink_1', 'sigmoid', 5), good + bad, SINK)

  assert found.verdict == Verdict.NOT_TESTABLE
  assert found.n == 0
  assert '3 of 3 runs dead' in found.why

  mixed = runs('sigmoid', (0, 0, 0, 0)) + [
    row | {'seed': 9, 'valid': 'dead', 'sink_1': 99.0} for row in bad[:1]
  ]
  found = judged(below('sink_1', 'sigmoid', 5), good + mixed)

  assert (found.verdict, found.n, found.measured) == (Verdict.REPRODUCED, 4, 'Sink_1: sigmoid 0.00')

  found = judged(below('sink_1', 'sigmoid', 5), good + mixed[:2] + mixed[4:])
  assert found.verdict == Verdict.OPEN
  assert found.n == 2
  assert '1 of 3 runs dead' in found.why


def test_what_is_missing_or_half_run():
  rows = runs('default') + runs('k-bias', (0, 0, 0), status='running', valid='not finished')
  assert 'not finished' in judged(NO_SINK_WITH_K_BIAS, rows).why
  assert 'no run of v-bias' in judged(above('sink_1', 'v-bias', 10), rows).why
  assert 'needs GPT2-XL' in judged(above('kinds_repeat_sink_1', 'GPT2-XL', 10), rows).why

  for says in (
    NO_SINK_WITH_K_BIAS,
    above('sink_1', 'v-bias', 10),
    above('sink_star', 'default', 10),
  ):
    assert judged(says, rows).verdict == Verdict.NOT_TESTABLE

  # One part that contradicts a claim decides it. A part that the budget cannot express is left out.
  assert judged(below('sink_1', ['v-bias', 'default'], 5), rows).verdict == Verdict.NOT_REPRODUCED

  rows += runs('heads-1', (math.nan,), status='not expressible', valid='not expressible')
  assert judged(above('sink_1', ['default', 'heads-1'], 10), rows).verdict == Verdict.REPRODUCED
  assert judged(above('sink_1', 'heads-1', 10), rows).verdict == Verdict.NOT_TESTABLE


def test_diverged_runs_are_evidence_of_divergence_only():
  rows = runs(
    'softmax-p-2', (0.0, 0.0, 0.0), 'converges', status='diverged', valid='diverged', sink_1=0.0
  )
  assert judged(diverges('softmax-p-2'), rows).verdict == Verdict.REPRODUCED
  assert judged(trains('softmax-p-2'), rows).verdict == Verdict.NOT_REPRODUCED
  assert judged(below('sink_1', 'softmax-p-2', 5), rows).verdict == Verdict.NOT_TESTABLE

  rows[0] |= {'status': 'done', 'valid': '', 'converges': 1.0}
  assert judged(diverges('softmax-p-2'), rows).verdict == Verdict.OPEN


def test_mixed_data_and_what_is_presupposed():
  rows = runs('default') + runs('k-bias', (0, 0, 0))
  assert judged(NO_SINK_WITH_K_BIAS, rows, SINK).verdict == Verdict.REPRODUCED

  other = rows[:-1] + [rows[-1] | {'content': 'other text'}]
  assert 'content' in judged(NO_SINK_WITH_K_BIAS, other).why
  assert judged(NO_SINK_WITH_K_BIAS, other).verdict == Verdict.NOT_TESTABLE

  without = runs('default', (0, 0, 0)) + rows[3:]
  assert judged(NO_SINK_WITH_K_BIAS, without, SINK).verdict == Verdict.NOT_TESTABLE

  unlike = runs('default', (0, 25, 0)) + rows[3:]
  assert judged(NO_SINK_WITH_K_BIAS, unlike, SINK).verdict == Verdict.OPEN

  edited = [
    row | {'settings': json.dumps({'data.interventions': ['FixedToken()']})} for row in rows
  ]
  assert judged(NO_SINK_WITH_K_BIAS, edited, UNEDITED).verdict == Verdict.NOT_TESTABLE
  assert judged(NO_SINK_WITH_K_BIAS, rows, UNEDITED).verdict == Verdict.REPRODUCED


def test_windows_that_are_too_small_for_a_sink_prove_nothing():
  small = runs('window-32', (0, 0, 0), window=19.0)  # at most 19 / 64 < 0.3 of the attention
  assert judged(below('sink_1', 'window-32', 5), small).verdict == Verdict.NOT_TESTABLE
  assert (
    judged(below('sink_1', 'window-32', 5), runs('window-32', (0, 0, 0), window=20.0)).verdict
    == Verdict.REPRODUCED
  )


def test_a_sink_that_never_emerges_comes_last():
  rows = runs('default', (20, 20, 30), 'emergence_step') + runs(
    'lr-1e-4', (math.inf,) * 3, 'emergence_step'
  )
  assert judged(less('emergence_step', 'default', 'lr-1e-4'), rows).verdict == Verdict.REPRODUCED
  assert judged(less('emergence_step', 'default', 'lr-1e-4'), rows).measured.endswith('lr-1e-4 100')


def test_one_measurement_of_a_published_model_decides(tmp_path):
  rows = [
    {'model': model, 'kind': kind, 'epsilon': epsilon, 'sink_1': rate + 50 * (epsilon == 0.1)}
    for model, rates in {'GPT2-XL': (77, 70, 62), 'Another': (0, 1, 2)}.items()
    for kind, rate in zip(('natural', 'random', 'repeat'), rates)
    for epsilon in (0.1, 0.3)
  ]
  (tmp_path / 'kinds.json').write_text(json.dumps({'analysis': 'kinds', 'rows': rows}))
  angles = [
    {
      'model': 'GPT2-XL',
      'block': 1,
      'head': head,
      'importance': 0.2 * head,
      'cosine_first': 0.5,
      'cosine_others': 0.1 * head,
    }
    for head in (1, 2, 3)
  ]
  (tmp_path / 'angles.json').write_text(json.dumps({'analysis': 'angles', 'rows': angles}))
  (tmp_path / 'plan.json').write_text('{}')
  edits = [{'model': 'GPT2-XL', 'head': 3, 'change': 2.5}]  # as in the analyses of a sink card
  (tmp_path / 'edits.json').write_text(json.dumps({'analysis': 'edits', 'rows': edits}))
  both = pd.concat(
    [pd.DataFrame(runs('default')), paper.open_models(sorted(tmp_path.glob('*.json')))]
  )
  found = judged(above('kinds_repeat_sink_1', 'GPT2-XL', 10), both)

  # shown, but not part of the verdict
  assert found.verdict == Verdict.REPRODUCED
  assert 'Another 2' in found.measured
  assert found.paper == 'Sink_1 (repeat): GPT2-XL 62.28'
  assert (
    judged(above('kinds_random_sink_1', ['GPT2-XL', 'Mistral-7B'], 10), both).verdict
    == Verdict.NOT_TESTABLE
  )
  # Heads 2 and 3 have a sink: 0.5 - 0.25.
  assert both.set_index('trial').angles_cosine_lead['GPT2-XL'] == pytest.approx(0.25)
  assert len(paper.open_models([])) == 0
