"""ModelConfig: everything that fixes a model's function and parameters."""

from __future__ import annotations

import dataclasses

from sink_jax.attention.param import Dims
from sink_jax.attention.spec import AttentionSpec
from sink_jax.kernels.dispatch import check_implementation

FFNS = ('relu', 'gelu', 'swish', 'reglu', 'geglu', 'swiglu', 'none')
CHOICES = {
    'ffn': FFNS,
    'norm': ('rmsnorm', 'layernorm', 'none'),
    'norm_location': ('pre', 'post'),
    'combine_heads': ('concat', 'add'),
    'init': ('torch_default', 'tinyllama'),
    'dtype': ('bfloat16', 'float32'),
}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """A LLaMA-style decoder, as the paper trains it, and its variations.

  vocab_size: 0 for a model of continuous inputs, whose sizes are then
    input_features and output_features.
  ffn: 'relu', 'gelu', 'swish' (two matrices), 'reglu', 'geglu', 'swiglu' (three), 'none'.
  norm_location: 'pre' (Eq. 2) or 'post' (Eq. 3, without a final norm).
  combine_heads: 'concat', or 'add': the heads' outputs are summed and share one
    Dh x D projection (Table 12 left).
  sink_tokens: 1 puts a learned vector before the embeddings of every sequence, without
    position embedding; it takes part in attention and has no prediction (Table 4). It
    counts as a position of a rotary or ALiBi encoding, a prefix and a window.
  init: 'torch_default' is N(0, 1) embeddings and U(+-1/sqrt(fan_in)) linear layers,
    what the release's multi-device runs very probably used; 'tinyllama' is what its
    model files write: N(0, 2/(5 D)), and N(0, 1/(ffn N^2)) for SwiGLU's last matrix.
  dtype: of activations; parameters, norms, row statistics and logits are float32.
  implementation: of attention, see `attend`. remat: recompute blocks when backpropagating.
  """

  layers: int
  d_model: int
  heads: int
  ffn_hidden: int
  vocab_size: int = 0
  input_features: int = 0
  output_features: int = 0
  kv_heads: int | None = None
  attention: AttentionSpec = AttentionSpec()
  ffn: str = 'swiglu'
  norm: str = 'rmsnorm'
  norm_eps: float = 1e-5
  norm_location: str = 'pre'
  combine_heads: str = 'concat'
  sink_tokens: int = 0
  init: str = 'torch_default'
  dtype: str = 'bfloat16'
  implementation: str | None = None
  remat: bool = False

  def __post_init__(self):
    for name, allowed in CHOICES.items():
      if getattr(self, name) not in allowed:
        raise ValueError(f'model.{name} = {getattr(self, name)!r}; choices: '
                         f'{", ".join(allowed)}.')
    for name in ('layers', 'd_model', 'heads', 'ffn_hidden'):
      if getattr(self, name) < 1:
        raise ValueError(f'model.{name} must be at least 1, not {getattr(self, name)}.')
    if self.d_model % self.heads:
      raise ValueError(f'model.heads = {self.heads} must divide model.d_model = {self.d_model}.')
    if self.kv_heads is not None and self.kv_heads < 1:
      raise ValueError(f'model.kv_heads must be at least 1, or empty, not {self.kv_heads}.')
    if not self.norm_eps > 0:
      raise ValueError(f'model.norm_eps must be > 0, not {self.norm_eps}.')
    if self.heads % (self.kv_heads or self.heads):
      raise ValueError(f'model.kv_heads = {self.kv_heads} must divide model.heads = {self.heads}.')
    if self.sink_tokens not in (0, 1):
      raise ValueError(f'model.sink_tokens must be 0 or 1, not {self.sink_tokens}.')
    if self.sink_tokens and self.attention.kv_bias.has_slot:
      raise ValueError(f'model.sink_tokens = 1 and {self.attention.kv_bias} both take the place '
                       'of the bias slot: choose one.')
    if not self.vocab_size and not (self.input_features and self.output_features):
      raise ValueError('A model needs a vocab_size, or input_features and output_features.')
    check_implementation(self.implementation)
    self.attention.params(self.dims)  # raises where a slot does not fit the head dimension

  @property
  def dims(self) -> Dims:
    return Dims(self.heads, self.kv_heads or self.heads, self.d_model // self.heads)
