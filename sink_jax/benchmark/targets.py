"""What the kernels are meant to reach on a GPU, beside what a check measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from sink_jax.benchmark.records import AttentionRow, Document, TrainStepRow


class Target(NamedTuple):
  """A number that a check should reach; met is None where it was not measured.

  where: at which shape or batch. wanted: the bound in words, such as '<= 1.8'.
  """

  text: str
  where: str
  wanted: str
  measured: float | None
  met: bool | None


# Shapes of the paper's 60M and 1B models, of which the targets are.
_MAIN = ('8,8,2048,96', '8,16,2048,128')
_EAGER = {'torch-eager': 'eager PyTorch', 'release': 'the same code compiled by XLA'}


def targets(parts: Mapping[str, Document | None]) -> list[Target]:
  """All targets, from the documents of the parts by name (missing ones are None)."""
  return [*_attention(_times(parts.get('attention'))), *_training(parts)]


def _times(document: Document | None) -> dict[tuple[str, str, str], float]:
  """{(shape, variant, implementation): milliseconds of forward and backward}."""
  rows = document.rows_of(AttentionRow) if document else []
  return {(row.shape, row.variant, row.implementation): row.both.median
          for row in rows if row.both}


def _attention(times: dict[tuple[str, str, str], float]) -> Iterator[Target]:
  # Without any measurement the targets are still listed, as not measured.
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
    slowest, ratio = max(_known(rest), key=lambda item: item[1], default=('', None))
    yield _at_most('slowest other variant' + (f' ({slowest})' if slowest else '')
                   + ', times our softmax', shape, 1.3, ratio)
    for eager, name in _EAGER.items():
      # A variant without eager code of its own is compared with that of softmax.
      softmax_eager = times.get((shape, 'softmax', eager))
      base = lambda variant: times.get((shape, variant, eager), softmax_eager)
      gains = {variant: _ratio(base(variant), ms) for variant, ms in ours.items()}
      least, gain = min(_known(gains), key=lambda item: item[1], default=('', None))
      yield _at_least(f'least gain of a variant{f" ({least})" if least else ""} over bfloat16 '
                      f'T x T code: {name}', shape, 5.0, gain)


def _training(parts: Mapping[str, Document | None]) -> Iterator[Target]:
  for part, size, wanted in (('train_60m', '60m', 0.5), ('train_1b', '1b', 0.6)):
    document = parts.get(part)
    rows = document.rows_of(TrainStepRow) if document else []
    mfu, where = max(((row.mfu, f'batch {row.batch}, {row.implementation}')
                      for row in rows if row.mfu and row.size == size),
                     key=lambda reached: reached[0], default=(None, ''))
    yield _at_least(f'{size} training step, share of the measured matmul rate', where, wanted, mfu)


def _ratio(a: float | None, b: float | None) -> float | None:
  return a / b if a and b else None


def _known(ratios: dict[str, float | None]) -> list[tuple[str, float]]:
  return [(variant, ratio) for variant, ratio in ratios.items() if ratio]


def _at_most(text: str, where: str, limit: float, value: float | None) -> Target:
  return Target(text, where, f'<= {limit:g}', value, None if value is None else value <= limit)


def _at_least(text: str, where: str, limit: float, value: float | None) -> Target:
  return Target(text, where, f'>= {limit:g}', value, None if value is None else value >= limit)
