"""Experiment: the typed form of a config; nothing below the command line sees the dict."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax

from sink_jax.arguments import did_you_mean
from sink_jax.attention.spec import AttentionSpec
from sink_jax.component import check_integers, from_string
from sink_jax.data.dataset import DataConfig, Dataset, Source
from sink_jax.data.token_edits import TokenEdit
from sink_jax.data.tokenizer import Tokenizer
from sink_jax.models.config import ModelConfig
from sink_jax.models.pattern import biases_from_text, pattern_from_text
from sink_jax.train.init_options import InitOptions
from sink_jax.train.model_options import ModelOptions
from sink_jax.train.old_keys import hint, with_components, with_update_rule
from sink_jax.train.optimizer import OptimizerConfig
from sink_jax.train.sharding import check_tensor, mesh_sizes
from sink_jax.train.update_rule import UpdateRule


class NotExpressible(ValueError):
  """A trial has no counterpart at this budget, such as a window smaller than one token.

  label: what its config's label would have been, for the record.
  """

  label: Mapping[str, str] = {}


REDUCTIONS = ('step', 'microbatch')  # of the gradients over the data axis, see `make_update`

# Keys that may differ when a run is resumed: they change where and how often things
# happen, not what is computed.
RESUMABLE = ('data.cache_dir', 'mesh.data', 'mesh.fsdp', 'mesh.tensor', 'log_every',
             'checkpoint_every', 'checkpoints_kept', 'label.trial', 'label.budget',
             'label.protocol')
_LARGEST_VOCABULARY = 2**31  # no token id exceeds it; where the tokenizer decides the vocabulary



@dataclasses.dataclass(frozen=True)
class ProbeConfig:
  """The sink probe, on a fixed set of sequences.

  every: steps between two of them; 0 probes before the first and after the last step only.
  length: tokens of a sequence. epsilon: a head is a sink head above it. dtype: of the probe's
  activations.
  """

  every: int = 100
  sequences: int = 100
  length: int = 64
  epsilon: float = 0.3
  dtype: str = 'float32'

  def __post_init__(self):
    check_integers(self, 'every', 'sequences', 'length')
    if self.every < 0 or self.sequences < 1 or self.length < 2 or not 0 < self.epsilon < 1:
      raise ValueError(f'{self}: every must be 0 (first and last step only) or more, sequences at '
                       'least 1, length at least 2 and epsilon between 0 and 1.')
    if self.dtype not in ('float32', 'bfloat16'):
      raise ValueError(f'probe.dtype = {self.dtype!r}; choices: float32, bfloat16.')


@dataclasses.dataclass(frozen=True)
class ValidationConfig:
  """The validation loss.

  every: steps between two of them; 0 validates before the first and after the last step only.
  batches: of a validation set, at most.
  """

  every: int = 1000
  batches: int = 50

  def __post_init__(self):
    check_integers(self, 'every', 'batches')
    if self.every < 0 or self.batches < 1:
      raise ValueError(f'{self}: every must be 0 (first and last step only) or more, batches at '
                       'least 1.')


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """The sizes of the axes of the device mesh; -1 takes the devices that remain."""

  data: int = -1
  fsdp: int = 1
  tensor: int = 1


@dataclasses.dataclass(frozen=True)
class Label:
  """Where a config is from: a trial of a config file, its budget and protocol, if it has them."""

  trial: str = ''
  budget: str = ''
  protocol: str = ''


@dataclasses.dataclass(frozen=True)
class Experiment:
  """One training run. `configs/base.py` explains every field."""

  seed: int
  steps: int
  batch_size: int
  microbatches: int
  gradient_reduction: str | None
  log_every: int
  checkpoint_every: int
  checkpoints_kept: int
  loss_logits: int | None
  init: InitOptions
  model: ModelOptions
  attention: AttentionSpec
  data: DataConfig
  optimizer: OptimizerConfig
  probe: ProbeConfig
  validation: ValidationConfig
  mesh: MeshConfig
  label: Label

  def __post_init__(self):
    for name in ('steps', 'batch_size', 'microbatches', 'log_every', 'checkpoints_kept'):
      if getattr(self, name) < 1:
        raise ValueError(f'{name} must be at least 1, not {getattr(self, name)}.')
    if self.loss_logits is not None and not (
        type(self.loss_logits) is int and 1 <= self.loss_logits < 2**40):
      raise ValueError(f'loss_logits = {str(self.loss_logits)[:50]} must be a whole number from 1 '
                       'to 2**40, or empty.')
    if self.checkpoint_every < 0:
      raise ValueError('checkpoint_every must be 0 (only after the last step) or more, not '
                       f'{self.checkpoint_every}.')
    if self.gradient_reduction not in (None, *REDUCTIONS):
      raise ValueError(f'gradient_reduction = {self.gradient_reduction!r}; choices: '
                       f'{", ".join(REDUCTIONS)}, or empty.')
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
    """Whether the model is: not before `start.with_sizes` where its sizes are those of a source."""
    return not self.init.source or None not in (
        self.model.layers, self.model.d_model, self.model.heads, self.model.ffn_hidden)

  @property
  def microbatch_size(self) -> int:
    """Sequences that are computed at a time: those of a slice of a batch."""
    return self.batch_size // self.microbatches

  def model_config(self, vocab_size: int | None = None, input_features: int = 0,
                   output_features: int = 0) -> ModelConfig:
    """The model, for data of this vocabulary (or these features): see `ModelOptions`.

    Raises:
      ValueError: the tokenizer's vocabulary exceeds the model's, or a value is none of a model.
    """
    if not self.sizes_are_known:
      raise ValueError(f'the sizes of the model are those of init.source = {self.init.source!r}, '
                       'which has not been looked at: set them here.')
    return self.model.model_config(self.attention, vocab_size, input_features, output_features)

  def model_before_data(self) -> ModelConfig:
    """The model as far as it is known without data: its vocabulary may be a stand-in."""
    source, tokenizer = self.data.source, self.data.tokenizer
    known = self.model.vocab_size or getattr(
        source, 'vocab_size', getattr(tokenizer, 'vocab_size', None) or 1)
    return self.model_config(known, getattr(source, 'input_features', 0),
                             getattr(source, 'output_features', 0))

  def check_devices(self, count: int | None = None) -> None:
    """Raises a ValueError if the mesh does not fit the devices, a micro-batch, the model.

    count: of devices; those of this job by default.
    """
    data, fsdp, tensor = mesh_sizes(self.mesh.data, self.mesh.fsdp, self.mesh.tensor,
                                    jax.device_count() if count is None else count)
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

  Raises:
    ValueError: an unknown or missing key, an unknown component or value; lists the choices.
  """
  try:
    return _from_dict(config)
  except (TypeError, AttributeError) as error:
    raise ValueError(f'a value of the config has the wrong type: {error}.') from None


