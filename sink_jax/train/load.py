"""Loads the models of runs."""

from __future__ import annotations

import dataclasses
import os

import jax
from jax.sharding import Mesh

from sink_jax.data.sources import DocumentSource
from sink_jax.data.token_edits import first_token
from sink_jax.data.tokenizer import TextTokenizer
from sink_jax.foreign import standard_promotion
from sink_jax.io.paths import AnyPath, is_workdir, to_path
from sink_jax.models.arrays import ParamTree, first_not_finite
from sink_jax.models.config import ModelConfig
from sink_jax.models.run import Run
from sink_jax.models.sizes import parameter_shapes
from sink_jax.pretrained.parameters import layout
from sink_jax.train.checkpoint import restore_params
from sink_jax.train.config import Experiment
from sink_jax.train.workdir import read_experiment, read_probe_tokens


@standard_promotion()
def load_run(workdir: str | os.PathLike, *, plugins: str | os.PathLike = '') -> Run:
  """Loads the model of a training run from its newest good checkpoint.

  Neither the data nor the devices of the training are needed, and nothing is written. Attention
  runs with the default implementation of this platform, not the one of the training. The run may be
  somebody else's: only what lies in its folder is opened, and none of it is executed.

  Args:
    workdir: the workdir of the run.
    plugins: Python files with components of the run, with commas between them, which are imported;
      not needed for files with which the same person has trained on this machine, unchanged since.

  Raises:
    ValueError: it is not the workdir of a run, a link leads out of it, it needs a component that is
      not imported, or a parameter is not finite; the message names it.
    CheckpointError: it has no usable checkpoint.
  """
  folder = to_path(workdir)
  experiment, config = saved_model(folder, plugins)
  step, params = restored(folder, config)
  if parameter := first_not_finite(params):
    raise ValueError(
      f'{folder}: at step {step} the parameter {parameter} is not finite: remove '
      f'checkpoints/{step} there to use the checkpoint before it, or train again.'
    )
  return Run(
    config,
    params,
    folder.name,
    step,
    probe_tokens=read_probe_tokens(folder),
    folder=str(folder),
    first_token=first_token(experiment.data.interventions),
    read_tokenizer=_tokenizer,
  )


def saved_model(folder: AnyPath, plugins: str | os.PathLike = '') -> tuple[Experiment, ModelConfig]:
  """The experiment of a workdir and the model that it trains; reads no checkpoint."""
  if (folder / 'config.json').exists() and not is_workdir(folder):
    raise ValueError(
      f'{folder} holds a config.json but no run trained with sink_jax: a published '
      'model is named by --checkpoint, or loaded by load_pretrained.'
    )
  experiment = read_experiment(folder, plugins)
  try:
    config = experiment.model_config()
  except ValueError as error:
    raise ValueError(f'{folder}: config.json cannot be read ({error}).') from None
  # Training chose them for its devices: neither is a property of the model.
  return experiment, dataclasses.replace(config, implementation=None, unroll=1)


def restored(
  folder: AnyPath, config: ModelConfig, mesh: Mesh | None = None
) -> tuple[int, ParamTree]:
  """(step, parameters) of a run on one device, or laid out over a mesh."""
  shapes = parameter_shapes(config)
  # The checkpoint may come from a mesh of many devices: without these shardings Orbax would
  # look for those.
  return restore_params(
    folder,
    jax.tree.map(
      lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
      shapes,
      layout(shapes, mesh),
    ),
  )


def _tokenizer(run: Run) -> TextTokenizer:
  """See `Run.tokenizer`."""
  assert run.folder, '`load_run` sets it'
  data = read_experiment(run.folder).data
  if not isinstance(data.source, DocumentSource):
    raise ValueError(f'{data.source!r} makes its own tokens: such a run has no text.')
  tokenizer = TextTokenizer.from_path(to_path(run.folder) / 'tokenizer')
  if run.first_token is not None:
    return tokenizer.beginning_with(run.first_token)
  return dataclasses.replace(tokenizer, prefix=(tokenizer.bos_id,) if data.bos else ())
