"""python -m sink_jax.benchmark attention --json=attention.json

Times attention, importance, the loss or a training step on this machine, beside baselines, and
prints one table.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

_BEGAN = time.monotonic()  # a time limit counts from here: importing JAX takes a while

# PyTorch may have to share the device with JAX, which would take most of its memory at once.
os.environ.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')

_TOLERANCE = 0.005


def parser() -> argparse.ArgumentParser:
  """The command line."""
  top = argparse.ArgumentParser(
      prog='python -m sink_jax.benchmark', allow_abbrev=False,
      description='Time and memory on this machine, beside baselines. Numbers go to a '
                  'table and, with --json, to a file that holds every one of them.')
  commands = top.add_subparsers(dest='command', required=True, metavar='COMMAND')

  def command(name, text):
    one = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    # `show` prints what was measured before, so nothing of it is random or limited.
    if name != 'show':
      one.add_argument('--seed', type=_seed, default=0, help='of the random inputs (default 0)')
      one.add_argument('--limit', type=_positive, metavar='SECONDS',
                       help='begin nothing new after so long; of check: all of it (480)')
    if name not in ('show', 'check'):
      one.add_argument('--json', metavar='FILE', help='write the result as JSON')
    return one

  def timed(one, default=0.5):
    one.add_argument('--seconds', type=_positive, default=default,
                     help=f'to spend on each number (default {default})')
    one.add_argument('--dtype', choices=['bfloat16', 'float32'],
                     help='of the inputs (default: bfloat16 on a GPU or TPU, else float32)')

  one = command('attention', 'Every variant of attention, forward and backward.')
  timed(one)
  one.add_argument('--shape', nargs='+', type=_shape, metavar='B,H,T,Dh',
                   help='default: 8,8,2048,64 8,8,2048,96 8,16,2048,128 1,8,32768,128 on a GPU '
                        'or TPU, else 1,8,2048,96')
  one.add_argument('--variants', type=_names, default=['all'], metavar='NAMES',
                   help='softmax,sigmoid,... (default all; another name lists them)')
  one.add_argument('--rivals', type=_names, default=['all'], metavar='NAMES',
                   help='none, or names such as cudnn,torch-flash (default all)')
  one.add_argument('--implementations', type=_names, metavar='NAMES',
                   help='ours: pallas, linear, chunked (default all; on a CPU not pallas)')
  one.add_argument('--sweep', action='store_true',
                   help='instead: time block sizes of the GPU kernels at these shapes')

  one = command('importance', 'Importance of every key in memory linear in T.')
  timed(one)
  one.add_argument('--length', nargs='+', type=_count, metavar='T',
                   help='default 4096 16384 65536 131072; on a CPU 2048 4096 8192 16384')
  one.add_argument('--heads', type=_count, help='default 8, on a CPU 1')
  one.add_argument('--head_dim', nargs='+', type=_count, help='default 128 64, on a CPU 64')
  one.add_argument('--keys', type=_count, default=4, help='of the shortcut (default 4)')
  one.add_argument('--variant', default='softmax', metavar='NAME',
                   help='default softmax; another name lists them')

  one = command('loss', 'Cross-entropy with gradients, in chunks and with all logits.')
  timed(one)
  one.add_argument('--tokens', type=_pair, metavar='B,T', help='default 8,2048; on a CPU 2,256')
  one.add_argument('--d_model', type=_count, help='default 768; on a CPU 256')
  one.add_argument('--vocab', type=_count, help='default 50432; on a CPU 8192')

  one = command('train_step', 'Training steps of a model with AdamW: tokens/s and MFU.')
  one.add_argument('--size', help='tiny, 60m, 1b, 7b, 13b (default 60m, on a CPU tiny)')
  one.add_argument('--batch', nargs='+', type=_count, help='sequences (default 8 16 32; CPU 4)')
  one.add_argument('--length', type=_count, help='default 2048; on a CPU 256')
  one.add_argument('--vocab', type=_count, help='default 50432; on a CPU 512')
  one.add_argument('--steps', type=_count, default=10, help='to time (default 10)')
  one.add_argument('--dtype', choices=['bfloat16', 'float32'], help='of activations')
  one.add_argument('--implementation', type=_names, default=['default'], metavar='NAMES',
                   help='of attention, several separated by commas; "default" is what this '
                        'machine chooses by itself')
  one.add_argument('--remat', choices=['none', 'save_matmuls', 'save_attention', 'blocks'],
                   help='what is recomputed when backpropagating (default: as a run chooses)')
  one.add_argument('--unroll', type=_count,
                   help='blocks that are compiled one after another (default: as a run chooses)')
  for component in ('similarity', 'normalizer', 'feature_map', 'position', 'mask', 'kv_bias',
                    'qk_norm', 'temperature', 'value', 'head'):
    one.add_argument(f'--attention.{component}', metavar='VALUE',
                     help=f'config string of the {component}')

  one = command('group', 'Steps of several small trials, one after the other and as a group.')
  one.add_argument('--trials', nargs='+', type=_count, default=[6], help='widths (default 6)')
  one.add_argument('--size', default='tiny', help='tiny, 60m, 1b, 7b, 13b (default tiny)')
  one.add_argument('--batch', type=_count, default=32, help='sequences of a trial (default 32)')
  one.add_argument('--length', type=_count, default=64, help='default 64')
  one.add_argument('--vocab', type=_count, default=258, help='default 258')
  one.add_argument('--steps', type=_count, default=10, help='of a timing (default 10, at most 50)')
  one.add_argument('--dtype', choices=['bfloat16', 'float32'], help='of activations')

  one = command('trials', 'Steps of the trials of a config file, in turns with those of softmax.')
  one.add_argument('--config', default='configs/remedies.py', metavar='FILE',
                   help='with trials TASK-VARIANT (default configs/remedies.py)')
  one.add_argument('--only', type=_names, default=[], metavar='NAMES',
                   help='trials, or first words of several: trigger,desk-sigmoid (default all)')
  one.add_argument('--seconds', type=_positive, default=0.3,
                   help='of every timing, nine of which make a number (default 0.3)')

  one = command('correctness', 'Every variant of the paper against its T x T definition.')
  one.add_argument('--variants', nargs='+', default=['all'], help='names as in the table')
  one.add_argument('--head_dims', nargs='+', type=_count, help='default 64 96 128; on a CPU 16')
  one.add_argument('--lengths', nargs='+', type=_count, help='default 1024 1023; on a CPU 32 31')
  one.add_argument('--tolerance', type=_tolerance, default=_TOLERANCE,
                   help='allowed beside twice the error of the definition in bfloat16')
  one.add_argument('--share', type=_share, default=(0, 1), metavar='N/M',
                   help='run every M-th problem only, from the N-th')

  one = command('check', 'All of it on one GPU within eight minutes; launch/gpu_hour.sh runs it.')
  one.add_argument('out', nargs='?', default='results/gpu_check', metavar='OUT_DIR',
                   help='of report.json and report.md (default results/gpu_check)')
  one.add_argument('--smoke', action='store_true', help='tiny shapes: does it run to the end?')
  one.add_argument('--parts', type=_names, default=['all'], metavar='NAMES',
                   help='correctness, train_60m, saved_60m, attention, train_1b, loss, '
                        'importance, sweep')
  one.add_argument('--tolerance', type=_tolerance, default=_TOLERANCE, help='see correctness')

  one = command('show', 'The tables of JSON files again.')
  one.add_argument('files', nargs='+', metavar='FILE')
  return top


def _positive(text):
  value = float(text)
  if not value > 0:
    raise argparse.ArgumentTypeError(f'{text} is not greater than 0')
  return value


def _seed(text):
  value = int(text)
  if not 0 <= value < 2**31:
    raise argparse.ArgumentTypeError(f'{text} is not between 0 and 2**31 - 1')
  return value


def _tolerance(text):
  value = float(text)
  if not -1 <= value < math.inf:  # -1 lets every case fail, to see that a failure is noticed
    raise argparse.ArgumentTypeError(f'{text} is not a number from 0 on')
  return value


def _count(text):
  value = int(text)
  if value < 1:
    raise argparse.ArgumentTypeError(f'{text} is not at least 1')
  return value


def _numbers(text, count, example):
  try:
    values = tuple(_count(x) for x in text.split(','))
  except (ValueError, argparse.ArgumentTypeError):
    values = ()
  if len(values) != count:
    raise argparse.ArgumentTypeError(f'{text!r} is not {count} numbers from 1 on, as {example}')
  return values


def _shape(text):
  return _numbers(text, 4, '8,8,2048,96 (batch, heads, length, head dimension)')


def _pair(text):
  return _numbers(text, 2, '8,2048 (batch, length)')


def _share(text):
  try:
    number, count = map(int, text.split('/'))
  except ValueError:
    number, count = 0, 0
  if not 0 <= number < count:
    raise argparse.ArgumentTypeError(f'{text!r} is not as 0/4 to 3/4')
  return number, count


def _names(text):
  # An empty list is the choice of none, such as --rivals=none.
  return [] if text == 'none' else [name.strip() for name in text.split(',')]


def _refuse_unused(options):
  if options.command == 'attention' and options.sweep:
    if options.rivals != ['all'] or options.implementations or options.dtype:
      parser().error('--rivals, --implementations and --dtype are for the comparison; --sweep times '
                     'block sizes of our own kernels in bfloat16')
    if len(options.variants) != 1:
      parser().error('--sweep takes one variant: --variants=softmax')
  if options.command == 'check' and not {'all', 'correctness'} & set(options.parts):
    if options.tolerance != _TOLERANCE:
      parser().error('--tolerance is for the part correctness, which is not among --parts')


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs one command; returns its exit code."""
  options = parser().parse_args(arguments)
  _refuse_unused(options)
  # Without the imports that take seconds: the table of a file needs no jax.
  if options.command == 'show':
    from sink_jax.benchmark.records import document_from_json
    from sink_jax.benchmark.table import render
    for path in options.files:
      print(render(document_from_json(json.loads(Path(path).read_text()))))
    return 0
  if options.command == 'check':  # starts processes that use JAX and has no use for it itself
    from sink_jax.benchmark.check import check
    return check(Path(options.out), options)
  # Here and not above: this import takes seconds, and --help needs none of it.
  from sink_jax.benchmark import commands
  if options.limit:
    # What the imports took is a part of the limit; at least one row begins in any case.
    options.limit = max(0.1, options.limit - (time.monotonic() - _BEGAN))
  try:
    if options.command == 'trials':
      from sink_jax.sweep.trials import load_trials
      # A trial without a config has no counterpart at its budget.
      options.configs = {name: trial.config for name, trial in load_trials(options.config).items()
                         if trial.config is not None}
    return commands.run(options)
  except ValueError as error:
    sys.exit(f'error: {error}')


def start() -> int:
  return main()
