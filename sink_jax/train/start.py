"""Start: the parameters of another model that a run begins with.

`init.source` of a config names the model; this room cannot read it, since published models are of
a room above, and is handed a function that opens it. Here is decided what of it becomes the run's:
its sizes where the config leaves them empty, and its parameters.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from sink_jax.attention.spec import AttentionSpec
from sink_jax.io.paths import AnyPath, to_path
from sink_jax.models.arrays import ParamTree
from sink_jax.models.config import ModelConfig
from sink_jax.models.graft import GRAFTED, graft_to, new_parameters
from sink_jax.models.graft_report import GraftReport
from sink_jax.models.pattern import pattern_text
from sink_jax.models.run import Run
from sink_jax.models.sizes import parameter_shapes
from sink_jax.train import run_dir as runs
from sink_jax.train.checksums import saved_steps
from sink_jax.train.defaults import filled_from
from sink_jax.train.distillation import Distillation
from sink_jax.train.experiment import Experiment, from_dict
from sink_jax.train.init_options import InitOptions
from sink_jax.train.kept import GRAFT_KEYS, default_keys, kept_keys, value_of, with_kept
from sink_jax.train.model_options import ModelOptions
from sink_jax.train.multihost import broadcast_from_process0, on_all_processes
from sink_jax.train.sharding import laid_out

# Keys of `model` that say how a model is initialised or computed, and not what it is.
_NOT_THE_MODEL = ('size', 'init', 'dtype', 'implementation', 'remat', 'unroll')
_MODEL_KEYS = tuple(f.name for f in dataclasses.fields(ModelOptions)
                    if f.name not in _NOT_THE_MODEL)
_FILLED = ('init.step', 'init.hash', 'init.new', 'init.kept',
           *(f'model.{key}' for key in _MODEL_KEYS))


class Encodes(Protocol):
  """The tokenizer of a source: what makes ids of a text."""

  def encode(self, text: str) -> list[int]: ...


@dataclasses.dataclass(frozen=True)
class Source:
  """A model to begin with; its configs have been read, and nothing else.

  name: as `init.source` has it. step: of a run, None of a published model. digest: reads all its
  files and returns one SHA-256 of them. read: reads the parameters, float32, onto the devices of
  a mesh, as `state_shardings` lays them out. tokenizer: None where it has none that can be read.
  of_text: whether it is a model of text, None where that is not known.
  """

  name: str
  step: int | None
  model: ModelConfig
  digest: Callable[[], str]
  read: Callable[[Mesh], ParamTree]
  tokenizer: Encodes | None
  of_text: bool | None = None


# (name, step of a run or None for the newest good one) -> Source
OpenSource = Callable[[str, int | None], Source]


@dataclasses.dataclass(frozen=True)
class Start:
  """What a run begins with.

  options: with the step and the hash of the source. model: the source's.
  new: paths of the run's parameters that the source lacks. open: opens the source, again where
  that was done before; raises a ValueError where its hash is not the recorded one.
  """

  options: InitOptions
  model: ModelConfig
  new: tuple[str, ...]
  open: Callable[[], Source]

  def params(self, mesh: Mesh, model: ModelConfig, batch: np.ndarray, seed: int,
             ) -> tuple[ParamTree, GraftReport | None]:
    """The parameters of the run before its first step, float32, and what a graft has done to them.

    They are laid out over a mesh. All processes of a job call it.

    Args:
      model: of the run. batch: on which a graft is measured, and its sink logits are put below the
        sums of rows. seed: of new parameters.

    Raises:
      ValueError: the source is gone, has changed or is damaged; names it.
    """
    params = self.source_params(mesh)
    if not self.options.graft:
      return params, None
    # As the run computes, but for what a forward pass alone does not need.
    after = dataclasses.replace(model, implementation=None, remat='none', unroll=1)
    before = dataclasses.replace(after, **{name: getattr(self.model, name) for name in GRAFTED})
    grafted = graft_to(Run(before, params, self.options.source), after, start=self.options.graft,
                       tokens=batch, seed=seed)
    return laid_out(mesh, grafted.params), grafted.graft  # new ones lie on every device as a whole

  def source_params(self, mesh: Mesh) -> ParamTree:
    """The parameters of the source, as `params`: those of `model`."""
    return on_all_processes(self.open).read(mesh)

  def distillation(self, model: ModelConfig) -> Distillation | None:
    """What the loss takes of the source, by `init.distill`."""
    if not self.options.distill:
      return None
    # As the run computes, but for what a forward pass alone does not need.
    computed = dataclasses.replace(self.model, dtype=model.dtype, implementation=None,
                                   remat='none', unroll=1)
    return Distillation(self.options.distill, computed)

  def trained(self, model: ModelConfig) -> tuple[str, ...] | None:
    """Paths of the run's parameters that updates change, by `init.train`; None for all.

    Raises:
      ValueError: there are none.
    """
    if self.options.train == 'all':
      return None
    in_attention = lambda path: self.options.train == 'attention' and 'attention' in path.split('/')
    paths = tuple(path for path in parameter_paths(model)
                  if path in self.new or in_attention(path))
    if not paths:
      raise ValueError(f'init.train = {self.options.train!r}: the model has no parameter that '
                       f'{self.options.source} lacks, so that nothing would be trained: use '
                       "init.train = 'all' or 'attention'.")
    return paths


def parameter_paths(config: ModelConfig) -> tuple[str, ...]:
  """The paths of a model's parameters, such as 'blocks/attention/query/kernel'."""
  leaves = jax.tree_util.tree_leaves_with_path(parameter_shapes(config))
  return tuple(jax.tree_util.keystr(path, simple=True, separator='/') for path, _ in leaves)


