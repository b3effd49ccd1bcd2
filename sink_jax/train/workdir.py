"""A run's folder: its config, its status, its probe inputs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sink_jax.train.checksums import write_atomically
from sink_jax.train.experiment import differences
from sink_jax.train.provenance import here_and_now


class OtherConfig(ValueError):
  """The workdir holds a run of another config."""


def claim(workdir, config: Mapping[str, Any]) -> Path:
  """Makes the folder, or checks that it holds a run of the same config.

  Raises:
    OtherConfig: it holds a run of another config; the keys that differ are listed.
    ValueError: it cannot be written.
  """
  workdir = Path(workdir)
  path = workdir / 'config.json'
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    if path.exists():
      changed = differences(read_config(workdir), config)
      if changed:
        raise OtherConfig(f'{workdir} holds a run of another config:\n  ' + '\n  '.join(changed)
                          + '\nUse another --workdir, or the old values to resume it.')
    write_atomically(path, json.dumps(config, indent=2))
  except OSError as error:
    raise ValueError(f'Cannot use {workdir} as a workdir: {error}. Choose another '
                     '--workdir.') from None
  return workdir


def read_config(workdir) -> dict[str, Any]:
  """The config of a run.

  Raises:
    ValueError: there is none, or it is unreadable.
  """
  path = Path(workdir) / 'config.json'
  try:
    return json.loads(path.read_text())
  except FileNotFoundError:
    raise ValueError(f'{path} does not exist: {workdir} is not the workdir of a run.') from None
  except (json.JSONDecodeError, UnicodeDecodeError) as error:
    raise ValueError(f'{path} is not readable as JSON ({error}).') from None


def write_status(workdir, status: str, **details) -> None:
  """Records 'running', 'done', 'interrupted', 'diverged' or 'failed', where and when."""
  record = {'status': status, **details, **here_and_now()}
  write_atomically(Path(workdir) / 'status.json', json.dumps(record, indent=2))


def read_status(workdir) -> dict[str, Any]:
  """{'status': 'not run'} where there is none."""
  try:
    return json.loads((Path(workdir) / 'status.json').read_text())
  except (FileNotFoundError, json.JSONDecodeError):
    return {'status': 'not run'}


def has_ended(workdir, config: Mapping[str, Any]) -> bool:
  """Has this very config been trained here to its end, or until it diverged?"""
  if read_status(workdir)['status'] not in ('done', 'diverged'):
    return False
  saved = read_config(workdir)
  # Sizes that are empty in a config come from the data; the saved one has them filled in.
  model = {k: saved['model'].get(k) if v is None else v for k, v in config['model'].items()}
  return not differences(saved, dict(config, model=model))


def write_probe_tokens(workdir, tokens) -> None:
  np.save(Path(workdir) / 'probe_tokens.npy', tokens, allow_pickle=False)


def read_probe_tokens(workdir):
  """The probe inputs of a run; None if it has none."""
  path = Path(workdir) / 'probe_tokens.npy'
  return np.load(path, allow_pickle=False) if path.exists() else None
