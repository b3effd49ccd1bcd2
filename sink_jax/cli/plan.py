"""Predicts the memory and the speed of a run on TPUs; none is needed.

    python -m sink_jax plan --size=1b --topology=v5e:16x16 --fsdp=256 --remat=blocks

The run is that of --config, or of configs/base.py, with the options in place of its values. The
exit code is 1 where it does not fit the chips.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import pathlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sink_jax.arguments import check_least
from sink_jax.cli import command, parser
from sink_jax.plan.chips import GIB, SHARE, parse

if TYPE_CHECKING:  # they import jax
  from sink_jax.plan.job import Job
  from sink_jax.plan.records import Plan
  from sink_jax.train.experiment import Experiment

# Options that are keys of a config, with the sections of those keys.
_SECTIONS = {'size': 'model', 'remat': 'model', 'unroll': 'model', 'context': 'data',
             'batch_size': '', 'microbatches': '', 'data': 'mesh', 'fsdp': 'mesh',
             'tensor': 'mesh'}
BASE = str(pathlib.Path(__file__).parents[2] / 'configs' / 'base.py')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(parser.ConfigOptions):
  """The options of a plan.

  Attributes:
    config: the run to plan, as of train: --config=configs/x.py:trial --config.KEY=VALUE. By default
      configs/base.py.
    topology: slice of TPUs, such as v5e:16x16, v5p:4x4x4, v6e:4x4 or v7x:4x4x4.
    size: of the model: tiny, 60m, 1b, 7b, 13b.
    vocab: of the model; by default the config's, or 50432.
    context: tokens of a sequence.
    batch_size: sequences of a step.
    microbatches: parts of a batch, one after another.
    remat: what the backward pass recomputes; by default the config's, or what a run chooses for
      these chips.
    unroll: blocks that are compiled one after another; by default the config's, or what a run
      chooses.
    data: devices that split the batch; -1: all that remain.
    fsdp: devices that also split the parameters.
    tensor: devices that split heads and hidden units.
    share: of the peak that matrix products reach: an assumption.
    step_seconds: measured time of a device alone with its part of a step, in place of the share of
      the peak.
    json: file for all of it.
    search: compile some meshes and remat policies, a minute or more each, and rank those that fit.
    table: instead: a folder for the plans of the models of configs/ on common slices, such as
      results/plan. An hour on two cores.
    scaling: instead: a folder for the estimate from 8 to 4,096 chips, such as results/scaling.
  """

  config: str | None = None
  topology: str | None = None
  size: str | None = None
  vocab: int | None = None
  context: int | None = None
  batch_size: int | None = None
  microbatches: int | None = None
  remat: str | None = None
  unroll: int | None = None
  data: int | None = None
  fsdp: int | None = None
  tensor: int | None = None
  share: float = SHARE
  step_seconds: float | None = None
  json: str | None = None
  search: bool = False
  table: str | None = None
  scaling: str | None = None

  def __post_init__(self):
    check_least(self, vocab=1, context=1, batch_size=1, microbatches=1, unroll=1, share=0.01,
                step_seconds=0)
    if self.share > 1:
      raise ValueError(f'--share={self.share} must be at most 1.')
    for kept in ('table', 'scaling'):
      if getattr(self, kept) is not None:
        reason = f'is for the plan of one run: --{kept} takes no other option.'
        self.unused(reason, *sorted(self.given - {kept}))
        if self.config_words:
          raise ValueError(f'--config {reason}')
    if self.table or self.scaling:
      return
    if self.step_seconds is not None:
      self.unused('is not used where --step_seconds is given.', 'share')
    if not self.topology:
      raise ValueError('--topology is missing, such as --topology=v5e:16x16.')
    # Before the minutes of compiling, after which the result would be lost.
    if self.json and not pathlib.Path(self.json).parent.is_dir():
      raise ValueError(f'--json={self.json}: its folder does not exist.')


def main(options: Options) -> int:
  """Prints the plan; the exit code is 1 where it does not fit the chips."""
  config = command.read_config(options.config or BASE, options)
  for name, section in _SECTIONS.items():
    value = getattr(options, name)
    if value is not None:
      (config[section] if section else config)[name] = value

  import jax

  from sink_jax.plan import scaling, table

  logging.getLogger('sink_jax').setLevel(logging.WARNING)  # kernels are not for this CPU
  jax.config.update('jax_platforms', 'cpu')  # nothing runs: a GPU of this machine stays free
  if options.table:
    table.write(pathlib.Path(options.table), command.say)
  elif options.scaling:
    scaling.write(pathlib.Path(options.scaling))
  else:
    return _planned(config, options)
  return 0


def _planned(config: dict[str, Any], options: Options) -> int:
  """Prints the plan of a run, or of runs like it, and returns the exit code.

  Raises:
    ValueError: the run cannot be planned. CompilerMissing: the compiler of TPUs is not installed.
    OSError: the file of --json cannot be written.
  """
  from sink_jax.plan import suggestions
  from sink_jax.plan.format import as_text
  from sink_jax.plan.job import plan

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
  from sink_jax.plan import suggestions
  from sink_jax.plan.format import as_line

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
  from sink_jax.plan.job import Job
  from sink_jax.pretrained.source import open_source
  from sink_jax.train.experiment import from_dict
  from sink_jax.train.sharding import mesh_sizes
  from sink_jax.train.start import opened, with_sizes

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
