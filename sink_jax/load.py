"""Trained runs as callable models."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax

from sink_jax.models.run import Run
from sink_jax.models.sizes import parameter_shapes
from sink_jax.train.checkpoint import restore_params
from sink_jax.train.experiment import from_dict
from sink_jax.train.workdir import read_config, read_probe_tokens


def load_run(workdir) -> Run:
  """The model of a training run at its newest good checkpoint.

  Needs neither the data nor the devices the run was trained with, and writes nothing.
  Attention runs by the implementation of this platform, whichever the run was trained with.

  Raises:
    ValueError: not the workdir of a run. CheckpointError: no usable checkpoint in it.
  """
  config = from_dict(read_config(workdir)).model_config()
  config = dataclasses.replace(config, implementation=None)
  device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device),
                        parameter_shapes(config))
  step, params = restore_params(workdir, target)
  return Run(config, params, Path(workdir).name, step, probe_tokens=read_probe_tokens(workdir))
