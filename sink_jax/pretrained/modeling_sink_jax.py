# pyright: reportMissingImports=false
"""A language model of sink_jax as PyTorch code for transformers, for attention that it has not.

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

The output of a head for query i, before the gate or norm `head` and the matrix W_O, is

    o_i = 1/Z_i sum_j M(i, j) f(phi(q_i) . phi(k_j) / sqrt(Dh) + g(i, j)) v_j

over the tokens j and, with some values of `kv_bias`, one key more. In config.json f is
`similarity`, Z `normalizer`, phi `feature_map`, g the bias of `position` and M `mask`. Identity,
Nope, Causal, NoBias, NoQKNorm, Fixed, PlainValue and PlainOutput change nothing.

It is the definition, to be read and compared with, and it is slow: all T x T weights of all heads
are made in float32, and without a cache each new token reads the whole text again. It is for
evaluation, for a look at the weights (`output_attentions=True`) and for short texts without
padding; training and serving are for sink_jax. In shapes, T also counts the learned sink tokens,
which come first, H are heads of Dh channels, and G heads of keys.
"""

import math
from types import SimpleNamespace

import torch
from torch import nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class SinkJaxConfig(PretrainedConfig):
  """model, attention: their parts. blocks: masks and positions of a period. shapes: parameters."""

  model_type = 'sink_jax'


def fill(module, shapes):
  """Adds a parameter for each shape, and a module for each dict of shapes."""
  for name, shape in shapes.items():
    if isinstance(shape, list):
      module.register_parameter(name, nn.Parameter(torch.ones(shape)))
    elif 'weight' in shape:
      module.add_module(name, nn.Linear(*shape['weight'][::-1], bias='bias' in shape))
    else:
      module.add_module(name, fill(nn.Module(), shape))
  return module


def rms_norm(x, gain, eps):
  x32 = x.float()
  return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * gain).to(x.dtype)


def norm(layer, x, m):
  """The norm of the model, x where there is none; 'single' is 'rmsnorm' with one gain."""
  if layer is None:
    return x
  if m.norm == 'layernorm':
    return nn.functional.layer_norm(x, x.shape[-1:], layer.gain, layer.bias, m.norm_eps)
  if m.norm == 'dyt':
    return (torch.tanh(layer.alpha * x.float()) * layer.gain + layer.bias).to(x.dtype)
  return rms_norm(x, layer.gain, m.norm_eps)


def weights(f, z, s, keep):
  """f(s) / Z (B, H, T, keys) of scores, zero where `keep` is false."""
  add = lambda x: x.sum(-1, keepdim=True)
  if f.name == 'Exp':  # relative to the sum of the row, so that nothing overflows
    s = s.masked_fill(~keep, -math.inf)
    lse, p = s.logsumexp(-1, keepdim=True), s.softmax(-1)
    return {'RowSum': lambda: p * z.scale,
            'PNorm': lambda: (s - (z.p * s).logsumexp(-1, keepdim=True) / z.p).exp(),
            'Clipped': lambda: ((z.high - z.low) * p + z.low).clamp(0, 1),
            'AbsFloor': lambda: p * (lse - math.log(z.floor)).clamp_max(0).exp()}[z.name]()
  s = s.masked_fill(~keep, 0)
  if f.name == 'Softpick':  # with AbsSum: exp(s) - 1, and all relative to exp(m)
    m = s.amax(-1, keepdim=True).clamp_min(0)
    e = torch.where(s < 1, s.clamp_max(1).expm1() * (-m).exp(), (s - m).exp() - (-m).exp())
    return e.relu() / (add(e.abs()) + z.eps)
  a = {'Sigmoid': lambda: torch.sigmoid(s + f.bias), 'Relu': s.relu, 'Linear': lambda: s,
       'SquaredRelu': lambda: s.relu().square(), 'EluPlusOne': lambda: nn.functional.elu(s) + 1}
  a = a[f.name]() * keep
  return a * {  # sums are limited to what float32 can divide by
      'RowSum': lambda: z.scale / (add(a) + z.eps).clamp_min(1e-18),
      'PNorm': lambda: (add(a.clamp_min(1e-30) ** z.p * keep)
                        .clamp_min(10 ** (-36 / (1 / z.p + 1))) ** (-1 / z.p)),
      'AbsFloor': lambda: 1 / add(a).abs().clamp_min(z.floor),
      'Count': lambda: 1 / add(keep), 'Unnormalized': lambda: 1.0}[z.name]()


