"""Plans a run on TPUs or GPUs."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING

from sink_jax.arguments import check_least

if TYPE_CHECKING:
  from sink_jax.train.config import Experiment


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """Says whether a run fits TPUs or GPUs, and about how long it takes; neither is needed.

      python -m sink_jax plan --topology=v5e:16x16 --config=configs/paper.py:1b-softmax

  --config.KEY=VALUE is as of train. Training, validation and the probe are compiled for the slices,
  a minute or more each. Where one does not fit, options that need less memory are compiled until
  some fit. The exit code is 1 where none do.
  """

  #: a slice, such as v5e:16x16, v5p:4x4x4 or v7x:4x4x4, or its type, such as v5litepod-256; GPUs of
  #: a machine: h100:8, h200:8, a100-80:8, a100-40:1, t4:1.
  topology: str
  slices: int = 1  # how many such slices, which the network of the data center connects.
  config: str = ''  # FILE or FILE:TRIAL; by default configs/base.py.

  def __post_init__(self):
    check_least(self, slices=1)


def main(options: Options, experiment: Experiment) -> int:
  """Prints the plan, or the plan of the first options that fit."""
  import logging

  import jax

  from sink_jax.plan.chips import parse
  from sink_jax.plan.job import plan, smaller
  from sink_jax.plan.estimate import as_text
  from sink_jax.train.start import completed

  logging.getLogger('sink_jax').setLevel(logging.WARNING)  # kernels are not for this machine
  jax.config.update('jax_platforms', 'cpu')  # nothing runs: a GPU of this machine stays free
  where, init = parse(options.topology, options.slices), experiment.init
  if init.train != 'all':
    raise ValueError(f'init.train = {init.train} is not planned: leave it out; it needs less.')
  experiment, _ = completed(experiment)
  first = found = plan(experiment, where)
  print(as_text(first), flush=True)
  if not first.fits:
    print('error: it does not fit. Compiling with options that need less memory:', file=sys.stderr)
  for other in () if first.fits else smaller(first):
    found = plan(other, where)
    print(*found.options, 'fits' if found.fits else 'does not fit', file=sys.stderr, flush=True)
    if found.fits:
      print('\n' + as_text(found))
      break
  return 0 if found.fits else 1
