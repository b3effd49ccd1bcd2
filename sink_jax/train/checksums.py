"""Checksums of saved steps, kept beside the checkpoints."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from pathlib import Path

_log = logging.getLogger('sink_jax')


def saved_steps(workdir: Path) -> list[int]:
  """Committed steps of a workdir, newest first."""
  names = (p.name for p in step_folder(workdir, 0).parent.glob('*'))
  return sorted((int(n) for n in names if re.fullmatch('0|[1-9][0-9]*', n)), reverse=True)


def step_folder(workdir: Path, step: int) -> Path:
  return Path(workdir) / 'checkpoints' / str(step)


def write_checksums(workdir: Path, step: int) -> None:
  """Records the SHA-256 of every file of a committed step; forgets steps that are gone."""
  folder = step_folder(workdir, step)
  try:
    sums = {str(p.relative_to(folder)): _sha256(p)
            for p in sorted(folder.rglob('*')) if p.is_file()}
  except FileNotFoundError:  # removed meanwhile, as the oldest of those kept
    return
  path = _sums_path(workdir, step)
  path.parent.mkdir(parents=True, exist_ok=True)
  write_atomically(path, json.dumps(sums, indent=1))
  alive = {str(s) for s in saved_steps(workdir)}
  for old in path.parent.glob('*.json'):
    if old.stem not in alive:
      old.unlink(missing_ok=True)


def verify(workdir: Path, step: int) -> str | None:
  """What is wrong with a saved step; None if every file is as it was written.

  A step without (readable) checksums was committed by a run that was killed right
  afterwards. The commit is atomic, so it is accepted if its array data are there.
  """
  folder, path = step_folder(workdir, step), _sums_path(workdir, step)
  try:
    sums = dict(json.loads(path.read_text()))
  except (OSError, ValueError, TypeError):
    if path.exists():
      _log.warning('%s is unreadable: checkpoint %d cannot be verified', path, step)
    return None if any(folder.rglob('manifest.ocdbt')) else 'its array data are missing'
  for name, digest in sums.items():
    file = folder / name
    if not file.is_file():
      return f'{name} is missing'
    if _sha256(file) != digest:
      return f'{name} differs from its checksum'
  return None


def write_atomically(path: Path, text: str) -> None:
  """Writes a whole file or nothing, also through a power cut."""
  temporary = path.with_name(f'.{path.name}.{os.getpid()}')
  with open(temporary, 'w', encoding='utf-8') as file:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())
  os.replace(temporary, path)


def _sums_path(workdir, step):
  return Path(workdir) / 'checksums' / f'{step}.json'


def _sha256(path: Path) -> str:
  with open(path, 'rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()
