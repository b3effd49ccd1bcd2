"""Pages made from planted runs and from the stored ones: what they say, count, link and draw."""

import io
import json
import re
import shutil
from pathlib import Path

import matplotlib.colors
import numpy as np
import pandas as pd
import pytest
from matplotlib.text import Text
from PIL import Image

from sink_jax.cli.report import make_report
from sink_jax.evaluate.head_maps import HeadMaps
from sink_jax.report import claims, figures, paper, side_by_side, stats
from sink_jax.report.paper_claims import CLAIMS
from sink_jax.report.runs import read_runs, table
from tests.report.browser import in_browser, needs_browser
from tests.report.fake_runs import DEAD, write_run

ROOT = Path(__file__).parents[2]


@pytest.fixture
def undrawn(monkeypatch):
  """Drawing pictures takes seconds, so here they are empty files."""
  monkeypatch.setattr(figures, 'png', lambda figure: b'drawn')


@pytest.fixture
def planted(tmp_path):
  """Three seeds of softmax, dead ones of sigmoid, one diverged, one half way; one of a V bias."""
  folder = tmp_path / 'runs'
  for seed, rate in enumerate((20.0, 25.0, 30.0)):
    write_run(folder, seed=seed, sink_1=rate)
    write_run(folder, 'sigmoid', seed, sink_1=0.0, last=DEAD)
    write_run(
      folder, 'k-bias', seed, ('done', 'diverged', 'running')[seed], sink_1=50.0 * (seed > 0)
    )
  write_run(folder, 'v-bias', 0, sink_1=25.0)
  return folder


def links(text):
  return [target for target in re.findall(r'\]\(([^)]+)\)', text) if '://' not in target]


def check_links(page):
  text = page.read_text()
  anchors = {
    re.sub(r'[^\w\- ]', '', heading.lower()).replace(' ', '-')
    for heading in re.findall(r'^#+ (.*)', text, re.MULTILINE)
  }
  for target in links(text):
    path, _, anchor = target.partition('#')
    assert anchor in anchors if anchor else (page.parent / path).exists(), target


def test_nothing_run(tmp_path, undrawn):
  (tmp_path / 'runs').mkdir()
  files, summary = make_report(tmp_path / 'out', tmp_path / 'runs')
  text = files[0].read_text()

  assert summary == ["Run: nothing yet. The tables have the paper's numbers only."]
  assert text.count('not testable here') >= len(CLAIMS)
  assert 'not run' in files[1].read_text()
  assert files[1].name == 'reproduction.md'

  with pytest.raises(ValueError, match='--runs'):
    make_report(tmp_path / 'out', None)
  with pytest.raises(ValueError, match='nowhere'):
    make_report(tmp_path / 'out', None, ['nowhere'])
  with pytest.raises(ValueError, match='--analyses=.*README.md'):
    make_report(tmp_path / 'out', None, [files[0]])


def test_a_run_with_other_settings_is_not_a_seed_of_its_trial(tmp_path, undrawn):
  for seed in range(4):
    write_run(
      tmp_path / 'runs', seed=seed, config={'optimizer.learning_rate': 1.0} if seed == 3 else None
    )

  (page, *_), _ = make_report(tmp_path / 'out', tmp_path / 'runs')
  text = page.read_text()

  assert '18.18 | 25.0 (25.0 to 25.0) | 3, 1 invalid |' in text
  assert 'Invalid and crossed out: 1 of other settings.' in text


def test_the_first_screen_counts_what_is_no_evidence(planted, tmp_path, undrawn):
  files, sentences = make_report(tmp_path / 'out', planted)
  text = files[0].read_text()

  assert '8 runs of 4 experiments' in text
  assert '1 to 3 seeds' in text
  assert 'Invalid and crossed out: 3 dead.' in text

  last = table(read_runs(planted))
  judged = {claim.key: claims.judge(claim, last).verdict for claim in CLAIMS if claim.headline}
  verdicts = ('reproduced', 'not reproduced', 'open')

  for verdict, line in zip(verdicts, sentences, strict=True):
    named = line.split('. ')[0]
    assert all(
      (key.replace('-', ' ') in named) == (found == verdict) for key, found in judged.items()
    )

  dots, rank, _ = paper.agreement(paper.beside(last))
  assert f'each of {len(dots)} experiments' in text
  assert f'correlation is {rank:.2f}.' in text
  assert '| softmax (default) | Sink\\_1 | 18.18 | 25.0 (20.0 to 30.0) | 3 |' in text
  assert '| sigmoid | Sink\\_1 | 0.44\\* | - | -, 3 invalid |' in text

  check_links(files[0])


