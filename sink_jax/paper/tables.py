"""The paper's tables: rows with the numbers of runs and of published models, and how they look."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from sink_jax.io.terminal import number, short
from sink_jax.paper import numbers, open_models
from sink_jax.paper.analysed import NOT_RUN, Analysed, listed
from sink_jax.paper.collect import Group
from sink_jax.paper.metrics import METRICS, MeasuredRun, Statistics, metric_summary, single
from sink_jax.paper.numbers import PaperRow, PaperTable, Value, difference, remark
from sink_jax.paper.open_protocol import Result
from sink_jax.report.markup import upper
from sink_jax.report.parts import Parts
from sink_jax.report.records import RunRecord

# By how the runs of a row ended whose training failed in the paper.
_FAILURES = {('diverged',): ': a training failure, as in the paper',
             ('done',): ': it trained, unlike in the paper',
             ('diverged', 'done'): ': some seeds fail, all do in the paper'}
_MARKS = '†‡§¶#'
PROXIES = '*: of proxy scores.'
_LEFT = {'setting', 'budget, protocol', 'status and runs', 'status and files'}  # columns of words
Words = str | tuple[str, str]  # a text, or a text and small print


@dataclasses.dataclass(frozen=True)
class Cell:
  """A number that was measured here beside the paper's.

  difference: measured minus the paper's; None where the two are not compared. agrees: of a truth,
  else None. remark: why it is not compared, or in what its making differs from the paper's.
  measured: over seeds; of a published model, one number, whose run is the file of an analysis.
  """

  paper: Value
  difference: float | None
  agrees: bool | None
  remark: str
  measured: Statistics


@dataclasses.dataclass(frozen=True)
class Entry:
  """What was measured for a row: of a trial at one budget and protocol, or of published models.

  cells: by metric. sources: names of runs, or files of the cells. steps, unique_tokens (0: all of
  the data): of the first run with a config. tokens: seen by the first measured run. models: the
  results of published ones.
  """

  status: str
  cells: Mapping[str, Cell]
  sources: Sequence[str]
  budget: str = ''
  protocol: str = ''
  steps: int | None = None
  tokens: int | None = None
  unique_tokens: int = 0
  models: Sequence[Result] = ()


@dataclasses.dataclass(frozen=True)
class Row:
  """A row of the paper and what was measured for it.

  texts: the paper's values by metric, as they stand in a table.
  """

  paper: PaperRow
  texts: Mapping[str, str]
  entries: Sequence[Entry] = ()


@dataclasses.dataclass(frozen=True)
class Table:
  """A table of the paper with rows of measured numbers. headings: of columns, by metric."""

  paper: PaperTable
  status: str
  headings: Mapping[str, str]
  rows: Sequence[Row]


_EMPTY = Entry(NOT_RUN, {}, ())


def tables(groups: Sequence[Group], analysed: Analysed = Analysed()) -> list[Table]:
  """Tables 1 to 15 and the numbers of the text."""
  return [_table(table, groups, analysed) for table in numbers.ALL_TABLES]


def _table(table: PaperTable, groups: Sequence[Group], analysed: Analysed) -> Table:
  rows, lacking = [], []
  for row in table.rows:
    if table.needs == 'open models':
      entries, models = _open_entries(table, row, analysed)
      lacking += models
    else:
      entries = [_entry(row, row.trial, table.metrics, group) for group in groups
                 if row.trial is not None and group.runs(row.trial)]
    rows.append(Row(row, {metric: _paper_text(row, metric) for metric in table.metrics}, entries))
  status = 'nothing to run' if table.needs == 'nothing' else ''
  return Table(table, open_models.needs_models(table, lacking) if lacking else status,
               {metric: METRICS[metric].heading for metric in table.metrics}, rows)


def _paper_text(row: PaperRow, metric: str) -> str:
  """The paper's value as it stands in a table: '0.44*', '1,000 to 2,000', 'below 1.00', '-'."""
  value, text = row.values.get(metric), METRICS[metric].text
  if value is None:
    return 'training failure' if row.failed else (
        'illegible' if row.note == 'illegible' else '-')
  if isinstance(value, tuple):
    low, high = value
    return (f'below {text(high)}' if low is None else
            f'above {text(low)}' if high is None else f'{text(low)} to {text(high)}')
  # The paper gives losses with two decimals; measured ones are shown with three.
  if metric == 'valid_loss':
    return f'{value:.2f}'
  return text(value) + ('*' if row.proxy and metric.startswith('sink_') else '')


