"""Importance of the first tokens by input, sequence, block and head, in six groupings; Table 7.

Kinds of input and chat models (Table 1), length (Figure 3), size (Figure 4 left, 10), domain
(Figure 9), head (Figures 19 to 24, 27). The threshold applies to each sequence, before the mean
over sequences.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np
import tyro

from sink_jax.analyses.models import Model
from sink_jax.analyses.runner import Epsilon, Epsilons, analysis
from sink_jax.attention.position import Learned
from sink_jax.evaluate import EPSILON
from sink_jax.evaluate.inputs import KINDS
from sink_jax.evaluate.sinks import sink_rate
from sink_jax.models.sizes import parameter_count
from sink_jax.pictures.charts import bars, lines
from sink_jax.pictures.maps import grid
from sink_jax.pictures.style import Row
from sink_jax.report.paper import table_number
from sink_jax.pretrained.hub import family_of, known_model

Lengths = Annotated[tuple[int, ...], tyro.conf.arg(help='tokens of the inputs, such as 16,64,256.')]
Positions = Annotated[tuple[int, ...], tyro.conf.arg(help='positions, from 2, to take p_1 from.')]
Results = Annotated[str, tyro.conf.arg(help='folder that the harness wrote to (--output_path).')]


def first_tokens(model: Model, tokens: np.ndarray, count: int = 1) -> np.ndarray:
  """Importance alpha (S, N, H, count) of the first `count` of tokens (S, T).

  The importance of all other tokens is dropped batch by batch, so that memory does not grow with T.
  """
  return np.concatenate(
    [model.report(batch).importance[..., :count].copy() for batch in model.batches(tokens)]
  )


def rates(alpha_SxNxHxK: np.ndarray, epsilons: Sequence[float]) -> list[Row]:
  """A row for each epsilon: Sink_1 .. Sink_K in percent, and the first token's mean importance."""
  importance = float(alpha_SxNxHxK[..., 0].mean(dtype=np.float64))
  return [
    {
      'epsilon': e,
      **{
        f'sink_{k + 1}': float(100 * (alpha_SxNxHxK[..., k] > e).mean(dtype=np.float64))
        for k in range(alpha_SxNxHxK.shape[-1])
      },
      'importance': importance,
    }
    for e in sorted(set(epsilons))
  ]


@analysis('Table 1 (left)', partial(bars, x='model', y='sink_1', by=('kind',)))
def kinds(model: Model, *, epsilon: Epsilon = EPSILON) -> list[Row]:
  """Sink_1 on text, random tokens and one repeated token."""
  rows = []
  # Text begins as its tokenizer begins it; random and repeated tokens have no BOS (Section 3.3).
  for kind in KINDS if model.given is None else ('given',):
    inputs = model.inputs(inputs=kind) if model.given is None else model.inputs()
    [row] = rates(first_tokens(model, inputs.tokens), (epsilon,))
    known = known_model(model.run.name)
    rows.append(
      {
        'kind': kind,
        **row,
        **published(
          inputs.description, epsilon, 'table-1-left', known.name if known else '', f'sink_1_{kind}'
        ),
      }
    )
  return rows


@analysis('Table 1 (right)', partial(bars, x='pair', y='sink_1', by=('version',)))
def chat(model: Model, *, epsilon: Epsilon = EPSILON) -> list[Row]:
  """Sink_1 of base models and their chat versions, which read plain text without their template."""
  inputs, known = model.inputs(), known_model(model.run.name)
  [row] = rates(first_tokens(model, inputs.tokens), (epsilon,))
  if known is None:
    return [{'pair': model.run.name, 'version': 'model', **row}]
  # The table has a row for a pair, with the name of the base model without ' Base'.
  pair = (known.counterpart or '' if known.tuned else known.name).removesuffix(' Base')
  version = 'chat' if known.tuned else 'base'
  natural = inputs.description['kind'] == 'natural'
  return [
    {
      'pair': pair,
      'version': version,
      **row,
      **(
        published(inputs.description, epsilon, 'table-1-right', pair, f'sink_1_{version}')
        if natural
        else {}
      ),
    }
  ]


