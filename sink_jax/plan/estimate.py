"""A plan in words, with the time of a step from datasheets: a roofline. Nothing is measured.

A device computes, reads and writes its memory, and sends over the links of its slice and over the
network between slices. Each takes at least its amount over its rate, and all go on at the same
time, so a step takes at least as long as the longest.
"""

from __future__ import annotations

import shlex

import jax.numpy as jnp

from sink_jax.models.sizes import flops_per_token, parameter_count
from sink_jax.plan.chips import GIB
from sink_jax.plan.job import Plan

SHARE = 0.6  # of the peak that matrix products reach: an assumption


def step_seconds(plan: Plan) -> dict[str, float]:
  """Seconds of a training step that fits, by what takes them; a step takes the longest."""
  assert plan.step is not None
  chip, model, microbatches = plan.where.chip, plan.model, plan.experiment.microbatches
  data, fsdp, tensor = (plan.mesh[name] for name in ('data', 'fsdp', 'tensor'))
  # These policies repeat the forward pass of the blocks, a third of all products but those of the
  # logits.
  again = model.remat in ('blocks', 'save_attention')
  context = plan.experiment.data.context
  logits = 6 * model.d_model * model.vocab_size / flops_per_token(model, context)
  parameters, width = parameter_count(model) / tensor, jnp.dtype(model.dtype).itemsize
  # In a ring of n devices each sends (n - 1) / n of an array, for a sum twice that.
  ring = lambda n, bytes_: (n - 1) / n * bytes_
  near = data // plan.where.count  # devices of 'data' in a slice
  gradients = jnp.dtype(plan.experiment.gradient_dtype).itemsize * parameters / fsdp
  links = 2 * ring(near, gradients)
  # Parameters are gathered in the forward and the backward pass, and their gradients scattered.
  links += microbatches * ring(fsdp, 3 * width * parameters)
  # A block sums activations twice in each forward pass and twice in the backward pass.
  activations = plan.experiment.tokens_per_step / (data * fsdp) * model.d_model * width
  links += 2 * ring(tensor, (4 + 2 * again) * model.layers * activations)
  return {
    'compute': (1 + again * (1 - logits) / 3) * model_seconds(plan) / SHARE,
    # All that the step holds is written and read at least once.
    'memory': 2 * (plan.step.arguments + microbatches * plan.step.temporaries) / chip.bandwidth,
    'links': links / (2 * chip.link),  # both directions of one dimension of the torus
    'network': 2 * ring(plan.where.count, gradients / near) / chip.network,
  }


def model_seconds(plan: Plan) -> float:
  """Seconds that the model's products take at the peak of the datasheet, where MFU is 100 %."""
  experiment = plan.experiment
  flops = experiment.tokens_per_step * flops_per_token(plan.model, experiment.data.context)
  return flops / plan.where.devices / plan.where.chip.peak


def as_text(plan: Plan) -> str:
  """The run, its memory by part, the estimated time, the totals and the options to paste."""
  experiment, model, chip = plan.experiment, plan.model, plan.where.chip
  mesh = ', '.join(f'{name} {size}' for name, size in plan.mesh.items())
  parts = {'parameters': plan.parameters, 'optimizer': plan.optimizer}
  if plan.step:
    parts['activations, gradients, logits'] = plan.step.temporaries
  parts |= {f'{name} in all': bytes_ for name, bytes_ in plan.peaks.items()}
  lines = [
    f'{experiment.label.trial or experiment.model.size} on {plan.where.name}: '
    f'{plan.where.devices:,} devices, mesh {mesh}',
    f'{parameter_count(model):,} parameters, {parameter_count(model, embeddings=False):,} '
    f'without embeddings; {experiment.tokens_per_step:,} tokens a step: '
    f'{experiment.batch_size} sequences of {experiment.data.context}, '
    f'{experiment.microbatches} micro-batches',
    f'attention by {plan.attention}, remat {model.remat}',
    f'Memory of a device, compiled; programs may use {chip.usable / GIB:.2f} GiB:',
    *(f'  {name:30} {bytes_ / GIB:10,.2f} GiB' for name, bytes_ in parts.items()),
  ]
  if plan.refused:
    lines.append(f'  does not fit: {plan.refused}')
  if not plan.fits:
    return '\n'.join(lines)
  seconds = step_seconds(plan)
  bound, step = max(seconds.items(), key=lambda item: item[1])
  hours = experiment.steps * step / 3600
  parts = ', '.join(f'{name} {1e3 * s:,.1f} ms' for name, s in seconds.items() if s)
  return '\n'.join(
    [
      *lines,
      f'Time of a step, an estimate from datasheets and {SHARE:.0%} of the peak, not measured:',
      f'  {1e3 * step:,.1f} ms, bound by {bound} ({parts}); '
      f'{experiment.tokens_per_step / step:,.0f} tokens/s, MFU {model_seconds(plan) / step:.0%}',
      f'{experiment.steps:,} steps: {hours:,.1f} h, {hours * plan.where.chips:,.0f} chip-hours',
      f'In launch/settings.sh: ARGUMENTS=({shlex.join(plan.options)})',
    ]
  )
