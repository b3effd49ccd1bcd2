"""What the paper reports, from numbers.json, and when what was measured is compared with it.

The file is read here alone: tables, numbers of the running text, figures. Its keys are the fields
below.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import Any

from sink_jax.data.tokenizer import HuggingFace
from sink_jax.evaluate import EPSILON
from sink_jax.report.jsontext import UNWRITTEN
from sink_jax.report.records import RunRecord

STEPS, BATCH = 20_000, 512  # of the default run
LENGTH = 64  # tokens of the inputs of open models
# The domains in the paper's order (Appendix B.2), by the names that the Pile itself uses.
PILE = ('Pile-CC', 'PubMed Central', 'ArXiv', 'Github', 'FreeLaw', 'StackExchange',
        'USPTO Backgrounds', 'PubMed Abstracts', 'Gutenberg (PG-19)', 'Wikipedia (en)',
        'DM Mathematics', 'Ubuntu IRC', 'EuroParl', 'HackerNews', 'PhilPapers', 'NIH ExPorter',
        'Enron Emails')
# What a validation loss depends on most: losses with other vocabularies are not comparable.
CONTEXT, VOCABULARY, DOMAIN = 2048, 50432, 'pilecc'
CRITERION = (
    f'A validation loss is compared where the context is {CONTEXT}, model.vocab_size is '
    f'{VOCABULARY}, the tokenizer is a HuggingFace one and there is a validation loss of a domain '
    f'called Pile-CC (its letters are "{DOMAIN}"), which then is the loss compared. Elsewhere the '
    'difference is withheld. Sink rates are compared everywhere, steps at the full budget alone, '
    'and nothing before the last step. Differences are marked where model, data, number of steps '
    'or batch size are not the paper\'s. Sink_* is the share of heads whose mean weight on the '
    'extra key, over queries, exceeds epsilon; the paper\'s code counts a dummy row of weight one '
    'as well, which report.json has as sink_bias_slot_released.')
_STEPS = ('emergence_step', 'overfit_step')
# A number; True or False; a range (low, high) with None for an open end; None: not given.
Value = float | bool | tuple[float | None, float | None] | None


@dataclasses.dataclass(frozen=True)
class PaperRow:
  """A row of a table of the paper.

  trial: of configs/paper, None where nothing is trained for the row. values: by metric. steps,
  batch_size: where they are not the default's. proxy: the paper's scores are proxies. failed: its
  training failed.
  """

  setting: str
  trial: str | None
  values: Mapping[str, Value]
  steps: int | None = None
  batch_size: int | None = None
  proxy: bool = False
  failed: bool = False
  note: str = ''


@dataclasses.dataclass(frozen=True)
class PaperTable:
  """A table, or a half of one, or a group of numbers of the running text.

  number, half: '' for numbers of the text. needs: 'training', 'open models' or 'nothing'.
  analysis: the one of open models that makes it, or ''.
  """

  key: str
  number: str
  half: str
  title: str
  section: str
  needs: str
  metrics: Sequence[str]
  rows: Sequence[PaperRow] = dataclasses.field(metadata=UNWRITTEN)  # as `tables.Row` in report.json
  analysis: str = ''
  note: str = ''

  @property
  def name(self) -> str:
    """'Table 10 (left)'; the title of numbers of the text."""
    return f'Table {self.number}{_half(self)}' if self.number else self.title


@dataclasses.dataclass(frozen=True)
class PaperFigure:
  """A figure, or a panel of one.

  needs: as of a table, or 'fine-tuning'. kind: how it is drawn. models: names in the catalogue;
  None where a figure of open models is of all of them. epsilon: of a panel of Figure 9. paper: the
  other paper that the figure is from, or ''. trials: what is trained for it.
  """

  key: str
  number: str
  half: str
  kind: str
  needs: str
  caption: str
  trials: Sequence[str]
  analysis: str = ''
  models: Sequence[str] | None = None
  epsilon: float | None = None
  paper: str = ''
  note: str = ''

  @property
  def name(self) -> str:
    """'Figure 3', 'Figure 2 (top)', 'StreamingLLM, Figure 12'."""
    paper = f'{self.paper}, ' if self.paper else ''
    return f'{paper}Figure {self.number}{_half(self)}'


def _table(table: dict[str, Any]) -> PaperTable:
  # JSON has no tuples: a list in the file is a range.
  rows = [PaperRow(**row | {'values': {
      metric: tuple(value) if isinstance(value, list) else value
      for metric, value in row['values'].items()}}) for row in table['rows']]
  # An unknown key fails here, and not where its number would be missing.
  return PaperTable(**dict(table, rows=rows))


# A resource of the package, which an installed one has too, wherever its files are.
_CONTENT = json.loads((resources.files('sink_jax.paper') / 'numbers.json').read_text('utf-8'))
TITLE: str = _CONTENT['paper']
TABLES = [_table(table) for table in _CONTENT['tables']]  # 1 to 15, halves apart
ALL_TABLES = TABLES + [_table(group) for group in _CONTENT['text']]  # and numbers of the text
# 1 to 30, panels apart, and Figure 12 of StreamingLLM.
FIGURES = [PaperFigure(**figure) for figure in _CONTENT['figures']]
_ROWS = [row for table in ALL_TABLES for row in table.rows]
# Every trial that some row or figure needs.
TRIALS = frozenset([row.trial for row in _ROWS if row.trial is not None]
                   + [trial for figure in FIGURES for trial in figure.trials])


def training_of(trial: str) -> tuple[int, int]:
  """The paper's number of steps and of sequences in a batch."""
  rows = [row for row in _ROWS if row.trial == trial]
  return (next((row.steps for row in rows if row.steps is not None), STEPS),
          next((row.batch_size for row in rows if row.batch_size is not None), BATCH))


