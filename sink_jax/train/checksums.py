"""Checksums of saved steps, kept beside the checkpoints.

checksums/STEP.json holds the SHA-256 of every file below checkpoints/STEP, by its path there: the
arrays, their metadata, and Orbax's own notes. It covers nothing else; what the run had recorded
by then has digests in checksums/STEP.record.json, see `record`.
"""

from __future__ import annotations

import json
import logging
import re

from sink_jax.io.files import SMALL, read_text_limited, write_atomically
from sink_jax.io.hashing import sha256_of_digests, sha256_of_files
from sink_jax.io.paths import AnyPath, files_below, is_local, to_path

_log = logging.getLogger('sink_jax')


def saved_steps(workdir: str | AnyPath) -> list[int]:
  """Committed steps of a workdir, newest first.

  On a disk a step has its name once it is complete; in an object store it has a mark.
  """
  checkpoints = step_folder(workdir, 0).parent
  folders = checkpoints.iterdir() if checkpoints.exists() else ()
  names = [path.name for path in folders
           if is_local(path) or (path / 'commit_success.txt').exists()]
  # What is still being written has a name with a suffix, and thus is no number.
  return sorted((int(n) for n in names if re.fullmatch('0|[1-9][0-9]*', n)), reverse=True)


def step_folder(workdir: str | AnyPath, step: int) -> AnyPath:
  """The folder that Orbax saves a step in."""
  return to_path(workdir) / 'checkpoints' / str(step)


def write_checksums(workdir: str | AnyPath, step: int) -> None:
  """Records the SHA-256 of every file of a committed step; forgets steps that are gone."""
  saved = step_folder(workdir, step)
  try:
    files = files_below(saved)
    sums = dict(zip((str(p.relative_to(saved)) for p in files), sha256_of_files(files)))
  except FileNotFoundError:  # removed meanwhile, as the oldest of those kept
    return
  path = _sums_path(workdir, step)
  path.parent.mkdir(parents=True, exist_ok=True)
  write_atomically(path, json.dumps(sums, indent=1))
  # Orbax removes old steps and knows nothing of their checksums.
  alive = {str(s) for s in saved_steps(workdir)}
  for old in path.parent.glob('*.json'):
    if old.name.split('.')[0] not in alive:
      old.unlink(missing_ok=True)


def forget_checksums(workdir: str | AnyPath, step: int) -> None:
  """Removes the checksums of a step that goes away, or is about to be written anew."""
  for path in (_sums_path(workdir, step), record_path(workdir, step)):
    path.unlink(missing_ok=True)


def record_path(workdir: str | AnyPath, step: int) -> AnyPath:
  """The file of digests of what the run had recorded at that step; see `record`."""
  return to_path(workdir) / 'checksums' / f'{step}.record.json'


def has_checksums(workdir: str | AnyPath, step: int) -> bool:
  """Whether a step was hashed after its commit."""
  return _sums_path(workdir, step).exists()


def verify(workdir: str | AnyPath, step: int) -> str | None:
  """What is wrong with a saved step; None if every file is as it was written.

  A step without (readable) checksums was committed by a run that was killed right
  afterwards. The commit is atomic, so it is accepted if its array data are there.
  """
  saved, path = step_folder(workdir, step), _sums_path(workdir, step)
  try:
    sums = dict(json.loads(read_text_limited(path, SMALL)))
  except (OSError, ValueError, TypeError, RecursionError):
    if path.exists():
      _log.warning('%s is unreadable: checkpoint %d cannot be verified', path, step)
    # Orbax's names: the root of the array data, in TensorStore's format OCDBT, and the tree of
    # names.
    complete = {'manifest.ocdbt', '_METADATA'} <= {file.name for file in files_below(saved)}
    return None if complete else 'its array data are missing'
  missing = [name for name in sums if not (saved / name).is_file()]
  if missing:
    return f'{missing[0]} is missing'
  for name, digest in zip(sums, sha256_of_files(saved / name for name in sums)):
    if digest != sums[name]:
      return f'{name} differs from its checksum'
  return None


def step_digest(workdir: str | AnyPath, step: int) -> str:
  """One SHA-256 of all files of a saved step, as they are now."""
  saved = step_folder(workdir, step)
  files = files_below(saved)
  return sha256_of_digests(dict(zip((str(p.relative_to(saved)) for p in files),
                                    sha256_of_files(files))))


def _sums_path(workdir: str | AnyPath, step: int) -> AnyPath:
  return to_path(workdir) / 'checksums' / f'{step}.json'
