"""The decoder in NumPy float64: softmax with rotary positions, grouped heads, SwiGLU, and edits."""

import jax
import numpy as np


def nats(logits, targets):
  """Losses of targets (...), in float64; logits: (..., V)."""
  logits = np.asarray(logits, np.float64)
  chosen = np.take_along_axis(logits, targets[..., None], -1)[..., 0]
  return np.log(np.exp(logits).sum(-1)) - chosen


def next_nats(logits, ids):
  """Losses (B, T - 1) of the tokens of texts from the second on."""
  return nats(logits[:, :-1], ids[:, 1:])


def losses(run, ids, **edits):
  return next_nats(forward(run, ids, **edits)[0], ids)


def rms(x, own, eps):
  return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * own['gain']


def swiglu(x, own):
  gate = x @ own['w1']['kernel']
  swish = gate / (1 + np.exp(-gate))
  return swish * (x @ own['w2']['kernel']) @ own['w_out']['kernel']


def forward(
  run,
  ids,
  keep_NxBxHxT=True,
  values_NxBxT=True,
  heads_NxH=True,
  caps_MxD=np.inf,
  capped_T=True,
  read=lambda name, x: x,
  cached=lambda x: x,
):
  """Logits (B, T, V), hidden states (M, B, T, D), and norms of head outputs (M, B, T, H).

  read: what a projection of a name gets instead of its input. cached: what keys and values become.
  """
  config = run.config
  p = jax.tree.map(lambda x: np.asarray(x, np.float64), run.params)
  batch, length = ids.shape
  period = len(config.pattern)
  full = lambda x, *shape: np.broadcast_to(x, (config.layers, *shape))
  keep = full(keep_NxBxHxT, batch, config.heads, length)
  values = full(values_NxBxT, batch, length)
  left = full(heads_NxH, config.heads)
  caps = full(caps_MxD, config.d_model)
  capped = np.broadcast_to(capped_T, length)[:, None]
  hidden = []
  norms = []

  h = p['embed'][ids]
  for n, spec in enumerate(config.attention_specs):
    blocks = p['blocks'] if period == 1 else p['blocks'][f'layer{n % period}']
    own = jax.tree.map(lambda x: x[n // period], blocks)
    x = rms(h, own['norm1'], config.norm_eps)
    qkv = [
      project(read(name, x), own['attention'][name], config.dims.head_dim)
      for name in ('query', 'key', 'value')
    ]
    o = attend(spec, *qkv, keep[n], values[n], cached)
    norms.append(np.linalg.norm(o, axis=-1))
    o = o * left[n][:, None]
    h = h + o.reshape(batch, length, -1) @ own['attention']['out']['kernel']
    x = rms(h, own['norm2'], config.norm_eps)
    h = h + swiglu(x, own['ffn'])
    h = np.where(capped, np.clip(h, -caps[n], caps[n]), h)
    hidden.append(h)
  logits = rms(h, p['final_norm'], config.norm_eps) @ p['unembed']['kernel']
  return (
    logits,
    np.array(hidden),
    np.array(
      norms,
    ),
  )


def project(x, own, width):
  """Heads (B, T, H, Dh)."""
  return np.reshape(x @ own['kernel'], (*x.shape[:2], -1, width))


def attend(spec, q, k, v, keep_BxHxT, values_BxT, cached):
  """Outputs of heads (B, T, H, Dh)."""
  length, heads, width = q.shape[1:]
  if base := getattr(spec.position, 'base', None):
    q = rotated(q, base)
    k = rotated(k, base)
  k = cached(k)
  v = cached(v)
  k = np.repeat(k, heads // k.shape[2], 2)
  v = np.repeat(v, heads // v.shape[2], 2)
  i = np.arange(length)[:, None]
  j = np.arange(length)
  window = getattr(spec.mask, 'size', length)
  causal = (j <= i) & (i - j < window)
  kept = keep_BxHxT[:, :, None] | (i == j)
  scores = np.einsum('bihd,bjhd->bhij', q, k) / np.sqrt(width)
  weights = np.where(causal & kept, np.exp(scores), 0)
  weights = weights / weights.sum(-1, keepdims=True)
  weights = weights * (values_BxT[:, None, None] | (i == j))  # a token reads its own value
  return np.einsum('bhij,bjhd->bihd', weights, v)


def rotated(x, base):
  """Pairs of channels, half of the width apart, as complex numbers that turn with the position."""
  width = x.shape[-1]
  half = width // 2
  frequency = base ** (-np.arange(0, width, 2) / width)
  angle = np.arange(x.shape[1])[:, None] * frequency
  pairs = x[..., :half] + 1j * x[..., half:]
  pairs = pairs * np.exp(1j * angle)[:, None]
  return np.concatenate([pairs.real, pairs.imag], -1)
