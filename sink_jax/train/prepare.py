"""PreparedRun: all that a run needs, checked before any file is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from sink_jax.data.dataset import DataConfig, Dataset, as_packed, open_data
from sink_jax.data.sources import PackedDataset
from sink_jax.data.tokenizer import Encoder
from sink_jax.io.paths import AnyPath
from sink_jax.kernels.dispatch import platform
from sink_jax.kernels.shard import mesh_context
from sink_jax.models.attention import training_implementation
from sink_jax.models.config import ModelConfig
from sink_jax.models.sizes import parameter_shapes
from sink_jax.train import run_dir as runs
from sink_jax.train.defaults import (
  CHOSEN_KEYS,
  DeviceLoad,
  device_memory,
  filled_from,
  with_chosen_keys,
)
from sink_jax.train.experiment import Experiment, from_dict, resolved
from sink_jax.train.multihost import broadcast_from_process0, is_first, on_all_processes
from sink_jax.train.old_keys import with_components, with_update_rule
from sink_jax.train.optimizer import kept_arrays
from sink_jax.train.placeholders import filled_in
from sink_jax.train.sharding import make_mesh
from sink_jax.train.source_data import check_before_data, check_data
from sink_jax.train.start import OpenSource, Source, Start, find_start, start_of
from sink_jax.train.step import batch_layout, make_validation_step


class PreparedRun(NamedTuple):
  """A config as typed objects, with its data, the devices and the inputs of the probe.

  config: the dict that config.json will hold, with what the data and the platform decide.
  data_summary: `Dataset.summary()`. attention: name of the implementation. probe_tokens: (S, T)
  int32, or (S, T, F) float32 of a continuous task. encoder: None where the data are no text.
  start: None where the parameters are drawn by the seed.
  """

  config: Mapping[str, Any]
  data_summary: Mapping[str, Any]
  experiment: Experiment
  model: ModelConfig
  data: Dataset
  mesh: jax.sharding.Mesh
  attention: str
  probe_tokens: np.ndarray
  encoder: Encoder | None
  start: Start | None = None

  @property
  def tokens_per_step(self) -> int:
    """Tokens that an update reads, of all devices and micro-batches."""
    return self.experiment.batch_size * self.experiment.data.context


def prepare_run(config: Mapping[str, Any], workdir: str | AnyPath,
                opener: Callable[[DataConfig], Dataset] = open_data,
                open_source: OpenSource | None = None) -> PreparedRun:
  """Checks a config against the devices, the data and the workdir, and makes what it describes.

  All processes of a job call it. Nothing is written, so nothing is lost where it raises.

  Args:
    opener: opens the data, which can take long; it is called after all other checks.
    open_source: opens the model that `init.source` names.

  Raises:
    ValueError: as `train` does.
  """
  config = _with_packed(filled_in(with_components(with_update_rule(config))))
  config, source = find_start(config, workdir, open_source)
  run = on_all_processes(lambda: _prepare_here(config, workdir, opener, source))
  start = start_of(run.experiment, run.model, source, open_source)
  # One process chooses for all: what a device has free may differ between machines, and the
  # program must not.
  chosen = broadcast_from_process0(
      lambda: _choose_keys(runs.with_keys_as_begun(workdir, config), run), ValueError)
  config = filled_from(config, chosen, CHOSEN_KEYS)  # all else may differ between processes
  experiment = from_dict(config)
  if start is not None:  # what the optimizer trains is no key of the config
    experiment = dataclasses.replace(experiment, optimizer=dataclasses.replace(
        experiment.optimizer, trained=start.trained(run.model)))
  return run._replace(config=resolved(config, run.data), experiment=experiment,
                      model=_model_for(experiment, run.data), start=start)


def _with_packed(config: Mapping[str, Any]) -> Mapping[str, Any]:
  """The config with the tokenizer, context, BOS and EOS of its PackedDataset."""
  data = from_dict(config).data
  if not isinstance(data.source, PackedDataset):
    return config
  data = as_packed(data)
  return {**config, 'data': {**config['data'], 'tokenizer': repr(data.tokenizer), 'context': data.context,
                             'bos': data.bos, 'eos': data.eos}}


def _prepare_here(config: Mapping[str, Any], workdir: str | AnyPath,
                  opener: Callable[[DataConfig], Dataset], source: Source | None) -> PreparedRun:
  """The PreparedRun without what `_choose_keys` chooses."""
  experiment = from_dict(config)
  experiment.check_devices()
  mesh = make_mesh(**dataclasses.asdict(experiment.mesh))
  _trace(experiment, mesh)
  # One process reads the workdir; `on_all_processes` makes its error known to the others.
  if is_first():
    runs.check_unlocked(workdir, config)
  if source is not None:
    check_before_data(source, experiment.data)
  data = opener(experiment.data)
  if source is not None:
    check_data(source, data)
  model = _model_for(experiment, data)
  return PreparedRun(config, data.summary(), experiment, model, data, mesh,
                     training_implementation(model, experiment.data.context),
                     data.probe_tokens(experiment.probe.sequences, experiment.probe.length),
                     data.encoder)


def _model_for(experiment: Experiment, data: Dataset) -> ModelConfig:
  return experiment.model_config(data.vocab_size, data.input_features, data.output_features)


def _choose_keys(config: Mapping[str, Any], run: PreparedRun) -> dict[str, Any]:
  """The config with the empty keys that these devices decide."""
  # Sequences are split over 'data' and 'fsdp', the state over 'fsdp' and 'tensor'.
  experiment, (data, fsdp, tensor) = run.experiment, run.mesh.shape.values()
  tokens = experiment.microbatch_size * experiment.data.context / (data * fsdp)
  with mesh_context(run.mesh):
    load = DeviceLoad(platform(), device_memory(), tokens, fsdp * tensor, tensor,
                      experiment.microbatches, experiment.loss_logits,
                      kept_arrays(experiment.optimizer, parameter_shapes(run.model)))
  return with_chosen_keys(config, run.model, load)


def _trace(experiment: Experiment, mesh: jax.sharding.Mesh) -> None:
  """Raises a ValueError if the model cannot be built or run; the data play no part in it."""
  model, context = experiment.model_before_data(), experiment.data.context
  training_implementation(model, context)
  # A trace takes a second, and finds shapes that do not fit before the data are opened.
  jax.eval_shape(make_validation_step(model, mesh), parameter_shapes(model),
                 batch_layout(model, experiment.microbatch_size, context, mesh))
