"""Plans a run on TPUs, or runs like it, from what their compiler makes of the training step."""

from __future__ import annotations

import json
import logging
import pathlib
import sys
from typing import Any

import jax

from sink_jax.cli.command import say
from sink_jax.cli.options import Plan as Options
from sink_jax.models.sizes import SIZES
from sink_jax.plan import scaling, suggestions, table
from sink_jax.plan.chips import GIB, parse
from sink_jax.plan.format import as_line, as_text
from sink_jax.plan.job import Job, plan
from sink_jax.plan.records import Plan
from sink_jax.pretrained.source import open_source
from sink_jax.train.config import Experiment, from_dict
from sink_jax.train.sharding import mesh_sizes
from sink_jax.train.start import opened, with_sizes

# Options that are keys of a config.
_KEYS = {'size': 'model.size', 'vocab': 'model.vocab_size', 'remat': 'model.remat',
         'unroll': 'model.unroll', 'context': 'data.context', 'batch_size': 'batch_size',
         'microbatches': 'microbatches', 'data': 'mesh.data', 'fsdp': 'mesh.fsdp',
         'tensor': 'mesh.tensor'}


def main(options: Options) -> int:
  """Prints the plan; the exit code is 1 where it does not fit the chips.

  Raises:
    ValueError: the run cannot be planned. CompilerMissing: the compiler of TPUs is not installed.
    OSError: the file of --json cannot be written.
  """
  logging.getLogger('sink_jax').setLevel(logging.WARNING)  # kernels are not for this CPU
  jax.config.update('jax_platforms', 'cpu')  # nothing runs: a GPU of this machine stays free
  if options.table:
    table.write(pathlib.Path(options.table), say)
    return 0
  if options.scaling:
    scaling.write(pathlib.Path(options.scaling))
    return 0
  job = _job(options)
  plans = _searched(job, options) if options.search else [_planned(job, options)]
  if options.json:
    found = [one.to_json() for one in plans]
    text = json.dumps(found if options.search else found[0], indent=1)
    pathlib.Path(options.json).write_text(text + '\n')
  return 0 if any(one.fits for one in plans) else 1


def _planned(job: Job, options: Options) -> Plan:
  """The plan of the job, printed; where it does not fit, with what would help."""
  planned = plan(job, options.share, options.step_seconds)
  print(as_text(planned, job.where))
  if not planned.fits:
    name, needed = planned.largest_peak
    print(f'error: {name} needs {needed / GIB:,.1f} GiB of {planned.usable / GIB:,.2f} on a '
          'device. Estimates of what would help:',
          *suggestions.memory_options(job, planned.memory),
          '  --search compiles some of them.', sep='\n', file=sys.stderr)
  return planned


def _searched(job: Job, options: Options) -> list[Plan]:
  """The plans of jobs like it that fit, printed, fastest first."""
  plans = []
  for other in suggestions.alternatives(job):
    try:
      plans.append(plan(other, options.share, options.step_seconds))
    except ValueError as error:
      # One alternative may be refused; the others are tried all the same.
      say(f'{suggestions.options_of(other)}: {error}')
      continue
    say(as_line(plans[-1]))
  fitting = suggestions.ranked(plans)
  print('\n'.join(map(as_line, fitting))
        or 'error: none of them fits: more chips, or smaller batches.')
  return fitting


def _job(options: Options) -> Job:
  assert options.topology  # required of a plan of one run
  config: dict[str, Any] = options.settings
  words = {word.partition('=')[0] for word in options.config_words}
  if options.size is not None:
    if config.get('init', {}).get('source'):
      raise ValueError('--size has no effect beside init.source: the sizes are those of the '
                       'source. Leave it out.')
    # It takes the place of the numbers of the config file, but not of those beside it.
    config['model'] |= {key: None for key in SIZES['tiny'] if f'model.{key}' not in words}
  for name, key in _KEYS.items():
    value, (section, _, last) = getattr(options, name), key.rpartition('.')
    if value is not None and key in words:
      raise ValueError(f'--{name} and --config.{key} set the same: leave one of them out.')
    if value is not None:
      (config[section] if section else config)[last] = value
  where = parse(options.topology)
  experiment = from_dict(config)
  if experiment.init.train != 'all' or experiment.init.distill:
    raise ValueError('init.train and init.distill are not planned: leave them out. A step then '
                     'needs more memory than with the first, and less than with the second.')
  if not experiment.sizes_are_known:
    experiment = from_dict(with_sizes(config, opened(experiment.init, open_source)))
  model, mesh = experiment.model_config(_vocab(experiment, options)), experiment.mesh
  try:
    sizes = mesh_sizes(mesh.data, mesh.fsdp, mesh.tensor, where.devices)
  except ValueError as error:
    raise ValueError(f'{error} --data, --fsdp and --tensor set them.') from None
  job = Job(experiment.label.trial or experiment.model.size, where, model,
            experiment.optimizer, experiment.data.context,
            experiment.batch_size, experiment.microbatches,
            sizes, experiment.probe,
            experiment.loss_logits, experiment.gradient_reduction or 'step')
  return job.with_remat(experiment.model.remat, experiment.model.unroll)


def _vocab(experiment: Experiment, options: Options) -> int:
  source = getattr(experiment.data.source, 'vocab_size', None)
  if source == 0:
    raise ValueError('the config is of a task without tokens: there is nothing to plan.')
  known = experiment.model.vocab_size or source
  own = any(word.startswith('data.tokenizer=') for word in options.config_words)
  if not known and (options.config is not None or own):
    # Without a choice of the person's own the tokenizer is the bytes of configs/base.py, which is
    # not that of the model to plan.
    known = getattr(experiment.data.tokenizer, 'vocab_size', None)
  # The models of the paper have 50432 = 788 * 64 entries, of which GPT-NeoX's tokenizer uses fewer.
  return known or 50432
