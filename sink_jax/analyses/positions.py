"""The first learned position vector replaced by another, or swapped with it (Table 7).

In GPT2-XL the sink belongs to p_1, not to the first token: with p_t in its place Sink_1 vanishes,
and with the two swapped the sink moves to token t. The paper's inputs repeat one token. Its table
prints the position 25 twice; the last column is taken to be 30.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sink_jax.analyses.interface import PictureFile, Result, model_name
from sink_jax.analyses.options import Options
from sink_jax.attention.position import Learned
from sink_jax.evaluate import EPSILON, plots
from sink_jax.evaluate.inputs import Inputs
from sink_jax.evaluate.probe import probe
from sink_jax.models.run import Run
from sink_jax.paper.numbers import comparable, same_bos, table_number
from sink_jax.pretrained.hub import known_model

POSITIONS = (5, 10, 15, 20, 25, 30)


def replaced(run: Run, position: int) -> Run:
  """Returns the model with p_t in the place of p_1, where t is the 1-based `position`.

  One array is copied, the table of position vectors; all else is shared.

  Raises:
    ValueError: the model has no learned positions, or not so many.
  """
  table_TxD = _table(run, position)
  # Row 0 is p_1, so p_t is row t - 1.
  return _with_table(run, table_TxD.at[0].set(table_TxD[position - 1]))


def swapped(run: Run, position: int) -> Run:
  """Returns the model with p_1 and p_t swapped, where t is the 1-based `position`.

  Raises:
    ValueError: the model has no learned positions, or not so many.
  """
  table_TxD = _table(run, position)
  other = position - 1
  # `.at[].set` makes a new array: table_TxD[0] is still p_1 when it is put in the other row.
  return _with_table(run, table_TxD.at[0].set(table_TxD[other]).at[other].set(table_TxD[0]))


def sink_rates(run: Run, tokens: np.ndarray, positions: Sequence[int] = POSITIONS,
               epsilon: float = EPSILON, *, dtype: str = 'float32',
               batch_size: int | None = None) -> list[Result]:
  """Measures Table 7 on tokens (S, T): the unchanged model, then every change and position.

  Returns:
    Rows of change ('no', 'replaced', 'swapped'), position (t, 1-based; None for 'no'), and sink_1
    and sink_t in percent of heads (sink_t is None for 'no').

  Raises:
    ValueError: the model has no learned positions, or a position is outside 2..T.
  """
  length = np.shape(tokens)[1]
  for position in positions:
    # All positions are checked before the first probe, which is where the time goes.
    _table(run, position)
    if not 2 <= position <= length:
      raise ValueError(f'--positions={position} is outside 2..{length}, the tokens of the inputs; '
                       'name others, or use longer inputs.')
  def row(name, t, model):
    report = probe(model, tokens, dtype=dtype, batch_size=batch_size)
    rate = lambda position: 100 * report.sink_rate(position, epsilon)
    return {'change': name, 'position': t, 'sink_1': rate(1),
            'sink_t': None if t is None else rate(t)}

  rows = [row('no', None, run)]
  for name, change in (('replaced', replaced), ('swapped', swapped)):
    rows += [row(name, t, change(run, t)) for t in positions]  # one copy of the table at a time
  return rows


def measure(run: Run, inputs: Inputs, options: Options) -> Result:
  """Measures Table 7 of one model, at the 1-based options.positions.

  By default these are the paper's, as far as the inputs and the model reach.

  Returns:
    rows: those of `sink_rates`. With the paper's model, inputs and epsilon a row also has the
    paper's numbers: paper {sink_1, sink_t}.

  Raises:
    ValueError: several epsilons, no learned positions, or a position outside the inputs.
  """
  length, epsilon = inputs.tokens.shape[1], options.epsilon
  rows = sink_rates(run, inputs.tokens, options.positions or _default(run, length), epsilon,
                    dtype=options.dtype, batch_size=options.at_a_time(length))
  model = known_model(run.name)
  if (model and model.name == 'GPT2-XL' and inputs.description['kind'] == 'repeat'
      and same_bos(inputs.description) and comparable(length, epsilon)):
    for row in rows:
      row['paper'] = {key: _published(row, key) for key in ('sink_1', 'sink_t')}
  return {'model': run.name, 'inputs': inputs.description, 'epsilon': epsilon, 'rows': rows}


def draw(results: list[Result], path: PictureFile) -> None:
  """Draws Sink_1 and Sink_t in percent against t, with a panel per model (PNG)."""
  columns = min(3, len(results))
  lines = -(-len(results) // columns)
  figure, axes = plots.canvas(1.6 + 4.6 * columns, 4.0 * lines, lines, columns,
                              len(results))
  for ax, result in zip(axes.flat, results):
    untouched = next(row for row in result['rows'] if row['change'] == 'no')['sink_1']
    ax.axhline(untouched, color='#555555', linestyle=':', linewidth=1.5,
               label=f'{plots.SINK_1}, untouched')
    for i, change in enumerate(('replaced', 'swapped')):
      rows = [row for row in result['rows'] if row['change'] == change]
      t = np.array([row['position'] for row in rows])
      shown = t + 0.5 * (i - 0.5)  # side by side, where rates are equal
      for key, name, style in (('sink_1', plots.SINK_1, 'o-'),
                               ('sink_t', r'$\mathrm{Sink}_t^{\epsilon}$', 's--')):
        ax.plot(shown, [row[key] for row in rows], style, color=plots.COLOURS[i], linewidth=2,
                markersize=6, label=f'{name}, $p_1$ {change}',
                markerfacecolor=plots.COLOURS[i] if key == 'sink_1' else 'white')
      published = [(x, row['paper'][key]) for x, row in zip(shown, rows) for key in
                   ('sink_1', 'sink_t') if row.get('paper', {}).get(key) is not None]
      if published:
        ax.plot(*zip(*published), 'x', color=plots.COLOURS[i], markersize=9, markeredgewidth=2,
                label=f'the paper, $p_1$ {change}')
    ax.set_ylim(-4, 104)
    ax.grid(alpha=0.25)
    ax.legend(fontsize=9, frameon=False)
    inputs = result['inputs']
    plots.label(ax, f'{model_name(result)}: {inputs["kind"]}, T = {inputs["length"]}, '
                f'ε = {result["epsilon"]:g}', 'position t', '% of heads')
    # The positions of both changes are the same, so those of the last one serve.
    ax.set_xticks(t)
  plots.save(figure, path)


def rows(results: list[Result]) -> list[list[str]]:
  """Tabulates Table 7 in percent, the paper's in brackets, with a row per change and rate."""
  times = sorted({row['position'] for result in results for row in result['rows']} - {None})
  table = [['% of heads', 'p_1', 'rate', 'no', *(f't={t}' for t in times)]]
  for result in results:
    measured = {(row['change'], row['position']): row for row in result['rows']}
    for change in ('replaced', 'swapped'):
      for key, name in (('sink_1', 'Sink_1'), ('sink_t', 'Sink_t')):
        cells = [measured['no', None], *(measured.get((change, t)) for t in times)]
        table.append([model_name(result), change, name,
                      *(_cell(row, key) for row in cells)])
  return table


