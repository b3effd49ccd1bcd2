"""Runs with any attention as a class of their own, whose PyTorch file lies beside the weights.

`modeling_sink_jax.py` states the formula of the reference for transformers, which loads it with
trust_remote_code=True. It is no module of this package: it is copied into the folder of the export,
and nothing here imports it. What it computes is listed here, and all else is refused by name.
"""

from __future__ import annotations

import dataclasses
import functools
from importlib import resources
from typing import Any

import jax
import numpy as np

from sink_jax.attention.extra_key_value import KBias
from sink_jax.attention.position import Alibi, Relative, Rope
from sink_jax.attention.spec import AttentionSpec
from sink_jax.component import Component
from sink_jax.models.config import Layer, ModelConfig
from sink_jax.models.sizes import parameter_shapes
from sink_jax.pretrained.stored_tensors import block
from sink_jax.pretrained.target import Refusal, WrittenTensor

NAME = 'custom'
ARCHITECTURE = 'SinkJaxForCausalLM'
MODEL_TYPE = 'sink_jax'
MODULE = 'modeling_sink_jax'

# Of each part of attention the classes that the file computes, with the fields that it reads or
# whose effect is in the parameters. Another class is refused, and another value than the default of
# another field: what is added to a part is refused until it stands here.
_ROPE, _GATE = 'base fraction factor', 'source scale opening'
PARTS: dict[str, dict[str, str]] = {
    'similarity': {'Exp': '', 'Sigmoid': 'bias', 'Relu': '', 'SquaredRelu': '', 'Linear': '',
                   'EluPlusOne': '', 'Softpick': ''},
    'normalizer': {'RowSum': 'eps scale', 'PNorm': 'p', 'Unnormalized': '', 'Count': '',
                   'AbsFloor': 'floor', 'AbsSum': 'eps', 'Clipped': 'low high'},
    'feature_map': {'Identity': '', 'EluPlusOne': '', 'Mlp': ''},
    'position': {
        'Nope': '', 'Sinusoidal': 'base', 'Learned': 'max_length', 'Alibi': '',
        'Relative': 'decreasing buckets max_distance', 'Rope': _ROPE,
        'Llama3Rope': f'{_ROPE} low_frequency_factor high_frequency_factor original_length',
        'YarnRope': f'{_ROPE} beta_fast beta_slow original_length attention_factor truncate'},
    'mask': {'Causal': '', 'Window': 'size', 'Prefix': 'length'},
    'kv_bias': {'NoBias': '', 'KBias': 'shared learnable_dims value value_norm',
                'KVBias': 'shared', 'VBias': 'shared', 'SinkLogit': '', 'ZeroSink': 'n'},
    'qk_norm': {'NoQKNorm': '', 'QKNorm': 'eps'},
    'temperature': {'Fixed': '', 'LogLength': 'learned scale'},
    'value': {'PlainValue': '', 'ValueScale': '', 'ValueResidual': 'own first learned'},
    'head': {'PlainOutput': '', 'HeadGate': _GATE, 'ElementGate': _GATE, 'HeadNorm': 'eps'},
}
# The same for the fields of the model: their choices, or None for a size or a switch.
MODEL: dict[str, tuple[str, ...] | None] = {
    'ffn': ('relu', 'gelu', 'gelu_tanh', 'swish', 'reglu', 'geglu', 'swiglu', 'none'),
    'norm': ('rmsnorm', 'layernorm', 'single', 'dyt', 'none'),
    'norm_location': ('pre', 'post', 'sandwich', 'protected'),
    'combine_heads': ('concat', 'add'), 'biases': ('qkv', 'out', 'ffn', 'unembed'),
} | dict.fromkeys(('layers', 'd_model', 'heads', 'kv_heads', 'head_dim', 'ffn_hidden', 'vocab_size',
                   'norm_eps', 'parallel_residual', 'tied', 'sink_tokens'))
# Fields that say how training begins and runs, and nothing of the function.
_TRAINING = ('init', 'dtype', 'implementation', 'remat', 'unroll')


def refusals(config: ModelConfig) -> list[Refusal]:
  """What the file does not compute."""
  found = [_model_refusal(config, field) for field in dataclasses.fields(config)
           if field.name not in ('attention', 'pattern', *_TRAINING)]
  found += [_part_refusal(field.name, getattr(config.attention, field.name), field.default)
            for field in dataclasses.fields(AttentionSpec)]
  if not config.vocab_size:
    found.append(Refusal('model.input_features', 'tokens'))
  wanted = 'blocks of attention and one feed-forward network'
  for layer in config.pattern:
    for field in dataclasses.fields(Layer):
      value = getattr(layer, field.name)
      if field.name in PARTS:
        bad = value is not None and _part_refusal(field.name, value, None) is not None
      else:
        bad = value != field.default
      found.append(Refusal('model.pattern', wanted) if bad else None)
  return [refusal for refusal in found if refusal]


