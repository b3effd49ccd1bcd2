"""The parts of a card that are measured, on the disk, so that a card that was killed goes on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from sink_jax.analyses import runner
from sink_jax.evaluate.inputs import open_source
from sink_jax.io.files import read_text_limited, write_atomically
from sink_jax.io.paths import AnyPath, inside, to_path
from sink_jax.models.arrays import ParamTree
from sink_jax.models.run import Run
from sink_jax.report.card_page import PARTS
from sink_jax.train.provenance import code, hardware


class Parts:
  """A folder with a file for each part of one card.

  A file says of which card its rows are: the model with a digest of its parameters, the options,
  the texts, the code and the hardware. Another card does not use it.
  """

  def __init__(self, folder: str | os.PathLike, run: Run, form: int, inputs: Mapping[str, Any]):
    self._folder = to_path(folder)
    self._card = {
      'format': form,
      'model': run.name,
      'config': repr(run.config),
      'checkpoint': runner.checkpoint(run),
      'parameters': _digest(run.params),
      'text': open_source(inputs.get('source', '')).fingerprint(),
      'code': code(),
      'hardware': hardware(),
    }

  def read(self, part: str, asked: Mapping[str, Any]) -> runner.Result | None:
    """The rows of a part, if the same card has measured them."""
    if not (self._folder / f'{part}.json').exists():
      return None
    try:
      stored = json.loads(read_text_limited(inside(self._folder, f'{part}.json')))
      if stored['card'] != self._of(asked):
        return None
      return runner.Result(runner.find(part), stored['rows'], stored['models'])
    except (ValueError, KeyError, TypeError):  # not a file of `write`: it is measured again
      return None

  def write(self, part: str, asked: Mapping[str, Any], result: runner.Result) -> None:
    """Keeps the rows of a part, with all digits."""
    self._folder.mkdir(parents=True, exist_ok=True)
    kept = {'card': self._of(asked), 'rows': result.rows, 'models': result.models}
    write_atomically(self._folder / f'{part}.json', json.dumps(kept))

  def _of(self, asked: Mapping[str, Any]) -> dict[str, Any]:
    """What a file says of its card, as JSON gives it back."""
    return json.loads(json.dumps(self._card | dict(asked), default=repr))


def check_parts(folder: AnyPath) -> None:
  """Raises a ValueError if the folder of the parts cannot be one: it is a file or a link."""
  if os.path.islink(folder) or folder.exists() and not folder.is_dir():
    raise ValueError(f'--out: {folder} must be a folder, for parts: remove it, or use another.')


def remove_parts(folder: AnyPath) -> None:
  """Removes a card's parts, and their folder if nothing else is in it."""
  for part in PARTS:
    (folder / f'{part}.json').unlink(missing_ok=True)
  if folder.is_dir() and not any(folder.iterdir()):
    folder.rmdir()


def _digest(params: ParamTree) -> str:
  """Of all parameters, with their names and types."""
  digest = hashlib.blake2b(digest_size=16)
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    x = np.asarray(leaf)
    digest.update(f'{jax.tree_util.keystr(path)} {x.dtype} {x.shape}'.encode())
    digest.update(x.tobytes())
  return digest.hexdigest()
