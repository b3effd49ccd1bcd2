"""Keys that a config leaves empty, because the model's size and the devices decide them.

They are chosen once, when a run begins, and written to its config.json. A resumed run goes on
with what is written there, on any devices: they change rounding, and nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from sink_jax.models.config import ModelConfig

KEYS = ('model.unroll',)
# Blocks that are compiled one after another at most: the time of compiling grows with them.
_MOST_BLOCKS = 24
_log = logging.getLogger('sink_jax')


def completed(config: Mapping[str, Any], model: ModelConfig, platform: str) -> dict[str, Any]:
  """The config with its empty KEYS filled.

  Where both `model.unroll` and `model.remat` are set, one line says that the loop over the
  blocks is kept.

  Args:
    model: what the config describes.
    platform: of the devices: 'cpu', 'gpu', 'tpu'.
  """
  asked = config['model']
  if (asked['unroll'] or 1) > 1 and model.remat != 'none':
    _log.warning(f'model.unroll = {asked["unroll"]} has no effect with model.remat = '
                 f'{model.remat}: the loop over the blocks is kept')
  unroll = asked['unroll'] or unrolled(model, platform)
  return dict(config, model=dict(asked, unroll=unroll))


def unrolled(model: ModelConfig, platform: str) -> int:
  """How many blocks are compiled one after another, see `ModelConfig.unroll`.

  All of them where that saves traffic with the memory. On a CPU it gains less than the noise
  of a measurement, and compiling takes longer.
  """
  few = model.remat == 'none' and model.layers <= _MOST_BLOCKS
  return model.layers if few and platform in ('gpu', 'tpu') else 1
