"""The parameters of another model that a run begins with.

`init.source` of a config names the model. Its sizes fill those that the config leaves empty, and
its parameters and tokenizer become the run's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from sink_jax.data.batches import Dataset
from sink_jax.data.dataset import as_packed
from sink_jax.data.tokenizer import Bytes, HuggingFace, TextTokenizer, Tokenizer
from sink_jax.io.paths import is_workdir, to_path
from sink_jax.models.arrays import ParamTree
from sink_jax.models.config import ModelConfig
from sink_jax.models.graft import GRAFTED, graft_to
from sink_jax.models.record import GraftReport
from sink_jax.models.run import Run
from sink_jax.models.sharding import state_shardings
from sink_jax.models.sizes import parameter_shapes
from sink_jax.pretrained.load import open_published
from sink_jax.train.config import (
  GRAFT_KEYS,
  KEYS,
  Experiment,
  InitConfig,
  changed,
  differences,
  value_of,
)
from sink_jax.train.load import restored, saved_model

# Keys of `model` that say what a model is, not how it is initialised or computed.
_MODEL_KEYS = tuple(
  name
  for name, key in KEYS.items()
  if name.startswith('model.')
  and not (key.about['where'] or name in ('model.size', 'model.init', 'model.dtype'))
)


@dataclasses.dataclass(frozen=True)
class InitSource:
  """A model to begin with, of which only the configs have been read.

  name: as `init.source` has it. read: reads the parameters, float32, onto the devices of a mesh, as
  `state_shardings` lays them out. tokenizer: None if no tokenizer can be read. option: the
  tokenizer as a config names it; bytes if there is none.
  """

  name: str
  model: ModelConfig
  read: Callable[[Mesh], ParamTree]
  tokenizer: TextTokenizer | None = None
  option: Tokenizer = Bytes()


def open_source(name: str) -> InitSource:
  """Opens a model that a training run begins with: reads its configs, but no parameters.

  Args:
    name: the workdir of a run, for its newest good checkpoint, or a folder or name as
      `load_pretrained` takes it.

  Raises:
    ValueError: there is no such model, or it cannot be read; with the remedy.
  """
  workdir = to_path(name)
  if is_workdir(workdir):
    _, model = saved_model(workdir)
    name, path = str(workdir), workdir / 'tokenizer'
    params = lambda mesh: restored(workdir, model, mesh)[1]
  else:
    published = open_published(name)
    model, path = published.model, published.checkpoint.path
    if not model.unembedding:
      raise ValueError(
        f'{path} has no unembedding (such as lm_head.weight), which training needs: '
        'begin with a checkpoint of the whole model.'
      )
    params = lambda mesh: published.parameters('float32', mesh)
  try:
    tokenizer = TextTokenizer.from_path(path)
  except ValueError:  # a synthetic task, or an unknown format: the data bring another
    return InitSource(name, model, params)
  letters = ''.join(map(chr, range(32, 127)))
  bytes_too = tokenizer.encode(letters) == Bytes().open().encode(letters)
  option = Bytes() if bytes_too else HuggingFace(path=str(path))
  return InitSource(name, model, params, tokenizer, option)


def completed(experiment: Experiment) -> tuple[Experiment, InitSource | None]:
  """The experiment with what its packed data and its source decide, and the source, if it has one.

  Raises:
    ValueError: one of them cannot be opened, or does not fit the config.
  """
  data = as_packed(experiment.data)
  if data != experiment.data:
    experiment = dataclasses.replace(experiment, data=data)
  return with_source(experiment)


def with_source(experiment: Experiment) -> tuple[Experiment, InitSource | None]:
  """The experiment with what its source decides, and the source; None without one.

  The source decides sizes and a tokenizer that the config leaves empty, and what a graft keeps.

  Raises:
    ValueError: the source cannot be read, or does not fit the model of the config; lists the keys
      that differ, with the values of both and the options that make them equal.
  """
  if not experiment.init.source:
    return experiment, None
  name = experiment.init.source.replace('{seed}', str(experiment.seed))
  try:
    source = open_source(name)
  except ValueError as error:
    raise ValueError(f'init.source = {name!r} cannot be opened: {error}') from error
  there = _values(source.model)
  changes: dict[str, Any] = {'init.source': name}
  for key in _MODEL_KEYS:
    # A key stays empty if the source has the default of ModelConfig.
    field = key.removeprefix('model.')
    default = getattr(source.model, field) == getattr(ModelConfig, field, None)
    if value_of(experiment, key) is None and not default:
      changes[key] = there[key]
  if experiment.data.tokenizer == Bytes():
    changes['data.tokenizer'] = source.option
  if experiment.init.graft:
    changes |= {key: there[key] for key in _kept(experiment)}
  experiment = changed(experiment, changes)
  _check_same(experiment, there)
  return experiment, source


def start_params(
  source: InitSource, init: InitConfig, model: ModelConfig, mesh: Mesh, batch: np.ndarray, seed: int
) -> tuple[ParamTree, GraftReport | None]:
  """The parameters of a run before its first step, float32, and the report of a graft.

  They are laid out over the mesh. All processes of a job call it.

  Args:
    batch: inputs on which a graft is measured; sink logits start below the log-sums of their rows.
    seed: of new parameters.
  """
  params = source.read(mesh)
  if not init.graft:
    return params, None
  # The model as the run computes it, without options that a forward pass does not need.
  after = dataclasses.replace(model, implementation=None, remat='none', unroll=1)
  before = dataclasses.replace(after, **{name: getattr(source.model, name) for name in GRAFTED})
  grafted = graft_to(
    Run(before, params, init.source), after, start=init.graft, tokens=batch, seed=seed
  )
  # New ones are replicated. Not device_put, which cannot move an array on devices of several
  # processes.
  lay_out = jax.jit(lambda params: params, out_shardings=state_shardings(mesh, grafted.params))
  return lay_out(grafted.params), grafted.graft


def trained_paths(
  source: InitSource | None, init: InitConfig, model: ModelConfig
) -> tuple[str, ...] | None:
  """Paths of the parameters that updates change, by `init.train`; None for all.

  Raises:
    ValueError: there are none.
  """
  if source is None or init.train == 'all':
    return None
  old = parameter_paths(source.model)
  in_attention = lambda path: init.train == 'attention' and 'attention' in path.split('/')
  paths = tuple(path for path in parameter_paths(model) if path not in old or in_attention(path))
  if not paths:
    raise ValueError(
      f'init.train = {init.train!r}: the model has no parameter that {init.source} '
      "lacks, so that nothing would be trained: use 'all' or 'attention'."
    )
  return paths


def parameter_paths(config: ModelConfig) -> tuple[str, ...]:
  """The paths of a model's parameters, such as 'blocks/attention/query/kernel'."""
  leaves = jax.tree_util.tree_leaves_with_path(parameter_shapes(config))
  return tuple(jax.tree_util.keystr(path, simple=True, separator='/') for path, _ in leaves)


