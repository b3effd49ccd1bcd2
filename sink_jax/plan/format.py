"""A plan in words, for the terminal."""

from __future__ import annotations

from typing import Any

from sink_jax.plan.chips import GIB, SOURCE, Slice


def as_text(one: dict[str, Any], where: Slice) -> str:
  """All of a plan that fits, or what is known of one that does not."""
  mesh = ' x '.join(f'{name} {n}' for name, n in one['mesh'].items() if n > 1) or 'one device'
  lines = [
      f'{one["name"]} on {one["topology"]}: {one["devices"]:,} devices, {mesh}',
      f'  {one["parameters"]:,} parameters, {one["tokens"]:,} tokens a step: {one["batch_size"]} '
      f'sequences of {one["context"]}, {one["microbatches"]} micro-batches, remat '
      f'{one["remat"]}, ' + _blocks(one),
      'Compiled for these devices, per device:']
  lines += _memory(one)
  if 'flops' not in one:
    return '\n'.join(lines)
  seconds, ms = one['seconds'], lambda s: f'{1e3 * s:,.1f} ms'
  lines += [
      f'  FLOPs          {one["flops"] / 1e12:,.2f} T a step, {one["kernel_flops"] / 1e12:,.2f} T '
      f'of them in attention kernels; the model\'s are {one["model_flops"] / 1e12:,.2f} T',
      f'  memory traffic {one["bytes"] / 1e9:,.1f} GB a step']
  if one['compiler_flops']:
    lines.append(f'    (the compiler, which counts loops once and no kernels: '
                 f'{one["compiler_flops"] / 1e12:,.2f} TFLOP, '
                 f'{one["compiler_bytes"] / 1e9:,.1f} GB)')
  if one['unknown_loops']:
    lines.append(f'    {one["unknown_loops"]} loops do not say how often they turn: counted once')
  lines += _traffic(one['collectives'])
  chip = where.chip
  return '\n'.join([
      *lines,
      'Computed, not measured:',
      f'  compute        {ms(seconds["compute"])}' + (
          ' (given)' if one['share'] is None else f' at {one["share"]:.0%} of '
          f'{chip.peak / 1e12:,.0f} TFLOP/s, {ms(seconds["peak"])} at all of it'),
      f'  memory         {ms(seconds["memory"])} at {chip.bandwidth / 1e9:,.0f} GB/s',
      f'  links          {ms(seconds["overlapped"])} while other work goes on, '
      f'{ms(seconds["exposed"])} while it waits; {chip.link / 1e9:.0f} GB/s a link and direction',
      f'  step           {ms(seconds["step"])}, bound by {seconds["bound"]}: '
      f'{one["tokens_per_second"]:,.0f} tokens/s, MFU {one["mfu"]:.1%}',
      f'  at the very least {ms(seconds["floor"])}, all at its peak and at a time',
      f'Constants: {SOURCE}. The share of the peak is an assumption.'])


def largest(one: dict[str, Any]) -> tuple[str, float]:
  """The part of a run that needs most memory on a device, and how many bytes."""
  return max(one['peaks'].items(), key=lambda item: item[1])


def brief(one: dict[str, Any]) -> str:
  """One line of a search."""
  mesh = ' '.join(f'--{name}={n}' for name, n in one['mesh'].items())
  head = f'{mesh} --remat={one["remat"]} --microbatches={one["microbatches"]}'
  total = f'{largest(one)[1] / GIB:.1f} of {one["usable"] / GIB:.1f} GiB'
  if not one['fits']:
    return f'{head}: does not fit, {total}'
  return f'{head}: {1e3 * one["seconds"]["step"]:,.0f} ms, MFU {one["mfu"]:.0%}, {total}'


def _blocks(one):
  unroll = one['unroll']
  return f'{unroll} blocks one after another' if unroll > 1 else 'a loop over the blocks'


def _memory(one):
  memory = one['memory']
  gib = lambda key: f'{memory[key] / GIB:,.2f} GiB'
  parts = ', '.join(f'{name} {gib(name)}' for name in ('arguments', 'temporaries', 'outputs')
                    if name in memory)
  name, most = largest(one)
  peaks = ', '.join(f'{part} {bytes_ / GIB:,.2f} GiB' for part, bytes_ in one['peaks'].items())
  return [f'  memory         {most / GIB:,.2f} GiB of the {one["usable"] / GIB:,.2f} that programs '
          f'may use of {one["capacity"] / GIB:,.0f}, in {name}: {peaks}',
          f'  training step  {parts}; attention by {one["attention"]}']


def _traffic(rows):
  if not rows:
    return ['  between devices: nothing']
  lines = ['  between devices, a step:',
           f'    {"what":<20}{"over":<16}{"devices":>8}{"times":>8}{"arrays GB":>11}{"sent GB":>9}'
           f'{"ms":>9}']
  return lines + [
      f'    {row["kind"]:<20}{row["axes"]:<16}{row["group"]:>8,}{row["count"]:>8,.0f}'
      f'{row["payload"] / 1e9:>11,.3f}{row["moved"] / 1e9:>9,.3f}{1e3 * row["seconds"]:>9,.1f}'
      + (' overlapped' if row['overlapped'] else '') for row in rows]
