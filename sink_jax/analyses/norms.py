"""Norms of the first token next to those of the others."""

from __future__ import annotations

from functools import partial

import numpy as np

from sink_jax.analyses.models import Model
from sink_jax.analyses.pictures import Row, lines
from sink_jax.analyses.runner import analysis
from sink_jax.evaluate.sink_report import SinkReport


@analysis('Figure 2 (top), Figures 11 to 14', partial(lines, x='block', y=('first', 'others'),
                                                      panel=('model', 'kind'), log='y',
                                                      label=r'$\ell_2$ norm'))
def norms(model: Model) -> list[Row]:
  """l2 norms of hidden states, keys and values: the first token and the mean of the others."""
  return of_report(model.report(model.inputs().tokens))


def of_report(report: SinkReport) -> list[Row]:
  """Rows of kind, block, first, others and their ratio, means over sequences and key/value heads.

  Hidden states are those between blocks: block 0 is the embedding, and the last one is taken before the
  final norm. Keys are those that enter the scores. The ratio is one of means, as in Figures 7 and 8.
  """
  rows = []
  for kind, words in (('hidden', 'hidden states'), ('key', 'keys'), ('value', 'values')):
    norms = np.asarray(report.norms[kind], np.float64)  # (S, N, T) or (S, N, H, T)
    axes = tuple(axis for axis in range(norms.ndim - 1) if axis != 1)
    first_N, others_N = norms[..., 0].mean(axes), norms[..., 1:].mean(-1).mean(axes)
    blocks = range(len(first_N)) if kind == 'hidden' else report.protocol['blocks']
    rows += [{'kind': words, 'block': block, 'first': first, 'others': others, 'ratio': first / others}
             for block, first, others in zip(blocks, first_N.tolist(), others_N.tolist())]
  return rows
