"""The probe inputs of a run, in its folder: probe_tokens.npy.

A run is probed with the same sequences from its first step to analyses years later, so they are
stored once, and their digest goes with every checkpoint.
"""

from __future__ import annotations

import hashlib
import io
import logging
import tokenize

import numpy as np

from sink_jax.io.files import write_atomically
from sink_jax.io.hashing import sha256
from sink_jax.io.paths import AnyPath, to_path
from sink_jax.train.checksums import saved_steps
from sink_jax.train.multihost import broadcast_from_process0
from sink_jax.train.record import stored_digests

_REMEDY = 'Training again with the same command makes it anew from the data.'
_log = logging.getLogger('sink_jax')


def write_probe_tokens(workdir: str | AnyPath, tokens: np.ndarray) -> str:
  """Stores the probe inputs of a run, once; returns the SHA-256 of their file.

  All processes of a job call it, the first one acts. A file that is not the one that the
  checkpoints were saved with is made again.

  Raises:
    ValueError: nor would a file of `tokens` be that one.
  """
  path = to_path(workdir) / 'probe_tokens.npy'
  return broadcast_from_process0(lambda: _write_probe_tokens(path, tokens), ValueError)


def _write_probe_tokens(path: AnyPath, tokens: np.ndarray) -> str:
  content = io.BytesIO()
  np.save(content, tokens, allow_pickle=False)
  new = hashlib.sha256(content.getvalue()).hexdigest()
  present = sha256(path) if path.is_file() else None
  wanted = stored_digests(path.parent, path.name, 'sha256')
  if present is not None and (present in wanted or not wanted and saved_steps(path.parent)):
    return present  # the latter is of a version that kept no digest
  if wanted and new not in wanted:
    raise ValueError(f'{path} is {"missing" if present is None else "not as it was written"}, and '
                     'the data give other probe inputs than those of this run: put the file back, '
                     'or use another --workdir.')
  if present != new:
    write_atomically(path, content.getvalue())
  if present != new and wanted:
    _log.warning(f'{path} was {"missing" if present is None else "not as it was written"}: it is '
                 'made again from the data, and fits its digest')
  return new


def read_probe_tokens(workdir: str | AnyPath) -> np.ndarray | None:
  """The probe inputs of a run; None if it has none.

  Raises:
    ValueError: the file is damaged, or not the one that the checkpoints were saved with.
  """
  path = to_path(workdir) / 'probe_tokens.npy'
  if not path.exists():
    return None
  try:
    content = path.read_bytes()
    # Not np.load, which also opens archives and pickles.
    tokens = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
  except (OSError, EOFError, ValueError, OverflowError, TypeError, MemoryError,
          tokenize.TokenError) as error:
    raise ValueError(f'{path} is damaged ({error}). {_REMEDY}') from None
  wanted = stored_digests(workdir, path.name, 'sha256')
  if wanted and hashlib.sha256(content).hexdigest() not in wanted:
    raise ValueError(f'{path} is not the file that this run was probed with: its digest differs. '
                     f'{_REMEDY}')
  return tokens
