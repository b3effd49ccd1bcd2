"""The models that a training run can begin with: runs trained here, and published ones."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
from jax.sharding import Mesh

from sink_jax.data.tokenizer import Bytes, TextTokenizer
from sink_jax.io.paths import AnyPath, to_path
from sink_jax.models.arrays import ParamTree
from sink_jax.models.config import ModelConfig
from sink_jax.models.sizes import parameter_shapes
from sink_jax.pretrained.load import (
  open_published,
  published_model,
  published_parameters,
  run_tokenizer,
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
  workdir = to_path(name)
  if is_workdir(workdir):
    experiment, model = saved_model(workdir)
    return Source(str(workdir), model, functools.partial(_params, workdir, model), *_tokenizer(
        lambda: run_tokenizer(workdir, experiment.data), workdir / 'tokenizer'))
  checkpoint, _ = open_published(name)
  return Source(name, published_model(checkpoint),
                functools.partial(published_parameters, checkpoint, 'float32'),
                *_tokenizer(lambda: TextTokenizer.from_path(checkpoint.path), checkpoint.path))


def _params(workdir: AnyPath, model: ModelConfig, mesh: Mesh) -> ParamTree:
  shapes = parameter_shapes(model)
  return restore_params(workdir, jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes,
      state_shardings(mesh, shapes)))[1]


def _tokenizer(read: Callable[[], TextTokenizer],
               path: AnyPath) -> tuple[TextTokenizer | None, str]:
  """The tokenizer and its config string; (None, '') where there is none that can be read."""
  try:
    tokenizer = read()
  except ValueError:  # a synthetic task, or a kind that cannot be read: the data have their own
    return None, ''
  letters = ''.join(map(chr, range(32, 127)))
  bytes_too = tokenizer.encode(letters) == Bytes().open().encode(letters)
  return tokenizer, '' if bytes_too else f'HuggingFace(path={str(path)!r})'
