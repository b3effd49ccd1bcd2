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
  return {
    slot: [x for cls in registry(base).values() for x in [cls(), *variant(slot, cls()).more]]
    for slot, base in COMPONENTS.items()
  }


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
  for a, b in itertools.combinations(values, 2):
    missing |= {((a, type(x)), (b, type(y))) for x in values[a] for y in values[b]}
  specs, impossible = [], set()
  for part in sorted(missing, key=repr):
    if part not in missing:
      continue
    fits = {name: [x for x in values[name] if what in (x, type(x))] for name, what in part}
    draw = lambda own: own[rng.integers(len(own))]
    drawn = ({name: draw(own) for name, own in (values | fits).items()} for _ in range(200))
    some = itertools.islice(filter(None, map(legal, drawn)), 20)
    best = max(some, key=lambda spec: len(parts(spec) & missing), default=None)
    if best is None:
      impossible.add(part)
    else:
      specs.append(best)
      missing -= parts(best)
  return specs, impossible


_SIGMOID, _LINEAR, _ELU = sj.Sigmoid(), sj.Linear(), sj.EluPlusOne()

# What the paper trains, by table, and operations beyond it. Absolute and learnable positions join
# embeddings: for attention they are NoPE.
PAPER = {
  'softmax': {},
  'nope (Table 3)': dict(position=sj.Nope()),
  'relative (Table 3)': dict(position=sj.Relative()),
  'alibi (Table 3)': dict(position=sj.Alibi()),
  'window (Figure 6)': dict(mask=sj.Window(size=3)),
  'prefix (Figure 5)': dict(mask=sj.Prefix(length=3)),
  'kv bias (Table 4)': dict(kv_bias=sj.KVBias()),
  'k bias (Table 4)': dict(kv_bias=sj.KBias()),
  'v bias (Table 4)': dict(kv_bias=sj.VBias()),
  'v* = 5 v1 (Table 5)': dict(kv_bias=sj.KBias(value='first', value_norm=5.0)),
  'v* = 5 v2 (Table 5)': dict(kv_bias=sj.KBias(value='uniform', value_norm=5.0)),
  'd_a = 2 (Table 13)': dict(kv_bias=sj.KBias(learnable_dims=2)),
  'shared kv bias (Table 12)': dict(kv_bias=sj.KVBias(shared=True)),
  'shared k bias (Table 12)': dict(kv_bias=sj.KBias(shared=True)),
  'scale (Table 14)': dict(normalizer=sj.RowSum(scale=0.2)),
  'p-norm softmax 1/2 (Figure 29)': dict(normalizer=sj.PNorm(p=0.5)),
  'p-norm softmax 2 (Figure 29)': dict(normalizer=sj.PNorm(p=2.0)),
  'p-norm sigmoid 2 (Figure 29)': dict(similarity=_SIGMOID, normalizer=sj.PNorm(p=2.0)),
  'sigmoid (Table 15)': dict(similarity=_SIGMOID, normalizer=sj.Unnormalized()),
  'normalized sigmoid (Table 15)': dict(similarity=_SIGMOID, normalizer=sj.RowSum(eps=1e-8)),
  'elu (Table 15)': dict(similarity=_ELU, normalizer=sj.Unnormalized()),
  'normalized elu (Table 15)': dict(similarity=_ELU, normalizer=sj.RowSum(eps=1e-8)),
  'normalized elu map (Table 15)': dict(
    similarity=_LINEAR, feature_map=_ELU, normalizer=sj.RowSum(eps=1e-8)
  ),
  'elu map (Table 15)': dict(similarity=_LINEAR, feature_map=_ELU, normalizer=sj.Unnormalized()),
  'normalized identity (Table 15)': dict(similarity=_LINEAR, normalizer=sj.AbsFloor()),
  'identity (Table 15)': dict(similarity=_LINEAR, normalizer=sj.Unnormalized()),
  'normalized mlp (Table 15)': dict(
    similarity=_LINEAR, feature_map=sj.Mlp(), normalizer=sj.AbsFloor()
  ),
  'mlp (Table 15)': dict(similarity=_LINEAR, feature_map=sj.Mlp(), normalizer=sj.Unnormalized()),
  'softpick': dict(similarity=sj.Softpick(), normalizer=sj.AbsSum()),
}
PAPER = {name: sj.AttentionSpec(**slots) for name, slots in PAPER.items()}


def random_inputs(spec, batch=1, length=7, heads=3, kv_heads=None, head_dim=4, seed=0):
  """q, k, v and parameters of the slots, standard normal, float32.

  If the spec reads the block's input, it comes as a fifth array, see `attend`.
  """
  rng = np.random.default_rng(seed)
  normal = lambda *shape: np.asarray(rng.standard_normal(shape), np.float32)  # shape () works too
  kv_heads = kv_heads or heads
  q = normal(batch, length, heads, head_dim)
  k, v = normal(2, batch, length, kv_heads, head_dim)
  dims = sj.Dims(heads, kv_heads, head_dim, heads * head_dim)
  params = jax.tree.map(
    lambda p: normal(*p.shape), spec.params(dims), is_leaf=lambda x: isinstance(x, sj.Param)
  )
  gate = [normal(batch, length, heads * head_dim)] * spec.head.reads_input
  return q, k, v, params, *gate


def attend(spec, q, k, v, params=None, gate=None, *, implementation=None):
  """Calls `sj.attend` with what `random_inputs` returns."""
  return sj.attend(spec, q, k, v, params, gate=gate, implementation=implementation)
