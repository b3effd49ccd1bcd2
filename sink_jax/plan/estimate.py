"""The time of a training step, estimated from datasheets: a roofline. Nothing is measured.

A device computes, reads and writes its memory, and sends over the links of its slice and over the
network between slices. Each takes at least its amount over its rate, and all go on at the same
time, so a step takes at least as long as the longest.
"""

from __future__ import annotations

import jax.numpy as jnp

from sink_jax.models.sizes import flops_per_token, parameter_count
from sink_jax.plan.job import Plan

SHARE = 0.6  # of the peak that matrix products reach: an assumption


def step_seconds(plan: Plan) -> dict[str, float]:
  """Seconds of a training step that fits, by what takes them; a step takes the longest."""
  assert plan.step is not None
  chip, model, microbatches = plan.where.chip, plan.model, plan.experiment.microbatches
  data, fsdp, tensor = (plan.mesh[name] for name in ('data', 'fsdp', 'tensor'))
  # The forward pass is a third of the products; these policies compute it twice.
  repeated = 4 / 3 if model.remat in ('blocks', 'save_attention') else 1
  parameters, width = parameter_count(model) / tensor, jnp.dtype(model.dtype).itemsize
  # In a ring of n devices each sends all of an array but its n-th part, for a sum twice.
  ring = lambda n, bytes_: (n - 1) / n * bytes_
  near = data // plan.where.count  # devices of 'data' in a slice
  gradients = 4 * parameters / fsdp
  links = 2 * ring(near, gradients)
  # Parameters are gathered in the forward and the backward pass, and their gradients scattered.
  links += microbatches * ring(fsdp, 3 * width * parameters)
  # A block sums activations twice in the forward pass and twice in the backward pass.
  activations = plan.experiment.tokens_per_step / (data * fsdp) * model.d_model * width
  links += 2 * ring(tensor, 4 * repeated * model.layers * activations)
  return {
      'compute': repeated * model_seconds(plan) / SHARE,
      # All that the step holds is written and read at least once.
      'memory': 2 * (plan.step.arguments + microbatches * plan.step.temporaries) / chip.bandwidth,
      'links': links / (2 * chip.link),  # both directions of one dimension of the torus
      'network': 2 * ring(plan.where.count, gradients / near) / chip.network}


def model_seconds(plan: Plan) -> float:
  """Seconds that the model's products take at the peak of the datasheet: those of MFU 100 %."""
  flops = plan.experiment.tokens_per_step * flops_per_token(plan.model, plan.experiment.data.context)
  return flops / plan.where.devices / plan.where.chip.peak
