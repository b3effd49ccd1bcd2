"""What a machine has to offer before anything is started on it: folders and an accelerator."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def accelerator(environment: Mapping[str, str]) -> str:
  """What jax calls the accelerator, in a process of its own; ValueError where there is none."""
  program = 'import jax; print(jax.default_backend(), jax.devices()[0].device_kind, sep="\\n")'
  remedy = 'a GPU is needed, and jax for it; --smoke tries everything on a CPU.'
  try:
    done = subprocess.run([sys.executable, '-P', '-c', program], capture_output=True, text=True,
                          timeout=120, env=environment | {'XLA_PYTHON_CLIENT_PREALLOCATE': 'false'})
  except subprocess.TimeoutExpired:
    raise ValueError(f'jax found no device within two minutes: {remedy}') from None
  if done.returncode:
    reason = (done.stderr.strip().splitlines() or ['no reason given'])[-1]
    raise ValueError(f'jax finds no device ({reason}): {remedy}')
  backend, kind = done.stdout.splitlines()[-2:]
  if backend == 'cpu':
    raise ValueError(f'jax sees the CPU alone ({kind}): {remedy}')
  return f'{backend}, {kind}'


def writable(option: str, folder: Path, *names: str) -> None:
  """Makes a folder, and raises OSError with the option's name if files cannot be put into it.

  names: what will be put there; a folder where the name ends with a slash.
  """
  try:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
      path = folder / name
      if path.exists() and path.is_dir() != name.endswith('/'):
        raise OSError(f'{path} is not a {"folder" if name.endswith("/") else "file"}')
    probe = folder / 'probe.partial'
    probe.write_bytes(b'.' * 4096)
    probe.unlink()
  except OSError as error:
    raise OSError(f'{option}={folder}: files cannot be written there: {error}') from None
