"""Batches of inputs in processes of their own, watched from outside."""

from __future__ import annotations

import collections
import hashlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.child import ROOT, SECONDS

_START = 120.0  # seconds that imports and preparation may take


class Batch:
  """What came of a batch; a child that dies is replaced until all inputs were read."""

  def __init__(self, kind: str, seed: int, count: int, seconds: float = SECONDS):
    self.kind, self.seed, self.count, self._limit = kind, seed, count, seconds
    self.tried, self.outcomes, self.failures = 0, collections.Counter(), []
    self.seconds, self.slowest, self.memory, self.longest_message = 0.0, 0.0, 0, 0
    self.setup = {}

  def run(self) -> Batch:
    """Reads all inputs; hypothesis may find fewer that differ, and then starts anew."""
    rounds = 0
    while self.tried < self.count:
      before = self.tried
      self._one_child({'seed': self.seed + 1_000_003 * rounds, 'count': self.count - self.tried})
      rounds += 1
      if self.tried == before or rounds > 50:
        raise RuntimeError(f'{self.kind}: processes read nothing; run it alone to see why.')
    return self

  def replay(self, path) -> Batch:
    """Reads one stored input."""
    self._one_child({'replay': str(Path(path).absolute()), 'seed': 0, 'count': 1})
    return self

  def as_record(self) -> dict:
    return {'kind': self.kind, 'seed': self.seed, 'count': self.count, 'tried': self.tried,
            'outcomes': dict(self.outcomes), 'seconds': round(self.seconds, 2),
            'slowest': self.slowest, 'memory': self.memory, 'setup': self.setup,
            'longest_message': self.longest_message,
            'failures': [{k: v for k, v in f.items() if k != 'input'} for f in self.failures]}

  def _one_child(self, job):
    with tempfile.TemporaryDirectory(prefix='sink_jax-fuzz-') as scratch:
      self._watch(scratch, dict(job, kind=self.kind, scratch=scratch))

  def _watch(self, scratch, job):
    read_end, write_end = os.pipe()
    log = Path(scratch, 'stderr.txt')
    with open(log, 'wb') as stderr:
      child = subprocess.Popen(
          [sys.executable, '-P', '-m', 'tests.fuzz.child', str(write_end), json.dumps(job)],
          pass_fds=[write_end], stdout=stderr, stderr=stderr, stdin=subprocess.DEVNULL, cwd=ROOT,
          env=_environment(scratch))
    os.close(write_end)
    started = ready = ended = hung = False
    with os.fdopen(read_end, 'rb', buffering=0) as pipe:
      for line in _lines(pipe, lambda: self._limit * 1.5 if started else _START):
        if line is None:
          hung = True
          break
        record = json.loads(line)
        if 'ready' in record:
          ready, self.setup = True, record['ready']
        elif 'start' in record:
          started = True
        elif 'end' in record:
          ended, self.memory = True, max(self.memory, record['end'])
        else:
          started = False
          self._count(record)
    if hung:
      child.kill()
    code = child.wait()
    if started:
      what = f'no end within {self._limit:g} s' if hung else f'the process died ({code})'
      tail = log.read_bytes()[-300:].decode('utf-8', 'replace')
      self._count({'outcome': 'hang' if hung else 'crash', 'failure': f'{what}: {tail.strip()}',
                   'seconds': self._limit, 'message': 0,
                   'input': Path(scratch, 'current.json').read_text()})
    elif not ended:
      when = 'after' if ready else 'before'
      raise RuntimeError(f'{self.kind}: the process ended ({code}) {when} '
                         f'it was ready: {log.read_bytes()[-2000:].decode("utf-8", "replace")}')

  def _count(self, record):
    self.tried += 1
    self.outcomes[record['outcome']] += 1
    self.seconds += record['seconds']
    self.slowest = max(self.slowest, record['seconds'])
    self.longest_message = max(self.longest_message, record['message'])
    if record['failure']:
      stored = record['input']
      name = f'{self.kind}-{hashlib.sha256(stored.encode()).hexdigest()[:12]}.json'
      self.failures.append({'what': record['failure'], 'outcome': record['outcome'], 'file': name,
                            'input': stored})


def _environment(scratch):
  kept = {k: v for k, v in os.environ.items() if k in ('PATH', 'LANG', 'LD_LIBRARY_PATH',
                                                       'VIRTUAL_ENV', 'TMPDIR')}
  return kept | {
      'PYTHONPATH': str(ROOT), 'HOME': scratch, 'TMPDIR': scratch, 'SINK_JAX_CACHE': scratch,
      'JAX_PLATFORMS': 'cpu', 'HF_HUB_OFFLINE': '1', 'PYTHONDONTWRITEBYTECODE': '1',
      'HYPOTHESIS_STORAGE_DIRECTORY': scratch, 'MALLOC_ARENA_MAX': '2', 'RUST_BACKTRACE': '0',
      'RAYON_NUM_THREADS': '1', 'TOKENIZERS_PARALLELISM': 'false', 'OPENBLAS_NUM_THREADS': '1',
      'XLA_FLAGS': '--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true'}


def _lines(pipe, limit):
  """Lines as they come; None, and no more, where one takes longer than `limit()` seconds."""
  rest, deadline = b'', time.monotonic() + limit()
  while True:
    if not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
      yield None
      return
    data = pipe.read(65536)
    if not data:
      return
    *whole, rest = (rest + data).split(b'\n')
    yield from whole
    deadline = time.monotonic() + limit()