@analysis(
  'Figure 4 (left)',
  partial(lines, x='parameters', y='sink_1', by=('family',), panel=(), log='x', percent=True),
)
def scale(model: Model, *, epsilon: Epsilon = EPSILON) -> list[Row]:
  """Sink_1 against the number of parameters, by family."""
  [row] = rates(first_tokens(model, model.inputs().tokens), (epsilon,))
  return [
    {'family': family_of(model.run.name), 'parameters': parameter_count(model.run.config), **row}
  ]


@analysis(
  'Figure 10',
  partial(
    lines, x='parameters', y='percent', by=('family',), panel=('measure',), log='x', percent=True
  ),
)
def hellaswag(
  model: Model, *, results: Results = 'results', epsilon: Epsilon = EPSILON
) -> list[Row]:
  """Sink_1 next to HellaSwag accuracy, by family and scale.

  The accuracies come from the files that lm-evaluation-harness wrote below `results`; see
  `analyses.lm_eval`.
  """
  newest_first = sorted(Path(results).expanduser().rglob('results_*.json'), reverse=True)
  scores = (json.loads(path.read_text()) for path in newest_first)
  accuracies = next(
    (
      found['results']['hellaswag']
      for found in scores
      if 'hellaswag' in found['results'] and found['config'].get('sink_jax_model') == model.run.name
    ),
    None,
  )
  if accuracies is None:
    raise ValueError(
      f'--results={results} has no HellaSwag scores of {model.run.name}; python -m '
      'sink_jax.analyses.lm_eval writes them, see docs/open_models.md.'
    )
  [row] = scale(model, epsilon=epsilon)
  common = {'family': row['family'], 'parameters': row['parameters'], 'epsilon': epsilon}
  return [
    common | {'measure': 'Sink_1', 'percent': row['sink_1']},
    *(
      common
      | {
        'measure': measure,
        'percent': 100 * accuracies[f'{measure},none'],
        'stderr': 100 * accuracies[f'{measure}_stderr,none'],
      }
      for measure in ('acc', 'acc_norm')
    ),
  ]


def _nearest(rows: list[Row]) -> list[Row]:
  """The rows whose threshold is the paper's, or the nearest to it."""
  epsilon = min((row['epsilon'] for row in rows), key=lambda value: abs(value - EPSILON))
  return [row for row in rows if row['epsilon'] == epsilon]


def _by_domain(rows: list[Row]) -> str:
  low, high = (of(_nearest(rows), key=lambda row: row['sink_1']) for of in (min, max))
  return (
    f'Sink_1 (ε = {low["epsilon"]:g}) goes from {low["sink_1"]:.1f} % in {low["domain"]} to '
    f'{high["sink_1"]:.1f} % in {high["domain"]}'
  )


@analysis(
  'Figure 9',
  partial(bars, x='domain', y='sink_1', by=('model',), panel=('epsilon',)),
  finding=_by_domain,
  source='Stdlib()',
)
def domains(model: Model, *, epsilons: Epsilons = (0.2, 0.3, 0.4)) -> list[Row]:
  """Sink_1 on the domains of a corpus, such as the Pile.

  Domains are the sub-folders of a folder, or a field of JSONL:
  --source="Jsonl(path='pile.jsonl', domain_field='meta.pile_set_name')".
  """
  inputs, rows, start = model.inputs('domains'), [], 0
  alpha_SxNxHx1 = first_tokens(model, inputs.tokens)
  for domain in inputs.description['domains']:  # in the order of the sequences
    part, start = alpha_SxNxHx1[start : start + domain['sequences']], start + domain['sequences']
    rows += [{**domain, **row} for row in rates(part, epsilons)]
  return rows


def _by_length(rows: list[Row]) -> str:
  shown = _nearest(rows)
  first, last = shown[0], shown[-1]
  return (
    f'Sink_1 (ε = {first["epsilon"]:g}) is {first["sink_1"]:.1f} % at {first["length"]} tokens and '
    f'{last["sink_1"]:.1f} % at {last["length"]}'
  )


