"""The paper's numbers of published models, and what is known of a model by its name."""

from __future__ import annotations

import functools
import json
from importlib import resources

from sink_jax.evaluate.probe import EPSILON
from sink_jax.pretrained.catalog import MODELS, Published, find

LENGTH = 64  # tokens of the paper's inputs


def known(name: str) -> Published | None:
  """The model of the catalogue with this name, hub id, or folder name as on the hub."""
  own = name.casefold()
  return find(name) or next((model for model in MODELS.values()
                             if model.hub.casefold().split('/')[1] == own), None)


def family(name: str) -> str:
  """'Pythia', 'LLaMA2', 'LLaMA3.1', ...; 'other' for models that the paper does not have."""
  model = known(name)
  return model.name.split('-')[0] if model else 'other'


def number(table: str, setting: str, measure: str) -> float | None:
  """One number of a table, by its key ('table-1-left'); None where the paper gives none."""
  rows = {row['setting']: row['values'] for row in _tables()[table]['rows']}
  return rows.get(setting, {}).get(measure)


def comparable(length: int, epsilon: float) -> bool:
  """Whether rates of these inputs can stand beside the paper's, of other text."""
  return length == LENGTH and epsilon == EPSILON


def same_bos(description: dict) -> bool:
  """Do inputs begin as the paper's: text as the tokenizer has it, the others without BOS?"""
  expected = 'tokenizer' if description['kind'] == 'natural' else 'none'
  return description['bos']['protocol'] == expected


@functools.cache
def _tables():
  path = resources.files('sink_jax') / 'report' / 'paper' / 'numbers.json'
  return {table['key']: table for table in json.loads(path.read_text(encoding='utf-8'))['tables']}
