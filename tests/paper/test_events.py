"""The order of events: from which step on values drain, a sink forms, activations are massive."""

import json
from types import SimpleNamespace

import pytest

from sink_jax.paper import pictures
from sink_jax.paper.collect import groups_of
from sink_jax.paper.events import Event, event_orders, order, step_of, words
from sink_jax.paper.page import page as paper_page
from sink_jax.paper.report import build, paper_report
from sink_jax.report.probe_record import Curves
from tests.paper.paper_runs import probe_row, runs, write
from tests.report.test_report import Page


def write_course(folder, probed, trial='default', seed=0, **options):
  """A run that is done; probed: (step, values of its row) of all probes."""
  write(folder, trial, seed=seed, **options)
  rows = [probe_row(step, row.pop('sink', (0,)), **row) for step, row in probed]
  (folder / 'metrics.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))


def course(drain, sink, massive, sink_of='sink', **first):
  """Probes at 0, 100, ... 500; each quantity stays on its side of the level from its step on."""
  rate = lambda value: (value,) if sink_of == 'sink' else value
  rows = [(step, {'value_ratio': [0.9, 0.5 if drain is not None and step >= drain else 0.51],
                  sink_of: rate(10.0 if sink is not None and step >= sink else 9.9),
                  # The embedding counts for nothing.
                  'hidden_ratio': [9.0, 1.0, 2.0 if massive is not None and step >= massive
                                   else 1.9]}) for step in range(0, 600, 100)]
  rows[0][1].update(first)
  return rows


def events_of(folder):
  """{trial: its TrialEvents} of the one group of a folder."""
  one, = event_orders(groups_of(runs(folder)))
  return {trial.trial: trial for trial in one.trials}


@pytest.mark.parametrize('values, level, falls, step', [
    ([1.0, 0.5, 0.4, 0.1], 0.5, True, 100),  # at the level is enough
    ([0.4, 0.6, 0.4, 0.3], 0.5, True, 200),  # it had gone back
    ([0.4, 0.4, 0.4, 0.6], 0.5, True, None), ([0.1] * 4, 0.5, True, 0),
    ([0.0, 12.0, 8.0, 10.0], 10, False, 300), ([0.0, 9.0, 9.9, 9.9], 10, False, None),
    ([1.0, 3.0, None, 3.0], 2, False, 100), ([None, None, None, 3.0], 2, False, 300),
    ([3.0, 3.0, 1.0, None], 2, False, None)])
def test_a_step_is_that_from_which_a_course_stays(values, level, falls, step):
  curves = Curves([0, 100, 200, 300], [], [], [], values, [], [])
  run = SimpleNamespace(train_course={}, valid_course={}, probe=SimpleNamespace(curves=curves))
  assert step_of(pictures.course('probe', 'value_ratio')(run), level, falls) == step


def test_the_events_of_seeds_in_words(tmp_path):
  for seed, steps in enumerate([(100, 300, None), (100, 200, 400), (200, 300, None)]):
    write_course(tmp_path / f'{seed}', course(*steps), seed=seed)
  events = events_of(tmp_path)['default']
  assert events.words == ('value drain at step 100, 100 and 200; sink at step 300, 200 and 300; '
                          'massive activations in 1 of 3 seeds, at step 400')
  assert events.order == 'The order in all 3 seeds: value drain, then sink.'
  assert [dict(event.steps) for event in events.events][2] == {'0': None, '1': 400, '2': None}
  assert [event.level for event in events.events] == [0.5, 10, 2]


def test_levels_are_the_nulls_of_any_untrained_model_of_the_trial_where_these_are_more(tmp_path):
  null = {'null_p99': {'sink_1': 11.0, 'hidden_ratio': 2.5}}
  write_course(tmp_path / '0', course(100, 200, 300, **null))
  write_course(tmp_path / '1', course(100, 200, 300, null_p99={'hidden_ratio': 1.0}), seed=1)
  events = events_of(tmp_path)['default']
  assert [event.level for event in events.events] == [0.5, 11, 2.5]
  assert events.words == ('value drain at step 100 and 100; no sink in any of 2 seeds; no massive '
                          'activations in any of 2 seeds')


def test_a_sink_kept_elsewhere_is_that_of_the_extra_key(tmp_path):
  write_course(tmp_path / 'd', course(None, 400, None))
  for trial in ('k-bias', 'sink-token'):
    write_course(tmp_path / trial, course(None, 200, None, 'sink_bias_slot'), trial)
  write_course(tmp_path / 'sigmoid', course(100, 200, 300), 'sigmoid')  # is not shown
  events = events_of(tmp_path)
  assert {trial: (of.sink, of.words) for trial, of in events.items()} == {
      'default': ('sink_1', 'no value drain; sink at step 400; no massive activations'),
      'k-bias': ('sink_star', 'no value drain; sink at step 200; no massive activations'),
      'sink-token': ('sink_star', 'no value drain; sink at step 200; no massive activations')}


def test_only_runs_that_are_done_and_were_probed_make_a_section(tmp_path):
  write_course(tmp_path / 'a', course(100, 200, 300), status='running')
  write(tmp_path / 'b', seed=1)
  (tmp_path / 'b/metrics.jsonl').write_text('')
  assert event_orders(groups_of(runs(tmp_path))) == []


def test_what_older_runs_did_not_measure_is_said_and_not_drawn(tmp_path):
  old = [(step, row | {'hidden_ratio': None}) for step, row in course(100, 200, None)]
  write_course(tmp_path / 'old', old)
  one, = event_orders(groups_of(runs(tmp_path)))
  assert one.trials[0].words.endswith('sink at step 200; massive activations not measured')
  assert [panel.y for panel in one.picture.panels] == ['Sink_1 in % of heads',
                                                       'smallest value ratio of a block']
  write_course(tmp_path / 'new', course(100, 200, 300), seed=1)
  one, = event_orders(groups_of(runs(tmp_path)))
  assert one.trials[0].words.endswith('massive activations at step 300 (not measured in 1)')
  assert one.trials[0].order == 'The order in all 2 seeds: value drain, then sink.'
  ratios, = [panel for panel in one.picture.panels if 'norm' in panel.y]
  assert ratios.series[0].runs == ['new'] and [line.runs for line in ratios.seeds] == [['new']]


@pytest.mark.parametrize('drain, sink, massive, expected', [
    ((300,), (200,), (400,), 'The order in the one seed: sink, then value drain, then massive '
     'activations.'),
    ((300, 200), (300, 200), (400, 400), 'The order in all 2 seeds: value drain and sink (at one '
     'probe), then massive activations.'),
    ((300, 100), (200, 200), (None, 100), 'The 2 seeds do not agree on the order of value drain '
     'and sink.'),
    # Before any training is no event of training.
    ((300, 100), (400, 200), (0, 500), 'The order in all 2 seeds: value drain, then sink.'),
    ((300, None), (400, 200), (None, None), '')])
def test_the_order_is_of_what_happens_in_all_seeds(drain, sink, massive, expected):
  events = [Event(name, 1.0, dict(zip('ab', steps))) for name, steps in
            (('value drain', drain), ('sink', sink), ('massive activations', massive))]
  assert order(events, len(drain)) == expected


def test_the_steps_of_one_seed_are_words_as_well():
  assert words([Event('sink', 10, {'a': 1250}), Event('value drain', 0.5, {'a': None})], 1) == (
      'sink at step 1,250; no value drain')


def test_the_pages_and_json_have_the_section(tmp_path):
  write_course(tmp_path / 'runs/a', course(100, 200, 300))
  write_course(tmp_path / 'runs/b', course(100, 300, 400), seed=1)
  report = paper_report(runs(tmp_path / 'runs'), tmp_path / 'out')
  said = 'Value drain at step 100 and 100; sink at step 200 and 300; massive activations at'
  page, markdown = ((tmp_path / 'out' / name).read_text() for name in ('index.html', 'report.md'))
  words = ' '.join(Page(page).text.split())
  assert said in words and said in markdown and 'href="#the-order-of-events"' in page
  assert 'then massive activations. a, b' in words  # with the runs that it is said of
  of, = json.loads((tmp_path / 'out/report.json').read_text())['events']
  assert of['trials'][0]['events'][2]['steps'] == {'a': 300, 'b': 400}
  sink, values, norms = of['picture']['panels']
  assert [line['runs'] for line in sink['series']] == [['a', 'b']]
  assert sink['series'][0]['y'] == pytest.approx([9.9, 9.9, 9.95, 10, 10, 10])
  assert f']({of["picture"]["file"]})' in markdown
  assert (tmp_path / 'out' / of['picture']['file']).read_bytes().startswith(b'\x89PNG')
  assert len(report.events[0].picture.panels[0].seeds) == 2


def test_a_report_without_such_runs_has_no_section(tmp_path):
  write(tmp_path / 'post-norm', 'post-norm')
  report = build(runs(tmp_path))
  assert list(report.events) == [] and 'The order of events' not in paper_page(report).markdown()
