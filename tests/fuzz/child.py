"""The process that reads inputs, under the guard; `python -m tests.fuzz.child FD JOB`.

A line of JSON for each input goes to the file descriptor FD. The input is on the disk before
it is read, so that whoever started this process knows which one killed it.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECONDS = 10.0  # that an input may take


class Reader:
  """Reads inputs of one kind, one after the other, and says how each ended."""

  def __init__(self, kind, scratch: Path, guard):
    self._kind, self._guard, self._scratch = kind, guard, scratch
    self.prepared = kind.prepare(scratch / 'prepared')
    self._bases = kind.bases(self.prepared)

  def read(self, input) -> dict:
    """The record of one input: outcome, failure (None if all is well), seconds, ..."""
    folder = self._scratch / 'input'
    input.write(folder, self._bases[input.base])
    failure, message = None, ''
    said = input.text + ''.join(f.head.decode('latin-1') for f in input.files.values())
    start = time.perf_counter()
    with self._guard.watching(said):
      try:
        self._kind.run(self.prepared, input, folder)
        outcome = 'accepted'
      except BaseException as error:
        outcome, failure, message = self._judged(error)
    seconds = time.perf_counter() - start
    if self._guard.seen:
      outcome, failure = 'Forbidden', self._guard.seen[0]
    elif failure is None and seconds > SECONDS:
      failure = f'took {seconds:.1f} s'
    return {'outcome': outcome, 'failure': failure, 'seconds': round(seconds, 4),
            'message': len(message)}

  def _judged(self, error):
    if isinstance(error, KeyboardInterrupt):
      raise error
    names = [cls.__name__ for cls in type(error).__mro__]
    outcome = next((n for n in names if n in self._kind.refusals), type(error).__name__)
    try:
      message = str(error)
    except BaseException as other:
      return outcome, f'its message cannot be read: {type(other).__name__}', ''
    if outcome in self._kind.refusals:
      return outcome, None if message.strip() else f'{outcome} without a message', message
    frames = [f for f in traceback.extract_tb(error.__traceback__) if 'sink_jax/' in f.filename
              or 'tests/fuzz' in f.filename]
    where = f'{Path(frames[-1].filename).name}:{frames[-1].lineno}' if frames else '?'
    return outcome, f'{outcome} at {where}: {message[:200]}', message


def generated(kind, prepared, seed, count, read):
  """Calls `read` with so many inputs, drawn by hypothesis from a seed."""
  import hypothesis
  from hypothesis import HealthCheck, Phase, settings
  left = [count]

  @hypothesis.seed(seed)
  @settings(max_examples=count, database=None, deadline=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck), derandomize=False)
  @hypothesis.given(kind.inputs(prepared))
  def each(input):
    if left[0]:
      left[0] -= 1
      read(input)

  each()


def main(descriptor, job):
  from tests.fuzz import kinds
  from tests.fuzz.guard import Guard, limit_memory, memory
  from tests.fuzz.inputs import Input
  job = json.loads(job)
  scratch = Path(job['scratch'])
  os.chdir(scratch)
  out = os.fdopen(int(descriptor), 'w', buffering=1)
  tell = lambda **record: print(json.dumps(record), file=out)
  kind, guard = kinds.load(job['kind']), Guard(scratch, [ROOT / 'sink_jax', ROOT / 'tests'])
  reader = Reader(kind, scratch, guard)
  tell(ready=limit_memory())
  current = scratch / 'current.json'

  def read(input):
    current.write_text(input.to_json())
    tell(start=True)
    record = reader.read(input)
    tell(**record, input=input.to_json() if record['failure'] else None)

  if job.get('replay'):
    read(Input.from_json(Path(job['replay']).read_text()))
  else:
    generated(kind, reader.prepared, job['seed'], job['count'], read)
  tell(end=memory()['VmHWM'])


if __name__ == '__main__':
  main(*sys.argv[1:])
