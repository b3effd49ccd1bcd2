"""LLaMA 2, 3, 3.1 and 3.2, and what is built like them."""

from __future__ import annotations

from typing import Any

from sink_jax.attention.spec import AttentionSpec
from sink_jax.models.config import ModelConfig
from sink_jax.pretrained import keys
from sink_jax.pretrained.rope import rope
from sink_jax.pretrained.stored_tensors import StoredTensor, block, linear, tied, vector

MODEL_TYPES = ('llama',)
PREFIX = 'model.'
IGNORED = (r'.*rotary_emb\.inv_freq',)


def model_config(hf: dict[str, Any]) -> ModelConfig:
  """The model that config.json describes.

  Raises:
    ValueError: a key is missing, or its value is not supported.
  """
  return llama_like(hf, biases=biases(hf))


def biases(hf: dict[str, Any]) -> tuple[str, ...]:
  """The groups of linear layers that have a bias, as `ModelConfig.biases` names them."""
  return attention_biases(hf) + (('ffn',) if keys.flag(hf, 'mlp_bias', False) else ())


def attention_biases(hf: dict[str, Any]) -> tuple[str, ...]:
  """Those of `biases` that are in attention: all of them or none."""
  return ('qkv', 'out') if keys.flag(hf, 'attention_bias', False) else ()


def llama_like(hf: dict[str, Any], *, kv_heads: int | None = None, head_dim: int | None = None,
               eps: float = 1e-6, **options: Any) -> ModelConfig:
  """The ModelConfig of a decoder with RMSNorm, rotary positions and SwiGLU.

  `pretraining_tp` is left unread: it splits matrix products and changes no result.

  Args:
    kv_heads, head_dim, eps: the family's defaults, where config.json has none.
    options: further fields of ModelConfig; `attention` replaces the rotary default.
  """
  keys.not_quantized(hf)
  keys.only(hf, 'hidden_act', 'silu', 'swish')
  heads = keys.size(hf, 'num_attention_heads')
  kv_heads = keys.optional_size(hf, 'num_key_value_heads', kv_heads)
  if 'attention' not in options:
    options['attention'] = AttentionSpec(position=rope(hf))
  return ModelConfig(
      layers=keys.size(hf, 'num_hidden_layers'), d_model=keys.size(hf, 'hidden_size'),
      # None, not the number, where keys are not shared: equal models have equal configs.
      heads=heads, kv_heads=None if kv_heads == heads else kv_heads,
      head_dim=keys.head_dim(hf, head_dim), ffn_hidden=keys.size(hf, 'intermediate_size'),
      vocab_size=keys.size(hf, 'vocab_size'), norm_eps=keys.number(hf, 'rms_norm_eps', eps),
      tied=keys.flag(hf, 'tie_word_embeddings', False), **options)


def stored_tensors(hf: dict[str, Any], config: ModelConfig) -> dict[str, StoredTensor]:
  """Every tensor of the checkpoint, by full name."""
  tensors = outside(config)
  for layer in range(config.layers):
    tensors |= attention(config, layer) | feed_forward(config, layer)
  return tensors


def outside(config: ModelConfig) -> dict[str, StoredTensor]:
  """The tensors outside of the blocks: embedding, last norm and unembedding."""
  table = (config.vocab_size, config.d_model)
  tensors = {'model.embed_tokens.weight': vector('embed', (), *table),
             'model.norm.weight': vector('final_norm/gain', (), config.d_model)}
  if config.tied:  # some files hold the embedding a second time, which must then be the same
    return tensors | {'lm_head.weight': tied(table, 'model.embed_tokens.weight')}
  return tensors | {'lm_head.weight': linear('unembed/kernel', (), table)}


def attention(config: ModelConfig, layer: int) -> dict[str, StoredTensor]:
  """The tensors of one layer's attention, and both norms of its block."""
  (path, i), dims, width = block(config, layer), config.dims, config.d_model
  inner, inner_kv = dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim
  name = f'model.layers.{layer}'
  tensors = {f'{name}.input_layernorm.weight': vector(f'{path}/norm1/gain', (i,), width),
             f'{name}.post_attention_layernorm.weight': vector(f'{path}/norm2/gain', (i,), width)}
  for ours, theirs, shape, group in (
      ('query', 'q', (inner, width), 'qkv'), ('key', 'k', (inner_kv, width), 'qkv'),
      ('value', 'v', (inner_kv, width), 'qkv'), ('out', 'o', (width, inner), 'out')):
    key = f'{name}.self_attn.{theirs}_proj'
    tensors[f'{key}.weight'] = linear(f'{path}/attention/{ours}/kernel', (i,), shape)
    # PyTorch has a bias per output, the first axis of a stored weight.
    if group in config.biases:
      tensors[f'{key}.bias'] = vector(f'{path}/attention/{ours}/bias', (i,), shape[0])
  return tensors


def feed_forward(config: ModelConfig, layer: int) -> dict[str, StoredTensor]:
  """The tensors of one layer's gated feed-forward network."""
  (path, i), width, hidden = block(config, layer), config.d_model, config.ffn_hidden
  tensors = {}
  for ours, theirs, shape in (('w1', 'gate', (hidden, width)), ('w2', 'up', (hidden, width)),
                              ('w_out', 'down', (width, hidden))):
    key = f'model.layers.{layer}.mlp.{theirs}_proj'
    tensors[f'{key}.weight'] = linear(f'{path}/ffn/{ours}/kernel', (i,), shape)
    if 'ffn' in config.biases:
      tensors[f'{key}.bias'] = vector(f'{path}/ffn/{ours}/bias', (i,), shape[0])
  return tensors
