"""What a trial costs, before it starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import jax

from sink_jax.data.tokenizer import ByteEncoder
from sink_jax.models.sizes import flops_per_token, parameter_count
from sink_jax.train.experiment import from_dict
from sink_jax.train.provenance import hardware
from sink_jax.train.throughput import measured_matmul_rate

# An assumption, replaced by the clock as soon as there is one: small models on a CPU core used
# between a tenth and a quarter of the rate of large matrices; on other devices nothing was timed.
UTILISATION = 0.35
START_UP = 15  # seconds to open the data and compile
# Dense bfloat16 FLOP/s by the datasheet, for the budgets that no small machine can pay.
REFERENCE = ('H100', 989e12)


@dataclasses.dataclass(frozen=True)
class Cost:
  """parameters: with embeddings. flops: matrix products of all steps."""

  parameters: int
  steps: int
  tokens: int
  flops: float

  def seconds(self, rate: float) -> float:
    """On devices that multiply large matrices at `rate` FLOP/s."""
    return START_UP + self.flops / (UTILISATION * rate)


def cost_of(config: Mapping) -> Cost:
  """Of a config dict; needs neither the data nor a device.

  A tokenizer whose vocabulary is not known before it is made counts as bytes.
  """
  experiment = from_dict(config)
  source, tokenizer = experiment.data.source, experiment.data.tokenizer
  sizes = dict(vocab_size=getattr(source, 'vocab_size', None))
  if sizes['vocab_size'] is None:
    sizes['vocab_size'] = (experiment.model.vocab_size
                           or getattr(tokenizer, 'vocab_size', ByteEncoder.vocab_size))
  elif not sizes['vocab_size']:
    sizes |= dict(input_features=source.input_features, output_features=source.output_features)
  model = experiment.model_config(**sizes)
  tokens = experiment.steps * experiment.batch_size * experiment.data.context
  return Cost(parameter_count(model), experiment.steps, tokens,
              tokens * flops_per_token(model, experiment.data.context))


def devices_rate(dtypes: Iterable[str]) -> tuple[str, float | None]:
  """These devices in words, and their rate on large matrices of the widest of the types."""
  dtype = 'float32' if 'float32' in set(dtypes) else 'bfloat16'
  rate = measured_matmul_rate(dtype)
  return hardware(), rate and jax.device_count() * rate
