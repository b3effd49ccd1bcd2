"""Prepares a run for its first step: its data, its devices, and checks of all of them."""

from __future__ import annotations

import dataclasses
import importlib.util
import json

import jax
import numpy as np
from jax.sharding import Mesh

from sink_jax.data.batches import Dataset
from sink_jax.data.dataset import open_data
from sink_jax.devices import emulates_bfloat16, platform
from sink_jax.io.paths import AnyPath
from sink_jax.models.attention import training_implementation
from sink_jax.models.config import ModelConfig
from sink_jax.models.sharding import make_mesh
from sink_jax.models.sizes import parameter_count, parameter_shapes
from sink_jax.train.config import Experiment, as_dict, resolved, unrolled
from sink_jax.train.multihost import gather, is_first, on_all_processes
from sink_jax.train.optimizer import OptimizerConfig
from sink_jax.train.start import InitSource, check_data, completed, trained_paths
from sink_jax.train.step import batch_layout, make_validation_step
from sink_jax.train.workdir import check_workdir


@dataclasses.dataclass(frozen=True)
class Job:
  """A run with its data and its devices.

  experiment: with what the data and the source decide, as config.json will hold it.
  optimizer: names the parameters that are trained. source: None if the seed draws the parameters.
  probe_tokens: (S, T) int32, or (S, T, F) float32 of a continuous task. attention: its
  implementation. stored: the config.json of the run that goes on; '' of a new one.
  """

  experiment: Experiment
  model: ModelConfig
  optimizer: OptimizerConfig
  data: Dataset
  mesh: Mesh
  source: InitSource | None
  probe_tokens: np.ndarray
  attention: str
  stored: str


def prepare(given: Experiment, workdir: AnyPath) -> Job:
  """Checks a config against the devices, the data and the workdir, and makes what it describes.

  All processes of a job call it. It writes nothing except a corpus that was not built yet.
  """
  experiment, source = on_all_processes(lambda: completed(given))
  stored = on_all_processes(lambda: _checked(experiment, workdir))
  # One process builds a corpus that is not there; the others then only open it.
  first = on_all_processes(lambda: open_data(experiment.data) if is_first() else None)
  data = on_all_processes(lambda: first or open_data(experiment.data))
  if source is not None:
    check_data(source, data)
  final = resolved(experiment, data)
  mesh = make_mesh(**dataclasses.asdict(final.mesh))
  model = unrolled(final.model_config(), final, platform(), mesh.shape)
  trained = trained_paths(source, final.init, model)
  optimizer = dataclasses.replace(final.optimizer, trained=trained)
  tokens = on_all_processes(lambda: data.probe_tokens(final.probe.sequences, final.probe.length))
  # Processes with different programs would wait for each other forever in the first collective.
  same = gather(json.dumps([as_dict(final), data.summary(), jax.__version__], sort_keys=True))
  if other := [i for i, text in enumerate(same) if text != same[0]]:
    raise ValueError(
      f'Process {other[0]} has another config, data or jax than process 0: start '
      'all with the same command, the same files and the same versions.'
    )
  attention = training_implementation(model, final.data.context)
  return Job(final, model, optimizer, data, mesh, source, tokens, attention, stored)


def _checked(experiment: Experiment, workdir: AnyPath) -> str:
  """Checks all that can be checked without data; see `check_workdir`."""
  if experiment.wandb and importlib.util.find_spec('wandb') is None:
    raise ValueError(f'wandb = {experiment.wandb!r} needs its package: pip install wandb.')
  experiment.check_devices()
  stored = check_workdir(workdir, experiment) if is_first() else ''
  model, context = experiment.model_config(), experiment.data.context
  training_implementation(model, context)
  # A trace takes a second, and finds shapes that do not fit before the data are opened.
  mesh = make_mesh(**dataclasses.asdict(experiment.mesh))
  jax.eval_shape(
    make_validation_step(model, mesh),
    parameter_shapes(model),
    batch_layout(model, experiment.microbatch_size, context, mesh),
  )
  return stored


def banner(job: Job, name: str) -> str:
  """Describes the coming training: the devices, the model, the steps and the data, a line each."""
  experiment, model = job.experiment, job.model
  total = parameter_count(model)
  tokens = experiment.steps * experiment.tokens_per_step
  epoch = job.data.summary().get('tokens_per_epoch')
  passes = f', {tokens / epoch:.3g} passes over {epoch:,}' if epoch else ''
  warm = (
    ''
    if experiment.optimizer.warmup_steps < experiment.steps
    else '; all of it is warm-up: lower optimizer.warmup_steps'
  )
  tokenizer = f'tokenizer {experiment.data.tokenizer!r}, ' if job.data.tokenizer else ''
  inner = parameter_count(model, embeddings=False)
  slow = (
    '; this GPU emulates it: --config.model.dtype=float32 is faster'
    if model.dtype == 'bfloat16' and emulates_bfloat16()
    else ''
  )
  return (
    f'{name} on {jax.device_count()} x {jax.devices()[0].device_kind}, '
    f'attention {job.attention}\n'
    f'  {model.layers} blocks of width {model.d_model} with {model.heads} heads, '
    f'{total:,} parameters ({inner:,} without embeddings), {model.dtype}{slow}\n'
    f'  {experiment.steps:,} steps of {experiment.batch_size} x {experiment.data.context} '
    f'tokens: {tokens:,} tokens{passes}{warm}\n'
    f'  data {experiment.data.source!r}, {tokenizer}{model.vocab_size:,} ids'
  )
