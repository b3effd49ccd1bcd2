"""Experiment: one training run as typed values, and the ConfigDict that is derived from it.

A config key is a field of `Experiment` or of the dataclass of its section: nothing else lists it.
Only the command line sees the dict.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict, config_dict

from sink_jax.arguments import check_known
from sink_jax.attention.spec import COMPONENTS, AttentionSpec
from sink_jax.component import Component, UnknownComponent, from_string, option, short_text
from sink_jax.data.dataset import DataConfig, Dataset
from sink_jax.data.token_edits import TokenEdit
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


class NotExpressible(ValueError):
  """A trial has no counterpart at this budget, such as a window smaller than one token."""

  label: Mapping[str, str] = {}  # the label that its config would have had


@dataclasses.dataclass(frozen=True)
class InitConfig:
  """The parameters to begin with, if they are another model's and not drawn by the seed."""

  source: str = option('', "a run's folder, or a model's folder or name; {seed} is the run's seed")
  graft: str = option('', "identity or random: replace the source's attention, norm and sink tokens by "
                      'those that differ from the defaults', choices=('', *STARTS))
  kept: str | None = option(None, "keys that a graft keeps of the source; unset: all keys at their "
                            "default; '': none")
  train: str = option('all', 'what updates change: all, new (what the source lacks), attention',
                      choices=('all', 'new', 'attention'))

  def __post_init__(self):
    for key in filter(None, (self.kept or '').split(',')):
      check_known(key.strip(), GRAFT_KEYS, 'init.kept has an unknown key')
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
  dtype: str = option('float32', 'dtype of activations; the official implementation probes in bfloat16',
                      choices=_DTYPES)


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

  first: int = option(10, 'step of the process at which it begins; the first steps compile',
                      where=True, least=1)
  steps: int = option(0, 'steps of a trace; 0: none', where=True, least=0)


@dataclasses.dataclass(frozen=True)
class Label:
  """The origin of a config: a trial of a config file, its task, budget and protocol, if it has them."""

  trial: str = option('', 'name in its config file', where=True)
  task: str = option('', 'group in which reports compare trials, such as paper or synthetic', where=True)
  budget: str = option('', 'desk, tenth or full', where=True)
  protocol: str = option('', 'paper or released', where=True)


def _model_fields() -> Iterator[tuple[str, Any, Any]]:
  """Fields of `ModelOptions`: those of ModelConfig, but None for an empty default."""
  yield 'size', str, option('60m', 'tiny, 60m, 1b, 7b, 13b, which the next keys override')
  hints = typing.get_type_hints(ModelConfig)
  for field in dataclasses.fields(ModelConfig):
    if field.name not in ('attention', 'unembedding'):  # a model that is trained has one
      default, where = field.default, bool(field.metadata.get('where'))
      if where or not default or default in (dataclasses.MISSING, ModelConfig.pattern):
        default = None
      yield field.name, hints[field.name] | None, option(
          default, f'see ModelConfig.{field.name}', where=where)


# A named size, and values that replace the values of the size; None keeps them.
ModelOptions: Any = dataclasses.make_dataclass('ModelOptions', _model_fields(), frozen=True)


