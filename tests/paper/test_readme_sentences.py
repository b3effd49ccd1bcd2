"""The numbers in docs/results.md on results/paper and results/baseline are those of the reports."""

import json
import re
import shutil

from tests.documents import TEXTS
from tests.paper import readme_sentences
from tests.report.test_report import ROOT


def test_the_page_has_the_numbers_of_the_reports():
  assert readme_sentences.text() in TEXTS['docs/results.md'], (
      'docs/results.md has other numbers than results/: put into it what python -m '
      'tests.paper.readme_sentences prints.')


def test_no_other_sentence_on_the_results_has_numbers():
  # Those of the published model are compared in tests/test_readme.py.
  readme = re.sub(r'\nSmolLM2-135M-Instruct \(.*?\n\n', '', TEXTS['README.md'], flags=re.DOTALL)
  pages = readme + TEXTS['docs/experiments.md'] + TEXTS['docs/results.md']
  before, rest = pages.split(readme_sentences.BEGIN)
  prose = ' '.join((before + rest.split(readme_sentences.END)[1]).replace('\\', '').split())
  for numbers in (r'Sink_\S+ (=|of|is|from)?\s?\d', r'ratio (of |is |= )?\d', r'\d+ claims',
                  r'after \d+', r'\d+ (hold|do not hold|are undecided)', r'nats'):
    assert not re.search(numbers, prose), numbers


def test_other_reports_give_other_numbers(tmp_path):
  shutil.copytree(ROOT / 'results/paper', tmp_path / 'paper',
                  ignore=shutil.ignore_patterns('*.png', '*.html'))
  file = tmp_path / 'paper/report.json'
  report = json.loads(file.read_text())
  expected = readme_sentences.text(tmp_path)
  name = report['claims'][0]['verdicts'][0]['name']
  verdicts = [verdict for claim in report['claims'] for verdict in claim['verdicts']
              if verdict['name'] == name]
  verdicts[0]['verdict'] = 'holds' if verdicts[0]['verdict'] == 'undecided' else 'undecided'
  for number in (number for verdict in verdicts for number in verdict['numbers']):
    if (number['trial'], number['metric']) == ('default', 'sink_1'):
      number['statistics']['text'] = '12.34 (9.99 to 14.00, n = 3)'
  file.write_text(json.dumps(report))
  pairs = zip(expected.split('\n'), readme_sentences.text(tmp_path).split('\n'))
  counts, numbers = [after for before, after in pairs if after != before]
  assert counts.startswith(f'| {name} | ')
  assert numbers.startswith('| default | 12.34 (9.99 to 14.00, n = 3) |')
  (tmp_path / 'baseline').mkdir()
  (tmp_path / 'baseline/report.json').write_text(json.dumps(
      {'summary': ['(a) softmax: Sink_1 of 30 % or more: met by desk (2 of 3 seeds).']}))
  assert ('\n- (a) softmax: Sink\\_1 of 30 % or more: met by desk (2 of 3 seeds).\n'
          in readme_sentences.text(tmp_path))