def test_mixed_data_are_not_compared(tmp_path, undrawn):
  for seed in range(3):
    write_run(tmp_path / 'runs', 'lm-softmax', seed, task='lm')
    write_run(tmp_path / 'runs', 'lm-k-bias', seed, task='lm', content='other', sink_1=0.0)

  files, _ = make_report(tmp_path / 'out', tmp_path / 'runs')
  assert [path.name for path in files[:2]] == ['README.md', 'remedies.md']
  assert '| k-bias | - | open |' in files[1].read_text()

  check_links(files[1])


def test_runs_that_are_no_evidence_are_crossed_out_and_in_no_mean(planted):
  runs = read_runs(planted)
  grey = lambda figure: [
    line for line in figure.axes[0].get_lines() if line.get_color() == figures.GREY
  ]
  softmax, sigmoid, k_bias = (
    figures.curves(runs, table(runs), [trial], ['sink_1'])
    for trial in ('default', 'sigmoid', 'k-bias')
  )

  assert not grey(softmax)

  mean = lambda figure: max(figure.axes[0].get_lines(), key=lambda line: line.get_linewidth())
  np.testing.assert_allclose(mean(softmax).get_ydata(), np.linspace(0, 25, 11))
  assert not mean(k_bias).get_ydata().any()  # its invalid runs end at 50 %

  crosses = lambda figure: sum(line.get_marker() == 'x' for line in grey(figure))
  said = lambda figure: figure.legends[0].get_texts()[0].get_text()

  assert crosses(sigmoid) == 3
  assert said(sigmoid) == 'sigmoid (n = 0, 3 crossed out)'
  assert crosses(k_bias) == 2
  assert said(k_bias) == 'k-bias (n = 1, 2 crossed out)'


def test_names_in_the_scatter_cover_nothing():
  draw = np.random.default_rng(0)
  dots = pd.DataFrame(
    {
      'trial': [f'trial-{i}' for i in range(30)],
      'value': draw.uniform(10, 60, 30),
      'mean': draw.uniform(0, 2, 30),
      'crossed': [True, *[False] * 29],
    }
  )
  figure = figures.scatter(dots, 'title')
  figure.draw_without_rendering()
  boxes = [
    Text.get_window_extent(text) for text in figure.axes[0].texts
  ]  # without the lines to the dots

  assert len(boxes) == 12
  assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_the_extra_key_of_a_map_has_what_the_divided_row_leaves():
  raw = np.tril(np.full((2, 1, 4, 4), 0.9))  # rows of sigmoid, which may exceed one
  share = np.array([0.2, 0.6])[:, None, None, None]
  normalized = raw / raw.sum(-1, keepdims=True) * (1 - share)
  figure = figures.attention_maps({'kv': (HeadMaps(raw, normalized, 1, (1, 2)), True)})

  assert 'block 2, head 1: 0.60 to *' in figure.axes[0].get_title()
  np.testing.assert_allclose(figure.axes[0].images[0].get_array()[:, -1], 0.6)


def test_what_is_missing_is_said_and_in_no_mean(tmp_path, undrawn):
  """Covers a run whose file was cut, runs without a probe, and data that differ."""
  for seed in range(3):
    whole = write_run(tmp_path / 'runs', 'soft', seed, task='')
    blind = write_run(tmp_path / 'runs', 'blind', seed, task='', content='other') / 'metrics.jsonl'
    blind.write_text(re.sub('.*"probe".*\n', '', blind.read_text()))

  cut = whole / 'metrics.jsonl'
  cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
  (whole.parent / 'soft-seed-1/status.json').write_text('{')
  files, words = make_report(tmp_path / 'out', tmp_path / 'runs', maps=False)
  text = files[1].read_text()

  assert '| soft | softmax | 1 of 3 | 25.0 | - |' in text
  assert 'unreadable: metrics.jsonl ends at' in text
  assert any('nothing can be said' in line for line in words)
  assert 'Stdlib, Bytes (data 2)' in text
  assert any('(soft). 2 of 3 runs are invalid' in line for line in words)


