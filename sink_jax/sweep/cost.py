"""Estimates what a trial costs before it starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from sink_jax.data.synthetic import SyntheticTask
from sink_jax.data.tokenizer import Bytes
from sink_jax.models.sizes import flops_per_token, parameter_count
from sink_jax.pretrained.source import open_source
from sink_jax.train.experiment import from_dict
from sink_jax.train.provenance import hardware
from sink_jax.train.start import opened, with_sizes
from sink_jax.train.throughput import measured_matmul_rate

# The share of the rate on large matrices that a training step is assumed to reach. It matters until
# the first trial has ended, since the time left is then extrapolated from the clock. Small models
# on a CPU core reached between a tenth and a quarter; on other devices nothing was timed.
UTILISATION = 0.35
START_UP = 15  # seconds to open the data and compile
# Dense bfloat16 FLOP/s by the datasheet, for the budgets that no small machine can pay.
REFERENCE = ('H100', 989e12)


@dataclasses.dataclass(frozen=True)
class Cost:
  """What training one trial costs.

  Attributes:
    parameters: their number, embeddings included.
    steps: optimiser steps.
    tokens: of all steps.
    flops: of the matrix products of all steps, forward and backward.
  """

  parameters: int
  steps: int
  tokens: int
  flops: float

  def seconds(self, rate: float) -> float:
    """Seconds that the trial takes on devices that multiply large matrices at `rate` FLOP/s."""
    return START_UP + self.flops / (UTILISATION * rate)


def cost_of(config: Mapping[str, Any]) -> Cost:
  """Computes the cost of a config dict; reads no data and asks no device.

  Of a model that `init.source` names its configs are read. A tokenizer that is yet to be trained
  has an unknown vocabulary, which counts as that of bytes.

  Raises:
    ValueError: that model cannot be opened; names the option.
  """
  experiment = from_dict(config)
  if not experiment.sizes_are_known:
    experiment = from_dict(with_sizes(config, opened(experiment.init, open_source)))
  source, tokenizer = experiment.data.source, experiment.data.tokenizer
  if isinstance(source, SyntheticTask):
    model = experiment.model_config(
        source.vocab_size, source.input_features, source.output_features)
  else:
    model = experiment.model_config(
        experiment.model.vocab_size or getattr(tokenizer, 'vocab_size', Bytes.vocab_size))
  tokens = experiment.steps * experiment.batch_size * experiment.data.context
  return Cost(parameter_count(model), experiment.steps, tokens,
              tokens * flops_per_token(model, experiment.data.context))


def measure_devices(dtypes: Iterable[str]) -> tuple[str, float | None]:
  """Describes the devices of this process, and times them on large matrices.

  Args:
    dtypes: of the activations of the trials. The widest, and so the slowest, is measured.

  Returns:
    The devices in words; FLOP/s of all of them together, None where they cannot be measured.
  """
  dtype = 'float32' if 'float32' in set(dtypes) else 'bfloat16'
  rate = measured_matmul_rate(dtype)
  return hardware(), rate and jax.device_count() * rate