def find_start(config: Mapping[str, Any], workdir: str | AnyPath,
               open_source: OpenSource | None) -> tuple[dict[str, Any], Source | None]:
  """The config with what its source decides, and the source where the run needs it by now.

  A run that has a checkpoint needs its source for `init.distill` alone. All processes of a job
  call it.

  Raises:
    ValueError: the source cannot be read, is another model than the config's, or has changed since
      the run began.
  """
  if not from_dict(config).init.source:
    return dict(config), None
  if open_source is None:
    raise ValueError('init.source is set, and this caller of `train` has not said how to open it.')
  # One process looks at the workdir, where another may be about to write.
  filled, saved = broadcast_from_process0(lambda: _as_begun(config, workdir), ValueError)
  init = from_dict(filled).init
  if saved and not init.distill:
    return filled, None
  source = on_all_processes(lambda: opened(init, open_source))
  return with_sizes(filled, source, init.hash or source.digest()), source


def _as_begun(config: Mapping[str, Any], workdir: str | AnyPath) -> list[Any]:
  """[the config with the keys that the source decided when the run began, has it a checkpoint]."""
  config = dict(config)
  if not (to_path(workdir) / 'config.json').exists():
    return [config, False]
  saved = runs.read_config(workdir)
  if saved['init'].get('source') != config['init']['source']:
    return [config, False]  # the difference is listed where the workdir is locked
  return [filled_from(config, saved, _FILLED), bool(saved_steps(workdir))]


def start_of(experiment: Experiment, model: ModelConfig, source: Source | None,
             open_source: OpenSource | None) -> Start | None:
  """The start of a run with this model; None where the seed draws its parameters.

  Args:
    source: None in a run that goes on without it.

  Raises:
    ValueError: `init.distill` of a model without a vocabulary.
  """
  init = experiment.init
  if not init.source:
    return None
  assert open_source is not None, 'find_start has refused it'
  if init.distill and not model.vocab_size:
    raise ValueError(f'init.distill = {init.distill} compares logits, and the model has none: its '
                     'task has no tokens. Use init.distill = 0.')
  # Where the source is not looked at again, the run is the same model.
  there = source.model if source else model
  new = tuple(init.new.split(', ')) if init.new else ()
  return Start(init, there, new, lambda: source or opened(init, open_source))


def opened(init: InitOptions, open_source: OpenSource) -> Source:
  """The source of a run, checked against the hash that its config has, if it has one.

  Raises:
    ValueError: there is none, or another; names it and both hashes.
  """
  try:
    source = open_source(init.source, init.step)
  except ValueError as error:
    known = '' if init.hash is None else f', with the hash {init.hash},'
    raise ValueError(f'init.source = {init.source!r}{known} cannot be opened: {error}') from None
  if init.hash is not None and (found := source.digest()) != init.hash:
    at = lambda step: '' if step is None else f' at step {step}'
    raise ValueError(
        f'init.source = {init.source!r} has changed: the run is one with the hash '
        f'{init.hash}{at(init.step)}, and what is there has {found}{at(source.step)}. Put the '
        'former back, or begin a run with the latter in another --workdir.')
  return source


