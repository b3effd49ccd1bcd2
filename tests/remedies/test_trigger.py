"""The contrast of 2603.11487: on trigger averaging softmax has to rest on the first token."""

import numpy as np
import pytest

import sink_jax as sj
from configs import remedies
from sink_jax.data.synthetic import TriggerAveraging
from sink_jax.train.loop import train

TASK = TriggerAveraging()
IDLE = TASK.content + 2  # the flag of queries that have nothing to report


def first_mass(workdir, variant, seed):
  """Mean weight on the first token over the queries that are no trigger, after training."""
  config = remedies.get_config(f'trigger-{variant}').to_dict() | {'seed': seed}
  train(config, workdir, show_progress=False)
  inputs = TASK.batch('valid', 0, np.arange(128)).tokens
  maps = np.asarray(sj.load_run(workdir).record(inputs, sj.RecordOptions(maps=True))
                    .layers.maps_BxHxTxT)[0]
  assert np.isfinite(maps).all()
  idle = inputs[..., IDLE] == 1
  return maps[..., 0].swapaxes(1, 2)[idle].mean()


@pytest.mark.full
@pytest.mark.parametrize('seed', range(5))
def test_softmax_rests_on_the_first_token_and_relu_does_not(seed, tmp_path):
  assert first_mass(tmp_path / 'softmax', 'softmax', seed) >= 0.5
  assert first_mass(tmp_path / 'relu', 'relu', seed) <= 0.05
