"""What the kernels are meant to reach on a GPU, beside what a check measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple


class Target(NamedTuple):
  """met is None where something it needs was not measured."""

  text: str
  where: str
  wanted: str
  measured: float | None
  met: bool | None


_MAIN = ('8,8,2048,96', '8,16,2048,128')
_EAGER = {'torch-eager': 'eager PyTorch', 'release': 'the same code compiled by XLA'}


def targets(parts: dict[str, Any]) -> list[Target]:
  """All targets, from the documents of the parts by name (missing ones are None)."""
  return [*_attention(_times(parts.get('attention'))), *_training(parts)]


def _times(result):
  """{(shape, variant, implementation): milliseconds of forward and backward}."""
  rows = result['rows'] if result else []
  return {(row['shape'], row['variant'], row['implementation']): row['both_ms']
          for row in rows if 'both_ms' in row}


def _attention(times) -> Iterator[Target]:
  shapes = list(dict.fromkeys(shape for shape, _, _ in times)) or list(_MAIN)
  main = [shape for shape in _MAIN if shape in shapes]
  for shape in main or shapes:
    ours = {variant: ms for (s, variant, name), ms in times.items()
            if s == shape and name == 'pallas'}
    softmax = ours.get('softmax')
    yield _at_most('softmax fwd+bwd, times that of cuDNN', shape, 1.8,
                   _ratio(softmax, times.get((shape, 'softmax', 'cudnn'))))
    yield _at_most('sigmoid fwd+bwd, times that of our softmax', shape, 1.0,
                   _ratio(ours.get('sigmoid'), softmax))
    rest = {variant: _ratio(ms, softmax) for variant, ms in ours.items()
            if variant not in ('softmax', 'sigmoid')}
    slowest = max(rest, key=rest.get) if softmax and rest else None
    yield _at_most('slowest other variant' + (f' ({slowest})' if slowest else '')
                   + ', times our softmax', shape, 1.3, rest.get(slowest))
    for eager, name in _EAGER.items():
      # A variant without eager code of its own is compared with that of softmax.
      softmax_eager = times.get((shape, 'softmax', eager))
      base = lambda variant: times.get((shape, variant, eager), softmax_eager)
      gains = {variant: _ratio(base(variant), ms) for variant, ms in ours.items()}
      gains = {variant: gain for variant, gain in gains.items() if gain}
      least = min(gains, key=gains.get) if gains else None
      yield _at_least(f'least gain of a variant{f" ({least})" if least else ""} over bfloat16 '
                      f'T x T code: {name}', shape, 5.0, gains.get(least))


def _training(parts) -> Iterator[Target]:
  for part, size, wanted in (('train_60m', '60m', 0.5), ('train_1b', '1b', 0.6)):
    rows = [row for row in (parts.get(part) or {'rows': []})['rows']
            if row.get('mfu') and row['size'] == size]
    best = max(rows, key=lambda row: row['mfu'], default=None)
    where = f'batch {best["batch"]}, {best["implementation"]}' if best else ''
    yield _at_least(f'{size} training step, share of the measured matmul rate', where, wanted,
                    best and best['mfu'])


def _ratio(a, b):
  return a / b if a and b else None


def _at_most(text, where, limit, value):
  return Target(text, where, f'<= {limit:g}', value, None if value is None else value <= limit)


def _at_least(text, where, limit, value):
  return Target(text, where, f'>= {limit:g}', value, None if value is None else value >= limit)
