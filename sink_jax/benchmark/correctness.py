"""`correctness`: every variant of the paper against its T x T definition, on this machine.

Values and gradients of bfloat16 inputs are compared with the definition in float32 of the same
numbers. An implementation may be off by twice the error that the definition itself has when its
inputs stay in bfloat16, which rounds queries and keys as a kernel must, and by a tolerance beside
it, since a kernel rounds the weights as well. Importance is checked with float32 inputs.
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
from sink_jax.benchmark.checks import count_passed
from sink_jax.benchmark.records import Column, CorrectnessRow, Document
from sink_jax.benchmark.timing import Countdown, reason
from sink_jax.benchmark.variants import PAPER, chosen
from sink_jax.evaluate.sinks import importance
from sink_jax.kernels.dispatch import attend, unsupported
from sink_jax.kernels.importance import streaming_importance

IMPORTANCE_TOLERANCE = 1e-5
# Several of each, or a kernel that mixes up sequences or heads would pass.
_BATCH, _HEADS = 2, 4
COLUMNS = [
    Column('head_dim', 'Dh'), Column('length', 'T'), Column('variant', 'variant'),
    Column('implementation', 'implementation'), Column('out', 'values', '.1e'),
    Column('out_allowed', 'allowed', '.1e'), Column('gradient', 'gradients', '.1e'),
    Column('gradient_allowed', 'allowed', '.1e'), Column('repeats', 'repeats'),
    Column('verdict', ''), Column('note', ''),
]
NOTES = [
    'Errors: |x - definition| / |definition|, Euclidean norms of whole arrays, the gradient '
    'closest to its limit. Definition: T x T in float32. allowed: twice the error of the '
    'definition in bfloat16, and the tolerance. Odd lengths have half as many key heads.',
    'repeats: are two runs equal bit for bit? Asked of our kernels.',
    f'importance: float32 inputs, at most {IMPORTANCE_TOLERANCE:g}.',
]


class Problem(NamedTuple):
  """One check: a variant of attention at one head dimension and length."""

  variant: str
  spec: AttentionSpec
  head_dim: int
  length: int
  first: bool  # whether it is the first of its variant, with which importance is checked

  @property
  def kv_heads(self) -> int:
    """Key and value heads; odd lengths have half as many, so that grouped heads are checked."""
    return _HEADS // 2 if self.length % 2 else _HEADS

  def row_fields(self) -> dict[str, Any]:
    """The fields of a row that say which problem it is about."""
    return {'head_dim': self.head_dim, 'length': self.length, 'variant': self.variant}

  def __str__(self):
    return f'{self.variant}, Dh {self.head_dim}, T {self.length}'


def run(variants: list[str], head_dims: list[int], lengths: list[int], tolerance: float,
        share: tuple[int, int], seed: int, limit: float | None = None,
        save: Callable[[Document], None] = lambda document: None) -> Document:
  """Checks every problem and returns the document; `save` gets it after every problem.

  Args:
    share: (n, m): every m-th problem from the n-th on, for several processes.
  """
  specs = chosen(variants, PAPER, '--variants')
  # Every variant once, with the head dimensions and lengths in turn, before any of them twice:
  # a run that is cut short has checked them all.
  problems = [Problem(name, spec, head_dims[(n + turn) % len(head_dims)],
                      lengths[(n + turn // len(head_dims)) % len(lengths)], turn == 0)
              for turn in range(len(head_dims) * len(lengths))
              for n, (name, spec) in enumerate(specs.items())][share[0]::share[1]]
  where = machine.describe(seed) | {'dtype': 'bfloat16'}
  options = {'variants': variants, 'head_dims': head_dims, 'lengths': lengths, 'share': list(share),
             'tolerance': tolerance, 'importance_tolerance': IMPORTANCE_TOLERANCE, 'limit': limit}
  rows: list[CorrectnessRow] = []
  skipped = 0

  def result(complete):
    return Document('correctness', where, options, COLUMNS, list(rows),
                    [*NOTES, count_passed(rows, skipped)], complete, skipped)

  progress = Countdown(len(problems), limit)
  for problem in problems:
    if progress.over():
      skipped += 1
      continue
    progress.next(str(problem))
    try:
      rows += _check(problem, tolerance, seed)
    except Exception as error:  # of the definition, without which nothing can be compared
      rows.append(_failed(problem, 'reference', error))
    save(result(False))
  return result(True)


def _check(problem: Problem, tolerance: float, seed: int) -> list[CorrectnessRow]:
  """The rows of every implementation that is meant for the problem on this platform."""
  arrays, cotangent = _inputs(problem, seed)
  # The same numbers as the kernel gets, so that rounding the inputs counts for no error.
  exact = jax.tree.map(lambda x: x.astype(jnp.float32), arrays)
  with jax.default_matmul_precision('highest'):
    # The definition alone runs at the highest precision: TF32 or passes of bfloat16 would be an
    # error of its own. The implementations run as they do in training.
    truth = _with_gradients(problem.spec, 'reference')(exact, cotangent)
    rounded = _errors(_with_gradients(problem.spec, 'reference')(arrays, cotangent), truth)
  shapes = arrays[0], arrays[1]
  names = ['pallas', *(name for name in ('linear', 'cudnn', 'splash')
                       if not unsupported(name, problem.spec, *shapes))]
  rows = []
  for name in names:
    try:
      f = _with_gradients(problem.spec, name)
      first, second = f(arrays, cotangent), f(arrays, cotangent)
      rows.append(_row(problem, name, _errors(first, truth), rounded, tolerance,
                       repeats=_equal(first, second)))
    except Exception as error:  # a kernel that does not compile is a failed check
      rows.append(_failed(problem, name, error))
  return [*rows, _check_importance(problem, exact)] if problem.first else rows


def _check_importance(problem: Problem, exact) -> CorrectnessRow:
  """The row of streamed importance; exact: float32 (q, k, v, params)."""
  q, k, _, params = exact
  try:
    with jax.default_matmul_precision('highest'):
      f = jax.jit(lambda q, k, params: streaming_importance(
          problem.spec, q, k, params, implementation='pallas'))
      streamed, again = f(q, k, params), f(q, k, params)
      raw, normalized, extra = jax.jit(lambda *x: _definition(problem.spec, *x))(q, k, params)
    errors = [_error(streamed.raw, raw), _error(streamed.normalized, normalized)]
    if extra is not None:
      errors.append(_error(streamed.bias_slot, extra))
    repeats = _equal(streamed, again)
    passed = max(errors) <= IMPORTANCE_TOLERANCE and repeats
    return CorrectnessRow(
        **problem.row_fields(), implementation='importance', out=max(errors),
        out_allowed=IMPORTANCE_TOLERANCE, errors=errors, repeats='yes' if repeats else 'NO',
        verdict='ok' if passed else 'FAILED')
  except Exception as error:  # also what the device meets later than the call that started it
    return _failed(problem, 'importance', error)


def _definition(spec, q, k, params):
  """Importance of the weights, of the proxy, and of the extra key, through T x T maps."""
  q, k = transform_qk(spec, q, k, params)
  tokens = jnp.arange(q.shape[1])
  rows = reference.rows(spec, q, k, params, tokens, tokens)
  extra = rows.extra_proxy_BxHxL
  # raw: the weights of unnormalised variants sum to anything; the proxy's rows sum to one.
  return (importance(rows.weights_BxHxLxT, raw=True), importance(rows.proxy_BxHxLxT),
          None if extra is None else extra.mean(-1))


def _inputs(problem, seed):
  """((q, k, v, params), cotangent of the output); all in bfloat16 but the parameters."""
  shape = lambda heads: (_BATCH, problem.length, heads, problem.head_dim)
  # Of q, k, v and the cotangent, which has the shape of the output.
  heads = _HEADS, problem.kv_heads, problem.kv_heads, _HEADS
  q, k, v, do = (machine.random(4 * seed + n, shape(h), 'bfloat16') for n, h in enumerate(heads))
  dims = Dims(_HEADS, problem.kv_heads, problem.head_dim)
  # A linear map of this scale keeps the norm of a vector; other parameters, such as an extra key,
  # are small beside the tokens, whose numbers are of size one.
  scale = lambda p: problem.head_dim**-0.5 if p.init == 'linear' else 0.1
  params = jax.tree.map(lambda p: scale(p) * machine.random(seed, p.shape, 'float32'),
                        problem.spec.params(dims), is_leaf=lambda x: isinstance(x, Param))
  return (q, k, v, params), do


def _with_gradients(spec: AttentionSpec, name: str) -> Callable[..., Any]:
  """f((q, k, v, params), cotangent) -> (output, gradients), compiled."""
  @jax.jit
  def f(arrays, cotangent):
    out, pull = jax.vjp(lambda *x: attend(spec, *x, implementation=name), *arrays)
    return out, pull(cotangent.astype(out.dtype))

  return f


def _errors(computed, truth) -> dict[str, float]:
  """The errors of the output and of all gradients, by their names."""
  out, (dq, dk, dv, dparams) = computed
  true_out, (true_dq, true_dk, true_dv, true_dparams) = truth
  errors = {'out': _error(out, true_out), 'dq': _error(dq, true_dq), 'dk': _error(dk, true_dk),
            'dv': _error(dv, true_dv)}
  for (path, x), true in zip(jax.tree_util.tree_leaves_with_path(dparams),
                             jax.tree.leaves(true_dparams)):
    errors['d' + '.'.join(str(key.key) for key in path)] = _error(x, true)
  return errors


def _error(computed, true) -> float:
  """|computed - true| / |true|, Euclidean norms of the whole arrays."""
  computed, true = (np.asarray(x, np.float64) for x in (computed, true))
  norm = np.linalg.norm(true)
  # A gradient that is zero by the definition has no relative error: its own norm counts.
  error = np.linalg.norm(computed - true) / (norm or 1.0)
  return float(error) if np.isfinite(error) else 1e9  # JSON knows no infinity


def _equal(a, b) -> bool:
  """Whether two trees of arrays are equal bit for bit."""
  return all(np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, (a, b))))


def _row(problem: Problem, name: str, errors: dict[str, float], rounded: dict[str, float],
         tolerance: float, repeats: bool) -> CorrectnessRow:
  """The row of an implementation that ran.

  rounded: errors of the definition in bfloat16. repeats: whether a second run was equal, which
  our kernels must be; libraries add up in whatever order the device finishes.
  """
  allowed = {name: 2 * rounded[name] + tolerance for name in errors}
  # The limit can be zero or, with --tolerance=-1, negative: it is not divided by then.
  worst = max((name for name in errors if name != 'out'),
              key=lambda name: errors[name] / max(allowed[name], 1e-30))
  passed = (all(errors[name] <= allowed[name] for name in errors)
            and (repeats or name not in ('pallas', 'linear')))
  return CorrectnessRow(
      **problem.row_fields(), implementation=name, out=errors['out'],
      out_allowed=allowed['out'], gradient=errors[worst], gradient_allowed=allowed[worst],
      errors=errors, allowed=allowed, repeats='yes' if repeats else 'NO',
      verdict='ok' if passed else 'FAILED', note=worst)


def _failed(problem: Problem, name: str, error: Exception) -> CorrectnessRow:
  return CorrectnessRow(**problem.row_fields(), implementation=name, failed=reason(error),
                        verdict='FAILED')
