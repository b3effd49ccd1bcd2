"""`importance`: column means of attention without a T x T map, up to any length."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from sink_jax.attention.reference import attention_map
from sink_jax.benchmark.attention import VARIANTS, attention_flops
from sink_jax.benchmark.implementations import Work, random_inputs
from sink_jax.benchmark.machine import accelerated, compiled
from sink_jax.benchmark.rows import FLOOR, Case, Column, Rates, ratio_columns, time_group
from sink_jax.benchmark.timing import Program
from sink_jax.evaluate.sinks import importance
from sink_jax.kernels.importance import streaming_importance

COLUMNS: list[Column] = [
    ('shape', 'B,H,T,Dh', ''), ('form', 'form', ''), ('ms', 'ms', ',.2f'),
    *ratio_columns('x T x T'), *FLOOR, ('mb', 'MB', ',.1f'), ('map_gb', 'one T x T, GB', ',.2f'),
    ('alpha_1', 'alpha_1', '.5f'), ('failed', '', '')]
NOTES = ('FLOPs: 2 H Dh per score that the mask leaves. T x T: float32 maps of all heads, of which the '
         'definition makes at least two. alpha_1: importance of the first key.')


def run(rates: Rates, dtype: str, seconds: float, length: tuple[int, ...]) -> list[dict[str, Any]]:
  """The rows of the streamed sums and of the T x T definition, for each length."""
  fast, spec = accelerated(), VARIANTS['softmax']
  heads, head_dim = (8, 128) if fast else (1, 64)
  lengths = length or ((4096, 16384, 65536, 131072) if fast else (2048, 4096, 8192, 16384))
  rows = []
  for tokens in sorted(lengths):
    shape = (1, heads, tokens, head_dim)
    (q, k, _, params), _ = random_inputs(Work(spec, shape, dtype))
    forms: dict[str, Callable] = {
        'T x T': lambda *x: importance(attention_map(spec, *x, proxy=True)),
        'streamed': lambda *x: streaming_importance(spec, *x).normalized}
    cases = []
    for name, f in forms.items():
      row = {'shape': ','.join(map(str, shape)), 'form': name,
             'map_gb': 4 * heads * tokens**2 / 1e9}
      prepare = functools.partial(_prepare, row, f, q, k, params)
      # Scores are one of the two products of attention.
      cases.append(Case(row, prepare, attention_flops(shape, spec.mask)[0] / 2,
                        q.nbytes + k.nbytes, base=name == 'T x T'))
    time_group(cases, seconds, rates)
    rows += [case.row for case in cases]
  return rows


def _prepare(row: dict[str, Any], f: Callable[..., jax.Array], *arrays: Any) -> Program:
  program = compiled(row, f, *arrays)
  row['alpha_1'] = float(program.call()[..., 0].mean())
  return program
