"""Experiment: one training run as typed values, its keys, and its form as text.

A config key is a field of `Experiment` or of the dataclass of its section: nothing else lists it.
Values are texts only in config.json (`as_dict`, `from_dict`) and on a command line
(`as_config_dict`).
"""

from __future__ import annotations

import dataclasses
import operator
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from ml_collections import ConfigDict, config_dict

from sink_jax.arguments import check_known
from sink_jax.attention.spec import COMPONENTS, AttentionSpec
from sink_jax.component import Component, UnknownComponent, option, short_text, typed
from sink_jax.data.batches import Dataset
from sink_jax.data.dataset import DataConfig
from sink_jax.evaluate.explored import MOST_STEPS
from sink_jax.models.config import Layer, ModelConfig
from sink_jax.models.graft import STARTS
from sink_jax.models.sharding import check_tensor, mesh_sizes
from sink_jax.models.sizes import sized
from sink_jax.train.optimizer import OptimizerConfig
from sink_jax.train.plugins import plugins_of

# The keys that a graft can change: the components of attention, the norm and the sink tokens.
GRAFT_KEYS = (*(f'attention.{name}' for name in COMPONENTS), 'model.norm', 'model.sink_tokens')
# The keys that `resolved` fills in from the data.
_OF_DATA = ('model.vocab_size', 'model.input_features', 'model.output_features')
_DTYPES = ('float32', 'bfloat16')
_BYTES = 258  # ids of a tokenizer that is yet to be opened


class NotExpressible(ValueError):
  """A trial has no counterpart at this budget, such as a window smaller than one token."""

  label: Label | None = None  # the label that its config would have had


@dataclasses.dataclass(frozen=True)
class InitConfig:
  """The parameters to begin with, if they are another model's and not drawn by the seed."""

  source: str = option('', "a run's folder, or a model's folder or name; {seed} is the run's seed")
  graft: str = option(
    '',
    "identity or random: replace the source's attention, norm and sink "
    'tokens by those that differ from the defaults',
    choices=('', *STARTS),
  )
  kept: tuple[str, ...] | None = option(
    None, "keys that a graft keeps of the source; unset: all keys at their default; '': none"
  )
  train: str = option(
    'all',
    'what updates change: all, new (what the source lacks), attention',
    choices=('all', 'new', 'attention'),
  )

  def __post_init__(self):
    for key in self.kept or ():
      check_known(key, GRAFT_KEYS, 'init.kept has an unknown key')
    if not self.source and (self.graft or self.train != 'all'):
      raise ValueError(f'{self}: init.graft and init.train need init.source.')
    if self.kept is not None and not self.graft:
      raise ValueError(f'init.kept = {self.kept!r} needs init.graft.')


@dataclasses.dataclass(frozen=True)
class ProbeConfig:
  """The sink probe, on a fixed set of sequences."""

  every: int = option(100, 'steps; 0: only before the first and after the last', least=0)
  sequences: int = option(100, 'number of sequences', least=1)
  length: int = option(64, 'tokens of a sequence', least=2)
  epsilon: float = option(0.3, 'a head is a sink head above it', least=0, most=1)
  dtype: str = option(
    'float32',
    'dtype of activations; the official implementation probes in bfloat16',
    choices=_DTYPES,
  )
  maps: int = option(
    0,
    f'probes that keep the attention of one text in WORKDIR/maps, at most {MOST_STEPS}',
    where=True,
    least=0,
    most=MOST_STEPS,
  )


@dataclasses.dataclass(frozen=True)
class ValidationConfig:
  """The validation loss."""

  every: int = option(1_000, 'steps; 0: only before the first and after the last', least=0)
  batches: int = option(50, 'largest number of batches of each validation set', least=1)


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """The sizes of the axes of the device mesh; -1 takes the devices that remain."""

  data: int = option(-1, 'devices that split the batch', where=True)
  fsdp: int = option(1, 'devices that also split the parameters', where=True)
  tensor: int = option(1, 'devices that split heads and hidden units, not the batch', where=True)


@dataclasses.dataclass(frozen=True)
class ProfileConfig:
  """A trace of `jax.profiler` below WORKDIR/profile, for TensorBoard or Perfetto."""

  first: int = option(
    10, 'step of the process at which it begins; the first steps compile', where=True, least=1
  )
  steps: int = option(0, 'steps of a trace; 0: none', where=True, least=0)


