"""One entry for every component class: its formula, and more of its values for the tests.

Formulas are written from the papers in NumPy float64, for one query and one key at a time, and
share no code with the package. Their first argument is the component, whose fields hold its
numbers.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import sink_jax as sj


class Variant(NamedTuple):
  """formula: see the component's table below. more: values to test besides the default one.

  cancels: is a head's output a difference that may vanish? Then errors are relative to the
  operands.
  """

  formula: Any
  more: tuple = ()
  cancels: bool = False


def variant(component: str, value) -> Variant:
  """The entry for a component's value."""
  name = type(value).__name__
  assert name in VARIANTS[component], (
    f'{name} has no entry in tests/attention_variants.py: write its formula there.'
  )
  return VARIANTS[component][name]


# mask: does query i see key j?
_MASKS = {
  'Causal': Variant(lambda m, i, j: j <= i),
  'Window': Variant(
    lambda m, i, j: i - m.size + 1 <= j <= i, (sj.Window(size=1), sj.Window(size=3))
  ),
  'Prefix': Variant(
    lambda m, i, j: j <= i or j < m.length, (sj.Prefix(length=1), sj.Prefix(length=3))
  ),
}


# similarity: f of a score.
_elu_plus_one = lambda s: s + 1 if s > 0 else math.exp(s)
_SIMILARITIES = {
  'Exp': Variant(lambda f, s: math.exp(s)),
  # The cap applies to scores of keys. A logit that is not a product with a key adds exp(s),
  # uncapped.
  'CappedExp': Variant(
    lambda f, s: math.exp(f.cap * math.tanh(s / f.cap)), (sj.CappedExp(cap=1.5),)
  ),
  'Sigmoid': Variant(lambda f, s: 1 / (1 + math.exp(-s - f.bias)), (sj.Sigmoid(bias=-2.0),)),
  'Relu': Variant(lambda f, s: max(s, 0)),
  'SquaredRelu': Variant(lambda f, s: max(s, 0) ** 2),
  'EluPlusOne': Variant(lambda f, s: _elu_plus_one(s)),
  'Linear': Variant(lambda f, s: s),
  # The normalizer needs the sign. A negative similarity has no weight.
  'Softpick': Variant(lambda f, s: math.exp(s) - 1),
}


# normalizer: Z of the similarities of a row, including that of the extra key. If the weights are
# not quotients, it is the array of the row's weights.
_NORMALIZERS = {
  'RowSum': Variant(
    lambda z, f: (f.sum() + z.eps) / z.scale, (sj.RowSum(scale=0.5), sj.RowSum(eps=1e-3))
  ),
  'PNorm': Variant(lambda z, f: (f**z.p).sum() ** (1 / z.p), (sj.PNorm(p=2.0),)),
  'Unnormalized': Variant(lambda z, f: 1.0),
  'Count': Variant(lambda z, f: len(f)),
  'Clipped': Variant(
    lambda z, f: np.clip((z.high - z.low) * f / f.sum() + z.low, 0, 1),
    (sj.Clipped(low=-0.2, high=1.1),),
  ),
  'AbsFloor': Variant(lambda z, f: max(abs(f.sum()), z.floor)),
  # f is exp(s) - 1 here. The package divides the sum by exp(m), m = max(0, largest s), and then
  # adds eps. It takes no derivative of that m. With a larger eps, differences would show this.
  'AbsSum': Variant(lambda z, f: np.abs(f).sum() + z.eps * (1 + max(f.max(), 0))),
}


# feature_map: features of a query or key x, given the map's parameters.
_FEATURE_MAPS = {
  'Identity': Variant(lambda phi, x, params: x),
  'EluPlusOne': Variant(lambda phi, x, params: np.array([_elu_plus_one(e) for e in x])),
  'Mlp': Variant(lambda phi, x, params: params['w2'].T @ np.maximum(params['w1'].T @ x, 0)),
}


# qk_norm: the query or key of head h, from those x (H, Dh) of all heads, given the parameters. kind
# is 'query' or 'key'.
def _rms(norm, x, h, params, kind):
  return x[h] / math.sqrt(np.mean(x[h] ** 2) + norm.eps) * params[f'{kind}_gain']


def _rms_of_all(norm, x, h, params, kind):
  whole = np.concatenate(x)
  return x[h] / math.sqrt(whole @ whole / len(whole) + norm.eps) * params[f'{kind}_gain'][h]


