"""`attention`: every variant of attention by our implementations, compared with other libraries."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from sink_jax.arguments import check_known
from sink_jax.attention.extra_key_value import KBias
from sink_jax.attention.mask import Window
from sink_jax.attention.normalizer import AbsFloor, AbsSum, Count, PNorm, RowSum, Unnormalized
from sink_jax.attention.per_token import EluPlusOne
from sink_jax.attention.position import Alibi, Nope, Relative
from sink_jax.attention.similarity import Linear, Relu, Sigmoid, Softpick
from sink_jax.attention.spec import AttentionSpec
from sink_jax.benchmark.implementations import IMPLEMENTATIONS, Work
from sink_jax.benchmark.measure import (
  FLOOR,
  Case,
  Column,
  Rates,
  accelerated,
  ratio_columns,
  time_group,
)
from sink_jax.models.sizes import visible_flops

# Without rotation, which no library includes either: only the kernels are compared.
_spec = functools.partial(AttentionSpec, position=Nope())
VARIANTS = {
  'softmax': _spec(),
  'sigmoid': _spec(Sigmoid(), Unnormalized()),
  'sigmoid-sum': _spec(Sigmoid(), RowSum(eps=1e-8)),
  'relu': _spec(Relu(), Count()),
  'elu': _spec(EluPlusOne(), RowSum(eps=1e-8)),
  'linear': _spec(Linear(), AbsFloor()),
  'softpick': _spec(Softpick(), AbsSum()),
  'alibi': _spec(position=Alibi()),
  'relative': _spec(position=Relative()),
  'p-norm': _spec(normalizer=PNorm(p=2.0)),
  'window': _spec(mask=Window(size=256)),
  'k-bias': _spec(kv_bias=KBias()),
}
Shape = tuple[int, int, int, int]  # B, H, T, Dh
SHAPES: dict[bool, list[Shape]] = {  # by whether there is a GPU or TPU
  True: [
    (8, 8, 2048, 64),
    (8, 8, 2048, 96),
    (8, 16, 2048, 128),
    (1, 8, 32768, 128),
  ],
  False: [(1, 8, 2048, 96)],
}
# Seconds. Starting a program takes some 10 us, so a program of JAX repeats an operation that could
# be shorter than this.
_SHORT, _REPEATS = 1e-4, 20
COLUMNS: list[Column] = [
  ('shape', 'B,H,T,Dh', ''),
  ('passes', 'passes', ''),
  ('variant', 'variant', ''),
  ('implementation', 'implementation', ''),
  ('kind', 'kind', ''),
  ('ms', 'ms', '.3f'),
  *ratio_columns('x library'),
  *FLOOR,
  ('mb', 'MB', ',.0f'),
  ('failed', '', ''),
]
NOTES = (
  'x library: over softmax at the same shape by the first library that ran (cudnn, splash, '
  'torch-flash, ...). FLOPs: 4 B H Dh per score that the mask leaves, 3.5 times that with '
  'the backward pass, for every implementation.'
)


def run(
  rates: Rates,
  dtype: str,
  seconds: float,
  shape: Sequence[Shape],
  variants: Sequence[str],
  implementations: Sequence[str],
) -> list[dict[str, Any]]:
  """The rows of every implementation of every variant at every shape; an empty argument means all.

  Raises:
    ValueError: an unknown name, or no implementation of these computes these variants here.
  """
  for name in variants:
    check_known(name, VARIANTS, '--variants: unknown')
  for name in implementations:
    check_known(name, IMPLEMENTATIONS, '--implementations: unknown')
  used = {name: IMPLEMENTATIONS[name] for name in implementations or IMPLEMENTATIONS}
  absent = [
    {'implementation': name, 'kind': one.kind, 'failed': one.missing()}
    for name, one in used.items()
    if one.missing()
  ]
  pairs = [
    (variant, name)
    for variant in variants or VARIANTS
    for name, one in used.items()
    if not one.missing() and one.computes(variant)
  ]
  if not pairs:
    raise ValueError(
      f'--implementations={",".join(used)}: none computes --variants='
      f'{",".join(variants)} on this machine.'
    )
  rows = []
  for one_shape in shape or SHAPES[accelerated()]:
    for backward in (False, True):
      cases = [
        _case(variant, name, Work(VARIANTS[variant], one_shape, dtype, backward), rates)
        for variant, name in pairs
      ]
      rows += time_group(cases, seconds, rates)
  return rows + absent


def _case(variant: str, name: str, work: Work, rates: Rates) -> Case:
  one = IMPLEMENTATIONS[name]
  row = {
    'shape': ','.join(map(str, work.shape)),
    'passes': 'both' if work.backward else 'forward',
    'variant': variant,
    'implementation': name,
    'kind': one.kind,
  }
  batch, heads, length, head_dim = work.shape
  forward = visible_flops(work.spec.mask, length, batch * heads * head_dim)
  # Two matrix products count forward and five backward, however often a kernel computes the scores
  # again.
  flops = 3.5 * forward if work.backward else forward
  # The forward pass reads q, k, v and writes the output; with gradients there are eight arrays.
  arrays = 8 if work.backward else 4
  bytes_ = arrays * math.prod(work.shape) * jnp.dtype(work.dtype).itemsize
  if flops / rates.flops < _SHORT and accelerated():
    work = work._replace(repeats=_REPEATS)
  return Case(
    row,
    functools.partial(one.program, row, work),
    flops,
    bytes_,
    base=one.kind == 'library' and variant == 'softmax',
  )
