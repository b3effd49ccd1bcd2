"""Plans the run of a config, and prints what it needs on a slice of TPUs."""

from __future__ import annotations

import functools
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from sink_jax.cli import command
from sink_jax.plan import suggestions
from sink_jax.plan.chips import GIB, parse
from sink_jax.plan.format import as_line, as_text
from sink_jax.plan.job import Job, plan
from sink_jax.plan.records import Plan
from sink_jax.pretrained.source import open_source
from sink_jax.train.experiment import Experiment, from_dict
from sink_jax.train.sharding import mesh_sizes
from sink_jax.train.start import opened, with_sizes


def make_plan(config: dict[str, Any], topology: str, vocab: int | None, own_config: bool,
              share: float, step_seconds: float | None, search: bool, file: str | None) -> int:
  """Prints the plan of a run, or of runs like it, and returns the exit code.

  Args:
    config: of the run.
    topology: the slice of TPUs, such as v5e:16x16.
    vocab: size of the vocabulary; None for that of the config.
    own_config: whether the config is a person's, and so its tokenizer that of the model.
    share: of the peak that matrix products reach.
    step_seconds: measured time of a step, in place of the share.
    search: whether to plan other meshes and remat policies too, and to rank those that fit.
    file: for all of it as JSON; None for none.

  Raises:
    ValueError: the run cannot be planned. CompilerMissing: the compiler of TPUs is not installed.
    OSError: the file cannot be written.
  """
  job = _job(config, topology, vocab, own_config)
  plan_of = functools.partial(plan, share=share, compute=step_seconds)
  if search:
    fitting = _search(job, plan_of)
    _save([planned.to_json() for planned in fitting], file)
    return 0 if fitting else 1
  planned = plan_of(job)
  print(as_text(planned, job.where))
  _save(planned.to_json(), file)
  if planned.fits:
    return 0
  name, needed = planned.largest_peak
  print(f'error: {name} needs {needed / GIB:,.1f} GiB of {planned.usable / GIB:,.2f} on a '
        'device. Estimates of what would help:', *suggestions.memory_options(job, planned.memory),
        '  --search compiles some of them.', sep='\n', file=sys.stderr)
  return 1


def _search(job: Job, plan_of: Callable[[Job], Plan]) -> list[Plan]:
  plans = []
  for other in suggestions.alternatives(job):
    try:
      plans.append(plan_of(other))
    except ValueError as error:
      # One alternative may be refused; the others are tried all the same.
      command.say(f'{suggestions.options_of(other)}: {error}')
      continue
    command.say(as_line(plans[-1]))
  fitting = suggestions.ranked(plans)
  print('\n'.join(map(as_line, fitting))
        or 'error: none of them fits: more chips, or smaller batches.')
  return fitting


def _save(document: Any, file: str | None) -> None:
  if file:
    pathlib.Path(file).write_text(json.dumps(document, indent=1) + '\n')


def _job(config: dict[str, Any], topology: str, vocab: int | None, own_config: bool) -> Job:
  where = parse(topology)
  experiment = from_dict(config)
  if experiment.init.train != 'all' or experiment.init.distill:
    raise ValueError('init.train and init.distill are not planned: leave them out. A step then '
                     'needs more memory than with the first, and less than with the second.')
  if not experiment.sizes_are_known:
    experiment = from_dict(with_sizes(config, opened(experiment.init, open_source)))
  model = experiment.model_config(_vocab(experiment, vocab, own_config))
  mesh = experiment.mesh
  job = Job(experiment.label.trial or experiment.model.size, where, model,
             experiment.optimizer, experiment.data.context,
             experiment.batch_size, experiment.microbatches,
             mesh_sizes(mesh.data, mesh.fsdp, mesh.tensor, where.devices), experiment.probe,
             experiment.loss_logits, experiment.gradient_reduction or 'step')
  return job.with_remat(experiment.model.remat, experiment.model.unroll)


def _vocab(experiment: Experiment, given: int | None, own_config: bool) -> int:
  source = getattr(experiment.data.source, 'vocab_size', None)
  if source == 0:
    raise ValueError('the config is of a task without tokens: there is nothing to plan.')
  known = given or experiment.model.vocab_size or source
  if not known and own_config:
    # Without a config of the person's own the tokenizer is the bytes of configs/base.py, which is
    # not that of the model to plan.
    known = getattr(experiment.data.tokenizer, 'vocab_size', None)
  # The models of the paper have 50432 = 788 * 64 entries, of which GPT-NeoX's tokenizer uses fewer.
  return known or 50432