def _default(run: Run, length: int) -> tuple[int, ...]:
  """The paper's positions, without those beyond the inputs or the model's position vectors."""
  last = min(length, len(_table(run, 2)))
  within = tuple(t for t in POSITIONS if t <= last)
  if not within:
    raise ValueError(f'--positions: none of {POSITIONS} is within {last} tokens; name others, or '
                     'use longer inputs.')
  return within


def _cell(row: Result | None, key: str) -> str:
  """A rate, and the paper's in brackets."""
  if not row or row[key] is None:
    return '-'
  published = row.get('paper', {}).get(key)
  return f'{row[key]:.2f}' + ('' if published is None else f' ({published:.2f})')


def _published(row: Result, key: str) -> float | None:
  """The paper's number; None for positions that its table does not have."""
  t, change = row['position'], row['change']
  if t is None:
    return table_number('table-7-replaced', 'untouched', key)
  return table_number(f'table-7-{change}', 'first position vector '
                      f'{change} {"by" if change == "replaced" else "with"} the {t}th', key)


def _table(run: Run, position: int) -> jax.Array:
  """The learned position vectors (positions, D) of a model that has this one."""
  encoding = run.config.attention.position
  if not isinstance(encoding, Learned):
    raise ValueError(f'--positions: the model encodes positions by {encoding}, and only a learned '
                     'vector per position can be replaced; use a model that has them, such as '
                     'GPT2 or OPT.')
  if not 2 <= position <= encoding.max_length:
    raise ValueError(f'--positions={position} is outside 2..{encoding.max_length}; the first '
                     'position is what the others are put in place of.')
  return jnp.asarray(run.params['positions'])


def _with_table(run: Run, table_TxD: jax.Array) -> Run:
  return dataclasses.replace(run, params={**run.params, 'positions': table_TxD})
