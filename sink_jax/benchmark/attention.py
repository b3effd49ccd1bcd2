"""`attention`: every variant of attention by our implementations, compared with other libraries."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from sink_jax.arguments import check_known
from sink_jax.attention.extra_key_value import KBias
from sink_jax.attention.mask import Mask, Window
from sink_jax.attention.normalizer import AbsFloor, AbsSum, Count, PNorm, RowSum, Unnormalized
from sink_jax.attention.per_token import EluPlusOne
from sink_jax.attention.position import Alibi, Nope, Relative
from sink_jax.attention.similarity import Linear, Relu, Sigmoid, Softpick
from sink_jax.attention.spec import AttentionSpec
from sink_jax.benchmark.implementations import IMPLEMENTATIONS, Implementation, Work
from sink_jax.benchmark.machine import accelerated
from sink_jax.benchmark.rows import FLOOR, Case, Column, Rates, ratio_columns, time_group

# Without rotation, which no library includes either: only the kernels are compared.
VARIANTS = {name: AttentionSpec(**(dict[str, Any](position=Nope()) | parts)) for name, parts in {
    'softmax': {},
    'sigmoid': dict(similarity=Sigmoid(), normalizer=Unnormalized()),
    'sigmoid-sum': dict(similarity=Sigmoid(), normalizer=RowSum(eps=1e-8)),
    'relu': dict(similarity=Relu(), normalizer=Count()),
    'elu': dict(similarity=EluPlusOne(), normalizer=RowSum(eps=1e-8)),
    'linear': dict(similarity=Linear(), normalizer=AbsFloor()),
    'softpick': dict(similarity=Softpick(), normalizer=AbsSum()),
    'alibi': dict(position=Alibi()),
    'relative': dict(position=Relative()),
    'p-norm': dict(normalizer=PNorm(p=2.0)),
    'window': dict(mask=Window(size=256)),
    'k-bias': dict(kv_bias=KBias()),
}.items()}
Shape = tuple[int, int, int, int]  # B, H, T, Dh
SHAPES: dict[bool, tuple[Shape, ...]] = {  # by whether there is a GPU or TPU
    True: ((8, 8, 2048, 64), (8, 8, 2048, 96), (8, 16, 2048, 128), (1, 8, 32768, 128)),
    False: ((1, 8, 2048, 96),),
}
# Seconds. Starting a program takes some 10 us, so a program of JAX repeats an operation that could be shorter
# than this.
_SHORT, _REPEATS = 1e-4, 20
COLUMNS: list[Column] = [
    ('shape', 'B,H,T,Dh', ''), ('passes', 'passes', ''), ('variant', 'variant', ''),
    ('implementation', 'implementation', ''), ('kind', 'kind', ''), ('ms', 'ms', '.3f'),
    *ratio_columns('x library'), *FLOOR, ('mb', 'MB', ',.0f'), ('failed', '', '')]
NOTES = ('x library: over softmax at the same shape by the first library that ran (cudnn, splash, '
         'torch-flash, ...). FLOPs: 4 B H Dh per score that the mask leaves, 3.5 times that with '
         'the backward pass, for every implementation.')


def run(rates: Rates, dtype: str, seconds: float, shape: Sequence[Shape], variants: Sequence[str],
        implementations: Sequence[str]) -> list[dict[str, Any]]:
  """The rows of every implementation of every variant at every shape; an empty argument means all.

  Raises:
    ValueError: an unknown name, or no implementation of these computes these variants here.
  """
  for name in variants:
    check_known(name, VARIANTS, '--variants: unknown')
  for name in implementations:
    check_known(name, IMPLEMENTATIONS, '--implementations: unknown')
  used = {name: IMPLEMENTATIONS[name] for name in implementations or IMPLEMENTATIONS}
  absent = [{'implementation': name, 'kind': one.kind, 'failed': one.missing()}
            for name, one in used.items() if one.missing()]
  rows = []
  for one_shape in shape or SHAPES[accelerated()]:
    for backward in (False, True):
      cases = [_case(variant, name, one, Work(VARIANTS[variant], one_shape, dtype, backward), rates)
               for variant in variants or VARIANTS for name, one in used.items()
               if not one.missing() and (one.variants is None or variant in one.variants)]
      time_group(cases, seconds, rates)
      rows += [case.row for case in cases]
  if not rows:
    raise ValueError(f'--implementations={",".join(used)}: none computes --variants='
                     f'{",".join(variants)} on this machine.')
  return rows + absent


def _case(variant: str, name: str, one: Implementation, work: Work, rates: Rates) -> Case:
  row = {'shape': ','.join(map(str, work.shape)), 'passes': 'both' if work.backward else 'forward',
         'variant': variant, 'implementation': name, 'kind': one.kind}
  flops = attention_flops(work.shape, work.spec.mask)[work.backward]
  # The forward pass reads q, k, v and writes the output; with gradients there are eight arrays.
  bytes_ = (8 if work.backward else 4) * math.prod(work.shape) * jnp.dtype(work.dtype).itemsize
  if flops / rates.flops < _SHORT and accelerated():
    work = work._replace(repeats=_REPEATS)
  return Case(row, functools.partial(one.program, row, work), flops, bytes_,
              base=one.kind == 'library' and variant == 'softmax')


def scores(length: int, mask: Mask) -> float:
  """Scores of one head that the mask leaves: T^2 / 2, or w T - w^2 / 2 in a window of w < T keys."""
  window = min(mask.window or length, length)
  # The first w queries see w / 2 keys on average, and all others w.
  return window * length - window**2 / 2


def attention_flops(shape: Shape, mask: Mask) -> tuple[float, float]:
  """FLOPs of the forward pass, and of both passes, at a shape (B, H, T, Dh).

  Two matrix products count forward and five backward, however often a kernel computes the scores
  again.
  """
  batch, heads, length, head_dim = shape
  forward = 4 * batch * heads * head_dim * scores(length, mask)
  return forward, 3.5 * forward
