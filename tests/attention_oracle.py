"""Attention by three nested loops in NumPy float64, written from the paper's formulas.

It shares no code with the package. The formula of a component comes from its entry in
`tests.attention_variants`, so a new class fails here until somebody writes its formula there.
"""

import math
from typing import Any, NamedTuple

import jax
import numpy as np

from sink_jax.attention.spec import COMPONENTS
from tests.attention_variants import variant


class Attention(NamedTuple):
  """operands: errors of the output are relative to these: the output, or the input of `head`."""

  out: np.ndarray  # (B, T, H, Dh)
  weights: np.ndarray  # (B, H, T, T)
  proxy: np.ndarray  # (B, H, T, T)
  extra_proxy: np.ndarray  # of the extra key, (B, H, T)
  operands: np.ndarray


def attention(spec, q, k, v, params, x=None):
  """The attention of a variant. x: the input of the block, for gates that read it."""
  arrays = jax.tree.map(lambda x: np.asarray(x, np.float64), (q, k, v, params, x))
  formulas = {name: variant(name, getattr(spec, name)).formula for name in COMPONENTS}
  case = _Case(spec, formulas, *arrays)
  batch, length, heads, dh = q.shape
  out, mixed = np.zeros(q.shape), np.zeros(q.shape)
  weights = np.zeros((batch, heads, length, length))
  proxy, extra_proxy = np.zeros_like(weights), np.zeros((batch, heads, length))
  for b, h, i in np.ndindex(batch, heads, length):
    keys, similarities, values, added = case.row(b, h, i)
    row, shares = _normalized(spec, case.of('normalizer', similarities), similarities)
    mixed[b, i, h] = (row[:, None] * values).sum(0) + added
    out[b, i, h] = case.output(mixed[b, i, h], b, h, i)
    weights[b, h, i, keys] = row[: len(keys)]
    proxy[b, h, i, keys] = shares[: len(keys)]
    extra_proxy[b, h, i] = shares[len(keys) :].sum()
  operands = mixed if variant('head', spec.head).cancels else out
  return Attention(out, weights, proxy, extra_proxy, operands)


def _normalized(spec, z, similarities):
  """The weights of a row, and its shares of the sum; z: what the normalizer returns."""
  clipped = np.ndim(z) == 1
  softpick = type(spec.similarity).__name__ == 'Softpick'
  if softpick:
    similarities = np.maximum(similarities, 0)
  # A row of zeros, as relu may give, is zero and not 0 / 0.
  row = z if clipped else similarities / (z or 1.0)
  # Softpick's similarities may be far beyond any eps, so its weights are used here.
  size = np.abs(row if clipped or softpick else similarities)
  # Softmax sums are never empty and need no guard. For the rest the official code adds 1e-8.
  softmax = type(spec.similarity).__name__ in ('Exp', 'CappedExp') and not clipped
  return row, size / (size.sum() + (0 if softmax else 1e-8))


class _Case(NamedTuple):
  """The formulas of a spec and the arrays that they read, for one query, key or head at a time."""

  spec: Any
  formulas: dict
  q: np.ndarray
  k: np.ndarray
  v: np.ndarray
  params: dict
  x: np.ndarray | None

  def of(self, name, *arguments):
    """The formula of a component."""
    return self.formulas[name](getattr(self.spec, name), *arguments)

  def own(self, name):
    """The parameters of a component."""
    return self.params.get(name, {})

  def row(self, b, h, i):
    """(keys, similarities with the extra key as the last, their values, what the output gains)."""
    _, length, heads, dh = self.q.shape
    keys = [j for j in range(length) if self.of('mask', i, j)]
    factor = self.of('temperature', i, h, len(keys), self.own('temperature'))
    query = self.features(self.q[b, i], h, i, 'query', factor)
    own = h // (heads // self.k.shape[2])
    similarities = []
    for j in keys:
      s = query @ self.features(self.k[b, j], own, j, 'key') / math.sqrt(dh)
      bias = self.formulas['position'].bias(self.spec.position, h, heads, i - j)
      similarities.append(self.of('similarity', s + bias))
    values = [self.value(b, j, own) for j in keys]
    extra = self.of('kv_bias', self.own('kv_bias'), h, dh)
    similarity = self.extra_similarity(extra, query, i)
    if similarity is not None:
      similarities.append(similarity)
      values.append(np.broadcast_to(extra.value, dh))
    return keys, np.array(similarities), np.array(values), extra.added

  def features(self, x_HxDh, h, t, kind, factor=1.0):
    """The features of a query or key."""
    x = factor * self.of('qk_norm', x_HxDh, h, self.own('qk_norm'), kind)
    x = self.formulas['position'].rotate(self.spec.position, x, t)
    return self.of('feature_map', x, self.own('feature_map'))

  def extra_similarity(self, extra, query, i):
    """f of the score of the extra key; None without one."""
    logit, (*_, heads, dh) = extra.logit, self.q.shape
    if callable(logit):
      logit = logit(i, heads)
    if extra.key is not None:  # the feature map applies to it as to any key
      key = self.of('feature_map', extra.key, self.own('feature_map'))
      logit = query @ key / math.sqrt(dh)
    elif logit is not None and type(self.spec.similarity).__name__ == 'CappedExp':
      return math.exp(logit)  # only products with keys are capped
    return None if logit is None else self.of('similarity', logit)

  def value(self, b, t, head):
    return self.of('value', self.v[b, t, head], head, self.own('value'))

  def output(self, mixed, b, h, i):
    """What W_O receives."""
    heads, kv_heads = self.q.shape[2], self.v.shape[2]
    values = [self.value(b, i, head) for head in range(kv_heads)]
    own = values[h // (heads // kv_heads)]
    x = None if self.x is None else self.x[b, i]
    return self.of('head', mixed, x, own, values, self.own('head'), h)
