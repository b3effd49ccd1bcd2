"""Loads the config of a training job before it is launched, and checks it against its devices.

    python launch/check.py --devices=256 --config=configs/one_billion.py:1b-softmax --workdir=...
"""

import sys
import traceback

from absl import app, flags
from ml_collections import config_flags

from sink_jax.train.experiment import from_dict

_CONFIG = config_flags.DEFINE_config_file('config')
_DEVICES = flags.DEFINE_integer('devices', 0, 'of the job; 0: not known', lower_bound=0)
flags.DEFINE_string('workdir', '', 'of the run, which is not looked at')


def main(_):
  experiment = from_dict(_CONFIG.value.to_dict())
  if _DEVICES.value and experiment.sizes_are_known:
    experiment.check_devices(_DEVICES.value)
  print(f'{experiment.label.trial or "the config"}: {experiment.steps:,} steps of '
        f'{experiment.batch_size} x {experiment.data.context} tokens, devices: {_DEVICES.value}')


if __name__ == '__main__':
  try:
    app.run(main)
  except Exception:
    sys.exit(f'error: {traceback.format_exc().strip().splitlines()[-1]}')
