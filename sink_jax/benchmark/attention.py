"""`attention`: every variant of attention by our implementations, beside the baselines."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from sink_jax.benchmark import baselines, machine
from sink_jax.benchmark.flops import attention_flops
from sink_jax.benchmark.records import AttentionRow, Column, Document
from sink_jax.benchmark.timing import Countdown, Timing, measure, reason
from sink_jax.benchmark.variants import VARIANTS, chosen
from sink_jax.benchmark.work import Work

Shape = tuple[int, int, int, int]  # B, H, T, Dh
# Keyed by whether there is a GPU or TPU.
SHAPES: dict[bool, list[Shape]] = {
    True: [(8, 8, 2048, 64), (8, 8, 2048, 96), (8, 16, 2048, 128), (1, 8, 32768, 128)],
    False: [(1, 8, 2048, 96)],
}
# Seconds. Starting a program takes some 10 us: where a call could be shorter than this, a program
# makes several calls.
_DISPATCH = 1e-4
_CALLS = 20
COLUMNS = [
    Column('shape', 'B,H,T,Dh'), Column('variant', 'variant'),
    Column('implementation', 'implementation'), Column('kind', 'kind'),
    Column('forward_ms', 'fwd ms', '.3f'), Column('both_ms', 'fwd+bwd ms', '.3f'),
    Column('forward_tflops', 'TFLOP/s', '.3g'), Column('both_tflops', 'f+b', '.3g'),
    Column('forward_share', 'of matmul', '.0%'), Column('both_share', 'f+b', '.0%'),
    Column('both_mb', 'MB', ',.0f'), Column('both_vs_library', 'x library', '.2f'),
    Column('note', ''),
]
NOTES = [
    'fwd, fwd+bwd: median milliseconds per call; MB: peak memory of fwd+bwd beside its inputs.',
    'TFLOP/s: 4 B H Dh per score that the mask leaves (causal: T^2/2), 3.5 times that with the '
    'backward pass, whatever is really computed.',
]


class Case(NamedTuple):
  """One implementation of one variant at one shape, which becomes a row."""

  variant: str
  implementation: str
  work: Work

  @property
  def shape(self) -> str:
    """The shape as a row has it, 'B,H,T,Dh'."""
    return ','.join(map(str, self.work.shape))

  def __str__(self) -> str:
    return f'({self.shape}) {self.variant} {self.implementation}'


def run(shapes: Sequence[Shape], variants: list[str], others: list[str],
        implementations: list[str] | None, dtype: str, seed: int, seconds: float,
        limit: float | None = None,
        save: Callable[[Document], None] = lambda document: None) -> Document:
  """Times every case and returns the document; `save` gets it after every row.

  Args:
    shapes: (B, H, T, Dh) each.
    variants, others, implementations: names, or ['all']; `others` are baselines and may be
      empty; `implementations` may be None, the default.
    seconds: spent on each number.
    limit: seconds after which no further row begins; `not_run` of the document then names
      the rest.
  """
  # A shape that is given twice would have its rows twice in the table: rows are kept by their case.
  shapes = list(dict.fromkeys(shapes))
  cases = plan(shapes, variants, others, implementations, dtype, seed)
  notes = [*NOTES, *_left_out(implementations)]
  # Measured before the cases, since it decides how many calls a program makes.
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
  # The cases run in the order of their importance, and the table has them by shape and variant.
  order = [str(case) for case in sorted(cases, key=lambda c: _table_order(c, shapes))]
  rows: dict[str, AttentionRow] = {}
  not_run: list[str] = []

  def result(complete: bool) -> Document:
    compared, note = _compare([rows[name] for name in order if name in rows])
    late = [f'{len(not_run)} rows were not run: the time was up.'] if not_run else []
    return Document('attention', where, options, COLUMNS, compared, [*notes, *note, *late],
                    complete, list(not_run))

  progress = Countdown(len(cases), limit)
  ahead: dict[str, Future] = {}
  for case in cases:
    if progress.over():
      not_run.append(str(case))
      continue
    progress.next(str(case))
    # The first case of a shape compiles those of all variants at this shape.
    if case.implementation == 'pallas' and str(case) not in ahead:
      ahead |= _compile_ahead([other for other in cases if other.shape == case.shape])
    rows[str(case)] = _timed(case, ahead.pop(str(case), None), seconds, rate)
    save(result(False))
  return result(True)


def plan(shapes: Sequence[Shape], variants: list[str], others: list[str],
         implementations: list[str] | None, dtype: str, seed: int) -> list[Case]:
  """The cases in the order of their importance, in which they are run.

  Raises:
    ValueError: an unknown name; lists the choices.
  """
  specs = chosen(variants, VARIANTS, '--variants')
  ours = {name: baselines.BASELINES[name] for name in baselines.OURS}
  # With all variants no pair of variant and implementation was named, so nothing is forced.
  asked = set() if variants == ['all'] else {*others, *(implementations or [])}
  if implementations is None:
    implementations = ['all'] if machine.accelerated() else ['linear', 'chunked']
  ours = chosen(implementations, ours, '--implementations')
  named = {name: baselines.BASELINES[name] for name in baselines.OTHERS}
  theirs = chosen(others, named, '--rivals')
  cases = []
  for shape in shapes:
    for variant, spec in specs.items():
      for name, baseline in (ours | theirs).items():
        # An implementation appears with the variants that it is meant for. One that this machine
        # lacks appears once, with softmax, so that the table says what is missing. One that the
        # user names, together with a variant, appears in any case.
        if name in asked or baseline.covers(spec) and (
            variant == 'softmax' or not baselines.missing(name)):
          cases.append(Case(variant, name, Work(spec, shape, dtype, seed)))
  return sorted(cases, key=_rank)


def _calls(work: Work, rate: float | None) -> int:
  """How many calls one program makes: starting it takes as long as a short call."""
  # The time of the products alone at the measured rate, which no call can be shorter than.
  floor = attention_flops(work.shape, work.spec.mask)[0] / rate if rate else math.inf
  return _CALLS if floor < _DISPATCH else 1


def _rank(case: Case) -> int:
  """The order for a run that may be cut short: our kernels and the libraries, then T x T code."""
  name, main = case.implementation, case.variant in ('softmax', 'sigmoid')
  if name == 'pallas' or name in ('cudnn', 'splash') and main:
    return 0
  if main:
    return 1 if name in ('release', 'torch-eager', 'torch-flash', 'xla') else 2
  return 3


def _table_order(case: Case, shapes: Sequence[Shape]) -> tuple[int, int, int]:
  """Where a row stands in the table: by shape, variant and implementation."""
  names = list(VARIANTS), list(baselines.BASELINES)
  return (list(map(tuple, shapes)).index(case.work.shape), names[0].index(case.variant),
          names[1].index(case.implementation))


def _compile_ahead(cases: list[Case]) -> dict[str, Future]:
  """Compiles our kernels among the cases in threads, and waits for all; {case: future}.

  They contain nothing that the compiler tunes by running it, so they do not disturb one
  another. The baselines do, and are compiled one at a time, when nothing else runs.
  """
  if not machine.accelerated():
    return {}
  with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
    return {str(case): pool.submit(baselines.prepare, case.implementation, case.work)
            for case in cases if case.implementation == 'pallas'}


def _timed(case: Case, prepared: Future | None, seconds: float,
           rate: float | None) -> AttentionRow:
  """The row of a case, with its numbers or with the reason why there are none."""
  row = AttentionRow(shape=case.shape, variant=case.variant, implementation=case.implementation,
                     kind=baselines.BASELINES[case.implementation].kind)
  try:
    programs = prepared.result() if prepared else baselines.prepare(case.implementation, case.work)
    # A program that cannot fit is not started: running out of memory can end the process.
    limit = machine.memory_limit()
    if programs.both_bytes is not None and programs.both_bytes > limit:
      return dataclasses.replace(
          row, both_bytes=programs.both_bytes,
          failed=f'out of memory: needs {programs.both_bytes / 1e9:.0f} GB of '
                 f'{limit / 1e9:.0f} GB')
    both_bytes = programs.both_bytes
    if both_bytes is None and programs.measured_bytes:
      both_bytes = programs.measured_bytes()
    forward, both = (measure(f, seconds).of_each(programs.calls)
                     for f in (programs.forward, programs.both))
  except Exception as error:  # libraries, on a machine of any kind, raise whatever they like
    failed = reason(error)
    # JAX does not give back what it once had, so PyTorch may find too little of the device's
    # memory.
    if failed == 'out of memory' and case.implementation.startswith('torch-'):
      failed += machine.held_by_jax()
    return dataclasses.replace(row, failed=failed)
  forward_flops, both_flops = attention_flops(case.work.shape, case.work.spec.mask)
  # FLOP per millisecond, in TFLOP per second.
  forward_tflops, both_tflops = forward_flops / forward.median / 1e9, both_flops / both.median / 1e9
  return dataclasses.replace(
      row, forward=forward, both=both, calls_per_program=programs.calls,
      forward_bytes=programs.forward_bytes, both_bytes=both_bytes,
      both_mb=None if both_bytes is None else both_bytes / 1e6,
      forward_flops=forward_flops, forward_tflops=forward_tflops,
      forward_share=forward_tflops * 1e12 / rate if rate else None,
      both_flops=both_flops, both_tflops=both_tflops,
      both_share=both_tflops * 1e12 / rate if rate else None)


def _compare(rows: list[AttentionRow]) -> tuple[list[AttentionRow], list[str]]:
  """The rows with both_vs_library and forward_vs_library, and the note that explains them."""
  best: dict[str, AttentionRow] = {}
  for row in rows:
    if row.kind == 'library' and row.variant == 'softmax' and row.both:
      known = best.get(row.shape)
      # cuDNN where it ran, which the targets are about; otherwise the fastest library.
      if (known is None or row.implementation == 'cudnn'
          or known.implementation != 'cudnn' and row.both.median < _both(known).median):
        best[row.shape] = row
  names = sorted({row.implementation for row in best.values()})
  note = [f'x library: fwd+bwd time over that of softmax at the same shape by {" or ".join(names)}.'
          ] if names else []
  return [_beside(row, best.get(row.shape)) for row in rows], note


def _beside(row: AttentionRow, library: AttentionRow | None) -> AttentionRow:
  if library is None or row.both is None:
    return row
  assert row.forward and library.forward, 'both directions are timed, or neither'
  return dataclasses.replace(
      row, forward_vs_library=row.forward.median / library.forward.median,
      both_vs_library=row.both.median / _both(library).median, library=library.implementation)


def _both(row: AttentionRow) -> Timing:
  assert row.both, 'a library is compared with where it was timed'
  return row.both


def _left_out(implementations: list[str] | None) -> list[str]:
  if implementations is None and not machine.accelerated():
    return ["'pallas' is left out: without a GPU or TPU it runs in an interpreter, whose times "
            'say nothing. --implementations=pallas runs it all the same.']
  return []
