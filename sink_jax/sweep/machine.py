"""Checks a machine before anything is started on it: its accelerator, and folders to write to."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def find_accelerator(environment: Mapping[str, str]) -> str:
  """Returns what jax calls the accelerator, such as 'gpu, NVIDIA H100 80GB HBM3'.

  jax is asked in a process of its own, which gives the device back when it ends.

  Args:
    environment: the variables of that process.

  Raises:
    ValueError: jax finds no device, none but the CPU, or does not answer within two minutes.
  """
  program = 'import jax; print(jax.default_backend(), jax.devices()[0].device_kind, sep="\\n")'
  remedy = 'a GPU is needed, and jax for it; --smoke tries everything on a CPU.'
  try:
    # -P: with -c, Python would look for modules in the current folder first. Without preallocation,
    # since jax would take most of the memory of a GPU only to name it.
    done = subprocess.run(
        [sys.executable, '-P', '-c', program], capture_output=True, text=True, timeout=120,
        env={**environment, 'XLA_PYTHON_CLIENT_PREALLOCATE': 'false'})
  except subprocess.TimeoutExpired:
    raise ValueError(f'jax found no device within two minutes: {remedy}') from None
  if done.returncode:
    reason = (done.stderr.strip().splitlines() or ['no reason given'])[-1]
    raise ValueError(f'jax finds no device ({reason}): {remedy}')
  backend, kind = done.stdout.splitlines()[-2:]
  if backend == 'cpu':
    raise ValueError(f'jax sees the CPU alone ({kind}): {remedy}')
  return f'{backend}, {kind}'


def check_writable(option: str, folder: Path, *names: str) -> None:
  """Makes a folder, and checks that files can be written to it.

  Args:
    option: the option of the command line that named the folder, for the error.
    folder: it is made, with its parents, where it does not exist.
    names: of what will be written there; a folder where the name ends with a slash.

  Raises:
    OSError: the folder or one of the names cannot be written.
  """
  try:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
      path = folder / name
      if path.exists() and path.is_dir() != name.endswith('/'):
        raise OSError(f'{path} is not a {"folder" if name.endswith("/") else "file"}')
    probe = folder / 'probe.partial'
    probe.write_bytes(b'.' * 4096)  # an empty file can be made on a disk that is full
    probe.unlink()
  except OSError as error:
    raise OSError(f'{option}={folder}: files cannot be written there: {error}') from None
