"""Attention by three nested loops in NumPy float64, written from the paper's formulas.

Shares no code with the package. Every slot is looked up by the name of its class, so a
new class fails here until its formula is written down.
"""

import math

import numpy as np

MASKS = {
    'Causal': lambda m, i, j: j <= i,
    'Window': lambda m, i, j: i - m.size + 1 <= j <= i,
    'Prefix': lambda m, i, j: j <= i or j < m.length,
}

SIMILARITIES = {
    'Exp': math.exp,
    'Sigmoid': lambda s: 1 / (1 + math.exp(-s)),
    'EluPlusOne': lambda s: s + 1 if s > 0 else math.exp(s),
    'Linear': lambda s: s,
}

FEATURE_MAPS = {
    'Identity': lambda x, p: x,
    'EluPlusOne': lambda x, p: np.array([SIMILARITIES['EluPlusOne'](e) for e in x]),
    'Mlp': lambda x, p: p['w2'].T @ np.maximum(p['w1'].T @ x, 0),
}


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


BIASES = {
    'Alibi': lambda p, h, heads, d: -alibi_slope(h, heads) * abs(d),
    'Relative': lambda p, h, heads, d: (-1 if p.decreasing else 1) * t5_bucket(
        d, p.buckets, p.max_distance),
    **dict.fromkeys(('Rope', 'Llama3Rope', 'YarnRope', 'Nope', 'Sinusoidal', 'Learned'),
                    lambda p, h, heads, d: 0.0),
}


def llama3_wavelength(p, wavelength):
  """As the model card of LLaMA 3.1 writes it: by wavelengths in tokens."""
  longest = p.original_length / p.low_frequency_factor
  shortest = p.original_length / p.high_frequency_factor
  if wavelength < shortest:
    return wavelength
  if wavelength > longest:
    return wavelength * p.factor
  share = ((p.original_length / wavelength - p.low_frequency_factor)
           / (p.high_frequency_factor - p.low_frequency_factor))
  return 1 / ((1 - share) / (wavelength * p.factor) + share / wavelength)


def yarn_wavelength(p, wavelength, channel, channels):
  """NTK by parts: a ramp between the channels of beta_fast and of beta_slow turns."""
  at = lambda turns: channels * math.log(p.original_length / (turns * 2 * math.pi)) / (
      2 * math.log(p.base))
  low, high = at(p.beta_fast), at(p.beta_slow)
  if p.truncate:
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, channels - 1)
  interpolated = min(1, max(0, (channel - low) / (high - low)))
  return 1 / (interpolated / (wavelength * p.factor) + (1 - interpolated) / wavelength)


def rope(x, t, p):
  """Complex multiplication: channel c and c + channels/2 are one complex number."""
  channels = int(len(x) * p.fraction)
  half, turned, amplitude = channels // 2, np.array(x), 1.0
  for c in range(half):
    wavelength = 2 * math.pi * p.base ** (2 * c / channels)
    if type(p).__name__ == 'Rope':
      wavelength *= p.factor
    elif type(p).__name__ == 'Llama3Rope':
      wavelength = llama3_wavelength(p, wavelength)
    else:
      wavelength = yarn_wavelength(p, wavelength, c, channels)
      amplitude = p.attention_factor or 0.1 * math.log(p.factor) + 1
    z = amplitude * (x[c] + 1j * x[c + half]) * np.exp(2j * math.pi * t / wavelength)
    turned[c], turned[c + half] = z.real, z.imag
  return turned


def rms(x, gain, eps):
  return x / math.sqrt(np.mean(x ** 2) + eps) * gain