def _from_dict(config: Mapping[str, Any]) -> Experiment:
  # Every key has to be there: a default that changed would silently change what a stored run is.
  # Keys that are younger than configs have what these computed.
  config = with_components(with_update_rule(config))
  top = _checked(config, '', Experiment)
  data: dict[str, Any] = dict(_checked(top['data'], 'data.', DataConfig))
  data['source'] = from_string(Source, data['source'])
  data['valid_source'] = from_string(Source, data['valid_source']) if data['valid_source'] else None
  data['tokenizer'] = from_string(Tokenizer, data['tokenizer'])
  data['domain_weights'] = _domain_weights(data['domain_weights'])
  data['interventions'] = tuple(
      from_string(TokenEdit, part) for part in data['interventions'].split(';') if part.strip())
  sections: dict[str, Any] = {
      'init': _section(InitOptions, top, 'init'),
      'model': _model(top),
      'attention': _section(AttentionSpec, top, 'attention'),
      'data': DataConfig(**data),
      'optimizer': _optimizer(top['optimizer']),
      'probe': _section(ProbeConfig, top, 'probe'),
      'validation': _section(ValidationConfig, top, 'validation'),
      'mesh': _section(MeshConfig, top, 'mesh'),
      'label': _section(Label, top, 'label')}
  return Experiment(**{**top, **sections})


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = '') -> list[str]:
  """Lines 'key: old -> new' of two config dicts, RESUMABLE keys left out."""
  lines = []
  for key in sorted(set(old) | set(new)):
    a, b, name = old.get(key), new.get(key), prefix + key
    if isinstance(a, Mapping) and isinstance(b, Mapping):
      lines += differences(a, b, name + '.')
    elif not _same(name, a, b) and name not in RESUMABLE:
      lines.append(f'{name}: {a!r} -> {b!r}')
  return lines