class Block(nn.Module):
  """One block; the own parameters of attention have the name of their part in front."""

  def __init__(self, config, n):
    super().__init__()
    fill(self, config.shapes['block'])
    self.m = SimpleNamespace(**config.model)
    parts = config.attention | config.blocks[n % len(config.blocks)]
    self.spec = SimpleNamespace(**{k: SimpleNamespace(**part) for k, part in parts.items()})

  def attend(self, x, first):
    """(output (B, T, D), weights (B, H, T, T), projected values); first: those of block 1."""
    m, spec, own, i = self.m, self.spec, self.attention, torch.arange(x.shape[1], device=x.device)
    q, k, projected = (layer(x).unflatten(-1, (-1, m.head_dim)).transpose(1, 2)
                       for layer in (own.query, own.key, own.value))  # (B, H or G, T, Dh)
    if spec.qk_norm.name == 'QKNorm':
      q = rms_norm(q, own.qk_norm_query_gain, spec.qk_norm.eps)
      k = rms_norm(k, own.qk_norm_key_gain, spec.qk_norm.eps)
    keep = i <= i[:, None]
    if spec.mask.name == 'Window':
      keep &= i > i[:, None] - spec.mask.size
    elif spec.mask.name == 'Prefix':
      keep |= i < spec.mask.length
    t = spec.temperature
    if t.name == 'LogLength':  # of the number of visible keys
      scale = own.temperature_scale[:, None, None] if t.learned else t.scale
      q = (q.float() * scale * keep.sum(-1, keepdim=True).log()).to(q.dtype)
    phi = {'Identity': lambda z: z, 'EluPlusOne': lambda z: nn.functional.elu(z) + 1,
           'Mlp': lambda z: (z @ own.feature_map_w1).relu() @ own.feature_map_w2}[
               spec.feature_map.name]
    q, k = (phi(self.rotate(z, i)) for z in (q, k))
    v, value = projected.float(), spec.value
    if value.name == 'ValueScale':
      v = v * own.value_scale[:, None, None]
    elif value.name == 'ValueResidual' and first is not None:
      a, b = (own.value_own, own.value_first) if value.learned else (value.own, value.first)
      v = a * v + b * first.float()
    grouped = lambda z: z.repeat_interleave(m.heads // m.kv_heads, 1).float()
    s = q.float() @ grouped(k).mT / math.sqrt(m.head_dim) + self.position_bias(i[:, None] - i)
    extra, value = self.extra_key(q, phi)
    if extra is not None:  # which every query sees
      s = torch.cat([extra.expand(s.shape[:-1])[..., None], s], -1)
      keep = nn.functional.pad(keep, (1, 0), value=True)
    a = weights(spec.similarity, spec.normalizer, s, keep)
    shared, a = a[..., :1], a[..., -len(i):]
    o = a @ grouped(v)
    if value is not None:  # VBias has no weight
      o = o + (value if extra is None else value * shared)
    o = self.head(o, v.to(x.dtype), x).to(x.dtype).transpose(1, 2)
    return own.out(o.sum(2) if m.combine_heads == 'add' else o.flatten(2)), a, projected

  def rotate(self, x, i):
    """Queries or keys turned by their positions; channels c and c + C/2 are a pair."""
    p = self.spec.position
    if p.name not in ('Rope', 'Llama3Rope', 'YarnRope'):
      return x
    angle = i.float()[:, None] * torch.tensor(p.frequencies, device=x.device)
    cos, sin = p.amplitude * angle.cos(), p.amplitude * angle.sin()
    a, b, rest = x.float().tensor_split((angle.shape[1], 2 * angle.shape[1]), -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1).to(x.dtype)

  def position_bias(self, distance):
    """g (H or 1, T, T) of distances i - j."""
    p, tensor = self.spec.position, lambda x: torch.tensor(x, device=distance.device)
    if p.name == 'Relative':  # the last of the table is that of all larger distances
      return tensor(p.table)[distance.clamp(0, len(p.table) - 1)]
    return -tensor(p.slopes)[:, None, None] * distance.abs() if p.name == 'Alibi' else 0.0

  def extra_key(self, q, phi):
    """(score to be expanded to (B, H, T), or None; value (H or 1, 1, Dh), or None)."""
    bias, own, width = self.spec.kv_bias, self.attention, self.m.head_dim
    if bias.name == 'SinkLogit':
      return own.kv_bias_logit[:, None].float(), None
    if bias.name == 'ZeroSink':
      return torch.tensor(math.log(bias.n), device=q.device), None
    if bias.name not in ('KBias', 'KVBias'):
      return None, own.kv_bias_value[:, None] if bias.name == 'VBias' else None
    value = own.kv_bias_value[:, None] if bias.name == 'KVBias' else (
        bias.vector and torch.tensor(bias.vector, device=q.device))
    key = phi(nn.functional.pad(own.kv_bias_key, (0, width - own.kv_bias_key.shape[-1])))
    return (q * key[:, None]).float().sum(-1) / math.sqrt(width), value  # k* is not rotated

  def head(self, o, v, x):
    """What W_O gets in place of o (B, H, T, Dh); v (B, G, T, Dh), x (B, T, D)."""
    h, own, heads = self.spec.head, self.attention, self.m.heads
    if h.name == 'HeadNorm':
      return rms_norm(o, own.head_gain, h.eps)
    if h.name not in ('HeadGate', 'ElementGate'):
      return o
    # Each head has its own matrix, for x, for its slice of x, or for the values of all heads.
    read = {'input': lambda: x[:, :, None], 'slice': lambda: x.unflatten(-1, (heads, -1)),
            'value': lambda: v.transpose(1, 2).flatten(2)[:, :, None]}[h.source]()
    z = torch.einsum('btgd,dgf->btgf', read, own.head_kernel.view(*read.shape[:1:-1], -1))
    z = z.reshape(*x.shape[:2], heads, -1).transpose(1, 2).float()
    if h.opening is not None:
      z = z + math.log(h.opening / (1 - h.opening)) + own.head_bias.view(heads, 1, -1)
    return o * h.scale * z.sigmoid()

  def feed_forward(self, x):
    kind = self.m.ffn
    h = self.ffn.w1(x) * (math.sqrt(3) if self.m.norm_location == 'protected' else 1)
    h = (h.relu() if kind in ('relu', 'reglu') else nn.functional.silu(h) if kind[:2] == 'sw' else
         nn.functional.gelu(h, approximate='tanh' if kind == 'gelu_tanh' else 'none'))
    return self.ffn.w_out(h * self.ffn.w2(x) if kind.endswith('glu') else h)

  def forward(self, h, first):
    """(hidden states (B, T, D), weights, projected values)."""
    where, f = self.m.norm_location, torch.zeros_like if self.m.ffn == 'none' else self.feed_forward
    n = lambda name, x: norm(getattr(self, name, None), x, self.m)
    o, a, projected = self.attend(h if where == 'post' else n('norm1', h), first)
    if where == 'post':
      x = n('norm1', h + o)
      return n('norm2', x + f(x)), a, projected
    # A 'sandwich' has all four norms, 'pre' those in front, 'protected' a factor in place of them.
    beta = 1 / math.sqrt(2 * self.m.layers) if where == 'protected' else 1
    x = h + beta * n('norm1_after', o)
    x = x + beta * n('norm2_after', f(n('norm2', h if self.m.parallel_residual else x)))
    return x, a, projected


class SinkJaxForCausalLM(PreTrainedModel, GenerationMixin):
  config_class = SinkJaxConfig

  def __init__(self, config):
    super().__init__(config)
    self.m = SimpleNamespace(**config.model)
    fill(self, config.shapes['model'])
    self.layers = nn.ModuleList(Block(config, n) for n in range(self.m.layers))
    self.post_init()

  def forward(self, input_ids, attention_mask=None, output_hidden_states=False,
              output_attentions=False, **unused):
    """Hidden states are those of tokens; attentions also have learned sink tokens, in front."""
    if attention_mask is not None and not attention_mask.bool().all():
      raise ValueError('Padding is not supported: give texts of one length, or one at a time.')
    h, position = self.embed[input_ids], self.config.attention['position']
    i = torch.arange(input_ids.shape[1], device=h.device)
    if position['name'] == 'Learned':
      h = h + self.positions[i]
    elif position['name'] == 'Sinusoidal':  # sines and cosines in turn
      c = torch.arange(self.m.d_model, dtype=torch.float64, device=h.device)
      angle = i[:, None] * position['base'] ** (-(c - c % 2) / self.m.d_model)
      h = h + torch.where(c % 2 == 1, angle.cos(), angle.sin()).to(h.dtype)
    if self.m.sink_tokens:  # they have no position embedding
      h = torch.cat([self.sink_tokens.expand(len(h), -1, -1), h], 1)
    hidden, first, attentions = [h], None, ()
    for layer in self.layers:
      h, a, projected = layer(h, first)
      first = projected if first is None else first
      hidden.append(h)
      attentions += (a,) if output_attentions else ()
    hidden = [h[:, self.m.sink_tokens:] for h in hidden]
    hidden[-1] = h = norm(getattr(self, 'final_norm', None), hidden[-1], self.m)
    logits = h @ self.embed.T if self.m.tied else self.unembed(h)
    return CausalLMOutput(logits=logits.float(), attentions=attentions or None,
                          hidden_states=tuple(hidden) if output_hidden_states else None)

  def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **unused):
    return {'input_ids': input_ids, 'attention_mask': attention_mask}  # the whole text: no cache