def table_number(table: str, setting: str, metric: str) -> float | None:
  """One number of a table, by its key ('table-1-left'); None where the paper gives none."""
  value = next((row.values.get(metric) for item in TABLES if item.key == table
                for row in item.rows if row.setting == setting), None)
  return value if isinstance(value, (int, float)) else None


def trial_number(trial: str, metric: str) -> float | None:
  """The first number that a table has of a trial; None where it has none, or a range."""
  values = (row.values.get(metric) for row in _ROWS if row.trial == trial)
  return next((value for value in values if isinstance(value, (int, float))
               and not isinstance(value, bool)), None)


def comparable(length: int, epsilon: float) -> bool:
  """Whether rates of these inputs can be compared with the paper's, of other text."""
  return length == LENGTH and epsilon == EPSILON


def same_bos(description: Mapping[str, Any]) -> bool:
  """Whether inputs begin as the paper's: text as the tokenizer has it, others without BOS."""
  # Random and repeated tokens go to the model as they are drawn; only text goes through the
  # tokenizer.
  expected = 'tokenizer' if description['kind'] == 'natural' else 'none'
  return description['bos']['protocol'] == expected


def _same_data(run: RunRecord) -> bool:
  """Whether context, vocabulary and tokenizer are the paper's."""
  experiment = run.known_setup.experiment
  return (experiment.data.context == CONTEXT and experiment.model.vocab_size == VOCABULARY
          and isinstance(experiment.data.tokenizer, HuggingFace))


def comparable_loss(run: RunRecord) -> float | None:
  """The validation loss of the domain that the paper reports; None where it cannot be compared."""
  of_domain = [loss for domain, loss in (run.losses or {}).items()
               if re.sub(r'[^a-z]', '', domain.lower()) == DOMAIN]
  return of_domain[0] if of_domain and _same_data(run) else None


def remark(metric: str, runs: Sequence[RunRecord]) -> tuple[bool, str]:
  """Whether a metric of these runs is compared with the paper's, and what is to be said of it.

  runs: that have the metric, all done or all under way; how training ends is also of diverged ones.
  """
  if runs[0].status != 'done' and metric != 'converges':
    return False, 'not the last step'
  # A rate needs no vocabulary: it is a share of heads on any text. A loss per token depends on what
  # a token is.
  known = metric != 'valid_loss' or all(comparable_loss(run) is not None for run in runs)
  kinds = [] if all(map(_same_model, runs)) else ['model']
  kinds += [] if known and all(map(_same_data, runs)) else ['data']
  words = [f'other {" and ".join(kinds)}'] if kinds else []
  words += dict.fromkeys(word for run in runs for word in _training(run))
  # A budget that changes none of these may still have changed something that is not looked at here.
  if not words and any(run.label.budget != 'full' for run in runs):
    words = ['another budget']
  return known and not (metric in _STEPS and words), ', '.join(words)


def _same_model(run: RunRecord) -> bool:
  # A width that a config gives replaces that of its size, which is then only a name.
  model, large = run.known_setup.experiment.model, run.label.trial.startswith('1b-')
  return model.size == ('1b' if large else '60m') and not (model.layers or model.d_model)


def _training(run: RunRecord) -> Iterator[str]:
  """What is not the paper's of how long and on how much at a time a run was trained."""
  # A sweep over batch sizes has other batches by intention: what counts is the paper's number for
  # this trial.
  steps, batch = training_of(run.label.trial)
  experiment = run.known_setup.experiment
  for own, expected, fewer, more in (
      (experiment.steps, steps, 'fewer steps', 'more steps'),
      (experiment.batch_size, batch, 'smaller batches', 'larger batches')):
    if own != expected:
      yield more if own > expected else fewer


def difference(measured: float, paper: Value) -> float | None:
  """Measured minus the paper's; from a range, the distance to its nearer end."""
  if paper is None or isinstance(paper, bool):
    return None
  low, high = paper if isinstance(paper, tuple) else (paper, paper)
  # A number inside of the range is no difference.
  nearest = measured if high is None else min(measured, high)
  return measured - (nearest if low is None else max(nearest, low))


def _half(item: PaperTable | PaperFigure) -> str:
  return f' ({item.half})' if item.half else ''
