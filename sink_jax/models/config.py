"""ModelConfig: everything that fixes a model's function and parameters."""

from __future__ import annotations

import dataclasses
import math

from sink_jax.attention import Dims
from sink_jax.attention.mask import Mask
from sink_jax.attention.per_token import NoQKNorm
from sink_jax.attention.position import Nope, Position, Rope
from sink_jax.attention.spec import AttentionSpec
from sink_jax.component import option
from sink_jax.kernels.dispatch import check_implementation

FFNS = ('relu', 'gelu', 'gelu_tanh', 'swish', 'reglu', 'geglu', 'tanh_geglu', 'swiglu',
        'clamped_swiglu', 'none')
# Bounds of sizes, which are read from files and may be damaged: far above those of any model, and
# far below what would fill the memory before an error could name the field.
MOST = 2**12  # layers, experts: a few objects in memory each, before any tensor is looked at
LARGEST = 2**27
_WIDEST = 2**16  # dimensions of a head; tables of rotations on the host are as wide
_SIZES = ('d_model', 'heads', 'ffn_hidden', 'vocab_size', 'input_features', 'output_features',
          'kv_heads', 'head_dim', 'embedding_dim')
_POSITIVE = ('layers', 'd_model', 'heads', 'ffn_hidden', 'unroll')
BIASED = ('qkv', 'out', 'ffn', 'mamba', 'unembed')
CHOICES: dict[str, tuple[str, ...]] = {
    'ffn': FFNS,
    'norm': ('rmsnorm', 'layernorm', 'single', 'dyt', 'none'),
    'norm_location': ('pre', 'post', 'sandwich', 'after', 'protected'),
    'linear': ('plain', 'sigma_reparam'),
    'combine_heads': ('concat', 'add'),
    'init': ('torch_default', 'tinyllama'),
    'dtype': ('bfloat16', 'float32'),
    'remat': ('none', 'save_matmuls', 'save_attention', 'blocks'),
}


@dataclasses.dataclass(frozen=True)
class Mamba:
  """The sizes of a Mamba mixer (Gu and Dao 2023).

  Attributes:
    inner: the number of channels.
    state: the number of values in the recurrent state of each channel.
    conv: the number of taps of the causal convolution.
    rank: the rank of the projection that makes the step size dt.
  """

  inner: int
  state: int
  conv: int
  rank: int


@dataclasses.dataclass(frozen=True)
class Experts:
  """A mixture of `count` feed-forward networks, of which each token uses `active`.

  Attributes:
    renormalize: whether the weights of the active networks are a softmax over these alone
      (gpt-oss), instead of their shares of the softmax over all (Jamba).

  Raises:
    ValueError: `active` lies outside 1..count.
  """

  count: int
  active: int
  renormalize: bool = False

  def __post_init__(self):
    if not 1 <= self.active <= self.count:
      raise ValueError(f'{self}: active must lie between 1 and count.')


