"""The classes that a run is exported to, and the choice of one."""

from __future__ import annotations

from typing import Any

from sink_jax.models.config import ModelConfig
from sink_jax.pretrained import to_granite_swa, to_llama, to_mistral, to_qwen3, to_qwen3_next
from sink_jax.pretrained.target import Refusal, Target

# In the order in which they are tried: first those that most programs serve.
_MODULES: tuple[Target, ...] = (to_llama, to_mistral, to_qwen3, to_granite_swa, to_qwen3_next)
TARGETS: dict[str, Target] = {target.NAME: target for target in _MODULES}


def choose(config: ModelConfig, given: ModelConfig, name: str | None = None) -> tuple[Target, str]:
  """(class, why it is this one) of a model.

  Args:
    config: the model that is written. given: that of the run, whose values errors name; the two
      differ in what is folded into weights.
    name: of the class that it must be; None for the first that holds it.

  Raises:
    ValueError: this class, or each of them, lacks a part of the model; names the part, and the
      class that has it.
  """
  refusals = {key: target.refusals(config) for key, target in TARGETS.items()}
  first = next((key for key, found in refusals.items() if not found), None)
  if name is not None:
    if name not in TARGETS:
      raise ValueError(f'--as={name}: no such class; choices: {", ".join(TARGETS)}.')
    if not refusals[name]:
      return TARGETS[name], 'as --as says'
    remedy = f'--as={first} can hold this run' if first else 'nor can another class'
    raise ValueError(f'--as={name} cannot hold this run: {_lacks(given, name, refusals[name][0])}; '
                     f'{remedy}.')
  if first is None:
    raise ValueError(_no_class(given, refusals))
  if first == next(iter(TARGETS)):
    return TARGETS[first], 'the first class that is tried'
  # The classes before it, and what each of them lacks.
  before = list(TARGETS)[:list(TARGETS).index(first)]
  return TARGETS[first], '; '.join(_lacks(given, key, refusals[key][0]) for key in before)


def _no_class(given: ModelConfig, refusals: dict[str, list[Refusal]]) -> str:
  """The message for a model that no class holds."""
  names = [{refusal.name for refusal in found} for found in refusals.values()]
  in_all = [refusal.name for refusal in next(iter(refusals.values()))
            if all(refusal.name in own for own in names)]
  if not in_all:  # each part has a class, and no class has all of them
    least = min(map(len, refusals.values()))
    reasons = '; '.join(_lacks(given, key, found[0]) for key, found in refusals.items()
                        if len(found) == least)
    return f'This run has no counterpart in transformers, so it cannot be exported: {reasons}.'
  name, classes = in_all[0], dict[str, list[str]]()
  for key, found in refusals.items():
    wanted = next(refusal.wanted for refusal in found if refusal.name == name)
    classes.setdefault(wanted, []).append(key)
  reasons = '; '.join(f'{wanted} ({", ".join(keys)})' for wanted, keys in classes.items())
  return (f'{name} = {_value(given, name)!r} has no counterpart in transformers, so this run '
          f'cannot be exported. Classes there have {reasons}.')


def _lacks(given: ModelConfig, key: str, refusal: Refusal) -> str:
  return (f'{key} has no {refusal.name} = {_value(given, refusal.name)!r} '
          f'(but {refusal.wanted})')


def _value(config: ModelConfig, name: str) -> Any:
  """The value of 'model.norm' or 'attention.mask'."""
  part, _, field = name.partition('.')
  return getattr(config if part == 'model' else config.attention, field)
