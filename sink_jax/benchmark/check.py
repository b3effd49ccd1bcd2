"""`check`: correctness and speed on one GPU in one call, one process after another.

Every part is a command with a time limit of its own, which writes its document after every row,
so that a part that fails or is stopped leaves the rows that it had. This process starts the parts
and puts their documents together; it does not use JAX and so leaves the device to them.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from sink_jax.arguments import check_known
from sink_jax.benchmark import processes, table
from sink_jax.benchmark.check_report import PartResult, Report, checks_not_run, head, page
from sink_jax.benchmark.checks import count_passed, passed
from sink_jax.benchmark.options import Check
from sink_jax.benchmark.records import CorrectnessRow, Document
from sink_jax.io.files import remove_temporaries, write_atomically
from sink_jax.train.provenance import command

SECONDS = 480
_GRACE = 12  # seconds that a part may take to finish what it has begun
_RESERVE = 8  # for stopping the last part and for the page


class Part(NamedTuple):
  """A command, its weight when the time is divided, and how many processes share its work."""

  name: str
  weight: float
  arguments: list[str]
  processes: int = 1


def parts(smoke: bool, tolerance: float) -> list[Part]:
  """The parts in the order in which they run: those that matter most come first."""
  allowed = f'--tolerance={tolerance}'
  if smoke:
    tiny = '--seconds=0.01'
    return [
        Part('correctness', 0.4, ['correctness', '--variants', 'softmax', '--lengths', '16',
                                  allowed]),
        Part('train_60m', 0.2, ['train_step', '--size=tiny', '--batch', '1', '--length=16',
                                '--steps=2', '--vocab=32']),
        Part('attention', 0.4, ['attention', '--shape', '1,1,32,16', tiny, '--variants=softmax',
                                '--rivals=cudnn,release']),
        Part('loss', 0.2, ['loss', '--tokens=1,16', '--d_model=16', '--vocab=64', tiny]),
        Part('importance', 0.2, ['importance', '--length', '32', tiny]),
        Part('sweep', 0.2, ['attention', '--sweep', '--shape', '1,1,32,16', tiny, '--limit=0.1']),
    ]
  return [
      # This part spends its time on compiling, which uses one core: a process per core, but for
      # two.
      Part('correctness', 0.22, ['correctness', allowed],
           max(1, min(12, (os.cpu_count() or 2) - 2))),
      Part('train_60m', 0.18, ['train_step', '--size=60m', '--batch', '16', '32', '8',
                               '--implementation=default,pallas']),
      Part('saved_60m', 0.06, ['train_step', '--size=60m', '--batch', '16',
                               '--remat=save_matmuls']),
      Part('attention', 0.24, [
          'attention', '--shape', '8,8,2048,96', '8,16,2048,128', '8,8,2048,64', '1,8,32768,128',
          '--seconds=0.2', '--implementations=pallas,linear,chunked',
          '--rivals=cudnn,tokamax,reference,release,torch-flash,torch-flex,torch-eager']),
      Part('train_1b', 0.12, ['train_step', '--size=1b', '--batch', '8', '4']),
      Part('loss', 0.04, ['loss', '--seconds=0.3']),
      Part('importance', 0.04, ['importance', '--seconds=0.2']),
      Part('sweep', 0.10, ['attention', '--sweep', '--seconds=0.05', '--shape', '8,8,2048,96',
                        '8,16,2048,128', '8,8,2048,64']),
  ]


def chosen(names: list[str], smoke: bool, tolerance: float = 0.0) -> list[Part]:
  """The parts of these names, 'all' among them for every part; ValueError for another name."""
  every = parts(smoke, tolerance)
  known = ['all', *(part.name for part in every)]
  # --parts=none is an empty list, and a check of nothing is refused by that name.
  for name in names or ['none']:
    check_known(name, known, '--parts: unknown')
  return [part for part in every if {'all', part.name} & set(names)]


def check(options: Check) -> int:
  """Runs the parts, writes report.json and report.md; returns an exit code.

  The time that is left is divided among the parts that are left by their weights, so that the
  time that one does not use goes to those after it.

  The exit code is 1 where a correctness check failed, or where that part was chosen and made
  none; 2 where another part failed, the options are wrong, or the reports could not be written;
  0 otherwise.
  """
  out = Path(options.out)
  try:
    names = [] if options.parts == ('none',) else list(options.parts)
    wanted = chosen(names, options.smoke, options.tolerance)
    out.mkdir(parents=True, exist_ok=True)
    remove_temporaries(out)  # of a check that was killed while it wrote
  except (ValueError, OSError) as error:
    _say(f'error: {error}')
    return 2
  written = False
  seconds, began = options.limit or SECONDS, time.monotonic()
  report = Report(datetime.datetime.now(datetime.timezone.utc).isoformat(timespec='seconds'),
                  command(), seconds, options.smoke)
  with tempfile.TemporaryDirectory() as folder:  # a check that is killed leaves its reports alone
    for number, part in enumerate(wanted, 1):
      left = seconds - (time.monotonic() - began) - _RESERVE
      limit = left * part.weight / sum(later.weight for later in wanted[number - 1:])
      _say(f'== part {number}/{len(wanted)}: {part.name}, at most {max(0, limit):.0f} s; '
           f'{max(0, left):.0f} s left of {seconds:.0f} s')

      def save(part_result):
        nonlocal written
        report.parts[part.name] = part_result
        try:
          _write(report, out)
          written = True
        except OSError as error:  # a full disk, say: there may be room again at the next save
          written = False
          _say(f'The reports were not written: {error}')

      ended = _run(part, Path(folder), out, limit, options.seed, save)
      report.complete = number == len(wanted)
      save(ended)
  print(head(report))
  if written:
    _say(f'wrote {out / "report.json"} and {out / "report.md"}')
  return _exit_code(report) if written else 2


def _run(part: Part, folder: Path, out: Path, limit: float, seed: int,
         save: Callable[[PartResult], None]) -> PartResult:
  """Runs the processes of a part and returns how they ended, with the document they wrote.

  folder: for their documents. save: takes the result as it stands from time to time.
  """
  several = part.processes > 1
  files = [f'{part.name}-{n}.json' if several else f'{part.name}.json'
           for n in range(part.processes)]
  log = out / f'{part.name}.log' if several else None
  arguments = [*part.arguments, f'--seed={seed}']
  if not any(word.startswith('--limit') for word in arguments):
    # The part ends by itself before it is stopped, once the row that it has begun is done.
    arguments.append(f'--limit={max(1, limit - _GRACE):.0f}')
  # As a person would repeat it: in one process, and with the table on the terminal.
  shown = shlex.join(['python', '-m', 'sink_jax.benchmark', *arguments])
  if limit < 2:
    return PartResult(shown, part.processes, 'not run: the time was up', 0, [], None)
  if log:
    # The processes of a part append to one log, so that of an earlier check has to go.
    log.unlink(missing_ok=True)
  # XLA chooses some kernels by timing them on the device. Where several processes share it,
  # these times say nothing, and each would wait for the others.
  environment = {'XLA_FLAGS': ' '.join(filter(None, [
      os.environ.get('XLA_FLAGS'), '--xla_gpu_autotune_level=0']))} if several else {}
  began, running = time.monotonic(), []
  for n, file in enumerate(files):
    share = [f'--share={n}/{part.processes}'] if several else []
    running.append(processes.start([*arguments, *share, f'--json={file}'], folder, log,
                                   **environment))
  paths = [folder / file for file in files]

  def so_far(codes: list[int | None] | None = None) -> PartResult:
    documents = processes.documents(paths)
    status = 'running' if codes is None else _status(codes, documents, part)
    return PartResult(shown, part.processes, status, time.monotonic() - began, codes or [],
                      _merge(documents))

  # At once: a check that is killed has then named the part that was running.
  save(so_far())
  return so_far(processes.wait(running, paths, limit, lambda: save(so_far())))


def _status(codes: list[int | None], documents: list[Document], part: Part) -> str:
  # A process in a call of a driver may outlast even SIGKILL for a while, and has no exit code.
  if None in codes:
    return 'stopped: the time was up, but a process still ran, and may disturb the parts after it'
  if any(code in (-signal.SIGTERM, -signal.SIGKILL) for code in codes):
    return 'stopped: the time was up'
  # A failed check is what `correctness` exits with 1 for; without a document it broke down.
  if len(documents) < len(codes) or any(codes) and part.name != 'correctness':
    return f'failed: exit code {next((code for code in codes if code), 0)}'
  return 'done'


def _merge(documents: list[Document]) -> Document | None:
  """One document of those of a part's processes, None without any.

  `correctness` alone has several processes.
  """
  if len(documents) < 2:
    return documents[0] if documents else None
  rows = [row for document in documents for row in document.rows_of(CorrectnessRow)]
  not_run = sum(map(checks_not_run, documents))
  notes = documents[0].notes[:-1]  # the last one counts the checks of one process
  return dataclasses.replace(
      documents[0], rows=rows, not_run=not_run, notes=[*notes, count_passed(rows, not_run)],
      complete=all(document.complete for document in documents))


def _exit_code(report: Report) -> int:
  if 'correctness' in report.parts:
    # Without a document nothing has been shown to be correct, which counts as a failure.
    result = report.results['correctness']
    if not result or not passed(result.rows_of(CorrectnessRow)):
      return 1
  return 2 if any(part.status.startswith('failed') for part in report.parts.values()) else 0


def _write(report: Report, out: Path) -> None:
  """Writes report.json and report.md, each as a whole."""
  table.write_json(report.to_json(), out / 'report.json')
  write_atomically(out / 'report.md', page(report))


def _say(text: str) -> None:
  print(text, file=sys.stderr, flush=True)