def test_other_budgets_and_tasks_are_counted_and_seeds_once(tmp_path, undrawn):
  for seed in range(2):
    write_run(tmp_path / 'runs', seed=seed)
    write_run(tmp_path / 'runs/again', seed=seed, sink_1=35.0)

  write_run(tmp_path / 'runs', 'v-bias', config={'label.budget': 'full'})
  write_run(tmp_path / 'runs', 'mine', task='')
  files, _ = make_report(tmp_path / 'out', tmp_path / 'runs')
  text = files[0].read_text()

  assert '4 runs of 1 experiment of' in text
  assert 'nan' not in text
  assert '| mine | 25.0, n = 1 |' in files[0].read_text()
  assert '| Sink\\_1 | 18.18 | 30.0 (30.0 to 30.0) | 2 |' in files[0].read_text()


def test_other_runs_are_side_by_side(tmp_path):
  for seed in range(2):
    write_run(tmp_path / 'runs', 'soft', seed, task='', sink_1=20.0 + 10 * seed)
    write_run(
      tmp_path / 'runs',
      'sigmoid',
      seed,
      task='',
      sink_1=0.0,
      config={'attention.similarity': 'Sigmoid()', 'attention.normalizer': 'Unnormalized()'},
    )

  changed = write_run(
    tmp_path / 'runs', 'soft', 7, task='', config={'attention.position': 'Alibi()'}
  )
  changed.rename(changed.with_name('soft-alibi'))  # not a third seed of `soft`
  write_run(tmp_path / 'runs', 'other', task='', content='other', status='diverged')
  (tmp_path / 'runs/damaged').mkdir()
  (tmp_path / 'runs/damaged/config.json').write_text('{')
  files, words = make_report(tmp_path / 'out', tmp_path / 'runs')
  text = files[1].read_text()
  page = files[0].read_text()

  assert any('in every valid seed of 2 of 3 trials (soft, soft-alibi)' in line for line in words)
  assert '| soft-alibi | softmax | 1 of 1 | 25.0 |' in text
  assert '| soft | softmax | 2 of 2 | 25.0 (20.0 to 30.0) | - |' in text
  assert '**soft**: A sink in 2 of 2 seeds: Sink\\_1 25.0 (20.0 to 30.0), n = 2 (in %)' in text
  assert 'A sink in 0 of 2 seeds: Sink\\_1\\* 0.0' in text
  assert '1 of 1 runs diverged' in text
  assert 'unreadable' in text
  assert 'No attention map of soft-seed-0' in text
  assert '`attention.similarity = Sigmoid()`' in text
  assert '`steps = 100`' in text.split('Shared:')[1]

  check_links(files[1])
  assert not re.search(r'(src|href)="(?!data:|#)', page)
  assert page.count('<img') == page.count('data:image/png') == 2
  assert all(path.stat().st_size < 60_000 for path in files if path.suffix == '.png')


def test_the_page_begins_with_a_measured_model(tmp_path, monkeypatch, undrawn):
  monkeypatch.setattr(
    side_by_side, 'read_page', lambda folder: ('# The model\n', {'norms.png': b'norms'})
  )
  write_run(tmp_path / 'runs', task='')
  files, _ = make_report(
    tmp_path / 'out', tmp_path / 'runs', evaluation=tmp_path / 'model', maps=False
  )

  assert files[1].read_text().startswith('# The model')
  assert (tmp_path / 'out/norms.png').read_bytes() == b'norms'


@needs_browser
def test_nothing_is_beyond_the_screen_of_a_phone(tmp_path):
  write_run(tmp_path / 'runs', 'x' * 60, task='')
  files, _ = make_report(tmp_path / 'out', tmp_path / 'runs')
  width = 'return document.documentElement.scrollWidth'
  assert 300 < in_browser(files[0].read_text(), width, tmp_path) <= 390


def test_colours_of_lines_survive_the_palette(tmp_path):
  write_run(tmp_path / 'runs', 'a')
  write_run(tmp_path / 'runs', 'b', sink_1=50.0)
  runs = read_runs(tmp_path / 'runs')
  drawn = figures.png(figures.curves(runs, table(runs), ['a', 'b'], ['sink_1']))
  pixels = np.asarray(Image.open(io.BytesIO(drawn)).convert('RGB')).reshape(-1, 3).astype(int)

  for colour in figures.COLOURS[:2]:
    wanted = np.round(255 * np.array(matplotlib.colors.to_rgb(colour)))
    assert abs(pixels - wanted).max(1).min() <= 3


