"""Mixtral: Mistral with a mixture of experts in every block."""

from __future__ import annotations

from typing import Any

from sink_jax.attention.spec import AttentionSpec
from sink_jax.models.config import Experts, Layer, ModelConfig
from sink_jax.pretrained import keys, llama, windows
from sink_jax.pretrained.rope import rope
from sink_jax.pretrained.stored_tensors import LeafPart, StoredTensor, block, linear

MODEL_TYPES = ('mixtral',)
PREFIX = llama.PREFIX
IGNORED = llama.IGNORED


def model_config(hf: dict[str, Any]) -> ModelConfig:
  """The model that config.json describes.

  Left unread: what only training needs, such as the noise of the router.

  Raises:
    ValueError: a key is missing, or its value is not supported.
  """
  # The softmax over all experts, divided by its sum over the active ones, is that over these.
  experts = Experts(keys.size(hf, 'num_local_experts'), keys.size(hf, 'num_experts_per_tok'),
                    renormalize=True)
  spec = AttentionSpec(position=rope(hf, base=1e6), mask=windows.one_mask(hf, None))
  return llama.llama_like(hf, kv_heads=8, eps=1e-5, attention=spec,
                          pattern=(Layer(experts=experts),))


def stored_tensors(hf: dict[str, Any], config: ModelConfig) -> dict[str, StoredTensor]:
  """Every tensor of the checkpoint, by full name.

  Published files have one for every matrix of every expert. transformers 5 computes with the
  matrices of all experts of a layer in one tensor, gate above up, and saves those where it is
  told to (`save_pretrained(save_original_format=False)`).
  """
  tensors = llama.outside(config)
  for layer in range(config.layers):
    path, i = block(config, layer)
    tensors |= llama.attention(config, layer)
    tensors |= _experts(config, f'model.layers.{layer}', f'{path}/ffn', i)
  return tensors


def _experts(config: ModelConfig, name: str, path: str, i: int) -> dict[str, StoredTensor]:
  """The networks of a layer and their router, in both layouts."""
  experts = config.pattern[0].experts
  assert experts, 'every layer of this family has experts'
  count, width, hidden = experts.count, config.d_model, config.ffn_hidden
  router = linear(f'{path}/router/kernel', (i,), (count, width))
  apart = {f'{name}.block_sparse_moe.gate.weight': router}
  names: dict[str, list[str]] = {}  # of the tensors of a matrix, in the order of the experts
  for theirs, ours, shape in (('w1', 'w1', (hidden, width)), ('w3', 'w2', (hidden, width)),
                              ('w2', 'w_out', (width, hidden))):
    names[theirs] = [f'{name}.block_sparse_moe.experts.{e}.{theirs}.weight' for e in range(count)]
    apart |= {key: linear(f'{path}/{ours}/kernel', (i, e), shape)
              for e, key in enumerate(names[theirs])}
  gate = LeafPart(f'{path}/w1/kernel', (i,), lambda x: x[:, :hidden], transposed=True)
  up = LeafPart(f'{path}/w2/kernel', (i,), lambda x: x[:, hidden:], transposed=True)
  down = LeafPart(f'{path}/w_out/kernel', (i,), transposed=True)
  return apart | {
      f'{name}.mlp.gate.weight': StoredTensor(router.shape, router.parts, instead_of=tuple(
          key for key in apart if key.endswith('.gate.weight'))),
      f'{name}.mlp.experts.gate_up_proj': StoredTensor(
          (count, 2 * hidden, width), (gate, up), instead_of=(*names['w1'], *names['w3'])),
      f'{name}.mlp.experts.down_proj': StoredTensor(
          (count, width, hidden), (down,), instead_of=tuple(names['w2']))}
