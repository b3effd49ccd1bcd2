"""`importance`: column means of attention without a T x T map, up to any length."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from sink_jax.attention.reference import attention_map
from sink_jax.benchmark.attention import VARIANTS
from sink_jax.benchmark.implementations import Work, random_inputs
from sink_jax.benchmark.measure import (
  FLOOR,
  Case,
  Column,
  Program,
  Rates,
  accelerated,
  compiled,
  ratio_columns,
  time_group,
)
from sink_jax.evaluate.sinks import importance
from sink_jax.kernels.importance import streaming_importance
from sink_jax.models.sizes import visible_flops

COLUMNS: list[Column] = [
  ('shape', 'B,H,T,Dh', ''),
  ('form', 'form', ''),
  ('ms', 'ms', ',.2f'),
  *ratio_columns('x T x T'),
  *FLOOR,
  ('mb', 'MB', ',.1f'),
  ('map_gb', 'one T x T, GB', ',.2f'),
  ('alpha_1', 'alpha_1', '.5f'),
  ('failed', '', ''),
]
NOTES = (
  'FLOPs: 2 H Dh per score that the mask leaves. T x T: float32 maps of all heads, of which '
  'the definition makes at least two. alpha_1: importance of the first key.'
)
_SPEC = VARIANTS['softmax']


def run(rates: Rates, dtype: str, seconds: float, length: tuple[int, ...]) -> list[dict[str, Any]]:
  """The rows of the streamed sums and of the T x T definition, for each length."""
  fast = accelerated()
  heads, head_dim = (8, 128) if fast else (1, 64)
  lengths = length or ((4096, 16384, 65536, 131072) if fast else (2048, 4096, 8192, 16384))
  rows = []
  for tokens in sorted(lengths):
    work = Work(_SPEC, (1, heads, tokens, head_dim), dtype)
    cases = [_case(work, name, form) for name, form in _FORMS.items()]
    rows += time_group(cases, seconds, rates)
  return rows


_FORMS: dict[str, Callable[..., jax.Array]] = {
  'T x T': lambda *qk: importance(attention_map(_SPEC, *qk, proxy=True)),
  'streamed': lambda *qk: streaming_importance(_SPEC, *qk).normalized,
}


def _case(work: Work, name: str, f: Callable[..., jax.Array]) -> Case:
  (q, k, _, params), _ = random_inputs(work)
  _, heads, tokens, head_dim = work.shape
  row = {
    'shape': ','.join(map(str, work.shape)),
    'form': name,
    'map_gb': 4 * heads * tokens**2 / 1e9,
  }
  # Scores are one of the two products of attention.
  flops = visible_flops(_SPEC.mask, tokens, heads * head_dim) / 2
  prepare = functools.partial(_prepare, row, f, q, k, params)
  return Case(row, prepare, flops, q.nbytes + k.nbytes, base=name == 'T x T')


def _prepare(row: dict[str, Any], f: Callable[..., jax.Array], *arrays: Any) -> Program:
  program = compiled(row, f, *arrays)
  row['alpha_1'] = float(program.call()[..., 0].mean())
  return program
