"""The page about every table and figure of the paper: its command, and what was run of it."""
# pandas does not say whether an expression is a table or a column.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence

import pandas as pd

from sink_jax.io.paths import AnyPath
from sink_jax.io.terminal import escaped, markdown_table
from sink_jax.report import paper
from sink_jax.report.markdown import joined

_BEGINNING = """\
# Reproduction status

Every table and figure of the paper, the command that trains or measures what it shows, and what \
was run of it.
[Results](README.md) has the numbers and the verdicts; `python -m sink_jax report --runs=runs \
--out=report` makes such
pages of your runs, and with `--analyses=analyses` also of your analyses. A sweep here has three \
seeds; some stored
trials have fewer. Figures 3, 4 (left) and 10 name two small models: add others to \
`--checkpoint`. Figure 10 needs
[accuracies](../docs/open_models.md#tasks-of-lm-evaluation-harness) first. The commands train at \
the budget `desk`, for which two CPU cores suffice; `tenth` and `full` are larger \
([experiments](../docs/experiments.md#budgets))."""
_NEXT = """\
## What a GPU would decide next

The first is the cheapest test of the 60M model; the others would decide claims that are open or \
not testable here. With `--dry_run` each command prints what it costs.

1. `python -m sink_jax sweep --config=configs/emergence.py --seeds=1,2,3 \
--workdir=runs/emergence`: does a sink emerge in the 60M model without a fixed token? (It makes a \
page of its own.)
2. `python -m sink_jax sweep --config=configs/paper.py --budget=tenth \
--only="default,random-*,fixed-*,window-*,prefix-*" --seeds=1,2,3 --workdir=runs/tenth`: which \
token is the sink, where the default fixes none?
3. `python -m sink_jax sweep --config=configs/paper.py --budget=tenth \
--only=default,sigmoid,sigmoid-normalized,k-bias --seeds=1,2,3 --workdir=runs/tenth`: the \
paper's model and batch."""


def page(
  full: pd.DataFrame, out: AnyPath, analyses: Sequence[AnyPath], pictures: Mapping[str, str]
) -> str:
  """The page in Markdown.

  Args:
    out: the folder to which it will be written.
    full: of `runs.table`, of all tasks.
    analyses: files that `python -m sink_jax analyses` wrote, with their pictures next to them.
    pictures: {key of a figure: name of its file}, of runs.
  """
  models, seen = {}, dict(pictures)
  for path in analyses:
    rows = json.loads(path.read_text()).get('rows', ())
    models[path.stem] = list(dict.fromkeys(row['model'] for row in rows))
    drawn = os.path.relpath(path.with_suffix('.png'), out)
    for item in paper.TABLES + paper.FIGURES:
      if item.get('analysis') == path.stem:
        seen[item['key']] = drawn
  coverage = coverage_table(paper.coverage(full, models), seen)
  return joined([_BEGINNING, coverage, _NEXT])


def coverage_table(coverage: pd.DataFrame, pictures: Mapping[str, str]) -> str:
  """A row for each table and figure. coverage: of `paper.coverage`; pictures: by their keys."""
  rows = []
  for row in coverage.itertuples():
    title = f': {escaped(row.title)}' if row.title != row.name else ''
    command = f'`{row.command}`' if row.command else '-'
    see = f'[picture]({pictures[row.key]})' if row.key in pictures else '-'
    rows.append([f'{row.name}{title}', command, escaped(row.run), see])
  return markdown_table(['of the paper', 'command', 'run', 'see'], rows, left=range(4))
