"""Checks an implementation of softmax with sink logits, and its gradients, by the definition."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import DTypeLike

from sink_jax.attention.extra_key_value import SinkLogit
from sink_jax.attention.mask import Causal, Window
from sink_jax.attention.position import Nope
from sink_jax.attention.spec import AttentionSpec
from sink_jax.foreign import standard_promotion
from sink_jax.io.terminal import text_table
from sink_jax.kernels import chunked

_NAMES = 'output', 'dq', 'dk', 'dv', 'd sinks'
_MARGIN = 4  # times the error of a careful implementation: another order of sums is not an error
_KNOWN = {
  'the sink is left out': dict(sink=False),
  'the gradient takes the weight of the sink as a constant (a dropped cotangent)': dict(
    cotangent=False
  ),
}
_ROUNDED = 'off as by sums in 16 bits; sum in float32'
_UNKNOWN = 'wrong, for none of the known reasons'


@dataclasses.dataclass(frozen=True)
class SinkCheck:
  """The result of `check_sink_gradients`.

  Attributes:
    rows: one per array: its `error`, the largest difference divided by the largest entry of the
      definition, and what is `allowed`, 4 times the error of a careful implementation in the same
      dtype.
    findings: what is wrong, in words; empty where every array is right.
  """

  rows: list[dict[str, Any]]
  findings: list[str]

  @property
  def ok(self) -> bool:
    return not self.findings

  def __str__(self) -> str:
    cells = [
      [row['array'], f'{row["error"]:.1e}', f'{row["allowed"]:.1e}', 'yes' if row['ok'] else 'NO']
      for row in self.rows
    ]
    return '\n'.join([*text_table(['array', 'error', 'allowed', 'right'], cells), *self.findings])


@standard_promotion()
def check_sink_gradients(
  attention: Callable[..., jax.Array],
  *,
  length: int = 512,
  heads: int = 4,
  kv_heads: int = 2,
  head_dim: int = 64,
  dtype: DTypeLike = 'bfloat16',
  window: int | None = None,
  seed: int = 0,
) -> SinkCheck:
  """Checks output and gradients of softmax attention with sink logits, by the definition.

  By definition the value of token j has the weight exp(s_ij) / (exp(sink_h) + sum_j exp(s_ij)),
  where s = q . k / sqrt(Dh); it is computed in float64. The findings name a dropped sink, a dropped
  cotangent and sums in 16 bits.

  Args:
    attention: causal attention(q, k, v, sinks) -> output (B, T, H, Dh), differentiable by
      `jax.vjp`. q is (B, T, H, Dh), k and v are (B, T, Hkv, Dh), all of `dtype`; sinks (H,) are
      float32.
    window: how many keys a query sees, up to its position; None for all of them.

  Raises:
    ValueError: the output does not have the shape of the queries.
  """
  rng = np.random.default_rng(seed)
  draw = lambda n: jnp.asarray(rng.standard_normal((2, length, n, head_dim)), dtype)
  q, k, v, do = draw(heads), draw(kv_heads), draw(kv_heads), draw(heads)
  # A sink weighs about as much as all tokens together, so that an error in it is not small.
  sinks = jnp.asarray(np.log(window or length) + rng.standard_normal(heads), jnp.float32)
  inputs = q, k, v, sinks
  mask = Window(window) if window else Causal()
  spec = AttentionSpec(position=Nope(), kv_bias=SinkLogit(), mask=mask)

  def careful(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array) -> jax.Array:
    return chunked.attend(spec, q, k, v, {'kv_bias': {'logit': sinks}}).astype(q.dtype)

  wide = [np.asarray(x, np.float64) for x in (*inputs, do)]
  exact = functools.partial(_definition, *wide, window=window)
  truth, found = exact(), _with_gradients(attention, inputs, do)
  careful_errors = _errors(_with_gradients(careful, inputs, do), truth)
  allowed = [max(_MARGIN * error, 1e-6) for error in careful_errors]
  rows = [
    {'array': name, 'error': error, 'allowed': most, 'ok': error <= most}  # NaN is not
    for name, error, most in zip(_NAMES, _errors(found, truth), allowed)
  ]
  wrong = ', '.join(row['array'] for row in rows if not row['ok'])
  if not wrong:
    return SinkCheck(rows, [])
  reasons = (
    words
    for words, known in _KNOWN.items()
    if all(map(operator.le, _errors(found, exact(**known)), allowed))
  )
  rounded = all(row['error'] < 0.1 for row in rows) and jnp.dtype(dtype).itemsize == 2
  reason = next(reasons, _ROUNDED if rounded else _UNKNOWN)
  return SinkCheck(rows, [f'{wrong}: {reason}.'])


def _with_gradients(
  f: Callable[..., jax.Array], inputs: tuple[jax.Array, ...], do: jax.Array
) -> list[np.ndarray]:
  """The output of f and the gradients of its inputs, queries first, in float64."""
  out, vjp = jax.vjp(f, *inputs)
  expected = inputs[0].shape
  if out.shape != expected:
    raise ValueError(
      f'attention returned an output of shape {out.shape}, not that of the queries, {expected}.'
    )
  return [np.asarray(x, np.float64) for x in (out, *vjp(do.astype(out.dtype)))]


def _errors(found: list[np.ndarray], truth: list[np.ndarray]) -> list[float]:
  """The largest difference of each array, over the largest entry of the true one."""
  return [float(abs(x - y).max() / max(abs(y).max(), 1e-30)) for x, y in zip(found, truth)]


def _definition(
  q: np.ndarray,
  k: np.ndarray,
  v: np.ndarray,
  sinks: np.ndarray,
  do: np.ndarray,
  *,
  window: int | None,
  sink: bool = True,
  cotangent: bool = True,
) -> list[np.ndarray]:
  """Output, dq, dk, dv and d sinks in float64.

  sink, cotangent: False leaves out the sink, or only its cotangent.
  """
  groups, (length, head_dim) = q.shape[2] // k.shape[2], q.shape[1::2]
  k, v = (np.repeat(x, groups, 2) for x in (k, v))
  i, j = np.ogrid[:length, :length]
  s = np.einsum('bihd,bjhd->bhij', q, k) / np.sqrt(head_dim)
  s = np.where((j <= i) & (i - j < (window or length)), s, -np.inf)
  extra = np.where(sink, sinks, -np.inf)[:, None, None]
  largest = np.maximum(s.max(-1, keepdims=True), extra)
  total = np.exp(s - largest).sum(-1, keepdims=True) + np.exp(extra - largest)
  p, rest = np.exp(s - largest) / total, np.exp(extra - largest) / total
  out = np.einsum('bhij,bjhd->bihd', p, v)
  # Softmax without the sink, times a factor; a dropped cotangent treats the factor as a constant.
  read = np.einsum('bihd,bihd->bhi', do, out)[..., None] / (1 if cotangent else 1 - rest)
  ds = p * (np.einsum('bihd,bjhd->bhij', do, v) - read) / np.sqrt(head_dim)
  grouped = lambda x: x.reshape(*x.shape[:2], -1, groups, head_dim).sum(3)
  return [
    out,
    np.einsum('bhij,bjhd->bihd', ds, k),
    grouped(np.einsum('bhij,bihd->bjhd', ds, q)),
    grouped(np.einsum('bhij,bihd->bjhd', p, do)),
    -(rest * read).sum((0, 2, 3)) * cotangent,
  ]