@pytest.fixture(scope='module')
def stored():
  return table(read_runs(ROOT / 'results'))


def test_the_committed_pages_are_made_of_the_stored_table(tmp_path, undrawn):
  """So every number on the pages is in the table."""
  shutil.copytree(ROOT / 'results', tmp_path / 'results')
  for page in ('README.md', 'remedies.md'):
    (tmp_path / 'results' / page).unlink()

  make_report(tmp_path / 'results', tmp_path / 'results', [tmp_path / 'results/open_models'])
  for page in ('README.md', 'remedies.md'):
    made, stored = ((folder / 'results' / page).read_text() for folder in (tmp_path, ROOT))
    assert made == stored, (
      'python -m sink_jax report --runs=results --analyses=results/open_models --out=results'
    )
    check_links(ROOT / 'results' / page)

  assert all(path.stat().st_size <= 70_000 for path in (ROOT / 'results').glob('*.png'))
  assert sum(path.stat().st_size for path in (ROOT / 'results').glob('*.csv.gz')) <= 4_000_000


def test_the_first_sentences_are_recomputed(stored):
  """This code is independent of the code of the pages."""
  text = (ROOT / 'results/README.md').read_text()
  of_paper = stored[(stored.task == 'paper') & (stored.status == 'done')]
  if of_paper.empty:
    pytest.skip('no runs of the paper are stored')
  mine = of_paper[of_paper.budget == of_paper.budget.mode()[0]]

  assert f'{len(mine)} runs of {len(set(mine.trial))} experiment' in text

  numbers = json.loads((ROOT / 'sink_jax/report/numbers.json').read_text())
  theirs = {}  # the first number of a trial that several tables have

  for row in (
    row for item in numbers['tables'] + numbers['text'] for row in item['rows'] if row['trial']
  ):
    if isinstance(rate := row['values'].get('sink_1'), (int, float)):
      theirs.setdefault(row['trial'], rate)

  ours = mine[(mine.valid == '') & mine.sink_1.notna()].groupby('trial').sink_1.mean()
  # A fixed token begins every sequence at this budget, so fixed-1 is the default.
  both = [trial for trial in theirs if trial in ours and trial != 'fixed-1']
  ranks = [pd.Series([of[trial] for trial in both]).rank() for of in (theirs, ours)]
  correlations = re.findall(r'each of (\d+) experiments.*correlation is (.*?)\.\*', text)

  assert len(correlations) == (len(both) > 2)  # fewer show no agreement

  for count, rank in correlations:
    assert int(count) == len(both)
    assert float(rank) == pytest.approx(np.corrcoef(*ranks)[0, 1], abs=0.006)

  bad = mine.valid[mine.valid != ''].value_counts()
  assert all(f'{n} {why}' in text for why, n in bad.items())


def test_numbers_of_what_is_an_attention_sink_are_recomputed(stored):
  text = ' '.join((ROOT / 'docs/attention_sink.md').read_text().split())
  desk = stored[(stored.task == 'paper') & (stored.budget == 'desk') & (stored.valid == '')]
  of = lambda trial: desk[desk.trial == trial].sort_values('seed')
  sinks = {
    trial: of(trial).sink_1.tolist()
    for trial in ('default', 'k-bias', 'sigmoid', 'sigmoid-normalized')
  }

  assert set(map(len, sinks.values())) == {3}

  mean = lambda trial: np.mean(sinks[trial])
  first, second, third = sinks['sigmoid-normalized']

  for words in (
    f'ends at {mean("default"):.0f} % of the heads',
    f'keeps {mean("k-bias"):.0f} %, and the bias has {of("k-bias").sink_star.mean():.0f} %',
    f'attention ends at {mean("sigmoid"):.1f} %',
    f'differs by seed: {first:.0f}, {second:.0f} and {third:.0f} %',
  ):
    assert words in text, words

  emerged = [seed >= 10 for seed in sinks['sigmoid-normalized']]
  assert 'gets one in two of three seeds' in (ROOT / 'README.md').read_text()
  assert sum(emerged) == 2
  assert min(sinks['default']) >= 10 > max(sinks['sigmoid'])


