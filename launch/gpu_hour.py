"""Checks one GPU, and trains on it in a process that outlives the call; see gpu_hour.sh.

The machine may lack packages that --wheels brings. So this file imports the standard library, and
modules of sink_jax that need nothing else; the rest is imported in functions, once the wheels are
in the path.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from sink_jax.sweep import detached, machine  # which need no other package

BEGAN = time.monotonic()
ROOT = Path(__file__).resolve().parents[1]
LIMITS = {'check': 480, 'emergence': 540, 'stop': 60}  # seconds
MORE = 42  # exit code: call the same command again
# What training needs beside jax, flax, optax, orbax and matplotlib, and a GPU machine often lacks.
PACKAGES = ('array_record', 'attr', 'cloudpickle', 'docstring_parser', 'filelock', 'grain',
            'jaxtyping', 'markdown_it', 'mdurl', 'ml_collections', 'portpicker', 'safetensors',
            'tensorboardX', 'tokenizers', 'tqdm', 'typeguard', 'tyro', 'wadler_lindig')
# What the benchmark takes as well: without these there is no check either.
OF_BENCHMARK = ('docstring_parser', 'jaxtyping', 'typeguard', 'tyro', 'wadler_lindig')
SMOKE = ('model.size=tiny', 'model.dtype=float32', 'data.context=64', 'batch_size=4', 'steps=60',
         'data.source=InstalledPackages(max_files=40)', 'data.tokenizer=TrainedBpe(vocab_size=300)',
         'checkpoint_every=20', 'log_every=10', 'probe.every=20', 'probe.sequences=8',
         'validation.every=30', 'validation.batches=2')
_COLLECT_EVERY = 60  # seconds
_LOG_LINES = 100


def main(arguments: list[str] | None = None) -> int:
  """Runs a command of gpu_hour.sh; returns its exit code."""
  options = _parsed(arguments)
  try:
    machine.check_writable('--work', options.work, 'runs/', 'trainer.lock', 'trainer.log',
                           'text.log')
    machine.check_writable('--out', options.out, 'report.json', 'report.md', 'log.txt',
                           'runs.tar.gz')
    return _main(options)
  except OSError as error:
    return _wrong(error)


def _main(options) -> int:
  os.environ['SINK_JAX_COMMAND'] = _command(sys.argv[1:])
  environment = _environment(options.work, options.wheels)
  sys.path[:0] = environment['PYTHONPATH'].split(os.pathsep)
  absent = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
  missing = ', '.join(absent)
  if missing and (options.command != 'check' or set(absent) & set(OF_BENCHMARK)):
    return _wrong(f'this Python lacks {missing}: --wheels=DIR brings them, see BUILD.md.')
  os.environ['JAX_PLATFORMS'] = 'cpu'  # of this process: the GPU is for those that it starts
  try:
    trials = {} if missing else _trials(options)
    _refuse_unknown_parts(options)
    if not (options.smoke or options.command == 'stop' or _alive(options.work)):
      _say(f'This is {machine.find_accelerator(environment)}.')
  except ValueError as error:
    return _wrong(error)
  if options.command == 'check':
    return check(options, environment, missing)
  return emergence(options, environment, trials)


def check(options: argparse.Namespace, environment: dict[str, str], missing: str) -> int:
  """Starts to tokenize the text, which may outlive this call, and becomes the benchmark.

  missing: packages without which there is no text, but the benchmark all the same; '' if none.
  """
  if missing:
    _say(f'The text is not tokenized: this Python lacks {missing}.')
  else:
    nice = [shutil.which('nice'), '-n', '10'] if shutil.which('nice') else []
    with open(options.work / 'text.log', 'ab') as log:
      subprocess.Popen([*nice, *_sweep(options, '--data_only')], start_new_session=True,
                       env=environment | {'JAX_PLATFORMS': 'cpu'}, stdin=subprocess.DEVNULL,
                       stdout=log, stderr=log)
  arguments = [str(options.out), f'--limit={_left(options):.0f}', *options.parts]
  if options.smoke:
    arguments.append('--smoke')
  os.execve(sys.executable, [sys.executable, '-P', '-m', 'sink_jax.benchmark', 'check',
                             *arguments], environment)


def emergence(options: argparse.Namespace, environment: dict[str, str], trials: dict) -> int:
  """Waits for the trainer, and keeps the files of `out` up to date; returns an exit code.

  trials: {name: Trial}, see `sink_jax.sweep.trials`.
  """
  collector, stopping = Collector(options, trials), options.command == 'stop'
  trainer = None if stopping else _started(options, environment)
  if stopping and not _asked_to_end(options.work):
    return 1
  while True:
    alive = _alive(options.work)
    ending = not alive or _left(options) < 5 + 2 * collector.longest
    if ending or collector.due():
      collector.collect('The trainer is at work.' if alive else 'The trainer has ended.')
    if ending:
      break
    time.sleep(0.5)
  if stopping:
    return _stopped(collector.states, alive)
  code = trainer.wait(10) if trainer and not alive else None
  return _exit_code(collector.states, alive, code, options)


class Collector:
  """Copies what the runs have written to `out`; every file is replaced as a whole.

  Attributes:
    states: of all trials, as they were last read.
    longest: seconds that a collection has taken at most.
  """

  def __init__(self, options: argparse.Namespace, trials: dict):
    from sink_jax.io.files import remove_temporaries

    remove_temporaries(options.out)  # of a call that was cut off while it wrote
    self._out, self._work, self._trials = options.out, options.work, trials
    self._ended, self._last, self._seen = {}, -_COLLECT_EVERY, None
    self.states, self.longest = [], 3.0
    self._look()

  def due(self) -> bool:
    """Has a trial begun or ended since the last collection, or a minute passed?"""
    return self._look() != self._seen or time.monotonic() - self._last > _COLLECT_EVERY

  def collect(self, headline: str) -> None:
    """Writes runs.tar.gz, log.txt, report.json, report.md and the picture of the curves.

    A file that cannot be written, to a full disk for example, is tried again the next time.
    """
    began, self._seen = time.monotonic(), self._look()
    try:
      self._write_all(headline)
    except OSError as error:
      _say(f'Not all files of --out were written: {error}')
    self._last = time.monotonic()
    self.longest = max(self.longest, self._last - began)

  def _write_all(self, headline):
    from sink_jax.io.files import write_atomically
    from sink_jax.sweep.archive import pack_records
    from sink_jax.sweep.summary import as_markdown

    write_atomically(self._out / 'runs.tar.gz', pack_records(self._work / 'runs'))
    write_atomically(self._out / 'log.txt', '\n'.join(_log(self._work)))
    report, page = self._report()
    report['trials'] = {state.name: {'status': state.status, 'step': state.step,
                                     'steps': state.steps} for state in self.states}
    write_atomically(self._out / 'report.json', json.dumps(report, indent=1) + '\n')
    write_atomically(self._out / 'report.md', as_markdown(self.states, headline) + '\n' + page)

  def _look(self):
    from sink_jax.sweep.summary import read_states

    try:
      self.states = read_states(self._trials, self._work / 'runs', self._ended)
    except OSError as error:
      _say(f'The runs could not be read: {error}')
    return [(state.name, state.status) for state in self.states]

  def _report(self):
    """(report.json, report.md) of the runs so far; the pictures go to `out`."""
    made = self._work / 'report'
    try:
      from sink_jax.cli.report import make_report
      from sink_jax.io.files import write_atomically

      make_report(made, str(self._work / 'runs'), kind='runs', maps=False)
    except Exception as error:  # no run yet, or one that is being written: the rest still counts
      return {}, f'No comparison of the runs: {error}\n'
    for picture in made.glob('*.png'):
      write_atomically(self._out / picture.name, picture.read_bytes())
    return json.loads((made / 'report.json').read_text()), (made / 'report.md').read_text()


def _trials(options):
  from sink_jax.sweep.config_keys import parse_settings
  from sink_jax.sweep.trials import load_trials

  return load_trials(_config(), settings=parse_settings(options.set))


def _started(options, environment):
  """The trainer, if none was alive, as a process that this one does not take along when it ends."""
  trainer = detached.start(
      _sweep(options, f'--workdir={options.work / "runs"}', '--noestimate'),
      options.work / 'trainer.lock', options.work / 'trainer.log', environment)
  _say(f'The trainer has been started: process {trainer.pid}.' if trainer else
       'The trainer is at work.')
  return trainer


def _alive(work):
  return detached.is_alive(work / 'trainer.lock')


def _asked_to_end(work):
  """Asks a trainer that is alive to end; False, with a line that says why, where that fails."""
  try:
    if _alive(work):
      detached.ask_to_end(work / 'trainer.lock')
  except (OSError, ValueError) as error:
    _say(f'error: no process was stopped: {error}')
    return False
  return True


def _stopped(states, alive):
  """The exit code of `stop`."""
  left = _left_to_do(states)
  if alive:
    _say('The trainer was asked to end and still saves: stop again waits for it.')
    return MORE
  rest = f' {len(left)} trials are not done: emergence goes on with them.' if left else ''
  _say(f'No trainer is at work: there is nothing left to stop.{rest}')
  return 0


def _refuse_unknown_parts(options):
  """Raises ValueError if --parts has a name that no part of a check has."""
  if options.parts:
    from sink_jax.benchmark.check import chosen

    names = options.parts[0].removeprefix('--parts=').split(',')
    chosen([name.strip() for name in names], options.smoke)


def _left_to_do(states):
  """Names of the trials that have not ended; prints the state of every one."""
  from sink_jax.sweep.trials import FINAL_STATUSES

  print('\n'.join(f'{state.name}: {state.status}, step {state.step or 0} of {state.steps}'
                  for state in states))
  return [state.name for state in states if state.status not in FINAL_STATUSES]


def _exit_code(states, alive, code, options):
  left = _left_to_do(states)
  if not left:
    return 0
  if alive:
    _say(f'The trainer goes on: {len(left)} trials are not done. Run the same command again.')
    return MORE
  failed = any(state.status == 'failed' for state in states)
  if code == 1 or code is None and failed:
    _say('A trial failed; the end of the log:', *_log(options.work)[-20:])
    return 1
  how = '' if code in (None, MORE) else f' (exit code {code})'
  _say(f'The trainer has ended{how} before its time: run the same command again.',
       *_log(options.work)[-20:])
  return MORE


def _environment(work, wheels):
  """That of the processes: caches in `work`, and the packages of the wheels in the path."""
  paths = [os.environ.get('PYTHONPATH', '')]
  if wheels:
    paths.insert(0, str(_installed(wheels, work / 'site')))
  return os.environ | {
      'PYTHONPATH': os.pathsep.join(filter(None, paths)),
      'SINK_JAX_CACHE': str((work / 'text').resolve()),
      'SINK_JAX_COMPILE_CACHE': str((work / 'compiled').resolve())}


def _installed(wheels, site):
  """Installs wheels into a folder, unless these are there; returns its path."""
  files = sorted(wheels.glob('*.whl'))
  if not files:
    sys.exit(_wrong(f'--wheels={wheels}: there is no file *.whl in it.'))
  listed = '\n'.join(f'{file.name} {file.stat().st_size}' for file in files)
  stamp = site / 'wheels.txt'
  if not (stamp.is_file() and stamp.read_text() == listed):
    shutil.rmtree(site, ignore_errors=True)
    done = subprocess.run(
        [sys.executable, '-m', 'pip', 'install', '--quiet', '--no-index', '--no-deps',
         '--no-compile', '--disable-pip-version-check', '--target', site, *files])
    if done.returncode:
      sys.exit(_wrong(f'--wheels={wheels}: pip could not install them.'))
    stamp.write_text(listed)
  return site.resolve()


def _command(arguments):
  """This call as the records of runs name it: without the folders of this machine."""
  here = ('--out', '--work', '--wheels')
  mine = [word for before, word in zip(['', *arguments], arguments)
          if word.partition('=')[0] not in here and before not in here]
  return shlex.join(['bash', 'launch/gpu_hour.sh', *mine])


def _sweep(options, *arguments):
  return [sys.executable, '-P', '-m', 'sink_jax.sweep', f'--config={_config()}', *arguments,
          *(f'--set={setting}' for setting in options.set)]


def _config():
  return _from_here('configs/emergence.py')


def _from_here(name):
  """A path of the repository; without the folders above it where the caller stands in it."""
  return Path(name) if Path.cwd() == ROOT else ROOT / name


def _log(work):
  """The last lines of the trainer's log; of a progress display its last state alone."""
  try:
    text = (work / 'trainer.log').read_bytes().decode('utf-8', 'replace')
  except OSError:
    return []
  return [line.rpartition('\r')[2] for line in text.splitlines()[-_LOG_LINES:]]


