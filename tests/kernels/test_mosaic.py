"""The kernels by Mosaic GPU, interpreted on a CPU: values, gradients, races and planted errors.

    python -m tests.kernels.test_mosaic sigmoid 'wait 0'  # cases and planted errors by their names

The interpreter blocks one XLA thread for every warpgroup, and it waits for ever if no other thread
is free. So the cases run in processes with enough devices.
"""

import faulthandler
import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sink_jax as sj
from sink_jax.kernels import flash
from sink_jax.kernels.epilogue import PartialAttention
from tests.kernels.test_flash import plain_rows
from tests.kernels.test_refusals import HAS_MOSAIC
from tests.train.runs import run_python

needs_mosaic = pytest.mark.skipif(not HAS_MOSAIC, reason='needs jax 0.11.2')


def spec(**components):
  return sj.AttentionSpec(**{'position': sj.Nope()} | components)


# {name: (spec, length, heads, key heads, head dimension, (warpgroups, rows of other tiles))}
CASES = {
  'softmax': (spec(), 256, 2, 1, 64, (1, 64)),
  'sigmoid': (spec(similarity=sj.Sigmoid(), normalizer=sj.Unnormalized()), 100, 1, 1, 64, (1, 64)),
  'window': (spec(mask=sj.Window(size=40), normalizer=sj.PNorm(p=2.0)), 180, 2, 1, 96, (2, 128)),
  'prefix': (
    spec(mask=sj.Prefix(length=70), similarity=sj.Sigmoid(), normalizer=sj.PNorm(p=0.5)),
    130,
    2,
    2,
    128,
    (1, 64),
  ),
  'capped': (spec(position=sj.Alibi(), similarity=sj.CappedExp(cap=2.0)), 130, 2, 1, 64, (1, 64)),
  'identity': (spec(similarity=sj.Linear(), normalizer=sj.AbsFloor()), 128, 4, 2, 64, (2, 64)),
  'squared relu': (
    spec(similarity=sj.SquaredRelu(), normalizer=sj.Count()),
    70,
    1,
    1,
    32,
    (1, 128),
  ),
}
FEW = ('softmax', 'sigmoid', 'window')


def computed(rows, inputs, cotangents):
  """Leaves of rows(*inputs) and, given cotangents, of the cotangents of the inputs; float32."""

  def both(inputs, cotangents):
    if cotangents is None:
      return rows(*inputs)
    result, pull = jax.vjp(rows, *inputs)
    return result, pull(jax.tree.map(lambda x, like: x.astype(like.dtype), cotangents, result))

  return [np.asarray(x, np.float32) for x in jax.tree.leaves(jax.jit(both)(inputs, cotangents))]


def prepared(name):
  """A case: its variant, a function for its rows by interpreted kernels, and its inputs."""
  from jax.experimental.pallas import mosaic_gpu as plgpu

  from sink_jax.kernels import flash_mosaic

  attention, length, heads, kv_heads, head_dim, (warpgroups, other) = CASES[name]
  blocks = flash_mosaic.MosaicBlocks(warpgroups, other, 2)
  flash_mosaic.BLOCKS = dict.fromkeys(flash_mosaic.BLOCKS, blocks)
  interpreter = plgpu.InterpretGPUParams(detect_races=True)  # reports a race as an error

  def interpreted(kernels, layout, spec, backend, q, *arrays):
    slopes = jnp.asarray(spec.position.slopes(q.shape[2]), jnp.float32)
    return flash.on_gpu(flash_mosaic.call, kernels, spec, slopes, q, *arrays, interpret=interpreter)

  # Leaves out the primitive. It declares no effects, but the interpreter has effects.
  flash._on_every_device = interpreted
  rng = np.random.default_rng(0)
  q, k, v = (
    jnp.asarray(rng.standard_normal((1, length, h, head_dim)), jnp.bfloat16)
    for h in (heads, kv_heads, kv_heads)
  )
  return attention, lambda *inputs: flash.rows(attention, *inputs, 'mosaic'), (q, k, v)


def check(name, gradients=True):
  """Compares rows, statistics and gradients with the T x T definition."""
  attention, rows, inputs = prepared(name)
  rng = np.random.default_rng(1)
  batch, length, heads, _ = inputs[0].shape
  draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.bfloat16).astype(jnp.float32)
  statistic = batch, heads, length
  cotangents = PartialAttention(draw(*inputs[0].shape), draw(*statistic), draw(*statistic))
  cotangents = cotangents if gradients else None
  actual = computed(rows, inputs, cotangents)
  exact = [x.astype(jnp.float32) for x in inputs]
  expected = computed(lambda *x: plain_rows(attention, *x), exact, cotangents)
  for what, a, b in zip(('out', 'stat', 'power stat', 'dq', 'dk', 'dv'), actual, expected):
    error = np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-9)
    # Statistics are float32. Other results, and the weights before them, are rounded to bfloat16:
    # 2^-9 each.
    limit = 1e-6 if 'stat' in what else 2**-7
    assert error < limit, f'{name}: {what} has an error of {error:.1e}, more than {limit:.1e}'


# {planted error: how it is detected}. The waits come in the order of the program: for a free
# buffer, for what belongs to a warpgroup, for a tile without the mask.
ERRORS = {
  'wait 0': 'race',
  'wait 1': 'race',
  'wait 2': 'race',
  'commit': 'race',
  'mask': 'out has an error',
}


def check_finds(name):
  """Checks that the interpreter detects a planted error of the forward kernel."""
  from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

  from sink_jax.kernels import flash_mosaic

  calls, wait = itertools.count(), flash_mosaic.plgpu.barrier_wait
  with pytest.MonkeyPatch.context() as patch:
    if name.startswith('wait'):
      patch.setattr(
        flash_mosaic.plgpu,
        'barrier_wait',
        lambda barrier: None if next(calls) == int(name.split()[1]) else wait(barrier),
      )
    elif name == 'commit':
      patch.setattr(flash_mosaic.plgpu, 'commit_smem', lambda: None)
    else:
      patch.setattr(flash_mosaic.MosaicTile, 'keep', lambda tile, i, j: j < i)
    try:
      check('softmax', gradients=False)
    except Exception as error:
      assert ERRORS[name] in str(error).lower(), f'{name}: {error}'
    else:
      raise AssertionError(f'{name} was not found')
    finally:
      gpu_callbacks.reset_gpu_interpret_mode_state()


def run(*names):
  run_python('-m', 'tests.kernels.test_mosaic', *names, devices=8)


@needs_mosaic
def test_values_and_gradients_without_races():
  run(*FEW)


@needs_mosaic
@pytest.mark.full  # the interpreter takes several seconds for each case
def test_more_values_and_gradients():
  run(*(CASES.keys() - set(FEW)))


@needs_mosaic
def test_the_interpreter_finds_planted_errors():
  run(*ERRORS)


if __name__ == '__main__':
  faulthandler.dump_traceback_later(300, exit=True)  # ends even if threads wait for each other
  for case in sys.argv[1:]:
    (check if case in CASES else check_finds)(case)
