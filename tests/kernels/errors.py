"""Errors of the elementary functions in GPU tiles, in a model of the instructions.

The model is what NVIDIA documents (PTX ISA, ex2 and rcp): `ex2.approx.ftz.f32` within 2^-22
of the true value, `rcp.approx.ftz.f32` within one unit in the last place, numbers below 2^-126
flushed to zero before and after. Both err as far as they may, upwards and downwards, and the
worst counts. What surrounds them is `kernels/arithmetic.py` itself.
"""

import itertools

import jax.numpy as jnp
import numpy as np

import sink_jax as sj
from sink_jax.kernels.arithmetic import LOG2E, MASKED, Approximate

TINY = 2.0**-126  # the smallest normal number
HEAD_DIM = 96
SCALE = 1 / np.sqrt(HEAD_DIM)
POINTS = 2000
# Rounding to float32, and the documented errors of both instructions.
ROUND, EX2, RCP = 2.0**-24, 2.0**-22, 2.0**-23


def flushed(x):
  """float32, without subnormal numbers."""
  with np.errstate(over='ignore', under='ignore'):
    x = np.asarray(x, np.float64).astype(np.float32)
  return np.where(np.abs(x) < np.float32(TINY), np.float32(0), x)


def modelled(exp2_error=0, reciprocal_error=0):
  """The arithmetic of GPUs whose instructions err by these parts of what they may, -1 to 1."""
  wide = lambda *args: (np.asarray(x, np.float64) for x in args)

  def exp2(x):
    with np.errstate(over='ignore'):
      return flushed(np.exp2(np.float64(flushed(x))) * (1 + exp2_error * EX2))

  def reciprocal(x):
    with np.errstate(divide='ignore'):
      y = (1 / np.float64(flushed(x))).astype(np.float32)
    return flushed(np.float64(y) + reciprocal_error * np.where(y, np.spacing(y), 0))

  def less_product(z, x, y):  # products of two float32 numbers are whole in float64
    z, x, y = wide(z, x, y)
    return (z - x * y).astype(np.float32)

  return Approximate(exp2=exp2, reciprocal=reciprocal, less_product=less_product)


MODELS = [modelled(*errors) for errors in itertools.product((-1, 0, 1), repeat=2)]


def between(low, high):
  """Scores q.k, float32, whose s = q.k / sqrt(Dh) lies in a range; its ends among them."""
  inside = np.random.default_rng(0).uniform(low, high, POINTS)
  return jnp.asarray(np.concatenate([[low, high], inside]) / SCALE, jnp.float32)


def row(what, low, high, computed, truth, bound):
  """One line of the table: the largest errors between two scores, upwards or downwards.

  computed: of an arithmetic; truth and bound, of the absolute error, at the same points.
  """
  truth, bound = np.float64(truth), np.broadcast_to(np.float64(bound), np.shape(truth))
  normal = np.abs(truth) > 2 * TINY

  results = [np.float64(computed(arithmetic)) for arithmetic in MODELS]
  assert all(np.isfinite(x).all() for x in results), what
  absolute = np.max([np.abs(x - truth) for x in results], 0)
  return {'what': what, 'low': low, 'high': high, 'absolute': absolute.max(),
          'relative': (absolute[normal] / np.abs(truth[normal])).max(initial=0),
          'of_bound': (absolute / bound).max()}


def exp_bound(truth, exponent, roundings, power=1):
  """Of truth = 2^exponent, where the parts of the exponent were rounded at these sizes.

  With a power the exponent is rounded once more; then come ex2 and the result's rounding.
  """
  size = power * roundings + (power != 1) * np.abs(exponent)
  return truth * (EX2 + ROUND + np.log(2) * ROUND * size) * 1.01 + 2 * TINY


def exp_rows():
  """exp(s - m) as in the forward pass, exp(s - lse) as in the backward pass: also its slope."""
  for largest, (low, high) in itertools.product(
      (0., 100.), ((-1, 0), (-10, -1), (-40, -10), (-87, -40), (-1000, -87))):
    maximum = jnp.float32(largest / SCALE)
    s = between(largest + low, largest + high)
    x = (np.float64(s) - np.float64(maximum)) * SCALE
    # The factor and the result are rounded at the size of the exponent, the row's part alone.
    roundings = 2 * np.abs(x) * LOG2E + largest * LOG2E
    for power in (1, 2, .5):
      exponent, truth = power * x * LOG2E, np.exp(power * x)
      yield row(f'exp(s - m)^{power:g}, m = {largest:g}', low, high,
                lambda a: a.exp2(a.from_maximum(s, maximum, SCALE) * np.float32(power)),
                truth, exp_bound(truth, exponent, roundings, power))
    if high == 0:  # what all keys have in common leaves with the sum
      alone = 2 * exp_bound(1, 0, 2 * np.abs(x).max() * LOG2E)
      share = lambda p: np.float64(p) / np.float64(p).sum()
      yield row(f'exp(s - m) / sum, m = {largest:g}', low, high,
                lambda a: share(a.exp2(a.from_maximum(s, maximum, SCALE))),
                share(np.exp(x)), share(np.exp(x)) * alone)
    log = jnp.float32(largest + .3)
    x = np.float64(s) * SCALE - np.float64(log)
    roundings = 2 * np.abs(x) * LOG2E + 3 * largest * LOG2E + 1  # two factors that differ
    yield row(f'exp(s - lse), lse = {float(log):.1f}', low, high,
              lambda a: a.exp2(a.from_log(s, log, SCALE)), np.exp(x),
              exp_bound(np.exp(x), x * LOG2E, roundings))


def sigmoid_rows():
  """f = 1 / (1 + exp(-s)) and f' = f (1 - f)."""
  for low, high in ((-1e30, -104), (-104, -87), (-87, -40), (-40, -10), (-10, -1), (-1, 1),
                    (1, 10), (10, 17), (17, 88), (88, 1e30)):
    s = between(low, high)
    x = np.float64(s) * SCALE
    e = np.exp(-np.abs(x))  # of the tail that is nearer
    f, rest = np.where(x < 0, e, 1) / (1 + e), np.where(x < 0, 1, e) / (1 + e)
    # exp(-s) has the share 1 - f in 1 + exp(-s), which is rounded; then comes the reciprocal.
    inner = rest * (EX2 + ROUND + np.log(2) * ROUND * 2 * np.minimum(np.abs(x), 1e3) * LOG2E)
    bound = f * (inner + ROUND + RCP) * 1.01 + 2 * TINY
    yield row('sigmoid', low, high, lambda a: a.weights(sj.Sigmoid(), s, SCALE), f, bound)
    # f - f^2 is rounded once, but as f goes to 1 the error of f stays.
    yield row('slope of sigmoid', low, high,
              lambda a: a.weights_and_slopes(sj.Sigmoid(), s, SCALE)[1], f * rest,
              np.abs(1 - 2 * f) * bound + bound**2 + 1.01 * ROUND * f * rest + 2 * TINY)


def masked_weights(largest):
  """What a masked score counts for where s = largest is the maximum of its row."""
  s, maximum = jnp.full(1, MASKED), jnp.float32(largest / SCALE)
  return [float(model.exp2(model.from_maximum(s, maximum, SCALE) * np.float32(power))[0])
          for model in MODELS for power in (1, 2, .5)]


def rows():
  """All lines of the table."""
  return [*exp_rows(), *sigmoid_rows()]
