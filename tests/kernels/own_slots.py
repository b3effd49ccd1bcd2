"""User-defined similarities and masks run in every implementation without a change to a kernel.

test_flash.py runs this in a separate process, because a slot class becomes a choice of its slot as
soon as it is defined.
"""

import jax
import jax.numpy as jnp
import numpy as np

import sink_jax as sj
from sink_jax.kernels import flash, flash_gpu, flash_tpu
from tests.attention_specs import random_inputs


class Cube(sj.Linear):
  def __call__(self, s):
    return s**3


class Strictly(sj.Causal):
  """Shows only keys before the query, so the first query sees none."""

  def keep(self, i, j):
    return j < i

  def key_range(self, first, last, keys):
    return 0, min(last, keys)


class Unlimited(sj.Causal):
  """Its key range includes keys that the mask hides."""

  def keep(self, i, j):
    return (j <= i) & (j > i - 5)


def check(spec, name, kernels):
  q, k, v, _ = random_inputs(spec, length=13, heads=2, head_dim=8)
  results = lambda name: jax.tree.leaves(
    jax.jit(
      jax.value_and_grad(
        lambda *x: jnp.sum(sj.attend(spec, *x, implementation=name) ** 2), (0, 1, 2)
      )
    )(q, k, v)
  )
  flash._INTERPRETED = kernels
  for a, b in zip(results(name), results('reference'), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4, err_msg=f'{name} {spec}')
  alpha = sj.importance(sj.attention_map(spec, q, k), raw=True)
  np.testing.assert_allclose(sj.streaming_importance(spec, q, k).raw, alpha, rtol=1e-5, atol=1e-5)


if __name__ == '__main__':
  flash_tpu._BLOCK = flash_tpu._LANES = 8
  flash_gpu._FLOAT32 = flash_gpu.TritonBlocks(8, 4, 4, 1)
  for slots in (
    dict(similarity=Cube(), normalizer=sj.AbsFloor()),
    dict(mask=Strictly()),
    dict(similarity='Sigmoid()', normalizer='Unnormalized()', mask=Strictly()),
  ):
    for implementation, kernels in ((None, 'tpu'), ('pallas', 'tpu'), ('pallas', 'cuda')):
      check(sj.AttentionSpec(**slots), implementation, kernels)
  try:
    check(sj.AttentionSpec(mask=Unlimited()), 'pallas', 'tpu')
  except ValueError as error:
    assert 'disagree about the keys of query 5, of 13' in str(error), error
  else:
    raise AssertionError('a range that is too wide was not noticed')
