"""The parameters of another model that a run begins with.

`init.source` of a config names the model; this room cannot read it, since published models are of
a room above, and is handed a function that opens it. Here is decided what of it becomes the run's:
its sizes where the config leaves them empty, its tokenizer, and its parameters.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from sink_jax.attention.spec import COMPONENTS, AttentionSpec
from sink_jax.component import from_string
from sink_jax.data.dataset import Dataset
from sink_jax.models.arrays import ParamTree
from sink_jax.models.config import ModelConfig
from sink_jax.models.graft import GRAFTED, graft_to
from sink_jax.models.graft_report import GraftReport
from sink_jax.models.pattern import pattern_text
from sink_jax.models.run import Run
from sink_jax.models.sizes import parameter_shapes
from sink_jax.train.config import GRAFT_KEYS, InitConfig, ModelOptions, from_dict
from sink_jax.train.multihost import on_all_processes
from sink_jax.train.sharding import laid_out

# Keys of `model` that say how a model is initialised or computed, and not what it is.
_MODEL_KEYS = tuple(field.name for field in dataclasses.fields(ModelOptions) if not (
    field.metadata['where'] or field.name in ('size', 'init', 'dtype')))
# Two tokenizers that make the same ids of this are taken for the same one.
_SAMPLE = ('The quick brown fox  jumps over\tthe "lazy" dog\'s back; 3.14159 - 2024/07/31!\r\n\n'
           'def f(x):\n    return x**2 != {"a": [None, True]}  # déjà vu, naïve façade\n'
           'Съешь же ещё этих мягких булок. 敏捷的棕色狐狸。 こんにちは 안녕하세요 مرحبا 😀 ½µΩ\n'
           '<s> <|endoftext|>')


class Encodes(Protocol):
  """The tokenizer of a source: what makes ids of a text."""

  def encode(self, text: str) -> list[int]: ...


@dataclasses.dataclass(frozen=True)
class Source:
  """A model to begin with; its configs have been read, and nothing else.

  name: as `init.source` has it. read: reads the parameters, float32, onto the devices of a mesh, as
  `state_shardings` lays them out. tokenizer: None where it has none that can be read.
  tokenizer_option: what names the tokenizer in a config; '' for bytes, or where there is none.
  """

  name: str
  model: ModelConfig
  read: Callable[[Mesh], ParamTree]
  tokenizer: Encodes | None = None
  tokenizer_option: str = ''


OpenSource = Callable[[str], Source]


def with_source(config: Mapping[str, Any],
                open_source: OpenSource | None) -> tuple[dict[str, Any], Source | None]:
  """The config with what its source decides, and the source; (config, None) without one.

  The source decides sizes and a tokenizer that the config leaves empty, and what a graft keeps. All
  processes of a job call it.

  Raises:
    ValueError: the source cannot be read, or is another model than the config's; lists the keys
      that differ, with the values of both and the options that make them equal.
  """
  experiment = from_dict(config)
  if not experiment.init.source:
    return dict(config), None
  if open_source is None:
    raise ValueError('init.source is set, and this caller of `train` has not said how to open it.')
  name = experiment.init.source.replace('{seed}', str(experiment.seed))
  try:
    source = on_all_processes(lambda: open_source(name))
  except ValueError as error:
    raise ValueError(f'init.source = {name!r} cannot be opened: {error}') from None
  there = {'model': _written(source.model), 'attention': source.model.attention.strings()}
  data = dict(config['data'])
  if data['tokenizer'] == 'Bytes()' and source.tokenizer_option:
    data['tokenizer'] = source.tokenizer_option
  model = {key: there['model'].get(key) if value is None and key in _MODEL_KEYS else value
           for key, value in config['model'].items()}
  config = {**config, 'data': data, 'model': model,
            'init': {**config['init'], 'source': name}, 'attention': dict(config['attention'])}
  if experiment.init.graft:
    for key in _kept(experiment.init, config):
      section, part = key.split('.')
      config[section][part] = there[section].get(part, getattr(ModelConfig, part, None))
  if problems := _problems(config, source):
    raise ValueError(problems)
  return config, source


def start_params(source: Source, init: InitConfig, model: ModelConfig, mesh: Mesh,
                 batch: np.ndarray, seed: int) -> tuple[ParamTree, GraftReport | None]:
  """The parameters of a run before its first step, float32, and what a graft has done to them.

  They are laid out over the mesh. All processes of a job call it.

  Args:
    batch: on which a graft is measured, and its sink logits are put below the sums of rows.
    seed: of new parameters.
  """
  params = source.read(mesh)
  if not init.graft:
    return params, None
  # As the run computes, except for what a forward pass does not need.
  after = dataclasses.replace(model, implementation=None, remat='none', unroll=1)
  before = dataclasses.replace(after, **{name: getattr(source.model, name) for name in GRAFTED})
  grafted = graft_to(Run(before, params, init.source), after, start=init.graft, tokens=batch,
                     seed=seed)
  return laid_out(mesh, grafted.params), grafted.graft  # new ones lie on every device as a whole


def trained_paths(source: Source | None, init: InitConfig,
                  model: ModelConfig) -> tuple[str, ...] | None:
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
    raise ValueError(f'init.train = {init.train!r}: the model has no parameter that {init.source} '
                     "lacks, so that nothing would be trained: use 'all' or 'attention'.")
  return paths


def parameter_paths(config: ModelConfig) -> tuple[str, ...]:
  """The paths of a model's parameters, such as 'blocks/attention/query/kernel'."""
  leaves = jax.tree_util.tree_leaves_with_path(parameter_shapes(config))
  return tuple(jax.tree_util.keystr(path, simple=True, separator='/') for path, _ in leaves)


