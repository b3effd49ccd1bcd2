"""Loads the config of a training job before it is launched, and checks it against its devices.

    python launch/check.py DEVICES --config=FILE:TRIAL --workdir=... ...   # DEVICES 0: not known
"""

import sys

from sink_jax.cli.main import parse, stop

devices, words = int(sys.argv[1]), sys.argv[2:]
try:
  experiment = parse('train', words)[1]['experiment']
  if devices and experiment.sizes_are_known:
    experiment.check_devices(devices)
except (OSError, ValueError) as error:
  stop(error)
print(f'{experiment.label.trial or "the config"}: {experiment.steps:,} steps of '
      f'{experiment.batch_size} sequences, devices: {devices or "not known"}')