_QK_NORMS = {
  'NoQKNorm': Variant(lambda norm, x, h, params, kind: x[h]),
  'QKNorm': Variant(_rms),
  'ProjectionQKNorm': Variant(_rms_of_all),
}


# temperature: the factor on query i of head h, 0-based, which sees n keys, given the parameters.
_TEMPERATURES = {
  'Fixed': Variant(lambda t, i, h, n, params: 1.0),
  'LogLength': Variant(
    lambda t, i, h, n, params: (params['scale'][h] if t.learned else t.scale) * math.log(n),
    (sj.LogLength(learned=False), sj.LogLength(learned=False, scale=-0.7)),
  ),
}


# value: what attention mixes for the value v of a key head, given the parameters.
_VALUES = {
  'PlainValue': Variant(lambda c, v, head, params: v),
  'ValueScale': Variant(lambda c, v, head, params: params['scale'][head] * v),
}


# position: the rotation of a query or key x at position t, and the bias added to the score of head
# h at distance d. (Additions to embeddings are not part of attention.)
class _Position(NamedTuple):
  rotate: Callable = lambda p, x, t: x
  bias: Callable = lambda p, h, heads, d: 0.0


def t5_bucket(d, buckets=32, max_distance=128):
  half = buckets // 2
  if d < half:
    return max(d, 0)
  return min(buckets - 1, half + int(half * math.log(d / half) / math.log(max_distance / half)))


def alibi_slope(h, heads):
  if heads & (heads - 1) == 0:
    return 2 ** (-8 * (h + 1) / heads)
  lower = 1 << (heads.bit_length() - 1)
  return alibi_slope(h, lower) if h < lower else alibi_slope(2 * (h - lower), 2 * lower)


def _llama3_wavelength(p, wavelength):
  """As the model card of LLaMA 3.1 writes it: by wavelengths in tokens."""
  longest = p.original_length / p.low_frequency_factor
  shortest = p.original_length / p.high_frequency_factor
  if wavelength < shortest:
    return wavelength
  if wavelength > longest:
    return wavelength * p.factor
  share = (p.original_length / wavelength - p.low_frequency_factor) / (
    p.high_frequency_factor - p.low_frequency_factor
  )
  return 1 / ((1 - share) / (wavelength * p.factor) + share / wavelength)


def _yarn_wavelength(p, wavelength, channel, channels):
  """NTK by parts: a ramp between the channels that make beta_fast and beta_slow rotations."""
  at = lambda turns: (
    channels * math.log(p.original_length / (turns * 2 * math.pi)) / (2 * math.log(p.base))
  )
  low, high = at(p.beta_fast), at(p.beta_slow)
  if p.truncate:
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, channels - 1)
  interpolated = min(1, max(0, (channel - low) / (high - low)))
  return 1 / (interpolated / (wavelength * p.factor) + (1 - interpolated) / wavelength)


def _rotary(wavelength_of, amplitude=lambda p: 1.0):
  """Complex multiplication: channel c and c + channels/2 form one complex number.

  wavelength_of(p, plain wavelength, c, channels): tokens per rotation of channel c.
  """

  def rotate(p, x, t):
    channels = int(len(x) * p.fraction)
    half, turned = channels // 2, np.array(x)
    for c in range(half):
      wavelength = wavelength_of(p, 2 * math.pi * p.base ** (2 * c / channels), c, channels)
      z = amplitude(p) * (x[c] + 1j * x[c + half]) * np.exp(2j * math.pi * t / wavelength)
      turned[c], turned[c + half] = z.real, z.imag
    return turned

  return _Position(rotate=rotate)


_POSITIONS = {
  'Rope': Variant(_rotary(lambda p, wavelength, c, channels: wavelength * p.factor)),
  'Llama3Rope': Variant(
    _rotary(lambda p, wavelength, c, channels: _llama3_wavelength(p, wavelength))
  ),
  'YarnRope': Variant(
    _rotary(_yarn_wavelength, lambda p: p.attention_factor or 0.1 * math.log(p.factor) + 1)
  ),
  'Nope': Variant(_Position()),
  'Sinusoidal': Variant(_Position()),
  'Learned': Variant(_Position()),
  'Alibi': Variant(_Position(bias=lambda p, h, heads, d: -alibi_slope(h, heads) * abs(d))),
  'Relative': Variant(
    _Position(
      bias=lambda p, h, heads, d: (
        (-1 if p.decreasing else 1) * t5_bucket(d, p.buckets, p.max_distance)
      )
    ),
    (sj.Relative(decreasing=True, buckets=4, max_distance=5),),
  ),
}


