"""How often a verdict on a claim is false, by simulation of seeds.

  python -m tests.paper.calibration --out=results/paper/calibration.json

The truth of a claim lies exactly on its level, so that any verdict is as false as it can be. Seeds
are normal with spreads that were observed, clipped to what a rate can be; in some scenarios one
seed in ten collapses to 0, in the trials that the variance is pooled over as well. A claim that
three seeds leave undecided is looked at once more with five. The level is that of the mean over all
seeds that could be drawn, collapsed ones included.
"""

import argparse
import dataclasses
import json
import statistics
from pathlib import Path

import numpy as np

from sink_jax.paper.spread import CONFIDENCE, FALSE_VERDICTS, MOST_FREEDOM, t_quantile

RUNS = 10_000
LOOKS = (3, 5)  # seeds at the first look, and at the second one
RATES = (1.2, 3.9, 4.2, 6.9, 7.0, 8.5)  # points of Sink_k: trials of three seeds, smoke budget
LOSSES = (0.009, 0.0116, 0.0125, 0.013, 0.0247, 0.0556)  # nats, of the same trials
_GRID = np.array([statistics.NormalDist().inv_cdf((i + 0.5) / 999) for i in range(999)])


@dataclasses.dataclass(frozen=True)
class Scenario:
  """A claim to simulate.

  spreads: standard deviations of seeds, one of which each trial has. pool: trials of three seeds
  that the budget has besides. level: of the mean; the margin of a difference. parts: how many the
  claim has, all on their level; clear: how many more, which hold by far. collapsed: the share of
  seeds that are 0. base: the mean of the trial that a difference is to; None without one. rate:
  whether numbers are clipped to [0, 100]. above: by how much the means really exceed the level.
  """

  spreads: tuple[float, ...]
  pool: int
  level: float
  parts: int = 1
  clear: int = 0
  collapsed: float = 0.0
  base: float | None = None
  rate: bool = True
  above: float = 0.0


def scenarios():
  """{name: scenario} of claims whose truth is on the level."""
  named = {}
  for pool in (1, 3, 8, 30):
    for collapsed in (0.0, 0.1):
      end = f', {pool} trials in the pool' + (', one seed in ten collapsed' if collapsed else '')
      rates = dict(pool=pool, collapsed=collapsed)
      named |= {
          'a level of 10 %' + end: Scenario(RATES, level=10, **rates),
          'a level of 5 %, clipped at 0' + end: Scenario(RATES, level=5, **rates),
          'three parts on their level' + end: Scenario(RATES, level=10, parts=3, **rates),
          'one part on its level, two clear' + end: Scenario(RATES, level=10, clear=2, **rates),
          'a difference of 2 points' + end: Scenario(RATES, level=2, base=30, **rates)}
    named[f'a loss, {pool} trials in the pool'] = Scenario(LOSSES, pool, 3.0, rate=False)
  return named


def uncontrolled():
  """{name: scenario} of what no rule can see in five seeds."""
  return {'a level of 90 %, one seed in ten collapsed, 8 trials in the pool': Scenario(
      RATES, 8, 90, collapsed=0.1)}


def effects():
  """{name: scenario} of claims that are true, by that many points."""
  return {f'{above} points above 10 %, {pool} trials in the pool': Scenario(
      RATES, pool, 10, above=above) for pool in (8, 30) for above in (5, 10, 20)}


def training(odd):
  """The same of runs that diverge or not, three seeds of a trial, of which a share `odd` differs.

  No spread can be pooled over yes and no: three that are alike decide, whichever they are.
  """
  return {'as most seeds': round(100 * (1 - odd)**3, 2), 'as the others': round(100 * odd**3, 2)}


def simulate(scenario, runs, seed=0):
  """{'holds', 'does not hold': percent of the claims, 'at three seeds': percent with a verdict}"""
  rng = np.random.default_rng(seed)
  variance, freedom = _pooled(scenario, rng, runs)
  count = scenario.parts + scenario.clear
  values = _trials(scenario, rng, runs, count,
                   (scenario.base or 0) + scenario.level + scenario.above)
  if scenario.base is not None:
    values, variance = values - _trials(scenario, rng, runs, count, scenario.base), 2 * variance
  if scenario.clear:
    values[:, scenario.parts:] += 60
  verdicts, first = np.zeros(runs, int), 0.0
  for n in LOOKS:
    found = verdicts_of(values[..., :n], scenario.level, variance, freedom)
    verdicts = np.where(verdicts, verdicts, found)
    first = first or np.mean(verdicts != 0)
  found = {'holds': np.mean(verdicts > 0), 'does not hold': np.mean(verdicts < 0),
           'at three seeds': first}
  return {key: round(100 * float(share), 2) for key, share in found.items()}