def with_sizes(config: Mapping[str, Any], source: Source, digest: str | None = None,
               ) -> dict[str, Any]:
  """The config with the source's sizes in the place of empty ones, its step and its hash.

  What a graft keeps of the source is as the source has it, too.

  Raises:
    ValueError: a key that the config sets is not as the source has it; lists all, with the values
      of both and the options that make them equal.
  """
  experiment = from_dict(config)
  _check_same(experiment, source)
  there = _written(source.model)
  model = {key: there.get(key) if value is None and key in _MODEL_KEYS else value
           for key, value in config['model'].items()}
  init = config['init'] | {'step': source.step, 'hash': digest}
  config = dict(config, model=model, init=init)
  if experiment.init.graft:
    config = _with_kept(config, source)
    target = dataclasses.replace(
        source.model, attention=AttentionSpec(**config['attention']),
        norm=config['model']['norm'], sink_tokens=config['model']['sink_tokens'])
    config['init']['new'] = ', '.join(new_parameters(source.model, target))
  return config


def _with_kept(config: Mapping[str, Any], source: Source) -> dict[str, Any]:
  """The config of a graft with what it keeps of its source, and with `init.kept`."""
  there = {'attention': source.model.attention.strings(),
           'model': {name: getattr(source.model, name) for name in ('norm', 'sink_tokens')}}
  init = dict(config['init'])
  if init['kept'] is None:
    init['kept'] = ', '.join(key for key in default_keys(config)
                             if value_of(config, key) != value_of(there, key))
  config = with_kept(dict(config, init=init), there)
  for key in kept_keys(init['kept']):
    if (here := value_of(config, key)) != (value := value_of(there, key)):
      raise ValueError(f'init.kept = {init["kept"]!r}: {key} is {here!r} in the config and {value!r} '
                       'in the source. Name in init.kept what the config leaves at its default.')
  return config


def _check_same(experiment: Experiment, source: Source) -> None:
  lines, options = [], []

  def compare(key: str, here: Any, there: Any, text: Any) -> None:
    # Files of models write 1e-5 as the float32 next to it, too.
    if here != there and not (isinstance(here, float) and np.float32(here) == np.float32(there)):
      lines.append(f'{key}: {here!r} in the config, {there!r} in the source')
      options.append(shlex.quote(f'--config.{key}={text}'))

  texts = _texts(source.model)
  grafted = GRAFTED if experiment.init.graft else ()
  for key in _MODEL_KEYS:
    if key not in grafted and (here := getattr(experiment.model, key)) is not None:
      there = _value(source.model, key)
      compare(f'model.{key}', here, there, texts.get(key, there))
  for field in dataclasses.fields(AttentionSpec) if not grafted else ():
    there = getattr(source.model.attention, field.name)
    compare(f'attention.{field.name}', getattr(experiment.attention, field.name), there, there)
  # What a graft changes, and no other key.
  of_graft = all(line.startswith(tuple(f'{key}:' for key in GRAFT_KEYS)) for line in lines)
  hint = ('\nTo give it what the config changes of the defaults, add\n  --config.init.graft=identity'
          if of_graft else '')
  if lines:
    raise ValueError(f'init.source = {source.name!r} is another model than the config\'s:\n  '
                     + '\n  '.join(lines) + '\nTo train what the source is, add\n  '
                     + ' '.join(options) + hint)


def _value(model: ModelConfig, key: str) -> Any:
  """A field of a model, with the number that stands for an empty one."""
  return getattr(model.dims, key) if key in ('kv_heads', 'head_dim') else getattr(model, key)


def _written(model: ModelConfig) -> dict[str, Any]:
  """The fields of a model as a config has them; those are left out that a config can leave empty.

  A field may be left empty where ModelConfig has a default for it that a config has not.
  """
  written = {key: getattr(model, key) for key in _MODEL_KEYS} | _texts(model)
  empty = {key for key in ('vocab_size', 'input_features', 'output_features', 'kv_heads',
                           'head_dim', 'pattern', 'parallel_residual', 'biases', 'embedding_dim',
                           'tied', 'logit_cap') if getattr(model, key) == getattr(ModelConfig, key)}
  return {key: value for key, value in written.items() if key not in empty}


def _texts(model: ModelConfig) -> dict[str, str]:
  """The fields of a model that a config has as texts."""
  return {'pattern': pattern_text(model.pattern), 'biases': ', '.join(model.biases)}
