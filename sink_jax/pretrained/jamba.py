"""Jamba: Mamba and attention blocks, some with a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable

from sink_jax.attention.position import Nope
from sink_jax.attention.spec import AttentionSpec
from sink_jax.models.config import Experts, Layer, Mamba, ModelConfig
from sink_jax.pretrained import config_keys as keys
from sink_jax.pretrained import stored_tensors as stored
from sink_jax.pretrained.config_keys import Json, take
from sink_jax.pretrained.stored_tensors import Table, linear, linears, vector


def jamba(hf: Json) -> ModelConfig:
  """Jamba; keys about kernels, and keys that only training or a cache needs, are left unread."""
  keys.check_not_quantized(hf)
  take(hf, 'hidden_act', ('silu', 'swish'))
  take(hf, 'mamba_inner_layernorms', (True,))
  take(hf, 'sliding_window', (None,), why='attention here sees all tokens')
  layers, width = take(hf, 'num_hidden_layers', int), take(hf, 'hidden_size', int)
  experts = (
    Experts(take(hf, 'num_experts', int), take(hf, 'num_experts_per_tok', int))
    if (take(hf, 'num_experts', int) > 1)
    else None
  )
  rank = None if hf.get('mamba_dt_rank') == 'auto' else take(hf, 'mamba_dt_rank', int, None)
  mamba = Mamba(
    inner=take(hf, 'mamba_expand', int) * width,
    state=take(hf, 'mamba_d_state', int),
    conv=take(hf, 'mamba_d_conv', int),
    rank=rank or -(-width // 16),  # ceil(hidden_size / 16), as in transformers
  )
  # Attention and experts recur with independent periods; the pattern is their common period.
  attention, mixture = _layers(hf, 'attn', 8, 4), _layers(hf, 'expert', 2, 1)
  return ModelConfig(
    layers=layers,
    d_model=width,
    heads=take(hf, 'num_attention_heads', int),
    kv_heads=take(hf, 'num_key_value_heads', int, 8),
    head_dim=keys.head_dim(hf),
    ffn_hidden=take(hf, 'intermediate_size', int),
    vocab_size=take(hf, 'vocab_size', int),
    attention=AttentionSpec(position=Nope()),
    norm_eps=take(hf, 'rms_norm_eps', float, 1e-6),
    pattern=keys.shortest_period(
      [
        Layer(
          mamba=None if attention(layer) else mamba, experts=experts if mixture(layer) else None
        )
        for layer in range(layers)
      ]
    ),
    biases=('mamba',) if take(hf, 'mamba_proj_bias', bool, False) else (),
    tied=take(hf, 'tie_word_embeddings', bool, False),
  )


def _layers(hf: Json, kind: str, period: int, offset: int) -> Callable[[int], bool]:
  """Tells which layers have attention or experts, once in a period; with the family's defaults."""
  period, key = take(hf, f'{kind}_layer_period', int, period), f'{kind}_layer_offset'
  offset = take({key: offset} | hf, key, tuple(range(period)))
  return lambda layer: layer % period == offset


def _tensors(hf: Json, config: ModelConfig) -> Table:
  width, hidden, dims = config.d_model, config.ffn_hidden, config.dims
  inner, inner_kv = dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim
  tensors = stored.embeddings(config, 'model.embed_tokens.weight') | {
    'model.final_layernorm.weight': vector('final_norm/gain', (), width)
  }
  for layer in range(config.layers):
    (path, i), name = stored.block(config, layer), f'model.layers.{layer}'
    # Tensor names count layers through, the pattern counts within a period.
    kind = config.blocks[layer]
    for theirs, ours in (('input_layernorm', 'norm1'), ('pre_ff_layernorm', 'norm2')):
      tensors[f'{name}.{theirs}.weight'] = vector(f'{path}/{ours}/gain', (i,), width)
    if kind.mamba:
      tensors |= _mixer(hf, config, kind.mamba, f'{name}.mamba', f'{path}/mamba', i)
    else:
      tensors |= linears(
        f'{name}.self_attn',
        f'{path}/attention',
        (i,),
        (
          ('q_proj', 'query', (inner, width)),
          ('k_proj', 'key', (inner_kv, width)),
          ('v_proj', 'value', (inner_kv, width)),
          ('o_proj', 'out', (width, inner)),
        ),
      )
    matrices = (
      ('gate_proj', 'w1', (hidden, width)),
      ('up_proj', 'w2', (hidden, width)),
      ('down_proj', 'w_out', (width, hidden)),
    )
    network, ours = f'{name}.feed_forward', f'{path}/ffn'
    if not kind.experts:
      tensors |= linears(network, ours, (i,), matrices)
      continue
    tensors[f'{network}.router.weight'] = linear(
      f'{ours}/router/kernel', (i,), (kind.experts.count, width)
    )
    # A tensor per expert; the leaf stacks experts behind layers.
    for e in range(kind.experts.count):
      tensors |= linears(f'{network}.experts.{e}', ours, (i, e), matrices)
  return tensors


def _mixer(hf: Json, config: ModelConfig, sizes: Mamba, name: str, path: str, i: int) -> Table:
  """The tensors of a Mamba mixer; the convolution's kernel is (inner, 1, taps) in the file."""
  width, inner, state, rank = config.d_model, sizes.inner, sizes.state, sizes.rank
  # A depthwise convolution of PyTorch has one input per channel: the axis of length 1.
  taps = stored.LeafPart(f'{path}/conv/kernel', (i,), lambda x: x[:, 0], transposed=True)
  return {
    **linears(
      name,
      path,
      (i,),
      (('in_proj', 'in', (2 * inner, width)), ('out_proj', 'out', (width, inner))),
      'mamba' in config.biases,
    ),
    **linears(name, path, (i,), [('dt_proj', 'dt', (inner, rank))], True),
    **linears(name, path, (i,), [('x_proj', 'x', (rank + 2 * state, inner))]),
    **{
      f'{name}.{part}_layernorm.weight': vector(f'{path}/{part}_norm/gain', (i,), size)
      for part, size in (('dt', rank), ('b', state), ('c', state))
    },
    f'{name}.conv1d.weight': stored.StoredTensor((inner, 1, sizes.conv), (taps,)),
    # A checkpoint without this bias leaves the leaf at zero, which computes the same.
    f'{name}.conv1d.bias': vector(
      f'{path}/conv/bias', (i,), inner, optional=not take(hf, 'mamba_conv_bias', bool, True)
    ),
    f'{name}.A_log': vector(f'{path}/a_log', (i,), inner, state),
    f'{name}.D': vector(f'{path}/d', (i,), inner),
  }


FAMILIES = {'jamba': stored.Family(jamba, _tensors, ignored='')}
