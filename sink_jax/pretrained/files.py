"""A folder with a published checkpoint: config.json and safetensors files.

A safetensors file is 8 bytes with the length of its header, the header, a JSON object with the
name, dtype, shape and byte range of every tensor, and then the numbers, little-endian and in
row-major order. Nothing in it can run, unlike in a pickle, and one tensor can be read without
the others. A large checkpoint is several files, and an index says which tensor is in which.

The files are data from elsewhere: whatever is wrong with them is a ValueError with the file's
name, before a number is read where that is possible.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes  # noqa: F401  NumPy knows bfloat16 once this is imported
import numpy as np
from safetensors import SafetensorError, safe_open

from sink_jax.io.files import read_text_limited
from sink_jax.pretrained.stored_tensors import StoredTensor
from sink_jax.train.workdir import is_workdir

WEIGHTS, INDEX = 'model.safetensors', 'model.safetensors.index.json'
_PICKLES = ('*.bin', '*.pth', '*.pt', '*.ckpt', '*.bin.index.json')


@dataclasses.dataclass(frozen=True)
class TensorHeader:
  """A tensor in the header of a file; dtype is as it stands there, such as 'BF16'."""

  file: str
  shape: tuple[int, ...]
  dtype: str


class Weights(Protocol):
  """What a `Checkpoint` and a `GgufCheckpoint` have in common.

  path: the folder or file that names the model. folder: that of the files. files: all that decide
  what the model computes. source: where `config` stands, for messages. quantization: how the
  weights were quantised before, as 'Q4_1', or ''.
  """
  path: Path
  folder: Path
  files: list[Path]
  config: dict[str, Any]
  source: str
  quantization: str
  entries: dict[str, TensorHeader]

  def table(self, tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """A family's table with the names that this checkpoint has for the tensors."""
    ...

  def read(self, name: str) -> np.ndarray:
    """One tensor, in memory of its own, as transformers lays it out."""
    ...