@analysis(
  'Figure 3',
  partial(lines, x='length', y='sink_1', by=('epsilon',), log='x', percent=True),
  finding=_by_length,
)
def lengths(
  model: Model,
  *,
  lengths: Lengths = (16, 32, 64, 128, 256),
  epsilons: Epsilons = (0.1, 0.2, 0.3, 0.4, 0.5),
) -> list[Row]:
  """Sink_1 against the length T of the inputs.

  Shorter inputs are the beginnings of the longest ones. Rows have Sink_1 to Sink_10, as the
  official code prints them.
  """
  lengths = tuple(sorted(set(lengths)))
  tokens = model.inputs(length=lengths[-1]).tokens
  if lengths[0] < 2 or lengths[-1] > tokens.shape[1]:
    raise ValueError(
      f'--lengths={",".join(map(str, lengths))} must lie between 2 and {tokens.shape[1]}.'
    )
  return [
    {'length': length, **row}
    for length in lengths
    for row in rates(first_tokens(model, tokens[:, :length], min(10, lengths[0])), epsilons)
  ]


@analysis('Figures 19 to 24, 27', partial(grid, value='importance'))
def heads(model: Model, *, epsilon: Epsilon = EPSILON) -> list[Row]:
  """Importance of the first token by block and head; the mean of sink_1 is the model's Sink_1."""
  alpha_SxNxH = first_tokens(model, model.inputs().tokens)[..., 0]
  return [
    {'block': block, 'head': head + 1, **rates(alpha_SxNxH[:, n, head, None], (epsilon,))[0]}
    for n, block in enumerate(model.blocks)
    for head in range(alpha_SxNxH.shape[-1])
  ]


def published(
  inputs: dict[str, Any], epsilon: float, table: str, setting: str, metric: str, name: str = 'paper'
) -> Row:
  """{name: the paper's number} where inputs have its protocol and it has a number, else {}."""
  bos = 'tokenizer' if inputs['kind'] == 'natural' else 'none'  # as the paper's inputs begin
  if inputs['length'] != 64 or epsilon != EPSILON or inputs['bos']['protocol'] != bos:
    return {}
  number = table_number(table, setting, metric)
  return {} if number is None else {name: number}


@analysis(
  'Table 7',
  partial(
    lines, x='position', y=('sink_1', 'sink_t'), by=('change',), percent=True, name='% of heads'
  ),
  inputs='repeat',
)
def positions(
  model: Model, *, positions: Positions = (5, 10, 15, 20, 25, 30), epsilon: Epsilon = EPSILON
) -> list[Row]:
  """Sink_1 and Sink_t with the position vector p_1 replaced by p_t, or swapped with it.

  Table 7 prints the position 25 twice; the last column is taken to be 30. Positions beyond the
  inputs are left out.
  """
  inputs, encoding = model.inputs(), model.run.config.attention.position
  if not isinstance(encoding, Learned):
    raise ValueError(
      f'{model.run.name} encodes positions by {encoding}: use a model with learned position '
      'vectors, such as GPT2 or OPT.'
    )
  reached = [t for t in positions if 2 <= t <= inputs.tokens.shape[1]]
  if not reached:
    raise ValueError(
      f'--positions={",".join(map(str, positions))}: none lies within 2 and '
      f'{inputs.tokens.shape[1]}, the tokens of the inputs.'
    )
  known = known_model(model.run.name)
  paper = known is not None and known.name == 'GPT2-XL' and inputs.description['kind'] == 'repeat'
  rows, table_TxD = [], jnp.asarray(model.run.params['positions'])
  for change, t in [('', 1), *((change, t) for change in ('replaced', 'swapped') for t in reached)]:
    order = np.arange(len(table_TxD))
    order[0] = t - 1
    if change == 'swapped':
      order[t - 1] = 0
    changed = Model(
      dataclasses.replace(model.run, params={**model.run.params, 'positions': table_TxD[order]}),
      model.options,
    )
    rate = 100 * sink_rate(first_tokens(changed, inputs.tokens, max(reached)), epsilon)
    row = {'change': change, 'position': t, 'epsilon': epsilon, 'sink_1': float(rate[0])}
    if change:
      row['sink_t'] = float(rate[t - 1])
    for metric in ('sink_1', 'sink_t') if paper else ():
      setting = (
        f'first position vector {change} {"by" if change == "replaced" else "with"} the {t}th'
        if change
        else 'untouched'
      )
      row |= published(
        inputs.description,
        epsilon,
        f'table-7-{change or "replaced"}',
        setting,
        metric,
        f'paper_{metric}',
      )
    rows.append(row)
  return rows
