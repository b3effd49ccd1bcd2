"""LLaMA, and the families that are built like it.

A family is a function from config.json to the model, a row of `FAMILIES` and, if its tensors differ
from those of `table`, a function that changes this table.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from sink_jax.attention.extra_key_value import SinkLogit
from sink_jax.attention.head import ElementGate, HeadGate, PlainOutput
from sink_jax.attention.mask import Causal, Mask
from sink_jax.attention.position import Nope, Position
from sink_jax.attention.per_token import NoQKNorm, ProjectionQKNorm, QKNorm
from sink_jax.attention.similarity import CappedExp, Exp
from sink_jax.attention.spec import AttentionSpec
from sink_jax.models.config import ModelConfig
from sink_jax.pretrained import config_keys as keys
from sink_jax.pretrained.config_keys import Json, take
from sink_jax.pretrained.stored_tensors import (
  FREQUENCIES,
  Family,
  LeafPart,
  StoredTensor,
  Table,
  Take,
  beside,
  block,
  embeddings,
  folded,
  linears,
  vector,
)

# Norms of a block by `ModelConfig.norm_location`: their names in files, and ours.
_NORMS = {
  'pre': {'input_layernorm': 'norm1', 'post_attention_layernorm': 'norm2'},
  'after': {'post_attention_layernorm': 'norm1_after', 'post_feedforward_layernorm': 'norm2_after'},
  'sandwich': {
    'input_layernorm': 'norm1',
    'post_attention_layernorm': 'norm1_after',
    'pre_feedforward_layernorm': 'norm2',
    'post_feedforward_layernorm': 'norm2_after',
  },
}
_GATES = {'headwise_attn_output_gate': HeadGate(), 'elementwise_attn_output_gate': ElementGate()}
# Gemma 3's defaults, which published files of the type 'gemma3' leave out.
_GEMMA3 = {
  'vocab_size': 262208,
  'hidden_size': 2304,
  'intermediate_size': 9216,
  'num_hidden_layers': 26,
  'num_attention_heads': 8,
}


def llama_like(
  hf: Json,
  *,
  kv_heads: int | None = None,
  head_size: int | None = None,
  eps: float = 1e-6,
  tied: bool = False,
  activation: tuple[str, ...] = ('hidden_act', 'silu', 'swish'),
  **options: Any,
) -> ModelConfig:
  """The ModelConfig of a decoder with RMSNorm, rotary positions and SwiGLU.

  `pretraining_tp` is left unread: it splits matrix products and changes no result.

  Args:
    kv_heads, head_size, eps, tied: the family's defaults, where config.json has none.
    activation: the key of the activation, and its values that are supported.
    options: further fields of ModelConfig; `attention` replaces the rotary default.

  The norm's epsilon is `rms_norm_eps`, and `eps` where config.json has none: a family with another
  key passes `eps=take(hf, 'layer_norm_eps', float, 1e-5)`.
  """
  keys.check_not_quantized(hf)
  take(hf, activation[0], activation[1:])
  heads, kv_heads = (
    take(hf, 'num_attention_heads', int),
    take(hf, 'num_key_value_heads', int, kv_heads),
  )
  if 'attention' not in options:
    options['attention'] = AttentionSpec(position=keys.rope(hf))
  return ModelConfig(
    layers=take(hf, 'num_hidden_layers', int),
    d_model=take(hf, 'hidden_size', int),
    # None, not the number, where keys are not shared: equal models have equal configs.
    heads=heads,
    kv_heads=None if kv_heads == heads else kv_heads,
    head_dim=keys.head_dim(hf, head_size),
    ffn_hidden=take(hf, 'intermediate_size', int),
    vocab_size=take(hf, 'vocab_size', int),
    norm_eps=take(hf, 'rms_norm_eps', float, eps),
    tied=take(hf, 'tie_word_embeddings', bool, tied),
    **options,
  )


def table(hf: Json, config: ModelConfig) -> Table:
  """Every tensor of a model like LLaMA, by full name, except experts."""
  dims, width, hidden, spec = config.dims, config.d_model, config.ffn_hidden, config.attention
  inner, inner_kv = dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim
  tensors = embeddings(config, 'model.embed_tokens.weight') | {
    'model.norm.weight': vector('final_norm/gain', (), width)
  }
  for layer in range(config.layers):
    (path, i), name = block(config, layer), f'model.layers.{layer}'
    attention, ours = f'{name}.self_attn', f'{path}/attention'
    tensors |= {
      f'{name}.{norm}.weight': vector(f'{path}/{leaf}/gain', (i,), width)
      for norm, leaf in _NORMS[config.norm_location].items()
    }
    tensors |= linears(
      attention,
      ours,
      (i,),
      (
        ('q_proj', 'query', (inner, width)),
        ('k_proj', 'key', (inner_kv, width)),
        ('v_proj', 'value', (inner_kv, width)),
      ),
      'qkv' in config.biases,
    )
    tensors |= linears(
      attention, ours, (i,), [('o_proj', 'out', (width, inner))], 'out' in config.biases
    )
    for q, query, heads in (('q', 'query', dims.heads), ('k', 'key', dims.kv_heads)):
      norm, leaf = f'{attention}.{q}_norm.weight', f'{ours}/qk_norm_{query}_gain'
      if isinstance(spec.qk_norm, ProjectionQKNorm):
        # One vector in the file, head after head.
        tensors[norm] = StoredTensor(
          (heads * dims.head_dim,), (LeafPart(leaf, (i,), lambda x: x.reshape(-1, dims.head_dim)),)
        )
      elif isinstance(spec.qk_norm, QKNorm):
        tensors[norm] = vector(leaf, (i,), dims.head_dim)
    if spec.kv_bias == SinkLogit():
      tensors[f'{attention}.sinks'] = vector(f'{ours}/kv_bias_logit', (i,), dims.heads)
    if not config.blocks[layer].experts:
      tensors |= linears(
        f'{name}.mlp',
        f'{path}/ffn',
        (i,),
        (
          ('gate_proj', 'w1', (hidden, width)),
          ('up_proj', 'w2', (hidden, width)),
          ('down_proj', 'w_out', (width, hidden)),
        ),
        'ffn' in config.biases,
      )
  return tensors


def attention_biases(hf: Json) -> tuple[str, ...]:
  """The linear layers of attention that have a bias: all of them or none."""
  return ('qkv', 'out') if take(hf, 'attention_bias', bool, False) else ()


def _biases(hf: Json) -> tuple[str, ...]:
  return attention_biases(hf) + (('ffn',) if take(hf, 'mlp_bias', bool, False) else ())


def llama(hf: Json) -> ModelConfig:
  """LLaMA 2, 3, 3.1 and 3.2."""
  return llama_like(hf, biases=_biases(hf))


def mistral(hf: Json) -> ModelConfig:
  """LLaMA with a sliding window."""
  return llama_like(
    hf, kv_heads=8, attention=AttentionSpec(position=keys.rope(hf), mask=keys.one_mask(hf, 4096))
  )


def phi3(hf: Json) -> ModelConfig:
  """Phi-3 and Phi-4 of short contexts: LLaMA with fused projections, windows, partial rotations."""
  for key in ('rope_type', 'type'):
    # Older files of the family call LongRoPE 'su' or 'yarn'.
    take(
      keys.rotary_parameters(hf),
      key,
      ('default',),
      why='LongRoPE has angles that depend on the length '
      'of the input; models with a context of 4k or 8k do not use it',
    )
  return llama_like(
    hf,
    eps=1e-5,
    attention=AttentionSpec(position=keys.rope(hf, fraction=1.0), mask=keys.one_mask(hf, None)),
  )


def _phi3_tensors(hf: Json, config: ModelConfig) -> Table:
  tensors = table(hf, config)
  for layer in range(config.layers):
    name = f'model.layers.{layer}'
    for fused, parts in (
      ('self_attn.qkv', ('self_attn.q', 'self_attn.k', 'self_attn.v')),
      ('mlp.gate_up', ('mlp.gate', 'mlp.up')),
    ):
      tensors[f'{name}.{fused}_proj.weight'] = beside(
        *(tensors.pop(f'{name}.{part}_proj.weight') for part in parts)
      )
  return tensors


def _blocks_of_qwen(hf: Json, **components: Any) -> dict[str, Any]:
  """A window from one layer on, if there is any."""
  window, first = take(hf, 'sliding_window', int, 4096), take(hf, 'max_window_layers', float, 28)
  window = window if take(hf, 'use_sliding_window', bool, False) else None
  masks = keys.masks(hf, lambda i: window is not None and i >= first, window)
  return keys.blocks(masks, keys.rope(hf), **components)


def qwen2(hf: Json) -> ModelConfig:
  """Qwen2 and Qwen2.5: LLaMA with biases on queries, keys and values."""
  return llama_like(hf, kv_heads=32, biases=('qkv',), **_blocks_of_qwen(hf))


def qwen3(hf: Json) -> ModelConfig:
  """Qwen3: LLaMA with normalised queries and keys; `mlp_bias` is not a key of this family.

  The gated models of Qiu et al. 2025 (arXiv 2505.06708) have the same model_type and two keys more,
  which transformers does not read; the layout is from their code (qiuzh20/gated_attention,
  modeling_qwen3.py).
  """
  take(hf, 'use_qk_norm', (True,))
  given = [key for key in _GATES if take(hf, key, bool, False)]
  if len(given) == 2:
    raise keys.unsupported(given[1], True, f'{given[0]} is true as well, and a head has one gate')
  head = _GATES[given[0]] if given else PlainOutput()
  for key in ('qkv_bias', 'attention_bias') if given else ():
    take(hf, key, (False,), why='the gates would share it')
  norm = QKNorm(eps=take(hf, 'rms_norm_eps', float, 1e-6))
  return llama_like(
    hf,
    kv_heads=32,
    head_size=128,
    biases=attention_biases(hf),
    **_blocks_of_qwen(hf, qk_norm=norm, head=head),
  )


def _qwen3_tensors(hf: Json, config: ModelConfig) -> Table:
  """The projection of queries also gives gates: for each key head, its queries and their gates."""
  tensors, dims, head = table(hf, config), config.dims, config.attention.head
  if head == PlainOutput():
    return tensors
  group = dims.heads // dims.kv_heads * dims.head_dim  # rows of the queries of one key head
  shape = (dims.heads * dims.head_dim + head.params(dims)['kernel'].shape[1], config.d_model)

  def rows(part: slice) -> Take:
    return lambda x: x.reshape(dims.kv_heads, -1, config.d_model)[:, part].reshape(
      -1, config.d_model
    )

  for layer in range(config.layers):
    path, i = block(config, layer)
    tensors[f'model.layers.{layer}.self_attn.q_proj.weight'] = StoredTensor(
      shape,
      (
        LeafPart(f'{path}/attention/query/kernel', (i,), rows(slice(group)), transposed=True),
        LeafPart(f'{path}/attention/head_kernel', (i,), rows(slice(group, None)), transposed=True),
      ),
    )
  return tensors


def _gemma(hf: Json, **options: Any) -> ModelConfig:
  """Gemma 2 and 3; `hidden_act`, which older files have, is left unread."""
  take(hf, 'use_bidirectional_attention', (False,))
  take(hf, 'query_pre_attn_scalar', float, 256, above=0)
  return llama_like(
    hf,
    kv_heads=4,
    head_size=256,
    tied=True,
    activation=('hidden_activation', 'gelu_pytorch_tanh'),
    ffn='tanh_geglu',
    norm_location='sandwich',
    biases=attention_biases(hf),
    **options,
  )


def _cap(hf: Json, key: str, default: float | None) -> float:
  """A soft cap: the default if the key is missing, and 0 (no cap) if it is null."""
  return 0.0 if hf.get(key, default) is None else take(hf, key, float, default, above=0)


def gemma2(hf: Json) -> ModelConfig:
  """Gemma 2: LLaMA with soft caps, norms around sub-layers, and windows in every second block."""
  limit = _cap(hf, 'attn_logit_softcapping', 50.0)
  masks = keys.masks(hf, lambda i: i % 2 == 0, take(hf, 'sliding_window', int, 4096))
  return _gemma(
    hf,
    logit_cap=_cap(hf, 'final_logit_softcapping', 30.0),
    **keys.blocks(masks, keys.rope(hf), similarity=CappedExp(cap=limit) if limit else Exp()),
  )


def gemma3(hf: Json) -> ModelConfig:
  """Gemma 3: QK-norm instead of soft caps, and windows in five of six blocks.

  Blocks with a window have another rotary base. Only the language model is read; a checkpoint of
  the type 'gemma3', which sees images as well, has it under other names.
  """
  hf = _of_text(hf)
  take(hf, 'attn_logit_softcapping', (None,))
  every = take(hf, 'sliding_window_pattern', int, 6) or 6
  masks = keys.masks(hf, lambda i: (i + 1) % every != 0, take(hf, 'sliding_window', int, 4096))
  full, sliding = keys.rope_by_kind(
    hf, take(hf, 'rope_theta', float, 1e6), take(hf, 'rope_local_base_freq', float, 1e4)
  )
  return _gemma(
    hf,
    logit_cap=_cap(hf, 'final_logit_softcapping', None),
    **keys.blocks(
      masks,
      [sliding if mask.window else full for mask in masks],
      qk_norm=QKNorm(eps=take(hf, 'rms_norm_eps', float, 1e-6)),
    ),
  )


def _of_text(hf: Json) -> Json:
  """The part of config.json about the language model, with the family's defaults."""
  if hf['model_type'] != 'gemma3':
    return _GEMMA3 | hf
  text = hf.get('text_config', {})
  if not isinstance(text, dict):
    raise keys.unsupported('text_config', text, 'it must be an object')
  keys.check_not_quantized(hf)
  tied = take(hf, 'tie_word_embeddings', bool, take(text, 'tie_word_embeddings', bool, True))
  return _GEMMA3 | text | {'tie_word_embeddings': tied}


