"""Our implementations of attention and the alternatives to them, behind one interface.

`prepare(name, work)` compiles one and returns `Programs`; what cannot run raises.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sink_jax.attention.mask import Causal, Window
from sink_jax.attention.normalizer import RowSum
from sink_jax.attention.param import Dims, Param
from sink_jax.attention.similarity import Exp
from sink_jax.attention.spec import AttentionSpec
from sink_jax.benchmark import baselines_torch, machine, official
from sink_jax.kernels import linear
from sink_jax.kernels.dispatch import attend, platform


class Work(NamedTuple):
  """One attention operation: shape is (B, H, T, Dh), dtype the name of the inputs' dtype.

  calls: that a program of JAX makes, one after the other, so that starting it weighs less.
  """

  spec: AttentionSpec
  shape: tuple[int, int, int, int]
  dtype: str
  seed: int
  calls: int = 1


class Programs(NamedTuple):
  """Forward, and forward with backward: f(n) starts n programs and returns their seconds.

  A program makes `calls` calls.
  Bytes are the peak beside the inputs; None where it is not known before running, and then
  `measured_bytes()` runs the second one to find out.
  """

  forward: Callable[[int], float]
  both: Callable[[int], float]
  forward_bytes: int | None = None
  both_bytes: int | None = None
  measured_bytes: Callable[[], int] | None = None
  calls: int = 1


class Baseline(NamedTuple):
  """kind: 'ours', 'T x T' or 'library'. covers: is it meant for this spec? A name without
  that is not refused: asked for, it runs or says why it does not."""

  kind: str
  covers: Callable[[AttentionSpec], bool]
  title: str


def plain_softmax(spec: AttentionSpec) -> bool:
  """Can a softmax library compute this: no bias, no bias slot, causal or a window?"""
  # By class: what another one does, even a subclass, the libraries cannot know.
  return (isinstance(spec.similarity, Exp) and isinstance(spec.normalizer, RowSum)
          and type(spec.mask) in (Causal, Window) and not spec.position.has_bias
          and not spec.kv_bias.has_extra_key)


_ALL = lambda spec: True
BASELINES = {
    'pallas': Baseline('ours', _ALL, 'our kernels'),
    'linear': Baseline('ours', lambda spec: linear.unsupported(spec) is None, 'running sums, O(T)'),
    'chunked': Baseline('ours', _ALL, 'XLA, O(T) memory'),
    'cudnn': Baseline('library', plain_softmax, 'cuDNN'),
    'splash': Baseline('library', plain_softmax, 'splash attention'),
    'tokamax': Baseline('library', plain_softmax, 'tokamax'),
    'xla': Baseline('library', plain_softmax, 'jax.nn, XLA'),
    'reference': Baseline('T x T', _ALL, 'the definition, float32'),
    'release': Baseline('T x T', _ALL, 'the release, compiled by XLA'),
    'torch-flash': Baseline('library', baselines_torch.flash_covers, 'PyTorch SDPA, flash'),
    'torch-flex': Baseline('library', baselines_torch.flex_covers, 'PyTorch FlexAttention'),
    'torch-eager': Baseline('T x T', baselines_torch.eager_covers, 'the release, PyTorch eager'),
}
OURS = [name for name, rival in BASELINES.items() if rival.kind == 'ours']
OTHERS = [name for name, rival in BASELINES.items() if rival.kind != 'ours']


def missing(name: str) -> str | None:
  """Why a rival runs nothing at all on this machine, or None."""
  wanted = {'cudnn': 'cuda', 'splash': 'tpu'}.get(name, platform())
  if wanted != platform():
    return f'needs {"an NVIDIA GPU" if wanted == "cuda" else "a TPU"}, not {platform()}'
  if name == 'tokamax' and importlib.util.find_spec('tokamax') is None:
    return 'tokamax is not installed'
  return baselines_torch.missing() if name.startswith('torch-') else None


def prepare(name: str, work: Work) -> Programs:
  """Compiles a rival for some work.

  Raises:
    NotImplementedError: it does not run this here, with the reason; others as they come.
  """
  if reason := missing(name):
    raise NotImplementedError(reason)
  if name.startswith('torch-'):
    return Programs(*baselines_torch.programs(name, work))
  f = _function(name, work.spec)
  inputs, cotangent = random_inputs(work)

  def both(inputs, cotangent):
    out, pull = jax.vjp(f, *inputs)
    return out, pull(cotangent.astype(out.dtype))

  program = lambda g: jax.jit(repeated(g, work.calls) if work.calls > 1 else g)
  forward = program(lambda inputs: f(*inputs)).lower(inputs).compile()
  backward = program(both).lower(inputs, cotangent).compile()
  return Programs(runs(forward, inputs), runs(backward, inputs, cotangent),
                  machine.compiled_bytes(forward), machine.compiled_bytes(backward),
                  calls=work.calls)


def repeated(f: Callable[..., Any], calls: int) -> Callable[..., jax.Array]:
  """A function that makes so many calls of f on the same arrays, each after the one before.

  It returns a sum of one number of every result. Barriers keep XLA from taking the call out of
  the loop, and from computing those numbers alone.
  """
  def program(*arrays):
    def call(total, _):
      inputs, total = jax.lax.optimization_barrier((arrays, total))
      results = jax.tree.leaves(jax.lax.optimization_barrier(f(*inputs)))
      return sum((result.ravel()[0].astype(jnp.float32) for result in results), total), None

    return jax.lax.scan(call, jnp.float32(0), length=calls)[0]

  return program


def runs(f, *arrays) -> Callable[[int], float]:
  """f(n) that makes n calls, one queued behind the other, and returns their seconds."""
  wait = platform() == 'cpu'  # where calls that are queued may run side by side

  def elapsed(n):
    began = time.perf_counter()
    for _ in range(n):
      out = f(*arrays)
      if wait:
        jax.block_until_ready(out)
    jax.block_until_ready(out)
    return time.perf_counter() - began

  return elapsed


def random_inputs(work: Work):
  """((q, k, v, params), cotangent of the output): standard normal, k* and v* as they start."""
  heads, head_dim = work.shape[1], work.shape[3]
  q, k, v, do = _arrays(work.shape, work.dtype, work.seed)
  params = jax.tree.map(
      lambda p: 0.02 * machine.random(work.seed, p.shape, jnp.float32),
      work.spec.params(Dims(heads, heads, head_dim)), is_leaf=lambda x: isinstance(x, Param))
  return (q, k, v, params), do


@functools.lru_cache(maxsize=4)  # rows of one shape share them
def _arrays(shape, dtype, seed):
  batch, heads, length, head_dim = shape
  return [machine.random(4 * seed + n, (batch, length, heads, head_dim), dtype) for n in range(4)]


def _function(name, spec) -> Callable[..., Any]:
  """f(q, k, v, params) of a rival in JAX."""
  if name == 'release':
    return functools.partial(official.attend, spec)
  if name not in ('xla', 'tokamax'):
    return functools.partial(attend, spec, implementation=name)
  if not plain_softmax(spec):
    raise NotImplementedError('computes softmax, causal or in a window, without bias')
  window = (spec.mask.window - 1, 0) if spec.mask.window else None
  if name == 'xla':
    library = functools.partial(jax.nn.dot_product_attention, implementation='xla')
  else:
    library = importlib.import_module('tokamax').dot_product_attention
    if platform() == 'cpu':
      library = functools.partial(library, implementation='xla')
  return lambda q, k, v, params: library(q, k, v, is_causal=True, local_window_size=window)
