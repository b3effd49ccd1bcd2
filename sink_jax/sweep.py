"""python -m sink_jax.sweep --config=configs/quickstart.py --workdir=runs/quickstart

Runs every trial of a config file, one after the other, each in its own folder. A trial
that is done or has diverged is skipped and an interrupted one continues; one that fails is
recorded and tried again next time, and the rest go on.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path

from absl import app, flags

from sink_jax.train.checkpoint import CheckpointError
from sink_jax.train.experiment import from_dict
from sink_jax.train.loop import EXIT_SAVED, Diverged, Interrupted, quiet_logs, train
from sink_jax.train.workdir import has_ended, read_status, write_status

_CONFIG = flags.DEFINE_string('config', None, 'Config file with a table TRIALS.')
_WORKDIR = flags.DEFINE_string(
    'workdir', None, 'Folder of the sweep; a trial goes to WORKDIR/TRIAL.')
_ONLY = flags.DEFINE_list(
    'only', [], 'Names of the trials to run, separated by commas; all if empty.')
_LIST = flags.DEFINE_bool('list', False, 'Print the names of the trials and stop.')


def load_trials(path) -> dict[str, Mapping]:
  """{name: config dict} of every trial of a config file, in its order.

  Raises:
    ValueError: no such file, or no table TRIALS in it, or a trial that cannot be built.
  """
  path = Path(path)
  if not path.is_file():
    raise ValueError(f'Config file {path} does not exist.')
  sys.path.insert(0, str(path.resolve().parent.parent))  # configs import configs.base
  try:
    spec = importlib.util.spec_from_file_location(f'configs.{path.stem}', path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, 'TRIALS'):
      raise ValueError('it has no table TRIALS; run it with python -m sink_jax.train')
    configs = {name: module.get_config(name).to_dict() for name in module.TRIALS}
  except Exception as error:  # it is somebody's program: anything can be wrong with it
    raise ValueError(f'Cannot use {path}: {type(error).__name__}: {error}.') from error
  finally:
    sys.path.pop(0)
  for name, config in configs.items():
    try:
      from_dict(config)
    except ValueError as error:
      raise ValueError(f'{path}, trial {name}: {error}') from None
  return configs


def run_trials(configs: Mapping[str, Mapping], workdir,
               show_progress: bool = True) -> dict[str, str]:
  """Trains every config in workdir/name; returns {name: status}."""
  began, statuses = time.monotonic(), {}
  for number, (name, config) in enumerate(configs.items(), 1):
    folder = Path(workdir) / name
    try:
      if has_ended(folder, config):
        statuses[name] = read_status(folder)['status']
        continue
      if show_progress:
        print(f'[{number}/{len(configs)}] {name}  ({time.monotonic() - began:.0f} s so far)',
              file=sys.stderr, flush=True)
      train(config, folder, name=name, show_progress=show_progress)
    except Interrupted:
      raise
    except Diverged as error:  # recorded by the run itself
      print(f'{name}: {error}', file=sys.stderr)
    except Exception as error:  # whatever it is, the other trials can still run
      if not isinstance(error, (ValueError, CheckpointError)):
        traceback.print_exc()
      print(f'{name}: error: {error}', file=sys.stderr)
      statuses[name] = 'failed'
      if not (folder / 'config.json').exists():  # what stands there keeps its own record
        folder.mkdir(parents=True, exist_ok=True)
        write_status(folder, 'failed', error=str(error))
      continue
    statuses[name] = read_status(folder)['status']
  return statuses


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f'Unexpected argument {argv[1]!r}; options are written --name=value.')
  quiet_logs()
  try:
    configs = load_trials(_CONFIG.value)
    unknown = sorted(set(_ONLY.value) - set(configs))
    if unknown:
      raise ValueError(f'--only: unknown trial {unknown[0]!r}. Choices: {", ".join(configs)}.')
    if _ONLY.value:
      configs = {name: configs[name] for name in _ONLY.value}
    if _LIST.value:
      print('\n'.join(configs))
      return
    if not _WORKDIR.value:
      raise ValueError('--workdir is needed to run trials.')
    statuses = run_trials(configs, os.path.expanduser(_WORKDIR.value))
  except Interrupted as stop:
    print(stop, file=sys.stderr)
    sys.exit(EXIT_SAVED)
  except ValueError as error:
    sys.exit(f'error: {error}')
  for name, status in statuses.items():
    print(f'{name}: {status}')
  if 'failed' in statuses.values():  # diverging is a result
    sys.exit(1)


if __name__ == '__main__':
  flags.mark_flag_as_required('config')
  app.run(main)