def check_data(source: InitSource, data: Dataset) -> None:
  """Raises a ValueError if the data do not fit the model of a source."""
  where = f'init.source = {source.name!r}'
  for name in ('input_features', 'output_features'):
    if getattr(data, name) != getattr(source.model, name):
      raise ValueError(
        f'{where} has {name} = {getattr(source.model, name)}, and the data have '
        f'{getattr(data, name)}: train it on matching data.'
      )
  if data.vocab_size > source.model.vocab_size:
    raise ValueError(
      f'{where} has {source.model.vocab_size} tokens, and the data have '
      f'{data.vocab_size}: use the tokenizer of the source.'
    )
  if data.tokenizer and source.tokenizer and data.tokenizer.digest != source.tokenizer.digest:
    raise ValueError(
      f'{where} has another tokenizer than the data: leave data.tokenizer out, or '
      f'set {source.option}.'
    )


def _kept(experiment: Experiment) -> tuple[str, ...]:
  """The keys that a graft keeps of its source: those in `init.kept`, or all at their default."""
  if experiment.init.kept is not None:
    return experiment.init.kept
  return tuple(key for key in GRAFT_KEYS if value_of(experiment, key) in (None, KEYS[key].default))


def _check_same(experiment: Experiment, there: Mapping[str, Any]) -> None:
  """Raises a ValueError if the models of a config and its source differ, except by a graft."""
  name, graft = experiment.init.source, experiment.init.graft
  given = {key: value for key, value in there.items() if value_of(experiment, key) is not None}
  lines = differences(experiment, changed(experiment, given))
  grafted = [line for line in lines if line.split(':')[0] in GRAFT_KEYS]
  if graft and not grafted:
    raise ValueError(
      f'The graft changes nothing of {name}: set what it is to change, such as '
      '--config.attention.head="HeadGate(scale=2)", or leave init.graft out.'
    )
  if problems := [line for line in lines if not graft or line not in grafted]:
    hint = ', or --config.init.graft=identity to change it' if problems == grafted else ''
    raise ValueError(
      '\n  '.join(
        [
          f'init.source = {name!r} is another model (config -> source):',
          *problems,
          f'Give these keys the values of the source{hint}.',
        ]
      )
    )


def _values(model: ModelConfig) -> dict[str, Any]:
  """The keys of a config that describe a model, with their values."""
  values = {key: getattr(model, key.removeprefix('model.')) for key in _MODEL_KEYS}
  values |= {'model.kv_heads': model.dims.kv_heads, 'model.head_dim': model.dims.head_dim}
  return values | {f'attention.{name}': part for name, part in vars(model.attention).items()}
