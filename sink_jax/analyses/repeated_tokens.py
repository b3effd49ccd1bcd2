"""Checks Propositions 1 to 4 (Appendix B.1) on a model that reads one token repeated.

Hidden states of all positions must be equal, and attention must follow its closed form or, with
rotary positions, stay below its bound. Whether that leaves a sink on the first token is computed
from the form, because the premise of Proposition 2 does not hold for the relative bias of Eq. 6.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import numpy as np
from numpy.typing import ArrayLike

from sink_jax.analyses.interface import PictureFile, Result, model_name
from sink_jax.analyses.options import Options
from sink_jax.analyses.propositions import (
  bias_of_distances,
  closed_form,
  proposition_number,
  rotary_bound,
)
from sink_jax.attention.position import Alibi, Nope, Position, Relative, Rope
from sink_jax.attention.spec import AttentionSpec
from sink_jax.evaluate import EPSILON, plots
from sink_jax.evaluate.activations import not_finite
from sink_jax.evaluate.inputs import Inputs, random_tokens
from sink_jax.evaluate.sinks import importance
from sink_jax.models.config import ModelConfig
from sink_jax.models.record import LayerRecord, RecordOptions
from sink_jax.models.run import Run
from sink_jax.models.transformer import init_params

# Of hidden states relative, of weights absolute. The rounding of float32 through many blocks stays
# below it, and different tokens are far above.
TOLERANCE = 1e-3
_LONGEST = 512  # tokens: the check holds the maps of all heads of a sequence


def check(run: Run, tokens: ArrayLike) -> dict[str, np.ndarray]:
  """Compares a model with the proposition for its positions.

  Activations are float32, whatever those of the model, and there is one sequence at a time, for
  the memory of its maps.

  Args:
    run: the model, with N blocks of H heads.
    tokens: (S, T); a row is one token repeated. Other rows are not refused: they differ from the
      proposition.

  Returns:
    hidden_difference (S,): max over blocks and positions of |h_t - h_1| / |h_1|.
    difference (S, N, H): largest |A - closed form|; of a bound, largest A - bound.
    ratio (S, N, H), of a bound only: largest A / bound, of queries that attend to several keys.
    alpha, closed_alpha (S, N, H): importance of the first token, and its closed form or bound.
    row, closed_row (S, N, H, T): weights of the last query, measured and by the form.

  Raises:
    ValueError: no proposition applies, there are more than 512 tokens, or what the model computes
      is not finite.
  """
  proposition_number(run.config)  # refuses a model that none applies to
  tokens = np.asarray(tokens)
  if tokens.shape[1] > _LONGEST:
    raise ValueError(f'--length={tokens.shape[1]}: too many for whole attention maps; use '
                     f'at most {_LONGEST}.')
  # bfloat16, the kernels and the matrix units of accelerators round more than equality allows.
  run = dataclasses.replace(run, config=dataclasses.replace(
      run.config, dtype='float32', implementation='chunked'))
  record = RecordOptions(maps=True, hidden=True, queries_keys=True)
  with jax.default_matmul_precision('highest'):
    # tokens[:, None] is (S, 1, T): each row is a batch of one.
    compared = [_compare(run.config, run.record(row, record).layers) for row in tokens[:, None]]
  measured = {name: np.stack([sequence[name] for sequence in compared]) for name in compared[0]}
  for name, x in measured.items():
    if not np.isfinite(x).all():
      raise not_finite(run, name, 'float32')
  return measured


def summary(config: ModelConfig, measured: dict[str, np.ndarray], epsilon: float) -> Result:
  """Sums up what `check` has measured as plain numbers, with a verdict in words.

  Returns:
    holds: whether the differences are within `TOLERANCE`. closed_sink, sink: share of heads, in
    percent, whose importance of the first token exceeds epsilon by the closed form or bound, and as
    measured. heads: those of the largest and the smallest closed importance, with the rows of the
    last query (T,). form: 'exact' or 'bound'. verdict: a text. The other keys are maxima of the
    arrays of `check`.
  """
  alpha, closed = measured['alpha'].mean(0), measured['closed_alpha'].mean(0)
  # The heads of the largest and the smallest closed importance, or the one head that is both.
  extremes = dict.fromkeys(tuple(int(x) for x in np.unravel_index(i, closed.shape))
                           for i in (closed.argmax(), closed.argmin()))
  length = measured['row'].shape[-1]
  bias = bias_of_distances(config.attention.position, length)
  result = {
      'proposition': proposition_number(config), 'position': _short(config.attention.position),
      'form': 'bound' if 'ratio' in measured else 'exact', 'length': length, 'epsilon': epsilon,
      'hidden_difference': float(measured['hidden_difference'].max()),
      'difference': float(measured['difference'].max()),
      'ratio': float(measured['ratio'].max()) if 'ratio' in measured else None,
      'bias_non_increasing': bool((np.diff(bias) <= 0).all()), 'bias_farthest': float(bias[-1]),
      'alpha': alpha.tolist(), 'closed_alpha': closed.tolist(),
      'sink': float(100 * (measured['alpha'] > epsilon).mean()),
      'closed_sink': float(100 * (measured['closed_alpha'] > epsilon).mean()),
      'heads': [{'layer': n, 'head': h, 'row': measured['row'][0, n, h].tolist(),
                 'closed_row': measured['closed_row'][0, n, h].tolist()}
                for n, h in extremes]}
  # The difference from a bound has a sign: a weight far below it does not count against it.
  result['holds'] = max(result['hidden_difference'], result['difference']) < TOLERANCE
  return result | {'verdict': _verdict(result)}


def measure(run: Run, inputs: Inputs, options: Options) -> Result:
  """Checks one model on repeated tokens, and shows the verdict.

  Returns:
    Numbers and words as `summary` has them.

  Raises:
    ValueError: several epsilons, no proposition applies, or the inputs do not repeat one token.
  """
  tokens = np.asarray(inputs.tokens)
  if (tokens != tokens[:, :1]).any():
    raise ValueError('--inputs: Propositions 1 to 4 speak of one token repeated, and these inputs '
                     'hold different ones; use --inputs=repeat without a BOS (--bos=none).')
  checked = summary(run.config, check(run, tokens), options.epsilon)
  options.say(f'{run.name}: {checked["verdict"]}')
  return {'model': run.name, 'inputs': inputs.description, **checked}


def check_all(length: int = 64, epsilon: float = EPSILON) -> list[Result]:
  """Checks all four propositions on small models with random parameters.

  No checkpoint is needed, since the statements hold for any parameters. Proposition 2 is checked
  with the bias of Eq. 6, and with its negative, for which the premise holds.
  """
  results = []
  for position in (Nope(), Relative(), Relative(decreasing=True), Alibi(), Rope()):
    # Two blocks, so that the second one reads what attention has made of the tokens, and half as
    # many key heads, so that grouped heads are checked too.
    config = ModelConfig(layers=2, d_model=32, heads=4, kv_heads=2, ffn_hidden=32, vocab_size=32,
                         attention=AttentionSpec(position=position), dtype='float32')
    run = Run(config, init_params(config, 0), 'random parameters')
    inputs = random_tokens(config.vocab_size, sequences=2, length=length, repeat=True)
    results.append(measure(run, inputs, Options(epsilons=(epsilon,))))
  return results


def draw(results: list[Result], path: PictureFile) -> None:
  """Draws weights of the last query by key, measured and by the form, a panel each (PNG)."""
  columns = min(3, len(results))
  rows = math.ceil(len(results) / columns)
  figure, axes = plots.canvas(0.8 + 4.4 * columns, 0.4 + 4.0 * rows, rows, columns)
  for ax, result in zip(axes.flat, results):
    keys = np.arange(1, result['length'] + 1)
    closed = 'closed form' if result['form'] == 'exact' else 'upper bound'
    for colour, head in zip(plots.COLOURS, result['heads']):
      name = f'block {head["layer"] + 1}, head {head["head"] + 1}'
      ax.plot(keys, head['row'], 'o', color=colour, markersize=5, markerfacecolor='none',
              label=f'{name}: measured')
      ax.plot(keys, head['closed_row'], color=colour, linewidth=1.5, label=f'{name}: {closed}')
    # Weights of far keys vanish under ALiBi; those below a ten-thousandth are left out of the axis.
    lowest = 0.5 * min(x for head in result['heads'] for x in head['row'] if x > 1e-4)
    ax.set_yscale('log')
    ax.set_ylim(lowest, 50)  # with room for the legend
    ax.set_yticks([y for y in (1, 0.1, 0.01, 0.001, 1e-4) if y > lowest])
    ax.minorticks_off()
    ax.grid(alpha=0.25)
    ax.legend(fontsize=8.5, frameon=False, loc='upper left')
    holds = 'holds' if result['holds'] else 'does not hold'
    plots.label(ax, f'{model_name(result)}: {result["position"]}\n{closed} of Proposition '
                f'{result["proposition"]} {holds}, ' r'$\alpha_1$'
                f' up to {np.max(result["closed_alpha"]):.3f}',
                'key', 'weight of the last query')
    ax.title.set_fontsize(10)
  for ax in axes.flat[len(results):]:
    ax.remove()
  plots.save(figure, path)


def rows(results: list[Result]) -> list[list[str]]:
  """Tabulates the statements in numbers, with a row per model."""
  table = [['repeated tokens', 'proposition', 'positions', 'hidden states', 'attention',
            'A / bound', 'largest alpha_1', 'by the form', 'holds', 'sink follows']]
  show = lambda x: '-' if x is None else f'{x:.3g}'
  for result in results:
    table.append([model_name(result), str(result['proposition']), result['position'],
                  show(result['hidden_difference']), show(result['difference']),
                  show(result['ratio']), show(np.max(result['alpha'])),
                  show(np.max(result['closed_alpha'])), 'yes' if result['holds'] else 'NO',
                  _sink_follows(result)])
  return table


def _compare(config: ModelConfig, layers: LayerRecord) -> dict[str, np.ndarray]:
  """`check` of one sequence, whose record has a batch of one."""
  assert layers.maps_BxHxTxT is not None and layers.hidden_BxTxD is not None
  maps_NxHxTxT = np.asarray(layers.maps_BxHxTxT, np.float64)[:, 0]
  hidden_NxTxD = np.asarray(layers.hidden_BxTxD, np.float64)[:, 0]
  gap = np.linalg.norm(hidden_NxTxD - hidden_NxTxD[:, :1], axis=-1)
  length, closed = maps_NxHxTxT.shape[-1], []
  bounded = isinstance(config.attention.position, Rope)
  for n in range(config.layers):
    # The blocks repeat a pattern, in which every block may have a mask of its own.
    spec = config.attention_of(config.pattern[n % len(config.pattern)])
    closed.append(rotary_bound(_largest_score(layers, n), spec.mask, length) if bounded
                  else closed_form(spec, config.heads, length))
  closed = np.stack(closed)
  difference = maps_NxHxTxT - closed
  compared = {'hidden_difference': (gap / np.linalg.norm(hidden_NxTxD[:, :1], axis=-1)).max(),
              'difference': (difference if bounded else np.abs(difference)).max((-1, -2)),
              'alpha': importance(maps_NxHxTxT)[..., 0],
              # raw: the rows of a bound may sum to more than one, which `importance` else refuses.
              'closed_alpha': importance(closed, raw=True)[..., 0],
              'row': maps_NxHxTxT[..., -1, :], 'closed_row': closed[..., -1, :]}
  if bounded:
    kept = closed > 0
    several = kept & (kept.sum(-1, keepdims=True) > 1)  # of a single key, weight and bound are one
    ratio = np.where(several, maps_NxHxTxT / np.where(several, closed, 1), 0)
    compared['ratio'] = ratio.max((-1, -2))
  return compared


def _largest_score(layers: LayerRecord, n: int) -> np.ndarray:
  """xi = |q||k| / sqrt(Dh) of every head (H,) of a layer: the largest of all positions."""
  assert layers.queries_BxTxHxDh is not None and layers.keys_BxTxHkvxDh is not None
  # x[n, 0] is block n of the one sequence, (T, heads, Dh). The bound takes the largest norm of all
  # positions; on repeated tokens they differ by rounding alone.
  sizes = [np.linalg.norm(np.asarray(x[n, 0], np.float64), axis=-1).max(0)
           for x in (layers.queries_BxTxHxDh, layers.keys_BxTxHkvxDh)]
  group = len(sizes[0]) // len(sizes[1])
  return sizes[0] * np.repeat(sizes[1], group) / math.sqrt(layers.queries_BxTxHxDh.shape[-1])


def _short(position: Position) -> str:
  """The config string of a position encoding without the fields that have their defaults."""
  values = [(field, getattr(position, field.name)) for field in dataclasses.fields(position)]
  given = [f'{field.name}={value!r}' for field, value in values if value != field.default]
  return f'{type(position).__name__}({", ".join(given)})'


def _sink_follows(result: Result) -> str:
  """Whether the closed form puts a sink on token 1: 'yes', 'no', or 'open' with a bound."""
  if np.max(result['closed_alpha']) <= result['epsilon']:
    return 'no'
  return 'yes' if result['form'] == 'exact' else 'open'


def _verdict(result: Result) -> str:
  """Says in words whether the statements hold, and whether they rule out a sink at this length."""
  exact, epsilon, length = result['form'] == 'exact', result['epsilon'], result['length']
  sentences = ['Hidden states of all positions are '
               + ('equal' if result['hidden_difference'] < TOLERANCE else 'NOT equal')
               + f' (largest relative difference {result["hidden_difference"]:.1e}).']
  if exact:
    follows = 'follows' if result['difference'] < TOLERANCE else 'does NOT follow'
    sentences.append(f'Attention {follows} its closed form (largest difference '
                     f'{result["difference"]:.1e}).')
  else:
    stays = 'stays below' if result['difference'] < TOLERANCE else 'does NOT stay below'
    sentences.append(f'Attention {stays} its bound (largest ratio {result["ratio"]:.3g}).')
  if not result['bias_non_increasing']:
    sentences.append('The premise of the proposition fails: the bias increases with the distance, '
                     f'to {result["bias_farthest"]:g} at the farthest key.')
  largest = np.max(result['closed_alpha'])
  what = (f'the {"closed form gives" if exact else "bound allows"} the first token an importance '
          f'of up to {largest:.3f}')
  follows = _sink_follows(result)
  if follows == 'no':
    sentences.append(f'No sink: {what} <= {epsilon:g} at T = {length}.')
  elif follows == 'yes':
    sentences.append(f'A sink without any content: {what} > {epsilon:g} at T = {length}, in '
                     f'{result["closed_sink"]:.0f} % of heads.')
  else:
    sentences.append(f'Nothing follows about a sink at T = {length}: {what} > {epsilon:g}, and '
                     f'more than that in {result["closed_sink"]:.0f} % of heads; measured are '
                     f'{result["sink"]:.0f} %.')
  return ' '.join(sentences)
