"""A model with another attention, norm or sink token, and the parameters that it was trained with.

Gates that start at zero barely move, and random ones raise the loss at once
(qiuzh20/gated_attention, issue 10): both starts are here, and what a graft does to the loss is
measured before anything is trained. A removal is a graft too: one without new parameters.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sink_jax.attention.extra_key_value import NoBias
from sink_jax.attention.reference import scores
from sink_jax.attention.spec import COMPONENTS, AttentionSpec
from sink_jax.component import Component
from sink_jax.kernels.shard import mesh_of
from sink_jax.models.arrays import AnyArray, ParamTree
from sink_jax.models.config import ModelConfig
from sink_jax.models.graft_report import GraftReport
from sink_jax.models.record import RecordOptions
from sink_jax.models.run import Run
from sink_jax.models.sizes import parameter_shapes
from sink_jax.models.transformer import init_params

# Keys of a parameter from the outermost dict inwards, ('blocks', 'attention', 'head_kernel').
_Path: TypeAlias = tuple[str, ...]

STARTS = ('identity', 'random')
# What a graft changes, and what is no property of the parameters; all else has to be the same.
GRAFTED = ('attention', 'norm', 'sink_tokens')
_FREE = ('init', 'dtype', 'implementation', 'remat', 'unroll')
# The components whose classes know where they start like another one, see `start_like`.
_STARTING = ('kv_bias', 'value', 'head')
_BIASES = {'KBias': 'the key bias k*', 'KVBias': 'the key and value biases k* and v*',
           'VBias': 'the value bias v*', 'SinkLogit': 'the sink logit'}
_OFFSET = -8.0
_LOGITS = 2**26  # most logits that the loss has at a time, 256 MiB


def graft(run: Run, *, attention: AttentionSpec | Mapping[str, str | Component] | None = None,
          norm: str | None = None, sink_tokens: int | None = None, start: str = 'identity',
          tokens: AnyArray | None = None, offset: float = _OFFSET, seed: int = 0) -> Run:
  """Returns the model of a run with another attention, norm or number of sink tokens.

      grafted = sj.graft(run, attention={'head': 'HeadGate(scale=2)'})
      grafted.graft.loss_after - grafted.graft.loss_before    # 0: the gates start at one

  Parameters that have the same name and shape in the source keep its values. With start='identity'
  new parameters start where the model computes what the source did, if such values exist: gates at
  one (`HeadGate(scale=2)`), value scales at 1, value residuals at (1, 0), value biases at zero.

  For a sink logit of softmax the only such value is minus infinity, which no gradient leaves. The
  logit of a head therefore starts at the mean of log sum_j exp(s_ij) over the rows i of the batch,
  plus `offset`: with -8, a share of about e^-8 = 0.03 % of such a row goes to it. Where no such
  values exist (K biases, off by one, norms of queries, keys and heads, temperatures, another
  similarity, a sink token, a norm), and always with start='random', new parameters start as in a
  fresh model.

  The changes and the loss on the batch before and after are printed, and stored in `Run.graft`.

  Args:
    run: the source.
    attention: an AttentionSpec, or only the components that change, {'head': 'HeadGate()'}.
    norm: as in `ModelConfig`; None keeps the source's.
    sink_tokens: as in `ModelConfig`; None keeps the source's.
    start: 'identity' or 'random', see above.
    tokens: the batch (S, T), ids of text like the source's; by default the run's probe inputs, and
      of a published model 32 texts of 64 tokens, the documentation in Python's standard library.
    offset: where sink logits start, see above. A lower one changes the model less, and leaves the
      logits smaller gradients.
    seed: the seed of random initial values.

  Raises:
    ValueError: nothing would change, a component does not fit the model, or there is no batch.
  """
  config = dataclasses.replace(
      run.config, attention=_attention(run.config.attention, attention),
      norm=run.config.norm if norm is None else norm,
      sink_tokens=run.config.sink_tokens if sink_tokens is None else sink_tokens)
  grafted = graft_to(run, config, start=start, tokens=tokens, offset=offset, seed=seed)
  print(grafted.graft)
  return grafted


def graft_to(run: Run, config: ModelConfig, *, start: str = 'identity',
             tokens: AnyArray | None = None, offset: float = _OFFSET, seed: int = 0) -> Run:
  """`graft` to the model of a config, which prints nothing.

  Raises:
    ValueError: also where the configs differ in more than a graft changes.
  """
  changed = _changes(run.config, config)
  if start not in STARTS:
    raise ValueError(f'start = {start!r}; choices: {", ".join(STARTS)}.')
  if not math.isfinite(offset):
    raise ValueError(f'offset = {offset} must be finite; {_OFFSET:g} is usual.')
  if not 0 <= seed < 2**32:
    raise ValueError(f'seed = {seed} must lie between 0 and {2**32 - 1}.')
  batch = _batch(run, tokens)
  values, fresh, exact = _started(run, config, start, offset, seed, batch)
  before, after = run.config, _with_values(run, config, values)
  removed = _shapes(before).items() - _shapes(config).items()
  return dataclasses.replace(after, graft=GraftReport(
      changed, tuple(sorted('/'.join(path) for path in values)),
      tuple(sorted('/'.join(path) for path, _ in removed)), start, exact,
      _loss(run, batch), _loss(after, batch), tuple('/'.join(path) for path in fresh)))


def new_parameters(before: ModelConfig, after: ModelConfig) -> tuple[str, ...]:
  """Paths of the parameters that a graft from one model to the other adds.

  One whose shape changes is among them.

  Raises:
    ValueError: as `graft_to` does of the two.
  """
  _changes(before, after)
  new = _shapes(after).items() - _shapes(before).items()
  return tuple(sorted('/'.join(path) for path, _ in new))


def learned_bias(config: ModelConfig) -> str:
  """The parameters that `without_bias` removes, in words; empty where there are none."""
  parts = [] if not config.sink_tokens else ['the learned sink token x*'] if (
      config.sink_tokens == 1) else [f'the {config.sink_tokens} learned sink tokens x*']
  bias = config.attention.kv_bias
  if bias.params(config.dims):
    parts.append(_BIASES.get(name := type(bias).__name__, name))
  return ' and '.join(parts)


def without_bias(run: Run) -> Run:
  """The same model with neither biases in attention nor a learned sink token (Section 7.3).

  Nothing else changes: a prefix or a window keeps its length. No loss is measured.

  Raises:
    ValueError: the model has none of them.
  """
  if not learned_bias(run.config):
    raise ValueError('The model has no bias in attention and no learned sink token to remove.')
  return _with_values(run, _without_extra_key(run.config), {})


def _without_extra_key(config: ModelConfig) -> ModelConfig:
  return dataclasses.replace(config, sink_tokens=0, attention=dataclasses.replace(
      config.attention, kv_bias=NoBias()))


def _attention(before: AttentionSpec,
               change: AttentionSpec | Mapping[str, str | Component] | None) -> AttentionSpec:
  """The attention that `graft` was asked for."""
  if isinstance(change, AttentionSpec):
    return change
  if isinstance(change, str):
    raise ValueError(f'attention = {change!r} must name its component, as '
                     f"{{'head': 'HeadGate()'}} does; choices: {', '.join(COMPONENTS)}.")
  change = dict(change or {})
  if unknown := sorted(set(change) - set(COMPONENTS)):
    raise ValueError(f'attention has no component {unknown[0]!r}; choices: '
                     f'{", ".join(COMPONENTS)}.')
  components: dict[str, Any] = change
  return dataclasses.replace(before, **components)


def _changes(before: ModelConfig, after: ModelConfig) -> tuple[str, ...]:
  """Lines 'attention.head: PlainOutput() -> HeadGate()' of what a graft changes.

  Raises:
    ValueError: nothing, or more than a graft can.
  """
  for field in dataclasses.fields(ModelConfig):
    a, b = getattr(before, field.name), getattr(after, field.name)
    if a != b and field.name not in GRAFTED + _FREE:
      raise ValueError(f'A graft keeps the shapes of the parameters that are there: model.'
                       f'{field.name} is {a!r} in the source and cannot become {b!r}. It changes '
                       f'{", ".join(GRAFTED)} alone; take the value of the source, or train a '
                       'model of this one from scratch.')
  # A block of a pattern that has a mask of its own does not see that of the attention.
  blocks = [layer for layer in before.pattern if not layer.mamba]
  same = all(before.attention_of(layer) == after.attention_of(layer) for layer in blocks)
  changed = [f'attention.{name}: {a!r} -> {b!r}' for name in COMPONENTS if not same
             and (a := getattr(before.attention, name)) != (b := getattr(after.attention, name))]
  changed += [f'model.{name}: {a!r} -> {b!r}' for name in ('norm', 'sink_tokens')
              if (a := getattr(before, name)) != (b := getattr(after, name))]
  if not changed:
    masks = before.attention != after.attention
    raise ValueError('The graft changes nothing: ' + (
        'every block of the pattern has a mask of its own.' if masks else
        "the model has this attention, norm and sink_tokens; give it another value, such as "
        "attention={'head': 'HeadGate(scale=2)'}."))
  return tuple(changed)


def _batch(run: Run, tokens: AnyArray | None) -> np.ndarray:
  """The inputs on which a graft is measured."""
  given = run.probe_tokens if tokens is None else tokens
  reason = ''
  if given is None and run.make_tokens is not None:
    try:
      given = run.make_tokens(run)
    except ValueError as error:  # no tokenizer, or one that this machine cannot read
      reason = f' ({str(error).rstrip(".")})'
  if given is None:
    raise ValueError(f'{run.name or "The model"} has no probe inputs to measure the graft on'
                     f'{reason}: pass tokens=, ids (S, T) of text like that of its training, as '
                     'sj.tokenize(run, texts, length=64) makes them.')
  batch = np.asarray(given)
  if not run.config.vocab_size:
    return batch
  if batch.ndim != 2 or not np.issubdtype(batch.dtype, np.integer) or batch.shape[1] < 2:
    raise ValueError('tokens must be ids of shape (S, T), T at least 2, not '
                     f'{batch.dtype} of shape {batch.shape}.')
  if not (batch.size and 0 <= batch.min() and batch.max() < run.config.vocab_size):
    raise ValueError(f'tokens must be ids of the model, from 0 to {run.config.vocab_size - 1}.')
  return batch


def _shapes(config: ModelConfig) -> dict[_Path, tuple[int, ...]]:
  """{path: shape} of all parameters."""
  leaves = jax.tree_util.tree_leaves_with_path(parameter_shapes(config))
  return {tuple(key.key for key in path): x.shape for path, x in leaves}


def _started(run: Run, config: ModelConfig, start: str, offset: float, seed: int,
             batch: np.ndarray) -> tuple[dict[_Path, AnyArray], tuple[_Path, ...], bool]:
  """Values of the parameters that the source lacks, and whether they keep its function.

  Between the two are the paths of those that are as in a fresh model.
  """
  before, after, known = run.config.attention, config.attention, _shapes(run.config)
  shapes = {path: shape for path, shape in _shapes(config).items() if known.get(path) != shape}
  places = {name: getattr(after, name).start_like(getattr(before, name)) for name in _STARTING}
  exact = start == 'identity' and None not in places.values() and all(
      getattr(run.config, name) == getattr(config, name) for name in ('norm', 'sink_tokens')
  ) and all(getattr(before, name) == getattr(after, name)
            for name in COMPONENTS if name not in _STARTING)
  constants = {f'{component}_{name}': value for component, place in places.items()
               for name, value in (place or {}).items()} if start == 'identity' else {}
  values: dict[_Path, AnyArray] = {
      path: np.full(shape, constants[path[-1]], np.float32)
      for path, shape in shapes.items() if path[-1] in constants}
  logits = [path for path in shapes if path[-1] == 'kv_bias_logit']
  below = start == 'identity' and logits and after.similarity.kind == 'exponential'
  if rest := tuple(sorted(set(shapes) - set(values) - set(logits if below else ()))):
    values |= zip(rest, _initial(config, rest, seed))
  if below:
    # The rows are those of the new model without the logit: what else is new acts on them too.
    plain = _without_extra_key(config)
    mean = _mean_log_sums(_with_values(run, plain, {
        path: x for path, x in values.items() if path in _shapes(plain)}), batch)
    values |= {path: mean(path) + np.float32(offset) for path in logits}
  return values, rest, exact


@functools.partial(jax.jit, static_argnums=(0, 1))
def _initial(config: ModelConfig, paths: tuple[_Path, ...], seed: int) -> list[jax.Array]:
  """The named parameters of a fresh model; the compiler drops the computation of all others."""
  params = init_params(config, seed)
  return [functools.reduce(lambda tree, key: tree[key], path, params) for path in paths]


def _mean_log_sums(run: Run, batch: np.ndarray) -> Callable[[_Path], np.ndarray]:
  """Mean over queries and sequences of log sum_j exp(s_ij), of the heads (., H) of a parameter.

  What is returned takes the path of a parameter of attention, which in a pattern of several blocks
  names the block of the period.
  """
  config, layers = run.config, run.record(batch, RecordOptions(queries_keys=True)).layers
  blocks = [i for i, layer in enumerate(config.pattern) if not layer.mamba]
  specs = [config.attention_of(config.pattern[i]) for i in blocks]
  assert layers.queries_BxTxHxDh is not None and layers.keys_BxTxHkvxDh is not None
  means = [_mean_log_sum(specs[i % len(blocks)], q, k) for i, (q, k) in enumerate(zip(
      np.asarray(layers.queries_BxTxHxDh), np.asarray(layers.keys_BxTxHkvxDh)))]

  def of(path: _Path) -> np.ndarray:
    # 'layer3' is the fourth block of a period; a single block has no such level.
    named = [int(key.removeprefix('layer')) for key in path if key.startswith('layer')]
    return np.stack(means[blocks.index(named[0] if named else 0)::len(blocks)])

  return of


@functools.partial(jax.jit, static_argnums=0)
def _mean_log_sum(spec: AttentionSpec, q_BxTxHxDh: jax.Array,
                  k_BxTxHkvxDh: jax.Array) -> jax.Array:
  tokens = jnp.arange(q_BxTxHxDh.shape[1])
  keep_TxT = spec.mask.keep(tokens[:, None], tokens[None, :])

  def sequence(qk: tuple[jax.Array, jax.Array]) -> jax.Array:  # one at a time, for memory
    q, k = qk
    s = scores(spec, q[None], k[None], tokens, tokens)[0]
    return jax.nn.logsumexp(s, -1, where=keep_TxT)

  sums_BxHxT = jax.lax.map(sequence, (q_BxTxHxDh, k_BxTxHkvxDh))
  # A mask may leave a query without keys, whose sum is empty.
  return jnp.mean(sums_BxHxT, (0, 2), where=jnp.any(keep_TxT, -1))


def _loss(run: Run, batch: np.ndarray) -> float | None:
  """Mean cross-entropy in nats of the next tokens; None of continuous inputs without targets."""
  if not run.config.vocab_size:
    return None
  inputs, targets, total = batch[:, :-1], batch[:, 1:], 0.0
  size = max(1, _LOGITS // (inputs.shape[1] * run.config.vocab_size))
  for i in range(0, len(inputs), size):
    logits = run.logits(inputs[i:i + size])
    chosen = jnp.take_along_axis(logits, targets[i:i + size, :, None], -1)[..., 0]
    total += np.asarray(jax.nn.logsumexp(logits, -1) - chosen, np.float64).sum()
  return float(total / targets.size)


def _with_values(run: Run, config: ModelConfig, values: Mapping[_Path, AnyArray]) -> Run:
  """The run with another config, whose parameters are these and otherwise its own.

  The dicts are new, so that the given run keeps its parameters.
  """
  mesh = mesh_of(run.params)

  def fill(shapes: ParamTree, own: ParamTree, path: _Path) -> ParamTree:
    return {name: fill(x, own.get(name, {}), (*path, name)) if isinstance(x, Mapping) else
            _placed(values[*path, name], mesh) if (*path, name) in values else own[name]
            for name, x in shapes.items()}

  params = fill(parameter_shapes(config), run.params, ())
  return dataclasses.replace(run, config=config, params=params, graft=None)


def _placed(x: AnyArray, mesh: Any) -> AnyArray:
  """A parameter where the others lie: whole on every device of their mesh, if they have one."""
  return jax.device_put(x, NamedSharding(mesh, PartitionSpec())) if isinstance(mesh, Mesh) else (
      jnp.asarray(x))