def verdicts_of(values, level, variance, freedom):
  """1 (holds), -1 (does not hold) or 0 of claims whose parts all ask for at least a level.

  The rule of `parts.Part.judge` and `claims.judge` for many claims at once: values are (claims,
  parts, seeds), variance and freedom those of the pool, (claims,).
  """
  parts, n = values.shape[-2:]
  mean, own = values.mean(-1), values.var(-1, ddof=1)
  total = freedom + n - 1
  error = np.sqrt(((freedom * variance)[:, None] + (n - 1) * own) / total[:, None] / n)
  t = lambda share: np.array([t_quantile(k, (1 - CONFIDENCE) / share) if k else 0.0
                              for k in range(total.max() + 1)])[total][:, None]
  holds = (mean - t(1) * error > level).all(-1)
  fails = (mean + t(parts) * error < level).any(-1)
  return np.where(fails, -1, np.where(holds, 1, 0))


def _pooled(scenario, rng, runs):
  """The variance within the other trials of the budget, and its degrees of freedom."""
  means = rng.uniform(5, 60, (runs, scenario.pool))
  values = _seeds(scenario, rng, means, rng.choice(scenario.spreads, means.shape), LOOKS[0])
  bound = (values == 0).all(-1) | (values == 100).all(-1) if scenario.rate else np.zeros(
      means.shape, bool)
  freedom = (LOOKS[0] - 1) * (~bound).sum(-1)
  squares = np.where(bound, 0, (LOOKS[0] - 1) * values.var(-1, ddof=1)).sum(-1)
  return squares / np.maximum(freedom, 1), np.minimum(freedom, MOST_FREEDOM)


def _trials(scenario, rng, runs, parts, mean):
  """Seeds of trials whose mean over all seeds, clipped and collapsed ones included, is `mean`."""
  centres = {spread: _centre(scenario, spread, mean) for spread in scenario.spreads}
  which = rng.integers(len(scenario.spreads), size=(runs, parts))
  pick = lambda of: np.array(of)[which]
  return _seeds(scenario, rng, pick([centres[s] for s in scenario.spreads]),
                pick(scenario.spreads), LOOKS[-1])


def _seeds(scenario, rng, means, spreads, n):
  values = means[..., None] + spreads[..., None] * rng.standard_normal((*means.shape, n))
  values = np.where(rng.random(values.shape) < scenario.collapsed, 0.0, values)
  return np.clip(values, 0, 100) if scenario.rate else values


def _centre(scenario, spread, mean):
  """The mean of the normal distribution before clipping and collapsing, by bisection."""
  if not scenario.rate:
    return mean
  low, high = mean - 20 * spread, mean + 200
  for _ in range(60):
    middle = (low + high) / 2
    found = (1 - scenario.collapsed) * np.clip(middle + spread * _GRID, 0, 100).mean()
    low, high = (middle, high) if found < mean else (low, middle)
  return middle


def calibrate(runs):
  """Everything, as calibration.json has it."""
  measure = lambda named: {name: simulate(scenario, runs) for name, scenario in named.items()}
  on_level = measure(scenarios())
  both = {name: rates['holds'] + rates['does not hold'] for name, rates in on_level.items()}
  worst = max(both, key=both.get)
  return {
      'about': 'Percent of simulated claims with each verdict, after a second look with five seeds '
               'at what three left undecided.',
      'made_by': 'python -m tests.paper.calibration',
      'runs': runs, 'confidence': CONFIDENCE, 'most_freedom': MOST_FREEDOM,
      'found': f'Of claims that lie exactly on their level at most {both[worst]:.1f} % get a '
               f'verdict, true or false ({worst}); {100 * FALSE_VERDICTS:g} % are allowed.',
      'on the level': on_level,
      'on the level, but not to be seen in five seeds': measure(uncontrolled()),
      'training, one seed in ten unlike the others': training(0.1),
      'training, half of the seeds unlike the others': training(0.5),
      'true': measure(effects())}


def main():
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--out', required=True, help='the file to write')
  parser.add_argument('--runs', type=int, default=RUNS, help='claims per scenario')
  options = parser.parse_args()
  found = calibrate(options.runs)
  Path(options.out).write_text(json.dumps(found, indent=2) + '\n')
  print(found['found'])


if __name__ == '__main__':
  main()
