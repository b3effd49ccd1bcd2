"""ModelOptions: the section `model` of a config, before the data fix what it leaves open."""

from __future__ import annotations

import dataclasses

from sink_jax.attention.spec import AttentionSpec
from sink_jax.models.config import Layer, ModelConfig
from sink_jax.models.sizes import sized


@dataclasses.dataclass(frozen=True)
class ModelOptions:
  """A named size, and what takes the place of its values; None leaves a value as it is.

  The fields are those of `ModelConfig` that a config can set, and mean the same.

  size: a name in `models.sizes.SIZES`.
  """

  size: str
  layers: int | None = None
  d_model: int | None = None
  heads: int | None = None
  kv_heads: int | None = None
  head_dim: int | None = None
  ffn_hidden: int | None = None
  vocab_size: int | None = None
  input_features: int | None = None
  output_features: int | None = None
  pattern: tuple[Layer, ...] | None = None
  ffn: str | None = None
  norm: str | None = None
  norm_eps: float | None = None
  norm_location: str | None = None
  parallel_residual: bool | None = None
  biases: tuple[str, ...] | None = None
  embedding_dim: int | None = None
  tied: bool | None = None
  logit_cap: float | None = None
  linear: str | None = None
  combine_heads: str | None = None
  sink_tokens: int | None = None
  init: str | None = None
  dtype: str | None = None
  implementation: str | None = None
  remat: str | None = None
  unroll: int | None = None

  def model_config(self, attention: AttentionSpec, vocab_size: int | None = None,
                   input_features: int = 0, output_features: int = 0) -> ModelConfig:
    """The model, for data of this vocabulary, or of these features where it has none.

    Raises:
      ValueError: the vocabulary of the data exceeds the model's, or a value is none of a model.
    """
    try:
      return self._model_config(attention, vocab_size, input_features, output_features)
    except (TypeError, OverflowError) as error:  # values come from files, of any type
      raise ValueError(f'a value of model has the wrong type: {error}.') from None

  def _model_config(self, attention: AttentionSpec, vocab_size: int | None, input_features: int,
                    output_features: int) -> ModelConfig:
    options = {key: value for key, value in vars(self).items() if value is not None}
    if vocab_size:
      largest = options.setdefault('vocab_size', vocab_size)
      if vocab_size > largest:
        raise ValueError(f'The data (its tokenizer, or RandomTokens(below=...)) has {vocab_size} '
                         f'ids, model.vocab_size is {largest}: raise model.vocab_size, or leave it '
                         'empty to take that of the data.')
    elif input_features:
      options |= dict(input_features=input_features, output_features=output_features)
    return sized(**options, attention=attention)