# kv_bias: what head h with dh channels sees besides the tokens, given the parameters.
class _Extra(NamedTuple):
  """key: k*, before the feature map. logit, instead of a key: a score that no query changes.

  The logit may be a function of the query's 0-based position and the number of heads. It returns
  None where nothing is added.
  value: v* of that key. added: a vector that every output gains. Without key and logit there
  is no extra key.
  """

  key: Any = None
  logit: Any = None
  value: Any = 0.0
  added: Any = 0.0


def _k_bias(b, params, h, dh):
  key = np.zeros(dh)
  learned = params['key'][0 if b.shared else h]
  key[: len(learned)] = learned
  value = {'zero': np.zeros(dh), 'first': np.eye(dh)[0], 'uniform': np.ones(dh) / math.sqrt(dh)}
  return _Extra(key, value=value[b.value] * b.value_norm)


def _pseudo_mask(b, params, h, dh):
  def logit(i, heads):
    slope = alibi_slope(h, heads) if b.gamma is None else b.gamma
    total = sum(math.exp(-slope * j) for j in range(i + 1, b.context))
    return math.log(total) if total else None

  return _Extra(logit=logit)


_EXTRA_KEYS = {
  'NoBias': Variant(lambda b, params, h, dh: _Extra()),
  'KBias': Variant(
    _k_bias,
    (
      sj.KBias(shared=True),
      sj.KBias(learnable_dims=2),
      sj.KBias(value='first', value_norm=2.0),
      sj.KBias(value='uniform', shared=True),
    ),
  ),
  'KVBias': Variant(
    lambda b, params, h, dh: _Extra(
      params['key'][0 if b.shared else h], value=params['value'][0 if b.shared else h]
    ),
    (sj.KVBias(shared=True),),
  ),
  'VBias': Variant(
    lambda b, params, h, dh: _Extra(added=params['value'][0 if b.shared else h]),
    (sj.VBias(shared=True),),
  ),
  'SinkLogit': Variant(lambda b, params, h, dh: _Extra(logit=params['logit'][h])),
  'ZeroSink': Variant(lambda b, params, h, dh: _Extra(logit=math.log(b.n))),
  'PseudoMask': Variant(_pseudo_mask, (sj.PseudoMask(context=4, gamma=0.3),)),
}


# head: what W_O receives for the output o of head h at one token, given the block's input x of that
# token, its value v in the head, its values (Hkv, Dh) in all heads, and the parameters.
def _head_gate(g, o, x, v, values, params, h):
  dh = len(o)
  x = {
    'input': x,
    'value': np.concatenate(values),
    'slice': None if x is None else x[h * dh : (h + 1) * dh],
  }[g.source]
  size = dh if isinstance(g, sj.ElementGate) else 1
  own = slice(h * size, (h + 1) * size)
  z = params['kernel'][:, own].T @ x
  if g.opening is not None:
    z = z + params['bias'][own] - math.log(1 / g.opening - 1)
  return o * g.scale / (1 + np.exp(-z))


_HEADS = {
  'PlainOutput': Variant(lambda g, o, x, v, values, params, h: o),
  'HeadGate': Variant(
    _head_gate, (sj.HeadGate(source='value', scale=2.0), sj.HeadGate(source='slice', opening=0.25))
  ),
  'ElementGate': Variant(
    _head_gate,
    (
      sj.ElementGate(scale=2.0, opening=0.25),
      sj.ElementGate(source='value'),
      sj.ElementGate(source='slice'),
    ),
  ),
  'HeadNorm': Variant(
    lambda g, o, x, v, values, params, h: o / math.sqrt(np.mean(o**2) + g.eps) * params['gain'],
    (sj.HeadNorm(eps=0.1),),
  ),
  'Exclusive': Variant(
    lambda g, o, x, v, values, params, h: o - (o @ v) / (v @ v) * v, cancels=True
  ),
}

VARIANTS = {
  'similarity': _SIMILARITIES,
  'normalizer': _NORMALIZERS,
  'feature_map': _FEATURE_MAPS,
  'position': _POSITIONS,
  'mask': _MASKS,
  'kv_bias': _EXTRA_KEYS,
  'qk_norm': _QK_NORMS,
  'temperature': _TEMPERATURES,
  'value': _VALUES,
  'head': _HEADS,
}
