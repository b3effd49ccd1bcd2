"""What of a run's attention is a matter of its weights alone, and is folded into them.

A fold gives a model without the component that computes the same function of the same tokens, and
what its leaves are in place of the run's. Leaves are folded when they are read, one block at a
time, in float64, and are rounded once, when they are written.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from sink_jax.attention.extra_key_value import NoBias, SinkLogit, VBias, ZeroSink
from sink_jax.attention.head import ElementGate, HeadGate, PlainOutput
from sink_jax.attention.normalizer import RowSum
from sink_jax.attention.per_token import PlainValue, QKNorm, ValueScale
from sink_jax.models.config import ModelConfig
from sink_jax.models.sigma_reparam import VECTOR
from sink_jax.pretrained.target import Leaves

# A leaf of the same block's attention by its name, such as 'out/kernel', in float64.
Own = Callable[[str], np.ndarray]


class Folded(NamedTuple):
  """A model as it is written: its config, the reader of its leaves, and what was done, in words."""

  config: ModelConfig
  leaves: Leaves
  notes: tuple[str, ...] = ()


def folded(config: ModelConfig, leaves: Leaves, sink_id: int | None = None) -> Folded:
  """The model without the components that can be folded into weights.

  Args:
    sink_id: a token that training never held as input, which becomes the learned sink token.
  """
  model = _sink_token(with_plain_linear(Folded(config, leaves)), sink_id)
  # The V bias comes first: no normaliser scales it, so its W_O is that of the run.
  for fold in (_value_bias, _row_scale, _zero_sink, _value_scale, _qk_eps, _gate):
    model = fold(model)
  return model


def with_plain_linear(model: Folded) -> Folded:
  """gamma W / sigma(W) of sigmaReparam, for the vector that training left, as the matrix itself."""
  config = model.config
  if config.linear == 'plain':
    return model

  def read(path: str, index: tuple[int, ...]) -> np.ndarray:
    layer, _, name = path.rpartition('/')
    if not path.startswith('blocks/') or name != 'kernel':
      return model.leaves(path, index)
    kernel, gamma, vector = (np.asarray(model.leaves(f'{layer}/{leaf}', index), np.float64)
                             for leaf in ('kernel', 'gamma', VECTOR))
    return kernel * (gamma / np.linalg.norm(vector @ kernel))

  return Folded(dataclasses.replace(config, linear='plain'), read, (
      f"model.linear = {config.linear!r}: gamma and sigma(W) are folded into each W",
      *model.notes))


def _sink_token(model: Folded, sink_id: int | None) -> Folded:
  """The learned sink token as the row of the embedding of a token that no text has.

  A sequence then begins with this token. The unembedding stays as it is, so the logits do, too.
  """
  config = model.config
  if config.sink_tokens != 1 or sink_id is None or config.embedding_dim:
    return model

  def read(path: str, index: tuple[int, ...]) -> np.ndarray:
    if path == 'embed':
      table = np.array(model.leaves('embed', ()))
      table[sink_id] = model.leaves('sink_tokens', ())[0]
      return table
    if path == 'unembed/kernel' and config.tied:
      return model.leaves('embed', ()).T
    return model.leaves(path, index)

  note = (f'model.sink_tokens = 1: it is the embedding of token {sink_id}, with which every text '
          'begins')
  if config.tied:
    note += '; the unembedding is written apart, as it was'
  return Folded(dataclasses.replace(config, sink_tokens=0, tied=False), read,
                (*model.notes, note))


def _value_bias(model: Folded) -> Folded:
  """sum_h (o_h + v*_h) W_O,h + b = o W_O + (v* W_O + b): a bias of the output."""
  config = model.config
  # A gate or a norm of the head's output would act on v*, too.
  if not isinstance(config.attention.kv_bias, VBias) or config.attention.head != PlainOutput():
    return model
  dims, given = config.dims, set(config.biases)

  def out(own: Own) -> np.ndarray:
    value = np.broadcast_to(own('kv_bias_value'), (dims.heads, dims.head_dim)).reshape(-1)
    return value @ own('out/kernel') + (own('out/bias') if 'out' in given else 0)

  changes = {'out/bias': out}
  if 'qkv' not in given:  # the classes have all biases of attention, or none
    changes |= {f'{name}/bias': lambda own, name=name: np.zeros(own(f'{name}/kernel').shape[-1])
                for name in ('query', 'key', 'value')}
  config = dataclasses.replace(config, biases=(*({'qkv': 0, 'out': 0} | dict.fromkeys(given)),))
  return _changed(model, config, changes, 'its value v* W_O is a bias of the output',
                  kv_bias=NoBias())


def _row_scale(model: Folded) -> Folded:
  """alpha of RowSum multiplies o_h, and so W_O."""
  normalizer = model.config.attention.normalizer
  if type(normalizer) is not RowSum or normalizer.scale == 1:
    return model
  return _changed(model, model.config, {
      'out/kernel': lambda own: normalizer.scale * own('out/kernel')},
      f'its factor {normalizer.scale:g} is folded into W_O',
      normalizer=dataclasses.replace(normalizer, scale=1.0))


def _zero_sink(model: Folded) -> Folded:
  """n + sum_j exp(s_ij) is a sink logit log n of every head."""
  bias, heads = model.config.attention.kv_bias, model.config.heads
  if not isinstance(bias, ZeroSink):
    return model
  return _changed(model, model.config, {
      'kv_bias_logit': lambda own: np.full(heads, math.log(bias.n))},
      f'it is the sink logit log {bias.n:g} of all heads', kv_bias=SinkLogit())


def _value_scale(model: Folded) -> Folded:
  """c_h of ValueScale multiplies the columns of W_V that are those of a key head."""
  config = model.config
  if not isinstance(config.attention.value, ValueScale):
    return model
  scale = lambda own: np.repeat(own('value_scale'), config.dims.head_dim)
  return _changed(model, config, {
      'value/kernel': lambda own: own('value/kernel') * scale(own),
      'value/bias': lambda own: own('value/bias') * scale(own)},
      'it is folded into W_V', value=PlainValue())


def _qk_eps(model: Folded) -> Folded:
  """QK-norm with the eps of the model's other norms.

  q / sqrt(mean q^2 + e) = c q / sqrt(mean (c q)^2 + E) for c = sqrt(E / e), so that the eps of a
  norm is a matter of the scale of what it normalises.
  """
  norm, eps = model.config.attention.qk_norm, model.config.norm_eps
  if not isinstance(norm, QKNorm) or norm.eps == eps or not 0 < norm.eps < math.inf:
    return model
  factor = math.sqrt(eps / norm.eps)
  changes = {name: lambda own, name=name: factor * own(name) for name in (
      'query/kernel', 'key/kernel', 'query/bias', 'key/bias')}
  return _changed(model, model.config, changes,
                  f'its eps becomes model.norm_eps = {eps:g}, by W_Q and W_K times {factor:.4g}',
                  qk_norm=QKNorm(eps=eps))


def _gate(model: Folded) -> Folded:
  """A gate of heads is one of channels that are alike, and its scale multiplies W_O."""
  config, gate = model.config, model.config.attention.head
  if (not isinstance(gate, HeadGate) or gate.source != 'input' or gate.opening is not None
      or gate == ElementGate()):
    return model
  changes: dict[str, Callable[[Own], np.ndarray]] = {}
  notes = []
  if type(gate) is HeadGate:
    changes['head_kernel'] = lambda own: np.repeat(own('head_kernel'), config.dims.head_dim, -1)
    notes.append('each column of its kernel is that of all channels of the head')
  if gate.scale != 1:
    changes['out/kernel'] = lambda own: gate.scale * own('out/kernel')
    notes.append(f'its factor {gate.scale:g} is folded into W_O')
  return _changed(model, config, changes, ', and '.join(notes), head=ElementGate())


def _changed(model: Folded, config: ModelConfig, changes: dict[str, Callable[[Own], np.ndarray]],
             note: str, **component: object) -> Folded:
  """The model with another value of one component, and other leaves of its attention."""
  (field, value), = component.items()
  was = getattr(config.attention, field)
  spec = dataclasses.replace(config.attention, **{field: value})

  def read(path: str, index: tuple[int, ...]) -> np.ndarray:
    block, inside, name = path.partition('/attention/')
    if not inside or name not in changes:
      return model.leaves(path, index)
    return changes[name](lambda other: np.asarray(
        model.leaves(f'{block}/attention/{other}', index), np.float64))

  notes = (f'attention.{field} = {was!r}: {note}',) if note else ()
  return Folded(dataclasses.replace(config, attention=spec), read, model.notes + notes)
