"""Committed reports made again from the numbers of their runs, which are stored beside them."""

import dataclasses
import itertools
import json
import re
import shutil

import pytest

from sink_jax.cli.report import make_report
from sink_jax.paper import drawing, report
from sink_jax.paper.baseline import baseline_report
from sink_jax.paper.page import page as paper_page
from sink_jax.remedies import page
from sink_jax.report.jsontext import to_json
from sink_jax.report.read_runs import find_runs, read_runs
from tests.paper import stored
from tests.paper.paper_runs import (
  probe_row,
  write,
  write_not_expressible,
  write_paper,
  write_synthetic,
)
from tests.report.test_report import ROOT

METRICS = 'metrics.json'
# Claims that have a picture of everything that is stored: rates, courses, analyses.
TRIALS = ('default', 'lr-2e-4', 'lr-8e-4', 'k-bias', 'sink-token', 'post-norm', 'prefix-5',
          'window-32', 'data-50m', 'sigmoid', 'identity')

# Reports of one config's runs, by a key that the paper's report.json does not have.
_OF_ONE_CONFIG = {'tuned': 'fine-tuning', 'criteria': 'baseline', 'tasks': 'leaderboard',
                  'grafts': 'graft'}


@pytest.fixture
def undrawn(monkeypatch):
  """Pictures are no part of what is compared, and take most of the time."""
  for name in ('panels', 'seed_rows', 'masks', 'claims'):
    monkeypatch.setattr(drawing, name, lambda *values: drawing.png(None))  # one pixel
  monkeypatch.setattr(page, 'differences', lambda tasks: drawing.png(None))
  monkeypatch.setattr(page, 'first_pictures', lambda tasks: dict.fromkeys(
      ('verdicts.png', 'rates.png'), drawing.png(None)))


def made_again(folder, work):
  """(report.json, report.md) of the runs that a folder of results stores."""
  stored.restore(folder / METRICS, work / 'runs')
  committed = json.loads((folder / 'report.json').read_text())
  kind = next((kind for key, kind in _OF_ONE_CONFIG.items() if key in committed), None)
  if kind:
    make_report(work / 'out', work / 'runs', kind=kind)
    return json.loads((work / 'out/report.json').read_text()), (
        work / 'out/report.md').read_text()
  made = report.build(read_runs(work / 'runs'))
  # By whom and when a report was made is not recomputed.
  made = dataclasses.replace(made, provenance=committed['provenance'])
  return json.loads(to_json(made)), paper_page(made).markdown()


def deviations(folder, work):
  """Where the report of a folder of results is not that of the runs it stores; [] if nowhere."""
  made, markdown = made_again(folder, work)
  found = list(differences(made, json.loads((folder / 'report.json').read_text())))
  lines = itertools.zip_longest(markdown.split('\n'),
                                (folder / 'report.md').read_text().split('\n'))
  return found + [f'report.md: {a!r}, not {b!r}' for a, b in lines if a != b]


def differences(made, given, at='report.json', tolerance=0.0):
  """'at: a, not b' for all that differs. tolerance: of numbers, relative; absolute below 1."""
  if isinstance(made, dict) and isinstance(given, dict) and made.keys() == given.keys():
    for key in made:
      yield from differences(made[key], given[key], f'{at}.{key}', tolerance)
  elif isinstance(made, list) and isinstance(given, list) and len(made) == len(given):
    for i, pair in enumerate(zip(made, given)):
      yield from differences(*pair, f'{at}[{i}]', tolerance)
  elif isinstance(made, float) and isinstance(given, (float, int)):
    if abs(made - given) > tolerance * max(1, abs(made)):
      yield f'{at}: {made}, not {given}'
  elif isinstance(made, str) and isinstance(given, str) and tolerance:
    numbers = r'\d[\d,]*\.?\d*(?:e[+-]\d+)?'
    if re.sub(numbers, '#', made) != re.sub(numbers, '#', given):
      yield f'{at}: {made!r}, not {given!r}'
    for pair in zip(re.findall(numbers, made), re.findall(numbers, given)):
      a, b = (float(number.replace(',', '')) for number in pair)
      # The last digit that is shown may be rounded the other way.
      digits = len(pair[0].partition('.')[2].partition('e')[0])
      if abs(a - b) > 1.01 * 10 ** -digits:
        yield f'{at}: {made!r}, not {given!r}'
  elif made != given:
    yield f'{at}: {made!r}, not {given!r}'


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
  """A folder of runs: three seeds with numbers of many digits, and one of every other state."""
  root = tmp_path_factory.mktemp('stored') / 'runs'
  write_paper(root / 'all')
  for folder in (root / 'all').iterdir():
    if folder.name not in TRIALS:
      shutil.rmtree(folder)
  for seed in (1, 2, 3):
    name = root / f'desk/default-seed-{seed}'
    write(name, budget='desk', seed=seed, sink=(20 + seed / 3,), losses=3 + seed / 7,
          value_ratio=[1 / 3, 1 / seed], hidden_ratio=[9.0, 1 / 7, 20 / seed],
          null_p99={'sink_1': 1 / 3, 'hidden_ratio': 1.1}, **activations(seed))
    # Between the ends, with a row that was measured while activations were not finite.
    rows = [probe_row(100, (100 / 7,), value_ratio=[1 / 3, 1 / 9], **activations(1 / seed)),
            probe_row(200, (0,), largest_importance=float('nan')),
            *(dict(kind='train', step=step, loss=5 - step / 700, tokens_per_second=1e4 / step)
              for step in range(10, 300, 10))]
    with open(name / 'metrics.jsonl', 'a') as file:
      file.writelines(json.dumps(row) + '\n' for row in rows)
    lines = (name / 'metrics.jsonl').read_text().splitlines()
    lines.sort(key=lambda line: json.loads(line)['step'])
    (name / 'metrics.jsonl').write_text('\n'.join(lines) + '\n')
    (name / 'data.json').write_text(json.dumps(
        {'content': 'x', 'unique_training_tokens': 7, 'tokens_per_epoch': 3, 'domains': {}}))
  write(root / 'desk/k-bias', 'k-bias', budget='desk', seed=1, status='running', step=50)
  write_not_expressible(root / 'desk/heads-1', 'heads-1', 'half a head', budget='desk')
  write_synthetic(root / 'synthetic', 'default', sink=(60,), domain='backcopy')
  return root


