"""The page on grafts: planted runs and what is said of them."""

import dataclasses
import json
import shutil
import statistics

import pytest

from configs import graft, remedies
from sink_jax.cli.report import make_report
from sink_jax.models.record import GraftReport
from sink_jax.paper import drawing
from sink_jax.remedies import grafts
from sink_jax.report.read_runs import find_runs
from tests.paper import stored
from tests.paper.conftest import PIXEL
from tests.paper.paper_runs import HARDWARE, change, probe_row

STEPS, SEEDS = 4000, (1, 2, 3)


@pytest.fixture(autouse=True)
def undrawn(monkeypatch):
  monkeypatch.setattr(drawing, 'panels', lambda picture: PIXEL)


def plant(root, trial, sinks=(30, 30, 30, 30), *, loss=3.0, keys=None, status='done', seeds=SEEDS,
          change_of_loss=0.0):
  """Runs of a trial, one per seed; sinks: Sink_1 at step 0, 100, 200 and the last one."""
  scratch = trial in grafts.SCRATCH
  config = (remedies.get_config(trial) if scratch else graft.get_config(f'{trial},budget=desk'))
  config = config.to_dict()
  if scratch:
    config['label']['budget'] = 'desk with steps=8000'
  else:  # what a run that begins with a source writes
    config['model'] |= dict(layers=2, d_model=64, heads=4, ffn_hidden=128, vocab_size=512)
  config['steps'] = steps = 2 * STEPS if scratch else STEPS
  for seed in seeds:
    folder = root / f'{trial}-seed-{seed}'
    folder.mkdir(parents=True)
    init = config['init'] if scratch else config['init'] | dict(
        source=f'runs/desk/default-seed-{seed}')
    (folder / 'config.json').write_text(json.dumps(config | dict(seed=seed, init=init)))
    (folder / 'status.json').write_text(json.dumps(dict(status=status, step=steps, **HARDWARE)))
    at = (0, 100, 200, steps)
    rows = [probe_row(step, (sink + seed / 3,), sink_bias_slot=keys if i else None)
            for i, (step, sink) in enumerate(zip(at, sinks))]
    rows += [dict(kind='train', step=step, loss=loss, grad_norm=1.0) for step in at[1:]]
    rows.append(dict(kind='valid', step=steps, valid=loss + seed / 100))
    if config['init']['graft']:
      rows.append(dict(kind='graft', step=0, **dataclasses.asdict(GraftReport(
          ('attention.head: a -> b',), (), (), config['init']['graft'], not change_of_loss,
          3.0, 3.0 + change_of_loss))))
    rows.sort(key=lambda row: row['step'])
    (folder / 'metrics.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))


@pytest.fixture
def planted(tmp_path):
  root = tmp_path / 'runs'
  plant(root, 'continued')
  plant(root, 'graft-gate')
  plant(root, 'graft-k-bias', (20, 40, 10, 0), keys=50.0, change_of_loss=0.25)
  plant(root, 'graft-gate-random', (30, 1, 30, 10), loss=3.2, change_of_loss=1.5)
  plant(root, 'graft-zero-sink', (30, 40, 50, 45), loss=2.9)
  plant(root, 'graft-k-bias-window', (30, 8, 8, 8), keys=0.0)
  plant(root, 'desk-k-bias', (0, 0, 0, 0), keys=50.0, loss=2.8)
  plant(root, 'desk-head-gate', (0, 30, 30, 30))
  return root


def page(runs, out):
  text = make_report(out, runs, kind='graft')
  return text, json.loads((out / 'report.json').read_text()), (out / 'report.md').read_text()


def verdicts(record, question='beside_continued'):
  return {name: tuple(it[key]['verdict'] for key in ('concentration', 'loss'))
          for name, it in record[question].items()}


def test_planted_grafts_get_their_verdicts_steps_and_differences(planted, tmp_path):
  text, record, markdown = page(planted, tmp_path / 'out')
  same, none = 'no difference', 'cannot be judged'
  assert verdicts(record) == {
      'graft-gate': (same, same), 'graft-k-bias': ('lower', same),
      'graft-gate-random': ('lower', 'higher'), 'graft-zero-sink': ('higher', 'lower'),
      'graft-k-bias-window': ('lower', same), 'graft-sink-logit': (none, none)}
  assert verdicts(record, 'beside_scratch') == {
      'graft-gate': (same, same), 'graft-gate-random': ('lower', 'higher'),
      'graft-k-bias': (same, 'higher'), 'graft-sink-logit': (none, none),
      'graft-k-bias-window': (none, none), 'graft-zero-sink': (none, none)}
  of = record['grafts']
  measured = lambda name, key: of[name][key]['values']
  # From the first probe after which it stays below half of what the default had, not of its own
  # first probe, and only of what stays.
  assert [measured(name, 'steps') for name in (
      'graft-k-bias', 'graft-k-bias-window', 'graft-gate-random', 'continued')] == [
          [200] * 3, [100] * 3, [STEPS] * 3, [None] * 3]
  assert 'steps' not in of['desk-k-bias'] and of['continued']['steps']['text'] == 'never in 3 of 3'
  assert record['moved'] == ['graft-k-bias']
  assert measured('graft-k-bias', 'exact') == [0.0] * 3 and measured('graft-gate', 'exact')[0]
  assert (measured('graft-k-bias', 'loss_before')[0], measured('graft-k-bias', 'loss_after')[0],
          measured('graft-k-bias', 'sink_grafted')[0]) == (3.0, 3.25, 20.3333)
  loss = record['beside_continued']['graft-gate-random']['loss']
  assert loss['differences'] == pytest.approx([0.2] * 3) and loss['seeds'] == list(SEEDS)
  assert loss['low'] < statistics.fmean(loss['differences']) < loss['high']
  assert text == '\n'.join(record['answer']) and text.startswith(
      'With 3 of 5 grafts that can be judged Sink_1 ends lower than with further training alone '
      '(below half of before from step 100 to 4,000 on). The loss ends lower with 1, '
      'higher with 1 and without a difference with 3 of them.\n5 of 6 grafts')
  assert ('Sink_1 ends lower with graft-gate-random (-20.0), graft-k-bias (-30.0) and '
          'graft-k-bias-window (-22.0); higher with graft-zero-sink (+15.0); without' in text)
  assert 'the sink has moved there with graft-k-bias.' in text
  assert 'from step 200 on with graft-k-bias; ' in text and 'never in 3 of 3 with graft-z' in text
  assert '+0.000 with graft-gate, +1.500 with graft-gate-random' in text
  assert 'loss ends lower with graft-zero-sink (-0.100); higher' in text
  assert '+0.200, +0.200, +0.200' in markdown
  assert 'Not run: graft-sink-logit.' in markdown and '--only=graft-sink-logit ' in markdown
  assert ('configs/remedies.py --seeds=1,2,3 --config.steps=8000 '
          '--only=desk-sink-logit,desk-zero-sink' in markdown)


def test_runs_that_are_not_alike_or_not_done_are_said(planted, tmp_path):
  for name, settings in (
      ('graft-gate-seed-2', {'init.source': 'another'}), ('graft-k-bias-seed-1', {'steps': 500}),
      ('graft-zero-sink-seed-3', {'init.train': 'new'}),
      ('desk-head-gate-seed-1', {'steps': STEPS}), ('desk-k-bias-seed-1', {'model.layers': 4})):
    change(planted / name, settings)
  for name, status in (('graft-k-bias-window-seed-1', 'diverged'),
                       ('graft-gate-random-seed-3', 'running')):
    change(planted / name, {'status': status}, 'status.json')
  _, record, markdown = page(planted, tmp_path / 'out')
  assert {it for pair in verdicts(record).values() for it in pair} == {'cannot be judged'}
  assert record['answer'][0].startswith('No graft can be judged')
  for words in ("another source of seed 2: ['another']",
                'graft-k-bias is not compared: steps 500 instead of 4000',
                'graft-zero-sink is not compared: init.train new instead of all',
                'desk-head-gate is not compared: steps 4000 instead of 8000, those of both',
                'desk-k-bias is not compared: model.layers 4 instead of 2',
                'graft-k-bias-window: 1 of 3 runs diverged',
                'running (step 4,000 of 4,000), seed 3'):
    assert words.replace('[', '\\[').replace(']', '\\]') in markdown
  for seed in SEEDS:
    shutil.rmtree(planted / f'continued-seed-{seed}')
  text, record, _ = page(planted, tmp_path / 'out')
  assert 'continued: not run. What' in text and 'continued, graft-sink-logit' in record['not_run']
  assert 'steps' not in record['grafts']['graft-gate']


def test_what_is_no_page_is_refused_with_the_remedy(planted, tmp_path):
  plant(tmp_path / 'more', 'graft-gate', seeds=(2,))
  shutil.move(tmp_path / 'more/graft-gate-seed-2', planted / 'again')
  with pytest.raises(ValueError, match='again and .*graft-gate-seed-2 .*repeat a seed. Take one'):
    page(planted, tmp_path / 'out')
  change(planted / 'again', {'label.budget': 'smoke'})
  with pytest.raises(ValueError, match='several budgets.*desk paper, smoke paper. Give each'):
    page(planted, tmp_path / 'out')
  with pytest.raises(ValueError, match='no run of configs/graft.py.*--seeds=1,2,3 --only=conti'):
    page(tmp_path / 'more', tmp_path / 'out')
  (planted / 'again/metrics.jsonl').write_text('{"kind": "graft", "step": 0}\n')
  broken = next(run for run in find_runs(planted) if run.name == 'again')
  assert broken.status == 'unreadable' and "has no 'changed'" in broken.error


def test_a_page_of_stored_runs_is_that_of_the_runs(planted, tmp_path):
  content = stored.stored(planted)
  (tmp_path / 'metrics.json').write_text(stored.as_text(content))
  stored.restore(tmp_path / 'metrics.json', tmp_path / 'again')
  assert page(tmp_path / 'again', tmp_path / 'b') == page(planted, tmp_path / 'a')


def test_the_trials_are_those_of_the_configs():
  assert [*graft.TRIALS] == [grafts.CONTINUED, *grafts.GRAFTS]
  assert set(grafts.SCRATCH) <= set(remedies.TRIALS)
  # The same variant, but for where gates start.
  for name, other in grafts.GRAFTS.items():
    wanted = {key: value.replace('scale=2.0', '') for key, value in graft.TRIALS[name].items()
              if key != 'init.graft'}
    assert not other or remedies.TRIALS[other] == wanted
