"""What a sweep will cost: steps, tokens and device-hours of every trial."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
from collections.abc import Mapping

from sink_jax.io import compile_cache
from sink_jax.paper.budgets import BUDGETS
from sink_jax.sweep.cost import REFERENCE, START_UP, UTILISATION, Cost, cost_of, devices_rate
from sink_jax.sweep.summary import duration
from sink_jax.sweep.trials import Trial


@dataclasses.dataclass(frozen=True)
class Plan:
  """costs: of the trials that can be run. reasons: why the others cannot.

  devices: these, in words; rate: their FLOP/s on large matrices, None if unknown.
  processes: trials at a time, which share the devices.
  """

  costs: Mapping[str, Cost]
  reasons: Mapping[str, str]
  devices: str
  rate: float | None
  processes: int

  @property
  def seconds(self) -> float | None:
    """All trials on these devices; processes overlap in what is not multiplying matrices."""
    return self.rate and sum(self.work().values())

  def work(self) -> dict[str, float]:
    """Seconds of every trial, or numbers in proportion to them."""
    return {name: START_UP / self.processes + cost.flops / (UTILISATION * (self.rate or 1e12))
            for name, cost in self.costs.items()}


def make(trials: Mapping[str, Trial], processes: int) -> Plan:
  """Counts every trial, and measures these devices in a process of its own.

  This process would keep them from the trials otherwise.
  """
  configs = {name: trial.config for name, trial in trials.items() if trial.config}
  reasons = {name: trial.reason for name, trial in trials.items() if not trial.config}
  costs, devices, rate = {}, 'nothing to run', None
  if configs:
    context = multiprocessing.get_context('spawn')
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as elsewhere:
      costs, devices, rate = elsewhere.submit(_count_and_measure, configs).result()
  return Plan(costs, reasons, devices, rate, processes)


def headline(plan: Plan, budget: str | None = None) -> str:
  """The whole in a line or two."""
  flops = sum(cost.flops for cost in plan.costs.values())
  tokens = sum(cost.tokens for cost in plan.costs.values())
  name, peak = REFERENCE
  lines = [f'{len(plan.costs)} trials{f" at budget {budget}" if budget else ""}, '
           f'{tokens / 1e9:,.4g} billion tokens, {flops:.2g} FLOPs in matrix products']
  if not plan.rate:
    lines.append(plan.devices)
  else:
    lines.append(f'{plan.devices}, {plan.rate / 1e12:,.3g} TFLOP/s in large matrices: about '
                 f'{duration(plan.seconds)} with {plan.processes} at a time, start-ups included')
  lines.append(f'one {name} at {UTILISATION:.0%} of its {peak / 1e12:.0f} TFLOP/s: '
               f'{flops / (UTILISATION * peak) / 3600:,.2g} device-hours')
  return '\n'.join(lines)


def as_text(plan: Plan, budget: str | None = None) -> str:
  """Every trial, the rules of the budget, and the whole."""
  width = max(map(len, [*plan.costs, *plan.reasons, 'trial']))
  lines = [f'{"trial":<{width}}  {"parameters":>13}  {"steps":>7}  {"tokens":>15}  '
           f'{"here":>9}  {REFERENCE[0]:>9}']
  for name, cost in plan.costs.items():
    here = duration(cost.seconds(plan.rate)) if plan.rate else '?'
    there = duration(cost.flops / (UTILISATION * REFERENCE[1]))
    lines.append(f'{name:<{width}}  {cost.parameters:>13,}  {cost.steps:>7,}  '
                 f'{cost.tokens:>15,}  {here:>9}  {there:>9}')
  lines += [f'{name:<{width}}  not expressible: {reason}' for name, reason in plan.reasons.items()]
  if budget in BUDGETS:
    lines += ['', f'Budget {budget}:', *(f'- {rule}' for rule in BUDGETS[budget].rules)]
  return '\n'.join([*lines, '', headline(plan, budget)])


def _count_and_measure(configs):
  costs = {name: cost_of(config) for name, config in configs.items()}
  try:
    compile_cache.enable()
    return costs, *devices_rate(config['model']['dtype'] for config in configs.values())
  except RuntimeError as error:  # another process holds them, say
    return costs, f'devices unknown ({error})', None
