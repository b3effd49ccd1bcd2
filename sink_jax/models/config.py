"""ModelConfig: everything that fixes a model's function and parameters."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from sink_jax.attention import Dims
from sink_jax.attention.mask import Mask
from sink_jax.attention.per_token import NoQKNorm
from sink_jax.attention.position import Nope, Position, Rope
from sink_jax.attention.spec import AttentionSpec
from sink_jax.component import Component, check_types, option
from sink_jax.kernels.dispatch import check_implementation

_FROM_ZERO = ('vocab_size', 'input_features', 'output_features', 'sink_tokens')
CHOICES: dict[str, tuple[str, ...]] = {
  'ffn': (
    'relu',
    'gelu',
    'gelu_tanh',
    'swish',
    'reglu',
    'geglu',
    'tanh_geglu',
    'swiglu',
    'clamped_swiglu',
    'none',
  ),
  'biases': ('qkv', 'out', 'ffn', 'mamba', 'unembed'),
  'norm': ('rmsnorm', 'layernorm', 'single', 'dyt', 'none'),
  'norm_location': ('pre', 'post', 'sandwich', 'after', 'protected'),
  'linear': ('plain', 'sigma_reparam'),
  'combine_heads': ('concat', 'add'),
  'init': ('torch_default', 'tinyllama'),
  'dtype': ('bfloat16', 'float32'),
  'remat': ('none', 'save_matmuls', 'save_attention', 'blocks'),
}


class Mamba(Component):
  """The sizes of a Mamba mixer (Gu and Dao 2023)."""

  inner: int  # channels
  state: int  # values in the recurrent state of a channel
  conv: int  # taps of the causal convolution
  rank: int  # of the projection that makes the step size dt


class Experts(Component):
  """A mixture of `count` feed-forward networks, of which each token uses `active`."""

  count: int
  active: int
  # Weights are a softmax over the active networks (gpt-oss), not over all networks (Jamba).
  renormalize: bool = False

  def __post_init__(self):
    if not 1 <= self.active <= self.count:
      raise ValueError(f'{self}: active must be between 1 and count.')


class Layer(Component):
  """Differences of one block of a repeating pattern from the model; None: no difference."""

  mask: Mask | None = None
  mamba: Mamba | None = None  # instead of attention
  experts: Experts | None = None  # instead of the feed-forward network
  position: Position | None = None  # if blocks differ: rotary or Nope()


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """A LLaMA-style decoder, as the paper trains it, and its variations.

  Attributes:
    layers, d_model, heads, ffn_hidden: blocks, the width D of the residual stream, query heads,
      hidden units of a feed-forward network.
    vocab_size: the size V of the vocabulary; 0 for a model of continuous inputs, whose sizes are
      input_features and output_features.
    kv_heads, head_dim: key/value heads, by default `heads`; a head's size, by default
      d_model / heads.
    pattern: the blocks of one period, which repeats; it may replace parts of `attention`.
    ffn: one of CHOICES; names that end with 'glu' have three matrices, others two. Names with
      'tanh' approximate GELU by tanh, as Gemma 2 does; 'clamped_swiglu' is gpt-oss's.
    norm: 'rmsnorm', 'layernorm', 'single', 'dyt' or 'none', see `layers.Norm`.
    norm_location: 'pre' (Eq. 2); 'post' (Eq. 3, without a final norm); 'sandwich', h + N(f(N(h)))
      (Gemma 2, arXiv:2408.00118); 'after', h + N(f(h)) (OLMo 2, arXiv:2501.00656, Section 3.3.1);
      or 'protected', no norm but the final one, h + beta f(h), see `layers.residual`.
    parallel_residual: attention and feed-forward network both read the block's input (GPT-NeoX).
    biases: the linear layers that have a bias ('mamba': its projections in and out).
    embedding_dim: the width of token embeddings that are projected to d_model, and back (OPT-350m).
    tied: whether the unembedding shares the matrix of the token embedding.
    unembedding: whether there is one. A published checkpoint may lack it; then there are hidden
      states and attention, but no logits. A model that is trained has one.
    logit_cap: c of a soft cap c tanh(logits / c) of the logits (Gemma 2: 30); 0 for none.
    linear: 'plain', or 'sigma_reparam', see `layers.reparametrised`.
    combine_heads: 'concat', or 'add': outputs are summed and share a projection (Table 12 left).
    sink_tokens: the number of learned vectors before the embeddings of every sequence: one is the
      paper's sink token (Table 4), several are the registers of arXiv:2309.16588. They have no
      position embedding, but count as positions of a rotary or ALiBi encoding, a prefix and a
      window.
    init: 'torch_default', N(0, 1) for embeddings and U(+-1/sqrt(fan_in)) for linear layers, which
      the official runs (sail-sg/Attention-Sink) very probably used; or 'tinyllama', which its model
      files state: N(0, 2/(5 n)), n the width of an embedding or the inputs of a linear layer, and
      N(0, 1/(ffn N^2)) for the last matrix of SwiGLU.
    dtype: of activations. Norms, row statistics, logits and trained parameters are float32.
    implementation, remat: see `attend`, and `transformer.SAVED`.
    unroll: the number of blocks in one iteration of the loop over blocks, rounded down to periods
      of the pattern; one period with a `remat`; no loop for `layers` or more. A loop copies the
      activations it keeps for the backward pass; without one compiling takes longer.
  """

  layers: int
  d_model: int
  heads: int
  ffn_hidden: int
  vocab_size: int = 0
  input_features: int = 0
  output_features: int = 0
  kv_heads: int | None = None
  head_dim: int | None = None
  pattern: tuple[Layer, ...] = (Layer(),)
  attention: AttentionSpec = AttentionSpec()
  ffn: str = 'swiglu'
  norm: str = 'rmsnorm'
  norm_eps: float = 1e-5
  norm_location: str = 'pre'
  parallel_residual: bool = False
  biases: tuple[str, ...] = ()
  embedding_dim: int | None = None
  tied: bool = False
  unembedding: bool = True
  logit_cap: float = 0.0
  linear: str = 'plain'
  combine_heads: str = 'concat'
  sink_tokens: int = 0
  init: str = 'torch_default'
  dtype: str = 'bfloat16'
  implementation: str | None = option(None, 'of attention, see `attend`', where=True)
  remat: str = option('none', 'what the backward pass recomputes', where=True)
  unroll: int = option(1, 'blocks of one iteration of the loop over blocks', where=True)

  def __post_init__(self):
    check_types(self, 'model')  # also makes tuples of lists, which cannot be hashed
    for name, value in vars(self).items():
      if name in CHOICES and not set(value if name == 'biases' else [value]) <= {*CHOICES[name]}:
        raise ValueError(f'model.{name} = {value!r}; choices: {", ".join(CHOICES[name])}.')
      least = 0 if name in _FROM_ZERO else 1
      if isinstance(value, int) and not isinstance(value, bool) and value < least:
        raise ValueError(f'model.{name} must be at least {least}, not {value}.')
    for wrong, message in self._conflicts():
      if wrong:
        raise ValueError(message)
    check_implementation(self.implementation)
    self.attention.params(self.dims)  # raises if a component does not fit the head dimension

  def _conflicts(self) -> Iterator[tuple[object, str]]:
    """Pairs of a condition that must not hold, and its error; later ones rely on earlier ones."""
    yield from self._conflicts_of_pattern()
    yield from self._conflicts_of_blocks()
    yield from self._conflicts_of_vocabulary()
    yield from self._conflicts_of_attention()

  def _conflicts_of_pattern(self) -> Iterator[tuple[object, str]]:
    layers, spec = self.pattern, self.attention
    yield (
      self.head_dim is None and self.d_model % self.heads,
      f'model.heads = {self.heads} must divide model.d_model = {self.d_model}.',
    )
    yield (
      self.heads % (self.kv_heads or self.heads),
      f'model.kv_heads = {self.kv_heads} must divide model.heads = {self.heads}.',
    )
    yield (
      not layers or self.layers % len(layers),
      f'model.layers = {self.layers} must be a '
      f'multiple of the {len(layers)} blocks of model.pattern.',
    )
    yield (all(layer.mamba for layer in layers), 'model.pattern has no block with attention.')
    yield (
      any(
        layer.position
        and not all(
          isinstance(position, (Rope, Nope)) for position in (layer.position, spec.position)
        )
        for layer in layers
      ),
      'model.pattern: blocks differ in rotary encodings, Rope() and others, or Nope() only.',
    )

  def _conflicts_of_blocks(self) -> Iterator[tuple[object, str]]:
    layers, protected = self.pattern, self.norm_location == 'protected'
    yield not 0 < self.norm_eps <= 1, f'model.norm_eps must be > 0 and <= 1, not {self.norm_eps}.'
    yield (
      self.parallel_residual and self.norm_location != 'pre',
      "model.parallel_residual needs model.norm_location = 'pre'.",
    )
    yield (
      (self.linear != 'plain' or protected)
      and any(layer.mamba or layer.experts for layer in layers),
      f'model.linear = {self.linear!r} and model.norm_location = {self.norm_location!r} need '
      'a pattern without Mamba mixers and experts.',
    )
    yield (
      protected and self.attention.qk_norm == NoQKNorm(),
      "model.norm_location = 'protected' needs attention.qk_norm = 'QKNorm()', without which "
      'nothing bounds the scores.',
    )
    yield (
      protected and (self.linear != 'plain' or self.init != 'torch_default'),
      "model.norm_location = 'protected' needs model.linear = 'plain' and model.init = "
      "'torch_default', on which its factors rely.",
    )
    yield (
      self.ffn == 'none' and any(layer.experts for layer in layers),
      "model.ffn = 'none' leaves the experts of model.pattern without an activation.",
    )

  def _conflicts_of_vocabulary(self) -> Iterator[tuple[object, str]]:
    yield (
      self.tied and 'unembed' in self.biases,
      "model.biases: 'unembed' is a bias of an unembedding that model.tied leaves out.",
    )
    yield (
      self.tied and not self.unembedding,
      'model.unembedding = False: the model has one, its embedding, by model.tied.',
    )
    yield (
      not self.vocab_size and not (self.input_features and self.output_features),
      'A model needs a vocab_size, or input_features and output_features.',
    )
    yield (
      (self.tied or self.embedding_dim or self.logit_cap) and not self.vocab_size,
      'model.tied, model.embedding_dim and model.logit_cap need a vocabulary.',
    )
    yield (
      not 0 <= self.logit_cap < math.inf,
      f'model.logit_cap = {self.logit_cap} must be finite and at least 0 (no cap).',
    )

  def _conflicts_of_attention(self) -> Iterator[tuple[object, str]]:
    spec, sinks = self.attention, self.sink_tokens
    yield (
      sinks and spec.kv_bias.has_extra_key,
      f'model.sink_tokens and {spec.kv_bias} both take the place of the extra key: choose one.',
    )
    prefixes = [spec.mask.prefix for spec in self.attention_specs]
    yield (
      any(n is not None and n < sinks for n in prefixes),
      f'model.sink_tokens = {sinks} are positions of the prefix, which is shorter: give '
      f'Prefix(length={sinks}) or more, or fewer sink tokens.',
    )

  def attention_of(self, layer: Layer) -> AttentionSpec:
    """Returns the attention of a block of the pattern, with its mask and position encoding."""
    return dataclasses.replace(
      self.attention,
      mask=layer.mask or self.attention.mask,
      position=layer.position or self.attention.position,
    )

  @property
  def blocks(self) -> tuple[Layer, ...]:
    """The pattern, repeated for every block of the model."""
    return self.pattern * (self.layers // len(self.pattern))

  @property
  def attention_layers(self) -> tuple[int, ...]:
    """Indices, from 0, of the blocks with attention, the only ones in records."""
    return tuple(i for i, layer in enumerate(self.blocks) if not layer.mamba)

  @property
  def attention_specs(self) -> tuple[AttentionSpec, ...]:
    """The attention of each block that has attention, in the order of `attention_layers`."""
    return tuple(self.attention_of(layer) for layer in self.blocks if not layer.mamba)

  @property
  def dims(self) -> Dims:
    """The sizes of an attention layer: heads, key/value heads, head_dim and d_model."""
    return Dims(
      self.heads,
      self.kv_heads or self.heads,
      self.head_dim or self.d_model // self.heads,
      self.d_model,
    )
