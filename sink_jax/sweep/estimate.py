"""Estimates what a sweep costs: steps, tokens and device-hours of every trial."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
from collections.abc import Mapping, Sequence
from typing import Any

from sink_jax.io import compile_cache
from sink_jax.io.parent_process import begin_child
from sink_jax.io.tables import text_table
from sink_jax.paper.budgets import BUDGETS
from sink_jax.sweep.cost import REFERENCE, START_UP, UTILISATION, Cost, cost_of, measure_devices
from sink_jax.sweep.summary import duration
from sink_jax.sweep.trials import Trial

_GUESSED_RATE = 1e12  # FLOP/s, where only the proportions between trials matter


@dataclasses.dataclass(frozen=True)
class Estimate:
  """What the trials of a sweep cost, and the devices they are to run on.

  Attributes:
    costs: of the trials that can be run, by name.
    reasons: why the others cannot be expressed at this budget, by name.
    devices: the devices in words.
    rate: their FLOP/s on large matrices, None where it is unknown.
    processes: trials that run at a time and share the devices.
  """

  costs: Mapping[str, Cost]
  reasons: Mapping[str, str]
  devices: str
  rate: float | None
  processes: int

  @property
  def seconds(self) -> float | None:
    """Seconds that all trials take on these devices; None where their rate is unknown."""
    return self.rate and sum(self.work().values())

  def work(self) -> dict[str, float]:
    """Seconds of every trial, or numbers in proportion to them where the rate is unknown.

    Processes share the rate of the devices, so that they overlap in the start-up alone.
    """
    return {name: START_UP / self.processes
            + cost.flops / (UTILISATION * (self.rate or _GUESSED_RATE))
            for name, cost in self.costs.items()}


def estimate_sweep(trials: Mapping[str, Trial], processes: int, measure: bool = True) -> Estimate:
  """Counts the work of every trial, and measures the devices of this machine, unless told not to.

  The measurement runs in a process of its own: this one would keep the device, and most of its
  memory, from the processes that train.
  """
  configs = {name: trial.config for name, trial in trials.items() if trial.config}
  reasons = {name: trial.reason for name, trial in trials.items() if not trial.config}
  costs, devices, rate = {}, 'nothing to run', None
  if configs:
    # 'spawn', since the threads of jax do not survive a fork.
    context = multiprocessing.get_context('spawn')
    with concurrent.futures.ProcessPoolExecutor(
        1, mp_context=context, initializer=begin_child) as elsewhere:
      costs, devices, rate = elsewhere.submit(_count_and_measure, configs, measure).result()
  return Estimate(costs, reasons, devices, rate, processes)


def headline(estimate: Estimate, budget: str | None = None) -> str:
  """Sums the trials up in two or three lines."""
  flops = sum(cost.flops for cost in estimate.costs.values())
  tokens = sum(cost.tokens for cost in estimate.costs.values())
  name, peak = REFERENCE
  lines = [f'{len(estimate.costs)} trials{f" at budget {budget}" if budget else ""}, '
           f'{tokens / 1e9:,.4g} billion tokens, {flops:.2g} FLOPs in matrix products']
  if not estimate.rate or estimate.seconds is None:
    lines.append(estimate.devices)
  else:
    lines.append(f'{estimate.devices}, {estimate.rate / 1e12:,.3g} TFLOP/s in large matrices: '
                 f'about {duration(estimate.seconds)} with {estimate.processes} at a time, '
                 'start-ups included')
  lines.append(f'one {name} at {UTILISATION:.0%} of its {peak / 1e12:.0f} TFLOP/s: '
               f'{flops / (UTILISATION * peak) / 3600:,.2g} device-hours')
  return '\n'.join(lines)


def as_text(estimate: Estimate, budget: str | None = None, rules: Sequence[str] = ()) -> str:
  """Lists every trial, the rules of the budget (by default the paper's trials' own), and the sum.
  """
  lines = text_table(
      ['trial', 'parameters', 'steps', 'tokens', 'here', REFERENCE[0]],
      [[name, f'{cost.parameters:,}', f'{cost.steps:,}', f'{cost.tokens:,}',
        duration(cost.seconds(estimate.rate)) if estimate.rate else '?',
        duration(cost.flops / (UTILISATION * REFERENCE[1]))]
       for name, cost in estimate.costs.items()])
  lines += [f'{name}: not expressible: {reason}' for name, reason in estimate.reasons.items()]
  if not rules and budget in BUDGETS:
    rules = BUDGETS[budget].rules
  if rules:
    lines += ['', f'Budget {budget}:', *(f'- {rule}' for rule in rules)]
  return '\n'.join([*lines, '', headline(estimate, budget)])


def _count_and_measure(
    configs: Mapping[str, Mapping[str, Any]],
    measure: bool) -> tuple[dict[str, Cost], str, float | None]:
  """Costs by name, and the devices and their rate as `Estimate` has them."""
  costs = {name: cost_of(config) for name, config in configs.items()}
  if not measure:
    return costs, 'the devices were not measured', None
  try:
    compile_cache.enable()
    return costs, *measure_devices(config['model']['dtype'] for config in configs.values())
  except RuntimeError as error:  # another process holds the devices, for example
    return costs, f'devices unknown ({error})', None
