"""Which runs would decide what three seeds left undecided: two more seeds, once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from sink_jax.paper.claims import UNDECIDED, Claim, Verdict
from sink_jax.paper.collect import SYNTHETIC, Group
from sink_jax.paper.criteria import OPEN_SINK

MORE = 2  # seeds of a second look, which the simulation of false verdicts includes
MOST = 3  # seeds that a trial may have before it; with five it has been looked at twice


@dataclasses.dataclass(frozen=True)
class SecondLook:
  """The runs that a second look at the undecided claims of a group takes; see `second_looks`.

  budget, protocol, trials: as labels of runs have them. seeds: of the new runs of each trial.
  """

  budget: str
  protocol: str
  trials: Sequence[str]
  seeds: Sequence[int]


def second_looks(claims: Iterable[Claim], groups: Sequence[Group]) -> list[SecondLook]:
  """The trials of undecided claims with new seeds for them, by group.

  All trials of a group get the same seeds, since differences are paired by seed. Trials that have
  more seeds than three are left as they are: looking until something is decided would decide
  falsely in the end. So a second look that was interrupted is finished with the report that it
  began with, and not with a new one.
  """
  by_group: dict[str, list[str]] = {}
  for claim in claims:
    for verdict in claim.verdicts:
      if verdict.verdict == UNDECIDED and not _hopeless(verdict):
        by_group.setdefault(verdict.name, []).extend(claim.trials)
  looks = []
  for group in groups:
    # Of all runs, whatever became of them.
    seeds = {trial: {run.setup.seed for run in runs if run.setup}
             for trial, runs in group.trials.items()}
    trials = [trial for trial in dict.fromkeys(by_group.get(group.name, ()))
              if 0 < len(seeds.get(trial, ())) <= MOST]
    if trials:
      first = 1 + max(seed for trial in trials for seed in seeds[trial])
      # Labels have the names of the synthetic trials with their prefix, and no budget.
      prefix, budget = ('', group.budget) if group.protocol else (SYNTHETIC, '')
      looks.append(SecondLook(budget, group.protocol, [prefix + trial for trial in trials],
                              list(range(first, first + MORE))))
  return looks


def _hopeless(verdict: Verdict) -> bool:
  """Would no further seed decide it?

  Not where seeds ended unlike each other or diverged, nor where no finite number of seeds of this
  mean and spread would, as where the mean lies on its level.
  """
  if verdict.needed is not None:
    return False
  open_parts = [part for part in verdict.parts if part.held is None]
  unlike = lambda part: part.metric == 'converges' and len(set(part.values)) > 1
  undecided_sink = lambda part: part.doubt.startswith(OPEN_SINK)
  if any(unlike(part) or part.doubt and not undecided_sink(part) for part in open_parts):
    return True
  # Of fewer than three seeds too little is known to say how many would do.
  return not (verdict.few or any(map(undecided_sink, open_parts)))
