"""Rows of the paper's tables beside runs written by hand."""

import json

import pytest

from sink_jax.paper import numbers, synthetic, tables
from sink_jax.paper.collect import groups_of, inconsistencies
from sink_jax.paper.curves import figure_data
from sink_jax.paper.metrics import METRICS, Statistics
from sink_jax.paper.numbers import PaperRow, PaperTable, difference
from sink_jax.paper.parts import aggregate
from sink_jax.paper.tables import Cell, Entry, Row, Table, add_table
from sink_jax.report.parts import Parts
from sink_jax.train.config import Label
from tests.paper.paper_runs import (
  change,
  config_text,
  runs,
  write,
  write_not_expressible,
  write_synthetic,
)


def row(root, table, trial, number=0):
  shown = {t.paper.key: t for t in tables.tables(groups_of(runs(root)))}
  return [r for r in shown[table].rows if r.paper.trial == trial][number]


def ours(root, table='table-4', trial='default'):
  entry, = row(root, table, trial).entries
  return entry


def test_nothing_run(tmp_path):
  entry = row(tmp_path, 'table-4', 'k-bias')
  assert entry.entries == [] and entry.texts == {
      'sink_star': '73.34', 'sink_1': '0.00', 'valid_loss': '3.72'}
  assert row(tmp_path, 'table-15', 'elu-kernel').texts['sink_1'] == 'training failure'
  assert row(tmp_path, 'table-6', 'sigmoid').texts == {'sink_1': '0.44*', 'valid_loss': '3.70'}
  assert row(tmp_path, 'table-5', 'value-uniform-5').texts['sink_star'] == 'illegible'
  assert row(tmp_path, 'text-data-amount', 'data-50m').texts == {
      'sink_1': 'below 1.00', 'overfit_step': '1,000 to 2,000'}


def test_two_seeds_have_a_mean_and_a_spread(tmp_path):
  write(tmp_path / 'a', seed=0, sink=(20,))
  write(tmp_path / 'sub/b', seed=1, sink=(26,))
  entry = ours(tmp_path)
  beside = entry.cells['sink_1']
  cell = beside.measured
  assert (cell.mean, cell.least, cell.largest, cell.n) == (23, 20, 26, 2)
  assert cell.standard_deviation == pytest.approx(18**0.5)
  assert beside.difference == pytest.approx(23 - 18.18) and cell.text == (
      '23.00 (20.00 to 26.00, n = 2)')
  assert cell.runs == entry.sources == ['a', 'sub/b']  # numbers trace to folders
  assert entry.status == 'done at smoke, seeds 0, 1' and entry.tokens == (
      entry.steps * 16 * 64)


@pytest.mark.parametrize('status, details, words', [
    ('running', {}, 'running (step 300 of '), ('interrupted', {}, 'interrupted (step 300 of '),
    ('failed', dict(error='no memory'), 'failed (no memory)')])
def test_a_run_that_is_not_done_says_how_far_it_is(status, details, words, tmp_path):
  write(tmp_path / 'a', status=status, step=300, details=details)
  entry = ours(tmp_path)
  assert entry.status.startswith(words)
  if status == 'failed':
    assert not entry.cells and entry.tokens is None
  else:
    cell = entry.cells['sink_1']
    assert (cell.difference, cell.remark) == (None, 'not the last step')
    assert entry.tokens == 300 * 16 * 64


def test_a_seed_that_is_done_stands_for_the_trial(tmp_path):
  write(tmp_path / 'a', seed=0, sink=(20,))
  write(tmp_path / 'b', seed=1, sink=(0,), status='running', step=300)
  entry = ours(tmp_path)
  assert entry.cells['sink_1'].measured.runs == ['a'] and entry.sources == ['a', 'b']
  assert 'done at smoke, seed 0; running (step 300 of' in entry.status


def test_training_failures_are_compared(tmp_path):
  write(tmp_path / 'a', 'elu-kernel', status='diverged', step=40)
  write(tmp_path / 'b', 'elu-normalized')
  write(tmp_path / 'c', 'softmax-p-2', status='diverged', step=40)
  assert ours(tmp_path, 'table-15', 'elu-kernel').status.endswith(
      ': a training failure, as in the paper')
  assert ours(tmp_path, 'table-15', 'elu-normalized').status == (
      'done at smoke: it trained, unlike in the paper')
  cell = ours(tmp_path, 'text-p-norm', 'softmax-p-2').cells['converges']
  assert (cell.measured.text, cell.agrees) == ('no', True)


