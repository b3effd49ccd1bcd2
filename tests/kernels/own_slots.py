"""Similarities and masks of a user's own, in every implementation.

Run by test_own_slots.py in a process of its own, because a slot class is a choice of its slot
as soon as it exists.
"""


import jax
import jax.numpy as jnp
import numpy as np

import sink_jax as sj
from sink_jax.kernels import flash, flash_gpu, flash_tpu, gpu_layout, tpu_layout
from tests.attention_specs import random_inputs


class Softplus(sj.Sigmoid):
  def __call__(self, s):
    return jax.nn.softplus(s)


class Cube(sj.Linear):
  def __call__(self, s):
    return s ** 3


class Strictly(sj.Causal):
  """Keys before the query: the first query sees none."""

  def keep(self, i, j):
    return j < i

  def key_range(self, first, last, keys):
    return 0, min(last, keys)


class Unlimited(sj.Causal):
  """A range that holds keys which the mask hides."""

  def keep(self, i, j):
    return (j <= i) & (j > i - 5)


SPECS = [
    sj.AttentionSpec(Softplus(), sj.Unnormalized()), sj.AttentionSpec(Cube(), sj.AbsFloor()),
    sj.AttentionSpec(mask=Strictly()),
    sj.AttentionSpec('Sigmoid()', 'Unnormalized()', mask=Strictly()),
    sj.AttentionSpec('Linear()', 'Unnormalized()', mask=Strictly(), position=sj.Nope())]


def check(spec):
  q, k, v, _ = random_inputs(spec, length=13, heads=2, head_dim=8)
  alpha = sj.importance(sj.attention_map(spec, q, k), raw=True)

  def results(name):
    f = lambda *x: jnp.sum(sj.attend(spec, *x, implementation=name) ** 2)
    return jax.tree.leaves(jax.jit(jax.value_and_grad(f, (0, 1, 2)))(q, k, v))

  expected = results('reference')
  # The default first: the choice must see that a subclass is another function or mask.
  for name, kernels in ((None, None), ('pallas', flash_tpu), ('pallas', flash_gpu)):
    flash._INTERPRETED = kernels
    for a, b in zip(results(name), expected, strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4, err_msg=f'{name} {spec}')
    raw = sj.streaming_importance(spec, q, k, implementation=name).raw
    np.testing.assert_allclose(raw, alpha, rtol=1e-5, atol=1e-5)


def main():
  tpu_layout._BLOCK = tpu_layout._LANES = 8
  gpu_layout._FLOAT32 = gpu_layout.Blocks(8, 4, 4, 1)
  for spec in SPECS:
    check(spec)
  spec = sj.AttentionSpec(mask=Unlimited())
  q, k, v, _ = random_inputs(spec, length=13, heads=2, head_dim=8)
  try:
    sj.attend(spec, q, k, v, implementation='pallas')
  except ValueError as error:
    assert 'disagree about the keys of query 5, of 13' in str(error), error
  else:
    raise AssertionError('a range that is too wide was not noticed')


if __name__ == '__main__':
  main()
