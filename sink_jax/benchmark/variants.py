"""The attention variants that are timed, and those that are checked."""

from __future__ import annotations

from typing import TypeVar

from sink_jax.arguments import check_known
from sink_jax.attention.extra_key_value import KBias, KVBias, SinkLogit, VBias
from sink_jax.attention.feature_map import EluPlusOne, Mlp
from sink_jax.attention.mask import Prefix, Window
from sink_jax.attention.normalizer import AbsFloor, AbsSum, Count, PNorm, RowSum, Unnormalized
from sink_jax.attention.position import Alibi, Nope, Relative
from sink_jax.attention.similarity import Linear, Relu, Sigmoid, Softpick
from sink_jax.attention.spec import AttentionSpec

T = TypeVar('T')

_SUM = RowSum(eps=1e-8)

# Without rotation, which no alternative includes either: the kernels alone are compared.
VARIANTS = {name: AttentionSpec(**({'position': Nope()} | components)) for name, components in {
    'softmax': {},
    'sigmoid': dict(similarity=Sigmoid(), normalizer=Unnormalized()),
    'sigmoid-sum': dict(similarity=Sigmoid(), normalizer=_SUM),
    'relu': dict(similarity=Relu(), normalizer=Count()),
    'elu': dict(similarity=EluPlusOne(), normalizer=_SUM),
    'linear': dict(similarity=Linear(), normalizer=AbsFloor()),
    'softpick': dict(similarity=Softpick(), normalizer=AbsSum()),
    'alibi': dict(position=Alibi()),
    'relative': dict(position=Relative()),
    'p-norm': dict(normalizer=PNorm(p=2.0)),
    'window': dict(mask=Window(size=256)),
    'k-bias': dict(kv_bias=KBias()),
}.items()}

# The attention of the models that the paper trains, by table and figure, and of others that have
# a kernel or an epilogue of their own; rotary by default.
PAPER = {name: AttentionSpec(**components) for name, components in {
    'softmax': {},
    'nope (Table 3)': dict(position=Nope()),
    'relative (Table 3)': dict(position=Relative()),
    'alibi (Table 3)': dict(position=Alibi()),
    'window (Figure 6)': dict(mask=Window(size=32)),
    'prefix (Figure 5)': dict(mask=Prefix(length=5)),
    'kv bias (Table 4)': dict(kv_bias=KVBias()),
    'k bias (Table 4)': dict(kv_bias=KBias()),
    'v bias (Table 4)': dict(kv_bias=VBias()),
    "v* = 5 v' (Table 5)": dict(kv_bias=KBias(value='first', value_norm=5.0)),
    "v* = 5 v'' (Table 5)": dict(kv_bias=KBias(value='uniform', value_norm=5.0)),
    'd_a = 2 (Table 13)': dict(kv_bias=KBias(learnable_dims=2)),
    'shared kv bias (Table 12)': dict(kv_bias=KVBias(shared=True)),
    'shared k bias (Table 12)': dict(kv_bias=KBias(shared=True)),
    'scale (Table 14)': dict(normalizer=RowSum(scale=0.2)),
    'p-norm softmax 1/2 (Figure 29)': dict(normalizer=PNorm(p=0.5)),
    'p-norm softmax 2 (Figure 29)': dict(normalizer=PNorm(p=2.0)),
    'p-norm sigmoid 2 (Figure 29)': dict(similarity=Sigmoid(), normalizer=PNorm(p=2.0)),
    'sigmoid (Table 15)': dict(similarity=Sigmoid(), normalizer=Unnormalized()),
    'normalized sigmoid (Table 15)': dict(similarity=Sigmoid(), normalizer=_SUM),
    'elu (Table 15)': dict(similarity=EluPlusOne(), normalizer=Unnormalized()),
    'normalized elu (Table 15)': dict(similarity=EluPlusOne(), normalizer=_SUM),
    'normalized elu map (Table 15)': dict(
        similarity=Linear(), feature_map=EluPlusOne(), normalizer=_SUM),
    'elu map (Table 15)': dict(
        similarity=Linear(), feature_map=EluPlusOne(), normalizer=Unnormalized()),
    'normalized identity (Table 15)': dict(similarity=Linear(), normalizer=AbsFloor()),
    'identity (Table 15)': dict(similarity=Linear(), normalizer=Unnormalized()),
    'normalized mlp (Table 15)': dict(
        similarity=Linear(), feature_map=Mlp(), normalizer=AbsFloor()),
    'mlp (Table 15)': dict(
        similarity=Linear(), feature_map=Mlp(), normalizer=Unnormalized()),
    'sink logit': dict(kv_bias=SinkLogit()),
    'softpick': dict(similarity=Softpick(), normalizer=AbsSum()),
}.items()}


def chosen(names: list[str], known: dict[str, T], option: str) -> dict[str, T]:
  """The entries of these names, in the order given; all of them for ['all'].

  Raises:
    ValueError: a name is unknown; the message has the option and the choices.
  """
  if names == ['all']:
    return dict(known)
  for name in names:
    check_known(name, ['all', *known], f'{option}: unknown')
  return {name: known[name] for name in names}