@dataclasses.dataclass(frozen=True)
class Label:
  """The origin of a config: a trial of a config file, with its task, budget and protocol."""

  trial: str = option('', 'name in its config file', where=True)
  task: str = option('', 'group in which reports compare trials, such as paper', where=True)
  budget: str = option('', 'desk, tenth or full', where=True)
  protocol: str = option('', 'paper or released', where=True)


def _where(about: str) -> Any:
  """A key that decides where and how fast a run computes; None by default."""
  return option(None, about, where=True)


@dataclasses.dataclass(frozen=True)
class ModelOptions:
  """A named size, and values that replace those of the size or of ModelConfig; None keeps them.

  The fields are those of ModelConfig, which says more about each, but a model that is trained has
  an unembedding.
  """

  size: str = option('60m', 'tiny, 60m, 1b, 7b, 13b, which the next keys override')
  layers: int | None = option(None, 'blocks')
  d_model: int | None = option(None, 'width of the residual stream')
  heads: int | None = option(None, 'query heads')
  ffn_hidden: int | None = option(None, 'hidden units of a feed-forward network')
  vocab_size: int | None = option(None, "ids; empty: the data's")
  input_features: int | None = option(None, 'of a continuous task, whose data fill it in')
  output_features: int | None = option(None, 'of a continuous task, whose data fill it in')
  kv_heads: int | None = option(None, 'key and value heads; empty: heads')
  head_dim: int | None = option(None, 'size of a head; empty: d_model / heads')
  pattern: tuple[Layer, ...] | None = option(None, "'Layer(mask=Window(size=32)); Layer()'")
  ffn: str | None = option(ModelConfig.ffn, 'feed-forward network, such as swiglu, relu, none')
  norm: str | None = option(ModelConfig.norm, 'rmsnorm, layernorm, single, dyt or none')
  norm_eps: float | None = option(ModelConfig.norm_eps, 'added to the mean square')
  norm_location: str | None = option(
    ModelConfig.norm_location, 'pre, post, sandwich, after or protected'
  )
  parallel_residual: bool | None = option(None, 'attention and FFN read the same input')
  biases: tuple[str, ...] | None = option(None, "linear layers with a bias, such as 'qkv, out'")
  embedding_dim: int | None = option(None, 'width of token embeddings, if they are projected')
  tied: bool | None = option(None, 'the unembedding is the embedding')
  logit_cap: float | None = option(None, 'soft cap of the logits')
  linear: str | None = option(ModelConfig.linear, 'plain or sigma_reparam')
  combine_heads: str | None = option(ModelConfig.combine_heads, 'concat or add')
  sink_tokens: int | None = option(None, 'learned vectors before every sequence')
  init: str | None = option(ModelConfig.init, 'torch_default or tinyllama')
  dtype: str | None = option(ModelConfig.dtype, 'of activations: bfloat16 or float32')
  implementation: str | None = _where('of attention, see `attend`')
  remat: str | None = _where('what the backward pass recomputes')
  unroll: int | None = _where('blocks of one iteration of the loop over blocks')


