"""The models that a training run can begin with: runs trained here, and published ones."""

from __future__ import annotations

import functools

import jax
from jax.sharding import Mesh

from sink_jax.data.sources import DocumentSource
from sink_jax.data.text_tokenizer import TextTokenizer
from sink_jax.data.tokenizer import Encoder
from sink_jax.io.hashing import sha256_of_digests, sha256_of_files
from sink_jax.io.paths import AnyPath, to_path
from sink_jax.models.arrays import ParamTree
from sink_jax.models.config import ModelConfig
from sink_jax.models.sizes import parameter_shapes
from sink_jax.pretrained.files import Weights
from sink_jax.pretrained.load import (
  open_published,
  published_model,
  published_parameters,
  published_tokenizer,
  run_encoder,
  saved_model,
)
from sink_jax.train.checkpoint import params_of_step
from sink_jax.train.checksums import saved_steps, step_digest, verify
from sink_jax.train.experiment import Experiment
from sink_jax.train.run_dir import is_workdir
from sink_jax.train.sharding import state_shardings
from sink_jax.train.start import Source


def open_source(name: str, step: int | None = None) -> Source:
  """Opens a model to begin with: reads its configs, and no parameter.

  Args:
    name: the workdir of a run, or a folder or name as `load_pretrained` takes it.
    step: of a run; None for the newest good checkpoint.

  Raises:
    ValueError: there is no such model or step, or it cannot be read; with the remedy.
  """
  if is_workdir(to_path(name)):
    return _of_run(name, step)
  checkpoint, _ = open_published(name)
  tokenizer = _text_tokenizer(checkpoint)
  return Source(name, None, published_model(checkpoint),
                functools.partial(_published_digest, checkpoint),
                functools.partial(published_parameters, checkpoint, 'float32'),
                tokenizer, None if tokenizer is None else True)


def _of_run(name: str, step: int | None) -> Source:
  workdir = to_path(name)
  experiment, model = saved_model(workdir)
  steps = saved_steps(workdir)
  if step is not None and step not in steps:
    raise ValueError(f'init.step = {step}: the run {name!r} has no such checkpoint, but those of '
                     f'the steps {", ".join(map(str, sorted(steps))) or "none"}.')
  if step is None:
    step = next((step for step in steps if verify(workdir, step) is None), None)
  if step is None:
    raise ValueError(f'init.source = {name!r} is a run without a usable checkpoint: train it '
                     'first.')
  encoder = _encoder(workdir, experiment)
  return Source(name, step, model, functools.partial(step_digest, workdir, step),
                functools.partial(_params, workdir, step, model), encoder,
                isinstance(experiment.data.source, DocumentSource))


def _params(workdir: AnyPath, step: int, model: ModelConfig, mesh: Mesh) -> ParamTree:
  shapes = parameter_shapes(model)
  target = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
                        shapes, state_shardings(mesh, shapes))
  return params_of_step(workdir, step, target)


def _encoder(workdir: AnyPath, experiment: Experiment) -> Encoder | None:
  try:
    return run_encoder(workdir, experiment.data)
  except ValueError:  # a synthetic task, or an older run whose caches are gone
    return None


def _text_tokenizer(checkpoint: Weights) -> TextTokenizer | None:
  try:
    return published_tokenizer(checkpoint.path, published_model(checkpoint).vocab_size)
  except ValueError:  # none, or one of a kind that cannot be read: the data have their own
    return None


def _published_digest(checkpoint: Weights) -> str:
  return sha256_of_digests(dict(zip((file.name for file in checkpoint.files),
                                    sha256_of_files(checkpoint.files))))
