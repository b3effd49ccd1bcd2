"""`attention`: every variant by our implementations, beside the alternatives."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from sink_jax.benchmark import baselines, machine
from sink_jax.benchmark.flops import attention_flops
from sink_jax.benchmark.table import column, document
from sink_jax.benchmark.timing import Countdown, measure, reason
from sink_jax.benchmark.variants import VARIANTS, chosen

SHAPES = {
    True: [(8, 8, 2048, 64), (8, 8, 2048, 96), (8, 16, 2048, 128), (1, 8, 32768, 128)],
    False: [(1, 8, 2048, 96)],
}
_DISPATCH = 1e-4  # seconds: a call whose floor is shorter is timed several to a program
_CALLS = 20
COLUMNS = [
    column('shape', 'B,H,T,Dh'), column('variant', 'variant'),
    column('implementation', 'implementation'), column('kind', 'kind'),
    column('forward_ms', 'fwd ms', '.3f'), column('both_ms', 'fwd+bwd ms', '.3f'),
    column('forward_tflops', 'TFLOP/s', '.3g'), column('both_tflops', 'f+b', '.3g'),
    column('forward_share', 'of matmul', '.0%'), column('both_share', 'f+b', '.0%'),
    column('both_mb', 'MB', ',.0f'), column('both_vs_library', 'x library', '.2f'),
    column('note', ''),
]
NOTES = [
    'fwd, fwd+bwd: median milliseconds per call; MB: peak memory of fwd+bwd beside its inputs.',
    'TFLOP/s: 4 B H Dh per score that the mask leaves (causal: T^2/2), 3.5 times that with the '
    'backward pass, whatever is really computed.',
]


class Case(NamedTuple):
  """A row to be: one implementation of one variant at one shape."""

  variant: str
  implementation: str
  work: baselines.Work

  @property
  def shape(self) -> str:
    return ','.join(map(str, self.work.shape))

  def __str__(self):
    return f'({self.shape}) {self.variant} {self.implementation}'


def run(shapes, variants, others, implementations, dtype, seed, seconds, limit=None,
        save: Callable[[dict[str, Any]], None] = lambda result: None) -> dict[str, Any]:
  """Times every case and returns the document; `save` gets it after every row.

  Args:
    shapes: (B, H, T, Dh) each. variants, others, implementations: names, or ['all'];
      `others` are rivals and may be empty; `implementations` may be None, the default.
    seconds: for each number. limit: seconds after which no further row begins; `not_run`
      of the document then names the rest.
  """
  shapes = list(dict.fromkeys(map(tuple, shapes)))
  cases = plan(shapes, variants, others, implementations, dtype, seed)
  notes = [*NOTES, *_left_out(implementations)]
  rate = machine.matmul_rate(dtype)
  cases = [case._replace(work=case.work._replace(calls=_calls(case.work, rate)))
           for case in cases]
  where = machine.describe(seed) | {'matmul_tflops': rate and rate / 1e12, 'dtype': dtype}
  if rate:
    if any(case.work.calls > 1 for case in cases):
      notes.append(f'Where a forward pass cannot take {_DISPATCH * 1e6:.0f} us, a program of JAX '
                   f'makes {_CALLS} calls, one after the other, and a call is a part of it.')
    notes.append(f'of matmul: share of the {rate / 1e12:,.2f} TFLOP/s measured for a large {dtype} '
                 'matrix product in this run.')
  options = {'shapes': [list(s) for s in shapes], 'variants': variants, 'rivals': others,
             'implementations': implementations, 'seconds': seconds, 'limit': limit}
  order = [str(case) for case in sorted(cases, key=lambda c: _place(c, shapes))]
  rows: dict[str, dict[str, Any]] = {}
  not_run: list[str] = []

  def result(complete):
    shown = [rows[name] for name in order if name in rows]
    late = [f'{len(not_run)} rows were not run: the time was up.'] if not_run else []
    return document('attention', where, options, COLUMNS, shown,
                    notes + _compare(shown) + late, complete) | {'not_run': not_run}

  progress = Countdown(len(cases), limit)
  ahead: dict[str, Future] = {}
  for case in cases:
    if progress.over():
      not_run.append(str(case))
      continue
    progress.next(str(case))
    if case.implementation == 'pallas' and str(case) not in ahead:
      ahead |= _compile_ahead([other for other in cases if other.shape == case.shape])
    row = {'shape': case.shape, 'variant': case.variant, 'implementation': case.implementation,
           'kind': baselines.BASELINES[case.implementation].kind}
    rows[str(case)] = row | _timed(case, ahead.pop(str(case), None), seconds, rate)
    save(result(False))
  return result(True)


def plan(shapes, variants, others, implementations, dtype, seed) -> list[Case]:
  """The cases in the order of their importance, in which they are run.

  Raises:
    ValueError: an unknown name; lists the choices.
  """
  specs = chosen(variants, VARIANTS, '--variants')
  ours = {name: baselines.BASELINES[name] for name in baselines.OURS}
  asked = set() if variants == ['all'] else {*others, *(implementations or [])}
  if implementations is None:
    implementations = ['all'] if machine.accelerated() else ['linear', 'chunked']
  ours = chosen(implementations, ours, '--implementations')
  named = {name: baselines.BASELINES[name] for name in baselines.OTHERS}
  theirs = chosen(others, named, '--rivals')
  cases = []
  for shape in shapes:
    for variant, spec in specs.items():
      for name, rival in (ours | theirs).items():
        # Something appears where it is meant to; what is missing on this machine for softmax
        # alone; and what is asked for by name, with a variant, in any case.
        if name in asked or rival.covers(spec) and (
            variant == 'softmax' or not baselines.missing(name)):
          cases.append(Case(variant, name, baselines.Work(spec, tuple(shape), dtype, seed)))
  return sorted(cases, key=_rank)


def _calls(work, rate):
  """How many calls one program makes: starting it takes as long as a short call."""
  floor = attention_flops(work.shape, work.spec.mask)[0] / rate if rate else math.inf
  return _CALLS if floor < _DISPATCH else 1


def _rank(case):
  """What a short run should see first: our kernels and the libraries, then T x T code."""
  name, main = case.implementation, case.variant in ('softmax', 'sigmoid')
  if name == 'pallas' or name in ('cudnn', 'splash') and main:
    return 0
  if main:
    return 1 if name in ('release', 'torch-eager', 'torch-flash', 'xla') else 2
  return 3


def _place(case, shapes):
  """Where a row stands in the table."""
  names = list(VARIANTS), list(baselines.BASELINES)
  return (list(map(tuple, shapes)).index(case.work.shape), names[0].index(case.variant),
          names[1].index(case.implementation))


def _compile_ahead(cases):
  """Compiles our kernels among the cases in threads, and waits for all; {case: future}.

  They contain nothing that the compiler tunes by running it, so they do not disturb one
  another; everybody else is compiled alone.
  """
  if not machine.accelerated():
    return {}
  with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
    return {str(case): pool.submit(baselines.prepare, case.implementation, case.work)
            for case in cases if case.implementation == 'pallas'}


def _timed(case, prepared, seconds, rate):
  """The numbers of a row, or why there are none."""
  try:
    programs = prepared.result() if prepared else baselines.prepare(case.implementation, case.work)
    limit = machine.memory_limit()
    if (programs.both_bytes or 0) > limit:
      return {'failed': f'out of memory: needs {programs.both_bytes / 1e9:.0f} GB of '
                        f'{limit / 1e9:.0f} GB', 'both_bytes': programs.both_bytes}
    both_bytes = programs.both_bytes
    if both_bytes is None and programs.measured_bytes:
      both_bytes = programs.measured_bytes()
    forward, both = (measure(f, seconds).of_each(programs.calls)
                     for f in (programs.forward, programs.both))
  except Exception as error:  # somebody else's code, on a machine we do not know
    said = reason(error)
    if said == 'out of memory' and case.implementation.startswith('torch-'):
      said += machine.held()
    return {'failed': said}
  row = forward.named('forward') | both.named('both')
  row |= {'calls_per_program': programs.calls,
          'forward_bytes': programs.forward_bytes, 'both_bytes': both_bytes,
          'both_mb': None if both_bytes is None else both_bytes / 1e6}
  for name, flops, ms in zip(('forward', 'both'),
                             attention_flops(case.work.shape, case.work.spec.mask),
                             (forward.median, both.median)):
    row |= {f'{name}_flops': flops, f'{name}_tflops': flops / ms / 1e9,
            f'{name}_share': flops / ms * 1e3 / rate if rate else None}
  return row


def _compare(rows):
  """Fills in both_vs_library and forward_vs_library; returns the note that explains them."""
  best = {}
  for row in rows:
    if row['kind'] == 'library' and row['variant'] == 'softmax' and 'both_ms' in row:
      known = best.get(row['shape'])
      first = row['implementation'] == 'cudnn'
      if known is None or first or (known['implementation'] != 'cudnn'
                                    and row['both_ms'] < known['both_ms']):
        best[row['shape']] = row
  for row in rows:
    library = best.get(row['shape'])
    if library and 'both_ms' in row:
      row |= {f'{x}_vs_library': row[f'{x}_ms'] / library[f'{x}_ms'] for x in ('forward', 'both')}
      row['library'] = library['implementation']
  names = sorted({row['implementation'] for row in best.values()})
  return [f'x library: fwd+bwd time over that of softmax at the same shape by {" or ".join(names)}.'
          ] if names else []


def _left_out(implementations):
  if implementations is None and not machine.accelerated():
    return ["'pallas' is left out: without a GPU or TPU it runs in an interpreter, whose times "
            'say nothing. --implementations=pallas runs it all the same.']
  return []
