"""Grafts: a trained model with another attention, norm or sink token, and its trained parameters.

Gates that start at zero barely move, and random ones raise the loss at once
(qiuzh20/gated_attention, issue 10). So both starts are offered, and the loss is measured before
training.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sink_jax.arguments import check_known
from sink_jax.attention import AnyArray
from sink_jax.attention.extra_key_value import NoBias, VBias
from sink_jax.attention.head import HeadGate, PlainOutput
from sink_jax.attention.per_token import PlainValue, ValueScale
from sink_jax.attention.reference import scores
from sink_jax.attention.spec import COMPONENTS, AttentionSpec
from sink_jax.component import Component
from sink_jax.foreign import standard_promotion
from sink_jax.kernels.shard import mesh_of
from sink_jax.models.arrays import checked_inputs
from sink_jax.models.config import ModelConfig
from sink_jax.models.record import GraftReport, RecordOptions, queries_keys
from sink_jax.models.run import Run
from sink_jax.models.sizes import parameter_shapes
from sink_jax.models.transformer import init_params

# Keys of a parameter from the outermost dict inwards, ('blocks', 'attention', 'head_kernel').
_Path: TypeAlias = tuple[str, ...]

STARTS = ('identity', 'random')
GRAFTED = ('attention', 'norm', 'sink_tokens')  # what a graft changes
_BIASES = {
  'KBias': 'the key bias k*',
  'KVBias': 'the key and value biases k* and v*',
  'VBias': 'the value bias v*',
  'SinkLogit': 'the sink logit',
}
_OFFSET = -8.0


@standard_promotion()
def graft(
  run: Run,
  *,
  attention: AttentionSpec | Mapping[str, str | Component] | None = None,
  norm: str | None = None,
  sink_tokens: int | None = None,
  start: str = 'identity',
  tokens: AnyArray | None = None,
  offset: float = _OFFSET,
  seed: int = 0,
) -> Run:
  """Returns the model of a run with another attention, norm or number of sink tokens.

      grafted = sj.graft(run, attention={'head': 'HeadGate(scale=2)'})
      grafted.graft.loss_after - grafted.graft.loss_before    # 0: the gates start at one

  Parameters that have the same name and shape in the source keep its values. With start='identity'
  new parameters start where the model computes what the source did, if such values exist: gates at
  one (`HeadGate(scale=2)`), value scales at 1, value residuals at (1, 0), value biases at zero.

  For a sink logit of softmax the only such value is minus infinity, where its gradient is zero. The
  logit of a head therefore starts at the mean of log sum_j exp(s_ij) over the rows i of the batch,
  plus `offset`: with -8, a share of about e^-8 = 0.03 % of such a row goes to it. Where no such
  values exist (K biases, off by one, norms, temperatures, another similarity, a sink token), and
  always with start='random', new parameters start as in a fresh model.

  The changes and the loss on the batch before and after are printed, and stored in `Run.graft`.

  Args:
    attention: an AttentionSpec, or only the components that change, {'head': 'HeadGate()'}.
    norm: as in `ModelConfig`; None keeps the source's.
    sink_tokens: as in `ModelConfig`; None keeps the source's.
    start: 'identity' or 'random', see above.
    tokens: the batch (S, T), ids of text like the source's; by default the run's probe inputs; for
      a published model 32 texts of 64 tokens from the documentation in Python's standard library.
    offset: of sink logits, see above.
    seed: of random initial values.

  Raises:
    ValueError: nothing would change, a component does not fit the model, or there is no batch.
  """
  if not isinstance(attention, AttentionSpec):
    components = cast(dict[str, Any], attention or {})
    for name in components:
      check_known(name, COMPONENTS, 'attention has no component')
    attention = dataclasses.replace(run.config.attention, **components)
  config = dataclasses.replace(
    run.config,
    attention=attention,
    norm=run.config.norm if norm is None else norm,
    sink_tokens=run.config.sink_tokens if sink_tokens is None else sink_tokens,
  )
  grafted = graft_to(run, config, start=start, tokens=tokens, offset=offset, seed=seed)
  print(grafted.graft)
  return grafted


def graft_to(
  run: Run,
  config: ModelConfig,
  *,
  start: str = 'identity',
  tokens: AnyArray | None = None,
  offset: float = _OFFSET,
  seed: int = 0,
) -> Run:
  """`graft` to the model of a config, which may differ in nothing else; prints nothing."""
  changes = _changes(run.config, config)
  check_known(start, STARTS, 'Unknown start')
  batch, same = _batch(run, tokens), start == 'identity'
  known, shapes = _shapes(run.config), _shapes(config)
  new = {path: shape for path, shape in shapes.items() if known.get(path) != shape}
  starts = {name: start_like(*change) if same else None for name, change in changes.items()}
  constants = {
    f'{name.removeprefix("attention.")}_{key}': value
    for name, values in starts.items()
    for key, value in (values or {}).items()
  }
  values: dict[_Path, AnyArray] = {
    path: np.full(shape, constants[path[-1]], np.float32)
    for path, shape in new.items()
    if path[-1] in constants
  }
  logits = [
    path
    for path in new
    if path[-1] == 'kv_bias_logit' and same and config.attention.similarity.kind == 'exponential'
  ]
  fresh = tuple(path for path in new if path not in values and path not in logits)
  if fresh:
    values |= _initial(config, fresh, seed)
  if logits:
    # Rows of the new model without the logit: its other new parts act on them too.
    plain = dataclasses.replace(
      config, attention=dataclasses.replace(config.attention, kv_bias=NoBias())
    )
    values |= _sink_logits(_with_values(run, plain, values), logits, batch, offset)
  grafted = _with_values(run, config, values)
  names = lambda paths: tuple(sorted('/'.join(path) for path in paths))
  return dataclasses.replace(
    grafted,
    graft=GraftReport(
      tuple(f'{name}: {a!r} -> {b!r}' for name, (a, b) in changes.items()),
      names(new),
      names(path for path in known if known[path] != shapes.get(path)),
      start,
      None not in starts.values(),
      _loss(run, batch),
      _loss(grafted, batch),
      names(fresh),
    ),
  )


def _changes(before: ModelConfig, after: ModelConfig) -> dict[str, tuple[Any, Any]]:
  """{key: (value before, value after)} of a graft; a ValueError if there are none, or no effect."""
  parts = [('attention', name, before.attention, after.attention) for name in COMPONENTS]
  parts += [('model', name, before, after) for name in ('norm', 'sink_tokens')]
  changes = {
    f'{where}.{name}': (a, b)
    for where, name, source, target in parts
    if (a := getattr(source, name)) != (b := getattr(target, name))
  }
  if not changes:
    raise ValueError(
      'The graft changes nothing: give attention, norm or sink_tokens another '
      "value, such as attention={'head': 'HeadGate(scale=2)'}."
    )
  for name in ('mask', 'position'):
    if f'attention.{name}' in changes and any(getattr(layer, name) for layer in after.pattern):
      raise ValueError(
        f'Blocks of this model have a {name} of their own, which a graft of '
        'attention would not change: graft another component.'
      )
  return changes


def learned_bias(config: ModelConfig) -> str:
  """The parameters that `without_bias` removes, in words; empty if there are none."""
  count, bias = config.sink_tokens, config.attention.kv_bias
  sinks = {0: '', 1: 'the learned sink token x*'}.get(count, f'the {count} learned sink tokens x*')
  name = type(bias).__name__ if bias.params(config.dims) else ''
  return ' and '.join(filter(None, (sinks, _BIASES.get(name, name))))


def without_bias(run: Run) -> Run:
  """The same model with neither biases in attention nor learned sink tokens (Section 7.3)."""
  return _with_values(
    run,
    dataclasses.replace(
      run.config,
      sink_tokens=0,
      attention=(dataclasses.replace(run.config.attention, kv_bias=NoBias())),
    ),
    {},
  )


def start_like(before: Component, after: Component) -> dict[str, float] | None:
  """{name: value of all entries} with which `after` computes what `before` did; or None."""
  match before, after:
    case NoBias(), VBias():
      return {'value': 0.0}
    case PlainValue(), ValueScale():
      return {'scale': 1.0}
    case PlainOutput(), HeadGate(scale=2, opening=None):
      return {'kernel': 0.0}  # 2 sigmoid(0) = 1 in all gates
  return None


def _batch(run: Run, tokens: AnyArray | None) -> np.ndarray:
  """The token ids on which a graft is measured."""
  if not run.config.vocab_size:
    raise ValueError('A graft is measured on text, and a model of continuous inputs reads none.')
  if tokens is None:
    tokens = run.probe_tokens
  if tokens is None and run.make_tokens is not None:
    tokens = run.make_tokens(run)
  if tokens is None:
    raise ValueError('There are no probe inputs to measure the graft on: pass tokens=, ids (S, T).')
  return np.asarray(checked_inputs(run.config, tokens, least=2))


def _shapes(config: ModelConfig) -> dict[_Path, tuple[int, ...]]:
  leaves = cast(dict[_Path, jax.Array], flatten_dict(parameter_shapes(config)))
  return {path: x.shape for path, x in leaves.items()}


@functools.partial(jax.jit, static_argnums=(0, 1))
def _initial(config: ModelConfig, paths: tuple[_Path, ...], seed: int) -> dict[_Path, jax.Array]:
  """The named parameters of a fresh model; the compiler drops the computation of all others."""
  params = cast(dict[_Path, jax.Array], flatten_dict(init_params(config, seed)))
  return {path: params[path] for path in paths}


def _sink_logits(
  run: Run,
  paths: list[_Path],
  batch: np.ndarray,
  offset: float,
) -> dict[_Path, np.ndarray]:
  """Sink logits (., H) of a model without them: means of log sum_j exp(s_ij) plus the offset."""
  config = run.config
  recorded = run.record(batch, RecordOptions(attention=queries_keys)).layers.attention
  layers = zip(config.attention_specs, recorded.q_BxTxHxDh, recorded.k_BxTxHkvxDh, strict=True)
  means_NxH = np.stack([_mean_log_sum(spec, q, k) for spec, q, k in layers])
  # For each layer with attention the number of its block in the period.
  blocks = [i % len(config.pattern) for i in config.attention_layers]
  # 'blocks/layer3/attention' is the fourth block of a period; a single block has no such level.
  number = lambda path: int(path[1].removeprefix('layer')) if len(config.pattern) > 1 else 0
  return {
    path: means_NxH[[i == number(path) for i in blocks]] + np.float32(offset) for path in paths
  }


@functools.partial(jax.jit, static_argnums=0)
def _mean_log_sum(spec: AttentionSpec, q_BxTxHxDh: jax.Array, k_BxTxHkvxDh: jax.Array) -> jax.Array:
  tokens = jnp.arange(q_BxTxHxDh.shape[1])
  keep_TxT = spec.mask.keep(tokens[:, None], tokens[None, :])
  sums_BxHxT = jax.lax.map(  # one sequence at a time, for memory
    lambda qk: jax.nn.logsumexp(
      scores(spec, qk[0][None], qk[1][None], tokens, tokens)[0], -1, where=keep_TxT
    ),
    (q_BxTxHxDh, k_BxTxHkvxDh),
  )
  # A mask may leave a query without keys, whose sum is empty.
  return jnp.mean(sums_BxHxT, (0, 2), where=jnp.any(keep_TxT, -1))


def _loss(run: Run, batch: np.ndarray) -> float:
  """Mean cross-entropy in nats of the next tokens."""
  loss = optax.softmax_cross_entropy_with_integer_labels
  # One text at a time, for the memory of its logits.
  losses = [loss(run.logits(text[None, :-1])[0], text[1:]) for text in batch]
  return float(np.mean(losses, dtype=np.float64))


def _with_values(run: Run, config: ModelConfig, values: Mapping[_Path, AnyArray]) -> Run:
  """The run with another config and these new values; it keeps its other parameters."""
  mesh, kept = mesh_of(run.params), flatten_dict(run.params)
  # Replicated over the mesh of the other parameters.
  placed = (
    functools.partial(jax.device_put, device=NamedSharding(mesh, PartitionSpec()))
    if isinstance(mesh, Mesh)
    else jnp.asarray
  )
  params = {
    path: placed(values[path]) if path in values else kept[path] for path in _shapes(config)
  }
  return dataclasses.replace(run, config=config, params=unflatten_dict(params), graft=None)
