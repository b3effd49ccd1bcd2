"""Attention by three nested loops in NumPy float64, written from the paper's formulas.

It shares no code with the package. The formula of a component comes from its entry in
`tests.attention_variants`, so a new class fails here until somebody writes its formula there.
"""

import functools
import math
from typing import NamedTuple

import numpy as np

from sink_jax.attention.spec import COMPONENTS
from tests.attention_variants import variant


class Attention(NamedTuple):
  out: np.ndarray  # (B, T, H, Dh)
  weights: np.ndarray  # (B, H, T, T)
  proxy: np.ndarray  # (B, H, T, T)
  extra_proxy: np.ndarray  # of the extra key, (B, H, T)
  operands: (
    np.ndarray
  )  # errors of the output are relative to these: the output, or the input of `head`


def attention(spec, q, k, v, params, x=None, first=None):
  """The attention of a variant. first: the values of the first block, if this is a later one."""
  q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
  x = None if x is None else np.asarray(x, np.float64)
  params = {
    name: {n: np.asarray(a, np.float64) for n, a in own.items()} for name, own in params.items()
  }
  of = lambda name: params.get(name, {})
  formula = {name: variant(name, getattr(spec, name)).formula for name in COMPONENTS}
  bound = lambda name: functools.partial(formula[name], getattr(spec, name))
  f, z, visible, norm, extra_of, temperature, changed, head_output = map(
    bound,
    ('similarity', 'normalizer', 'mask', 'qk_norm', 'kv_bias', 'temperature', 'value', 'head'),
  )
  phi = lambda x: formula['feature_map'](spec.feature_map, x, of('feature_map'))
  position = formula['position']
  batch, length, heads, dh = q.shape
  group = heads // k.shape[2]
  out, mixed = np.zeros(q.shape), np.zeros(q.shape)
  weights = np.zeros((batch, heads, length, length))
  proxy, extra_proxy = np.zeros_like(weights), np.zeros((batch, heads, length))

  def transformed(x_HxDh, h, t, kind, factor=1.0):
    return phi(position.rotate(spec.position, factor * norm(x_HxDh, h, of('qk_norm'), kind), t))

  def value_at(b, t, head):
    return changed(v[b, t, head], None if first is None else first[b, t, head], head, of('value'))

  for b in range(batch):
    for h in range(heads):
      extra = extra_of(of('kv_bias'), h, dh)
      for i in range(length):
        keys = sum(visible(i, j) for j in range(length))
        factor = temperature(i, h, keys, of('temperature'))
        qi = transformed(q[b, i], h, i, 'query', factor)
        sims, values, where = [], [], []
        for j in range(length):
          if not visible(i, j):
            continue
          s = qi @ transformed(k[b, j], h // group, j, 'key') / math.sqrt(dh)
          sims.append(f(s + position.bias(spec.position, h, heads, i - j)))
          values.append(value_at(b, j, h // group))
          where.append(j)
        logit = extra.logit(i, heads) if callable(extra.logit) else extra.logit
        if extra.key is not None:  # the feature map applies to it as to any key
          logit = qi @ phi(extra.key) / math.sqrt(dh)
        if logit is not None:
          uncapped = type(spec.similarity).__name__ == 'CappedExp' and extra.key is None
          sims.append(math.exp(logit) if uncapped else f(logit))
          values.append(np.broadcast_to(extra.value, dh))
        sims = np.array(sims)
        zi = z(sims)
        clipped, softpick = np.ndim(zi) == 1, type(spec.similarity).__name__ == 'Softpick'
        if softpick:
          sims = np.maximum(sims, 0)
        # A row of zeros, as relu may give, is zero and not 0 / 0.
        row = zi if clipped else sims / (zi or 1.0)
        mixed[b, i, h] = (row[:, None] * np.array(values)).sum(0) + extra.added
        own = [value_at(b, i, head) for head in range(v.shape[2])]
        out[b, i, h] = head_output(
          mixed[b, i, h], None if x is None else x[b, i], own[h // group], own, of('head'), h
        )
        # Softpick's similarities may be far beyond any eps, so its weights are used here.
        size = np.abs(row if clipped or softpick else sims)
        # Softmax sums are never empty and need no guard. For the rest the official code adds 1e-8.
        softmax = type(spec.similarity).__name__ in ('Exp', 'CappedExp') and not clipped
        shares = size / (size.sum() + (0 if softmax else 1e-8))
        weights[b, h, i, where] = row[: len(where)]
        proxy[b, h, i, where] = shares[: len(where)]
        extra_proxy[b, h, i] = shares[len(where)] if logit is not None else 0
  operands = mixed if variant('head', spec.head).cancels else out
  return Attention(out, weights, proxy, extra_proxy, operands)
