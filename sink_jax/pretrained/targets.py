"""The classes that a run is exported to, and the choice of one."""

from __future__ import annotations

import dataclasses
from typing import Any

from sink_jax.models.config import ModelConfig
from sink_jax.pretrained import (
  to_custom,
  to_granite_swa,
  to_llama,
  to_mistral,
  to_qwen3,
  to_qwen3_next,
)
from sink_jax.pretrained.target import Refusal, Target

# In the order in which they are tried: first those that most programs serve.
_MODULES: tuple[Target, ...] = (to_llama, to_mistral, to_qwen3, to_granite_swa, to_qwen3_next)
TARGETS: dict[str, Target] = {target.NAME: target for target in _MODULES}
# Taken by name alone: it is slow, and is loaded with trust_remote_code.
CUSTOM: Target = to_custom


def choose(config: ModelConfig, given: ModelConfig, name: str | None = None) -> tuple[Target, str]:
  """(class, why it is this one) of a model.

  Args:
    config: the model that is written. given: that of the run, whose values errors name; the two
      differ in what is folded into weights.
    name: of the class that it must be; None for the first of `TARGETS` that holds it.

  Raises:
    ValueError: this class, or each of them, lacks a part of the model; names the part, and the
      class that has it.
  """
  refusals = {key: target.refusals(config) for key, target in TARGETS.items()}
  first = next((key for key, found in refusals.items() if not found), None)
  if name is not None:
    classes = TARGETS | {CUSTOM.NAME: CUSTOM}
    if name not in classes:
      raise ValueError(f'--as={name}: no such class; choices: {", ".join(classes)}.')
    found = classes[name].refusals(config)
    if not found:
      return classes[name], 'as --as says'
    able = first or (None if custom_refusals(given) else CUSTOM.NAME)
    remedy = f'--as={able} can hold this run' if able else 'nor can another class'
    raise ValueError(f'--as={name} cannot hold this run: {_lacks(given, name, found[0])}; '
                     f'{remedy}.')
  if first is None:
    raise ValueError(f'{_no_class(given, refusals)} {_custom(given)}')
  if first == next(iter(TARGETS)):
    return TARGETS[first], 'the first class that is tried'
  # The classes before it, and what each of them lacks.
  before = list(TARGETS)[:list(TARGETS).index(first)]
  return TARGETS[first], '; '.join(_lacks(given, key, refusals[key][0]) for key in before)


def custom_refusals(given: ModelConfig) -> list[Refusal]:
  """What keeps a run from being written with its own PyTorch file."""
  # It is written without folds, but for linear layers, whose matrices any class can hold.
  return CUSTOM.refusals(dataclasses.replace(given, linear='plain'))


def _custom(given: ModelConfig) -> str:
  """The end of a message for a model that no class of transformers holds."""
  if found := custom_refusals(given):
    return f'Nor can --as=custom hold it: {_lacks(given, CUSTOM.NAME, found[0])}.'
  return '--as=custom writes it with a PyTorch file of its own, which is slow.'


def _no_class(given: ModelConfig, refusals: dict[str, list[Refusal]]) -> str:
  """The message for a model that no class holds."""
  names = [{refusal.name for refusal in found} for found in refusals.values()]
  in_all = [refusal.name for refusal in next(iter(refusals.values()))
            if all(refusal.name in own for own in names)]
  if not in_all:  # each part has a class, and no class has all of them
    least = min(map(len, refusals.values()))
    reasons = '; '.join(_lacks(given, key, found[0]) for key, found in refusals.items()
                        if len(found) == least)
    return f'This run has no counterpart in transformers: {reasons}.'
  name, classes = in_all[0], dict[str, list[str]]()
  for key, found in refusals.items():
    wanted = next(refusal.wanted for refusal in found if refusal.name == name)
    classes.setdefault(wanted, []).append(key)
  reasons = '; '.join(f'{wanted} ({", ".join(keys)})' for wanted, keys in classes.items())
  return (f'{name} = {_value(given, name)!r} has no counterpart in transformers. Classes there '
          f'have {reasons}.')


def _lacks(given: ModelConfig, key: str, refusal: Refusal) -> str:
  return (f'{key} has no {refusal.name} = {_value(given, refusal.name)!r} '
          f'(but {refusal.wanted})')


def _value(config: ModelConfig, name: str) -> Any:
  """The value of 'model.norm' or 'attention.mask'."""
  part, _, field = name.partition('.')
  return getattr(config if part == 'model' else config.attention, field)