def test_a_trial_that_is_not_expressible(tmp_path):
  write_not_expressible(tmp_path / 'heads-1', 'heads-1', 'half a head')
  entry = ours(tmp_path, 'table-12-left', 'heads-1')
  assert entry.status == 'not expressible (half a head)' and not entry.cells
  assert (entry.budget, entry.protocol) == ('smoke', 'paper')


def test_losses_are_compared_on_the_papers_data_alone(tmp_path):
  write(tmp_path / 'smoke', losses=2.5)
  cell = ours(tmp_path).cells['valid_loss']
  assert (cell.measured.mean, cell.difference, cell.remark) == (
      2.5, None, 'other model and data, fewer steps, smaller batches')
  sink = ours(tmp_path).cells['sink_1']
  assert sink.remark == cell.remark and sink.difference is not None

  write(tmp_path / 'x/full', budget='full', losses=3.8, domain='Pile-CC')
  full, smoke = row(tmp_path, 'table-4', 'default').entries
  cell = full.cells['valid_loss']
  assert cell.difference == pytest.approx(3.8 - 3.73) and cell.remark == ''
  assert full.cells['sink_1'].remark == '' and smoke.budget == 'smoke'

  write(tmp_path / 'x/quarter', budget='quarter', losses=3.8, domain='Pile-CC')
  cell = row(tmp_path, 'table-4', 'default').entries[1].cells['valid_loss']
  assert cell.difference == pytest.approx(3.8 - 3.73) and cell.remark == 'fewer steps'

  write(tmp_path / 'x/tenth', budget='tenth', losses=3.8, domain='Wikipedia')  # of another domain
  assert row(tmp_path, 'table-4', 'default').entries[2].cells[
      'valid_loss'].difference is None


def test_no_run_passes_as_a_full_one(tmp_path):
  write(tmp_path / 'a', budget='full', domain='Pile-CC')
  change(tmp_path / 'a', {'label.budget': 'full with optimizer.clip=2', 'optimizer.clip': 2.0})
  cells = lambda table: row(tmp_path, table, 'default').entries[0].cells
  assert cells('table-4')['sink_1'].remark == 'another budget'
  change(tmp_path / 'a', {'label.budget': 'full', 'steps': 50, 'batch_size': 1024})
  assert cells('table-4')['sink_1'].remark == 'fewer steps, larger batches'
  cell = cells('text-emergence')['emergence_step']
  assert cell.difference is None and cell.remark == 'fewer steps, larger batches'
  change(tmp_path / 'a', {'model.d_model': 64, 'data.context': 64})
  assert cells('table-4')['valid_loss'].remark == (
      'other model and data, fewer steps, larger batches')


def test_the_papers_own_steps_and_batches_count(tmp_path):
  for trial in ('lr-1e-4-80k', 'batch-1024', '1b-softmax'):
    write(tmp_path / trial, trial, budget='full', domain='Pile-CC')
  for table, trial in (('table-9', 'lr-1e-4-80k'), ('table-10-left', 'batch-1024'),
                       ('text-1b', '1b-softmax')):
    assert ours(tmp_path, table, trial).cells['sink_1'].remark == '', trial
  for trial in numbers.TRIALS:
    config = json.loads(config_text(trial, 'full', 'paper'))
    assert (config['steps'], config['batch_size']) == numbers.training_of(trial), trial


def test_equal_settings_are_said_to_be_the_same_run(tmp_path):
  for trial in ('default', 'fixed-1', 'fixed-2'):
    write(tmp_path / trial, trial)
  assert ours(tmp_path, 'table-10-right', 'fixed-1').status.endswith(
      'equal settings: at this budget the same run as default')
  assert 'equal' not in ours(tmp_path, 'table-10-right', 'fixed-2').status


def lines_of(table):
  parts = Parts('')
  add_table(parts, table, 0)
  return parts.markdown().strip().split('\n')


