"""Writes small workdirs like those of runs, without training, for tests of reports."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from sink_jax.train.config import Experiment, as_dict, changed

UNIFORM = float(np.mean(1 / np.arange(1, 65)))  # importance of the first of 64 tokens: 0.0741
STATUS = {
  'date': '2026-01-02T03:04:05',
  'command': 'python -m sink_jax train',
  'code': 'commit abc',
  'hardware': 'cpu, 1 core',
  'jax': '0.10.2',
}


def probe(step: int, sink_1: float = 0.0, **changes: Any) -> dict[str, Any]:
  """A row of the probe for a model of two blocks with four heads."""
  return {
    'kind': 'probe',
    'step': step,
    'sink_1': sink_1,
    'sink': [sink_1, 1.5, *[0.0] * 62],
    'sink_bias_slot': None,
    'sink_bias_slot_released': None,
    'largest_importance': 0.5,
    'mean_importance': 0.2,
    'mean_bias_slot': None,
    'raw_mass_1': 0.2,
    'largest_raw_mass_1': 0.5,
    'raw_row_mass': 1.0,
    'entropy_ratio': [[0.9, 0.8, 0.7, 0.6], [0.9, 0.8, 0.7, 0.5]],
    'dormant_heads': 0.0,
    'value_ratio': [0.9, 0.4],
    'key_ratio': [1.0, 0.8],
    'hidden_ratio': [1.1, 2.0, 3.0],
    'hidden_before_norm_ratio': [2.0, 3.0],
    'sink_token_ratio': None,
    'activation_max': [1.0, 8.0, 4.0],
    'activation_median': [0.1, 0.05, 0.05],
    'activations_beyond_100': [0.0, 1.0, 0.0],
    'activations_beyond_1000': [0.0, 0.0, 0.0],
    'kurtosis_moment': [3.0, 4.0, 5.0],
    'kurtosis_channels': [1.0, 2.0, 3.0],
    'activation_position': [1, 1, 1],
    'activation_channel': [0, 0, 0],
    'null_p99': {'sink_1': 0.0, 'hidden_ratio': 1.05},
    **changes,
  }


DEAD = dict(
  largest_importance=1.001 * UNIFORM,
  mean_importance=UNIFORM,
  entropy_ratio=[[1.0, 0.999, 0.998, 1.0]] * 2,
)


def write_run(
  folder: Path,
  trial: str = 'default',
  seed: int = 0,
  status: str = 'done',
  steps: int = 100,
  sink_1: float = 25.0,
  loss: float = 3.0,
  task: str = 'paper',
  content: str = 'data',
  last: dict[str, Any] | None = None,
  config: dict[str, Any] | None = None,
  data: dict[str, Any] | None = None,
  reason: str | None = None,
) -> Path:
  """Writes the workdir FOLDER/TRIAL-seed-SEED and returns it.

  sink_1, loss: values at the last step; both change linearly until then. last: changes to the last
  row of the probe, such as DEAD. config: dotted config keys. data: more of data.json. Unless its
  status is done or failed, the run ends half way.
  """
  workdir = folder / f'{trial}-seed-{seed}'
  workdir.mkdir(parents=True)
  settings = changed(
    Experiment(),
    {  # no two trials have the same settings
      'model.size': 'tiny',
      'seed': seed,
      'steps': steps,
      'label.trial': trial,
      'label.task': task,
      'label.budget': 'desk',
      'label.protocol': 'paper',
      'data.context': 64,
      'optimizer.weight_decay': sum(map(ord, trial)) / 1e4,
      **(config or {}),
    },
  )
  end = steps if status in ('done', 'failed') else steps // 2
  rows = _measured(steps, end, sink_1, loss, last or {})
  write = lambda name, value: (workdir / name).write_text(json.dumps(value))
  write('config.json', as_dict(settings))
  write('status.json', STATUS | {'status': status, 'step': end, 'reason': reason})
  write(
    'data.json',
    {
      'content': content,
      'unique_training_tokens': 10**6,
      'tokens_per_epoch': 10**6,
      **(data or {}),
    },
  )
  (workdir / 'metrics.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
  return workdir


def _measured(
  steps: int, end: int, sink_1: float, loss: float, last: dict[str, Any]
) -> list[dict[str, Any]]:
  """The rows of metrics.jsonl, see `write_run`."""
  rows = []
  for step in range(0, end + 1, steps // 10):
    done = step / steps
    changes = {} if step else {'hidden_ratio': [1.1, 1.2, 1.3]}
    if step == end:
      changes |= last
    rows.append(probe(step, done * sink_1, **changes))
    rows.append({'kind': 'valid', 'step': step, 'valid': 6 + done * (loss - 6), 'code': 5.0})
    if step:
      rows.append(
        {
          'kind': 'train',
          'step': step,
          'loss': 6 + done * (loss - 6.1),
          'grad_norm': 1.0,
          'tokens_per_second': 1000.0,
        }
      )
  return rows
