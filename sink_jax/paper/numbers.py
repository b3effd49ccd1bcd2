"""What the paper reports: tables, numbers of the text, figures; data from numbers.json.

A table or a group of numbers: key, number and half ('' in the text), title, section, needs
('training', 'open models' or 'nothing'), analysis (of open models, which makes it), measures,
rows, and a note where it needs one. A row: setting, trial (of configs/, or None), values {measure:
a number, True or False, a range [low, high] with None for an open end, or None where the paper
gives none}, and where it applies steps and batch_size (where they are not the default's), proxy
(the paper's scores are proxies), failed (its training failed) and a note. A figure: key, number,
half, kind, needs, analysis, models (of the catalogue; all of them where a figure of open models has
none), epsilon (of a part of Figure 9), caption, trials.
"""

from __future__ import annotations

import functools
import json
from importlib import resources

from sink_jax.evaluate.sinks import EPSILON

STEPS, BATCH = 20_000, 512  # of the default run
LENGTH = 64  # tokens of the inputs of open models
# The domains in the paper's order (Appendix B.2), by the names that the Pile itself uses.
PILE = ('Pile-CC', 'PubMed Central', 'ArXiv', 'Github', 'FreeLaw', 'StackExchange',
        'USPTO Backgrounds', 'PubMed Abstracts', 'Gutenberg (PG-19)', 'Wikipedia (en)',
        'DM Mathematics', 'Ubuntu IRC', 'EuroParl', 'HackerNews', 'PhilPapers', 'NIH ExPorter',
        'Enron Emails')


@functools.cache
def _published():
  path = resources.files('sink_jax.paper') / 'numbers.json'
  return json.loads(path.read_text(encoding='utf-8'))


def title() -> str:
  return _published()['paper']


def tables() -> list[dict]:
  """Tables 1 to 15, halves apart."""
  return _published()['tables']


def text_numbers() -> list[dict]:
  """Numbers that only the running text has, in groups."""
  return _published()['text']


def figures() -> list[dict]:
  """Figures 1 to 30, panels apart, and Figure 12 of StreamingLLM."""
  return _published()['figures']


def trials() -> set[str]:
  """Every trial that some row or figure needs."""
  rows = {row['trial'] for table in tables() + text_numbers() for row in table['rows']}
  return (rows | {trial for figure in figures() for trial in figure['trials']}) - {None}


@functools.cache
def training_of(trial: str) -> tuple[int, int]:
  """The paper's number of steps and of sequences in a batch."""
  rows = [row for table in tables() + text_numbers() for row in table['rows']
          if row['trial'] == trial]
  told = lambda key, default: next((row[key] for row in rows if key in row), default)
  return told('steps', STEPS), told('batch_size', BATCH)


def table_number(table: str, setting: str, measure: str) -> float | None:
  """One number of a table, by its key ('table-1-left'); None where the paper gives none."""
  rows = {row['setting']: row['values'] for own in tables() if own['key'] == table
          for row in own['rows']}
  return rows.get(setting, {}).get(measure)


def comparable(length: int, epsilon: float) -> bool:
  """Whether rates of these inputs can stand beside the paper's, of other text."""
  return length == LENGTH and epsilon == EPSILON


def same_bos(description: dict) -> bool:
  """Do inputs begin as the paper's: text as the tokenizer has it, the others without BOS?"""
  expected = 'tokenizer' if description['kind'] == 'natural' else 'none'
  return description['bos']['protocol'] == expected


def name_of(item: dict) -> str:
  """'Table 10 (left)', 'Figure 3', 'StreamingLLM, Figure 12'; the title of a group of numbers."""
  if not item['number']:
    return item['title']
  kind = 'Figure' if 'caption' in item else 'Table'
  half = f' ({item["half"]})' if item['half'] else ''
  paper = f'{item["paper"]}, ' if 'paper' in item else ''
  return f'{paper}{kind} {item["number"]}{half}'