def _same(name: str, a: Any, b: Any) -> bool:
  """Whether two values of a key mean the same: two names of one component do."""
  if a == b:
    return True
  bases = {'data.source': Source, 'data.valid_source': Source, 'data.tokenizer': Tokenizer,
           'optimizer.rule': UpdateRule}
  if name not in bases or not (a and b):
    return False
  try:
    return from_string(bases[name], a) == from_string(bases[name], b)
  except ValueError:  # one of them is no component: it is listed as it was written
    return False


def resolved(config: Mapping[str, Any], data: Dataset) -> dict[str, Any]:
  """The config with the sizes that come from the data: a stored run is read without them."""
  model = dict(config['model'])
  if data.vocab_size:
    model['vocab_size'] = model['vocab_size'] or data.vocab_size
  else:
    model |= dict(input_features=data.input_features, output_features=data.output_features)
  return dict(config, model=model)


def _section(cls: type[Any], top: Mapping[str, Any], name: str) -> Any:
  return cls(**_checked(top[name], name + '.', cls))


def _model(top: Mapping[str, Any]) -> ModelOptions:
  options: dict[str, Any] = dict(_checked(top['model'], 'model.', ModelOptions))
  for key, read in (('pattern', pattern_from_text), ('biases', biases_from_text)):
    if options[key] is not None:
      options[key] = read(options[key])
  return ModelOptions(**options)


def _optimizer(section: Mapping[str, Any]) -> OptimizerConfig:
  options: dict[str, Any] = dict(_checked(section, 'optimizer.', OptimizerConfig, 'trained'))
  options['rule'] = from_string(UpdateRule, options['rule'])
  return OptimizerConfig(**options)


def _checked(section: Mapping[str, Any], prefix: str, cls: type[Any],
             *no_keys: str) -> Mapping[str, Any]:
  """The section, which has the fields of a dataclass, but `no_keys`, and no other keys."""
  fields = {f.name: str(f.type) for f in dataclasses.fields(cls) if f.name not in no_keys}
  keys = list(fields)
  unknown, missing = sorted(set(section) - set(keys)), sorted(set(keys) - set(section))
  if unknown:
    meant = did_you_mean(unknown[0], keys, prefix + '{}')
    raise ValueError(f'Unknown config key {prefix}{unknown[0]}.{meant} Choices: '
                     f'{", ".join(prefix + k for k in sorted(keys))}{hint(prefix + unknown[0])}.')
  if missing:
    raise ValueError(f'Missing config key {prefix}{missing[0]}; configs/base.py lists all keys.')
  for key, kind in fields.items():
    if section[key] is None and 'None' not in kind:
      raise ValueError(f'The config key {prefix}{key} is empty, and needs a value.')
  return section


def _domain_weights(text: str) -> tuple[tuple[str, float], ...]:
  """'code=2, docs=1' -> (('code', 2.0), ('docs', 1.0))."""
  weights = {}
  for part in filter(None, (p.strip() for p in text.split(','))):
    name, _, value = part.partition('=')
    try:
      weight = float(value)
    except ValueError:
      raise ValueError(f'data.domain_weights: cannot read {part!r}; write domain=weight, '
                       'separated by commas, such as code=2, docs=1.') from None
    if name.strip() in weights or not 0 < weight < math.inf:
      raise ValueError(f'data.domain_weights: {part!r}: name each domain at most once, with a '
                       'finite weight greater than 0.')
    weights[name.strip()] = weight
  return tuple(weights.items())
