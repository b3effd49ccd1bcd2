"""A run small enough to train within a second, for tests."""

import json
import os
import subprocess
import sys
from pathlib import Path

from configs import base

ROOT = Path(__file__).parents[2]

SMALL = {
    'steps': 8, 'batch_size': 8, 'log_every': 1, 'checkpoint_every': 4,
    'model.size': 'tiny', 'model.d_model': 16, 'model.ffn_hidden': 24, 'model.dtype': 'float32',
    'data.source': 'BigramBackcopy(length=16)', 'data.context': 16,
    'optimizer.learning_rate': 1e-2, 'optimizer.warmup_steps': 2,
    'probe.every': 4, 'probe.sequences': 4, 'probe.length': 16,
    'validation.every': 4, 'validation.batches': 1,
}


def config(**changes):
  """The small run's config dict; changes are written with __ for the dots."""
  changes = {key.replace('__', '.'): value for key, value in changes.items()}
  return base.trial({'small': SMALL | changes}, 'small').to_dict()


def start(workdir, *arguments, devices=1, **changes):
  """Starts `python -m sink_jax.train` on the small run; returns the process."""
  changes = {key.replace('__', '.'): value for key, value in changes.items()}
  flags = [f'--config.{key}={value}' for key, value in (SMALL | changes).items()]
  flags_of_xla = (os.environ.get('XLA_FLAGS', ''),
                  f'--xla_force_host_platform_device_count={devices}')
  environment = dict(os.environ, JAX_PLATFORMS='cpu', PYTHONPATH=str(ROOT),
                     XLA_FLAGS=' '.join(flags_of_xla))
  return subprocess.Popen(
      [sys.executable, '-m', 'sink_jax.train', f'--config={ROOT / "configs" / "base.py"}',
       f'--workdir={workdir}', *flags, *arguments],
      env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def rows(workdir, *kinds):
  """Metric rows without the timings, which no two runs share."""
  lines = [json.loads(line) for line in (Path(workdir) / 'metrics.jsonl').read_text().splitlines()]
  return [{k: v for k, v in row.items() if k not in ('tokens_per_second', 'mfu')}
          for row in lines if not kinds or row['kind'] in kinds]
