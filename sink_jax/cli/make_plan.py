"""Plans the run of a config, and prints what it needs on a slice of TPUs."""

from __future__ import annotations

import functools
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from sink_jax.cli import command
from sink_jax.cli.plan import Options
from sink_jax.plan import suggestions
from sink_jax.plan.chips import GIB, parse
from sink_jax.plan.format import as_line, as_text
from sink_jax.plan.job import Job, plan
from sink_jax.plan.records import Plan
from sink_jax.pretrained.source import open_source
from sink_jax.train.experiment import Experiment, from_dict
from sink_jax.train.sharding import mesh_sizes
from sink_jax.train.start import opened, with_sizes


def make_plan(config: dict[str, Any], options: Options) -> int:
  """Prints the plan of a run, or of runs like it, and returns the exit code.

  Args:
    config: of the run, with what the options change in it.
    options: of the command.

  Raises:
    ValueError: the run cannot be planned. CompilerMissing: the compiler of TPUs is not installed.
    OSError: the file cannot be written.
  """
  job = _job(config, options)
  plan_of = functools.partial(plan, share=options.share, compute=options.step_seconds)
  if options.search:
    fitting = _search(job, plan_of)
    _save([planned.to_json() for planned in fitting], options)
    return 0 if fitting else 1
  planned = plan_of(job)
  print(as_text(planned, job.where))
  _save(planned.to_json(), options)
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


def _save(document: Any, options: Options) -> None:
  if options.json:
    pathlib.Path(options.json).write_text(json.dumps(document, indent=1) + '\n')


def _job(config: dict[str, Any], options: Options) -> Job:
  assert options.topology  # required of a plan of one run
  where = parse(options.topology)
  experiment = from_dict(config)
  if experiment.init.train != 'all' or experiment.init.distill:
    raise ValueError('init.train and init.distill are not planned: leave them out. A step then '
                     'needs more memory than with the first, and less than with the second.')
  if not experiment.sizes_are_known:
    experiment = from_dict(with_sizes(config, opened(experiment.init, open_source)))
  model = experiment.model_config(_vocab(experiment, options))
  mesh = experiment.mesh
  job = Job(experiment.label.trial or experiment.model.size, where, model,
             experiment.optimizer, experiment.data.context,
             experiment.batch_size, experiment.microbatches,
             mesh_sizes(mesh.data, mesh.fsdp, mesh.tensor, where.devices), experiment.probe,
             experiment.loss_logits, experiment.gradient_reduction or 'step')
  return job.with_remat(experiment.model.remat, experiment.model.unroll)


def _vocab(experiment: Experiment, options: Options) -> int:
  source = getattr(experiment.data.source, 'vocab_size', None)
  if source == 0:
    raise ValueError('the config is of a task without tokens: there is nothing to plan.')
  known = options.vocab or experiment.model.vocab_size or source
  if not known and options.config is not None:
    # Without a config of the person's own the tokenizer is the bytes of configs/base.py, which is
    # not that of the model to plan.
    known = getattr(experiment.data.tokenizer, 'vocab_size', None)
  # The models of the paper have 50432 = 788 * 64 entries, of which GPT-NeoX's tokenizer uses fewer.
  return known or 50432
