"""The timed implementations of attention, of this package and of other libraries, in one table."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sink_jax.attention import Dims, Param
from sink_jax.attention.normalizer import AbsFloor, RowSum
from sink_jax.attention.per_token import EluPlusOne
from sink_jax.attention.similarity import Exp, Sigmoid
from sink_jax.attention.spec import AttentionSpec
from sink_jax.benchmark.measure import Program, compiled, random
from sink_jax.devices import platform
from sink_jax.kernels.dispatch import attend


class Work(NamedTuple):
  """One attention operation of a shape (B, H, T, Dh).

  backward: whether with gradients. repeats: how many operations a program of JAX makes.
  """

  spec: AttentionSpec
  shape: tuple[int, int, int, int]
  dtype: str
  backward: bool = False
  repeats: int = 1


class Implementation(NamedTuple):
  """An implementation of attention.

  kind: 'ours', 'T x T' (it makes the weights of all pairs of tokens) or 'library'.
  program: (row, work) -> Program; it may add to the row.
  variants: that it computes, by their names in `attention.VARIANTS`; None for all.
  platforms, package: where it runs, and which package it needs.
  """

  kind: str
  program: Callable[[dict[str, Any], Work], Program]
  variants: tuple[str, ...] | None = None
  platforms: tuple[str, ...] = ('cpu', 'cuda', 'tpu')
  package: str = 'jax'

  def missing(self) -> str | None:
    """Why it does not run on this machine, or None."""
    if platform() not in self.platforms:
      return f'needs {" or ".join(self.platforms)}'
    return None if importlib.util.find_spec(self.package) else f'{self.package} is not installed'

  def computes(self, variant: str) -> bool:
    return self.variants is None or variant in self.variants


def random_inputs(work: Work) -> tuple[tuple[Any, ...], jax.Array]:
  """((q, k, v, params), cotangent of the output): normal numbers, (B, T, H, Dh)."""
  _, heads, _, head_dim = work.shape
  q, k, v, do = _arrays(work.shape, work.dtype)
  wanted = work.spec.params(Dims(heads, heads, head_dim))
  params = jax.tree.map(
    lambda p: 0.02 * random(0, p.shape, jnp.float32), wanted, is_leaf=lambda x: isinstance(x, Param)
  )
  return (q, k, v, params), do


@functools.lru_cache(maxsize=1)  # the rows of one shape share them
def _arrays(shape, dtype):
  batch, heads, length, head_dim = shape
  return [random(seed, (batch, length, heads, head_dim), dtype) for seed in range(4)]


def repeated(f: Callable[..., Any], repeats: int) -> Callable[..., jax.Array]:
  """A function that calls f `repeats` times on the same arrays, one call after the other.

  It returns a sum of one number of every result. Starting a program takes as long as a short call.
  """

  def program(*arrays: Any) -> jax.Array:
    def call(total, _):
      # Behind a barrier with the running total the inputs look new each time: XLA would take a call
      # with the same inputs out of the loop. The second barrier makes it compute all of the
      # results.
      inputs, total = jax.lax.optimization_barrier((arrays, total))
      results = jax.tree.leaves(jax.lax.optimization_barrier(f(*inputs)))
      return total + sum(result.ravel()[0].astype(jnp.float32) for result in results), None

    return jax.lax.scan(call, jnp.float32(0), length=repeats)[0]

  return program


def _in_jax(make: Callable[[AttentionSpec], Callable[..., jax.Array]]) -> Callable[..., Program]:
  """`Implementation.program` of f(q, k, v, params) = make(spec)."""

  def program(row: dict[str, Any], work: Work) -> Program:
    f = make(work.spec)

    def with_gradients(cotangent, *inputs):
      out, pull = jax.vjp(f, *inputs)
      return out, pull(cotangent.astype(out.dtype))

    inputs, cotangent = random_inputs(work)
    timed, arrays = (with_gradients, (cotangent, *inputs)) if work.backward else (f, inputs)
    if work.repeats > 1:
      timed = repeated(timed, work.repeats)
    return compiled(row, timed, *arrays, repeats=work.repeats)

  return program


def _ours(name: str) -> Callable[..., Program]:
  return _in_jax(lambda spec: functools.partial(attend, spec, implementation=name))


def _library(module: str, **options: Any) -> Callable[..., Program]:
  """`dot_product_attention` of a package, loaded by name, since it may be optional."""

  def make(spec: AttentionSpec) -> Callable[..., jax.Array]:
    f = functools.partial(importlib.import_module(module).dot_product_attention, **options)
    # The libraries count only the keys before the query.
    window = (spec.mask.window - 1, 0) if spec.mask.window else None
    return lambda q, k, v, params: f(q, k, v, is_causal=True, local_window_size=window)

  return _in_jax(make)


def _release(spec: AttentionSpec) -> Callable[..., jax.Array]:
  """T x T attention as the official code, sail-sg/Attention-Sink, has it, in the inputs' dtype."""

  def f(q, k, v, params):
    tokens = jnp.arange(q.shape[1])
    distance = tokens[:, None] - tokens[None, :]
    keep = (distance >= 0) & (distance < (spec.mask.window or len(tokens)))
    s = jnp.einsum('bihd,bjhd->bhij', q, k) / math.sqrt(q.shape[-1])
    if isinstance(spec.similarity, Exp):
      s = jax.nn.softmax(jnp.where(keep, s, -math.inf), -1)
    elif isinstance(spec.similarity, Sigmoid):
      s = jax.nn.sigmoid(s + spec.similarity.bias)
    elif isinstance(spec.similarity, EluPlusOne):
      s = jax.nn.elu(s) + 1
    s = jnp.where(keep, s, 0)  # after the function, which need not be zero at a hidden score
    if isinstance(spec.normalizer, AbsFloor):
      s = s / abs(s.sum(-1, keepdims=True)).clip(min=spec.normalizer.floor)
    elif isinstance(spec.normalizer, RowSum) and not isinstance(spec.similarity, Exp):
      s = s / (s.sum(-1, keepdims=True) + spec.normalizer.eps)
    return jnp.einsum('bhij,bjhd->bihd', s, v)

  return f