def check_data(source: Source, data: Dataset) -> None:
  """Raises a ValueError where the data are not what the model of a source reads."""
  where = f'init.source = {source.name!r}'
  for name in ('input_features', 'output_features'):
    if getattr(data, name) != getattr(source.model, name):
      raise ValueError(f'{where} has {name} = {getattr(source.model, name)}, and the data have '
                       f'{getattr(data, name)}: train it on data of its kind.')
  if data.vocab_size > source.model.vocab_size:
    raise ValueError(f'{where} has {source.model.vocab_size} tokens, and the data have '
                     f'{data.vocab_size}: use the tokenizer of the source.')
  if (data.tokenizer is None) != (source.tokenizer is None) and source.model.vocab_size:
    kinds = ['text', 'a task that makes its own tokens']
    raise ValueError(f'{where} is a model of {kinds[source.tokenizer is None]}, and the data are '
                     f'{kinds[data.tokenizer is None]}: train it on data of its kind.')
  if data.tokenizer is None or source.tokenizer is None:
    return
  here, there = (list(one.encode(_SAMPLE)) for one in (data.tokenizer, source.tokenizer))
  if here != there:
    first = next((i for i, pair in enumerate(zip(here, there)) if pair[0] != pair[1]),
                 min(len(here), len(there)))
    raise ValueError(
        f'{where} has another tokenizer than the data: from token {first + 1} of a sample on, '
        f'data.tokenizer makes {here[first:first + 4]}, that of the source {there[first:first + 4]}.'
        f' Leave data.tokenizer out, or set {source.tokenizer_option or "Bytes()"}.')


def _kept(init: InitConfig, config: Mapping[str, Any]) -> list[str]:
  """The keys that a graft keeps of its source: those in `init.kept`, or all at their default."""
  if init.kept is not None:
    return [key.strip() for key in init.kept.split(',') if key.strip()]
  defaults = {'attention': AttentionSpec(), 'model': ModelConfig}
  kept = []
  for key in GRAFT_KEYS:
    section, name = key.split('.')
    value = config[section][name]
    value = from_string(COMPONENTS[name], value) if section == 'attention' else value
    if value is None or value == getattr(defaults[section], name):
      kept.append(key)
  return kept


def _problems(config: Mapping[str, Any], source: Source) -> str:
  """What differs between the model of a config and that of its source, for an error; or ''."""
  experiment, lines, options = from_dict(config), [], []

  def compare(key: str, here: Any, there: Any, text: Any) -> None:
    # Files of models write 1e-5 as the float32 next to it, too.
    if here != there and not (isinstance(here, float) and np.float32(here) == np.float32(there)):
      lines.append(f'{key}: {here!r} in the config, {there!r} in the source')
      options.append(shlex.quote(f'--config.{key}={text}'))

  texts, grafted = _texts(source.model), GRAFTED if experiment.init.graft else ()
  here = (experiment.attention, experiment.model.norm or ModelConfig.norm,
          experiment.model.sink_tokens or 0)
  if grafted and here == tuple(getattr(source.model, name) for name in GRAFTED):
    return (f'The graft changes nothing of {source.name}: set what it is to change, such as '
            '--config.attention.head="HeadGate(scale=2)", or leave init.graft out.')
  for key in _MODEL_KEYS:
    if key not in grafted and (here := getattr(experiment.model, key)) is not None:
      there = (getattr(source.model.dims, key) if key in ('kv_heads', 'head_dim')
               else getattr(source.model, key))
      compare(f'model.{key}', here, there, texts.get(key, there))
  for field in dataclasses.fields(AttentionSpec) if not grafted else ():
    there = getattr(source.model.attention, field.name)
    compare(f'attention.{field.name}', getattr(experiment.attention, field.name), there, there)
  if not lines:
    return ''
  of_graft = all(line.split(':')[0] in GRAFT_KEYS for line in lines)
  hint = ('\nTo give it what the config changes of the defaults, add\n  --config.init.graft=identity'
          if of_graft else '')
  return (f'init.source = {source.name!r} is another model than the config\'s:\n  '
          + '\n  '.join(lines) + '\nTo train what the source is, add\n  ' + ' '.join(options) + hint)


def _written(model: ModelConfig) -> dict[str, Any]:
  """The fields of a model as a config has them, without those at a default that means nothing."""
  written = {key: getattr(model, key) for key in _MODEL_KEYS} | _texts(model)
  return {key: value for key, value in written.items()
          if getattr(model, key) != getattr(ModelConfig, key, dataclasses.MISSING)}


def _texts(model: ModelConfig) -> dict[str, str]:
  """The fields of a model that a config has as texts."""
  return {'pattern': pattern_text(model.pattern), 'biases': ', '.join(model.biases)}
