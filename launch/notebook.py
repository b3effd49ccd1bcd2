"""Installs this repository for a notebook's kernel; the first cell of each runs it in the clone.

Packages that are there keep their versions: the ranges of pyproject.toml hold what Colab has. It
raises a RuntimeError where the kernel has imported another version of a package than is installed.
"""

import importlib
import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

PROJECT = tomllib.loads(Path('pyproject.toml').read_text())['project']
REQUIRED = [re.split('[^a-zA-Z0-9._-]', line)[0] for line in PROJECT['dependencies']]


def installed(name: str) -> str:
  """The version of a package, '' without one."""
  try:
    return metadata.version(name)
  except metadata.PackageNotFoundError:
    return ''


def install() -> None:
  """Installs this repository as a copy, with what it lacks, and prints what that was."""
  has_tpu = any(Path(device).exists() for device in ('/dev/accel0', '/dev/vfio/0'))
  extra = '[tpu]' if has_tpu else '[gpu]' if shutil.which('nvidia-smi') else ''
  if installed('jax'):  # it has its plug-in: of two for one device chance would choose
    extra = ''
  done = subprocess.run(
    [sys.executable, '-m', 'pip', 'install', f'.{extra}'], capture_output=True, text=True
  )
  if done.returncode:
    raise RuntimeError(f'pip install .{extra} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}')
  print(re.findall('^Successfully installed .*', done.stdout, re.MULTILINE)[-1])
  importlib.invalidate_caches()


def stale() -> list[str]:
  """Packages of which this kernel has imported another version than is installed."""
  found = []
  for name in REQUIRED:
    module = sys.modules.get(name.replace('-', '_'))
    loaded, there = getattr(module, '__version__', ''), installed(name)
    if loaded and there and loaded != there:
      found.append(f'{name} {loaded} (installed: {there})')
  return found


if not importlib.util.find_spec('sink_jax') or not all(map(installed, REQUIRED)):
  install()
if stale():
  raise RuntimeError(f'Restart, then run all: this kernel has imported {", ".join(stale())}.')
