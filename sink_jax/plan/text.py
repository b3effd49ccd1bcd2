"""A plan in words, for the terminal."""

from __future__ import annotations

import shlex

from sink_jax.models.sizes import parameter_count
from sink_jax.plan.chips import GIB
from sink_jax.plan.estimate import SHARE, model_seconds, step_seconds
from sink_jax.plan.job import Plan


def as_text(plan: Plan) -> str:
  """The run, its memory by part, the estimated time, the totals and the options to paste."""
  experiment, model, chip = plan.experiment, plan.model, plan.where.chip
  mesh = ', '.join(f'{name} {size}' for name, size in plan.mesh.items())
  parts = {'parameters': plan.parameters, 'optimizer': plan.optimizer}
  if plan.step:
    parts['activations, gradients, logits'] = plan.step.temporaries
  parts |= {f'{name} in all': bytes_ for name, bytes_ in plan.peaks.items()}
  lines = [
      f'{experiment.label.trial or experiment.model.size} on {plan.where.name}: {plan.where.devices:,} '
      f'devices, mesh {mesh}',
      f'{parameter_count(model):,} parameters, {parameter_count(model, embeddings=False):,} without '
      f'embeddings; {plan.experiment.tokens_per_step:,} tokens a step: {experiment.batch_size} sequences of '
      f'{experiment.data.context}, {experiment.microbatches} micro-batches',
      f'attention by {plan.attention}, remat {model.remat}',
      f'Memory of a device, compiled; programs may use {chip.usable / GIB:.2f} GiB:',
      *(f'  {name:30} {bytes_ / GIB:10,.2f} GiB' for name, bytes_ in parts.items())]
  if plan.refused:
    lines.append(f'  does not fit: {plan.refused}')
  if not plan.fits:
    return '\n'.join(lines)
  seconds = step_seconds(plan)
  bound, step = max(seconds.items(), key=lambda item: item[1])
  hours = plan.experiment.steps * step / 3600
  parts = ', '.join(f'{name} {1e3 * s:,.1f} ms' for name, s in seconds.items() if s)
  return '\n'.join([
      *lines,
      f'Time of a step, an estimate from datasheets and {SHARE:.0%} of the peak, not measured:',
      f'  {1e3 * step:,.1f} ms, bound by {bound} ({parts}); {plan.experiment.tokens_per_step / step:,.0f} tokens/s, '
      f'MFU {model_seconds(plan) / step:.0%}',
      f'{plan.experiment.steps:,} steps: {hours:,.1f} h, '
      f'{hours * plan.where.chips:,.0f} chip-hours',
      f'In launch/settings.sh: ARGUMENTS=({shlex.join(plan.options)})'])