def bias_slot(spec, p, h, dh, q):
  """(score, value) of the bias slot for head h and query q, or None."""
  bias, name = spec.kv_bias, type(spec.kv_bias).__name__
  if name in ('NoBias', 'VBias'):
    return None
  if name == 'SinkLogit':
    return p['logit'][h], np.zeros(dh)
  key = np.zeros(dh)
  learned = p['key'][0 if bias.shared else h]
  key[:len(learned)] = learned
  if name == 'KVBias':
    value = p['value'][0 if bias.shared else h]
  else:
    value = {'zero': np.zeros(dh), 'first': np.eye(dh)[0],
             'uniform': np.ones(dh) / math.sqrt(dh)}[bias.value] * bias.value_norm
  return q @ key / math.sqrt(dh), value


def attention(spec, q, k, v, params):
  """Returns (output (B,T,H,Dh), weights (B,H,T,T), proxy (B,H,T,T), slot proxy (B,H,T))."""
  q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
  params = {s: {n: np.asarray(x, np.float64) for n, x in own.items()} for s, own in params.items()}
  own = lambda slot: params.get(slot, {})
  batch, length, heads, dh = q.shape
  group = heads // k.shape[2]
  f = SIMILARITIES[type(spec.similarity).__name__]
  phi = FEATURE_MAPS[type(spec.feature_map).__name__]
  norm, z = type(spec.qk_norm).__name__, spec.normalizer
  out = np.zeros(q.shape)
  weights = np.zeros((batch, heads, length, length))
  proxy, slot_proxy = np.zeros_like(weights), np.zeros((batch, heads, length))

  def prepare(x, t, gain):
    if norm == 'QKNorm':
      x = rms(x, own('qk_norm')[gain], spec.qk_norm.eps)
    else:
      assert norm == 'NoQKNorm', norm
    if type(spec.position).__name__.endswith('Rope'):
      x = rope(x, t, spec.position)
    return x

  for b in range(batch):
    for h in range(heads):
      for i in range(length):
        qi = phi(prepare(q[b, i, h], i, 'query_gain'), own('feature_map'))
        sims, values, where = [], [], []
        for j in range(length):
          if not MASKS[type(spec.mask).__name__](spec.mask, i, j):
            continue
          kj = phi(prepare(k[b, j, h // group], j, 'key_gain'), own('feature_map'))
          s = qi @ kj / math.sqrt(dh)
          s += BIASES[type(spec.position).__name__](spec.position, h, heads, i - j)
          sims.append(f(s))
          values.append(v[b, j, h // group])
          where.append(j)
        slot_params = own('kv_bias')
        if type(spec.kv_bias).__name__ in ('KBias', 'KVBias'):
          # The bias key passes the feature map like any other key.
          key = np.zeros((heads, dh))
          learned = slot_params['key']
          key[:, :learned.shape[1]] = learned
          mapped = np.stack([phi(row, own('feature_map')) for row in key])
          slot_params = dict(slot_params, key=mapped if not spec.kv_bias.shared else mapped[:1])
        slot = bias_slot(spec, slot_params, h, dh, qi)
        if slot is not None:
          sims.append(f(slot[0]))
          values.append(slot[1])
        sims = np.array(sims)
        kind = type(z).__name__
        if kind == 'RowSum':
          zi = (sims.sum() + z.eps) / z.scale
        elif kind == 'PNorm':
          zi = (sims ** z.p).sum() ** (1 / z.p)
        elif kind == 'AbsFloor':
          zi = max(abs(sims.sum()), z.floor)
        else:
          assert kind == 'Unnormalized', kind
          zi = 1.0
        out[b, i, h] = (sims[:, None] * np.array(values)).sum(0) / zi
        size = np.abs(sims)
        # Softmax needs no guard against an empty sum; the release adds 1e-8 elsewhere.
        shares = size / (size.sum() + (0 if type(spec.similarity).__name__ == 'Exp' else 1e-8))
        weights[b, h, i, where] = sims[:len(where)] / zi
        proxy[b, h, i, where] = shares[:len(where)]
        slot_proxy[b, h, i] = shares[len(where)] if slot is not None else 0
        if type(spec.kv_bias).__name__ == 'VBias':
          out[b, i, h] += own('kv_bias')['value'][0 if spec.kv_bias.shared else h]
  return out, weights, proxy, slot_proxy
