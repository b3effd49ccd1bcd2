"""What commands about models have in common: loading one, and writing what was found."""

from __future__ import annotations

import dataclasses
import platform
import uuid
from typing import TYPE_CHECKING, Any, Literal

import sink_jax

if TYPE_CHECKING:
  from sink_jax.analyses.loaded_models import LoadedModel
  from sink_jax.io.paths import AnyPath


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
  """What commands about one model have."""

  checkpoint: str | None = None  # a published model: folder, GGUF file, name, or 'owner/name'.
  workdir: str | None = None  # folder of a training run instead.
  dtype: Literal['float32', 'bfloat16'] = 'float32'  # of activations.
  fsdp: int = 1  # devices to split the parameters of a published model over.

  def __post_init__(self):
    if (self.checkpoint is None) == (self.workdir is None):
      raise ValueError('name a model: either --checkpoint or --workdir.')


def load(options: Model) -> LoadedModel:
  """Loads the model, its activations in `dtype`; raises as `load_pretrained` or `load_run`."""
  from sink_jax.analyses.loaded_models import LoadedModel

  if options.checkpoint is not None:
    return LoadedModel.of_checkpoint(options.checkpoint, options.dtype, options.fsdp)
  assert options.workdir is not None  # one of the two is given
  return LoadedModel.of_workdir(options.workdir, options.dtype)


def check_folder(out: str | AnyPath) -> None:
  """Raises a ValueError where the folder to write to cannot be; leaves nothing behind."""
  from sink_jax.io.paths import is_local, to_path

  folder = to_path(out)
  if is_local(folder):  # an object store has no folders to make
    folder = next(path for path in (folder, *folder.parents) if path.exists())
  _try_to_write(folder, out)


def made_folder(out: str | AnyPath | None, new: bool = False) -> AnyPath:
  """Makes the folder to write to, and tries to write, before work that may take hours.

  Raises:
    ValueError: it is not named, cannot be written to, or holds something where it is to be `new`.
  """
  from sink_jax.io.paths import to_path

  if not out:
    raise ValueError('--out is needed: the folder to write to.')
  folder = to_path(out)
  if new and folder.is_dir() and (held := sorted(path.name for path in folder.iterdir())):
    raise ValueError(f'--out={folder} holds {held[0]}: name a new folder, or empty this one.')
  _try_to_write(folder, out)
  return folder


def _try_to_write(folder: AnyPath, out: str | AnyPath) -> None:
  # A name that no other process takes, in case several try the same folder at once.
  trial = folder / f'.{uuid.uuid4().hex[:12]}'
  try:
    folder.mkdir(parents=True, exist_ok=True)
    trial.write_bytes(b'')
    trial.unlink()
  except OSError as error:
    raise ValueError(f'--out={out} cannot be written to ({error.strerror or error}): name '
                     'another folder, which is made where there is none.') from None


def write_found(path: AnyPath, found: dict[str, Any], **versions: str) -> None:
  """Writes numbers as JSON, with when, where and with what they were made.

  Args:
    path: of the file.
    found: the numbers.
    versions: of packages, next to those that every command uses.
  """
  import jax
  import numpy as np

  from sink_jax.io.files import write_atomically
  from sink_jax.report.jsontext import rounded, to_json
  from sink_jax.train.provenance import hardware, provenance

  versions = {'sink_jax': sink_jax.__version__, 'jax': jax.__version__, 'numpy': np.__version__,
              'python': platform.python_version(), **versions}
  # The versions have a place of their own, so provenance is asked only for the rest.
  made = {**provenance(devices=False), 'hardware': hardware(), 'versions': versions}
  write_atomically(path, to_json(rounded(made | found)))
