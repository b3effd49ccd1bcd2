"""A plan in words, for the terminal."""

from __future__ import annotations

from sink_jax.io.tables import text_table
from sink_jax.plan.chips import GIB, SOURCE, Slice
from sink_jax.plan.records import Plan, StepCost, Traffic


def as_text(plan: Plan, where: Slice) -> str:
  """All of a plan that fits, or what is known of one that does not."""
  mesh = ' x '.join(f'{name} {n}' for name, n in plan.mesh.items() if n > 1) or 'one device'
  lines = [
      f'{plan.name} on {plan.topology}: {plan.devices:,} devices, {mesh}',
      f'  {plan.parameters:,} parameters, {plan.tokens:,} tokens a step: {plan.batch_size} '
      f'sequences of {plan.context}, {plan.microbatches} micro-batches, remat '
      f'{plan.remat}, ' + _blocks(plan.unroll),
      'Compiled for these devices, per device:', *_memory(plan)]
  if plan.cost:
    lines += _cost(plan, plan.cost, where)
  return '\n'.join(lines)


def as_line(plan: Plan) -> str:
  """One line of a search: the options of a plan, and what it needs."""
  mesh = ' '.join(f'--{name}={n}' for name, n in plan.mesh.items())
  options = f'{mesh} --remat={plan.remat} --microbatches={plan.microbatches}'
  peak = f'{plan.largest_peak[1] / GIB:.1f} of {plan.usable / GIB:.1f} GiB'
  if not plan.fits or not plan.cost:
    return f'{options}: does not fit, {peak}'
  return (f'{options}: {_ms(plan.cost.roofline.step, 0)}, MFU {plan.cost.mfu:.0%}, {peak}')


def _cost(plan: Plan, cost: StepCost, where: Slice) -> list[str]:
  seconds, chip = cost.roofline, where.chip
  lines = [
      f'  FLOPs          {cost.flops / 1e12:,.2f} T a step, {cost.kernel_flops / 1e12:,.2f} T '
      f'of them in attention kernels; the model\'s are {plan.model_flops / 1e12:,.2f} T',
      f'  memory traffic {cost.bytes / 1e9:,.1f} GB a step']
  if cost.compiler_flops and cost.compiler_bytes:
    lines.append(f'    (the compiler, which counts loops once and no kernels: '
                 f'{cost.compiler_flops / 1e12:,.2f} TFLOP, '
                 f'{cost.compiler_bytes / 1e9:,.1f} GB)')
  if cost.unknown_loops:
    lines.append(f'    {cost.unknown_loops} loops have no known trip count: counted once')
  return [
      *lines, *_traffic(cost.collectives),
      'Computed, not measured:',
      f'  compute        {_ms(seconds.compute)}' + (
          ' (given)' if cost.share is None else f' at {cost.share:.0%} of '
          f'{chip.peak / 1e12:,.0f} TFLOP/s, {_ms(seconds.peak)} at all of it'),
      f'  memory         {_ms(seconds.memory)} at {chip.bandwidth / 1e9:,.0f} GB/s',
      f'  links          {_ms(seconds.overlapped)} while other work goes on, '
      f'{_ms(seconds.exposed)} while it waits; {chip.link / 1e9:.0f} GB/s a link and direction',
      f'  step           {_ms(seconds.step)}, bound by {seconds.bound}: '
      f'{cost.tokens_per_second:,.0f} tokens/s, MFU {cost.mfu:.1%}',
      f'  at the very least {_ms(seconds.floor)}, all at its peak and at a time',
      f'Constants: {SOURCE}. The share of the peak is an assumption.']


def _ms(seconds: float, digits: int = 1) -> str:
  return f'{1e3 * seconds:,.{digits}f} ms'


def _blocks(unroll: int | None) -> str:
  return (f'{unroll} blocks one after another' if unroll and unroll > 1
          else 'a loop over the blocks')


def _memory(plan: Plan) -> list[str]:
  # A program that the compiler refused has no size of its outputs: only arguments and temporaries
  # are known.
  parts = ', '.join(f'{name} {bytes_ / GIB:,.2f} GiB' for name, bytes_ in (
      ('arguments', plan.memory.arguments), ('temporaries', plan.memory.temporaries),
      ('outputs', plan.memory.outputs)) if bytes_ is not None)
  name, peak = plan.largest_peak
  peaks = ', '.join(f'{part} {bytes_ / GIB:,.2f} GiB' for part, bytes_ in plan.peaks.items())
  return [f'  memory         {peak / GIB:,.2f} GiB of the {plan.usable / GIB:,.2f} that programs '
          f'may use of {plan.capacity / GIB:,.0f}, in {name}: {peaks}',
          f'  training step  {parts}; attention by {plan.attention}']


def _traffic(rows: list[Traffic]) -> list[str]:
  if not rows:
    return ['  between devices: nothing']
  table = text_table(
      ['what', 'over', 'devices', 'times', 'arrays GB', 'sent GB', 'ms', ''],
      [[row.kind, row.axes, f'{row.group:,}', f'{row.count:,.0f}', f'{row.payload / 1e9:,.3f}',
        f'{row.moved / 1e9:,.3f}', f'{1e3 * row.seconds:,.1f}',
        'overlapped' if row.overlapped else ''] for row in rows], left=(0, 1, 7))
  return ['  between devices, a step:', *(f'    {line}' for line in table)]
