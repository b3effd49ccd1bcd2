"""What docs/results.md says in numbers about the results of paper, synthetic, baseline and graft.

  python -m tests.paper.readme_sentences

prints the text that stands in docs/results.md between the lines BEGIN and END, made of the
report.json of each folder alone, so that the page can be compared with what is committed.
"""

import json
from collections import Counter
from pathlib import Path
from textwrap import fill
from typing import Any

from sink_jax.paper.claims import PLURAL, UNKNOWN
from sink_jax.io.terminal import escaped, markdown_table
from sink_jax.report.markup import upper

RESULTS = Path(__file__).parents[2] / 'results'
BEGIN, END = ('<!-- numbers: python -m tests.paper.readme_sentences -->', '<!-- end of numbers -->')
# The trials and the numbers in which a reader sees where the sink is.
TRIALS = ('default', 'k-bias', 'kv-bias', 'v-bias', 'sink-token', 'sigmoid-normalized',
          'elu-kernel-normalized', 'sigmoid', 'elu', 'identity', 'mlp')
COLUMNS = {'sink_1': 'Sink_1 %', 'sink_star': 'Sink_* %', 'emergence_step': 'sink from step',
           'massive': 'largest hidden ratio', 'valid_loss': 'valid loss'}


def text(results: Path = RESULTS) -> str:
  """The lines from BEGIN to END, of the reports that are there.

  Raises:
    OSError: there is no report of the paper.
  """
  parts = paper(json.loads((results / 'paper/report.json').read_text()))
  axis = results / 'synthetic/report.json'
  parts += paper(json.loads(axis.read_text())) if axis.exists() else []
  search = results / 'baseline/report.json'
  parts += baseline(json.loads(search.read_text())) if search.exists() else []
  page = results / 'graft/report.json'
  parts += grafts(json.loads(page.read_text())) if page.exists() else []
  return '\n'.join([BEGIN, *parts, END])


def paper(report: dict[str, Any]) -> list[str]:
  """A table of verdicts, a sentence per group of runs, and where the sink is in the first group."""
  verdicts = [(verdict['name'], verdict['verdict'])
              for claim in report['claims'] for verdict in claim['verdicts']]
  names, counts = [group['name'] for group in report['groups']], Counter(verdicts)
  rows = [[name, str(sum(of == name for of, _ in verdicts)),
           *(str(counts[name, verdict]) for verdict in PLURAL)] for name in names]
  lines = ['', *markdown_table(['runs', 'claims', *PLURAL], rows), '']
  for group in report['groups']:
    default, = [words for words in group['answer'] if words.startswith('Default: ')]
    # Those that cannot be judged are in the report, most of them for want of runs.
    seeds = {key: f' (about {needed} seeds)' for key, needed in group['needed'].items()}
    said = [f'{upper(verdict)}: {", ".join(key + seeds.get(key, "") for key in keys[""])}.'
            for verdict, keys in group['verdicts'].items() if keys and verdict != UNKNOWN]
    lines += [item for words in (default, *said) for item in _item(f'{group["name"]}. {words}')]
  return lines + ['', *numbers(report, names[0]), '']


def numbers(report: dict[str, Any], name: str) -> list[str]:
  """A table of a group's trials, of the numbers that decide claims."""
  known = {(number['trial'], number['metric']): number['statistics']['text']
           for claim in report['claims'] for verdict in claim['verdicts']
           if verdict['name'] == name for number in verdict['numbers']}
  columns = [key for key in COLUMNS if any((trial, key) in known for trial in TRIALS)]
  rows = [[trial, *(known.get((trial, key), '-') for key in columns)]
          for trial in TRIALS if any((trial, key) in known for key in columns)]
  lines = markdown_table([f'{name}: trial', *(COLUMNS[key] for key in columns)], rows)
  proxies = any('*' in cell for row in rows for cell in row)
  return lines + (['', r'\* of scores whose rows do not sum to one.'] if proxies else [])


def baseline(report: dict[str, Any]) -> list[str]:
  """What the search for a baseline found, a sentence per item."""
  return [line for sentence in report['summary'] for line in _item(sentence)] + ['']


def grafts(report: dict[str, Any]) -> list[str]:
  """What another attention does to a trained model, in the first sentences of its page."""
  return [*_item(f'Grafts onto the trained default: {report["answer"][0]}'), '']


def _item(sentence: str) -> list[str]:
  return fill(escaped(sentence), 100, initial_indent='- ', subsequent_indent='  ',
              break_on_hyphens=False, break_long_words=False).split('\n')


if __name__ == '__main__':
  print(text())
