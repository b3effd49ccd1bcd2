"""The supported architectures, by the `model_type` of config.json."""

from __future__ import annotations

from typing import Any

from sink_jax.arguments import check_known
from sink_jax.pretrained import gpt, jamba, llama, moe
from sink_jax.pretrained.stored_tensors import Family

FAMILIES = llama.FAMILIES | gpt.FAMILIES | moe.FAMILIES | jamba.FAMILIES


def family_for(hf: dict[str, Any]) -> Family:
  """How checkpoints of the architecture in config.json are read.

  Raises:
    ValueError: config.json names none, or one that is not supported; lists the choices.
  """
  name = str(hf.get('model_type'))
  check_known(name, sorted(FAMILIES), 'Unsupported model_type')
  return FAMILIES[name]