def _left(options):
  return options.limit - (time.monotonic() - BEGAN)


def _say(*lines):
  print(*lines, sep='\n', file=sys.stderr, flush=True)


def _wrong(text):
  _say(f'error: {text}')
  return 2


def _parsed(arguments):
  parser = argparse.ArgumentParser(prog='bash launch/gpu_hour.sh', allow_abbrev=False,
                                   usage='%(prog)s COMMAND [OPTIONS]; --help lists them')
  parser.add_argument('command', choices=LIMITS)
  parser.add_argument('--out', type=Path)
  parser.add_argument('--work', type=Path, default=_from_here('runs/gpu_hour'))
  parser.add_argument('--limit', type=int)
  parser.add_argument('--wheels', type=Path)
  parser.add_argument('--smoke', action='store_true')
  parser.add_argument('--parts')
  parser.add_argument('--set', action='append', default=[])
  options = parser.parse_args(arguments)
  options.limit = LIMITS[options.command] if options.limit is None else options.limit
  if options.limit < 20:
    parser.error(f'--limit={options.limit}: a whole number of seconds, at least 20')
  if options.parts and options.command != 'check':
    parser.error('--parts is for check')
  options.parts = [f'--parts={options.parts}'] if options.parts else []
  options.out = options.out or _from_here(f'results/gpu_hour/{options.command}')
  if options.smoke:
    given = {setting.partition('=')[0] for setting in options.set}
    options.set[:0] = [setting for setting in SMOKE if setting.partition('=')[0] not in given]
  return options


if __name__ == '__main__':
  sys.exit(main())
