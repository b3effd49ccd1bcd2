"""The report of the paper as files: complete, self-contained, repeatable; and the command."""

import dataclasses
import io
import json
import re

import numpy as np
import pytest
from PIL import Image

from sink_jax.analyses.registry import ANALYSES
from sink_jax.paper import numbers
from sink_jax.paper.all_claims import CLAIMS
from sink_jax.paper.report import as_text, build, paper_report, without_paths
from sink_jax.report import images
from sink_jax.report.markup import anchor
from tests.commands import run_here
from tests.paper import paper_runs
from tests.paper.analysed_files import content, write as write_analysis
from tests.paper.paper_runs import change, runs, write, write_not_expressible
from tests.report.test_report import Page


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  """Everything run at the full budget as the paper says, and a little at the smoke budget."""
  base = tmp_path_factory.mktemp('paper')
  paper_runs.write_paper(base / 'runs/full')
  write(base / 'runs/smoke/default', sink=(30,))
  write(base / 'runs/smoke/lr-8e-4', 'lr-8e-4', status='failed', details=dict(
      error="cannot write '/disk/me/runs/lr-8e-4/x'"))
  write_not_expressible(base / 'runs/smoke/heads-1', 'heads-1', 'half a head')
  for seed, rate in ((0, 100), (1, 60)):
    paper_runs.write_synthetic(base / f'runs/synthetic/default-{seed}', 'default', seed=seed,
                               sink=(rate,), domain='backcopy')
  paper_runs.write_synthetic(base / 'runs/synthetic/k', 'k-bias', sink=(0,), sink_bias_slot=90.0)
  return base, paper_report(runs(base / 'runs'), base / 'out')


@pytest.mark.full
def test_the_page_stands_alone_and_has_everything(whole):
  base, report = whole
  source = (base / 'out/index.html').read_text()
  page = Page(source)
  assert not page.open and 'script' not in page.tags and len(source) < 4_000_000
  assert all(link.startswith(('data:image/webp;base64,', '#')) for link in page.links)
  assert '://' not in source and 'url(' not in source and '@import' not in source
  names = set(re.findall(r' id="([^"]+)"', source))
  assert {link[1:] for link in page.links if link.startswith('#')} <= names
  for item in numbers.ALL_TABLES + numbers.FIGURES:
    assert anchor(item.name) in names and f'#{anchor(item.name)}' in page.links
  assert {anchor(claim.statement + claim.marks) for claim in report.claims} <= names
  words = ' '.join(page.text.split())
  for number in range(1, 16):
    assert f'Table {number}' in words
  for number in range(1, 31):
    assert f'Figure {number}' in words
  assert 'StreamingLLM, Figure 12' in words and 'not expressible (half a head)' in words
  waiting = [item for item in numbers.ALL_TABLES + numbers.FIGURES
             if item.needs == 'open models']
  assert words.count('Not run: needs a published checkpoint, and') == len(waiting) == 31
  assert {item.analysis for item in waiting} <= set(ANALYSES)
  assert 'learning rate times' in words  # the rules of a budget
  headings = re.findall('^#+ (.*)', (base / 'out/report.md').read_text(), re.MULTILINE)
  assert len(set(headings)) == len(headings)  # a link leads to the first of equal ones
  assert 'The synthetic axis' in words and '60.00 to 100.00, n = 2' in words


@pytest.mark.full
def test_every_trained_figure_is_drawn(whole):
  base, report = whole
  for figure in report.figures:
    expected = {'training': 1, 'nothing': int(figure.paper.kind == 'mask')}.get(
        figure.paper.needs, 0)
    drawn = [p for p in figure.pictures if p.name.startswith('full') or not p.name]
    assert len(drawn) == expected, figure.paper.name
    for picture in drawn:
      assert (base / 'out' / picture.file).read_bytes().startswith(b'\x89PNG')
      assert list(picture.missing) == [], figure.paper.name
  four = next(f for f in report.figures if f.paper.key == 'figure-4-right')
  assert 'lr-8e-4 (failed' in ' '.join(four.pictures[1].missing)


@pytest.mark.full
def test_json_and_markdown_say_no_absolute_path(whole):
  base, report = whole
  text = (base / 'out/report.json').read_text()
  written = json.loads(text, parse_constant=pytest.fail)
  assert [[row['paper']['setting'] for row in table['rows']] for table in written['tables']] == [
      [row.paper.setting for row in table.rows] for table in report.tables]
  assert [[verdict['why'] for verdict in claim['verdicts']] for claim in written['claims']] == [
      [verdict.why for verdict in claim.verdicts] for claim in report.claims]
  sinks = {run.name: run.probe and run.probe.sink_1 for run in runs(base / 'runs')}
  assert {name: run['numbers'].get('sink_1') for name, run in written['runs'].items()} == sinks
  for name in ('report.json', 'report.md', 'index.html'):
    content = (base / 'out' / name).read_text()
    assert str(base) not in content and '/disk/me' not in content, name
  assert '--workdir=.../runs' in text and "cannot write '.../x'" in text
  markdown = (base / 'out/report.md').read_text()
  assert all(f']({p.file})' in markdown for f in report.figures for p in f.pictures)
  assert '| 18.18 |' in markdown and '## Claims' in markdown
  head, line = markdown.split('## Tables')[1].split('| setting | budget, protocol |')[1].split(
      '\n')[:2]
  assert head.endswith('status and runs |') and line.endswith('---: | --- |')
  assert line.startswith('| --- | --- | ---: |')


