"""Attention of the last of many queries to the first token.

StreamingLLM, Appendix F, Figure 12: LLaMA2-7B, 256 sequences of 4096 tokens. Its axis counts
layers from 0; the picture here counts blocks from 1, as everywhere in this package.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
from jax.sharding import Mesh
from numpy.typing import ArrayLike

from sink_jax.analyses import streaming
from sink_jax.analyses.blocks import check_layers_and_heads
from sink_jax.analyses.interface import PictureFile, Result, model_name
from sink_jax.analyses.loaded_models import LoadedModel, check_length
from sink_jax.analyses.options import Options
from sink_jax.evaluate import plots
from sink_jax.evaluate.inputs import Inputs
from sink_jax.kernels.shard import mesh_of
from sink_jax.models.arrays import ParamTree, checked_inputs
from sink_jax.models.config import ModelConfig
from sink_jax.models.record import RecordOptions
from sink_jax.models.run import Run, record


def make_inputs(model: LoadedModel, options: Options) -> Inputs:
  """Makes long texts as `streaming` does, since few documents are as long as these inputs.

  Raises:
    ValueError: too little text, or more tokens than the model has positions.
  """
  # Here and not in `streaming`, whose caches read texts longer than the model has positions: this
  # analysis needs all tokens at once.
  check_length(model.run, options.length)
  return streaming.make_inputs(model, options)


def first_token_weights(run: Run, tokens: ArrayLike, *, dtype: str = 'float32',
                        batch_size: int | None = None) -> np.ndarray:
  """Measures the weight that the last query gives to the first token.

  Where attention is not softmax, its scores are divided by the sum of their row. An extra key or a
  sink logit takes its share of the row. Memory grows linearly with T: one row per head is kept.

  Args:
    run: the model; N of its blocks have attention, with H heads each.
    tokens: (S, T).
    dtype: of the activations.
    batch_size: sequences at a time; all by default.

  Returns:
    (S, N, H), float64.
  """
  config = dataclasses.replace(run.config, dtype=dtype)
  tokens = checked_inputs(config, np.asarray(tokens))
  size, mesh = batch_size or len(tokens), mesh_of(run.params)
  parts_SxNxH = []
  for i in range(0, len(tokens), size):
    weights_NxBxH = _weights(config, mesh, run.params, tokens[i:i + size])
    # A record has its layers first, and the result has its sequences first.
    parts_SxNxH.append(np.moveaxis(np.asarray(weights_NxBxH, np.float64), 1, 0))
  return np.concatenate(parts_SxNxH)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _weights(config: ModelConfig, mesh: Mesh | None, params: ParamTree,
             tokens_BxT: jax.Array) -> jax.Array:
  """The weights (N, B, H) of the first token in the last row.

  A program of its own: where the rest of a record is not returned, the compiler leaves it out,
  among it the importance of all keys, which takes as long as attention itself.
  """
  rows_NxBxHxT = record(config, RecordOptions(last_query=True), mesh, params,
                        tokens_BxT).layers.last_query_BxHxT
  assert rows_NxBxHxT is not None  # the options ask for it
  return rows_NxBxHxT[..., 0]


def measure(run: Run, inputs: Inputs, options: Options) -> Result:
  """Measures Figure 12 of one model, whatever the length of the inputs.

  options.layers and options.heads, from 0, restrict what is averaged.

  Returns:
    heads (N, H): means over sequences. mean (N,): of these over heads. deviation (N,): their
    standard deviation over heads. layers (N,): which blocks these are, from 0. uniform: 1 / T.

  Raises:
    ValueError: options name a block without attention, or a head that there is not.
  """
  check_layers_and_heads(run.config, options.layers, options.heads)
  length = inputs.tokens.shape[1]
  weights_NxH = first_token_weights(run, inputs.tokens, dtype=options.dtype,
                                    batch_size=options.at_a_time(length)).mean(0)
  layers = list(run.config.attention_layers)
  chosen = layers if options.layers is None else list(options.layers)
  heads = list(range(run.config.heads) if options.heads is None else options.heads)
  # The options number all blocks; the axis counts those with attention alone.
  weights_NxH = weights_NxH[[layers.index(i) for i in chosen]][:, heads]
  return {'model': run.name, 'inputs': inputs.description, 'sequences': len(inputs.tokens),
          'length': length, 'uniform': 1 / length,
          'layers': chosen, 'heads': weights_NxH.tolist(), 'mean': weights_NxH.mean(1).tolist(),
          'deviation': weights_NxH.std(1).tolist()}


def draw(results: list[Result], path: PictureFile) -> None:
  """Draws attention of the last query to the first token by block, with bars over heads (PNG)."""
  figure, axes = plots.canvas(7.0, 4.0)
  ax = axes[0, 0]
  for i, result in enumerate(results):
    # Side by side where there are several models.
    blocks = np.asarray(result['layers']) + 1 + 0.15 * (i - (len(results) - 1) / 2)
    ax.errorbar(blocks, result['mean'], result['deviation'], fmt='o',
                color=plots.COLOURS[i % len(plots.COLOURS)], markersize=5, capsize=3, linewidth=1.5,
                label=f'{model_name(result)}, T = {result["length"]}, '
                      f'{result["sequences"]} sequences')
  # The bars of one deviation may reach below 0 or above 1, although no weight does.
  reach = [mean + sign * deviation for result in results for sign in (-1, 1)
           for mean, deviation in zip(result['mean'], result['deviation'])]
  ax.set_ylim(min(0, *reach) - 0.04, max(1, *reach) + 0.04)
  ax.xaxis.get_major_locator().set_params(integer=True)
  ax.grid(alpha=0.25)
  ax.legend(fontsize=9, frameon=False, loc='upper left', bbox_to_anchor=(1, 1))
  plots.label(ax, 'Last query: mean and standard deviation over heads', 'block',
              'attention on the first token')
  plots.save(figure, path)


def rows(results: list[Result]) -> list[list[str]]:
  """Tabulates mean and standard deviation over heads, with a row per model and block."""
  table = [['last query to first token', 'T', 'block', 'mean', 'deviation']]
  for result in results:
    for layer, mean, deviation in zip(result['layers'], result['mean'], result['deviation']):
      table.append([model_name(result), str(result['length']), str(layer + 1),
                    f'{mean:.4f}', f'{deviation:.4f}'])
  return table