def _gemma_tensors(hf: Json, config: ModelConfig) -> Table:
  """Folds constants into weights: embeddings times sqrt(D), gains plus one, the scale of scores."""
  embedding = math.sqrt(config.d_model)
  scores = math.sqrt(config.dims.head_dim / take(hf, 'query_pre_attn_scalar', float, 256))
  # QK-norm would cancel a factor on the weights of queries, so the scale goes into its gain.
  queries = 'q_proj' if config.attention.qk_norm == NoQKNorm() else 'q_norm'
  # A tied unembedding is the scaled embedding, but logits are not scaled: the last gain undoes it.
  last = 1 / embedding if config.tied else 1.0
  return folded(
    table(hf, config), {'embed_tokens': embedding, 'model.norm': last, queries: scores}, plus=1
  )


def _gemma3_tensors(hf: Json, config: ModelConfig) -> Table:
  tensors = _gemma_tensors(_of_text(hf), config)
  if hf['model_type'] != 'gemma3':
    return tensors
  # Published files have the first names, transformers 5 writes the second ones on request.
  older = {name: f'language_model.{name}' for name in tensors}
  newer = {name: name.replace('model.', 'model.language_model.', 1) for name in tensors}
  return {
    names[name]: dataclasses.replace(
      tensor,
      copy_of=names.get(tensor.copy_of, ''),
      instead_of=(older[name],) if names is newer else (),
    )
    for names in (older, newer)
    for name, tensor in tensors.items()
  }


