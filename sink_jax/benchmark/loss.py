"""`loss`: cross-entropy with its gradients, in chunks and with the logits of all positions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from sink_jax.benchmark.measure import (
  FLOOR,
  Case,
  Column,
  Program,
  Rates,
  accelerated,
  compiled,
  random,
  ratio_columns,
  time_group,
)
from sink_jax.train.loss import cross_entropy

COLUMNS: list[Column] = [
  ('shape', 'B,T,D,V', ''),
  ('form', 'form', ''),
  ('ms', 'loss+gradients ms', '.3f'),
  *ratio_columns('x plain'),
  *FLOOR,
  ('mb', 'MB', ',.0f'),
  ('loss', 'nats/token', '.4f'),
  ('failed', '', ''),
]
NOTES = 'plain: float32 logits of all positions, differentiated by JAX. FLOPs: 6 B T D V.'


def plain_cross_entropy(
  h_BxTxD: jax.Array,
  kernel_DxV: jax.Array,
  targets_BxT: jax.Array,
  weights_BxT: jax.Array,
) -> jax.Array:
  """The same sum as `train.loss.cross_entropy`, by its definition, a scalar in float32."""
  logits = jnp.einsum(
    'btd,dv->btv', h_BxTxD, kernel_DxV.astype(h_BxTxD.dtype), preferred_element_type=jnp.float32
  )
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets_BxT)
  return jnp.sum(losses * weights_BxT)


def run(
  rates: Rates,
  dtype: str,
  seconds: float,
  shape: tuple[int, int, int, int] | None,
) -> list[dict[str, Any]]:
  """The rows of the loss in chunks and of the plain one; shape: (B, T, D, V)."""
  shape = shape or ((8, 2048, 768, 50432) if accelerated() else (2, 256, 256, 8192))
  batch, length, d_model, vocab = shape
  h = random(0, (batch, length, d_model), dtype)
  # Scaled so that logits are of size one: h has D numbers of that size.
  kernel = random(1, (d_model, vocab), 'float32') / d_model**0.5
  targets = jax.random.randint(jax.random.key(2), (batch, length), 0, vocab)
  # Weights of 1 / (B T) make the weighted sum the mean in nats per token.
  arrays = h, kernel, targets, jnp.full((batch, length), 1 / (batch * length))
  flops, bytes_ = 6.0 * batch * length * d_model * vocab, 2 * (h.nbytes + kernel.nbytes)
  cases = []
  for form, f in {'plain': plain_cross_entropy, 'in chunks (ours)': cross_entropy}.items():
    row = {'shape': ','.join(map(str, shape)), 'form': form}
    prepare = functools.partial(_prepare, row, f, arrays)
    cases.append(Case(row, prepare, flops, bytes_, base=form == 'plain'))
  return time_group(cases, seconds, rates)


def _prepare(
  row: dict[str, Any],
  f: Callable[..., jax.Array],
  arrays: tuple[jax.Array, ...],
) -> Program:
  program = compiled(row, jax.value_and_grad(f, (0, 1)), *arrays)
  row['loss'] = float(program.call()[0])
  return program
