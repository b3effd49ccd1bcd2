"""What the classes of transformers that a run is exported to have in common.

All of them are decoders like LLaMA with the names of its tensors; they differ in attention, and in
a few keys of config.json. A run is compared with a class part by part, and the first part that the
class lacks is named to the user.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from sink_jax.attention.extra_key_value import ExtraKeyValue, NoBias
from sink_jax.attention.head import HeadOutput, PlainOutput
from sink_jax.attention.mask import Causal, Mask, Window
from sink_jax.attention.normalizer import RowSum
from sink_jax.attention.per_token import Fixed, Identity, NoQKNorm, PlainValue, QueryKeyNorm
from sink_jax.attention.position import Nope, Position, Rope
from sink_jax.attention.similarity import Exp
from sink_jax.models.config import ModelConfig
from sink_jax.pretrained.stored_tensors import StoredTensor

# (path of a leaf, index along its first axes) -> that part of it on the host, as it is kept.
Leaves = Callable[[str, tuple[int, ...]], np.ndarray]


class Refusal(NamedTuple):
  """A part of a run that a class lacks: its name in configs, and what the class has instead."""

  name: str
  wanted: str


@dataclasses.dataclass(frozen=True)
class WrittenTensor:
  """One tensor to write: its shape in the file, and the function that makes it of leaves."""

  shape: tuple[int, ...]
  make: Callable[[Leaves], np.ndarray]


class Target(Protocol):
  """What the module of a class defines; a new class is one module with these names.

  NAME: the value of `--as`, and the `model_type` of config.json. ARCHITECTURE: the class.
  """

  @property
  def NAME(self) -> str: ...

  @property
  def ARCHITECTURE(self) -> str: ...

  def refusals(self, config: ModelConfig) -> list[Refusal]:
    """What keeps a model from being one of this class; empty where it is one."""
    ...

  def keys(self, config: ModelConfig, context: int) -> dict[str, Any]:
    """The keys of config.json that are not among `common_keys`; context: the longest sequence."""
    ...

  def tensors(self, config: ModelConfig) -> dict[str, WrittenTensor]:
    """Every tensor of the checkpoint, by name, in the order of the files."""
    ...


def written(table: Mapping[str, StoredTensor]) -> dict[str, WrittenTensor]:
  """The tensors that an importer's table reads, so that what is written comes back as it was.

  Each of its tensors fills one part as a whole, so that no `take` has to be undone.
  """
  def maker(tensor: StoredTensor) -> Callable[[Leaves], np.ndarray]:
    part, = tensor.parts

    def make(leaf: Leaves) -> np.ndarray:
      x = leaf(part.path, part.index)
      return x.swapaxes(-1, -2) if part.transposed else x

    return make

  # A tied unembedding is the one tensor without parts: the files hold the embedding alone.
  return {name: WrittenTensor(tensor.shape, maker(tensor))
          for name, tensor in table.items() if tensor.parts}


def masks_of(config: ModelConfig) -> list[Mask]:
  """The mask of every block."""
  pattern = config.pattern
  return [config.attention_of(pattern[i % len(pattern)]).mask for i in range(config.layers)]


def positions_of(config: ModelConfig) -> list[Position]:
  """The position encoding of every block."""
  pattern = config.pattern
  return [config.attention_of(pattern[i % len(pattern)]).position for i in range(config.layers)]


def layer_types(config: ModelConfig) -> list[str]:
  """The entry of config.json that says which blocks have a window."""
  return ['full_attention' if mask.window is None else 'sliding_attention'
          for mask in masks_of(config)]


def window_of(config: ModelConfig) -> int | None:
  """The one size of the windows, None where no block has one."""
  return next((mask.window for mask in masks_of(config) if mask.window is not None), None)


def refusals(config: ModelConfig, *, masks: str, biases: Sequence[str] = (),
             kv_bias: type[ExtraKeyValue] = NoBias, qk_norm: QueryKeyNorm = NoQKNorm(),
             head: HeadOutput = PlainOutput(), nope: bool = False, scaled: bool = True,
             ) -> list[Refusal]:
  """The parts of a model that a class lacks.

  Args:
    masks: 'causal' or 'window' for all blocks, or 'any' for blocks with and without one window.
    biases: 'attention' and 'ffn', where the class has biases there.
    kv_bias, qk_norm, head: what its attention has.
    nope: whether each block has a rotary encoding of its own, or none.
    scaled: whether its rotary encoding may be interpolated.
  """
  spec, found = config.attention, list[Refusal]()
  for name, value, wanted in (
      ('model.combine_heads', config.combine_heads, 'concat'), ('model.ffn', config.ffn, 'swiglu'),
      ('model.norm', config.norm, 'rmsnorm'), ('model.norm_location', config.norm_location, 'pre'),
      ('model.linear', config.linear, 'plain'), ('model.logit_cap', config.logit_cap, 0.0),
      ('model.sink_tokens', config.sink_tokens, 0),
      ('model.parallel_residual', config.parallel_residual, False),
      ('model.embedding_dim', config.embedding_dim, None),
      ('attention.similarity', spec.similarity, Exp()),
      ('attention.normalizer', spec.normalizer, RowSum()),
      ('attention.feature_map', spec.feature_map, Identity()),
      ('attention.temperature', spec.temperature, Fixed()),
      ('attention.value', spec.value, PlainValue()),
      ('attention.qk_norm', spec.qk_norm, qk_norm), ('attention.head', spec.head, head)):
    if value != wanted:
      found.append(Refusal(name, repr(wanted)))
  if type(spec.kv_bias) is not kv_bias:
    found.append(Refusal('attention.kv_bias', f'{kv_bias.__name__}()'))
  if not config.vocab_size:
    found.append(Refusal('model.input_features', 'tokens'))
  if any(layer.mamba or layer.experts for layer in config.pattern):
    found.append(Refusal('model.pattern', 'blocks of attention and one feed-forward network'))
  else:
    found += _mask_refusals(config, masks)
  found += _position_refusals(config, nope, scaled)
  # `attention_bias` of config.json stands for q, k, v and the output together.
  given = set(config.biases)
  allowed = {'qkv', 'out'} if 'attention' in biases else set[str]()
  allowed |= {'ffn'} if 'ffn' in biases else set()
  if given - allowed or len(given & {'qkv', 'out'}) == 1:
    found.append(Refusal('model.biases', ' and '.join(
        {'attention': "those of 'qkv' and 'out' together", 'ffn': "those of 'ffn'"}[group]
        for group in biases) or 'none'))
  return found


def _position_refusals(config: ModelConfig, nope: bool, scaled: bool) -> list[Refusal]:
  """What keeps the encodings of positions from being those of a class; see `refusals`."""
  own = set(positions_of(config))
  # `type`, since Llama3Rope and YarnRope are Ropes with other frequencies.
  rotary = {position for position in own if type(position) is Rope and position.fraction == 1
            and (scaled or position.factor == 1)}
  if nope:  # such a class has an encoding for each block
    alike = own <= {Nope(), *rotary}
    wanted = 'Rope() of all channels and of factor 1, or Nope()'
  else:
    alike, wanted = len(own) == 1 and own == rotary, 'Rope() of all channels, in all blocks'
  name = 'attention.position' if len(own) == 1 else 'model.pattern'
  return [] if alike else [Refusal(name, wanted)]


def _mask_refusals(config: ModelConfig, masks: str) -> list[Refusal]:
  """What keeps the masks of the blocks from being those of a class; see `refusals`."""
  own = masks_of(config)
  # The slot that a user set: that of the model, or that of one of its blocks.
  name = 'attention.mask' if len(set(own)) == 1 else 'model.pattern'
  kinds = (Causal, Window) if masks == 'any' else (Causal,) if masks == 'causal' else (Window,)
  sizes = {mask.window for mask in own if mask.window is not None}
  if any(type(mask) not in kinds for mask in own) or masks == 'window' and len(set(own)) > 1:
    return [Refusal(name, {'causal': 'Causal()', 'window': 'one Window() for all blocks',
                           'any': 'Causal() and Window()'}[masks])]
  return [Refusal(name, 'windows of one size')] if len(sizes) > 1 else []


def common_keys(config: ModelConfig, target: Target, *, dtype: str, context: int) -> dict[str, Any]:
  """The keys of config.json that every class has, but for its rotary encoding."""
  dims = config.dims
  return {
      'architectures': [target.ARCHITECTURE], 'model_type': target.NAME, 'torch_dtype': dtype,
      'vocab_size': config.vocab_size, 'hidden_size': config.d_model,
      'intermediate_size': config.ffn_hidden, 'num_hidden_layers': config.layers,
      'num_attention_heads': dims.heads, 'num_key_value_heads': dims.kv_heads,
      'head_dim': dims.head_dim, 'hidden_act': 'silu', 'rms_norm_eps': config.norm_eps,
      'max_position_embeddings': context, 'tie_word_embeddings': config.tied,
      'bos_token_id': None, 'eos_token_id': None, 'pad_token_id': None}


def rotary_keys(config: ModelConfig) -> dict[str, Any]:
  """The rotary encoding as transformers had it before version 5, and still reads it."""
  position = config.attention.position
  assert isinstance(position, Rope), 'anything else was refused'
  # Both names of the type: of new versions of transformers, and of old ones.
  scaling = None if position.factor == 1 else {'rope_type': 'linear', 'type': 'linear',
                                               'factor': position.factor}
  return {'rope_theta': position.base, 'rope_scaling': scaling}
