"""Tables as cells, the same for HTML and Markdown."""

from __future__ import annotations

import dataclasses

_MARKS = '†‡§¶#'


@dataclasses.dataclass(frozen=True)
class Grid:
  """head and rows of cells; a cell is a text, or (text, small print). left: columns of words."""

  head: list[str]
  rows: list[list]
  notes: list[str]
  left: tuple[int, ...] = (0,)


def table_grid(table: dict, groups: list[dict]) -> Grid | None:
  """A table of `rows.tables`; None where the paper's has no numbers."""
  if not table['rows']:
    return None
  measures, headings = table['measures'], table['headings']
  notes = [table['note']] if table.get('note') else []
  if table['needs'] == 'open models' and any(row['ours'] for row in table['rows']):
    return _open_grid(table, notes)
  if table['needs'] != 'training':
    return Grid(['setting', *(headings[m] for m in measures)],
                [[_setting(row), *(row['paper'][m] for m in measures)] for row in table['rows']],
                notes)
  several = len(groups) > 1
  head = ['setting'] + ['budget, protocol'] * several + _compared(table)
  head += ['steps', 'tokens', 'status and runs']
  remarks, rows = {}, []
  for row in table['rows']:
    for ours in row['ours'] or [None]:
      rows.append([_setting(row)] + [_group(ours)] * several
                  + [cell for m in measures for cell in _measure(row, ours, m, remarks)]
                  + _cost(ours))
  notes += [f'{mark}: {words}.' for words, mark in remarks.items()]
  if any('*' in str(cell) for row in rows for cell in row[1:]):
    notes.append('*: of proxy scores.')
  return Grid(head, rows, notes, (0, *([1] if several else []), len(head) - 1))


def _compared(table):
  """Headings of the paper's number, ours, and the difference."""
  return [words for m in table['measures'] for words in (
      f'{table["headings"][m]}: paper', 'ours', 'agrees' if m == 'converges' else 'difference')]


def _open_grid(table, notes):
  """A table of open models, some of which have been measured."""
  remarks, rows = {}, []
  for row in table['rows']:
    ours = row['ours'][0] if row['ours'] else None
    cells = [cell for m in table['measures'] for cell in _measure(row, ours, m, remarks)]
    status = (ours['status'], ', '.join(ours['files'])) if ours else 'not run'
    rows.append([_setting(row), *cells, status])
  head = ['setting', *_compared(table), 'status and files']
  return Grid(head, rows, notes + [f'{mark}: {words}.' for words, mark in remarks.items()],
              (0, len(head) - 1))


def verdict_grid(report: dict) -> Grid:
  """Every claim with its verdicts, at a glance."""
  names = list(dict.fromkeys(
      verdict['name'] for claim in report['claims'] for verdict in claim['verdicts']))
  rows = [[(claim['statement'] + claim['marks'], claim['key']), claim['section'],
           *(_verdict_of(claim, name) for name in names)]
          for claim in report['claims']]
  head = ['claim', 'section', *(names if len(names) > 1 else ['verdict'])]
  return Grid(head, rows, [], tuple(range(len(head))))


def _verdict_of(claim, name):
  """'-' where a group of runs was not asked, as the synthetic axis is not asked everything."""
  return next((verdict_words(verdict) for verdict in claim['verdicts']
               if verdict['name'] == name), '-')


def verdict_words(verdict: dict) -> str:
  return verdict['verdict'] + (' (close to the level)' if verdict['close'] else '')


def synthetic_grid(axis: dict) -> Grid:
  """The table of the synthetic axis."""
  head = ['variant', *axis['columns'], 'status and runs']
  rows = [[row['variant'], *(_spread(row['cells'].get(heading)) for heading in axis['columns']),
           (row['status'], ', '.join(row['runs']))] for row in axis['rows']]
  notes = ['*: of proxy scores.'] if any('*' in str(cell) for row in rows for cell in row) else []
  return Grid(head, rows, notes, (0, len(head) - 1))


def runs_grid(report: dict) -> Grid:
  """Every run, with the label, the status and the main numbers."""
  head = ['run', 'trial', 'budget', 'protocol', 'seed', 'status', 'step', 'Sink_1 %', 'valid loss']
  number = lambda value, form: '' if value is None else format(value, form)
  rows = []
  for name, run in report['runs'].items():
    loss = (run['losses'] or {}).get('valid')
    rows.append([name, run['trial'], run['budget'], run['protocol'], number(run['seed'], 'd'),
                 (run['status'], run['error'] or run['reason'] or ''),
                 number(run['step'], ',d'),
                 number((run['sink'] or [None])[0], '.2f') + ('*' if run['proxy'] else ''),
                 number(loss, '.3f')])
  return Grid(head, rows, [], (0, 1, 2, 3, 5))


def _setting(row):
  note = '' if row.get('note') == 'illegible' else row.get('note')
  small = '; '.join(filter(None, [row['trial'], note]))
  return (row['setting'], small) if small else row['setting']


def _group(ours):
  return '' if ours is None else f'{ours["budget"]}, {ours["protocol"]}'


def _measure(row, ours, measure, remarks):
  """Cells: the paper's value, ours, the difference."""
  cell = ours['measures'].get(measure) if ours else None
  if cell is None:
    return [row['paper'][measure], '', '']
  told = cell['remark']
  if cell['agrees'] is not None:
    apart = 'yes' if cell['agrees'] else 'no'
  elif cell['difference'] is None:
    apart = 'not compared' if told else ''
  else:
    steps = measure.endswith('step')
    apart = f'{cell["difference"]:+,.0f}' if steps else f'{cell["difference"]:+.2f}'
  if told:
    apart += remarks.setdefault(told, _mark(len(remarks)))
  return [row['paper'][measure], _spread(cell), apart]


def _mark(number):
  """Each doubled, and so on, where there are more than these."""
  return _MARKS[number % len(_MARKS)] * (1 + number // len(_MARKS))


def _spread(cell):
  if cell is None:
    return ''
  words, _, spread = cell['text'].partition(' (')
  return (words, spread.removesuffix(')')) if spread else words


def _cost(ours):
  if ours is None:
    return ['', '', 'not run']
  tokens = short(ours['tokens'])
  if ours['unique_tokens']:
    tokens = (tokens, f'{short(ours["unique_tokens"])} unique')
  steps = '' if ours['steps'] is None else f'{ours["steps"]:,}'
  return [steps, tokens, (ours['status'], ', '.join(ours['runs']))]


def short(tokens: int | None) -> str:
  """1228800 -> '1.23 M'."""
  if tokens is None:
    return ''
  for size, letter in ((1e9, 'B'), (1e6, 'M'), (1e3, 'k')):
    if tokens >= size:
      return f'{tokens / size:.3g} {letter}'
  return str(tokens)
