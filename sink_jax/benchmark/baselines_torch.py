"""PyTorch's attention on the same device: SDPA (flash), FlexAttention, eager T x T.

PyTorch is never needed: it is loaded by name where it is installed, and where it is not, or
does not see the device, its rows hold the reason. Times are those of CUDA events.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import time

from sink_jax.attention.feature_map import EluPlusOne, Identity
from sink_jax.attention.head import PlainOutput
from sink_jax.attention.mask import Causal, Window
from sink_jax.attention.normalizer import AbsFloor, RowSum, Unnormalized
from sink_jax.attention.position import Alibi
from sink_jax.attention.similarity import Exp, Linear, Sigmoid
from sink_jax.attention.spec import AttentionSpec
from sink_jax.benchmark.work import Programs, Work
from sink_jax.kernels.dispatch import platform


def eager_covers(spec: AttentionSpec) -> bool:
  """Whether the eager code computes it: its functions, no feature map, bias, extra key or gate."""
  # By class: what another one computes, even a subclass, the code below does not know.
  return (isinstance(spec.feature_map, Identity) and not spec.position.has_bias
          and not spec.kv_bias.has_extra_key and type(spec.head) is PlainOutput
          and type(spec.similarity) in (Exp, Sigmoid, EluPlusOne, Linear)
          and type(spec.normalizer) in (RowSum, Unnormalized, AbsFloor))


def flash_covers(spec: AttentionSpec) -> bool:
  """Whether SDPA's flash kernel computes it: plain causal softmax."""
  return flex_covers(spec) and type(spec.mask) is Causal and not spec.position.has_bias


def flex_covers(spec: AttentionSpec) -> bool:
  """Whether FlexAttention computes it: softmax, causal or in a window, also with ALiBi."""
  # By class: what another mask does, even a subclass, PyTorch's kernels cannot know.
  return (isinstance(spec.similarity, Exp) and spec.rows_sum_to_one
          and not spec.kv_bias.has_extra_key and type(spec.mask) in (Causal, Window)
          and (isinstance(spec.position, Alibi) or not spec.position.has_bias)
          and type(spec.head) is PlainOutput)


def programs(name: str, work: Work) -> Programs:
  """Both programs of an operation, run once; their memory is known after running alone.

  Raises:
    NotImplementedError: PyTorch does not see the GPU, or this code does not compute the spec.
  """
  # By name, since PyTorch is optional and no dependency.
  torch = importlib.import_module('torch')
  batch, heads, length, head_dim = work.shape
  device = 'cuda' if platform() == 'cuda' else 'cpu'
  if device == 'cuda' and not torch.cuda.is_available():
    raise NotImplementedError(f'PyTorch {torch.__version__} does not see the GPU')
  generator = torch.Generator(device).manual_seed(work.seed)
  q, k, v, do = (torch.randn(batch, heads, length, head_dim, generator=generator, device=device)
                 .to(getattr(torch, work.dtype)) for _ in range(4))
  inputs = [x.requires_grad_() for x in (q, k, v)]
  build = {'torch-flash': _flash, 'torch-flex': _flex, 'torch-eager': _eager}[name]
  f = build(torch, work.spec, heads, length, head_dim, device)

  def forward():
    with torch.no_grad():  # autograd would keep T x T arrays for a backward pass
      return f(*inputs)

  def both():
    return torch.autograd.grad(f(*inputs), inputs, do)

  for program in (forward, both):
    program()  # what does not run raises here, before anything is timed
  return Programs(_elapsed(torch, forward, device), _elapsed(torch, both, device),
                  measured_bytes=lambda: _peak(torch, both, device))


def missing() -> str | None:
  """The reason why PyTorch cannot be timed here, or None; without loading it."""
  if importlib.util.find_spec('torch') is None:
    return 'PyTorch is not installed'
  return 'PyTorch does not see a TPU' if platform() == 'tpu' else None


def _elapsed(torch, call, device):
  # On a CPU a call returns when its result is there.
  def on_cpu(n):
    began = time.perf_counter()
    for _ in range(n):
      call()
    return time.perf_counter() - began

  def on_gpu(n):
    # Events are recorded in the queue of the device: what the host needs to fill the queue does not
    # count where the device is busy.
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    first.record()
    for _ in range(n):
      call()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / 1000

  return on_gpu if device == 'cuda' else on_cpu


def _peak(torch, call, device):
  if device != 'cuda':
    return None
  torch.cuda.synchronize()
  torch.cuda.reset_peak_memory_stats()
  before = torch.cuda.memory_allocated()
  call()
  torch.cuda.synchronize()
  peak = torch.cuda.max_memory_allocated() - before
  torch.cuda.empty_cache()  # PyTorch keeps freed memory, which JAX then lacks
  return peak


def _flash(torch, spec, heads, length, head_dim, device):
  if not flash_covers(spec):
    raise NotImplementedError('SDPA with the flash kernel computes plain causal softmax')
  attention = importlib.import_module('torch.nn.attention')
  kernel = torch.nn.functional.scaled_dot_product_attention

  def f(q, k, v):
    # Without it PyTorch chooses among its kernels, and the row would not be of the flash kernel.
    with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
      return kernel(q, k, v, is_causal=True)

  return f


def _flex(torch, spec, heads, length, head_dim, device):
  if not flex_covers(spec):
    raise NotImplementedError('FlexAttention computes softmax, and is set up here for causal masks '
                              'and windows, with ALiBi or without')
  flex = importlib.import_module('torch.nn.attention.flex_attention')
  size = spec.mask.window or length
  mask = flex.create_block_mask(
      lambda b, h, i, j: (j <= i) & (i - j < size), None, None, length, length, device=device)
  bias = None
  if isinstance(spec.position, Alibi):
    slopes = torch.tensor(spec.position.slopes(heads), device=device)
    bias = lambda s, b, h, i, j: s - slopes[h] * (i - j)
  # Not compiled, FlexAttention makes all T x T scores.
  compiled = torch.compile(flex.flex_attention)
  return lambda q, k, v: compiled(q, k, v, score_mod=bias, block_mask=mask)


def _eager(torch, spec, heads, length, head_dim, device):
  """As the official implementation: one T x T tensor after another, in the inputs' dtype."""
  if not eager_covers(spec):
    raise NotImplementedError(f'the eager code here does not compute {spec}')
  tokens = torch.arange(length, device=device)
  distance = tokens[:, None] - tokens[None, :]
  size = spec.mask.window or length
  hidden = (distance < 0) | (distance >= size)
  normalizer, similarity = spec.normalizer, spec.similarity

  def f(q, k, v):
    s = q @ k.transpose(-1, -2) / math.sqrt(head_dim)
    if similarity.kind == 'exponential':
      return torch.softmax(s.masked_fill(hidden, -math.inf), -1) @ v
    if isinstance(similarity, Sigmoid):
      s = torch.sigmoid(s + similarity.bias)
    elif isinstance(similarity, EluPlusOne):
      s = torch.nn.functional.elu(s) + 1
    # The mask comes after the function, as in the official implementation; of softmax it is in the
    # scores.
    s = s.masked_fill(hidden, 0)
    if normalizer.power is not None:
      total = s.sum(-1, keepdim=True)
      floor = getattr(normalizer, 'floor', None)
      s = s / (total + normalizer.eps if floor is None else total.abs().clamp(min=floor))
    return s @ v

  return f
