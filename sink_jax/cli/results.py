"""Common parts of the commands about models: loading one, and writing numbers."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import uuid
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
  from sink_jax.io.paths import AnyPath
  from sink_jax.models.run import Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadModel:
  """Options of the commands about one model."""

  checkpoint: str | None = None  # a published model: folder, GGUF file, name, or 'owner/name'.
  workdir: str | None = None  # folder of a training run instead.
  plugins: str = ''  # Python files with components of the run, which are imported.
  dtype: Literal['float32', 'bfloat16'] = 'float32'  # of activations.
  fsdp: int = 1  # devices to split the parameters of a published model over.

  def __post_init__(self):
    if (self.checkpoint is None) == (self.workdir is None):
      raise ValueError('name a model: either --checkpoint or --workdir.')


def load(options: ReadModel) -> Run:
  """Loads the model, its activations in `dtype`; raises as `load_pretrained` or `load_run`."""
  from sink_jax.analyses import models

  return models.load(
    options.checkpoint, options.workdir, options.dtype, options.fsdp, options.plugins
  )


def writable_folder(out: str | AnyPath | None) -> AnyPath:
  """Returns the folder to write to, and first tries to write, before work of hours; makes nothing.

  Raises:
    ValueError: it is not named, or cannot be written to.
  """
  from sink_jax.io.paths import is_local, to_path

  if not out:
    raise ValueError('--out is needed: the folder to write to.')
  folder = there = to_path(out)
  if is_local(folder):  # an object store has no folders
    there = next(path for path in (folder, *folder.parents) if path.exists())
  trial = there / f'.{uuid.uuid4().hex}'  # which no other process tries
  try:
    trial.write_bytes(b'')
    trial.unlink()
  except OSError as error:
    raise ValueError(
      f'--out={out} cannot be written to ({error.strerror or error}): name another folder.'
    ) from None
  return folder


def write_found(path: AnyPath, found: dict[str, Any]) -> None:
  """Writes numbers as JSON, with when, where and with which versions they were made."""
  from sink_jax.io.files import write_atomically
  from sink_jax.train.provenance import provenance

  path.parent.mkdir(parents=True, exist_ok=True)
  write_atomically(path, to_json(rounded(provenance() | found)))


def to_json(value: Any) -> str:
  """A value as indented JSON, innermost lists and objects on a line; NaN and infinity: null."""
  # Strict parsers, such as those of browsers, refuse the NaN that Python writes.
  text = json.dumps(
    _mapped(value, lambda x: x if math.isfinite(x) else None), indent=1, allow_nan=False
  )
  # A bracket at the end of a line opens a list or an object: within quotes JSON has no line break.
  return (
    re.sub(
      r'([\[{])\n *([^\[\]{}]*)\n *([\]}])',
      lambda found: found[1] + re.sub(r'\n *', ' ', found[2]) + found[3],
      text,
    )
    + '\n'
  )


def rounded(value: Any) -> Any:
  """The same with six significant digits, enough for a float32 result."""
  return _mapped(value, lambda x: float(f'{x:.6g}'))


def _mapped(value: Any, change: Any) -> Any:
  """The same with every float changed, also within dicts, lists and tuples."""
  if isinstance(value, dict):
    return {key: _mapped(item, change) for key, item in value.items()}
  if isinstance(value, (list, tuple)):
    return [_mapped(item, change) for item in value]
  return change(value) if isinstance(value, float) else value
