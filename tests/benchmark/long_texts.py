"""Sink_1 of SmolLM2-135M on one long text: seconds and peak memory, next to transformers.

    bash launch/test.sh --parity --collect-only          # installs PyTorch and transformers
    PYTHONPATH=.venv/parity:. .venv/bin/python tests/benchmark/long_texts.py FILE.json

Each measurement is a process of its own, so that its peak memory is that of one side. transformers
returns the attention maps of its eager attention, all of which are in memory at the same time:
layers x heads x T x T float32 numbers. A length at which these alone exceed the memory is not run.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

LENGTHS = (2048, 8192)
RUNS = 3  # the first of them compiles
LAYERS, HEADS = 30, 9


def ours(tokens):
  import sink_jax as sj

  run = sj.load_pretrained('SmolLM2-135M-Instruct')
  return lambda: float(sj.probe(run, tokens).sink_rate(1, 0.3))


def theirs(tokens):
  import torch

  from tests.benchmark.against_transformers import published

  with tempfile.TemporaryDirectory() as folder:
    _, eager = published('eager', Path(folder))

  @torch.no_grad()
  def measure():
    ids = torch.from_numpy(tokens)
    maps = eager.model(ids, output_attentions=True, use_cache=False).attentions
    rows = torch.arange(ids.shape[1], 0, -1)
    received = [(layer.sum(2) / rows)[:, :, 0] for layer in maps]  # of key 1, the mean of its rows
    return float(torch.stack(received).gt(0.3).float().mean())

  return measure


def measure(side, length):
  """Prints the seconds of each run, Sink_1 and the peak memory of this process."""
  tokens = np.random.default_rng(0).integers(100, 40_000, (1, length))
  call, seconds = {'ours': ours, 'theirs': theirs}[side](tokens), []
  for _ in range(RUNS):
    began = time.perf_counter()
    sink_1 = call()
    seconds.append(time.perf_counter() - began)
  gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
  print(json.dumps({'seconds': seconds, 'sink_1': sink_1, 'gb': gigabytes}))


def main(out):
  memory = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
  rows = []
  for length in LENGTHS:
    row = {'tokens': length, 'maps_gb': LAYERS * HEADS * length**2 * 4 / 1e9}
    for side in ('ours', 'theirs'):
      if side == 'theirs' and row['maps_gb'] * 1e9 > memory:
        row[side] = 'does not fit'
        continue
      command = [sys.executable, __file__, side, str(length)]
      done = subprocess.run(command, capture_output=True, text=True, check=True)
      row[side] = json.loads(done.stdout.splitlines()[-1])
    rows.append(row)
    print(row, flush=True)
  Path(out).write_text(json.dumps({'memory_gb': memory / 1e9, 'rows': rows}, indent=1) + '\n')


if __name__ == '__main__':
  if sys.argv[1] in ('ours', 'theirs'):
    measure(sys.argv[1], int(sys.argv[2]))
  else:
    main(sys.argv[1])