def granite(hf: Json) -> ModelConfig:
  """LLaMA with four multipliers, which are folded into the weights."""
  _multipliers(hf)
  return llama(hf)


def _multipliers(hf: Json) -> list[float]:
  return [
    take(hf, key, float, 1.0, above=0)
    for key in (
      'embedding_multiplier',
      'attention_multiplier',
      'residual_multiplier',
      'logits_scaling',
    )
  ]


def granite_swa(hf: Json) -> ModelConfig:
  """Granite with sink logits, windows, and a rotary base of each block; 0: no positions there."""
  _multipliers(hf)
  masks = keys.masks(hf, lambda i: i % 4 != 0, take(hf, 'sliding_window', int, 128))
  common, bases = keys.rope(hf), hf.get('layer_rope_theta')
  bases = [common.base] * len(masks) if bases is None else bases
  if (
    not isinstance(bases, list)
    or len(bases) != len(masks)
    or not all(type(base) in (int, float) and 0 <= base < 1e300 for base in bases)
  ):
    raise keys.unsupported(
      'layer_rope_theta', bases, f'it must list {len(masks)} bases, 0 for none'
    )
  positions = [dataclasses.replace(common, base=float(base)) if base else Nope() for base in bases]
  return llama_like(
    hf,
    kv_heads=4,
    eps=1e-5,
    tied=True,
    biases=_biases(hf),
    **keys.blocks(masks, positions, kv_bias=SinkLogit()),
  )


