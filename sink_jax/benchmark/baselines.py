"""Our implementations of attention and the baselines beside them, behind one interface.

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

from sink_jax.attention.head import PlainOutput
from sink_jax.attention.mask import Causal, Window
from sink_jax.attention.normalizer import RowSum
from sink_jax.attention.param import Dims, Param
from sink_jax.attention.similarity import Exp
from sink_jax.attention.spec import AttentionSpec
from sink_jax.benchmark import baselines_torch, machine, official
from sink_jax.benchmark.work import Programs, Work
from sink_jax.kernels import linear
from sink_jax.kernels.dispatch import attend, platform


class Baseline(NamedTuple):
  """An implementation of attention that is timed.

  kind: 'ours', 'T x T' (it materialises the weights) or 'library'.
  covers: whether it is meant for a spec. A user who asks for it by name with another spec is
  not refused: the row then holds its times or its error.
  """

  kind: str
  covers: Callable[[AttentionSpec], bool]


def plain_softmax(spec: AttentionSpec) -> bool:
  """Whether a softmax library computes it: no bias, extra key or gate, causal or a window."""
  # By class: what another one does, even a subclass, the libraries cannot know.
  return (isinstance(spec.similarity, Exp) and isinstance(spec.normalizer, RowSum)
          and type(spec.mask) in (Causal, Window) and not spec.position.has_bias
          and not spec.kv_bias.has_extra_key and type(spec.head) is PlainOutput)


_ALL = lambda spec: True
# By the names of the options --implementations ('ours') and --rivals (the others).
BASELINES = {
    'pallas': Baseline('ours', _ALL),
    'linear': Baseline('ours', lambda spec: linear.unsupported(spec) is None),
    'chunked': Baseline('ours', _ALL),
    'cudnn': Baseline('library', plain_softmax),
    'splash': Baseline('library', plain_softmax),
    'tokamax': Baseline('library', plain_softmax),
    'xla': Baseline('library', plain_softmax),
    'reference': Baseline('T x T', _ALL),  # the definition, in float32
    # As the official implementation, compiled by XLA.
    'release': Baseline('T x T', official.covers),
    'torch-flash': Baseline('library', baselines_torch.flash_covers),
    'torch-flex': Baseline('library', baselines_torch.flex_covers),
    'torch-eager': Baseline('T x T', baselines_torch.eager_covers),  # the same, not compiled
}
OURS = [name for name, baseline in BASELINES.items() if baseline.kind == 'ours']
OTHERS = [name for name, baseline in BASELINES.items() if baseline.kind != 'ours']


def missing(name: str) -> str | None:
  """The reason why a baseline runs nothing at all on this machine, or None."""
  # A name without a platform of its own wants the one that is here.
  wanted = {'cudnn': 'cuda', 'splash': 'tpu'}.get(name, platform())
  if wanted != platform():
    return f'needs {"an NVIDIA GPU" if wanted == "cuda" else "a TPU"}, not {platform()}'
  if name == 'tokamax' and importlib.util.find_spec('tokamax') is None:
    return 'tokamax is not installed'
  return baselines_torch.missing() if name.startswith('torch-') else None


def prepare(name: str, work: Work) -> Programs:
  """Compiles one of BASELINES for some work.

  Raises:
    NotImplementedError: it does not run this here; the message is the reason.
    Exception: whatever else a library raises.
  """
  if reason := missing(name):
    raise NotImplementedError(reason)
  if name.startswith('torch-'):
    return baselines_torch.programs(name, work)
  f = _function(name, work.spec)
  inputs, cotangent = random_inputs(work)

  def both(inputs, cotangent):
    # The transpose takes a cotangent in the dtype of the result alone, which is not always that of
    # the inputs.
    out, pull = jax.vjp(f, *inputs)
    return out, pull(cotangent.astype(out.dtype))

  # Compiled before the first call, so that the memory is known before anything runs.
  program = lambda g: jax.jit(repeated(g, work.calls) if work.calls > 1 else g)
  forward = program(lambda inputs: f(*inputs)).lower(inputs).compile()
  backward = program(both).lower(inputs, cotangent).compile()
  return Programs(runs(forward, inputs), runs(backward, inputs, cotangent),
                  machine.compiled_bytes(forward), machine.compiled_bytes(backward),
                  calls=work.calls)


def repeated(f: Callable[..., Any], calls: int) -> Callable[..., jax.Array]:
  """A function that makes so many calls of f on the same arrays, each after the one before.

  It returns a sum of one number of every result.
  """
  def program(*arrays: Any) -> jax.Array:
    def call(total, _):
      # The inputs are the same in every call, so XLA would make one call and take it out of the
      # loop: behind a barrier together with the running total, they look new each time. The
      # second barrier keeps it from computing the summed numbers alone.
      inputs, total = jax.lax.optimization_barrier((arrays, total))
      results = jax.tree.leaves(jax.lax.optimization_barrier(f(*inputs)))
      for result in results:
        total = total + result.ravel()[0].astype(jnp.float32)
      return total, None

    return jax.lax.scan(call, jnp.float32(0), length=calls)[0]

  return program


def runs(f: Callable[..., Any], *arrays: Any) -> Callable[[int], float]:
  """A function of n that makes n calls of f and returns the seconds that they took.

  Calls are queued one behind the other, so that a device never waits for the host; a CPU would
  run queued calls side by side, so there each is waited for.
  """
  wait = platform() == 'cpu'

  def elapsed(n):
    began = time.perf_counter()
    for _ in range(n):
      out = f(*arrays)
      if wait:
        jax.block_until_ready(out)
    jax.block_until_ready(out)
    return time.perf_counter() - began

  return elapsed


def random_inputs(work: Work) -> tuple[tuple[Any, ...], jax.Array]:
  """((q, k, v, params), cotangent of the output): standard normal numbers, (B, T, H, Dh).

  Parameters are as small as those that a model starts with.
  """
  heads, head_dim = work.shape[1], work.shape[3]
  q, k, v, do = _arrays(work.shape, work.dtype, work.seed)
  params = jax.tree.map(
      lambda p: 0.02 * machine.random(work.seed, p.shape, jnp.float32),
      work.spec.params(Dims(heads, heads, head_dim)), is_leaf=lambda x: isinstance(x, Param))
  return (q, k, v, params), do


@functools.lru_cache(maxsize=4)  # rows of one shape share them
def _arrays(shape, dtype, seed):
  batch, heads, length, head_dim = shape
  # Four seeds for the four arrays: two different seeds of a command share none.
  return [machine.random(4 * seed + n, (batch, length, heads, head_dim), dtype) for n in range(4)]


def _function(name, spec) -> Callable[..., Any]:
  """f(q, k, v, params) of an implementation in JAX."""
  if name == 'release':
    return functools.partial(official.attend, spec)
  if name not in ('xla', 'tokamax'):
    return functools.partial(attend, spec, implementation=name)
  if not plain_softmax(spec):
    raise NotImplementedError('computes softmax, causal or in a window, without bias')
  # The libraries count the keys before the query, without its own.
  window = (spec.mask.window - 1, 0) if spec.mask.window else None
  if name == 'xla':
    library = functools.partial(jax.nn.dot_product_attention, implementation='xla')
  else:
    # By name, since tokamax is optional and no dependency. Its kernels are for GPUs and TPUs; on a
    # CPU it has its plain form in XLA alone.
    library = importlib.import_module('tokamax').dot_product_attention
    if platform() == 'cpu':
      library = functools.partial(library, implementation='xla')
  return lambda q, k, v, params: library(q, k, v, is_causal=True, local_window_size=window)
