"""python -m sink_jax.plan --size=1b --topology=v5e:16x16 --fsdp=256 --remat=blocks"""

from __future__ import annotations

import json
import logging
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags
from ml_collections import config_flags

from sink_jax.cli import command
from sink_jax.plan.chips import GIB, SHARE, parse

BASE = str(pathlib.Path(__file__).parents[2] / 'configs' / 'base.py')
_CONFIG = config_flags.DEFINE_config_file(
    'config', None, 'The run to plan, as of sink_jax.train: --config=configs/x.py:trial '
    '--config.KEY=VALUE. The options below override it. Without it configs/base.py.')
_TOPOLOGY = flags.DEFINE_string('topology', None, 'Slice of TPUs, such as v5e:16x16, v5p:4x4x4, '
                                'v6e:4x4 or v7x:4x4x4.')
_SIZE = flags.DEFINE_string('size', None, 'Of the model: tiny, 60m, 1b, 7b, 13b.')
_VOCAB = flags.DEFINE_integer('vocab', None, 'Of the model. Without it the config\'s, or 50432.',
                              lower_bound=1)
_CONTEXT = flags.DEFINE_integer('context', None, 'Tokens of a sequence.', lower_bound=1)
_BATCH = flags.DEFINE_integer('batch_size', None, 'Sequences of a step.', lower_bound=1)
_MICRO = flags.DEFINE_integer('microbatches', None, 'Parts of a batch, one after another.',
                              lower_bound=1)
_REMAT = flags.DEFINE_string('remat', None, 'What the backward pass recomputes. Without it the '
                             'config\'s, or what a run chooses for these chips.')
_UNROLL = flags.DEFINE_integer('unroll', None, 'Blocks that are compiled one after another. Without '
                               'it the config\'s, or what a run chooses.', lower_bound=1)
_MESH = [flags.DEFINE_integer(name, None, text) for name, text in (
    ('data', 'Devices that split the batch; -1: all that remain.'),
    ('fsdp', 'Devices that also split the parameters.'),
    ('tensor', 'Devices that split heads and hidden units.'))]
_SHARE = flags.DEFINE_float('share', SHARE, 'Of the peak that matrix products reach: an '
                            'assumption.', lower_bound=0.01, upper_bound=1)
_SECONDS = flags.DEFINE_float('step_seconds', None, 'Measured time of a device alone with its '
                              'part of a step, in place of the share of the peak.', lower_bound=0)
_JSON = flags.DEFINE_string('json', None, 'File for all of it.')
_SEARCH = flags.DEFINE_boolean('search', False, 'Compile some meshes and remat policies, a minute '
                               'or more each, and rank those that fit.')
_TABLE = flags.DEFINE_string('table', None, 'Instead: a folder for the plans of the models of '
                             'configs/ on common slices, such as results/plan. An hour on two '
                             'cores.')
_SCALING = flags.DEFINE_string('scaling', None, 'Instead: a folder for the estimate from 8 to '
                               '4,096 chips, such as results/scaling.')

_OPTIONS = (_TOPOLOGY, _SIZE, _VOCAB, _CONTEXT, _BATCH, _MICRO, _REMAT, _UNROLL, *_MESH, _SHARE,
            _SECONDS, _JSON, _SEARCH, _TABLE, _SCALING)

command.answer_help(__name__)  # the imports below take seconds

import jax

from sink_jax.plan import compiler, suggestions
from sink_jax.plan.format import as_line, as_text
from sink_jax.plan.job import Job, plan
from sink_jax.plan.records import Plan
from sink_jax.pretrained.source import open_source
from sink_jax.train.experiment import from_dict
from sink_jax.train.loop import quiet_logs
from sink_jax.train.sharding import mesh_sizes
from sink_jax.train.start import opened, with_sizes


def main(argv: Sequence[str]) -> None:
  """Prints the plan; exits with 1 where it does not fit the chips."""
  quiet_logs()
  logging.getLogger('sink_jax').setLevel(logging.WARNING)  # kernels are not for this CPU
  jax.config.update('jax_platforms', 'cpu')  # nothing runs: a GPU of this machine stays free
  try:
    command.no_arguments(argv)
    sys.exit(_run())
  except (ValueError, OSError, compiler.CompilerMissing) as error:
    command.stop(error)