def _granite_tensors(hf: Json, config: ModelConfig) -> Table:
  embedding, scores, residual, logits = _multipliers(hf)
  return folded(
    table(hf, config),
    {
      'embed_tokens': embedding,
      'o_proj': residual,
      'down_proj': residual,
      # Scores are multiplied by `scores`, and not by the 1/sqrt(Dh) of the model.
      'q_proj': scores * math.sqrt(config.dims.head_dim),
      # Logits are divided by `logits`; a tied unembedding is the scaled embedding, which is undone,
      # too.
      'model.norm': 1 / (logits * embedding) if config.tied else 1 / logits,
    },
  )


def olmo2(hf: Json) -> ModelConfig:
  """OLMo 2: LLaMA with norms after the sub-layers, and QK-norm over all heads of a token."""
  return _olmo(hf, [Causal()], keys.rope(hf))


def _olmo(hf: Json, masks: Sequence[Mask], positions: Position | Sequence[Position]) -> ModelConfig:
  take(hf, 'clip_qkv', (None,))  # a key of the first OLMo
  norm = ProjectionQKNorm(eps=take(hf, 'rms_norm_eps', float, 1e-5))
  return llama_like(
    hf,
    eps=1e-5,
    norm_location='after',
    biases=attention_biases(hf),
    **keys.blocks(masks, positions, qk_norm=norm),
  )


