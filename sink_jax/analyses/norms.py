"""Norms of the first token beside those of the others (Figure 2 top, Figures 11 to 14).

From some block on, the first token's hidden state is far larger than the others', while its
keys and values are smaller. Hidden states are those between blocks: block 0 is the embedding,
and the last one is taken before the final norm.
"""

from __future__ import annotations

import numpy as np

from sink_jax.analyses.options import Options
from sink_jax.data.inputs import Inputs
from sink_jax.evaluate import plots
from sink_jax.evaluate.probe import SinkReport, probe
from sink_jax.models.run import Run

KINDS = {'hidden': 'hidden states', 'key': 'keys', 'value': 'values'}


def first_and_others(norms) -> dict[str, np.ndarray]:
  """Means per layer, each (N,), of norms (S, N, T) or (S, N, H, T) of S sequences, H heads.

  first: of the first token. others: of the tokens from the second on. ratio: first / others.
  l2 norms in the model's own units; those of heads are averaged, as in the paper's figure.
  """
  norms = np.asarray(norms, np.float64)
  axes = tuple(axis for axis in range(norms.ndim - 1) if axis != 1)
  first, others = norms[..., 0].mean(axes), norms[..., 1:].mean(-1).mean(axes)
  return {'first': first, 'others': others, 'ratio': first / others}


def token_norms(report: SinkReport) -> dict[str, dict[str, np.ndarray]]:
  """`first_and_others` of the hidden states (N + 1,), the keys and the values (N,) of a probe.

  Keys are as the scores see them, of the key/value heads; a rotation leaves their norm alone.
  """
  return {kind: first_and_others(report.norms[kind]) for kind in KINDS}


def measure(run: Run, inputs: Inputs, options: Options) -> dict:
  """Norms of one model, see `token_norms`; layers: which blocks the keys and values are of, from 0.

  Raises:
    ValueError: the inputs do not fit the model.
  """
  report = probe(run, inputs.tokens, dtype=options.dtype,
                 batch_size=options.at_a_time(inputs.tokens.shape[1]))
  found = {kind: {name: x.tolist() for name, x in own.items()}
           for kind, own in token_norms(report).items()}
  layers = list(run.config.attention_layers)
  return {'model': run.name, 'inputs': inputs.description, 'layers': layers,
          **found}


def draw(results: list[dict], path) -> None:
  """l2 norm against block, first token and mean of the others; a row of panels per model (PNG)."""
  figure, axes = plots.canvas(11.5, 0.4 + 3.4 * len(results), len(results), len(KINDS))
  for row, result in zip(axes, results):
    for ax, (kind, name) in zip(row, KINDS.items()):
      own, blocks, (farthest, block) = (result[kind], _blocks(result, kind),
                                        _farthest(result, kind))
      size = 5 if len(blocks) < 40 else 3
      ax.plot(blocks, own['first'], 'o-', color=plots.COLOURS[1], markersize=size,
              label='first token')
      ax.plot(blocks, own['others'], 's-', color=plots.COLOURS[0], markersize=size,
              label='mean of the others')
      if max(own['first']) > 10 * max(own['others']):
        ax.set_yscale('log')
      else:
        ax.set_ylim(0, 1.1 * max(own['first'] + own['others']))
      ax.xaxis.get_major_locator().set_params(integer=True)
      ax.grid(alpha=0.25)
      ax.legend(fontsize=9, frameon=False)
      plots.label(ax, f'{name}: first / others {own["ratio"][farthest]:.3g} at block {block}',
                  'block (0: the embedding)' if kind == 'hidden' else 'block', r'$\ell_2$ norm')
    row[0].set_title(f'{result["model"] or "model"}\n{row[0].get_title()}')
  plots.save(figure, path)


def rows(results: list[dict]) -> list[list[str]]:
  """Norms and their ratio at the block where the ratio is farthest from one, a line per kind."""
  table = [['l2 norm', 'of', 'block', 'first token', 'others', 'ratio']]
  for result in results:
    for kind, name in KINDS.items():
      own, (i, block) = result[kind], _farthest(result, kind)
      table.append([result['model'] or 'model', name, str(block),
                    *(f'{own[key][i]:.4g}' for key in ('first', 'others', 'ratio'))])
  return table


def _blocks(result, kind):
  """Numbers of the blocks that norms of a kind are of, from 1; 0 is the embedding."""
  return (range(len(result[kind]['first'])) if kind == 'hidden'
          else [layer + 1 for layer in result['layers']])


def _farthest(result, kind):
  """Where the ratio is farthest from one, up or down: (index, number of the block)."""
  i = int(np.argmax(np.abs(np.log(result[kind]['ratio']))))
  return i, _blocks(result, kind)[i]
