"""Reads how far the trials of a sweep are from what they have written, and keeps a table of it."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from sink_jax.io.files import write_atomically
from sink_jax.io.paths import AnyPath, to_path
from sink_jax.io.tables import markdown_table
from sink_jax.sweep.trials import FINAL_STATUSES, Trial
from sink_jax.train.defaults import filled_from
from sink_jax.train.experiment import differences
from sink_jax.train.record import read_row
from sink_jax.train.run_dir import in_use, read_config, read_status

# Bytes at the end of metrics.jsonl in which the last row of every kind is looked for: the first
# suffices unless a row is logged every few steps, the last holds thousands of rows.
_TAILS = (2**15, 2**18, 2**21)
_WRITE_EVERY = 30  # seconds


@dataclasses.dataclass(frozen=True)
class TrialState:
  """One trial as it stands on the disk; a number is None where there is none yet.

  Attributes:
    name: of the trial, and of its folder.
    status: as in status.json; 'killed' where that is 'running' and no process holds the workdir.
    step: the last one that was logged.
    steps: of the whole trial.
    sink_1: Sink_1 in percent of heads, at the last probe.
    valid: the last validation loss, in nats per token.
    note: an error, or the reason why the trial was not run.
  """

  name: str
  status: str
  step: int | None
  steps: int | None
  sink_1: float | None
  valid: float | None
  note: str


def read_states(trials: Mapping[str, Trial], root: str | AnyPath,
                ended: dict[str, TrialState] | None = None) -> list[TrialState]:
  """Reads the state of every trial, in their order; of metrics the end of the file alone.

  Args:
    trials: by name.
    root: the folder of the sweep.
    ended: states of trials that have ended, from earlier calls. They are not read again, since
      an object store takes ten requests for each; this call adds to them.
  """
  folder, ended = to_path(root), {} if ended is None else ended
  states = [ended.get(name) or _read_state(trial, folder / name) for name, trial in trials.items()]
  ended |= {state.name: state for state in states if state.status in FINAL_STATUSES}
  return states


def as_markdown(states: list[TrialState], headline: str) -> str:
  """Makes a table to read while the sweep runs: how many of each status, then a row per trial."""
  counts = dict.fromkeys(state.status for state in states)
  counts = {status: sum(state.status == status for state in states) for status in counts}
  rows = []
  for state in states:
    of = f' of {state.steps:,}' if state.steps else ''
    step = '' if state.step is None else f'{state.step:,}{of}'
    rows.append([state.name, state.status, step, _number(state.sink_1, '.1f'),
                 _number(state.valid, '.3f'), state.note])
  lines = [f'# {headline}', '', ', '.join(f'{n} {status}' for status, n in counts.items()), '',
           *markdown_table(['trial', 'status', 'step', 'Sink_1 %', 'valid loss', ''], rows,
                           (0, 1, 5))]
  return '\n'.join(lines) + '\n'


@contextlib.contextmanager
def keep_summary(trials: Mapping[str, Trial], root: str | AnyPath, remaining: RemainingTime,
                 lines: bool) -> Iterator[None]:
  """Keeps ROOT/summary.md up to date for as long as the trials run.

  Args:
    trials: by name.
    root: the folder of the sweep.
    remaining: gives the time left, for the headline.
    lines: whether a line on the terminal also shows how far the running trials are, which is for
      trials in processes that show no progress themselves.
  """
  over, ended = threading.Event(), {}

  def update():
    while not over.wait(_WRITE_EVERY):
      time_left = remaining.as_text()
      states = write_summary(trials, root, f'Running, {time_left or "no estimate yet"}', ended)
      # The folder may hold a trial of another budget, in which this sweep has no such trial.
      running = [f'{state.name} {state.step or 0:,}'
                 + (f'/{state.steps:,}' if state.steps else '') for state in states
                 if state.name in trials and state.status == 'running']
      if lines and running:
        print(f'  {", ".join(running)}  {time_left}', file=sys.stderr, flush=True)

  # A daemon, so that a process that must end at once does not wait for an object store.
  thread = threading.Thread(target=update, daemon=True)
  write_summary(trials, root, 'Started', ended)
  thread.start()
  try:
    yield
  finally:
    over.set()
    thread.join()
    write_summary(trials, root, 'Not running', ended)


def write_summary(trials: Mapping[str, Trial], root: str | AnyPath, headline: str,
                  ended: dict[str, TrialState] | None = None) -> list[TrialState]:
  """Writes ROOT/summary.md, a table of these trials and of all others in the folder.

  Parts of a sweep that run side by side, such as the jobs of an array, write the same file, and so
  each of them writes the trials of all.

  Args:
    trials: by name.
    root: the folder of the sweep.
    headline: the first line of the file, to which the time is added.
    ended: as in `read_states`.

  Returns:
    The states in the table.
  """
  states = read_states({**trials, **other_trials(trials, root)}, root, ended)
  headline = f'{headline}; {time.strftime("%Y-%m-%d %H:%M")}'
  with contextlib.suppress(OSError):  # the trials report a full disk
    write_atomically(to_path(root) / 'summary.md', as_markdown(states, headline))
  return states


class RemainingTime:
  """Estimates the time left from the work of the trials that have ended and of those to come."""

  def __init__(self, work: Mapping[str, float], expected: float | None):
    """Starts the clock.

    Args:
      work: of every trial still to run, in any unit.
      expected: seconds that all of them take by an estimate; None without one. It counts until the
        first trial has ended, and the clock from then on.
    """
    self._work, self._expected = dict(work), expected
    self._total = sum(self._work.values())
    self._began = time.monotonic()

  def finish(self, name: str) -> None:
    """Takes the work of a trial that has ended off what is left."""
    self._work.pop(name, None)

  def as_text(self) -> str:
    """Returns 'about 12 min left', for example, or '' where nothing is known yet."""
    remaining, elapsed = sum(self._work.values()), time.monotonic() - self._began
    # Only the ratio of the work done to the work left counts, so its unit does not matter.
    done = self._total - remaining
    if done > 0:
      seconds = elapsed / done * remaining
    elif self._expected is None:
      return ''
    else:
      seconds = max(0.0, self._expected - elapsed)
    return f'about {duration(seconds)} left'


def duration(seconds: float) -> str:
  """Writes seconds in the unit that fits them: '40 s', '12 min', '3.5 h', '12 days'."""
  for limit, size, form in ((90, 1, '{:.0f} s'), (5400, 60, '{:.0f} min'),
                            (72 * 3600, 3600, '{:.1f} h')):
    if seconds < limit:
      return form.format(seconds / size)
  return f'{seconds / 86400:,.0f} days'


def other_trials(trials: Mapping[str, Trial], root: str | AnyPath) -> dict[str, Trial]:
  """The trials in the folder that are not among these, with their names alone."""
  folders = sorted(path.parent for path in to_path(root).glob('*/config.json'))
  return {folder.name: Trial(folder.name, None) for folder in folders if folder.name not in trials}


def _read_state(trial: Trial, folder: AnyPath) -> TrialState:
  status = read_status(folder)
  # The end of the file alone, since this is done for every trial, twice a minute.
  rows = _last_rows(folder / 'metrics.jsonl')
  step = max((row['step'] for row in rows.values()), default=None)
  note = status.get('error') or status.get('reason') or ''
  if whole_from := status.get('record_whole_from'):
    note = f'record whole from step {whole_from} on; {note}'.removesuffix('; ')
  steps = trial.config['steps'] if trial.config else None
  kind = status['status']
  if other := _difference(trial, folder):
    kind, note, steps = 'another config', other, None
  # A process that was killed leaves 'running' behind, while its lock is gone with it.
  elif kind == 'running' and not in_use(folder):
    kind = 'killed'
  return TrialState(trial.name, kind, step, steps,
                    rows.get('probe', {}).get('sink_1'), rows.get('valid', {}).get('valid'),
                    ' '.join(str(note).split())[:200])


def _difference(trial: Trial, folder: AnyPath) -> str:
  """A key in which the run in the folder is not the trial; '' where it is, or is not known."""
  if not trial.config or not (folder / 'config.json').exists():
    return ''
  try:
    saved = read_config(folder)
    return next(iter(differences(saved, filled_from(trial.config, saved))), '')
  except ValueError as error:
    return str(error)


def _last_rows(path: AnyPath) -> dict[str, dict[str, Any]]:
  """{kind: last row} of the end of metrics.jsonl, of which more is read while a kind is missing."""
  rows: dict[str, dict[str, Any]] = {}
  for tail in _TAILS:
    try:
      with path.open('rb') as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - tail))
        lines = file.read().splitlines()
    except OSError:
      break
    # The first and the last line may be cut off, and any may be damaged.
    rows = {row['kind']: row for line in lines if (row := read_row(line))}
    if tail >= size or {'probe', 'valid'} <= rows.keys():
      break
  return rows


def _number(value: Any, form: str) -> str:
  # A row may be damaged: its values are any that JSON has.
  return format(value, form) if isinstance(value, (int, float)) else ''