@dataclasses.dataclass(frozen=True)
class Experiment:
  """One training run, with the paper's defaults (Section 4)."""

  # The seed is an int32 argument of the program that draws the parameters.
  seed: int = option(0, 'seed of the parameters and of the order of the data', least=0, most=2**31 - 1)
  steps: int = option(20_000, 'updates', least=1)
  batch_size: int = option(512, 'sequences in a step', least=1)
  microbatches: int = option(1, 'slices of a batch whose gradients are accumulated', least=1)
  gradient_dtype: str = option('float32', 'dtype in which gradients are summed over mesh.data; bfloat16 '
                               'halves the traffic', choices=_DTYPES)
  loss_logits: int | None = option(None, 'most logits at a time on a device; empty: 2**28 on a GPU '
                                   'or TPU, else 2**26', where=True, least=1)
  log_every: int = option(20, 'steps between training metrics', where=True, least=1)
  checkpoint_every: int = option(1_000, 'steps; 0: only after the last one', where=True, least=0)
  checkpoints_kept: int = option(2, 'how many of the newest checkpoints stay', where=True, least=1)
  wandb: str = option('', 'a project of Weights & Biases that gets the metrics too', where=True)
  plugins: str = option('', 'Python files with your components; a run fills it in',
                        where=True)
  init: InitConfig = InitConfig()
  model: ModelOptions = ModelOptions()  # pyright: ignore[reportInvalidTypeForm]
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
      raise ValueError(f'microbatches = {self.microbatches} must divide batch_size = '
                       f'{self.batch_size}.')
    # A chunk has one token more than the context: the last input has a next token to predict, too.
    chunk = self.data.context + 1
    if self.probe.length > chunk:
      raise ValueError(f'probe.length = {self.probe.length} must be at most {chunk}, data.context '
                       '+ 1.')
    for intervention in self.data.interventions:
      intervention.check(chunk, self.model.vocab_size or 2**31)  # no token id exceeds it
    if self.sizes_are_known:
      self.model_before_data()  # raises where model and attention do not fit each other

  @property
  def sizes_are_known(self) -> bool:
    """True if the model is known; sizes of a source are known only after `with_source`."""
    return not self.init.source or None not in (
        self.model.layers, self.model.d_model, self.model.heads, self.model.ffn_hidden)

  @property
  def microbatch_size(self) -> int:
    """Sequences that are computed at a time: one slice of a batch."""
    return self.batch_size // self.microbatches

  @property
  def tokens_per_step(self) -> int:
    """Tokens that an update reads, over all devices and micro-batches."""
    return self.batch_size * self.data.context

  def model_config(self, vocab_size: int | None = None, input_features: int = 0,
                   output_features: int = 0) -> ModelConfig:
    """The model for data with this vocabulary, or with these features if there is no vocabulary.

    Raises:
      ValueError: the vocabulary of the data exceeds the model's, or a value is out of range.
    """
    options = {key: value for key, value in vars(self.model).items() if value is not None}
    if vocab_size:
      largest = options.setdefault('vocab_size', vocab_size)
      if vocab_size > largest:
        raise ValueError(f'The data (data.tokenizer, or RandomTokens(below=...)) have {vocab_size} '
                         f'ids, and model.vocab_size is {largest}: raise model.vocab_size, or '
                         'leave it empty.')
    elif input_features:
      options |= dict(input_features=input_features, output_features=output_features)
    return sized(**options, attention=self.attention)

  def model_before_data(self) -> ModelConfig:
    """The model as far as it is known without data; a tokenizer that does not exist yet counts as bytes."""
    source, tokenizer = self.data.source, self.data.tokenizer
    known = self.model.vocab_size or getattr(
        source, 'vocab_size', getattr(tokenizer, 'vocab_size', None) or 258)
    return self.model_config(known, getattr(source, 'input_features', 0),
                             getattr(source, 'output_features', 0))

  def check_devices(self, devices: int | None = None) -> None:
    """Raises a ValueError if the mesh does not fit these devices, a micro-batch or the model."""
    data, fsdp, tensor = mesh_sizes(self.mesh.data, self.mesh.fsdp, self.mesh.tensor,
                                    devices or jax.device_count())
    groups, sequences = data * fsdp, self.microbatch_size
    if sequences % groups:
      fitting = max(1, round(sequences / groups)) * groups * self.microbatches
      raise ValueError(
          f'mesh.data x mesh.fsdp = {groups} must divide a micro-batch of {sequences} sequences: '
          f'use batch_size = {fitting}, or other microbatches.')
    check_tensor(self.model_before_data(), tensor)


def from_dict(config: Mapping[str, Any]) -> Experiment:
  """Builds the Experiment that a (JSON) dict describes; imports and opens nothing.

  A key that decides what is computed is required: a changed default would silently change a stored run.

  Raises:
    ValueError: an unknown or missing key, an unknown component or value; lists the choices.
      UnknownComponent, a subclass: no imported module defines a component.
  """
  try:
    return _built(Experiment(), config)
  except (TypeError, AttributeError, OverflowError) as error:
    raise ValueError(f'a value of the config has the wrong type: {error}.') from None


def known_part(config: Mapping[str, Any]) -> tuple[Experiment, dict[str, str]]:
  """The Experiment of a stored config as far as its components are known, and the other texts.

  The others, by their keys, have defaults in the Experiment. If one is of attention, so have all
  components of attention but the position, which need not fit a default; they are among the others.
  """
  others = {}
  while True:
    try:
      return from_dict(config), others
    except UnknownComponent as error:
      section, name = error.key.split('.')
      values, standard = config[section], get_config().to_dict()[section]
      names = {name}
      if section == 'attention':
        names |= {part for part in values if part != 'position' and values[part] != standard[part]}
      others |= {f'{section}.{part}': str(values[part]) for part in sorted(names)}
      config = {**config, section: values | {part: standard[part] for part in names}}


def _built(default: Any, section: Mapping[str, Any], prefix: str = '') -> Any:
  """A section of a config as a value of the type of `default`."""
  fields, hints = _keys(default), typing.get_type_hints(type(default))
  for name in section:
    check_known(prefix + name, [prefix + key for key in fields], 'Unknown config key')
  values = {}
  for name, field in fields.items():
    if _is_section(field.default):
      values[name] = _built(field.default, section.get(name, {}), f'{prefix}{name}.')
    elif name in section:
      try:
        values[name] = _value(prefix + name, section[name], hints[name], field.metadata)
      except UnknownComponent as error:
        error.key = prefix + name
        raise
    elif not field.metadata.get('where'):
      raise ValueError(f'Missing config key {prefix}{name}.')
  return type(default)(**values)


