"""Norms of the first token beside those of the others (Figure 2 top, Figures 11 to 14).

From some block on, the first token's hidden state is far larger than the others', while its
keys and values are smaller. Hidden states are those between blocks: block 0 is the embedding,
and the last one is taken before the final norm.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from sink_jax.analyses.interface import PictureFile, Result, model_name
from sink_jax.analyses.options import Options
from sink_jax.evaluate import plots
from sink_jax.evaluate.inputs import Inputs
from sink_jax.evaluate.probe import probe
from sink_jax.evaluate.sink_report import SinkReport
from sink_jax.models.run import Run

KINDS = {'hidden': 'hidden states', 'key': 'keys', 'value': 'values'}


def first_and_others(norms: ArrayLike) -> dict[str, np.ndarray]:
  """Averages norms over sequences and heads, the first token apart from the others.

  Args:
    norms: l2 norms (S, N, T), or (S, N, H, T) of H heads, in the units of the model.

  Returns:
    Arrays (N,). first: of the first token. others: mean of the tokens from the second on. ratio:
    first / others.
  """
  norms = np.asarray(norms, np.float64)
  # Sequences, and heads where there are any: neither the blocks (axis 1) nor the tokens (the last).
  axes = tuple(axis for axis in range(norms.ndim - 1) if axis != 1)
  first, others = norms[..., 0].mean(axes), norms[..., 1:].mean(-1).mean(axes)
  # A ratio of means, as in Figures 7 and 8, and not a mean of ratios.
  return {'first': first, 'others': others, 'ratio': first / others}


def token_norms(report: SinkReport) -> dict[str, dict[str, np.ndarray]]:
  """Applies `first_and_others` to the hidden states (N + 1), keys and values (N) of a probe.

  Keys are those that enter the scores, of the key/value heads; a rotation does not change norms.
  """
  return {kind: first_and_others(report.norms[kind]) for kind in KINDS}


def of_report(report: SinkReport) -> Result:
  """'hidden', 'key' and 'value' as in `token_norms`; layers (N,): the blocks of keys and values, from 0."""
  return {'layers': [block - 1 for block in report.protocol['blocks']], **{
      kind: {name: x.tolist() for name, x in means.items()} for kind, means in token_norms(report).items()}}


def measure(run: Run, inputs: Inputs, options: Options) -> Result:
  """Measures the norms of one model; returns `of_report`.

  Raises:
    ValueError: the inputs do not fit the model.
  """
  report = probe(run, inputs.tokens, dtype=options.dtype,
                 batch_size=options.at_a_time(inputs.tokens.shape[1]))
  return {'model': run.name, 'inputs': inputs.description, **of_report(report)}


def draw(results: list[Result], path: PictureFile) -> None:
  """Draws l2 norms by block, the first token and the others; a row of panels per model (PNG)."""
  figure, axes = plots.canvas(11.5, 0.4 + 3.4 * len(results), len(results), len(KINDS))
  for row, result in zip(axes, results):
    for ax, (kind, name) in zip(row, KINDS.items()):
      means, blocks = result[kind], _blocks(result, kind)
      farthest, block = _farthest(result, kind)
      size = 5 if len(blocks) < 40 else 3
      ax.plot(blocks, means['first'], 'o-', color=plots.COLOURS[1], markersize=size,
              label='first token')
      ax.plot(blocks, means['others'], 's-', color=plots.COLOURS[0], markersize=size,
              label='mean of the others')
      # A massive activation of the first token would press the other line onto the axis.
      if max(means['first']) > 10 * max(means['others']):
        ax.set_yscale('log')
      else:
        ax.set_ylim(0, 1.1 * max(means['first'] + means['others']))
      ax.xaxis.get_major_locator().set_params(integer=True)
      ax.grid(alpha=0.25)
      ax.legend(fontsize=9, frameon=False)
      plots.label(ax, f'{name}: first / others {means["ratio"][farthest]:.3g} at block {block}',
                  'block (0: the embedding)' if kind == 'hidden' else 'block', r'$\ell_2$ norm')
    row[0].set_title(f'{model_name(result)}\n{row[0].get_title()}')
  plots.save(figure, path)


def rows(results: list[Result]) -> list[list[str]]:
  """Tabulates norms and their ratio at the block where the ratio is farthest from one."""
  table = [['l2 norm', 'of', 'block', 'first token', 'others', 'ratio']]
  for result in results:
    for kind, name in KINDS.items():
      i, block = _farthest(result, kind)
      table.append([model_name(result), name, str(block),
                    *(f'{result[kind][key][i]:.4g}' for key in ('first', 'others', 'ratio'))])
  return table


def _blocks(result: Result, kind: str) -> Sequence[int]:
  """Numbers of the blocks that norms of a kind are of, from 1; 0 is the embedding."""
  return (range(len(result[kind]['first'])) if kind == 'hidden'
          else [layer + 1 for layer in result['layers']])


def _farthest(result: Result, kind: str) -> tuple[int, int]:
  """Index and number of the block where the ratio is farthest from one, up or down."""
  # In logarithms a ratio of 1/20, as of values, is as far from one as a ratio of 20.
  i = int(np.argmax(np.abs(np.log(result[kind]['ratio']))))
  return i, _blocks(result, kind)[i]