def olmo3(hf: Json) -> ModelConfig:
  """OLMo 3: OLMo 2 with windows in three of four blocks, where rotary positions are not scaled."""
  masks = keys.masks(hf, lambda i: (i + 1) % 4 != 0, take(hf, 'sliding_window', int, 4096))
  # In the old form transformers uses the default base in blocks with a window for any rope_theta.
  base = float(take(hf, 'rope_theta', (500000, 500000.0)))
  full, sliding = keys.rope_by_kind(hf, base, base)
  return _olmo(hf, masks, [sliding if mask.window else full for mask in masks])


def smollm3(hf: Json) -> ModelConfig:
  """SmolLM3: LLaMA without positions in every fourth block, or where its list has a 0."""
  layers, rotated = take(hf, 'num_hidden_layers', int), hf.get('no_rope_layers')
  every = take(hf, 'no_rope_layer_interval', int, 4) or 4
  rotated = [int((i + 1) % every != 0) for i in range(layers)] if rotated is None else rotated
  if (
    not isinstance(rotated, list) or len(rotated) != layers or any(x not in (0, 1) for x in rotated)
  ):
    raise keys.unsupported(
      'no_rope_layers', rotated, f'it must list 0 or 1 for each of {layers} layers'
    )
  window = take(hf, 'sliding_window', int, None)
  window = window if take(hf, 'use_sliding_window', bool, False) else None
  masks = keys.masks(hf, lambda i: window is not None and not rotated[i], window)
  position = keys.rope(hf, base=2e6)
  return llama_like(
    hf,
    kv_heads=4,
    tied=True,
    biases=_biases(hf),
    **keys.blocks(masks, [position if x else Nope() for x in rotated]),
  )


FAMILIES = {
  family.__name__: Family(family, tensors)
  for family, tensors in (
    (llama, table),
    (mistral, table),
    (phi3, _phi3_tensors),
    (qwen2, table),
    (qwen3, _qwen3_tensors),
    (gemma2, _gemma_tensors),
    (granite, _granite_tensors),
    (granite_swa, _granite_tensors),
    (olmo2, table),
    (olmo3, table),
    (smollm3, table),
  )
}
FAMILIES |= dict.fromkeys(
  ('gemma3', 'gemma3_text'),
  Family(
    gemma3,
    _gemma3_tensors,
    ignored=(FREQUENCIES + r'|(model\.)?(vision_tower|multi_modal_projector)\..*'),
  ),
)