@dataclasses.dataclass(frozen=True)
class Experiment:
  """One training run, with the paper's defaults (Section 4)."""

  # The seed is an int32 argument of the program that draws the parameters.
  seed: int = option(
    0, 'seed of the parameters and of the order of the data', least=0, most=2**31 - 1
  )
  steps: int = option(20_000, 'updates', least=1)
  batch_size: int = option(512, 'sequences in a step', least=1)
  microbatches: int = option(1, 'slices of a batch whose gradients are accumulated', least=1)
  gradient_dtype: str = option(
    'float32',
    'dtype in which gradients are summed over mesh.data; bfloat16 halves the traffic',
    choices=_DTYPES,
  )
  loss_logits: int | None = option(
    None,
    'most logits at a time on a device; empty: 2**28 on a GPU or TPU, else 2**26',
    where=True,
    least=1,
  )
  log_every: int = option(20, 'steps between training metrics', where=True, least=1)
  checkpoint_every: int = option(1_000, 'steps; 0: not by steps', where=True, least=0)
  checkpoint_minutes: float = option(
    15.0, 'after which a checkpoint is saved in any case; 0: only by steps', where=True, least=0
  )
  checkpoints_kept: int = option(2, 'how many of the newest checkpoints stay', where=True, least=1)
  wandb: str = option('', 'a project of Weights & Biases that gets the metrics too', where=True)
  plugins: str = option('', 'Python files with your components; a run fills it in', where=True)
  init: InitConfig = InitConfig()
  model: ModelOptions = ModelOptions()
  attention: AttentionSpec = AttentionSpec()
  data: DataConfig = DataConfig()
  optimizer: OptimizerConfig = OptimizerConfig()
  probe: ProbeConfig = ProbeConfig()
  validation: ValidationConfig = ValidationConfig()
  mesh: MeshConfig = MeshConfig()
  profile: ProfileConfig = ProfileConfig()
  label: Label = Label()

  def __post_init__(self):
    if self.batch_size % self.microbatches:
      raise ValueError(
        f'microbatches = {self.microbatches} must divide batch_size = {self.batch_size}.'
      )
    # A chunk has one token more than the context: the last input has a next token to predict, too.
    chunk = self.data.context + 1
    if self.probe.length > chunk:
      raise ValueError(
        f'probe.length = {self.probe.length} must be at most {chunk}, data.context + 1.'
      )
    for intervention in self.data.interventions:
      intervention.check(chunk, self.model.vocab_size or 2**31)  # no token id exceeds it
    if not self.init.source:  # whose sizes are known
      self.model_config()  # raises where model and attention do not fit each other

  @property
  def sizes_are_known(self) -> bool:
    """True if the model is known; sizes of a source are known only after `with_source`."""
    return not self.init.source or None not in (
      self.model.layers,
      self.model.d_model,
      self.model.heads,
      self.model.ffn_hidden,
    )

  @property
  def microbatch_size(self) -> int:
    """Sequences that are computed at a time: one slice of a batch."""
    return self.batch_size // self.microbatches

  @property
  def tokens_per_step(self) -> int:
    """Tokens that an update reads, over all devices and micro-batches."""
    return self.batch_size * self.data.context

  def model_config(self) -> ModelConfig:
    """The model; before the data are opened, a vocabulary that is not known counts as bytes."""
    known = self.data.sizes
    if known.vocab_size is None:
      known = known._replace(vocab_size=_BYTES)
    chosen = {key: value for key, value in vars(self.model).items() if value is not None}
    return sized(**known._asdict() | chosen, attention=self.attention)

  def check_devices(self, devices: int | None = None) -> None:
    """Raises a ValueError if the mesh does not fit these devices, a micro-batch or the model."""
    data, fsdp, tensor = mesh_sizes(
      self.mesh.data, self.mesh.fsdp, self.mesh.tensor, devices or jax.device_count()
    )
    groups, sequences = data * fsdp, self.microbatch_size
    if sequences % groups:
      fitting = max(1, round(sequences / groups)) * groups * self.microbatches
      raise ValueError(
        f'mesh.data x mesh.fsdp = {groups} must divide a micro-batch of {sequences} sequences: '
        f'use batch_size = {fitting}, or other microbatches.'
      )
    check_tensor(self.model_config(), tensor)


class Key(NamedTuple):
  """A config key: its default, and what its `option` says about it.

  hint: the type of its values. kind: the same without None, or that of the elements if it has
  `several`. optional: whether it may be None.
  """

  default: Any
  about: Mapping[str, Any]
  hint: Any
  kind: type
  several: bool
  optional: bool

  @property
  def holds_components(self) -> bool:
    """True if its value, or every element of it, is a component."""
    return issubclass(self.kind, Component)

  @property
  def separator(self) -> str:
    """The text between its elements."""
    return '; ' if self.holds_components else ', '


def _keys(section: Any, prefix: str = '') -> Iterator[tuple[str, Key]]:
  hints = typing.get_type_hints(type(section))
  for field in dataclasses.fields(section):
    name, default, hint = prefix + field.name, field.default, hints[field.name]
    if dataclasses.is_dataclass(default) and not isinstance(default, Component):
      yield from _keys(default, f'{name}.')
    elif field.metadata.get('key', True):
      optional = type(None) in typing.get_args(hint)
      kind = typing.get_args(hint)[0] if optional else hint
      several = typing.get_origin(kind) is tuple
      kind = typing.get_args(kind)[0] if several else kind
      yield name, Key(default, field.metadata, hint, kind, several, optional)