def _model_refusal(config: ModelConfig, field: dataclasses.Field) -> Refusal | None:
  value, name = getattr(config, field.name), f'model.{field.name}'
  if field.name not in MODEL:
    return None if value == field.default else Refusal(name, repr(field.default))
  choices = MODEL[field.name]
  given = value if isinstance(value, tuple) else (value,)
  return None if choices is None or set(given) <= set(choices) else Refusal(
      name, ', '.join(map(repr, choices)))


def _part_refusal(kind: str, part: Component, default: object) -> Refusal | None:
  name, classes = type(part).__name__, PARTS.get(kind)
  if classes is None:  # a part that the file does not know at all
    return None if part == default else Refusal(f'attention.{kind}', repr(default))
  if name not in classes:
    return Refusal(f'attention.{kind}', ', '.join(classes))
  for field in dataclasses.fields(part):
    if field.name not in classes[name].split() and getattr(part, field.name) != field.default:
      return Refusal(f'attention.{kind}', f'{field.name}={field.default!r}')
  return None


def keys(config: ModelConfig, context: int) -> dict[str, Any]:
  """The keys of config.json that the file reads, and those that name it to transformers."""
  dims, spec = config.dims, config.attention
  model = {name: getattr(config, name) for name in MODEL} | {
      'kv_heads': dims.kv_heads, 'head_dim': dims.head_dim, 'biases': list(config.biases)}
  parts = {kind: _part_keys(getattr(spec, kind), config) for kind in PARTS}
  layers = map(config.attention_of, config.pattern)
  blocks = [{kind: _part_keys(getattr(own, kind), config) for kind in ('mask', 'position')}
            for own in layers]
  return {
      'model_type': MODEL_TYPE, 'use_cache': False,
      'auto_map': {'AutoConfig': f'{MODULE}.SinkJaxConfig',
                   'AutoModelForCausalLM': f'{MODULE}.{ARCHITECTURE}'},
      'model': model, 'attention': parts, 'blocks': blocks, 'shapes': _shapes(config)}


def _part_keys(part: Component, config: ModelConfig) -> dict[str, Any]:
  """Name and fields of a component, and numbers that follow from them."""
  dims, made = config.dims, dict[str, Any]()
  if isinstance(part, Rope):
    channels = int(dims.head_dim * part.fraction)
    made = {'frequencies': part.frequencies(channels).tolist(), 'amplitude': part.amplitude}
  elif isinstance(part, Alibi):
    made = {'slopes': part.slopes(dims.heads).tolist()}
  elif isinstance(part, Relative):  # further away all keys are in the last bucket
    distances = np.arange(2 * part.max_distance)
    made = {'table': np.asarray(part.distance_bias(distances)).tolist()}
  elif isinstance(part, KBias):
    vector = part.value_HxDh({}, dims)
    made = {'vector': None if vector is None else np.asarray(vector)[0].tolist()}
  return {'name': type(part).__name__} | dataclasses.asdict(part) | made


def tensors(config: ModelConfig) -> dict[str, WrittenTensor]:
  """Every tensor of the checkpoint: leaves by their paths, with dots, and a number per block."""
  outside, blocks = dict[str, WrittenTensor](), dict[str, WrittenTensor]()
  for key, leaf in jax.tree_util.tree_leaves_with_path(parameter_shapes(config)):
    path = jax.tree_util.keystr(key, simple=True, separator='/')
    if not path.startswith('blocks/'):
      outside |= _tensor(path, path, (), leaf.shape)
      continue
    for layer in range(config.layers):
      stack, i = block(config, layer)
      if path.startswith(f'{stack}/'):
        name = f'layers/{layer}/{path.removeprefix(f"{stack}/")}'
        blocks |= _tensor(name, path, (i,), leaf.shape[1:])
  return outside | dict(sorted(blocks.items(), key=lambda item: int(item[0].split('.')[1])))


def _tensor(name: str, path: str, index: tuple[int, ...], shape: tuple[int, ...],
            ) -> dict[str, WrittenTensor]:
  """A leaf as a tensor; a matrix (in, out) of a linear layer as the weight (out, in) of PyTorch."""
  name = name.replace('/', '.')
  if not name.endswith('.kernel'):
    return {name: WrittenTensor(shape, lambda leaf: leaf(path, index))}
  return {name.removesuffix('kernel') + 'weight': WrittenTensor(
      shape[::-1], lambda leaf: leaf(path, index).T)}


def _shapes(config: ModelConfig) -> dict[str, Any]:
  """The shapes of parameters, nested as their modules are; all blocks have those of the first."""
  tree: dict[str, Any] = {'model': {}, 'block': {}}
  for name, tensor in tensors(config).items():
    *path, last = name.split('.')
    if path[:1] != ['layers']:
      path = ['model', *path]
    elif path[1] == '0':
      path = ['block', *path[2:]]
    else:
      continue
    functools.reduce(lambda inner, step: inner.setdefault(step, {}), path, tree)[last] = list(
        tensor.shape)
  return tree


def code() -> str:
  """The text of the file."""
  file = resources.files('sink_jax.pretrained') / f'{MODULE}.py'
  return file.read_text(encoding='utf-8')
