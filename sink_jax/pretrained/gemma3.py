"""Gemma 3: Gemma 2 with QK-norm in place of soft caps, and windows in five of six blocks.

Blocks with a window have a rotary base of their own. Read is the language model; a checkpoint of
the type 'gemma3', which sees images as well, has it under names of its own.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from sink_jax.attention.position import Position
from sink_jax.attention.per_token import QKNorm
from sink_jax.attention.spec import AttentionSpec
from sink_jax.models.config import ModelConfig
from sink_jax.pretrained import gemma2, keys, llama, windows
from sink_jax.pretrained.rope import rope
from sink_jax.pretrained.stored_tensors import StoredTensor, block, vector

MODEL_TYPES = ('gemma3_text', 'gemma3')
PREFIX = llama.PREFIX
IGNORED = (*llama.IGNORED, r'(model\.)?(vision_tower|multi_modal_projector)\..*')
# The family's, which published files of the type 'gemma3' leave out.
_DEFAULTS = {'vocab_size': 262208, 'hidden_size': 2304, 'intermediate_size': 9216,
             'num_hidden_layers': 26, 'num_attention_heads': 8, 'tie_word_embeddings': True}


def model_config(hf: dict[str, Any]) -> ModelConfig:
  """The model that config.json describes.

  Raises:
    ValueError: a key is missing, or its value is not supported.
  """
  hf = _of_text(hf)
  keys.only(hf, 'use_bidirectional_attention', False)
  keys.only(hf, 'hidden_activation', 'gelu_pytorch_tanh')
  keys.only(hf, 'attn_logit_softcapping', None)
  if not keys.number(hf, 'query_pre_attn_scalar', 256) > 0:
    raise keys.refused('query_pre_attn_scalar', hf['query_pre_attn_scalar'], 'it must be above 0')
  layers, every = keys.size(hf, 'num_hidden_layers'), 6
  if hf.get('sliding_window_pattern') is not None:
    every = keys.size(hf, 'sliding_window_pattern')
  kinds = ['sliding_attention' if (i + 1) % every else 'full_attention' for i in range(layers)]
  masks = windows.masks(hf, kinds, keys.optional_size(hf, 'sliding_window', 4096))
  mask, position, pattern = windows.patterned(layers, masks, _positions(hf))
  spec = AttentionSpec(position=position, mask=mask,
                       qk_norm=QKNorm(eps=keys.number(hf, 'rms_norm_eps', 1e-6)))
  return llama.llama_like(
      hf | {'hidden_act': None}, kv_heads=4, head_dim=256, attention=spec, pattern=pattern,
      norm_location='sandwich', ffn='tanh_geglu', biases=llama.attention_biases(hf),
      logit_cap=gemma2.cap(hf, 'final_logit_softcapping', None))


def _of_text(hf: dict[str, Any]) -> dict[str, Any]:
  """The part of config.json about the language model, with the family's defaults."""
  if hf['model_type'] != 'gemma3':
    return _DEFAULTS | hf
  text = hf.get('text_config', {})
  if not isinstance(text, dict):
    raise keys.refused('text_config', text, 'it must be an object')
  keys.not_quantized(hf)
  tied = keys.flag(hf, 'tie_word_embeddings', keys.flag(text, 'tie_word_embeddings', True))
  return _DEFAULTS | text | {'tie_word_embeddings': tied}


def _positions(hf: dict[str, Any]) -> windows.PositionOf:
  """The encoding of each kind of block: global ones are scaled, those of windows are not."""
  full = keys.number(hf, 'rope_theta', 1e6)
  sliding = keys.number(hf, 'rope_local_base_freq', 1e4)
  if hf.get('rope_parameters') is not None:
    return windows.positions_by_kind(hf, full, sliding)
  by_kind: dict[bool, Position] = {False: rope(hf, base=full), True: rope({'rope_theta': sliding})}
  return lambda slides: by_kind[slides]


def stored_tensors(hf: dict[str, Any], config: ModelConfig) -> dict[str, StoredTensor]:
  """Every tensor of the checkpoint, by full name."""
  text = _of_text(hf)
  table = gemma2.scaled(llama.stored_tensors(text, config), config)
  # QK-norm takes a factor on the weights of queries away, so the scale of the scores, which is
  # sqrt(Dh) here, goes into its gain.
  scores = math.sqrt(config.dims.head_dim / keys.number(text, 'query_pre_attn_scalar', 256))
  for layer in range(config.layers):
    path, i = block(config, layer)
    for ours, theirs, factor in (('query', 'q', scores), ('key', 'k', 1.0)):
      gain = vector(f'{path}/attention/qk_norm_{ours}_gain', (i,), config.dims.head_dim)
      table[f'model.layers.{layer}.self_attn.{theirs}_norm.weight'] = gemma2.changed(
          gain, factor, plus=1)
  if hf['model_type'] != 'gemma3':
    return table
  # Published files have the first names, transformers 5 writes the second ones where it is told to.
  older = {name: f'language_model.{name}' for name in table}
  newer = {name: name.replace('model.', 'model.language_model.', 1) for name in table}
  return {names[name]: dataclasses.replace(
      tensor, copy_of=names.get(tensor.copy_of, ''),
      instead_of=(older[name],) if names is newer else ())
          for names in (older, newer) for name, tensor in table.items()}