@pytest.mark.full
def test_both_pages_say_the_same_in_short(whole):
  base, report = whole
  markdown = (base / 'out/report.md').read_text().translate({ord(mark): None for mark in '\\*'})
  page = ' '.join(Page((base / 'out/index.html').read_text()).text.split())
  full, smoke, _ = report.groups
  # One seed is no verdict, but of an identity.
  for words in (f'of {len(CLAIMS)} claims of the paper, 1 holds, 0 do not hold, '
                f'{len(CLAIMS) - 1} are undecided, 0 cannot be judged.', 'Holds: chain.',
                'Undecided: emergence (about 3 seeds), ', 'says little about the paper',
                'interval of its mean over seeds', '† presupposes that',
                'training ends, identities and rates of 90 % or more.',
                'No such bound is known for chain, '):
    assert words in markdown and words in page.replace('\xa0', ' '), words
  # Of the kinds of claims that were simulated alone.
  (most, known, others), = re.findall(
      r'At most ([\d.]+) false verdicts are to be expected among (\d+) of.* bound is known for (.*)\.',
      full.errors)
  assert float(most) == round(0.05 * int(known), 1)
  assert int(known) + len(re.sub(r'\. .*', '', others).split(', ')) == len(CLAIMS)
  assert {'chain', 'post-norm-massive', 'p-norm-diverges'} <= set(others.split(', '))
  assert full.answer[2].startswith('Default: Sink_1 18.18 %, valid loss 3.730, largest hidden')
  unknown = smoke.verdicts['cannot be judged']
  assert 'runs are missing' in unknown
  assert unknown['the sequences of the default run are edited'][0] == 'random-first'
  # The answer with its table and two pictures first, names of claims and runs last.
  places = [markdown.index(words) for words in (
      '1 holds, 0 do not hold, ', '| section | runs | hold |', '](claims.png)', '](events-',
      'Holds: chain', 'Asked:', '## All runs', '## How it was made')]
  assert places == sorted(places)
  assert not any('resuppose' in claim.criterion for claim in report.claims)


def test_labels_of_any_text_make_files_that_are_safe_and_unlike(tmp_path):
  for i, budget in enumerate(('smoke with steps=50', 'smoke with steps/50', '../x', 'Smoke',
                              'smoke')):
    write(tmp_path / f'runs/{i}')
    change(tmp_path / f'runs/{i}', {'label.budget': budget})
  report = paper_report(runs(tmp_path / 'runs'), tmp_path / 'out')
  files = [p.file for f in report.figures for p in f.pictures if p.name]
  assert len(set(map(str.lower, files))) == len(files) >= 4
  assert all(re.fullmatch(r'[a-z0-9.-]+', file) and (tmp_path / 'out' / file).is_file()
             for file in files)
  assert {path.name for path in tmp_path.iterdir()} == {'runs', 'out'}
  steps, = [group for group in report.groups if 'steps=50' in group.name]
  assert 'At the smoke budget' in ' '.join(steps.answer)  # its rules are those of smoke
  assert report.groups[1].budget.startswith('smoke with')
  assert as_text(report).count('Smoke budget, paper protocol: of ') == 2


@pytest.mark.full
def test_every_number_traces_to_a_folder(whole):
  base, report = whole
  cells = [cell.measured for table in report.tables for row in table.rows
           for entry in row.entries for cell in entry.cells.values()]
  lines = [line for figure in report.figures for picture in figure.pictures
           for panel in picture.panels for line in panel.series]
  numbers = [n.statistics for claim in report.claims for v in claim.verdicts for n in v.numbers]
  assert len(cells) > 150 and len(lines) > 50 and len(numbers) > 100
  for traced in cells + lines + numbers:
    assert traced.runs
    assert all((base / 'runs' / name / 'config.json').is_file() for name in traced.runs)
  assert set(report.runs) == {run.name for run in runs(base / 'runs')}


@pytest.mark.full
def test_the_terminal_says_what_the_first_screen_says(whole):
  base, report = whole
  text = as_text(report)
  words, (first, *_) = ' '.join(text.split()), (base / 'out/report.md').read_text().split('\n| ')
  for line in first.replace('\\', '').replace('**', '').split('\n\n')[1:]:
    assert line.strip() in words
  assert re.search(r" runs of \d+ of the paper's \d+ trials: \d+ done, 6 diverged", words)
  assert max(map(len, text.splitlines())) <= 100


def test_one_is_no_plural_and_runs_of_no_group_are_counted(tmp_path):
  for name in 'ab':
    write(tmp_path / name)
  (tmp_path / 'b/config.json').write_text('{')
  words = ' '.join(as_text(build(runs(tmp_path))).split())
  for part in (' 1 is undecided, ', " 1 run of 1 of the paper's ", ' of 1 trial may decide ',
               ' Other runs: 1 unreadable. '):
    assert part in words, part


