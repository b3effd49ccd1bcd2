"""From parsed options to a benchmark: defaults for this machine, printing, JSON.

Defaults are sizes of the paper's models on a GPU or TPU, and on a CPU ones that take seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

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
from sink_jax.benchmark.options import (
  Attention,
  Correctness,
  Group,
  Importance,
  Loss,
  Saved,
  TrainStep,
  Trials,
)
from sink_jax.benchmark.records import CorrectnessRow, Document
from sink_jax.io import compile_cache

Save = Callable[[Document], None]


def run(options: Saved, configs: Mapping[str, Mapping[str, Any]]) -> int:
  """Runs a command, prints its table, writes its JSON after every row; returns an exit code.

  Args:
    options: of the command, which their class tells.
    configs: those of the command `trials`, by the names of the trials.

  Raises:
    ValueError: an option does not fit; the message has the choices.
  """
  def save(document: Document) -> None:
    if options.json:
      table.write_json(document.to_json(), options.json)

  # A command that is repeated finds its compiled programs on the disk, and spends its time on
  # measuring.
  compile_cache.enable()
  if isinstance(options, Trials):
    document = _trials(options, configs, save)
  else:
    document = _COMMANDS[type(options)](options, save)
  # Once more: a command without a case has not saved yet, and only now is it complete.
  save(document)
  print(table.render(document))
  failed = isinstance(options, Correctness) and not passed(document.rows_of(CorrectnessRow))
  return 1 if failed else 0


def _attention(options: Attention, save: Save) -> Document:
  if options.sweep:
    return _sweep(options, save)
  return attention.run(
      options.shape or attention.SHAPES[machine.accelerated()], _names(options.variants),
      _names(options.rivals), _names(options.implementations) if options.implementations else None,
      options.dtype or machine.default_dtype(), options.seed,
      options.seconds, options.limit, save)


def _sweep(options: Attention, save: Save) -> Document:
  variant = 'softmax' if options.variants == ('all',) else options.variants[0]
  # One shape per head dimension, which is the key of the table of blocks: the long shape has one of
  # 128 as well.
  shapes = options.shape or [s for s in attention.SHAPES[True] if s[2] <= 2048]
  return sweep.run(shapes, variant, options.seed, options.seconds, options.limit, save)


def _importance(options: Importance, save: Save) -> Document:
  fast = machine.accelerated()
  return importance.run(
      list(options.length) or ([4096, 16384, 65536, 131072] if fast else [2048, 4096, 8192, 16384]),
      options.heads or (8 if fast else 1), list(options.head_dim) or ([128, 64] if fast else [64]),
      options.keys, options.variant, options.dtype or machine.default_dtype(), options.seed,
      options.seconds, options.limit, save)


def _loss(options: Loss, save: Save) -> Document:
  fast = machine.accelerated()
  return loss.run(
      options.tokens or ((8, 2048) if fast else (2, 256)),
      options.d_model or (768 if fast else 256), options.vocab or (50432 if fast else 8192),
      options.dtype or machine.default_dtype(), options.seed, options.seconds, options.limit, save)


def _train_step(options: TrainStep, save: Save) -> Document:
  fast = machine.accelerated()
  components = {key: value for key, value in vars(options.attention).items() if value is not None}
  return train_step.run(
      options.size or ('60m' if fast else 'tiny'),
      list(options.batch) or ([8, 16, 32] if fast else [4]),
      options.length or (2048 if fast else 256), options.vocab or (50432 if fast else 512),
      options.dtype or machine.default_dtype(), _names(options.implementation), options.remat,
      options.unroll, components, options.steps, options.seed, options.limit, save)


def _group(options: Group, save: Save) -> Document:
  return group.run(list(options.trials), options.size, options.batch, options.length, options.vocab,
                   options.dtype or machine.default_dtype(), options.steps, options.seed,
                   options.limit, save)


def _trials(options: Trials, configs: Mapping[str, Mapping[str, Any]],
            save: Save) -> Document:
  # It reads configs, and so needs the packages of the data room, which no other benchmark does.
  from sink_jax.benchmark import trials

  return trials.run(configs, _names(options.only), options.seconds, options.seed, options.limit,
                    save)


def _correctness(options: Correctness, save: Save) -> Document:
  fast = machine.accelerated()
  return correctness.run(
      _names(options.variants), list(options.head_dims) or ([64, 96, 128] if fast else [16]),
      list(options.lengths) or ([1024, 1023] if fast else [32, 31]), options.tolerance,
      options.part, options.seed, options.limit, save)


def _names(names: tuple[str, ...]) -> list[str]:
  return [] if names == ('none',) else list(names)


_COMMANDS = {Attention: _attention, Importance: _importance, Loss: _loss,
             TrainStep: _train_step, Group: _group, Correctness: _correctness}