@dataclasses.dataclass(frozen=True)
class Layer:
  """What is particular to one block of a repeating pattern; None keeps what the model has.

  Attributes:
    mask: replaces the mask of the attention.
    mamba: the sizes of a Mamba mixer, which replaces the attention.
    experts: a mixture of experts, which replaces the feed-forward network.
    position: replaces the position encoding of the attention; both must be rotary or Nope().
  """

  mask: Mask | None = None
  mamba: Mamba | None = None
  experts: Experts | None = None
  position: Position | None = None

  def __repr__(self) -> str:
    # Without a position as it was before there were any: the texts of stored configs are compared.
    names = ['mask', 'mamba', 'experts'] + ['position'] * (self.position is not None)
    return f'Layer({", ".join(f"{name}={getattr(self, name)!r}" for name in names)})'


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """A LLaMA-style decoder, as the paper trains it, and its variations.

  Attributes:
    layers: the number N of blocks.
    d_model: the width D of the residual stream.
    heads: the number H of query heads.
    ffn_hidden: the number of hidden units of a feed-forward network.
    vocab_size: the size V of the vocabulary; 0 for a model of continuous inputs, whose sizes are
      input_features and output_features.
    kv_heads: the number of key/value heads; by default as many as query heads.
    head_dim: the dimension of a head; by default d_model / heads.
    pattern: the blocks of one period, which repeats; `layers` is a multiple of its length. They
      may differ in masks, rotary encodings, mixers and experts, see `Layer`.
    attention: the attention of all blocks, except for what `pattern` replaces.
    ffn: 'relu', 'gelu', 'gelu_tanh' or 'swish' (two matrices), 'reglu', 'geglu', 'tanh_geglu',
      'swiglu' or 'clamped_swiglu' (three; the last is gpt-oss's), or 'none'. Those with 'tanh'
      approximate GELU by tanh, as Gemma 2 does.
    norm: 'rmsnorm', 'layernorm', 'single' (SSNorm: RMSNorm with one scalar gain), 'dyt' (Dynamic
      Tanh: a bounded function in place of the norm) or 'none'; see `Norm`.
    norm_location: 'pre' (Eq. 2); 'post' (Eq. 3, without a final norm); 'sandwich', a norm before
      and one after each sub-layer, h + N(f(N(h))) (Gemma 2, arXiv:2408.00118); 'after', a norm
      only after it, h + N(f(h)) (OLMo 2, arXiv:2501.00656, Section 3.3.1); or 'protected', no norm
      but the final one, h + beta f(h), see `branch_scale`.
    parallel_residual: whether attention and feed-forward network both read the block's input, and
      both outputs are added to it (GPT-NeoX); for pre-norm blocks only.
    biases: the linear layers that have a bias, out of 'qkv', 'out', 'ffn', 'mamba' (its projections
      in and out) and 'unembed'.
    embedding_dim: the width of token embeddings that are projected to d_model, and back (OPT-350m).
    tied: whether the unembedding shares the matrix of the token embedding.
    logit_cap: c of a soft cap c tanh(logits / c) of the logits (Gemma 2: 30); 0 for none.
    linear: 'plain', or 'sigma_reparam', where the spectral norm of each linear layer of a block is
      a parameter of its own (arXiv:2303.06296), see `models.sigma_reparam`.
    combine_heads: 'concat', or 'add', where the heads' outputs are summed and share one Dh x D
      projection (Table 12 left).
    sink_tokens: the number of learned vectors before the embeddings of every sequence, which have
      no position embedding. They take part in attention, but nothing is predicted from them. One
      is the paper's sink token (Table 4), several are the registers of arXiv:2309.16588. They
      count as positions of a rotary or ALiBi encoding, of a prefix and of a window.
    init: 'torch_default', N(0, 1) for embeddings and U(+-1/sqrt(fan_in)) for linear layers, which
      the multi-device runs of the official implementation (sail-sg/Attention-Sink) very probably
      used; or 'tinyllama', which its model files state: N(0, 2/(5 n)), n the width of an embedding
      or the inputs of a linear layer, and N(0, 1/(ffn N^2)) for the last matrix of SwiGLU.
    dtype: the dtype of activations. Norms, row statistics and logits are float32, and so are
      parameters, except those of models that are imported in bfloat16.
    implementation: the implementation of attention, see `attend`.
    remat: what the backward pass recomputes instead of keeping it. Per token and block it keeps
      the following numbers of values, of 2 bytes each in bfloat16, where D = d_model,
      A = heads x head_dim, K = kv_heads x head_dim and F = ffn_hidden:

      - 'none': everything that a gradient needs, as XLA decides; more than with the others.
      - 'save_matmuls': the block's input and the outputs of linear layers and attention,
        2 D + 2 A + 2 K + 2 F (one F if the network is not gated), D more if a norm follows the
        sub-layers, and the pre-activations of gates that read the block's input. Norms, rotations
        and activations are recomputed.
      - 'save_attention': D + A, and two float32 statistics per head. All else is recomputed.
      - 'blocks': D, the block's input. The whole block is recomputed.

      With ValueResidual each of the last three keeps K more. One A is the output of attention;
      'reference' does not keep it but recomputes it.
    unroll: the number of blocks that one iteration of the loop over blocks computes, rounded down
      to whole periods of the pattern; from `layers` on there is no loop. A loop copies the values
      that it keeps for the backward pass into one array for all iterations and out again. Without
      a loop nothing is copied, but compiling takes longer. With a `remat` other than 'none' every
      iteration is one period. The function, the parameters and their tree stay the same.

  Raises:
    ValueError: a field is out of range, or fields do not fit each other; the message names them.
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
    for name, allowed in CHOICES.items():
      if getattr(self, name) not in allowed:
        raise ValueError(f'model.{name} = {getattr(self, name)!r}; choices: '
                         f'{", ".join(allowed)}.')
    if not isinstance(self.attention, AttentionSpec):
      raise ValueError(f'model.attention = {self.attention!r} must be an AttentionSpec.')
    for name in ('biases', 'pattern'):  # lists cannot be hashed, and a frozen dataclass is
      object.__setattr__(self, name, tuple(getattr(self, name)))
    for name in ('layers', 'sink_tokens', 'unroll', *_SIZES):
      value = getattr(self, name)
      may_be_none = name not in (*_POSITIVE, 'sink_tokens')
      # By type and not isinstance: JSON has 2.0, -0.0 and true.
      if type(value) is not int and not (value is None and may_be_none):
        raise ValueError(f'model.{name} = {value!r} must be a whole number.')
    for name in ('parallel_residual', 'tied'):
      if type(getattr(self, name)) is not bool:
        raise ValueError(f'model.{name} = {getattr(self, name)!r} must be True or False.')
    for name in _POSITIVE:
      if getattr(self, name) < 1:
        raise ValueError(f'model.{name} must be at least 1, not {getattr(self, name)}.')
    limits = dict.fromkeys(_SIZES, LARGEST) | dict.fromkeys(
        ('layers', 'unroll', 'sink_tokens'), MOST)
    for name, largest in limits.items():
      if not 0 <= (getattr(self, name) or 0) <= largest:
        raise ValueError(f'model.{name} = {str(getattr(self, name))[:50]} cannot be: it lies '
                         f'between 0 and {largest}.')
    for name in ('kv_heads', 'head_dim', 'embedding_dim'):
      if getattr(self, name) == 0:
        raise ValueError(f'model.{name} must be at least 1, or empty, not 0.')
    if self.head_dim is None and self.d_model % self.heads:
      raise ValueError(f'model.heads = {self.heads} must divide model.d_model = {self.d_model}.')
    if self.dims.head_dim > _WIDEST:
      raise ValueError(f'a head of {self.dims.head_dim} dimensions (model.head_dim, or '
                       f'model.d_model / model.heads) cannot be: at most {_WIDEST}.')
    if not self.pattern or self.layers % len(self.pattern):
      raise ValueError(f'model.layers = {self.layers} must be a multiple of the '
                       f'{len(self.pattern)} blocks of the pattern.')
    if unknown := set(self.biases) - set(BIASED):
      raise ValueError(f'model.biases: unknown {", ".join(sorted(unknown))}; choices: '
                       f'{", ".join(BIASED)}.')
    if all(layer.mamba for layer in self.pattern):
      raise ValueError('model.pattern has no block with attention, so there are no sinks to look '
                       'for.')
    for layer in self.pattern:
      if layer.position is not None and not all(isinstance(position, (Rope, Nope)) for position in
                                                (layer.position, self.attention.position)):
        raise ValueError(f'model.pattern: {layer} in a model with {self.attention.position}: '
                         'blocks differ in rotary encodings, Rope() and its kinds, or Nope().')
    if self.parallel_residual and self.norm_location != 'pre':
      raise ValueError("model.parallel_residual needs model.norm_location = 'pre'.")
    if self.linear != 'plain' and any(layer.mamba or layer.experts for layer in self.pattern):
      raise ValueError(f'model.linear = {self.linear!r} is for blocks of attention and a '
                       "feed-forward network: use 'plain' with Mamba mixers or experts.")
    if self.norm_location == 'protected':
      self._check_protected()
    if (self.tied or self.embedding_dim or self.logit_cap) and not self.vocab_size:
      raise ValueError('model.tied, model.embedding_dim and model.logit_cap need a vocabulary.')
    if not 0 <= self.logit_cap < math.inf:
      raise ValueError(f'model.logit_cap = {str(self.logit_cap)[:50]} must be finite and above 0, '
                       'or 0 for none; 30 is usual.')
    if not 0 < self.norm_eps <= 1:
      raise ValueError(f'model.norm_eps must be > 0 and at most 1, not {str(self.norm_eps)[:50]}.')
    if self.heads % (self.kv_heads or self.heads):
      raise ValueError(f'model.kv_heads = {self.kv_heads} must divide model.heads = {self.heads}.')
    self._check_sink_tokens()
    if not self.vocab_size and not (self.input_features and self.output_features):
      raise ValueError('A model needs a vocab_size, or input_features and output_features.')
    value = self.attention.value
    if value.reads_first and (self.layers == 1 or self.pattern[0].mamba):
      raise ValueError(f'{value} mixes the values of the first block into those of later ones, but '
                       + ('there are none: use two layers or more, or PlainValue().'
                          if self.layers == 1 else 'that has a Mamba mixer: begin model.pattern '
                          'with a block of attention, or use PlainValue().'))
    check_implementation(self.implementation)
    self.attention.params(self.dims)  # raises where a component does not fit the head dimension

  def _check_sink_tokens(self) -> None:
    """Raises a ValueError where something else has the place of learned sink tokens."""
    if not self.sink_tokens:
      return
    if self.attention.kv_bias.has_extra_key:
      raise ValueError(f'model.sink_tokens = {self.sink_tokens} and {self.attention.kv_bias} both '
                       'take the place of the extra key: choose one.')
    for layer in self.pattern:
      mask = self.attention_of(layer).mask
      if mask.prefix is not None and mask.prefix < self.sink_tokens and not layer.mamba:
        raise ValueError(f'model.sink_tokens = {self.sink_tokens} are positions of the prefix of '
                         f'{mask}, which is shorter: give Prefix(length={self.sink_tokens}) or '
                         'more, or fewer sink tokens.')

  def _check_protected(self) -> None:
    """Raises a ValueError where a protected block cannot keep its activations of order one."""
    block = "model.norm_location = 'protected'"
    if self.attention.qk_norm == NoQKNorm():
      raise ValueError(f'{block} has no norm that bounds the inputs of queries and keys, so that '
                       "scores would grow: set attention.qk_norm = 'QKNorm()'.")
    if self.init != 'torch_default':
      raise ValueError(f'{block} takes embeddings as they are, and model.init = {self.init!r} '
                       "starts them far below one: use model.init = 'torch_default'.")
    if self.linear != 'plain':
      raise ValueError(f'{block} relies on the size of the initial kernels, which model.linear = '
                       f"{self.linear!r} changes: use model.linear = 'plain'.")
    if any(layer.mamba or layer.experts for layer in self.pattern):
      raise ValueError(f'{block} is one of attention and a feed-forward network: it takes no '
                       'pattern with Mamba mixers or experts.')

  @property
  def branch_scale(self) -> float:
    """beta of the Outlier Protected block h + beta f(h) of He et al. (arXiv:2405.19279).

    Its sub-layers f read the residual stream h without a norm. beta = 1/sqrt(2 * layers), so that
    the outputs of all 2 * layers sub-layers together have the size of one. The authors' code
    (bobby-he/simplified_transformers, op.yaml) has beta of the order 1/sqrt(depth), 0.2 for 12
    blocks, and QK-norm as here. It also has a LayerNorm before the first attention, since its
    embeddings start at 0.02; here they start at 1.
    """
    return 1 / math.sqrt(2 * self.layers)

  def attention_of(self, layer: Layer) -> AttentionSpec:
    """Returns the attention of a block of the pattern, with its mask and position encoding."""
    own = {name: value for name, value in (('mask', layer.mask), ('position', layer.position))
           if value is not None}
    return dataclasses.replace(self.attention, **own) if own else self.attention

  @property
  def periods_per_turn(self) -> int:
    """The number of periods of the pattern in one iteration over blocks, see `unroll`."""
    if self.remat != 'none':
      return 1
    return max(1, min(self.unroll, self.layers) // len(self.pattern))

  @property
  def attention_layers(self) -> tuple[int, ...]:
    """The indices, from 0, of the blocks with attention; the others have a Mamba mixer.

    The leading axis of records of attention counts these blocks.
    """
    return tuple(i for i in range(self.layers) if not self.pattern[i % len(self.pattern)].mamba)

  @property
  def dims(self) -> Dims:
    """The sizes of an attention layer: heads, key/value heads, head_dim and d_model."""
    return Dims(self.heads, self.kv_heads or self.heads,
                self.head_dim or self.d_model // self.heads, self.d_model)
