"""Options of the commands about one model, and the folder to which they write."""

from __future__ import annotations

import dataclasses
import uuid
from typing import TYPE_CHECKING, Literal

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

  def load(self) -> Run:
    """Loads the model, its activations in `dtype`; raises as `load_pretrained` or `load_run`."""
    from sink_jax.analyses.models import load

    return load(self.checkpoint, self.workdir, self.dtype, self.fsdp, self.plugins)


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
