"""The paper's numbers: complete, linked to the trials of configs/, and compared with ours."""

import collections
import math

import pandas as pd
import pytest

from configs import paper as configs
from sink_jax.report import paper


def test_every_table_and_figure_is_there_and_every_trial_has_its_place():
  assert {table['number'] for table in paper.TABLES} == {'', *map(str, range(1, 16))}

  figures = paper.FIGURES
  assert {figure['number'] for figure in figures if 'paper' not in figure} == {
    *map(str, range(1, 31))
  }
  assert len({item['key'] for item in paper.TABLES + figures}) == len(paper.TABLES) + len(figures)

  named = {row['trial'] for table in paper.TABLES for row in table['rows']}
  named |= {trial for figure in figures for trial in figure['trials']}

  assert named - {None} == set(configs.TRIALS)


def test_tables_have_their_columns_and_trials_one_mark():
  marks = collections.defaultdict(set)
  for table in paper.TABLES:
    for row in table['rows']:
      assert list(row['values']) == table['metrics'], f'{table["key"]}: {row["setting"]}'
      marks[row['trial']].add(row.get('proxy', False))
  marks.pop(None)

  assert [trial for trial, found in marks.items() if len(found) > 1] == []


def test_spot_values_of_the_paper():
  for trial, metric, number in (
    ('default', 'sink_1', '18.18'),
    ('weight-decay-0', 'valid_loss', '3.72'),
    ('alibi', 'sink_1', '20.78'),
    ('k-bias', 'sink_star', '73.34'),
    ('value-first-20', 'sink_1', '25.88'),
    ('fixed-2', 'sink_2', '69.03'),
    ('1b-softmax', 'sink_1', '45.11'),
    ('softmax-p-2', 'converges', 'no'),
    ('window-32', 'sink_1', ''),
    ('data-50m', 'sink_1', 'below 1.00'),
    ('default', 'emergence_step', '1,000 to 2,000'),
  ):
    assert paper.number(trial, metric) == number, trial
  assert paper.table_number('table-1-left', 'GPT2-XL', 'sink_1_random') == 70.29


TABLE = pd.DataFrame(
  [
    ('default', 'paper', 'done', '', 20.0),
    ('default', 'paper', 'done', '', 30.0),
    ('default', 'paper', 'done', 'dead', 0.0),
    ('default', 'paper', 'running', 'not finished', 1.0),
    ('alibi', 'paper', 'done', '', 5.0),
    ('nope', 'paper', 'done', '', 40.0),
    ('post-norm', 'paper', 'done', 'dead', 0.0),
    ('softmax', 'sft', 'done', '', 1.0),
  ],
  columns=['trial', 'task', 'status', 'valid', 'sink_1'],
).assign(budget='desk', seed=range(8))


def test_our_numbers_stand_next_to_the_papers():
  both = paper.beside(TABLE).query('metric == "sink_1"').drop_duplicates('trial').set_index('trial')
  assert tuple(
    both.loc['default', ['value', 'text', 'mean', 'least', 'largest', 'n', 'invalid']]
  ) == (18.18, '18.18', 25, 20, 30, 2, 1)
  assert (both.n['post-norm'], both.invalid['post-norm'], both.n['v-bias']) == (0, 1, 0)
  assert math.isnan(both['mean']['v-bias'])
  assert both.text['sigmoid'] == '0.44*'
  assert both.text['elu-normalized'] == 'training failure'

  dots, rank, same = paper.agreement(paper.beside(TABLE))
  # The paper has 18.18, 20.78 and 20.35 for default, ALiBi and NoPE. Ours rank 2nd, 3rd and 1st.
  assert set(dots.trial) == {'default', 'alibi', 'nope'}
  assert same == 2
  assert rank == pytest.approx(
    pd.Series([18.18, 20.78, 20.35]).rank().corr(pd.Series([25, 5, 40]).rank())
  )


def test_coverage_says_how_each_is_made_and_where_it_was_run():
  rows = paper.coverage(
    TABLE, {'kinds': ['GPT2-XL'], 'chat': ['Another'], 'propositions': ['random']}
  )
  rows = rows.set_index('key')

  assert len(rows) == len(paper.TABLES) + len(paper.FIGURES)
  assert rows.run['table-3'] == 'desk: 3 of 7 trials, 5 runs'
  assert '--only=nope,' in rows.command['table-3']
  assert rows.run['table-1-left'] == 'GPT2-XL'
  assert rows.run['table-1-right'] == 'not run; the same of Another'
  assert (
    rows.command['text-propositions'] == 'python -m sink_jax analyses propositions --out=analyses'
  )
  assert rows.run['text-propositions'] == 'random'
  assert rows.run['figure-30'] == 'desk: 1 of 1 trials, 1 run'

  both = pd.concat([TABLE, TABLE[TABLE.trial == 'default'].head(1).assign(budget='tenth')])
  assert paper.coverage(both, {}).set_index('key').run['table-3'] == (
    'desk: 3 of 7 trials, 5 runs; tenth: 1 of 7 trials, 1 run'
  )

  without = rows.index[(rows.command == '') | (rows.run == 'not run')]
  assert 'figure-10' in without
  assert rows.name[rows.command == ''].tolist() == [
    'Table 8',
    'Figure 1 (left)',
    'Figure 1 (right)',
    'Figure 5 (left)',
    'Figure 6 (left)',
  ]
