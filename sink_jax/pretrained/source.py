"""The models that a training run can begin with: runs trained here, and published ones."""

from __future__ import annotations

import functools

import jax
from jax.sharding import Mesh

from sink_jax.io.paths import AnyPath, to_path
from sink_jax.models.arrays import ParamTree
from sink_jax.models.config import ModelConfig
from sink_jax.models.sizes import parameter_shapes
from sink_jax.pretrained.load import (
  open_published,
  published_model,
  published_parameters,
  published_tokenizer,
  run_encoder,
  saved_model,
)
from sink_jax.train.checkpoint import restore_params
from sink_jax.train.sharding import state_shardings
from sink_jax.train.start import Source
from sink_jax.train.workdir import is_workdir


def open_source(name: str) -> Source:
  """Opens a model to begin with: reads its configs, and no parameter.

  Args:
    name: the workdir of a run, whose newest good checkpoint it is, or a folder or name as
      `load_pretrained` takes it.

  Raises:
    ValueError: there is no such model, or it cannot be read; with the remedy.
  """
  if is_workdir(to_path(name)):
    return _of_run(to_path(name))
  checkpoint, _ = open_published(name)
  model = published_model(checkpoint)
  try:
    tokenizer = published_tokenizer(checkpoint.path, model.vocab_size)
  except ValueError:  # none, or one of a kind that cannot be read: the data have their own
    tokenizer = None
  return Source(name, model, functools.partial(published_parameters, checkpoint, 'float32'),
                tokenizer, f'HuggingFace(path={str(checkpoint.path)!r})' if tokenizer else '')


def _of_run(workdir: AnyPath) -> Source:
  experiment, model = saved_model(workdir)
  try:
    encoder = run_encoder(workdir, experiment.data)
  except ValueError:  # a synthetic task
    encoder = None
  option = f'HuggingFace(path={str(workdir / "tokenizer")!r})'
  return Source(str(workdir), model, functools.partial(_params, workdir, model), encoder,
                option if (workdir / 'tokenizer' / 'tokenizer.json').exists() else '')


def _params(workdir: AnyPath, model: ModelConfig, mesh: Mesh) -> ParamTree:
  shapes = parameter_shapes(model)
  return restore_params(workdir, jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes,
      state_shardings(mesh, shapes)))[1]
