"""The supported architectures, by the `model_type` of config.json."""

from __future__ import annotations

from types import ModuleType

from sink_jax.pretrained import gpt2, gpt_neox, gpt_oss, jamba, llama, mistral, opt, qwen3

FAMILIES: dict[str, ModuleType] = {
    model_type: family for family in (gpt2, gpt_neox, gpt_oss, jamba, llama, mistral, opt, qwen3)
    for model_type in family.MODEL_TYPES}


def family(hf: dict) -> ModuleType:
  """The module that reads checkpoints of this architecture.

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
