"""Experiment: one training run as typed values, and the ConfigDict that is derived from it.

A config key is a field of `Experiment` or of the dataclass of its section: nothing else lists it.
Nothing below the command line sees the dict.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from ml_collections import ConfigDict, config_dict

from sink_jax.arguments import check_known, did_you_mean
from sink_jax.attention.spec import COMPONENTS, AttentionSpec
from sink_jax.component import Component, check_integers, from_string, option, short_text
from sink_jax.data.dataset import DataConfig, Dataset
from sink_jax.data.token_edits import TokenEdit
from sink_jax.io.paths import import_file
from sink_jax.models.config import ModelConfig
from sink_jax.models.graft import STARTS
from sink_jax.models.pattern import biases_from_text, pattern_from_text
from sink_jax.models.sizes import sized
from sink_jax.train.optimizer import OptimizerConfig
from sink_jax.train.sharding import check_tensor, mesh_sizes

# What a graft can change: the components of attention, the norm and the sink tokens.
GRAFT_KEYS = (*(f'attention.{name}' for name in COMPONENTS), 'model.norm', 'model.sink_tokens')
_LARGEST_VOCABULARY = 2**31  # no token id exceeds it
_MOST_BLOCKS = 24  # that are compiled without a loop: the time of compiling grows with them


class NotExpressible(ValueError):
  """A trial has no counterpart at this budget, such as a window smaller than one token.

  label: what its config's label would have been, for the record.
  """

  label: Mapping[str, str] = {}


@dataclasses.dataclass(frozen=True)
class InitConfig:
  """Parameters of another model to begin with, in place of those that the seed draws."""

  source: str = option('', "a run's folder, or a model's folder or name; {seed} is the run's seed")
  graft: str = option('', "identity or random: attention, norm and sink tokens that differ from the "
                      "defaults replace the source's")
  kept: str | None = option(None, "keys that a graft keeps of the source; empty: all at their "
                            "default; '': none")
  train: str = option('all', 'what updates change: all, new (what the source lacks), attention')

  def __post_init__(self):
    check_known(self.graft, ('', *STARTS), 'init.graft')
    check_known(self.train, ('all', 'new', 'attention'), 'init.train')
    for key in filter(None, (self.kept or '').split(',')):
      check_known(key.strip(), GRAFT_KEYS, 'init.kept has an unknown key')
    if not self.source and (self.graft or self.train != 'all' or self.kept is not None):
      raise ValueError(f'{self}: init.graft, init.train and init.kept need init.source.')
    if self.kept is not None and not self.graft:
      raise ValueError(f'init.kept = {self.kept!r} needs init.graft.')


@dataclasses.dataclass(frozen=True)
class ProbeConfig:
  """The sink probe, on a fixed set of sequences."""

  every: int = option(100, 'steps; 0: only before the first and after the last')
  sequences: int = option(100, 'of the probe')
  length: int = option(64, 'tokens of a sequence')
  epsilon: float = option(0.3, 'a head is a sink head above it')
  dtype: str = option('float32', 'of activations; the official implementation probes in bfloat16')

  def __post_init__(self):
    check_integers(self, 'every', 'sequences', 'length')
    if self.every < 0 or self.sequences < 1 or self.length < 2 or not 0 < self.epsilon < 1:
      raise ValueError(f'{self}: every must be 0 (first and last step only) or more, sequences at '
                       'least 1, length at least 2 and epsilon between 0 and 1.')
    check_known(self.dtype, ('float32', 'bfloat16'), 'probe.dtype')


@dataclasses.dataclass(frozen=True)
class ValidationConfig:
  """The validation loss."""

  every: int = option(1_000, 'steps; 0: only before the first and after the last')
  batches: int = option(50, 'at most, per validation set')

  def __post_init__(self):
    check_integers(self, 'every', 'batches')
    if self.every < 0 or self.batches < 1:
      raise ValueError(f'{self}: every must be 0 (first and last step only) or more, batches at '
                       'least 1.')


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """The sizes of the axes of the device mesh; -1 takes the devices that remain."""

  data: int = option(-1, 'devices that split the batch', where=True)
  fsdp: int = option(1, 'devices that also split the parameters', where=True)
  tensor: int = option(1, 'devices that split heads and hidden units, not the batch', where=True)


@dataclasses.dataclass(frozen=True)
class ProfileConfig:
  """A trace of `jax.profiler` below WORKDIR/profile, for TensorBoard or Perfetto."""

  first: int = option(10, 'step of the process at which it begins: the first ones compile',
                      where=True)
  steps: int = option(0, 'steps of a trace; 0: none', where=True)


@dataclasses.dataclass(frozen=True)
class Label:
  """Where a config is from: a trial of a config file, its budget and protocol, if it has them."""

  trial: str = option('', 'of a config file', where=True)
  budget: str = option('', 'desk, night, tenth or full', where=True)
  protocol: str = option('', 'paper or released', where=True)


def _model_fields() -> Iterator[tuple[str, Any, Any]]:
  """Fields of `ModelOptions`: those of ModelConfig, empty where its default says nothing."""
  yield 'size', str, option('60m', 'tiny, 60m, 1b, 7b, 13b, which the next keys override')
  hints = typing.get_type_hints(ModelConfig)
  for field in dataclasses.fields(ModelConfig):
    if field.name != 'attention':
      where = bool(field.metadata.get('where'))
      empty = where or not field.default or field.default in (dataclasses.MISSING, ModelConfig.pattern)
      about = f'see ModelConfig.{field.name}'
      yield (field.name, hints[field.name] | None,
             option(None if empty else field.default, about, where=where))


# A named size, and what takes the place of its values; None leaves a value as it is.
ModelOptions: Any = dataclasses.make_dataclass('ModelOptions', _model_fields(), frozen=True)


@dataclasses.dataclass(frozen=True)
class Experiment:
  """One training run, with the paper's defaults (Section 4)."""

  seed: int = option(0, 'of the parameters and of the order of the data')
  steps: int = option(20_000, 'updates')
  batch_size: int = option(512, 'sequences of a step')
  microbatches: int = option(1, 'slices of a batch whose gradients are accumulated')
  gradient_dtype: str = option('float32', 'in which gradients are summed over mesh.data; bfloat16 '
                               'halves the traffic')
  loss_logits: int | None = option(None, 'most logits at a time on a device; empty: 2**28 on a GPU '
                                   'or TPU, else 2**26', where=True)
  log_every: int = option(20, 'steps between training metrics', where=True)
  checkpoint_every: int = option(1_000, 'steps; 0: only after the last one', where=True)
  checkpoints_kept: int = option(2, 'the newest ones', where=True)
  wandb: str = option('', 'a project of Weights & Biases that gets the metrics too', where=True)
  plugins: str = option('', 'Python files with components of your own; a run fills it in',
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
    for name in ('steps', 'batch_size', 'microbatches', 'log_every', 'checkpoints_kept'):
      if getattr(self, name) < 1:
        raise ValueError(f'{name} must be at least 1, not {getattr(self, name)}.')
    if self.loss_logits is not None and not 1 <= self.loss_logits < 2**40:
      raise ValueError(f'loss_logits = {str(self.loss_logits)[:50]} must be from 1 to 2**40.')
    if self.checkpoint_every < 0:
      raise ValueError(f'checkpoint_every = {self.checkpoint_every} must be 0 (only after the last '
                       'step) or more.')
    check_known(self.gradient_dtype, ('float32', 'bfloat16'), 'gradient_dtype')
    # The seed is an int32 argument of the program that draws the parameters.
    if not 0 <= self.seed < 2**31:
      raise ValueError(f'seed must be between 0 and 2**31 - 1, not {self.seed}.')
    if self.batch_size % self.microbatches:
      raise ValueError(f'microbatches = {self.microbatches} must divide batch_size = '
                       f'{self.batch_size}.')
    # A chunk has one token more than the context: the last input has a next token to predict, too.
    chunk = self.data.context + 1
    if self.probe.length > chunk:
      raise ValueError(f'probe.length = {self.probe.length} must be at most {chunk}, data.context '
                       '+ 1.')
    if 0 < self.data.max_tokens < chunk:
      raise ValueError(f'data.max_tokens = {self.data.max_tokens} must be 0 (all) or at least '
                       f'{chunk}, data.context + 1.')
    for intervention in self.data.interventions:
      intervention.check(chunk, self.model.vocab_size or _LARGEST_VOCABULARY)
    if self.sizes_are_known:
      self.model_before_data()  # raises where model and attention do not fit each other

  @property
  def sizes_are_known(self) -> bool:
    """Whether the model is known: not before `with_source` where its sizes are the source's."""
    return not self.init.source or None not in (
        self.model.layers, self.model.d_model, self.model.heads, self.model.ffn_hidden)

  @property
  def microbatch_size(self) -> int:
    """Sequences that are computed at a time: those of a slice of a batch."""
    return self.batch_size // self.microbatches

  @property
  def tokens_per_step(self) -> int:
    """Tokens that an update reads, of all devices and micro-batches."""
    return self.batch_size * self.data.context

  def model_config(self, vocab_size: int | None = None, input_features: int = 0,
                   output_features: int = 0) -> ModelConfig:
    """The model, for data of this vocabulary, or of these features where it has none.

    Raises:
      ValueError: the vocabulary of the data exceeds the model's, or a value is out of range.
    """
    options = {key: value for key, value in vars(self.model).items() if value is not None}
    if vocab_size:
      largest = options.setdefault('vocab_size', vocab_size)
      if vocab_size > largest:
        raise ValueError(f'The data (its tokenizer, or RandomTokens(below=...)) has {vocab_size} '
                         f'ids, model.vocab_size is {largest}: raise model.vocab_size, or leave it '
                         'empty to take that of the data.')
    elif input_features:
      options |= dict(input_features=input_features, output_features=output_features)
    return sized(**options, attention=self.attention)

  def model_before_data(self) -> ModelConfig:
    """The model as far as it is known without data: its vocabulary may be a stand-in."""
    source, tokenizer = self.data.source, self.data.tokenizer
    known = self.model.vocab_size or getattr(
        source, 'vocab_size', getattr(tokenizer, 'vocab_size', None) or 1)
    return self.model_config(known, getattr(source, 'input_features', 0),
                             getattr(source, 'output_features', 0))

  def check_devices(self, devices: int | None = None) -> None:
    """Raises a ValueError if the mesh does not fit these devices, a micro-batch or the model."""
    count = jax.device_count() if devices is None else devices
    data, fsdp, tensor = mesh_sizes(self.mesh.data, self.mesh.fsdp, self.mesh.tensor, count)
    devices, sequences = data * fsdp, self.microbatch_size
    if sequences % devices:
      fitting = max(1, round(sequences / devices)) * devices * self.microbatches
      splitting = f'{devices} devices' if tensor == 1 else f'{devices} groups of {tensor} devices'
      raise ValueError(
          f'{splitting} do not divide a micro-batch of {sequences} sequences '
          f'(batch_size {self.batch_size} / microbatches {self.microbatches}): use '
          f'batch_size = {fitting}, or other microbatches.')
    check_tensor(self.model_before_data(), tensor)


def from_dict(config: Mapping[str, Any]) -> Experiment:
  """Builds the Experiment that a (JSON) dict describes.

  A key that decides what is computed has to be there: a default that changed would silently change
  what a stored run is.

  Raises:
    ValueError: an unknown or missing key, an unknown component or value; lists the choices.
  """
  for path in filter(None, (config.get('plugins') or '').split(',')):
    try:
      import_file(path.strip())
    except ValueError as error:
      raise ValueError(f'plugins: the components of this run are in a file of its author: {error}')
  try:
    return _built(Experiment, config, '')
  except (TypeError, AttributeError, OverflowError) as error:
    raise ValueError(f'a value of the config has the wrong type: {error}.') from None


def _built(cls: type[Any], section: Mapping[str, Any], prefix: str) -> Any:
  fields, hints = _keys(cls), typing.get_type_hints(cls)
  for name in sorted(set(section) - set(fields)):
    raise ValueError(f'Unknown config key {prefix}{name}.'
                     f'{did_you_mean(name, fields, prefix + "{}")} Choices: '
                     f'{", ".join(prefix + key for key in sorted(fields))}.')
  values = {}
  for name, field in fields.items():
    key, hint = prefix + name, hints[name]
    if name not in section and not _is_section(hint):
      if not field.metadata.get('where'):
        raise ValueError(f'Missing config key {key}; `python -m sink_jax train --help` lists all.')
      continue
    value = section.get(name, {})
    if _is_section(hint):
      values[name] = _built(hint, value, f'{key}.')
    elif key in _READERS:
      values[name] = None if value is None else _READERS[key](value)
    elif kind := _component(hint):
      values[name] = from_string(kind, value) if value else None
    elif value is None and type(None) not in typing.get_args(hint):
      raise ValueError(f'The config key {key} is empty, and needs a value.')
    else:
      values[name] = value
  return cls(**values)


def unrolled(model: ModelConfig, experiment: Experiment, platform: str) -> ModelConfig:
  """The model without a loop over few blocks where the config leaves `model.unroll` empty.

  platform: 'cpu', 'cuda' or 'tpu'; on a CPU compiling takes longer than a loop costs.
  """
  few = platform != 'cpu' and model.layers <= _MOST_BLOCKS and model.remat == 'none'
  if experiment.model.unroll is None and few:
    return dataclasses.replace(model, unroll=model.layers)
  return model


def get_config() -> ConfigDict:
  """The defaults as a ConfigDict; a key without a value is a placeholder of its type."""
  config = _as_dict(Experiment())
  config.lock()
  return config


def _as_dict(values: Any) -> ConfigDict:
  section, hints = ConfigDict(), typing.get_type_hints(type(values))
  for name in _keys(type(values)):
    value, hint = getattr(values, name), hints[name]
    if _is_section(hint):
      section[name] = _as_dict(value)
    elif _component(hint):
      section[name] = short_text(value) if value is not None else ''
    elif hint is not str and not isinstance(value, (int, float, str, type(None))):
      section[name] = ''  # of tuples, which are texts in a config: all are empty by default
    elif value is None:
      kind = next(one for one in typing.get_args(hint) if one is not type(None))
      section[name] = config_dict.placeholder(kind if kind in (int, float, bool, str) else str)
    else:
      section[name] = value
  return section


def keys_as_text() -> str:
  """All config keys with their defaults and meanings, a line each."""
  texts = dict(_flat(get_config().to_dict()))
  return '\n'.join(
      f'  {key} = {"" if texts[key] is None else texts[key]}'.ljust(44) + f'  {about}'.rstrip()
      for key, (_, about, _) in _leaves(Experiment()).items())


def where_keys() -> list[str]:
  """The keys that decide only where and how fast a run computes, or what it records."""
  return [key for key, (_, _, where) in _leaves(Experiment()).items() if where]


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
  """Lines 'key: old -> new' of two configs, of the keys that decide what is computed.

  A key that is empty in `new` takes what the run began with, and makes no difference.
  """
  a, b = (_leaves(from_dict(config)) for config in (old, new))
  return [f'{key}: {a[key][0]!r} -> {value!r}' for key, (value, _, where) in b.items()
          if not where and value is not None and value != a[key][0]]


def _leaves(values: Any, prefix: str = '') -> dict[str, tuple[Any, str, bool]]:
  """{key: (value, what it means, whether it is one of `where_keys`)} of a section."""
  leaves: dict[str, tuple[Any, str, bool]] = {}
  for name, field in _keys(type(values)).items():
    value = getattr(values, name)
    if dataclasses.is_dataclass(value) and not isinstance(value, Component):
      leaves |= _leaves(value, f'{prefix}{name}.')
    else:
      leaves[prefix + name] = value, field.metadata.get('about', ''), bool(field.metadata.get('where'))
  return leaves


def _flat(config: Mapping[str, Any], prefix: str = '') -> Iterator[tuple[str, Any]]:
  for key, value in config.items():
    yield from _flat(value, f'{prefix}{key}.') if isinstance(value, dict) else [(prefix + key, value)]


def resolved(config: Mapping[str, Any], experiment: Experiment, data: Dataset) -> dict[str, Any]:
  """The config with what the data decide: a stored run is read without them."""
  model = dict(config['model'])
  if data.vocab_size:
    model['vocab_size'] = model['vocab_size'] or data.vocab_size
  else:
    model |= dict(input_features=data.input_features, output_features=data.output_features)
  return dict(config, model=model, plugins=config.get('plugins') or _plugins(experiment))


def _plugins(experiment: Experiment) -> str:
  """The files of components that are not of this package, which a reader of the run imports."""
  values = [*vars(experiment.attention).values(), *vars(experiment.data).values(),
            experiment.optimizer.rule, *experiment.data.interventions]
  modules = {type(value).__module__ for value in values if isinstance(value, Component)}
  files = (getattr(sys.modules.get(name), '__file__', None) for name in modules
           if not name.startswith('sink_jax.'))
  return ','.join(sorted(filter(None, files)))


def _keys(cls: type) -> dict[str, dataclasses.Field]:
  return {field.name: field for field in dataclasses.fields(cls)
          if field.metadata.get('key', True)}


def _is_section(hint: Any) -> bool:
  return dataclasses.is_dataclass(hint) and _component(hint) is None


def _component(hint: Any) -> type[Component] | None:
  """The kind of component that a field holds, if it holds one."""
  kinds = [hint, *typing.get_args(hint)]
  return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Component)
               and typing.get_origin(hint) is not tuple), None)


def _edits(text: str) -> tuple[TokenEdit, ...]:
  return tuple(from_string(TokenEdit, part) for part in text.split(';') if part.strip())


def _domain_weights(text: str) -> tuple[tuple[str, float], ...]:
  """'code=2, docs=1' -> (('code', 2.0), ('docs', 1.0))."""
  weights = {}
  for part in filter(None, (p.strip() for p in text.split(','))):
    name, _, value = part.partition('=')
    try:
      weight = float(value)
    except ValueError:
      weight = math.nan
    if name.strip() in weights or not 0 < weight < math.inf:
      raise ValueError(f'data.domain_weights: {part!r}: name each domain once, with a finite weight '
                       'greater than 0, such as code=2, docs=1.')
    weights[name.strip()] = weight
  return tuple(weights.items())


# How the texts of a config become values that are not plain and not components.
_READERS = {'model.pattern': pattern_from_text, 'model.biases': biases_from_text,
            'data.domain_weights': _domain_weights, 'data.interventions': _edits}
