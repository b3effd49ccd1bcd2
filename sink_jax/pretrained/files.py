"""A folder with a published checkpoint: config.json and safetensors files.

A safetensors file is 8 bytes with the length of its header, the header, a JSON object with the
name, dtype, shape and byte range of every tensor, and then the numbers, little-endian and in
row-major order. It holds no code, unlike a pickle, and one tensor can be read without the others. A
large checkpoint is several files, and an index says which tensor is in which.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  NumPy knows bfloat16 once this is imported
import numpy as np
from safetensors import safe_open

from sink_jax.io.files import check_downloaded, read_text_limited, refused
from sink_jax.io.paths import check_name, is_workdir
from sink_jax.pretrained.stored_tensors import Table

WEIGHTS, INDEX = 'model.safetensors', 'model.safetensors.index.json'
# What wrappers of a model put before the names of its tensors: {prefix: (wrapper, model inside)}.
_WRAPPERS = {
  '_orig_mod.': ('torch.compile', 'model._orig_mod'),
  'module.': ('DistributedDataParallel', 'model.module'),
  'base_model.model.': ('peft', 'model.merge_and_unload()'),
}


@dataclasses.dataclass(frozen=True)
class TensorHeader:
  """A tensor in the header of a file; dtype is its name there, such as 'BF16'."""

  file: Path
  shape: tuple[int, ...]
  dtype: str


class Checkpoint:
  """A checkpoint folder, of which only the headers have been read.

  path: of the model. source: names the file of `config`, the object in config.json, in messages.
  entries: the headers of all tensors by name, file after file, in the order of their numbers there,
  so that reading them in this order reads every file once. quantization: how a GGUF file was
  quantised.

  Raises:
    ValueError: config.json or weights are missing or damaged, are pointers of Git LFS, or were
      saved inside a wrapper of PyTorch; names the file and the remedy.
  """

  quantization = ''

  def __init__(self, folder: str | os.PathLike):
    self.path = Path(folder)
    check_weights(self.path)
    self.source = str(self.path / 'config.json')
    self.config: dict[str, Any] = _json(self.path / 'config.json')
    files = [WEIGHTS]
    if not (self.path / WEIGHTS).exists():  # a single file precedes an index, as in transformers
      with refused(f'{self.path / INDEX} is damaged'):
        files = sorted(set(map(check_name, _json(self.path / INDEX)['weight_map'].values())))
    self.entries: dict[str, TensorHeader] = {}
    for file in files:
      with self._open(self.path / file) as tensors:
        for name in tensors.offset_keys():
          about = tensors.get_slice(name)  # reads nothing yet
          self.entries[name] = TensorHeader(
            self.path / file, tuple(about.get_shape()), about.get_dtype()
          )
    self._check_names()

  def table(self, tensors: Table) -> Table:
    """A family's table with the names that this checkpoint has for the tensors."""
    return tensors

  def read(self, name: str) -> np.ndarray:
    """One tensor, copied into memory, as transformers lays it out."""
    with self._open(self.entries[name].file) as tensors:
      return tensors.get_tensor(name)

  def _check_names(self) -> None:
    """Raises a ValueError if the model was saved inside a wrapper of PyTorch."""
    for name in self.entries:
      for prefix, (wrapper, inside) in _WRAPPERS.items():
        # torch.compile wraps the parts of a model, too.
        in_part = prefix == '_orig_mod.' and f'.{prefix}' in name
        if name.startswith(prefix) or in_part:
          raise ValueError(
            f'{self.path} holds a model that {wrapper} wraps, with names such as '
            f'{name}: save the model inside, {inside}.save_pretrained(FOLDER), or '
            f'remove {prefix!r} from the names of its tensors.'
          )

  @contextlib.contextmanager
  def _open(self, path: Path) -> Iterator[Any]:
    with refused(f'{path} is damaged or incomplete, download it again'):
      check_downloaded(path)
      # Read, not mapped: pages of a mapped file would count as memory of the process.
      with safe_open(path, framework='numpy', backend='pread') as tensors:
        yield tensors


def _json(path: Path) -> dict[str, Any]:
  with refused(f'{path} is damaged or not a JSON object, download it again'):
    return dict(json.loads(read_text_limited(path)))


def write_json(path: Path, value: dict[str, Any]) -> None:
  """Writes a JSON object as transformers lays it out."""
  path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + '\n', encoding='utf-8')


def check_weights(folder: Path, source: str = '') -> None:
  """Raises a ValueError, with the remedy, if a folder has no weights in safetensors.

  Args:
    source: the name on the hub, from which pickles are not downloaded; by default the folder.
  """
  if (folder / WEIGHTS).exists() or (folder / INDEX).exists():
    return
  name = source or str(folder)
  new = f'{Path(name).name}-safetensors'
  if (folder / 'adapter_config.json').exists():
    raise ValueError(
      f'{name} is an adapter: merge it where torch, peft and transformers are installed, by '
      f"peft.AutoPeftModelForCausalLM.from_pretrained('{name}').merge_and_unload()"
      f".save_pretrained('{new}'), and load that folder."
    )
  if is_workdir(folder):
    raise ValueError(
      f'{folder} is a run trained with sink_jax: name it by --workdir, or load it by '
      'load_run; python -m sink_jax export makes a checkpoint of it.'
    )
  if files := sorted(folder.glob('*.gguf')):
    raise ValueError(f'{folder} has no {WEIGHTS}, but {files[0].name}: give that file.')
  if source or any(path.suffix in ('.bin', '.pth', '.pt', '.ckpt') for path in folder.glob('*')):
    raise ValueError(
      f'{name} has no {WEIGHTS}. Pickled weights can run any code when they are read, so sink_jax '
      'does not read them: if you trust them, convert them where torch and transformers are '
      f"installed, by AutoModelForCausalLM.from_pretrained('{name}').save_pretrained('{new}') and "
      'the same of AutoTokenizer, and load that folder.'
    )
  raise ValueError(
    f'{folder} has no {WEIGHTS} or {INDEX}: the download is incomplete, or this is not '
    'the folder of a model.'
  )