def _flash(torch, spec, shape, device):
  attention = importlib.import_module('torch.nn.attention')

  def f(q, k, v):
    # Otherwise PyTorch chooses among its kernels, and the row would not be of the flash kernel.
    with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
      return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

  return f


def _flex(torch, spec, shape, device):
  flex = importlib.import_module('torch.nn.attention.flex_attention')
  _, heads, length, _ = shape
  size = spec.mask.window or length
  keep = lambda b, h, i, j: (j <= i) & (i - j < size)
  mask = flex.create_block_mask(keep, None, None, length, length, device=device)
  bias = None
  if spec.position.has_bias:  # ALiBi
    slopes = torch.tensor(spec.position.slopes(heads), device=device)
    bias = lambda s, b, h, i, j: s - slopes[h] * (i - j)
  f = torch.compile(flex.flex_attention)  # not compiled, it makes all T x T scores
  return lambda q, k, v: f(q, k, v, score_mod=bias, block_mask=mask)


def _torch(make: Callable[..., Callable[..., Any]]) -> Callable[..., Program]:
  """`Implementation.program` of f(q, k, v) = make(torch, spec, shape, device) in PyTorch."""

  def program(row: dict[str, Any], work: Work) -> Program:
    torch = importlib.import_module('torch')  # by name: it is not a dependency
    device = 'cuda' if platform() == 'cuda' else 'cpu'
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, work.dtype)
    draw = lambda: torch.randn(work.shape, generator=generator, device=device).to(dtype)
    q, k, v, do = (draw().requires_grad_() for _ in range(4))
    f = make(torch, work.spec, work.shape, device)

    def call():
      if work.backward:
        return torch.autograd.grad(f(q, k, v), (q, k, v), do)
      with torch.no_grad():  # autograd would keep T x T arrays for a backward pass
        return f(q, k, v)

    return Program(call, lambda result: torch.cuda.synchronize() if device == 'cuda' else None)

  return program


_WINDOWED = 'softmax', 'window'
_MOSAIC = (
  'softmax',
  'sigmoid',
  'sigmoid-sum',
  'relu',
  'elu',
  'linear',
  'alibi',
  'p-norm',
  'window',
  'k-bias',
)
_IN_TILES = *_MOSAIC, 'relative'
_RELEASED = 'softmax', 'sigmoid', 'sigmoid-sum', 'elu', 'linear', 'window'
_TORCH = {'platforms': ('cpu', 'cuda'), 'package': 'torch'}
# By their names in --implementations. The others are compared with the first library that runs.
IMPLEMENTATIONS = {
  'pallas': Implementation('ours', _ours('pallas'), _IN_TILES, ('cuda', 'tpu')),
  'mosaic': Implementation('ours', _ours('mosaic'), _MOSAIC, ('cuda',)),
  'chunked': Implementation('ours', _ours('chunked')),
  'cudnn': Implementation('library', _ours('cudnn'), _WINDOWED, ('cuda',)),
  'splash': Implementation('library', _ours('splash'), _WINDOWED, ('tpu',)),
  'torch-flash': Implementation('library', _torch(_flash), ('softmax',), **_TORCH),
  'torch-flex': Implementation('library', _torch(_flex), (*_WINDOWED, 'alibi'), **_TORCH),
  'tokamax': Implementation('library', _library('tokamax'), _WINDOWED, ('cuda', 'tpu'), 'tokamax'),
  'xla': Implementation('library', _library('jax.nn', implementation='xla'), _WINDOWED),
  'reference': Implementation('T x T', _ours('reference')),  # the definition, in float32
  'release': Implementation('T x T', _in_jax(_release), _RELEASED),  # compiled by XLA
}
