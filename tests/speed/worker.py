"""Times training steps of the code that is on the path: of this tree or of an older commit.

Started by tests/speed/__main__.py. Prints a line when a step is compiled, and for every line it
reads the wall and CPU seconds of a step.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import jax
import numpy as np

from sink_jax.data.batches import Batch
from sink_jax.models.sizes import sized
from sink_jax.train import optimizer as optimizers
from sink_jax.train.sharding import make_mesh
from sink_jax.train.step import init_state, make_train_step

# Sizes of the model, sequences, their length, steps at a time.
MODELS: dict[str, tuple[dict[str, Any], int, int, int]] = {
    'quickstart': (dict(size='tiny', vocab_size=258), 32, 64, 40),
    '10m': (dict(size='tiny', layers=6, d_model=320, heads=5, ffn_hidden=1024, vocab_size=2048),
            4, 256, 4),
}


def main(name: str) -> None:
  sizes, batch_size, length, steps = MODELS[name]
  model, config = sized(**sizes, dtype='float32'), optimizers.OptimizerConfig()
  rates = ()
  if hasattr(optimizers, 'peak_rates'):
    optimizer, rates = config, (optimizers.peak_rates(config),)
  else:  # before learning rate and weight decay were arguments of the step
    optimizer = optimizers.make_optimizer(config, 1000)
  tokens = np.random.default_rng(0).integers(0, model.vocab_size, (batch_size, length + 1))
  tokens = tokens.astype(np.int32)
  batch = Batch(tokens[:, :-1], tokens[:, 1:], np.ones((batch_size, length), np.float32))
  mesh = make_mesh()
  state = init_state(model, optimizer, 0, mesh)
  step = make_train_step(model, optimizer, mesh)
  for _ in range(3):
    state, metrics = step(state, batch, *rates)
  print(float(metrics['loss']), flush=True)
  for _ in sys.stdin:
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
      state, metrics = step(state, batch, *rates)
    jax.block_until_ready(state)
    print((time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps, flush=True)


if __name__ == '__main__':
  main(sys.argv[1])