def test_the_same_runs_make_the_same_report(tmp_path):
  write(tmp_path / 'runs/post-norm', 'post-norm')
  first, second = (paper_report(runs(tmp_path / 'runs'), tmp_path / name) for name in ('a', 'b'))
  assert dataclasses.replace(first, provenance={}) == dataclasses.replace(second, provenance={})
  files = {path.name for path in (tmp_path / 'a').iterdir()}
  assert files == {path.name for path in (tmp_path / 'b').iterdir()} and 'index.html' in files
  for name in files - {'report.json', 'report.md', 'index.html'}:
    assert (tmp_path / 'a' / name).read_bytes() == (tmp_path / 'b' / name).read_bytes()


@pytest.mark.parametrize('text, expected', [
    ('python -m x --workdir=/tmp/a/runs --n=1/2', 'python -m x --workdir=.../runs --n=1/2'),
    ("Jsonl(path='/data/pile')", "Jsonl(path='.../pile')"), ('1 / window, p/q', '1 / window, p/q'),
    ('/work', '.../work'), ('runs/smoke/default', 'runs/smoke/default'),
    ('a,/disk/me/x;/disk/me/y<z', 'a,.../x;.../y<z'), ('`/disk/me/x`', '`.../x`'),
    ('see file:///disk/me/x', 'see .../x'), ('~/me/runs or ~root/runs', '.../runs or .../runs'),
    ("'/disk/my name/a b.txt' and \"/disk/me/c d\"", "'.../a b.txt' and \".../c d\""),
    ("--out='/disk/my name/o' --in=/disk/a\\ b/i", "--out='.../o' --in=.../i"),
    ("'--out=/disk/my name/o'", "'--out=.../o'"), ('(/disk/me/x)', '(.../x)'),
    ('x =/disk/me', 'x =.../me'), ('1/2, 3 / 4 and/or ~5', '1/2, 3 / 4 and/or ~5')])
def test_absolute_paths_are_cut(text, expected):
  assert without_paths({'a': [text]}) == {'a': [expected]}


def test_many_pictures_are_made_smaller():
  noise = np.random.default_rng(0).integers(0, 256, (200, 300, 3), np.uint8)
  raw = io.BytesIO()
  Image.fromarray(noise).save(raw, 'png')
  picture = images.with_palette(raw)
  small = images.shrunk({'a': picture, 'b': picture}, len(picture))
  assert sum(map(len, small.values())) <= len(picture) and small['a'].startswith(b'\x89PNG')
  assert images.shrunk({'a': picture}, len(picture)) == {'a': picture}


def test_the_command_chooses_the_kind(tmp_path):
  write_analysis(tmp_path / 'analyses/chat.json', 'chat', [content('chat', 'Mistral-7B')])
  code, text, _ = run_here('report', f'--analyses={tmp_path / "analyses"}',
                           f'--out={tmp_path / "out"}')
  assert code == 0 and 'Open models: 1 file of' in text and 'report.json' in text
  report = json.loads((tmp_path / 'out/report.json').read_text())
  assert {v['verdict'] for claim in report['claims'] for v in claim['verdicts']} == {
      'cannot be judged'}
  page = Page((tmp_path / 'out/index.html').read_text()).text
  assert '97.49' in page and 'analyses/chat.json' in page and '1 file of analyses' in page

  write(tmp_path / 'runs/default')
  code, text, _ = run_here('report', f'--runs={tmp_path / "runs"}', f'--out={tmp_path / "out2"}',
                           '--kind=runs', '--no_maps')
  assert code == 0 and 'Language-model text' in text


def test_the_synthetic_axis_answers_what_it_can(tmp_path):
  write(tmp_path / 'runs/smoke/default', sink=(30,))
  for variant, sink in (('default', 90), ('v-bias', 80), ('sigmoid-normalized', 50),
                        ('mlp', 0), ('mlp-normalized', 40)):
    for seed in (0, 1, 2):
      paper_runs.write_synthetic(tmp_path / f'runs/{variant}-{seed}', variant, seed=seed,
                                 sink=(sink - 0.1 * seed * (sink > 0),))
  report = paper_report(runs(tmp_path / 'runs'), tmp_path / 'out')
  verdicts = {claim.key: {v.name: v.verdict for v in claim.verdicts}
              for claim in report.claims}
  assert verdicts['value-biases'] == {'smoke budget, paper protocol': 'cannot be judged',
                                      'synthetic axis': 'holds'}
  assert verdicts['mlp-kernel']['synthetic axis'] == 'does not hold'
  assert 'synthetic axis' not in verdicts['batch-size']  # it has no such trials
  assert verdicts['batch-size'] == {'smoke budget, paper protocol': 'cannot be judged'}
  markdown = (tmp_path / 'out/report.md').read_text()
  rows = [line for line in markdown.splitlines() if line.startswith('| 5 data |')]
  assert rows == ['| 5 data | smoke budget, paper protocol | 0 | 0 | 0 | 7 |']
