"""Trials whose rows are stored: a sweep on a new machine leaves them out."""
# pandas does not say whether an expression is a table or a column.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

from collections.abc import Mapping

from sink_jax.data.dataset import open_data
from sink_jax.report.one_run import source_of
from sink_jax.report.runs import IDENTITY, NO_SEED, Runs, identities
from sink_jax.sweep.trials import Trial
from sink_jax.train.workdir import FINAL_STATUSES


def not_stored(trials: Mapping[str, Trial], stored: Runs) -> dict[str, Trial]:
  """The trials that no finished run of `stored` is: one of the same task, budget, protocol and
  seed.

  Raises:
    ValueError: the text on this machine is not that of the stored runs of the same budget.
  """
  finished = stored.runs[stored.runs.status.isin(FINAL_STATUSES)]
  there = {*identities(finished)}
  left = {name: trial for name, trial in trials.items() if _identity(trial) not in there}
  contents = {
    (run.task, run.budget, run.source): run.content
    for run in finished.itertuples()
    if isinstance(run.content, str)
  }
  checked = set()
  for name, trial in left.items():
    if (experiment := trial.experiment) is None:
      continue
    key = experiment.label.task, experiment.label.budget, source_of(experiment)
    if key in contents and key not in checked:
      checked.add(key)
      if (content := open_data(experiment.data).summary()['content']) != contents[key]:
        raise ValueError(
          f'{name}: the text {key[-1]} is not that of the stored runs ({content}, and not '
          f'{contents[key]}). It depends on the release of Python: docs/experiments.md says '
          'which.'
        )
  return left


def _identity(trial: Trial) -> tuple:
  seed = float(trial.experiment.seed) if trial.experiment else NO_SEED
  return *(getattr(trial.label, key) for key in IDENTITY[:-1]), seed