def _entry(row: PaperRow, trial: str, metrics: Iterable[str], group: Group) -> Entry:
  runs, measured = group.runs(trial), group.measured(trial)
  # Seeds of a trial should have one config but for the seed; `inconsistencies` names others.
  setup = next((run.setup for run in runs if run.setup), None)
  status = group.status(trial)
  if group.same_as_default(trial):
    # Where a budget fixes what the trial is about, both train the same model.
    status += '; equal settings: at this budget the same run as default'
  if row.failed:
    status += _FAILURES.get(tuple(sorted({run.status for run in runs} & {'done', 'diverged'})), '')
  return Entry(
      status, {metric: cell for metric in metrics if (cell := _cell(row, metric, runs, measured))},
      sources=[run.name for run in runs], budget=group.budget, protocol=group.protocol,
      steps=setup.steps if setup else None,
      tokens=_tokens_seen(measured[0]) if measured else None,
      unique_tokens=setup.experiment.data.max_tokens if setup else 0)


def _open_entries(table: PaperTable, row: PaperRow, analysed: Analysed
                  ) -> tuple[list[Entry], list[str]]:
  """The measured numbers of a row, none if nothing was run for it; its models without a number."""
  models, cells, shown, others = open_models.models_of(table, row), {}, [], []
  for metric, model in models.items():
    found = [(result, value) for result in analysed.of(table.analysis, [model])
             if (value := open_models.value_of(table, row, metric, result)) is not None]
    if found:
      result, value = min(found, key=lambda pair: pair[0].rank)
      # One difference from the protocol is enough to withhold the comparison; the number is shown
      # all the same.
      cells[metric] = _beside(row.values.get(metric), single(metric, value, result.file),
                              not result.apart, '; '.join(result.apart or result.remarks))
      shown += [result] if result not in shown else []
      others += [other.file for other, _ in found if other is not result]
  absent = analysed.absent(table.analysis, models.values(), shown)
  # A row of models that nobody has run stands in the table as the paper's numbers alone.
  if not cells and set(absent.values()) == {NOT_RUN}:
    return [], [*absent]
  status = (['measured'] * bool(cells) + [f'{model} {why}' for model, why in absent.items()]
            + [f'also in {listed(list(dict.fromkeys(others)))}'] * bool(others))
  sources = list(dict.fromkeys(result.file for result in shown))
  return [Entry('; '.join(status), cells, sources, models=shown)], [*absent]


def _cell(row: PaperRow, metric: str, runs: Sequence[RunRecord], measured: Sequence[RunRecord]
          ) -> Cell | None:
  """The summary of a metric and its difference to the paper; None if it is unknown."""
  if metric == 'converges':  # divergence is a result, and no failure to measure
    measured = [run for run in runs if run.status in ('done', 'diverged')]
  summary = metric_summary(metric, measured)
  if summary is None:
    return None
  compared, words = remark(metric, [run for run in measured if run.name in summary.runs])
  return _beside(row.values.get(metric), summary, compared, words)


def _beside(paper: Value, measured: Statistics, compared: bool, words: str) -> Cell:
  """A measured number beside the paper's, of which there may be none."""
  return Cell(
      paper=paper,
      difference=difference(measured.mean, paper) if compared else None,
      # A truth agrees where all seeds do: their mean is then exactly 0 or 1.
      agrees=measured.mean == float(paper) if isinstance(paper, bool) else None,
      remark=words if paper is not None else '',
      measured=measured)


def _tokens_seen(run: RunRecord) -> int:
  """Up to its last step on record."""
  setup = run.known_setup
  # A run under way has seen those of the steps up to its last record; every step has equally many.
  return setup.tokens if run.status == 'done' else setup.tokens // setup.steps * run.step


