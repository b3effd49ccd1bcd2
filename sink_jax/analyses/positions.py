"""The first learned position vector replaced by another, or swapped with it."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Annotated

import jax.numpy as jnp
import tyro

from sink_jax.analyses.importance import first_tokens, published
from sink_jax.analyses.models import Model
from sink_jax.analyses.pictures import Row, lines
from sink_jax.analyses.runner import Epsilon, analysis
from sink_jax.attention.position import Learned
from sink_jax.evaluate import EPSILON
from sink_jax.evaluate.sinks import sink_rate
from sink_jax.models.run import Run
from sink_jax.pretrained.hub import known_model

Positions = Annotated[tuple[int, ...], tyro.conf.arg(help='positions, from 2, to take p_1 from.')]


@analysis('Table 7', partial(lines, x='position', y=('sink_1', 'sink_t'), by=('change',), percent=True,
                            label='% of heads'),
          inputs='repeat')
def positions(model: Model, *, positions: Positions = (5, 10, 15, 20, 25, 30),
              epsilon: Epsilon = EPSILON) -> list[Row]:
  """Sink_1 and Sink_t with the position vector p_1 replaced by p_t, or swapped with it.

  Table 7 prints the position 25 twice; the last column is taken to be 30. Positions beyond the inputs
  are left out.
  """
  inputs, encoding = model.inputs(), model.run.config.attention.position
  if not isinstance(encoding, Learned):
    raise ValueError(f'{model.run.name} encodes positions by {encoding}: use a model with learned position '
                     'vectors, such as GPT2 or OPT.')
  reached = [t for t in positions if 2 <= t <= inputs.tokens.shape[1]]
  if not reached:
    raise ValueError(f'--positions={",".join(map(str, positions))}: none lies within 2 and '
                     f'{inputs.tokens.shape[1]}, the tokens of the inputs.')
  known = known_model(model.run.name)
  paper = known is not None and known.name == 'GPT2-XL' and inputs.description['kind'] == 'repeat'
  rows = []
  for change, t in [('', 1), *((change, t) for change in ('replaced', 'swapped') for t in reached)]:
    changed = Model(changed_run(model.run, change, t), model.options)
    rate = 100 * sink_rate(first_tokens(changed, inputs.tokens, max(reached)), epsilon)
    row = {'change': change, 'position': t, 'epsilon': epsilon, 'sink_1': float(rate[0])}
    if change:
      row['sink_t'] = float(rate[t - 1])
    for metric in ('sink_1', 'sink_t') if paper else ():
      setting = (f'first position vector {change} {"by" if change == "replaced" else "with"} the {t}th'
                 if change else 'untouched')
      row |= published(inputs.description, epsilon, f'table-7-{change or "replaced"}', setting, metric,
                       f'paper_{metric}')
    rows.append(row)
  return rows


def changed_run(run: Run, change: str, position: int) -> Run:
  """The model with p_1 'replaced' by p_t, or 'swapped' with it; all but the table is shared.

  position: t, from 1.
  """
  table_TxD = jnp.asarray(run.params['positions'])
  changed_TxD = table_TxD if not change else table_TxD.at[0].set(table_TxD[position - 1])
  if change == 'swapped':
    changed_TxD = changed_TxD.at[position - 1].set(table_TxD[0])
  return dataclasses.replace(run, params={**run.params, 'positions': changed_TxD})