def activations(scale):
  keys = ('activation_max', 'activation_median', 'activations_beyond_100',
          'activations_beyond_1000', 'kurtosis_moment', 'kurtosis_channels')
  return dict.fromkeys(keys, [scale / 3, scale / 7, scale / 9]) | {
      'activation_max': [1.0, 300 * scale, 50.0], 'activation_position': [1, 1, 2],
      'activation_channel': [3, 4, 5]}


@pytest.fixture(scope='module')
def restored(runs, tmp_path_factory):
  base = tmp_path_factory.mktemp('restored')
  (base / METRICS).write_text(to_json(stored.stored(runs)))
  stored.restore(base / METRICS, base / 'runs')
  return base / 'runs'


def test_restored_runs_are_the_runs(runs, restored):
  before, after = find_runs(runs), find_runs(restored)
  assert [run.name for run in after] == [run.name for run in before] and len(before) > 12
  for one, other in zip(before, after):
    known, back = (json.loads(to_json(report.without_paths(run))) for run in (one, other))
    assert not list(differences(known, back, one.name, 2e-6))
    assert one.setup is None or one.setup.settings == other.known_setup.settings
    # With what no JSON of a run has; of trials whose course is not drawn, without that.
    known, back = (run.probe and dataclasses.asdict(run.probe) for run in (one, other))
    if known and one.label.trial not in stored.DRAWN:
      assert len(back['curves'].pop('step')) <= len(known['curves'].pop('step'))
      known['curves'], back['curves'] = (
          {key: values[-1] for key, values in of['curves'].items()} for of in (known, back))
    assert not list(differences(known, back, one.name, 2e-6))
  middle = next(run for run in after if run.name == 'desk/default-seed-2').probe.curves
  assert middle.step[:2] == [0, 100] and 200 not in middle.step  # that row has no finite numbers
  assert middle.value_ratio[1] == pytest.approx(1 / 9, 1e-5)
  assert middle.max_over_median[1:] == pytest.approx([2100, 2100], 1e-5)


@pytest.mark.parametrize('rates, rows', [
    ((0, 50, 5, 12, 20, 30), 5), ((0, 5, 50, 20, 30, 30), 4), ((30, 20, 30, 40, 30, 30), 3),
    ((0, 5, 9, 4, 2, 1), 3), ((0,) * 6, 2)])
def test_the_step_of_a_sink_needs_no_whole_course(rates, rows, tmp_path):
  run = tmp_path / 'runs/a'
  write(run, 'k-bias-shared', step=600, sink=rates[-1:], first={'sink_1': rates[0]})
  with open(run / 'metrics.jsonl', 'a') as file:
    file.writelines(json.dumps(probe_row(100 + 100 * i, (rate,))) + '\n'
                    for i, rate in enumerate(rates[1:-1]))
  lines = sorted((run / 'metrics.jsonl').read_text().splitlines(),
                 key=lambda line: json.loads(line)['step'])
  (run / 'metrics.jsonl').write_text('\n'.join(lines) + '\n')
  (tmp_path / METRICS).write_text(to_json(stored.stored(tmp_path / 'runs')))
  stored.restore(tmp_path / METRICS, tmp_path / 'restored')
  (before,), (after,) = (read_runs(tmp_path / name) for name in ('runs', 'restored'))
  for key in ('emergence_step', 'peak_step', 'peak_sink_1', 'sink', 'step'):
    assert getattr(before.probe, key) == getattr(after.probe, key), key
  assert before.probe.curves.sink_1 == [*rates] and len(after.probe.curves.step) == rows


