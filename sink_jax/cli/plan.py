"""Predicts the memory and the speed of a run on TPUs; none is needed.

    python -m sink_jax plan --size=1b --topology=v5e:16x16 --fsdp=256 --remat=blocks

The run is that of --config, or of configs/base.py, with the options in place of its values. The
exit code is 1 where it does not fit the chips.
"""

from __future__ import annotations

import dataclasses
import logging
import pathlib

from sink_jax.arguments import check_least
from sink_jax.cli import command, parser
from sink_jax.plan.chips import SHARE

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

  from sink_jax.cli.make_plan import make_plan
  from sink_jax.plan import scaling, table

  command.quiet_logs()
  logging.getLogger('sink_jax').setLevel(logging.WARNING)  # kernels are not for this CPU
  jax.config.update('jax_platforms', 'cpu')  # nothing runs: a GPU of this machine stays free
  if options.table:
    table.write(pathlib.Path(options.table), command.say)
  elif options.scaling:
    scaling.write(pathlib.Path(options.scaling))
  else:
    return make_plan(config, options)
  return 0
