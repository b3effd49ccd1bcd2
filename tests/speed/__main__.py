"""python -m tests.speed --before=877ade5 --out=results/compiled/cpu_step.json

Compares training steps on this machine's CPU with those of an older commit: a process with the
code of each measures in turn, so that both meet the same load, and the median of the ratios of
neighbouring times has a confidence interval.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sink_jax.train.provenance import code
from tests.speed.worker import MODELS

ROOT = Path(__file__).resolve().parents[2]
COVERAGE = 0.9


def interval(ratios: Iterable[float], coverage: float = COVERAGE) -> tuple[float, float]:
  """A confidence interval of the median from order statistics, (low, high).

  It covers the median with a probability of at least `coverage`: the number of ratios below the
  median is binomial(n, 1/2), whatever their distribution.
  """
  ordered = sorted(ratios)
  n = len(ordered)
  tail, k = 0.0, 0
  while (tail + math.comb(n, k) / 2**n) * 2 <= 1 - coverage and k < n // 2:
    tail += math.comb(n, k) / 2**n
    k += 1
  return ordered[max(0, k - 1)], ordered[min(n - 1, n - k)]


@contextlib.contextmanager
def started(tree: Path, name: str) -> Iterator[subprocess.Popen[str]]:
  """A worker with the code of a tree, which has compiled the step of a model."""
  environment = os.environ | {'PYTHONPATH': str(tree), 'JAX_PLATFORMS': 'cpu'}
  command = [sys.executable, '-P', str(ROOT / 'tests' / 'speed' / 'worker.py'), name]
  with subprocess.Popen(command, env=environment, cwd=tree, text=True, stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE) as worker:
    if not worker.stdout.readline():
      raise SystemExit(f'error: the worker with the code of {tree} ended before its first step.')
    yield worker
    worker.stdin.close()


def measured(worker: subprocess.Popen[str]) -> list[float]:
  """The wall and CPU seconds of a step, measured now."""
  worker.stdin.write('\n')
  worker.stdin.flush()
  return [float(x) for x in worker.stdout.readline().split()]


def compared(before: Path, name: str, pairs: int) -> dict[str, Any]:
  """The JSON row of a model: times of so many pairs, and the median ratio after / before."""
  with started(before, name) as old, started(ROOT, name) as new:
    measured(old)  # the first measurement of each is not counted
    measured(new)
    times = []
    for n in range(pairs):
      pair = [measured(worker) for worker in ((old, new) if n % 2 else (new, old))]
      times.append(pair if n % 2 else pair[::-1])
  times = np.array(times)  # [pair, before or after, wall or CPU]
  row = {'model': name, 'pairs': pairs}
  for k, kind in enumerate(('wall', 'cpu')):
    ratios = times[:, 1, k] / times[:, 0, k]
    row[kind] = {'before_ms': 1e3 * float(np.median(times[:, 0, k])),
                 'after_ms': 1e3 * float(np.median(times[:, 1, k])),
                 'ratio': float(np.median(ratios)), 'interval': list(map(float, interval(ratios))),
                 'ratios': [round(float(r), 4) for r in ratios]}
  return row


def main() -> None:
  parser = argparse.ArgumentParser(prog='python -m tests.speed', description=__doc__)
  parser.add_argument('--before', required=True, metavar='COMMIT')
  parser.add_argument('--pairs', type=int, default=10)
  parser.add_argument('--out', type=Path, help='a JSON file to write')
  options = parser.parse_args()
  if options.pairs < 5:
    parser.error('--pairs: a 90 % interval takes at least 5.')
  with tempfile.TemporaryDirectory() as tree:
    archive = subprocess.run(['git', '-C', ROOT, 'archive', options.before],
                             check=True, stdout=subprocess.PIPE).stdout
    subprocess.run(['tar', '-x', '-C', tree], input=archive, check=True)
    rows = []
    for name in MODELS:
      rows.append(row := compared(Path(tree), name, options.pairs))
      for kind in ('wall', 'cpu'):
        times, (low, high) = row[kind], row[kind]['interval']
        print(f'{name} {kind}: {times["before_ms"]:.2f} -> {times["after_ms"]:.2f} ms, ratio '
              f'{times["ratio"]:.3f}, {COVERAGE:.0%} interval {low:.3f} to {high:.3f}', flush=True)
  if options.out:
    options.out.write_text(json.dumps({
        'command': shlex.join(['python', '-m', 'tests.speed', *sys.argv[1:]]),
        'date': datetime.datetime.now(datetime.timezone.utc).isoformat(timespec='seconds'),
        'before': options.before, 'code': code(), 'cores': os.cpu_count(), 'coverage': COVERAGE,
        'rows': rows}, indent=2) + '\n')


if __name__ == '__main__':
  main()
