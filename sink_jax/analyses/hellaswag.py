"""Sink_1 next to the accuracy of HellaSwag."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from sink_jax.analyses.importance import scale
from sink_jax.analyses.models import Model
from sink_jax.analyses.pictures import Row, lines
from sink_jax.analyses.runner import Epsilon, analysis
from sink_jax.evaluate import EPSILON

Results = Annotated[str, tyro.conf.arg(help='folder that the harness wrote to (--output_path).')]


@analysis('Figure 10', partial(lines, x='parameters', y='percent', by=('family',), panel=('measure',), log='x',
                               percent=True))
def hellaswag(model: Model, *, results: Results = 'results', epsilon: Epsilon = EPSILON) -> list[Row]:
  """Sink_1 next to HellaSwag accuracy, by family and scale.

  The accuracies are those that lm-evaluation-harness wrote below `results`; see `analyses.lm_eval`.
  """
  accuracies = scores(results, model.run.name)
  [row] = scale(model, epsilon=epsilon)
  common = {'family': row['family'], 'parameters': row['parameters'], 'epsilon': epsilon}
  return [common | {'measure': 'Sink_1', 'percent': row['sink_1']}, *(
      common | {'measure': measure, 'percent': 100 * accuracies[f'{measure},none'],
                'stderr': 100 * accuracies[f'{measure}_stderr,none']} for measure in ('acc', 'acc_norm'))]


def scores(folder: str, name: str) -> dict[str, float]:
  """The harness's newest scores of HellaSwag for a model; a ValueError if there are none."""
  for path in sorted(Path(folder).expanduser().rglob('results_*.json'), reverse=True):
    found = json.loads(path.read_text())
    if 'hellaswag' in found['results'] and found['config'].get('sink_jax_model') == name:
      return found['results']['hellaswag']
  raise ValueError(f'--results={folder} has no HellaSwag scores of {name}: python -m sink_jax.analyses.lm_eval '
                   f'run --model sink_jax --model_args checkpoint={name} --tasks hellaswag '
                   f'--output_path {folder}')
