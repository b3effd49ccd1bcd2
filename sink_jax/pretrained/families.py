"""The supported architectures, by the `model_type` of config.json."""

from __future__ import annotations

from typing import Any, Protocol

from sink_jax.models.config import ModelConfig
from sink_jax.pretrained import (
  falcon,
  gemma2,
  gemma3,
  gpt2,
  gpt_neox,
  gpt_oss,
  granite,
  granite_swa,
  jamba,
  llama,
  mistral,
  mixtral,
  olmo2,
  olmo3,
  opt,
  phi3,
  qwen2,
  qwen3,
  smollm3,
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


_MODULES: tuple[Family, ...] = (
    falcon, gemma2, gemma3, gpt2, gpt_neox, gpt_oss, granite, granite_swa, jamba, llama, mistral,
    mixtral, olmo2, olmo3, opt, phi3, qwen2, qwen3, smollm3)
FAMILIES: dict[str, Family] = {
    model_type: family for family in _MODULES for model_type in family.MODEL_TYPES}
# Popular architectures that are not read: {model_type: (what sets it apart from the families above,
# the nearest of them)}. One that becomes a family leaves the table.
NOT_READ = {
    'bloom': ('its embeddings go through a norm', 'falcon'),
    'cohere': ('it rotates pairs of neighbouring channels, and its norms have no bias', 'falcon'),
    'deepseek_v3': ('its keys and values are projected from a shared latent vector', 'mixtral'),
    'gemma': ('its sub-layers have one norm each, and its logits no cap', 'gemma2'),
    'llama4': ('it attends within chunks, with a temperature by position', 'llama'),
    'mamba': ('it has no attention, so there are no sinks to look for', 'jamba'),
    'phi': ('its two parallel parts share a norm, and its unembedding has a bias', 'gpt_neox'),
    'qwen3_moe': ('it has both QK-norm and experts, these with a size of their own', 'qwen3'),
    'qwen3_next': ('three of four blocks are a linear recurrence', 'qwen3'),
    'starcoder2': ('it has grouped heads and windows with LayerNorm and biases', 'gpt_neox'),
}


def family_for(hf: dict[str, Any]) -> Family:
  """The module that reads checkpoints of the architecture in config.json.

  Raises:
    ValueError: config.json names none, or one that is not supported; lists the choices, and of a
      popular architecture says what it has and which is nearest.
  """
  name = hf.get('model_type')
  if name is None:
    raise ValueError('config.json has no model_type, which says what architecture it is. '
                     f'Supported: {", ".join(sorted(FAMILIES))}.')
  if name == 'sink_jax':  # of `export --as=custom`, for which transformers has the code beside it
    raise ValueError('config.json: this is a run of sink_jax, exported with --as=custom for other '
                     'programs. Load the run itself: load_run, or --workdir in place of '
                     '--checkpoint.')
  if not isinstance(name, str) or name not in FAMILIES:
    # 'llama4_text' is the language model of a 'llama4' that sees images as well.
    known = NOT_READ.get(name.removesuffix('_text')) if isinstance(name, str) else None
    reason = f': {known[0]}. The nearest that is: {known[1]}' if known else ''
    raise ValueError(f'config.json: model_type = {name!r} is not supported{reason}. Supported: '
                     f'{", ".join(sorted(FAMILIES))}.')
  return FAMILIES[name]