DEFAULT = Experiment()
KEYS = dict(_keys(DEFAULT))


def leaves(experiment: Experiment) -> list[tuple[str, Any, Mapping[str, Any]]]:
  """(key, value, what its `option` says) of every key."""
  values = operator.attrgetter(*KEYS)(experiment)
  return [(name, value, key.about) for (name, key), value in zip(KEYS.items(), values)]


def value_of(experiment: Experiment, key: str) -> Any:
  """The value of a dotted key."""
  return operator.attrgetter(key)(experiment)


def changed(experiment: Experiment, changes: Mapping[str, Any]) -> Experiment:
  """The experiment with other values, {'attention.mask': Window(32), 'steps': 50}.

  A value may also be a text, as config.json has it.

  Raises:
    ValueError: an unknown key, component or value; lists the choices. UnknownComponent, a
      subclass: no imported module defines a component.
  """
  sections: dict[str, dict[str, Any]] = {}
  for name, value in changes.items():
    section, _, field = name.rpartition('.')
    if name not in KEYS:
      near = [key for key in KEYS if key.rpartition('.')[0] == section]
      check_known(name, near or KEYS, 'Unknown config key')
    try:
      sections.setdefault(section, {})[field] = _value(name, value)
    except UnknownComponent as error:
      error.key = name
      raise
  fields = sections.pop('', {})
  for name, values in sections.items():
    fields[name] = dataclasses.replace(getattr(experiment, name), **values)
  return dataclasses.replace(experiment, **fields)


def _value(name: str, value: Any) -> Any:
  """The value of a key, checked by its type and by what its `option` says about it."""
  key = KEYS[name]
  if isinstance(value, str) and key.several:
    parts = filter(None, map(str.strip, value.split(key.separator.strip())))
    value = tuple(typed(name, part, key.kind) for part in parts)
  elif value == '' and key.holds_components:
    value = None
  if value is None and not key.optional:
    raise ValueError(f'The config key {name} is empty, and needs a value.')
  value = typed(name, value, key.hint)
  if value is None:
    return None
  if key.about.get('choices'):
    check_known(value, key.about['choices'], name)
  if (least := key.about.get('least')) is not None:
    most = key.about['most']
    if not least <= value <= (sys.float_info.max if most is None else most):  # NaN fails both
      limits = 'finite' if most is None else f'at most {most}'
      raise ValueError(f'{name} must be at least {least} and {limits}, not {value}.')
  return value


def from_dict(config: Mapping[str, Any]) -> Experiment:
  """Builds the Experiment that a (JSON) dict describes; imports and opens nothing.

  A key that decides what is computed is required: a changed default would silently change a stored
  run.

  Raises:
    ValueError: a missing key, or as `changed`.
  """
  try:
    flat = flatten_dict(dict(config), sep='.')
    for name, key in KEYS.items():
      if name not in flat and not key.about.get('where'):
        raise ValueError(f'Missing config key {name}.')
    return changed(DEFAULT, flat)
  except (TypeError, AttributeError, OverflowError) as error:
    raise ValueError(f'a value of the config has the wrong type: {error}.') from None


def known_part(config: Mapping[str, Any]) -> tuple[Experiment, dict[str, str]]:
  """The Experiment of a stored config as far as its components are known, and the other texts.

  The others, by their keys, have defaults in the Experiment. If one is of attention, so have all
  components of attention but the position, which need not fit a default; they are among the others.
  """
  others, defaults = {}, as_dict(DEFAULT)
  while True:
    try:
      return from_dict(config), others
    except UnknownComponent as error:
      section, name = error.key.split('.')
      values, standard = config[section], defaults[section]
      names = {name}
      if section == 'attention':
        names |= {part for part in values if part != 'position' and values[part] != standard[part]}
      others |= {f'{section}.{part}': str(values[part]) for part in sorted(names)}
      config = {**config, section: values | {part: standard[part] for part in names}}


