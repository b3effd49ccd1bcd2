"""The attention variants that the tests use."""

import itertools

import jax
import numpy as np

import sink_jax as sj
from sink_jax.attention.spec import COMPONENTS
from sink_jax.component import registry
from tests.attention_variants import variant


def slot_values():
  """{slot: every value to test}. New slot classes are included automatically."""
  values = {}
  for slot, base in COMPONENTS.items():
    defaults = [cls() for cls in registry(base).values()]
    values[slot] = [x for value in defaults for x in (value, *variant(slot, value).more)]
  return values


def legal(slots):
  """The spec, or None if the combination is refused."""
  try:
    return sj.AttentionSpec(**slots)
  except ValueError:
    return None


def parts(spec):
  """What a spec combines: its values, ((component, value),), and its pairs of classes."""
  chosen = [(name, getattr(spec, name)) for name in COMPONENTS]
  classes = [(name, type(value)) for name, value in chosen]
  return {*zip(chosen), *itertools.combinations(classes, 2)}


def pairwise_specs():
  """Specs with every value and every legal pair of classes, and the pairs that no spec has.

  They are few, and the same on every call.
  """
  values, rng = slot_values(), np.random.default_rng(0)
  missing = {((name, x),) for name, own in values.items() for x in own}
  classes = {name: {(name, type(x)) for x in own} for name, own in values.items()}
  for two in itertools.combinations(classes.values(), 2):
    missing |= {*itertools.product(*two)}
  specs, impossible = [], set()
  for part in sorted(missing, key=repr):
    if part not in missing:
      continue
    choices = dict(values)
    for name, what in part:
      choices[name] = [x for x in values[name] if what in (x, type(x))]
    draw = lambda: {name: own[rng.integers(len(own))] for name, own in choices.items()}
    drawn = (legal(draw()) for _ in range(200))
    some = itertools.islice(filter(None, drawn), 20)
    best = max(some, key=lambda spec: len(parts(spec) & missing), default=None)
    if best is None:
      impossible.add(part)
    else:
      specs.append(best)
      missing -= parts(best)
  return specs, impossible


# What the paper trains, by table, and operations beyond it. Absolute and learnable positions join
# embeddings: for attention they are NoPE.
PAPER = {
  'softmax': {},
  'nope (Table 3)': dict(position='Nope()'),
  'relative (Table 3)': dict(position='Relative()'),
  'alibi (Table 3)': dict(position='Alibi()'),
  'window (Figure 6)': dict(mask='Window(size=3)'),
  'prefix (Figure 5)': dict(mask='Prefix(length=3)'),
  'kv bias (Table 4)': dict(kv_bias='KVBias()'),
  'k bias (Table 4)': dict(kv_bias='KBias()'),
  'v bias (Table 4)': dict(kv_bias='VBias()'),
  'v* = 5 v1 (Table 5)': dict(kv_bias="KBias(value='first', value_norm=5.0)"),
  'v* = 5 v2 (Table 5)': dict(kv_bias="KBias(value='uniform', value_norm=5.0)"),
  'd_a = 2 (Table 13)': dict(kv_bias='KBias(learnable_dims=2)'),
  'shared kv bias (Table 12)': dict(kv_bias='KVBias(shared=True)'),
  'shared k bias (Table 12)': dict(kv_bias='KBias(shared=True)'),
  'scale (Table 14)': dict(normalizer='RowSum(scale=0.2)'),
  'p-norm softmax 1/2 (Figure 29)': dict(normalizer='PNorm(p=0.5)'),
  'p-norm softmax 2 (Figure 29)': dict(normalizer='PNorm(p=2.0)'),
  'p-norm sigmoid 2 (Figure 29)': dict(similarity='Sigmoid()', normalizer='PNorm(p=2.0)'),
  'sigmoid (Table 15)': dict(similarity='Sigmoid()', normalizer='Unnormalized()'),
  'normalized sigmoid (Table 15)': dict(similarity='Sigmoid()', normalizer='RowSum(eps=1e-8)'),
  'elu (Table 15)': dict(similarity='EluPlusOne()', normalizer='Unnormalized()'),
  'normalized elu (Table 15)': dict(similarity='EluPlusOne()', normalizer='RowSum(eps=1e-8)'),
  'normalized elu map (Table 15)': dict(
    similarity='Linear()', feature_map='EluPlusOne()', normalizer='RowSum(eps=1e-8)'
  ),
  'elu map (Table 15)': dict(
    similarity='Linear()', feature_map='EluPlusOne()', normalizer='Unnormalized()'
  ),
  'normalized identity (Table 15)': dict(similarity='Linear()', normalizer='AbsFloor()'),
  'identity (Table 15)': dict(similarity='Linear()', normalizer='Unnormalized()'),
  'normalized mlp (Table 15)': dict(
    similarity='Linear()', feature_map='Mlp()', normalizer='AbsFloor()'
  ),
  'mlp (Table 15)': dict(similarity='Linear()', feature_map='Mlp()', normalizer='Unnormalized()'),
  'softpick': dict(similarity='Softpick()', normalizer='AbsSum()'),
}
PAPER = {name: sj.AttentionSpec(**components) for name, components in PAPER.items()}


def random_inputs(spec, batch=1, length=7, heads=3, kv_heads=None, head_dim=4, seed=0):
  """q, k, v and parameters of the components, standard normal, float32.

  Kernels of feature maps are divided by sqrt(head_dim), as scores of hundreds would be rounded.
  If the spec reads the block's input, it comes as a fifth array, see `attend`.
  """
  rng = np.random.default_rng(seed)
  normal = lambda *shape: np.asarray(rng.standard_normal(shape), np.float32)  # shape () works too
  kv_heads = kv_heads or heads
  q = normal(batch, length, heads, head_dim)
  k, v = normal(2, batch, length, kv_heads, head_dim)
  dims = sj.Dims(heads, kv_heads, head_dim, heads * head_dim)
  wanted = spec.params(dims)
  is_leaf = lambda x: isinstance(x, sj.Param)
  params = jax.tree.map(lambda p: normal(*p.shape), wanted, is_leaf=is_leaf)
  for kernel in params.get('feature_map', {}).values():
    kernel /= head_dim**0.5
  gate = [normal(batch, length, heads * head_dim)] * spec.head.reads_input
  return q, k, v, params, *gate


def attend(spec, q, k, v, params=None, gate=None, *, implementation=None):
  """Calls `sj.attend` with what `random_inputs` returns."""
  return sj.attend(spec, q, k, v, params, gate=gate, implementation=implementation)
