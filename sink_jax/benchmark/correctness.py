"""`correctness`: every variant of the paper against its T x T definition, on this machine.

Values and gradients in bfloat16 against the definition in float32 of the same numbers. What
is allowed is twice the error of the definition itself when its inputs stay in bfloat16, which
rounds queries and keys as a kernel must, and a tolerance beside it for the weights that a
kernel rounds as well. Importance is checked with float32 inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sink_jax.attention import reference
from sink_jax.attention.param import Dims, Param
from sink_jax.attention.spec import AttentionSpec, transform_qk
from sink_jax.benchmark import machine
from sink_jax.benchmark.table import column, document
from sink_jax.benchmark.timing import Countdown, reason
from sink_jax.benchmark.variants import PAPER, chosen
from sink_jax.benchmark.verdict import verdict
from sink_jax.evaluate.sinks import importance
from sink_jax.kernels.dispatch import attend, unsupported
from sink_jax.kernels.importance import streaming_importance

IMPORTANCE_TOLERANCE = 1e-5
_BATCH, _HEADS = 2, 4
COLUMNS = [
    column('head_dim', 'Dh'), column('length', 'T'), column('variant', 'variant'),
    column('implementation', 'implementation'), column('out', 'values', '.1e'),
    column('out_allowed', 'allowed', '.1e'), column('gradient', 'gradients', '.1e'),
    column('gradient_allowed', 'allowed', '.1e'), column('repeats', 'repeats'),
    column('verdict', ''), column('note', ''),
]
NOTES = [
    'Errors: |x - definition| / |definition|, Euclidean norms of whole arrays, the gradient '
    'closest to its limit. Definition: T x T in float32. allowed: twice the error of the '
    'definition in bfloat16, and the tolerance. Odd lengths have half as many key heads.',
    'repeats: are two runs equal bit for bit? Asked of our kernels.',
    f'importance: float32 inputs, at most {IMPORTANCE_TOLERANCE:g}.',
]


class Problem(NamedTuple):
  """Inputs of one check; the variant's name says which."""

  variant: str
  spec: AttentionSpec
  head_dim: int
  length: int
  first: bool  # of this variant: importance is checked once

  @property
  def kv_heads(self) -> int:
    return _HEADS // 2 if self.length % 2 else _HEADS

  def __str__(self):
    return f'{self.variant}, Dh {self.head_dim}, T {self.length}'


def run(variants, head_dims, lengths, tolerance, share, seed, limit=None,
        save: Callable[[dict[str, Any]], None] = lambda result: None) -> dict[str, Any]:
  """Checks and returns the document; the matrix is gone through so that a run that is cut
  short has seen every variant before it sees any of them twice.

  Args:
    share: (n, m): every m-th problem from the n-th on, for several processes.
  """
  specs = chosen(variants, PAPER, '--variants')
  problems = [Problem(name, spec, head_dims[(n + turn) % len(head_dims)],
                      lengths[(n + turn // len(head_dims)) % len(lengths)], turn == 0)
              for turn in range(len(head_dims) * len(lengths))
              for n, (name, spec) in enumerate(specs.items())][share[0]::share[1]]
  where = machine.describe(seed) | {'dtype': 'bfloat16'}
  options = {'variants': variants, 'head_dims': head_dims, 'lengths': lengths, 'share': list(share),
             'tolerance': tolerance, 'importance_tolerance': IMPORTANCE_TOLERANCE, 'limit': limit}
  rows: list[dict[str, Any]] = []
  skipped = 0

  def result(complete):
    return document('correctness', where, options, COLUMNS, rows, [*NOTES, verdict(rows, skipped)],
                    complete) | {'not_run': skipped}

  progress = Countdown(len(problems), limit)
  for problem in problems:
    if progress.over():
      skipped += 1
      continue
    progress.next(str(problem))
    try:
      rows += _check(problem, tolerance, seed)
    except Exception as error:  # of the definition: nothing can be said about the others
      rows.append(_row(problem, 'reference') | {'failed': reason(error), 'verdict': 'FAILED'})
    save(result(False))
  return result(True)


def _check(problem, tolerance, seed):
  """Rows of every implementation that is meant for the problem on this platform."""
  arrays, cotangent = _inputs(problem, seed)
  exact = jax.tree.map(lambda x: x.astype(jnp.float32), arrays)
  with jax.default_matmul_precision('highest'):
    truth = _with_gradients(problem.spec, 'reference')(exact, cotangent)
    rounded = _errors(_with_gradients(problem.spec, 'reference')(arrays, cotangent), truth)
  shapes = arrays[0], arrays[1]
  names = ['pallas', *(name for name in ('linear', 'cudnn', 'splash')
                       if not unsupported(name, problem.spec, *shapes))]
  rows = []
  for name in names:
    row = _row(problem, name)
    try:
      f = _with_gradients(problem.spec, name)
      first, second = f(arrays, cotangent), f(arrays, cotangent)
      repeats = all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (first, second))))
      row |= _judged(_errors(first, truth), rounded, tolerance)
      row['repeats'] = 'yes' if repeats else 'NO'
      if not repeats and name in ('pallas', 'linear'):
        row['verdict'] = 'FAILED'
    except Exception as error:  # a kernel that does not compile is a failed check
      row |= {'failed': reason(error), 'verdict': 'FAILED'}
    rows.append(row)
  return [*rows, _check_importance(problem, exact)] if problem.first else rows


