"""The tokenizer of a run, kept in its workdir, so that the run needs no other folder."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from sink_jax.data.tokenizer import ByteEncoder, Encoder, FileEncoder
from sink_jax.io.files import SMALL, read_text_limited, write_atomically
from sink_jax.io.paths import AnyPath, to_path
from sink_jax.train.multihost import is_first

_MANIFEST = 'manifest.json'
_IDS = ('eos', 'bos', 'pad')


def write_tokenizer(workdir: str | AnyPath, encoder: Encoder | None) -> None:
  """Stores the encoder of a run's data below WORKDIR/tokenizer; writes what is not there already.

  Args:
    encoder: None where the data are not text.

  Raises:
    OSError: it cannot be written.
  """
  if encoder is None or not is_first():
    return
  with tempfile.TemporaryDirectory() as local:
    encoder.save(local)
    files = {path.name: path.read_bytes() for path in Path(local).iterdir()}
  # Written last: without its manifest a tokenizer counts as not yet written, whatever else of it
  # a killed process has left.
  files[_MANIFEST] = json.dumps({
      'special_ids': {name: getattr(encoder, f'{name}_id') for name in _IDS},
      'fingerprint': encoder.fingerprint()}, indent=2).encode()
  folder = to_path(workdir) / 'tokenizer'
  folder.mkdir(parents=True, exist_ok=True)
  for name, content in files.items():
    if not _holds(folder / name, content):
      write_atomically(folder / name, content)


def read_tokenizer(workdir: str | AnyPath) -> Encoder | None:
  """The encoder that is stored in a workdir; None in those of synthetic tasks and of older runs.

  Raises:
    ValueError: a file of it is missing or damaged.
  """
  folder = to_path(workdir) / 'tokenizer'
  if not (folder / _MANIFEST).exists():
    return None
  try:
    manifest = json.loads(read_text_limited(folder / _MANIFEST, SMALL))
    fingerprint = manifest['fingerprint']
    if fingerprint == ByteEncoder().fingerprint():
      return ByteEncoder()
    ids = [int(manifest['special_ids'][name]) for name in _IDS]
    encoder = FileEncoder(read_text_limited(folder / 'tokenizer.json'), *ids)
    if encoder.fingerprint() != fingerprint:
      raise ValueError('its files differ from their digest')
  except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
    raise ValueError(f'{folder} is damaged ({error}): training again with the same config and '
                     '--workdir, where the data are, writes it anew.') from None
  return encoder


def _holds(path: AnyPath, content: bytes) -> bool:
  try:
    return path.read_bytes() == content
  except OSError:
    return False