def _run():
  say = lambda line: print(line, file=sys.stderr, flush=True)
  for other in (_TABLE, _SCALING):
    if other.value is not None:
      _refuse_others(other)
  if _TABLE.value:
    from sink_jax.plan import table
    table.write(pathlib.Path(_TABLE.value), say)
    return 0
  if _SCALING.value:
    from sink_jax.plan import scaling
    scaling.write(pathlib.Path(_SCALING.value))
    return 0
  if _SECONDS.value is not None:
    command.unused('is not used where --step_seconds is given.', _SHARE)
  if not _TOPOLOGY.value:
    raise ValueError('--topology is missing, such as --topology=v5e:16x16.')
  # Before the minutes of compiling, after which the result would be lost.
  if _JSON.value and not pathlib.Path(_JSON.value).parent.is_dir():
    raise ValueError(f'--json={_JSON.value}: its folder does not exist.')
  job = _job(_TOPOLOGY.value)
  if _SEARCH.value:
    return _search(job, say)
  planned = _plan(job)
  print(as_text(planned, job.where))
  _save(planned.to_json())
  if planned.fits:
    return 0
  name, needed = planned.largest_peak
  print(f'error: {name} needs {needed / GIB:,.1f} GiB of {planned.usable / GIB:,.2f} on a '
        'device. Estimates of what would help:', *suggestions.memory_options(job, planned.memory),
        '  --search compiles some of them.', sep='\n', file=sys.stderr)
  return 1


def _refuse_others(kept):
  reason = f'is for the plan of one run: --{kept.name} takes no other option.'
  # --config has a default here, so whether it was given can be seen in the command line alone.
  if command.config_argument(sys.argv) or any(
      argument.lstrip('-').startswith('config.') for argument in sys.argv):
    raise ValueError(f'--config {reason}')
  command.unused(reason, *(option for option in _OPTIONS if option is not kept))


def _plan(job: Job) -> Plan:
  return plan(job, _SHARE.value, _SECONDS.value)


def _search(job: Job, say: Callable[[str], None]) -> int:
  plans = []
  for other in suggestions.alternatives(job):
    try:
      plans.append(_plan(other))
    except ValueError as error:
      # One alternative may be refused; the others are tried all the same.
      say(f'{suggestions.options_of(other)}: {error}')
      continue
    say(as_line(plans[-1]))
  fitting = suggestions.ranked(plans)
  print('\n'.join(map(as_line, fitting))
        or 'error: none of them fits: more chips, or smaller batches.')
  _save([planned.to_json() for planned in fitting])
  return 0 if fitting else 1


def _save(document: Any) -> None:
  if _JSON.value:
    pathlib.Path(_JSON.value).write_text(json.dumps(document, indent=1) + '\n')


def _job(topology: str) -> Job:
  """The run to plan: the config, with the options in place of its values."""
  where = parse(topology)
  config = _CONFIG.value.to_dict()
  for flag, section, key in (
      (_SIZE, 'model', 'size'), (_REMAT, 'model', 'remat'), (_UNROLL, 'model', 'unroll'),
      (_CONTEXT, 'data', 'context')):
    if flag.value is not None:
      config[section][key] = flag.value
  for flag, key in ((_BATCH, 'batch_size'), (_MICRO, 'microbatches')):
    if flag.value is not None:
      config[key] = flag.value
  for flag in _MESH:
    if flag.value is not None:
      config['mesh'][flag.name] = flag.value
  experiment = from_dict(config)
  if experiment.init.train != 'all' or experiment.init.distill:
    raise ValueError('init.train and init.distill are not planned: leave them out. A step then '
                     'needs more memory than with the first, and less than with the second.')
  if not experiment.sizes_are_known:
    experiment = from_dict(with_sizes(config, opened(experiment.init, open_source)))
  model = experiment.model_config(_vocab(experiment))
  mesh = experiment.mesh
  job = Job(experiment.label.trial or experiment.model.size, where, model,
             experiment.optimizer, experiment.data.context,
             experiment.batch_size, experiment.microbatches,
             mesh_sizes(mesh.data, mesh.fsdp, mesh.tensor, where.devices), experiment.probe,
             experiment.loss_logits, experiment.gradient_reduction or 'step')
  return job.with_remat(experiment.model.remat, experiment.model.unroll)


def _vocab(experiment):
  source = getattr(experiment.data.source, 'vocab_size', None)
  if source == 0:
    raise ValueError('the config is of a task without tokens: there is nothing to plan.')
  known = _VOCAB.value or experiment.model.vocab_size or source
  if not known and command.config_argument(sys.argv):
    # Without a config of the person's own the tokenizer is the bytes of configs/base.py, which is
    # not that of the model to plan.
    known = getattr(experiment.data.tokenizer, 'vocab_size', None)
  # The models of the paper have 50432 = 788 * 64 entries, of which GPT-NeoX's tokenizer uses fewer.
  return known or 50432


def start() -> None:
  command.run(main, config=BASE)