def _check_importance(problem, exact):
  q, k, _, params = exact
  row = _row(problem, 'importance')
  try:
    with jax.default_matmul_precision('highest'):
      f = jax.jit(lambda q, k, params: streaming_importance(
          problem.spec, q, k, params, implementation='pallas'))
      seen, again = f(q, k, params), f(q, k, params)
      raw, normalized, slot = jax.jit(lambda *x: _definition(problem.spec, *x))(q, k, params)
    errors = [_error(seen.raw, raw), _error(seen.normalized, normalized)]
    if slot is not None:
      errors.append(_error(seen.bias_slot, slot))
    repeats = all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (seen, again))))
    passed = max(errors) <= IMPORTANCE_TOLERANCE and repeats
    return row | {'out': max(errors), 'out_allowed': IMPORTANCE_TOLERANCE, 'errors': errors,
                  'repeats': 'yes' if repeats else 'NO', 'verdict': 'ok' if passed else 'FAILED'}
  except Exception as error:
    return row | {'failed': reason(error), 'verdict': 'FAILED'}


def _definition(spec, q, k, params):
  """Importance of the weights, of the proxy, and of the bias slot, through T x T maps."""
  q, k = transform_qk(spec, q, k, params)
  tokens = jnp.arange(q.shape[1])
  rows = reference.rows(spec, q, k, params, tokens, tokens)
  slot = rows.extra_proxy_BxHxL
  return (importance(rows.weights_BxHxLxT, raw=True), importance(rows.proxy_BxHxLxT),
          None if slot is None else slot.mean(-1))


def _inputs(problem, seed):
  """((q, k, v, params), cotangent of the output); all in bfloat16 but the parameters."""
  shape = lambda heads: (_BATCH, problem.length, heads, problem.head_dim)
  heads = _HEADS, problem.kv_heads, problem.kv_heads, _HEADS
  q, k, v, do = (machine.random(4 * seed + n, shape(h), 'bfloat16') for n, h in enumerate(heads))
  dims = Dims(_HEADS, problem.kv_heads, problem.head_dim)
  scale = lambda p: problem.head_dim**-0.5 if p.init == 'linear' else 0.1
  params = jax.tree.map(lambda p: scale(p) * machine.random(seed, p.shape, 'float32'),
                        problem.spec.params(dims), is_leaf=lambda x: isinstance(x, Param))
  return (q, k, v, params), do


def _with_gradients(spec, name):
  """f((q, k, v, params), cotangent) -> (output, gradients), compiled."""
  @jax.jit
  def f(arrays, cotangent):
    out, pull = jax.vjp(lambda *x: attend(spec, *x, implementation=name), *arrays)
    return out, pull(cotangent.astype(out.dtype))

  return f


def _errors(found, truth):
  """{name of an array: its error}."""
  out, (dq, dk, dv, dparams) = found
  true_out, (true_dq, true_dk, true_dv, true_dparams) = truth
  errors = {'out': _error(out, true_out), 'dq': _error(dq, true_dq), 'dk': _error(dk, true_dk),
            'dv': _error(dv, true_dv)}
  for (path, x), true in zip(jax.tree_util.tree_leaves_with_path(dparams),
                             jax.tree.leaves(true_dparams)):
    errors['d' + '.'.join(str(key.key) for key in path)] = _error(x, true)
  return errors


def _error(found, true):
  found, true = (np.asarray(x, np.float64) for x in (found, true))
  norm = np.linalg.norm(true)
  error = np.linalg.norm(found - true) / (norm or 1.0)
  return float(error) if np.isfinite(error) else 1e9  # JSON knows no infinity


def _judged(errors, rounded, tolerance):
  allowed = {name: 2 * rounded[name] + tolerance for name in errors}
  worst = max((name for name in errors if name != 'out'),
              key=lambda name: errors[name] / max(allowed[name], 1e-30))
  passed = all(errors[name] <= allowed[name] for name in errors)
  return {'out': errors['out'], 'out_allowed': allowed['out'], 'gradient': errors[worst],
          'gradient_allowed': allowed[worst], 'errors': errors, 'allowed': allowed,
          'verdict': 'ok' if passed else 'FAILED', 'note': worst}


def _row(problem, implementation):
  return {'head_dim': problem.head_dim, 'length': problem.length, 'variant': problem.variant,
          'implementation': implementation}
