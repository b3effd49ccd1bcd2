"""python -m sink_jax.evaluate --workdir=runs/quickstart/text-softmax

Probes a trained run for attention sinks, on the probe inputs stored with it, and writes
sink_report.json and pictures (importance per head, attention maps, norm ratios, training
curves).
"""

from __future__ import annotations

import os
import sys

from absl import app, flags

from sink_jax.report.evaluation import as_text, evaluate_run
from sink_jax.train.checkpoint import CheckpointError
from sink_jax.train.loop import quiet_logs

_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of the run.')
_OUT = flags.DEFINE_string('out', None, 'Folder to write to. Default: WORKDIR/evaluation.')
_SEQUENCES = flags.DEFINE_integer('sequences', None, 'Probe sequences to use. Default: all stored.')
_LENGTH = flags.DEFINE_integer('length', None, 'Tokens of each to use. Default: all stored.')
_EPSILON = flags.DEFINE_float('epsilon', None, "Threshold of the sink rate. Default: the run's own.")
_DTYPE = flags.DEFINE_enum('dtype', None, ['float32', 'bfloat16'],
                           "Activations of the probe. Default: the run's own.")


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f'Unexpected argument {argv[1]!r}; options are written --name=value.')
  quiet_logs()
  try:
    result, paths = evaluate_run(
        os.path.expanduser(_WORKDIR.value), _OUT.value and os.path.expanduser(_OUT.value),
        sequences=_SEQUENCES.value, length=_LENGTH.value, epsilon=_EPSILON.value,
        dtype=_DTYPE.value)
  except (ValueError, CheckpointError, OSError) as error:
    sys.exit('error: ' + ' '.join(str(error).split()))
  print(as_text(result))
  print('\n'.join(str(path) for path in paths))


if __name__ == '__main__':
  flags.mark_flag_as_required('workdir')
  app.run(main)