def test_numbers_in_the_prose_about_results_are_recomputed(stored):
  """Each number of docs/results.md appears here, next to its computation."""
  text = ' '.join((ROOT / 'docs/results.md').read_text().split())
  expected = [
    *words_about_the_quickstart(stored),
    *words_about_grafts(stored),
    *words_about_drawn_and_only_new(stored),
  ]

  for words in expected:
    assert words in text

  rest = text
  for words in expected:
    rest = rest.replace(words, '')

  assert not re.search(r'\d+ ?%|\d+ of \d+|n = \d', rest)


def valid(stored, task):
  return stored[(stored.task == task) & (stored.valid == '')]


def words_about_the_quickstart(stored):
  runs = valid(stored, 'quickstart')
  sinks = runs.sink_1 >= 10
  of = lambda trial: f'{sinks[runs.trial == trial].sum()} of {(runs.trial == trial).sum()}'
  quick = runs[runs.trial == 'text-sigmoid']

  assert quick.seed[quick.sink_1 >= 10].tolist() == [2]
  assert len(quick) == 3

  for task, with_sink in (('synthetic', ('default', 'sigmoid')), ('bigram', ('softmax',))):
    of_task = valid(stored, task)
    for name in ('default', 'softmax', 'sigmoid'):
      rates = of_task.sink_1[of_task.trial == f'{task}-{name}']
      assert (rates >= 10).all() == (name in with_sink) or rates.empty

  return [
    f'{of("text-softmax")} seeds with softmax',
    f'{of("text-sigmoid")} with sigmoid without normalisation',
  ]


def words_about_grafts(stored):
  grafts = valid(stored, 'graft')

  assert set(grafts.steps) == {400}
  assert set(grafts.tokens) == {204_800}

  ends = grafts[~grafts.trial.str.contains('^only-|^random-')]
  seeds = ends.groupby('trial').seed.agg(list)

  assert seeds.pop('continued') == seeds.pop('graft-kv-bias') == [0, 1, 2]
  assert list(seeds) == [[0]] * 5

  sinks = ends.set_index('trial').sink_1
  assert (sinks.idxmin(), sinks.idxmax()) == ('graft-kv-bias', 'graft-gate')

  biased = sinks['graft-kv-bias'].tolist()
  control = sinks['continued'].tolist()
  found = stats.compare(dict(enumerate(biased)), dict(enumerate(control)))
  return [
    f'{sinks.min():.0f} % (KV bias)',
    f'{sinks.max():.0f} % (head gate)',
    f'{ends.sink_star.max():.1f} %',
    f'{sinks["graft-sigmoid-normalized"]:.0f} % as well',
    f'{found.mean:+.1f} points ({found.low:.1f} to {found.high:+.1f}, n = {found.n})',
    'by {:+.1f} points; with the others it differs by {:+.1f} and {:+.1f}'.format(
      *np.subtract(biased, control)
    ),
    f'ended at {min(biased):.0f} to {max(biased):.0f} %',
  ]


def words_about_drawn_and_only_new(stored):
  grafts = valid(stored, 'graft').set_index('trial')
  new = grafts[grafts.index.str.startswith('only-')]
  control = grafts.loc['continued']
  drawn = grafts.loc['random-kv-bias']
  of_drawn = grafts.sink_1['random-continued']
  trials = [new.loc[f'only-{name}'] for name in ('k-bias', 'kv-bias', 'sink-logit', 'gate')]
  bias, both, logit, gate = trials

  assert len(new) == 4
  assert set(new.seed) == {0}

  medians = [trial.max_over_median for trial in trials]
  return [
    f'{drawn.sink_1:.0f} % with a KV bias (Sink_* {drawn.sink_star:.1f} %) and at {of_drawn:.0f} % '
    'in the control',
    f'{bias.sink_1:.0f} % with a K bias (Sink_* {bias.sink_star:.1f} %)',
    f'{both.sink_1:.0f} % with a KV bias (Sink_* {both.sink_star:.1f} %)',
    f'{logit.sink_1:.0f} % with a sink logit (Sink_* {logit.sink_star:.1f} %)',
    f'{gate.sink_1:.0f} % with a head gate, against {control.sink_1.mean():.0f} % in the control',
    '{:,.0f}, {:,.0f}, {:,.0f} and {:,.0f} medians, against {:,.0f} in the control'.format(
      *medians, control.max_over_median.mean()
    ),
  ]
