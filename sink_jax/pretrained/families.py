"""The supported architectures, by the `model_type` of config.json."""

from __future__ import annotations

from typing import Any, Protocol

from sink_jax.models.config import ModelConfig
from sink_jax.pretrained import (
  falcon,
  gpt2,
  gpt_neox,
  gpt_oss,
  granite,
  granite_swa,
  jamba,
  llama,
  mistral,
  mixtral,
  opt,
  phi3,
  qwen2,
  qwen3,
)
from sink_jax.pretrained.stored_tensors import StoredTensor


class Family(Protocol):
  """What the module of a family defines; a new family is one module with these names.

  MODEL_TYPES: the values of `model_type` that it reads.
  PREFIX: of the names of tensors, which a checkpoint of the bare model, without its head, lacks.
  IGNORED: patterns of whole names of tensors that hold no parameters, such as causal masks.
  """

  # Properties, as nothing assigns to them: a module's tuple of two literals is a tuple of strings.
  @property
  def MODEL_TYPES(self) -> tuple[str, ...]: ...

  @property
  def PREFIX(self) -> str: ...

  @property
  def IGNORED(self) -> tuple[str, ...]: ...

  def model_config(self, hf: dict[str, Any]) -> ModelConfig:
    """The model that config.json describes.

    Raises:
      ValueError: a key is missing, or its value is not supported; names both.
    """
    ...

  def stored_tensors(self, hf: dict[str, Any], config: ModelConfig) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint, by full name."""
    ...


_MODULES: tuple[Family, ...] = (falcon, gpt2, gpt_neox, gpt_oss, granite, granite_swa, jamba, llama,
                               mistral, mixtral, opt, phi3, qwen2, qwen3)
FAMILIES: dict[str, Family] = {
    model_type: family for family in _MODULES for model_type in family.MODEL_TYPES}


def family_for(hf: dict[str, Any]) -> Family:
  """The module that reads checkpoints of the architecture in config.json.

  Raises:
    ValueError: config.json names none, or one that is not supported; lists the choices.
  """
  name = hf.get('model_type')
  if name is None:
    raise ValueError('config.json has no model_type, which says what architecture it is. '
                     f'Supported: {", ".join(sorted(FAMILIES))}.')
  if not isinstance(name, str) or name not in FAMILIES:
    raise ValueError(f'config.json: model_type = {name!r} is not supported. Supported: '
                     f'{", ".join(sorted(FAMILIES))}.')
  return FAMILIES[name]
