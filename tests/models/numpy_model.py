"""The decoder in NumPy float64: softmax attention without positions, one layer at a time."""

import math

import jax
import numpy as np

import sink_jax as sj

_erf = np.vectorize(math.erf)


def _gelu_tanh(x):
  inner = (2 / math.pi) ** 0.5 * (x + 0.044715 * x**3)
  return x / 2 * (1 + np.tanh(inner))


def _sigmoid(x):
  return 1 / (1 + np.exp(-x))


_ACTIVATIONS = {
  'relu': lambda x: np.maximum(x, 0),
  'gelu': lambda x: x * (1 + _erf(x / 2**0.5)) / 2,
  'swish': lambda x: x * _sigmoid(x),
  'gelu_tanh': _gelu_tanh,
}
_GATED = {
  'reglu': 'relu',
  'geglu': 'gelu',
  'swiglu': 'swish',
  'tanh_geglu': 'gelu_tanh',
}


def numpy_model(config, params, inputs, before_norm=None):
  """Logits; `before_norm` is a list that gets what enters the last norm of each post-norm block."""
  exact = lambda x: np.asarray(x, np.float64)
  p = jax.tree.map(exact, params)
  h = p['embed'][inputs]
  if config.embedding_dim:
    h = _linear(h, p['embed_in'])
  for layer in range(config.layers):
    own = jax.tree.map(lambda x: x[layer], p['blocks'])
    h = _block(config, h, own, [] if before_norm is None else before_norm)
  if config.norm_location != 'post':
    h = _norm(config, h, p.get('final_norm'))
  if config.embedding_dim:
    h = _linear(h, p['embed_out'])
  if config.tied:
    logits = h @ p['embed'].T
  else:
    logits = _linear(h, p['unembed'])
  cap = config.logit_cap
  return cap * np.tanh(logits / cap) if cap else logits


def _block(config, h, own, before_norm):
  norm = lambda name, x: _norm(config, x, own.get(name))
  attention = lambda x: _attention(config, x, own['attention'])
  ffn = lambda x: _feed_forward(config, x, own.get('ffn'))
  match config.norm_location:
    case 'pre':  # Eq. 2
      x = attention(norm('norm1', h)) + h
      return ffn(norm('norm2', h if config.parallel_residual else x)) + x
    case 'sandwich':
      x = norm('norm1_after', attention(norm('norm1', h))) + h
      return norm('norm2_after', ffn(norm('norm2', x))) + x
    case 'after':  # 2501.00656, Eq. 1 and 2
      x = norm('norm1_after', attention(h)) + h
      return norm('norm2_after', ffn(x)) + x
    case 'protected':  # 2405.19279; beta^2 times the number of sub-layers is 1
      beta = 1 / math.sqrt(2 * config.layers)
      x = h + beta * attention(h)
      return x + beta * ffn(x)
  x = norm('norm1', attention(h) + h)  # Eq. 3
  before_norm.append(ffn(x) + x)
  return norm('norm2', before_norm[-1])


def _rms(x, eps=1e-5, axis=-1):
  mean_square = (x**2).mean(axis, keepdims=True)
  return x / np.sqrt(mean_square + eps)


def _norm(config, x, own):
  if config.norm == 'none':
    return x
  if config.norm == 'dyt':
    return np.tanh(own['alpha'] * x) * own['gain'] + own['bias']
  if config.norm == 'layernorm':
    x = x - x.mean(-1, keepdims=True)
  return _rms(x) * own['gain'] + own.get('bias', 0)


def _linear(x, own):
  kernel = own['kernel']
  if 'gamma' in own:
    kernel = own['gamma'] / np.linalg.norm(kernel, 2) * kernel
  return x @ kernel + own.get('bias', 0)


def _feed_forward(config, x, own):
  if config.ffn == 'none':
    return 0 * x
  h = _linear(x, own['w1'])
  if config.ffn == 'clamped_swiglu':
    h = np.minimum(h, 7)
    gate = h * _sigmoid(1.702 * h)
    factor = np.clip(_linear(x, own['w2']), -7, 7)
    return _linear(gate * (factor + 1), own['w_out'])
  if config.norm_location == 'protected':
    h = 3**0.5 * h
  h = _ACTIVATIONS[_GATED.get(config.ffn, config.ffn)](h)
  if config.ffn in _GATED:
    h = h * _linear(x, own['w2'])
  return _linear(h, own['w_out'])


def _attention(config, x, own):
  of_heads = lambda x: np.stack(np.split(x, config.heads, -1))  # (H, B, T, Dh)
  norm = config.attention.qk_norm
  q, k = (
    _qk_norm(norm, of_heads(_linear(x, own[name])), own.get(f'qk_norm_{name}_gain'))
    for name in ('query', 'key')
  )
  v = of_heads(_linear(x, own['value']))
  s = q @ np.swapaxes(k, -1, -2) / math.sqrt(q.shape[-1])
  seen = np.tri(s.shape[-1], dtype=bool)
  s = np.where(seen, s, -np.inf)
  a = np.exp(s - s.max(-1, keepdims=True))
  o = a / a.sum(-1, keepdims=True) @ v
  if 'head_kernel' in own:
    o = o * _sigmoid(of_heads(x @ own['head_kernel']))
  if config.combine_heads == 'add':
    return _linear(o.sum(0), own['out'])
  return _linear(np.concatenate(o, -1), own['out'])


def _qk_norm(norm, x, gain):
  if norm == sj.NoQKNorm():
    return x
  if isinstance(norm, sj.ProjectionQKNorm):  # one mean over all heads
    return _rms(x, norm.eps, (0, -1)) * gain[:, None, None]
  return _rms(x, norm.eps) * gain
