"""From parsed options to a benchmark: defaults for this machine, printing, JSON.

Defaults are sizes of the paper's models on a GPU or TPU, and on a CPU ones that take seconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from sink_jax.benchmark import (
  attention,
  correctness,
  group,
  importance,
  loss,
  machine,
  sweep,
  table,
  train_step,
)
from sink_jax.benchmark.checks import passed
from sink_jax.benchmark.records import CorrectnessRow, Document
from sink_jax.io import compile_cache

Save = Callable[[Document], None]


def run(options: argparse.Namespace) -> int:
  """Runs a command, prints its table, writes its JSON after every row; returns an exit code.

  Raises:
    ValueError: an option does not fit; the message has the choices.
  """
  def save(document: Document) -> None:
    if options.json:
      table.write_json(document.to_json(), options.json)

  # A command that is repeated finds its compiled programs on the disk, and spends its time on
  # measuring.
  compile_cache.enable()
  name = 'sweep' if options.command == 'attention' and options.sweep else options.command
  document = _COMMANDS[name](options, save)
  # Once more: a command without a case has not saved yet, and only now is it complete.
  save(document)
  print(table.render(document))
  return 0 if name != 'correctness' or passed(document.rows_of(CorrectnessRow)) else 1


def _attention(options: argparse.Namespace, save: Save) -> Document:
  return attention.run(
      options.shape or attention.SHAPES[machine.accelerated()], options.variants, options.rivals,
      options.implementations, options.dtype or machine.default_dtype(), options.seed,
      options.seconds, options.limit, save)


def _sweep(options: argparse.Namespace, save: Save) -> Document:
  variant = 'softmax' if options.variants == ['all'] else options.variants[0]
  # One shape per head dimension, which is the key of the table of blocks: the long shape has one of
  # 128 as well.
  shapes = options.shape or [s for s in attention.SHAPES[True] if s[2] <= 2048]
  return sweep.run(shapes, variant, options.seed, options.seconds, options.limit, save)


def _importance(options: argparse.Namespace, save: Save) -> Document:
  fast = machine.accelerated()
  return importance.run(
      options.length or ([4096, 16384, 65536, 131072] if fast else [2048, 4096, 8192, 16384]),
      options.heads or (8 if fast else 1), options.head_dim or ([128, 64] if fast else [64]),
      options.keys, options.variant, options.dtype or machine.default_dtype(), options.seed,
      options.seconds, options.limit, save)


def _loss(options: argparse.Namespace, save: Save) -> Document:
  fast = machine.accelerated()
  return loss.run(
      options.tokens or ((8, 2048) if fast else (2, 256)),
      options.d_model or (768 if fast else 256), options.vocab or (50432 if fast else 8192),
      options.dtype or machine.default_dtype(), options.seed, options.seconds, options.limit, save)


def _train_step(options: argparse.Namespace, save: Save) -> Document:
  fast = machine.accelerated()
  # argparse keeps the dot of --attention.mask in the name of its value.
  components = {key.removeprefix('attention.'): value for key, value in vars(options).items()
                if key.startswith('attention.') and value is not None}
  return train_step.run(
      options.size or ('60m' if fast else 'tiny'), options.batch or ([8, 16, 32] if fast else [4]),
      options.length or (2048 if fast else 256), options.vocab or (50432 if fast else 512),
      options.dtype or machine.default_dtype(), options.implementation, options.remat,
      options.unroll, components, options.steps, options.seed, options.limit, save)


def _group(options: argparse.Namespace, save: Save) -> Document:
  return group.run(options.trials, options.size, options.batch, options.length, options.vocab,
                   options.dtype or machine.default_dtype(), options.steps, options.seed,
                   options.limit, save)


def _trials(options: argparse.Namespace, save: Save) -> Document:
  # It reads configs, and so needs the packages of the data room, which no other benchmark does.
  from sink_jax.benchmark import trials

  return trials.run(options.configs, options.only, options.seconds, options.seed, options.limit,
                    save)


def _correctness(options: argparse.Namespace, save: Save) -> Document:
  fast = machine.accelerated()
  return correctness.run(
      options.variants, options.head_dims or ([64, 96, 128] if fast else [16]),
      options.lengths or ([1024, 1023] if fast else [32, 31]), options.tolerance, options.share,
      options.seed, options.limit, save)


_COMMANDS = {'attention': _attention, 'sweep': _sweep, 'importance': _importance, 'loss': _loss,
             'train_step': _train_step, 'group': _group, 'trials': _trials,
             'correctness': _correctness}