def test_a_table_has_as_many_marks_as_it_needs():
  statistics = Statistics(1.0, 1.0, 1.0, None, 1, '1', False, ['a'], METRICS['sink_1'], [1.0], {},
                          [])
  cell = lambda i: Cell(2.0, 1.0, None, f'remark {i}', statistics)
  entry = lambda i: Entry('', {'sink_1': cell(i)}, [], steps=1, tokens=1)
  rows = [Row(PaperRow(str(i), None, {'sink_1': 2.0}), {'sink_1': '2'}, [entry(i)])
          for i in range(12)]
  paper = PaperTable('', '', '', '', '', 'training', ['sink_1'], [row.paper for row in rows])
  table = Table(paper, '', {'sink_1': 'Sink_1'}, rows)
  marks = [line.split(':')[0] for line in lines_of(table) if ': remark' in line]
  assert len(set(marks)) == 12


def test_a_run_older_than_labels_is_read(tmp_path):
  write(tmp_path / 'a')
  change(tmp_path / 'a', {'label': None})
  run, = runs(tmp_path)
  assert run.status == 'done' and run.label == Label()


def test_a_window_of_one_token_is_never_shown(tmp_path):
  analysis = lambda size: dict(size=size, length=4, absolute_first=0.5 if size > 1 else None,
                           absolute_uniform=0.1 if size > 1 else None, relative_first=0.5,
                           uniform=1 / size, map=[[1.0] * 4] * 4)
  for trial, size in (('window-32', 1), ('window-64', 2), ('window-128', 4)):
    write(tmp_path / trial, trial, sink=(0,), analyses=dict(window=analysis(size)))
  group, = groups_of(runs(tmp_path))
  figure = next(f for f in numbers.FIGURES if f.key == 'figure-6-middle')
  picture = figure_data(figure, group)
  shown, means = picture.panels
  assert shown.runs == ['window-128'] and means.series[0].x == [2, 4]
  assert 'window-32 (in a window of one token every query sees itself alone)' in picture.missing
  measured = aggregate(group, 'window_absolute', ['window-32', 'window-64'])
  assert measured.pending == [] and 'itself alone' in measured.left_out[0]


def test_learning_rates_end_with_the_default(tmp_path):
  write(tmp_path / 'default')
  write(tmp_path / 'long', 'lr-1e-5-80k', step=4000)
  group, = groups_of(runs(tmp_path))
  figure = next(f for f in numbers.FIGURES if f.key == 'figure-4-right')
  picture = figure_data(figure, group)
  losses, rates = picture.panels
  assert picture.note == 'Shown up to step 1,000, the last of the default run.'
  assert {line.name for line in losses.series} == {'default'}  # the other logs 2,000 first
  assert {line.name: line.x for line in rates.series} == {
      'default': [0, 1000], 'lr-1e-5-80k': [0]}


def test_the_loss_compared_is_that_of_pile_cc(tmp_path):
  write(tmp_path / 'a', budget='full', losses=3.0, domain='pile_cc')
  text = (tmp_path / 'a/metrics.jsonl').read_text()
  (tmp_path / 'a/metrics.jsonl').write_text(text.replace('"valid": 3.0', '"valid": 2.0'))
  assert ours(tmp_path).cells['valid_loss'].measured.mean == 3.0


def test_steps_are_compared_at_the_full_budget_alone(tmp_path):
  write(tmp_path / 'a')
  cell = ours(tmp_path, 'text-emergence').cells['emergence_step']
  assert cell.difference is None and 'fewer steps' in cell.remark
  write(tmp_path / 'b', budget='full')
  cell = row(tmp_path, 'text-emergence', 'default').entries[0].cells['emergence_step']
  assert cell.measured.mean == 20_000 and cell.difference == 18_000  # 1,000 to 2,000 in the paper


@pytest.mark.parametrize('value, paper, expected', [
    (3, 2, 1), (3, (1, 4), 0), (0, (1, 4), -1), (6, (1, 4), 2), (0.5, (None, 1.0), 0),
    (3, (None, 1.0), 2), (3, None, None), (1, True, None)])