def test_the_report_of_restored_runs_is_that_of_the_runs(runs, restored, undrawn):
  texts = [json.loads(to_json(report.build(find_runs(folder))))
           for folder in (runs, restored)]
  assert not list(differences(*texts, tolerance=2e-5))
  drawn = {figure['paper']['kind'] for figure in texts[1]['figures'] if figure['pictures']}
  assert drawn >= {'dynamics', 'learning rates', 'sweep', 'ratios', 'prefix', 'window map'}
  assert texts[1]['undecided'] and texts[1]['synthetic']


def test_the_search_is_found_in_restored_runs(runs, restored, tmp_path):
  for name, folder in (('before', runs), ('after', restored)):
    baseline_report(find_runs(folder), tmp_path / name)
  before, after = (json.loads((tmp_path / name / 'report.json').read_text())
                   for name in ('before', 'after'))
  assert not list(differences(before, after, tolerance=2e-5))
  first = after['runs'][0]
  assert first['training_seconds'] > 0 and first['run']['origin']['hardware']


def test_what_is_stored_is_small_and_names_no_machine(runs, tmp_path):
  text = to_json(stored.stored(runs / 'desk'))
  assert '/disk/me' not in text and 'sink_1' in text
  workdir = tmp_path / 'runs/long'
  write(workdir, budget='desk', **activations(1 / 3))
  rows = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
  probe = next(row for row in rows if row['kind'] == 'probe')
  numbers = lambda step: {'loss': 3 + step / 7, 'tokens_per_second': step / 3, 'mfu': step / 9}
  rows += [{'kind': 'train', 'step': step, **numbers(step)} for step in range(20, 4001, 20)]
  rows += [probe | activations(step / 7) | {'step': step} for step in range(50, 4000, 50)]
  (workdir / 'metrics.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
  whole, first = (len(to_json(stored.stored(folder))) for folder in (
      tmp_path / 'runs', write_one(tmp_path)))
  assert whole - first < 12_000


def write_one(tmp_path):
  """A folder whose one run has almost no rows: what a file takes without them."""
  write(tmp_path / 'short/run', budget='desk')
  return tmp_path / 'short'


def test_damaged_runs_are_not_stored(tmp_path):
  write(tmp_path / 'runs/a')
  (tmp_path / 'runs/a/config.json').write_text('{')
  with pytest.raises(ValueError, match='run a cannot be stored: .*damaged'):
    stored.stored(tmp_path / 'runs')


RESULTS = sorted(path.parent for path in ROOT.glob('results/*/' + METRICS)) or [None]


@pytest.mark.every(6)
@pytest.mark.parametrize('folder', RESULTS, ids=lambda folder: folder.name if folder else 'none')
def test_committed_reports_are_those_of_the_stored_runs(folder, tmp_path, undrawn):
  if folder is None:
    pytest.skip(f'no folder of results has a {METRICS} yet')
  large = [path.name for path in folder.iterdir() if path.stat().st_size > 1_000_000]
  assert not large, 'committed results are small'
  assert not deviations(folder, tmp_path), (
      'The report is not that of the runs stored beside it; it is made of these, by the commands '
      'at the head of tests/paper/stored.py.')


def results_of(runs, out):
  """A folder of results as they are committed, without its pictures."""
  out.mkdir()
  (out / METRICS).write_text(to_json(stored.stored(runs)))
  stored.restore(out / METRICS, out.parent / 'made')
  made = report.build(find_runs(out.parent / 'made'))
  (out / 'report.json').write_text(to_json(made))
  (out / 'report.md').write_text(paper_page(made).markdown())
  return out


def test_a_changed_digit_is_noticed(runs, tmp_path, undrawn):
  folder = results_of(runs / 'desk', tmp_path / 'results')
  text, markdown = ((folder / name).read_text() for name in ('report.json', 'report.md'))
  assert deviations(folder, tmp_path / 'same') == []
  claim = next(claim for claim in json.loads(text)['claims'] if claim['key'] == 'emergence')
  verdict, part = claim['verdicts'][0]['verdict'], claim['verdicts'][0]['parts'][-1]
  # Of a mean, an interval, a count, a sentence and a verdict.
  for i, (before, after) in enumerate((
      (f'"mean": {part["mean"]}', f'"mean": {part["mean"] + 1e-4:.6g}'),
      (f'"low": {part["low"]}', f'"low": {part["low"] + 1e-4:.6g}'),
      ('"done": 3', '"done": 4'), ('Sink_1 20.67 %', 'Sink_1 20.66 %'),
      (f'"verdict": "{verdict}"', '"verdict": "does not hold"'))):
    assert before in text and after != before
    (folder / 'report.json').write_text(text.replace(before, after, 1))
    assert len(deviations(folder, tmp_path / str(i))) == 1, before
  (folder / 'report.json').write_text(text)
  (folder / 'report.md').write_text(markdown.replace('20.67 *(20.33', '20.67 *(20.34', 1))
  assert len(deviations(folder, tmp_path / 'markdown')) == 1