def unrolled(
  model: ModelConfig, experiment: Experiment, platform: str, mesh: Mapping[str, int]
) -> ModelConfig:
  """Unrolls the loop over blocks if they are few and the config leaves `model.unroll` empty.

  platform: 'cpu', 'cuda' or 'tpu'; on a CPU compiling takes longer than a loop costs.
  mesh: {axis: devices}.
  """
  few = model.layers <= 24 and model.remat == 'none'  # more would take long to compile
  # libtpu 0.0.42.1 aborts (spmd_partitioner.cc, IsManualSubgroup) on Pallas kernels outside of a
  # loop where both axes split the batch.
  aborts = platform == 'tpu' and mesh['data'] > 1 < mesh['fsdp']
  if experiment.model.unroll is not None or platform == 'cpu' or not few or aborts:
    return model
  return dataclasses.replace(model, unroll=model.layers)


def as_dict(experiment: Experiment) -> dict[str, Any]:
  """The nested dict that config.json holds; `from_dict` reads it."""
  texts = {name: _text(name, value) for name, value, _ in leaves(experiment)}
  return unflatten_dict(texts, sep='.')


def as_config_dict(experiment: Experiment) -> ConfigDict:
  """The ConfigDict that a config file returns, of whose values a command line knows the types."""
  texts: dict[str, Any] = {**flatten_dict(as_dict(experiment), sep='.')}
  for name, key in KEYS.items():
    if key.optional:
      kind = key.kind if key.kind in (int, float, bool) else str
      texts[name] = config_dict.FieldReference(texts[name], field_type=kind)
  return ConfigDict(unflatten_dict(texts, sep='.')).lock()


def _text(name: str, value: Any, write: Callable[[Any], str] = repr) -> Any:
  """A value as config.json has it: components as texts, and '' for what is empty.

  Components are written with all of their arguments: a changed default changes no stored run.
  """
  key = KEYS[name]
  if isinstance(value, tuple):
    return key.separator.join(map(write if key.holds_components else str, value))
  if key.holds_components and not key.several:
    return write(value) if value else ''
  return value


def keys_as_text() -> str:
  """All config keys with their defaults and meanings, a line each."""
  lines = []
  for name, key in KEYS.items():
    text = _text(name, key.default, short_text)
    default = f'  {name} = {"" if text is None else text}'
    lines.append(f'{default.ljust(44)}  {key.about.get("about", "")}'.rstrip())
  return '\n'.join(lines)


def where_keys() -> list[str]:
  """The keys that decide only where and how fast a run computes, or what it records."""
  return [name for name, key in KEYS.items() if key.about.get('where')]


def differences(old: Experiment, new: Experiment) -> list[str]:
  """Lines 'key: old -> new' for the keys that decide what is computed and differ.

  A size of the data that is empty in `new` takes the run's value, and does not differ.
  """
  lines = []
  for (name, before, about), (_, after, _) in zip(leaves(old), leaves(new)):
    of_data = after is None and name in _OF_DATA
    if not (about.get('where') or of_data or _equal(before, after)):
      lines.append(f'{name}: {before!r} -> {after!r}')
  return lines


def _equal(a: Any, b: Any) -> bool:
  # Files of models may hold 1e-5 as the nearest float32.
  return a == b or isinstance(a, float) and isinstance(b, float) and np.float32(a) == np.float32(b)


def resolved(experiment: Experiment, data: Dataset) -> Experiment:
  """The experiment with the sizes of its data and the files of its components, for config.json.

  Raises:
    ValueError: the vocabulary of the data exceeds the model's.
  """
  sizes = {'input_features': data.input_features, 'output_features': data.output_features}
  if data.vocab_size:
    largest = experiment.model.vocab_size or data.vocab_size
    if data.vocab_size > largest:
      raise ValueError(
        f'The data (data.tokenizer, or RandomTokens(below=...)) have '
        f'{data.vocab_size} ids, and model.vocab_size is {largest}: raise '
        'model.vocab_size, or leave it empty.'
      )
    sizes = {'vocab_size': largest}
  model = dataclasses.replace(experiment.model, **sizes)
  return dataclasses.replace(experiment, model=model, plugins=plugins_of(experiment))
