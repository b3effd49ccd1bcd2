"""Checks that a run is evidence about attention sinks, before conclusions are drawn from it."""

# pandas does not say whether an expression is a table or a column.
# pyright: reportReturnType=false

from __future__ import annotations

import numpy as np
import pandas as pd

from sink_jax.attention.spec import AttentionSpec

UNIFORM = 0.01  # share by which attention that counts as uniform may differ from it


def uniform_importance(spec: AttentionSpec, length: int, sink_tokens: int = 0) -> float:
  """Importance of the first of `length` tokens if every query attends equally to all its keys.

  Without a window, a prefix or an extra key it is H_T / T, with the harmonic number H_T: 0.0741 for
  T = 64. sink_tokens: learned tokens before the first one.
  """
  queries = np.arange(sink_tokens, sink_tokens + length)
  visible = np.asarray(spec.mask.visible(queries, sink_tokens + length))
  keys = visible + spec.kv_bias.has_extra_key
  sees_first = np.asarray(spec.mask.keep(queries, sink_tokens))
  return float(np.mean(sees_first / keys))


def probed(table: pd.DataFrame) -> pd.DataFrame:
  """Those runs of `runs.table` that are valid and were probed."""
  return table[table.valid.eq('') & table.sink_1.notna()]


def judge(table: pd.DataFrame) -> pd.DataFrame:
  """The columns `valid` and `known` of a table of runs with their last quantities.

  A run is dead if its attention is uniform: if the entropy of every head lies within 1 % of uniform
  attention's. For runs without a stored entropy only the largest and the mean importance of the
  first token are known; they are dead if both lie within 1 % of `uniform_importance`, which other
  maps can have too.

  Returns:
    `valid`: '' for valid evidence, as far as known, else the reason: 'dead', 'no better than
    unigram', 'diverged', 'not finished' or the status of a run that did not begin. `known`: whether
    entropy was stored. A value that is not stored does not make a run invalid.
  """
  alike = lambda importance: (importance / table.uniform_importance - 1).abs() <= UNIFORM
  known = table.least_entropy.notna()
  dead = (table.least_entropy >= 1 - UNIFORM).where(
    known, alike(table.largest_importance) & alike(table.mean_importance)
  )
  valid = table.status.replace(
    {'done': '', 'running': 'not finished', 'interrupted': 'not finished'}
  )
  # Comparisons with NaN are false: an unknown value is not a reason. Overfitting is not a reason
  # either: the training loss shows what was learned.
  untaught = table[['valid_loss', 'train_loss']].min(axis=1) >= table.unigram_loss
  for reason, rows in (('dead', dead), ('no better than unigram', untaught)):
    valid = valid.mask((valid == '') & rows.astype(bool), reason)
  return pd.DataFrame({'valid': valid, 'known': known})
