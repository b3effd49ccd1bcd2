"""How far a sweep is, from what its trials have written."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping

from sink_jax.io.files import write_atomically
from sink_jax.io.paths import to_path
from sink_jax.sweep.trials import ENDED, Trial
from sink_jax.train.run_dir import in_use, read_status

_TAIL = 32768  # bytes of metrics that hold the last row of every kind
_SAY_EVERY = 30  # seconds


@dataclasses.dataclass(frozen=True)
class State:
  """One trial as it stands on the disk; None where there is no number yet."""

  name: str
  status: str
  step: int | None
  steps: int | None
  sink_1: float | None  # percent
  valid: float | None  # nats per token
  note: str


def read_states(trials: Mapping[str, Trial], root,
                ended: dict[str, State] | None = None) -> list[State]:
  """The state of every trial, in their order; reads the ends of files only.

  ended: states of trials that have ended, from earlier calls. They are not read again, since
    an object store takes ten requests for each; this call adds to them.
  """
  root, ended = to_path(root), {} if ended is None else ended
  states = [ended.get(name) or _read_state(trial, root / name) for name, trial in trials.items()]
  ended |= {state.name: state for state in states if state.status in ENDED}
  return states


def as_markdown(states: list[State], headline: str) -> str:
  """A table to read while the sweep runs."""
  counts = dict.fromkeys(state.status for state in states)
  counts = {status: sum(state.status == status for state in states) for status in counts}
  lines = [f'# {headline}', '', ', '.join(f'{n} {status}' for status, n in counts.items()), '',
           '| trial | status | step | Sink_1 % | valid loss | |', '|---|---|---:|---:|---:|---|']
  for state in states:
    of = f' of {state.steps:,}' if state.steps else ''
    step = '' if state.step is None else f'{state.step:,}{of}'
    lines.append(f'| {state.name} | {state.status} | {step} | {_number(state.sink_1, ".1f")} | '
                 f'{_number(state.valid, ".3f")} | {state.note.replace("|", "/")} |')
  return '\n'.join(lines) + '\n'


@contextlib.contextmanager
def reporting(trials: Mapping[str, Trial], root, clock: Clock, lines: bool) -> Iterator[None]:
  """Keeps ROOT/summary.md up to date for as long as the trials run.

  lines: also say on the terminal how far the running ones are.
  """
  over, ended = threading.Event(), {}

  def keep():
    while not over.wait(_SAY_EVERY):
      states = write_summary(trials, root, f'Running, {clock.left() or "no estimate yet"}', ended)
      running = [f'{state.name} {state.step or 0:,}/{state.steps:,}' for state in states
                 if state.name in trials and state.status == 'running']
      if lines and running:
        print(f'  {", ".join(running)}  {clock.left()}', file=sys.stderr, flush=True)

  thread = threading.Thread(target=keep, daemon=True)
  write_summary(trials, root, 'Started', ended)
  thread.start()
  try:
    yield
  finally:
    over.set()
    thread.join()
    write_summary(trials, root, 'Not running', ended)


def write_summary(trials: Mapping[str, Trial], root, headline: str,
                  ended: dict[str, State] | None = None) -> list[State]:
  """Writes ROOT/summary.md, a table of these trials and of all others in the folder.

  Parts of a sweep that run side by side write the same one. Returns what is in it; `ended` is
  that of `read_states`.
  """
  states = read_states(trials | _others(trials, root), root, ended)
  headline = f'{headline}; {time.strftime("%Y-%m-%d %H:%M")}'
  with contextlib.suppress(OSError):  # a full disk is for the trials to tell
    write_atomically(to_path(root) / 'summary.md', as_markdown(states, headline))
  return states


class Clock:
  """Time left, by the work of the trials that have ended and of those that have not."""

  def __init__(self, work: Mapping[str, float], expected: float | None):
    """work: of every trial still to run, in any unit. expected: seconds in all, if known."""
    self._work, self._expected = dict(work), expected
    self._all = sum(self._work.values())
    self._began = time.monotonic()

  def ended(self, name: str) -> None:
    self._work.pop(name, None)

  def left(self) -> str:
    """'about 12 min left', or '' where nothing is known yet."""
    remaining = sum(self._work.values())
    done = self._all - remaining
    if done > 0:
      seconds = (time.monotonic() - self._began) / done * remaining
    elif self._expected is None:
      return ''
    else:
      seconds = max(0.0, self._expected - (time.monotonic() - self._began))
    return f'about {duration(seconds)} left'


def duration(seconds: float) -> str:
  """'40 s', '12 min', '3.5 h', '12 days'."""
  for limit, size, form in ((90, 1, '{:.0f} s'), (5400, 60, '{:.0f} min'),
                            (72 * 3600, 3600, '{:.1f} h')):
    if seconds < limit:
      return form.format(seconds / size)
  return f'{seconds / 86400:,.0f} days'


def _others(trials, root):
  found = sorted(path.parent for path in to_path(root).glob('*/config.json'))
  return {folder.name: Trial(folder.name, None) for folder in found if folder.name not in trials}


def _read_state(trial, folder):
  status = read_status(folder)
  rows = _last_rows(folder / 'metrics.jsonl')
  step = max((row['step'] for row in rows.values()), default=None)
  note = status.get('error') or status.get('reason') or ''
  if whole_from := status.get('record_whole_from'):
    note = f'record whole from step {whole_from} on; {note}'.removesuffix('; ')
  steps = trial.config['steps'] if trial.config else None
  told = status['status']
  if told == 'running' and not in_use(folder):
    told = 'killed'
  return State(trial.name, told, step, steps,
               rows.get('probe', {}).get('sink_1'), rows.get('valid', {}).get('valid'),
               ' '.join(str(note).split())[:200])


def _last_rows(path) -> dict[str, dict]:
  """{kind: last row} of the end of a metrics file, which may be being written."""
  try:
    with path.open('rb') as file:
      file.seek(0, 2)
      file.seek(max(0, file.tell() - _TAIL))
      lines = file.read().decode('utf-8', 'replace').splitlines()
  except OSError:
    return {}
  return {row['kind']: row for row in _objects(lines) if 'kind' in row and 'step' in row}


def _objects(lines: Iterable[str]):
  for line in lines:
    try:
      row = json.loads(line)
    except ValueError:
      continue
    if isinstance(row, dict):
      yield row


def _number(value, form):
  return '' if value is None else format(value, form)