class Checkpoint:
  """A checkpoint folder, with the headers of its files read and no tensor.

  config: the object in config.json. entries: the headers of all tensors by name, file after
  file, in the order of their numbers there, so that reading them in turn reads every file once.

  Raises:
    ValueError: config.json or weights are missing or damaged; names the file and the remedy.
  """

  source, quantization = 'config.json', ''

  def __init__(self, folder: str | os.PathLike):
    self.path = self.folder = Path(folder)
    check_merged(self.folder)
    if not (self.folder / 'config.json').exists() and (files := sorted(self.folder.glob('*.gguf'))):
      raise ValueError(f'{self.folder} has no config.json, but {files[0].name}: give that file.')
    self.config = read_object(self.folder / 'config.json', 'The folder of a published model has '
                              'one: choose that folder, or download the model again.')
    self.entries: dict[str, TensorHeader] = {}
    index = self._index()
    # An index names a file once per tensor in it; each header is read once.
    for file in sorted(set(index.values())) if index else [WEIGHTS]:
      for name, entry in self._header(file):
        if name in self.entries:
          raise ValueError(f'{self.folder}: the tensor {name} is in {self.entries[name].file} and '
                           f'in {file}: download the model again.')
        self.entries[name] = entry
    for name, file in index.items():
      if name not in self.entries or self.entries[name].file != file:
        raise ValueError(f'{self.folder / INDEX} names the tensor {name}, which is not in {file}: '
                         'download both files again.')
    self.files = [self.folder / file for file in (
        'config.json', *sorted({entry.file for entry in self.entries.values()}))]

  def table(self, tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    return tensors

  def read(self, name: str) -> np.ndarray:
    """One tensor, in memory of its own.

    Raises:
      ValueError: the file is damaged.
    """
    with self._open(self.entries[name].file) as tensors:
      return tensors.get_tensor(name)

  def _index(self) -> dict[str, str]:
    """Tensor name -> file; {} where all tensors are in one file."""
    # A single file goes before an index, as in transformers.
    if (self.folder / WEIGHTS).exists():
      return {}
    path = self.folder / INDEX
    if not path.exists():
      raise ValueError(self._no_weights())
    files = read_object(path, 'Download the model again.').get('weight_map')
    if not isinstance(files, dict) or not files:
      raise ValueError(f'{path} has no weight_map, which says where the tensors are: download it '
                       'again.')
    if not all(isinstance(file, str) for file in files.values()):
      raise ValueError(f'{path}: weight_map must say a file name for every tensor: download it '
                       'again.')
    for file in set(files.values()):
      # The index is data from elsewhere: it must not lead out of the folder.
      if file in ('', '.', '..') or {'/', '\\', '\0'} & set(file):
        raise ValueError(f'{path} names the file {file!r}, which is not inside the folder.')
      if not os.path.exists(self.folder / file):  # a name that is too long is none either
        raise ValueError(f'{self.folder / file} is missing, but {INDEX} names it: the download is '
                         'incomplete, run it again.')
    return files

  def _header(self, file: str) -> Iterator[tuple[str, TensorHeader]]:
    with self._open(file) as tensors:
      # By their offsets in the file, not by their names: `entries` promises the order of the
      # numbers.
      for name in tensors.offset_keys():
        about = tensors.get_slice(name)  # reads nothing yet
        yield name, TensorHeader(file, tuple(about.get_shape()), about.get_dtype())

  @contextlib.contextmanager
  def _open(self, file: str) -> Iterator[Any]:
    path = self.folder / file
    if path.exists() and not path.is_file():  # a device has no end
      raise ValueError(f'{path} is not a file: download it again.')
    try:
      # Read, not mapped: pages of a mapped file would count as memory of the process.
      with safe_open(path, framework='numpy', backend='pread') as tensors:
        yield tensors
    except (SafetensorError, OSError) as error:
      raise ValueError(f'{path} is damaged or incomplete ({error}): download it again.') from None

  def _no_weights(self) -> str:
    """The message for a folder without safetensors."""
    if is_workdir(self.folder):
      return (f'{self.folder} is a run trained with sink_jax: name it by --workdir, or load it by '
              'load_run; '
              'python -m sink_jax export makes a checkpoint of it.')
    pickles = sorted({p.name for kind in _PICKLES for p in self.folder.glob(kind)})
    if pickles:
      return pickled(self.folder, f'{self.folder / pickles[0]} holds pickled weights')
    return (f'{self.folder} has neither {WEIGHTS} nor {INDEX}: the download is incomplete, or '
            'this is not the folder of a model.')


def check_merged(folder: Path, source: str = '') -> None:
  """Refuses an adapter, such as one of LoRA, which is a part of a model.

  Args:
    folder: of the checkpoint.
    source: the name that a person gave it, by default the folder.

  Raises:
    ValueError: it is one; with the command that merges it.
  """
  file = folder / 'adapter_config.json'
  if not file.exists() or any((folder / name).exists() for name in (WEIGHTS, INDEX)):
    return
  source = source or str(folder)
  target = f'{Path(source).name or "model"}-merged'
  raise ValueError(
      f'{source} is an adapter (adapter_config.json) and not a model: merge the adapter first, where '
      'torch, peft and transformers are installed, and load the new folder:\n'
      'python -c "from peft import AutoPeftModelForCausalLM as M; '
      'from transformers import AutoTokenizer as T; '
      f"m = M.from_pretrained('{source}').merge_and_unload(); m.save_pretrained('{target}'); "
      f"T.from_pretrained(m.config._name_or_path).save_pretrained('{target}')\"")


def pickled(source: str | os.PathLike, what: str) -> str:
  """The message for weights that are only there as pickles, with the command that converts.

  Args:
    source: a folder or a hub name. what: the beginning of the sentence.
  """
  target = f'{Path(source).name or "model"}-safetensors'
  return (f'{what}, which can run any code when they are read, so sink_jax does not read them. '
          'If you trust them, convert them once, where torch and transformers are installed, '
          'and load the new folder:\n'
          'python -c "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; '
          f"M.from_pretrained('{source}', torch_dtype='auto')"
          f".save_pretrained('{target}', safe_serialization=True); "
          f"T.from_pretrained('{source}').save_pretrained('{target}')\"")


def read_object(path: Path, remedy: str) -> dict[str, Any]:
  """The JSON object in a file.

  Raises:
    ValueError: the file is missing or holds anything else; ends with the remedy.
  """
  try:
    value = json.loads(read_text_limited(path))
  except FileNotFoundError:
    raise ValueError(f'{path} does not exist. {remedy}') from None
  # Objects that are nested too deeply end the parser of JSON with a RecursionError.
  except (OSError, ValueError, RecursionError) as error:
    raise ValueError(f'{path} cannot be read as JSON ({error}). {remedy}') from None
  if not isinstance(value, dict):
    raise ValueError(f'{path} must hold a JSON object, not {type(value).__name__}. {remedy}')
  return value


def write_object(path: Path, value: dict[str, Any]) -> None:
  """Writes a JSON object as transformers lays it out."""
  path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + '\n', encoding='utf-8')
