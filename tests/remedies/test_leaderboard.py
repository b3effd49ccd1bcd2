"""The leaderboard's verdicts on planted runs, and its report."""

import dataclasses
import json
import random
import shutil
import statistics

import pytest

from configs import remedies
from sink_jax.cli.report import make_report
from sink_jax.paper.spread import CONFIDENCE
from sink_jax.remedies import axes, findings, overview, page, picture, standings
from sink_jax.remedies import trials as names
from sink_jax.report import markup
from sink_jax.report.read_runs import find_runs
from tests.paper import stored
from tests.paper.conftest import PIXEL
from tests.paper.paper_runs import HARDWARE, probe_row

SEEDS = range(5)


@pytest.fixture(autouse=True)
def figures(monkeypatch):
  """The figures that are asked for; their PNGs, which take a second, are made by one test."""
  asked = []
  monkeypatch.setattr(picture, 'png', lambda figure: asked.append(figure) or PIXEL)
  return asked


def plant(root, variant, sinks, *, task='bigram', status='done', slot=None, losses=1.0,
          ratio=1.5, value=0.2, changes=()):
  """Runs of a variant, one per seed, whose last probe has these rates in percent."""
  config = remedies.get_config(f'{task}-{variant}')
  config.update_from_flattened_dict(dict(changes))
  config = config.to_dict()
  config['model']['vocab_size'] = 64  # fewer than bytes, as the configs of the task have it
  for seed, sink in zip(SEEDS, sinks):
    folder = root / f'{task}-{variant}-{seed}'
    folder.mkdir(parents=True)
    steps = config['steps']
    (folder / 'config.json').write_text(json.dumps(config | {'seed': seed}))
    (folder / 'status.json').write_text(json.dumps(dict(status=status, step=steps, **HARDWARE)))
    measured = dict(sink_bias_slot=slot, hidden_ratio=[1.0, ratio], value_ratio=[value])
    loss = losses + 0.001 * seed
    rows = [probe_row(0, ()), probe_row(steps, (sink,), **measured),
            dict(kind='train', step=steps, loss=loss, grad_norm=1.0),
            dict(kind='valid', step=steps, valid=loss)]
    (folder / 'metrics.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))


@pytest.fixture(scope='module')
def planted(tmp_path_factory):
  root = tmp_path_factory.mktemp('planted')
  plant(root, 'softmax', (60, 61, 60, 59, 60))
  plant(root, 'k-bias', (0, 0, 1, 0, 0), slot=50.0)
  plant(root, 'sink-logit', (0, 0, 1, 0, 0), slot=0.0)
  plant(root, 'sigmoid', (0, 1, 0, 0, 0), losses=1.1)
  plant(root, 'sigmoid-normalized', (25, 25, 26, 25, 25))
  plant(root, 'kv-bias', (90, 91, 90, 90, 90), value=0.4, losses=0.9)
  plant(root, 'qk-norm', (60, 61, 59, 60, 60))
  plant(root, 'sink-token', (0, 60, 30, 90, 10))
  timed(root, {'softmax': 1.0, 'k-bias': 1.04})
  return root


def task(root, key='bigram'):
  found = {group.budget: standings.task_of(group) for group in standings.groups(find_runs(root))}
  return found[key]


def timed(root, ratios):
  """What lies next to the runs: {variant of bigram: its ratio}."""
  rows = [dict(task='bigram', variant=name, ratio=ratio, ratio_low=ratio - 0.04, ratio_high=ratio + 0.06,
               pairs=9) for name, ratio in ratios.items()]
  rows.append(dict(task='bigram', variant='sink-token', failed='out of memory'))
  machine = HARDWARE | dict(date='2026-11-22T10:00:00', code='commit abc, clean')
  (root / 'step_times.json').write_text(json.dumps(dict(machine=machine, rows=rows)))


def verdicts(of, axis='concentration'):
  return {variant.name: variant.standings[axis].verdict for variant in of.variants}


def test_planted_effects_get_their_verdicts(planted):
  of = task(planted)
  assert verdicts(of) == {
      'k-bias': 'moves to the extra key', 'sink-logit': 'removes', 'sigmoid': 'removes',
      'sigmoid-normalized': 'reduces', 'kv-bias': 'adds', 'qk-norm': 'no difference',
      'sink-token': 'undecided'}
  # The values of the first token are drained by softmax (0.2), and less by one variant, whose
  # ratio doubles without reaching the level.
  assert verdicts(of, 'drain')['kv-bias'] == 'reduces'
  assert verdicts(of, 'loss')['sigmoid'] == 'worse' and verdicts(of, 'loss')['kv-bias'] == 'better'
  assert verdicts(of, 'loss')['qk-norm'] == 'no difference'


def test_what_softmax_has_not_cannot_be_remedied(planted):
  of = task(planted)
  assert of.closed == {'massive': 'baseline has none'}  # a hidden ratio of 1.5
  assert set(verdicts(of, 'massive').values()) == {'baseline has none'}
  line = next(line for line in page.sentences(of) if 'hidden ratio' in line)
  assert 'no variant is judged' in line
  assert 'Not judged: largest hidden ratio (baseline has none)' in overview.answer(of)
  head, _ = overview.verdicts([of])
  assert 'Bigram-Backcopy: valid loss' in head and not any('hidden' in words for words in head)


def test_pictures_show_each_verdict_and_each_seed(planted, tmp_path, figures):
  plant(tmp_path, 'softmax', (30, 31, 30), task='desk')
  tasks = [task(planted), task(tmp_path, 'desk')]
  assert list(picture.first_pictures(tasks)) == ['verdicts.png', 'rates.png']
  cells, rates = figures
  head, rows = overview.verdicts(tasks)
  by_axis = {ax.get_title(): ax for ax in cells.axes}
  loss = by_axis['valid loss']
  assert [label.get_text() for label in loss.get_yticklabels()] == [row[0] for row in rows]
  shown = {tuple(map(int, text.get_position())): text.get_text() for text in loss.texts}
  column = head.index('Bigram-Backcopy: valid loss')
  assert [shown[0, i] for i in range(len(rows))] == [row[column] for row in rows]
  assert {shown[1, i] for i in range(len(rows))} == {''}  # not run
  assert [ax.get_title() for ax in rates.axes] == ['Bigram-Backcopy', 'text (desk)']
  ax = rates.axes[0]
  first, extra = (line for line in ax.lines if line.get_marker() in 'os')
  seeds = {}
  for line in (first, extra):
    for x, y in zip(*line.get_data()):
      name = ax.get_yticklabels()[round(y)].get_text()
      seeds.setdefault(name, []).append(x)
  assert next(iter(seeds)) == 'softmax' and sorted(seeds['softmax']) == [59, 60, 60, 60, 61]
  assert sorted(seeds['k-bias']) == [0, 0, 0, 0, 1] + 5 * [50]
  assert 'sigmoid*' in seeds and list(seeds)[-1] == 'kv-bias'  # of proxies; the strongest sink
  # Without a variant there is no verdict; the rates of softmax are shown all the same.
  assert list(picture.first_pictures(tasks[1:])) == ['rates.png']


def test_runs_that_are_not_alike_are_not_paired(tmp_path):
  plant(tmp_path, 'softmax', (60,) * 5)
  plant(tmp_path, 'k-bias', (0,) * 5, changes={'probe.epsilon': 0.2, 'steps': 1000})
  plant(tmp_path, 'relu', (0,) * 5, changes={'data.source': 'BigramBackcopy(length=64, seed=1)',
                                             'optimizer.learning_rate': 0.5})
  plant(tmp_path, 'sigmoid', (0,) * 5, status='diverged')
  plant(tmp_path, 'qk-norm', (60,) * 2)
  plant(tmp_path, 'sink-logit', (60,) * 5, status='running')
  of = {variant.name: variant.standings['concentration'] for variant in task(tmp_path).variants}
  assert {it.verdict for it in of.values()} == {'cannot be judged'}
  for name, words in (('k-bias', 'probe.epsilon 0.2 instead of 0.3'), ('k-bias', 'steps 1000 inst'),
                      ('relu', 'data.source BigramBackcopy(length=64, seed=1) instead of Bi'),
                      ('relu', 'optimizer.learning_rate 0.5 instead of'),
                      ('sigmoid', '5 of 5 runs diverged'), ('qk-norm', '2 of 3 seeds'),
                      ('sink-logit', 'running')):
    assert words in of[name].reason
  assert of['k-bias'].difference is None and not of['k-bias'].differences
  _, rows = overview.verdicts([task(tmp_path)])
  assert len(rows) == 5 and {cell for row in rows for cell in row[1:]} == {'-'}
  text = make_report(tmp_path / 'out', tmp_path, kind='leaderboard')
  assert text.startswith('No variant could be judged yet') and '5 of 35 variants' in text
  assert 'changed by none (5 not judged)' in text
  assert 'steps 1000 instead of' in (tmp_path / 'out/report.md').read_text()


def test_no_variant_is_judged_beside_softmax_that_differs_within_itself(tmp_path):
  plant(tmp_path, 'softmax', (60,) * 3)
  plant(tmp_path / 'more', 'softmax', (60,) * 5, changes={'steps': 50})
  plant(tmp_path, 'k-bias', (0,) * 5)
  of = task(tmp_path)
  for axis in axes.AXES:
    standing = of.variants[0].standings[axis.key]
    assert standing.verdict == 'cannot be judged' and standing.difference is None
    assert 'of softmax' in standing.reason and 'its runs differ in steps' in standing.reason
  assert all('steps' in line and 'no variant is judged' in line for line in page.sentences(of))


def test_desk_runs_of_the_paper_are_variants_as_well(tmp_path):
  plant(tmp_path, 'softmax', (30, 31, 30), task='desk')
  folder = tmp_path / 'desk-softmax-0'
  config = json.loads((folder / 'config.json').read_text())
  config['label'] = dict(trial='default', budget='desk', protocol='paper')
  (folder / 'config.json').write_text(json.dumps(config))
  assert len(task(tmp_path, 'desk').softmax.runs) == 3
  config['label']['budget'] = 'desk with steps=50'
  (folder / 'config.json').write_text(json.dumps(config))
  assert len(task(tmp_path, 'desk').softmax.runs) == 2


def test_holm_keeps_false_verdicts_rare(planted):
  """Variants without an effect: in at most a few percent of leaderboards does one get a verdict."""
  group = next(group for group in standings.groups(find_runs(planted)))
  template = group.done('default')[0]
  rng = random.Random(0)

  def run(seed):
    rate = 50 + rng.gauss(0, 5)
    probe = dataclasses.replace(template.probe, sink_1=rate)
    setup = dataclasses.replace(template.setup, seed=seed)
    return dataclasses.replace(template, probe=probe, setup=setup)

  wrong = 0
  for _ in range(60):
    trials = {name: tuple(run(seed) for seed in SEEDS) for name in ('default', *'abcdefgh')}
    of = standings.task_of(dataclasses.replace(group, trials=trials))
    wrong += bool(set(verdicts(of).values()) - {'undecided', 'no difference'})
  # The margin of 5 points is more than a standard error, so that hardly any is to be expected.
  assert wrong <= 3


def test_more_seeds_show_smaller_differences(tmp_path):
  power = []
  for n in (3, 5):
    root = tmp_path / str(n)
    plant(root, 'softmax', (60, 55, 65, 60, 58)[:n])
    plant(root, 'k-bias', (50, 57, 55, 52, 50)[:n])
    power.append(task(root).power['concentration'])
  margin = axes.AXES[0].margin
  assert power[0] > power[1] > margin


def test_the_report_says_what_its_records_say(planted, tmp_path):
  text = make_report(tmp_path / 'out', planted, kind='leaderboard')
  record = json.loads((tmp_path / 'out/report.json').read_text())
  assert text.splitlines() == record['summary']
  variants = {it['variant']: it for it in record['tasks'][0]['variants']}
  sigmoid, softmax = (variants[name]['axes']['loss'] for name in ('sigmoid', 'softmax'))
  differences = [a - b for a, b in zip(sigmoid['values'], softmax['values'])]
  assert sigmoid['differences'] == pytest.approx(differences)
  assert sigmoid['difference'] == pytest.approx(statistics.fmean(differences), abs=1e-6)
  assert sigmoid['low'] < sigmoid['difference'] < sigmoid['high'] and sigmoid['n'] == 5
  assert variants['k-bias']['parameters'] - variants['softmax']['parameters'] == 4 * 16
  assert variants['k-bias']['step_time'] == {'ratio': 1.04, 'low': 1.0, 'high': 1.1, 'pairs': 9}
  assert variants['sink-token']['step_time'] is variants['sigmoid']['step_time'] is None
  markdown = (tmp_path / 'out/report.md').read_text()
  assert '| 64 | 1.04 (1.00 to 1.10) |' in markdown and '| 0 | not measured |' in markdown
  assert 'commit abc, clean' in markdown and record['steps_timed'].startswith(HARDWARE['hardware'])
  assert f'{100 * CONFIDENCE:g} %' in markdown and '| k-bias |' in markdown
  assert 'moves to the extra key' in markdown and 'Gu et al.' in markdown
  html = (tmp_path / 'out/index.html').read_text()
  assert '<script' not in html and 'Bigram-Backcopy' in html
  assert all((tmp_path / 'out' / name).stat().st_size for name in (
      'index.html', 'report.md', 'report.json', 'differences.png', 'verdicts.png', 'rates.png'))


def test_the_page_answers_first_and_then_has_all_verdicts(planted, tmp_path):
  text = make_report(tmp_path / 'out', planted, kind='leaderboard')
  assert 'The sink on the first token is removed by sigmoid and sink-logit' in text
  assert 'moved to an extra key by k-bias' in text and 'The loss is lower with kv-bias' in text
  lines = (tmp_path / 'out/report.md').read_text().splitlines()
  first, *others = map(markup.escaped, text.splitlines())
  places = [lines.index(line) for line in (first, *(f'- {line}' for line in others), '## Verdicts')]
  assert places == sorted(places) and places[0] == 2
  assert [file for line in lines[places[0]:places[1]] for file in picture.CAPTIONS
          if line.endswith(f']({file})')] == ['verdicts.png', 'rates.png']
  # Of seven variants four lessen the sink, kv-bias adds to it, and one is undecided.
  assert '| Bigram-Backcopy: Sink\\_1 % | 4 | 1 | 1 | 1 | 0 |' in lines[:places[1]]
  # One that costs loss, and none that is undecided or adds to the sink.
  assert text.splitlines()[0].endswith(
      'by sink-logit on 1 of 1, k-bias on 1 of 1, sigmoid on 1 of 1 (with a higher loss) and '
      'sigmoid-normalized on 1 of 1.')
  # Its loss is higher on a task on which it leaves the sink as it is.
  for name in ('softmax', 'k-bias', 'relu', 'qk-norm'):  # enough for a spread
    plant(tmp_path / 'more', name, (60, 61, 60, 59, 60), task='trigger',
          losses=1.1 if name == 'k-bias' else 1.0)
  other = task(tmp_path / 'more', 'trigger')
  assert verdicts(other, 'loss')['k-bias'] == 'worse'
  assert ' k-bias on 1 of 2, sigmoid' in overview.overall([task(planted), other])
  _, rows = overview.verdicts([task(planted)])
  by_name = {row[0]: row[1:] for row in rows}
  assert by_name['k-bias'] == ['moves', 'same', 'same'] and by_name['sink-token'][0] == '?'
  assert by_name['kv-bias'] == ['adds', 'reduces', 'better'] and len(rows) == 7


def test_what_was_never_begun_is_listed_with_the_command_that_trains_it(planted, tmp_path):
  make_report(tmp_path / 'out', planted, kind='leaderboard')
  left = json.loads((tmp_path / 'out/report.json').read_text())['not_run']
  there = {folder.name.rsplit('-', 1)[0] for folder in planted.iterdir() if folder.is_dir()}
  listed = {f'{key}-{name}' for key, of in left.items() for name in of['variants']}
  assert listed == set(remedies.TRIALS) - there
  for key, of in left.items():
    chosen = of['command'].partition('--only=')[2]
    assert chosen.split(',') == [f'{key}-{name}' for name in of['variants']]
    assert '--config=configs/remedies.py --seeds=0,1,2,3,4 ' in of['command']
  markdown = (tmp_path / 'out/report.md').read_text()
  assert 'text (desk), not run: softmax, sink-logit' in markdown
  assert left['bigram']['command'] in markdown
  assert 'Bigram-Backcopy, not run: zero-sink, v-bias' in markdown


def test_the_names_of_trials_are_those_of_the_config():
  listed = [f'{key}-{name}' for key in standings.TASKS
            for name in (standings.SOFTMAX, *names.variants_of(key))]
  assert listed == list(remedies.TRIALS)


def test_a_page_of_stored_ends_is_that_of_all_that_is_stored(planted, tmp_path):
  root = tmp_path / 'runs'
  shutil.copytree(planted, root)
  plant(root, 'relu', (1 / 3, 2 / 3, 10), task='trigger', status='diverged')
  plant(root, 'softmax', (1 / 7, 20 / 3), task='trigger', status='running')
  made = {}
  for name, ends in (('all', False), ('ends', True)):
    content = stored.stored(root, ends)
    (tmp_path / f'{name}.json').write_text(stored.as_text(content))
    stored.restore(tmp_path / f'{name}.json', tmp_path / name)
    make_report(tmp_path / 'out', tmp_path / name, kind='leaderboard')
    made[name] = [(tmp_path / 'out' / file).read_text() for file in ('report.json', 'report.md')]
  assert made['ends'] == made['all'] and '1.04 (1.00 to 1.10)' in made['ends'][1]
  for one, other in zip(find_runs(root), find_runs(tmp_path / 'ends')):
    assert one.setup.settings == other.setup.settings


def test_findings_agree_disagree_or_cannot_tell(planted):
  of = task(planted)
  by_variant = {finding.variant: finding for finding in findings.FINDINGS}
  assert findings.compared(by_variant['k-bias'], of) == {
      'concentration': 'agrees', 'massive': 'cannot tell'}
  assert findings.compared(by_variant['sigmoid-normalized'], of) == {'concentration': 'disagrees'}
  assert findings.compared(by_variant['sink-token'], of)['concentration'] == 'cannot tell'
  assert findings.compared(by_variant['softpick'], of) == {}  # not run


def test_nothing_to_report_is_an_error_with_the_remedy(tmp_path):
  with pytest.raises(ValueError, match='no run of configs/remedies.py.*--seeds'):
    make_report(tmp_path / 'out', tmp_path, kind='leaderboard')


def test_every_finding_is_of_a_variant_that_can_be_trained():
  assert {finding.variant for finding in findings.FINDINGS} <= set(remedies.VARIANTS)
  for task_, words in standings.TASKS.items():
    assert f'{task_}-softmax' in remedies.TRIALS and words