def add_table(parts: Parts, table: Table, groups: int) -> None:
  """A table of the paper with what was measured for it, and notes. groups: of runs."""
  paper = table.paper
  parts.heading(paper.name, 3)
  section = f'Section {paper.section}'
  parts.paragraph(f'{paper.title} ({section}).' if paper.number else f'{section}.')
  parts.paragraph(table.status and f'{upper(table.status)}.')
  trained = paper.needs == 'training'
  # Where nothing was measured, columns for measured numbers and differences would be empty.
  measured = trained or any(row.entries for row in table.rows)
  several = trained and groups > 1
  head = ['setting'] + ['budget, protocol'] * several
  for metric, heading in table.headings.items():
    apart = 'agrees' if metric == 'converges' else 'difference'
    head += [f'{heading}: paper', 'measured', apart] if measured else [heading]
  head += ['steps', 'tokens', 'status and runs'] if trained else ['status and files'] * measured
  rows, marks = [], {}
  for row in table.rows:
    for entry in row.entries or [_EMPTY]:  # a row that nobody has run is shown all the same
      cells = [_measured(row, entry.cells, metric, marks) for metric in paper.metrics]
      group = ', '.join(filter(None, (entry.budget, entry.protocol)))
      rows.append([_setting(row)] + [group] * several
                  + [words for cell in cells for words in (cell if measured else cell[:1])]
                  + (_cost(entry) if trained else [])
                  + [(entry.status, ', '.join(entry.sources))] * measured)
  if rows:
    parts.table(head, rows, [i for i, name in enumerate(head) if name in _LEFT])
  parts.paragraphs([paper.note, *(f'{mark}: {words}.' for words, mark in marks.items())])
  # The first column names the setting, where a star would be the paper's.
  if trained and any('*' in str(cell) for row in rows for cell in row[1:]):
    parts.paragraph(PROXIES)


def add_runs(parts: Parts, runs: Mapping[str, MeasuredRun]) -> None:
  """Every run, with the label, the status and the main numbers."""
  parts.table(
      ['run', 'trial', 'budget', 'protocol', 'seed', 'status', 'step', 'Sink_1 %', 'valid loss'],
      [[name, run.label.trial, run.label.budget, run.label.protocol, number(run.seed, 'd', ''),
        (run.status, run.why), number(run.step, ',d', ''),
        number(run.numbers.get('sink_1'), '.2f', '') + ('*' if run.proxy else ''),
        number(run.numbers.get('valid_loss'), '.3f', '')] for name, run in runs.items()],
      (0, 1, 2, 3, 5))


def _setting(row: Row) -> Words:
  # That word stands in the place of the numbers.
  note = '' if row.paper.note == 'illegible' else row.paper.note
  return row.paper.setting, '; '.join(filter(None, [row.paper.trial, note]))


def _measured(row: Row, cells: Mapping[str, Cell], metric: str, marks: dict[str, str]
              ) -> list[Words]:
  """The paper's value, the measured one, the difference; adds new remarks to {remark: mark}."""
  cell = cells.get(metric)
  if cell is None:
    return [row.texts[metric], '', '']
  if cell.agrees is not None:
    apart = 'yes' if cell.agrees else 'no'
  elif cell.difference is None:
    apart = 'not compared' if cell.remark else ''
  else:
    apart = format(cell.difference, '+,.0f' if metric.endswith('step') else '+.2f')
  if cell.remark:
    # Equal remarks share a mark, whose note stands once. Where there are more than marks, each is
    # doubled, and so on.
    times, which = divmod(len(marks), len(_MARKS))
    apart += marks.setdefault(cell.remark, _MARKS[which] * (1 + times))
  return [row.texts[metric], with_spread(cell.measured.text), apart]


def with_spread(text: str) -> Words:
  """'1.00 (0.50 to 1.50, n = 2)' with what is in brackets as small print."""
  words, _, spread = text.partition(' (')
  return words, spread.removesuffix(')')


def _cost(entry: Entry) -> list[Words]:
  """Steps of the config, and tokens seen so far."""
  unique = f'{short(entry.unique_tokens)} unique' if entry.unique_tokens else ''
  seen = '' if entry.tokens is None else short(entry.tokens)
  return [number(entry.steps, ',d', ''), (seen, unique)]