def test_differences(value, paper, expected):
  assert difference(value, paper) == expected


def test_proxies_are_marked(tmp_path):
  write(tmp_path / 'a', 'sigmoid', sink=(1,))
  assert ours(tmp_path, 'table-6', 'sigmoid').cells['sink_1'].measured.text == '1.00*'


def test_unique_tokens_and_never(tmp_path):
  write(tmp_path / 'a', 'data-50m', sink=(0,))
  entry = ours(tmp_path, 'text-data-amount', 'data-50m')
  assert 0 < entry.unique_tokens < entry.tokens
  write(tmp_path / 'b', sink=(0,))
  assert ours(tmp_path, 'text-emergence').cells['emergence_step'].measured.text == 'never'


def test_a_cell_says_what_its_marks_mean(tmp_path):
  write(tmp_path / 'a', losses=2.5)
  shown = {t.paper.key: t for t in tables.tables(groups_of(runs(tmp_path)))}
  lines = lines_of(shown['table-2'])
  assert any(line.startswith('| weight decay 0.1 (default) *(default)* | 18.18 | 20.00 | +1.82† | '
                             '3.73 | 2.500 | not compared† |') for line in lines)
  assert lines[-1] == '†: other model and data, fewer steps, smaller batches.'


def test_runs_that_are_not_alike_are_named(tmp_path):
  write(tmp_path / 'a', seed=0)
  write(tmp_path / 'b', seed=1)
  group, = groups_of(runs(tmp_path))
  assert inconsistencies(group) == []
  path = tmp_path / 'b/config.json'
  path.write_text(path.read_text().replace('"clip": 1.0', '"clip": 2.0'))
  group, = groups_of(runs(tmp_path))
  assert 'optimizer.clip' in inconsistencies(group)[0]


def test_figures_draw_what_is_there_and_name_what_is_missing(tmp_path):
  write(tmp_path / 'a', hidden_ratio=[1.0, 1.5, 3.0])
  write(tmp_path / 'b', seed=1, hidden_ratio=[1.0, 1.5, 5.0])
  figures = {f.key: f for f in numbers.FIGURES}
  group, = groups_of(runs(tmp_path))
  picture = figure_data(figures['figure-7-middle'], group)
  line, = picture.panels[0].series
  assert (line.y, line.low, line.high, line.runs) == (
      [1.0, 1.5, 4.0], [1.0, 1.5, 3.0], [1.0, 1.5, 5.0], ['a', 'b'])
  assert picture.missing[0] == 'sink-token (not run)' and len(picture.missing) == 4
  assert figure_data(figures['figure-8-right'], group) is None
  dynamics = figure_data(figures['figure-4-middle'], group).panels[0].series
  assert [line.name for line in dynamics] == ['training loss', 'validation loss', 'Sink_1']


def test_the_synthetic_axis(tmp_path):
  assert synthetic.section(runs(tmp_path)) is None
  write_synthetic(tmp_path / 'd0', 'default', seed=0, sink=(100,), raw_mass_1=0.75)
  write_synthetic(tmp_path / 'd1', 'default', seed=1, sink=(0,), raw_mass_1=0.25, domain='bigram')
  write_synthetic(tmp_path / 'k', 'k-bias', sink=(0,), sink_bias_slot=100.0)
  axis = synthetic.section(runs(tmp_path))
  softmax, k_bias = axis.rows
  assert (softmax.variant, k_bias.variant) == ('default', 'k-bias')
  assert softmax.cells['Sink_1 %'].text == '50.00 (0.00 to 100.00, n = 2)'
  assert softmax.cells['raw mass, first'].mean == 0.5
  assert softmax.cells['sink emerged'].text == 'never in 1 of 2'
  assert (softmax.cells['value ratio'].mean, softmax.cells['key ratio'].mean,
          softmax.cells['hidden ratio'].mean) == (0.25, 0.5, 1.5)
  assert softmax.cells['bigram loss'].runs == ['d1'] and 'valid loss' not in axis.columns
  assert k_bias.cells['Sink_* %'].runs == ['k'] and not groups_of(runs(tmp_path))
  assert axis.optimum == [pytest.approx(3.049, abs=1e-3)]