def _value(key: str, value: Any, hint: Any, about: Mapping[str, Any]) -> Any:
  """The value of a key, checked by what its `option` says about it."""
  if key in _READERS:
    return None if value is None else _READERS[key](value)
  if kind := _component(hint):
    return from_string(kind, value) if value else None
  if value is None:
    if type(None) in typing.get_args(hint):
      return None
    raise ValueError(f'The config key {key} is empty, and needs a value.')
  if about['choices']:
    check_known(value, about['choices'], key)
  if (least := about['least']) is not None:
    most = sys.float_info.max if about['most'] is None else about['most']
    if not least <= value <= most:  # NaN fails every comparison
      limits = 'finite' if about['most'] is None else f'at most {most}'
      raise ValueError(f'{key} must be at least {least} and {limits}, not {value}.')
  return value


def unrolled(model: ModelConfig, experiment: Experiment, platform: str,
             mesh: Mapping[str, int]) -> ModelConfig:
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


def get_config() -> ConfigDict:
  """The defaults as a ConfigDict; a key without a value is a placeholder of its type."""
  return _as_dict(Experiment()).lock()


def _as_dict(section: Any) -> ConfigDict:
  config, hints = ConfigDict(), typing.get_type_hints(type(section))
  for name in _keys(section):
    value = getattr(section, name)
    if _is_section(value):
      config[name] = _as_dict(value)
    elif value is None and not _component(hints[name]):
      kind = typing.get_args(hints[name])[0]  # the other one is None
      config[name] = config_dict.placeholder(kind if kind in (int, float, bool, str) else str)
    else:
      config[name] = _text(value)
  return config


def _text(value: Any) -> Any:
  """A default as a config has it: components as texts, and '' for what is empty."""
  if isinstance(value, Component):
    return short_text(value)
  return '' if value in (None, ()) else value


def keys_as_text() -> str:
  """All config keys with their defaults and meanings, a line each."""
  return '\n'.join(f'  {key} = {_text(value)}'.ljust(44) + f'  {field.get("about", "")}'.rstrip()
                   for key, value, field in leaves(Experiment()))


def where_keys() -> list[str]:
  """The keys that decide only where and how fast a run computes, or what it records."""
  return [key for key, _, field in leaves(Experiment()) if field.get('where')]


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
  """Lines 'key: old -> new' for the keys that decide what is computed and differ.

  A size of the data that is empty in `new` takes the run's value, and does not differ.
  """
  try:
    before = from_dict(old)
  except UnknownComponent as error:  # so that it is not a component of `new`
    return [f'{error.key}: {error}']
  pairs = zip(leaves(before), leaves(from_dict(new)))
  return [f'{key}: {before!r} -> {after!r}' for (key, before, field), (_, after, _) in pairs
          if not field.get('where') and not (after is None and key in _OF_DATA)
          and not _equal(before, after)]


def _equal(a: Any, b: Any) -> bool:
  # Files of models may hold 1e-5 as the nearest float32.
  return a == b or isinstance(a, float) and isinstance(b, float) and np.float32(a) == np.float32(b)


def leaves(section: Any, prefix: str = '') -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
  """(key, value, metadata of its field) of every key of a section and of those within it."""
  for name, field in _keys(section).items():
    value = getattr(section, name)
    if _is_section(value):
      yield from leaves(value, f'{prefix}{name}.')
    else:
      yield prefix + name, value, field.metadata


def resolved(config: Mapping[str, Any], experiment: Experiment, data: Dataset) -> dict[str, Any]:
  """The config with the values that the data decide, so that a stored run can be read without data."""
  model = dict(config['model'])
  if data.vocab_size:
    model['vocab_size'] = model['vocab_size'] or data.vocab_size
  else:
    model |= dict(input_features=data.input_features, output_features=data.output_features)
  return dict(config, model=model, plugins=plugins_of(config, experiment))


def _keys(section: Any) -> dict[str, dataclasses.Field]:
  return {field.name: field for field in dataclasses.fields(section)
          if field.metadata.get('key', True)}


def _is_section(value: Any) -> bool:
  return dataclasses.is_dataclass(value) and not isinstance(value, Component)


def _component(hint: Any) -> type[Component] | None:
  """The base class of the component that a field holds; None for other fields."""
  return next((kind for kind in (hint, *typing.get_args(hint))
               if isinstance(kind, type) and issubclass(kind, Component)), None)


def _components(base: type[Component], text: str) -> tuple[Component, ...]:
  return tuple(from_string(base, part) for part in text.split(';') if part.strip())


# Readers of the config values that are neither plain nor one component.
_READERS = {'model.pattern': functools.partial(_components, Layer),
            'model.biases': lambda text: tuple(filter(None, map(str.strip, text.split(',')))),
            'data.interventions': functools.partial(_components, TokenEdit)}
