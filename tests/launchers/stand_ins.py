"""A copy of the launchers, a job that does as told, and programs that write down what they get."""

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]

# python -m sink_jax train [--config=]CODES [--workdir=]SECONDS ...: process i sleeps and ends with
# its exit code, a negative one being a signal. SIGTERM makes it 42. Every start is a line of the file STARTED.
JOB = '''
import json, os, signal, sys, time
i = int(os.environ.get('JAX_PROCESS_ID', 0))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(42))
with open(os.environ['STARTED'], 'a') as file:
  names = [n for n in os.environ if n.startswith(('JAX_', 'CUDA_VISIBLE', 'XLA_FLAGS'))]
  print(json.dumps({'pid': os.getpid(), 'arguments': sys.argv[1:],
                    'variables': {n: os.environ[n] for n in names}}), file=file, flush=True)
codes, seconds = (word.rpartition('=')[2].split(',') for word in sys.argv[1:3])
if os.environ.get('CHILD'):
  import subprocess
  subprocess.Popen(['sleep', '61'])
time.sleep(float(seconds[i % len(seconds)]))
code = int(codes[i % len(codes)])
if code < 0:
  os.kill(os.getpid(), -code)
sys.exit(code)
'''

# Writes its arguments down. gcloud: answers describe with the next line of the file STATES, and
# runs the command of an ssh in the folder HOST.
PROGRAM = '''#!{python} -SE
import json, os, subprocess, sys
name, arguments = os.path.basename(sys.argv[0]), sys.argv[1:]
asked = sys.stdin.read() if name == 'kubectl' and arguments[-1] == '-' else ''
with open(os.environ['CALLS'], 'a') as file:
  print(json.dumps([name, *arguments]), file=file)
if asked:
  open(os.environ['CALLS'] + '.stdin', 'w').write(asked)
if name == 'squeue':
  print('17\\n18_2')
if name == 'gcloud' and 'describe' in arguments and os.path.exists(os.environ.get('STATES', '')):
  states = open(os.environ['STATES']).read().split()
  open(os.environ['STATES'], 'w').write(' '.join(states[1:]))
  if not states or states[0] == 'UNKNOWN':
    sys.exit(1)
  print(states[0])
if name == 'gcloud' and 'ssh' in arguments and os.environ.get('HOST'):
  command = next(a for a in arguments if a.startswith('--command='))
  sys.exit(subprocess.call(['bash', '-c', command.partition('=')[2]], cwd=os.environ['HOST']))
'''
PROGRAMS = ('gcloud', 'kubectl', 'sbatch', 'scancel', 'scontrol', 'squeue', 'sky', 'xpk')


class Launchers:
  """Runs the launchers of a copy of the repository; the settings are a dict."""

  def __init__(self, directory):
    self.root = directory / 'a clone'
    self.calls = directory / 'calls'
    self.started = directory / 'started'
    shutil.copytree(ROOT / 'launch', self.root / 'launch',
                    ignore=shutil.ignore_patterns('settings.sh', 'compilers', '__pycache__'))
    (self.root / 'sink_jax').mkdir()
    for name in ('train', 'sweep'):
      (self.root / 'sink_jax' / f'{name}.py').write_text(JOB)
    programs = directory / 'programs'
    programs.mkdir()
    for name in PROGRAMS:
      (programs / name).write_text(PROGRAM.format(python=sys.executable))
      (programs / name).chmod(0o755)
    kept = {k: v for k, v in os.environ.items()
            if not k.startswith(('JAX_', 'XLA_', 'CUDA_', 'SLURM', 'PYTHON', 'SETTINGS'))}
    self.environment = kept | {
        'PATH': f'{programs}:{os.environ["PATH"]}', 'CALLS': str(self.calls),
        'HOME': str(directory), 'STARTED': str(self.started),
        'VENV': 'none', 'PYTHON': sys.executable,
        'RESTART_DELAY': '0', 'POLL_SECONDS': '0'}

  def settings(self, text):
    (self.root / 'launch' / 'settings.sh').write_text(text)

  def start(self, script, *arguments, **variables):
    return subprocess.Popen(
        ['bash', f'launch/{script}', *arguments], cwd=self.root, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=self.environment | variables,
        preexec_fn=functools.partial(_hearing, 'NOHUP' not in variables))

  def __call__(self, script, *arguments, **variables):
    """(exit code, standard output, standard error) of a launcher."""
    process = self.start(script, *arguments, **variables)
    output, errors = process.communicate(timeout=60)
    return process.returncode, output, errors

  def called(self):
    """The arguments of all programs since the last time, in order."""
    lines = self.calls.read_text().splitlines() if self.calls.exists() else []
    self.calls.unlink(missing_ok=True)
    return [json.loads(line) for line in lines]

  def jobs(self):
    """What the processes of jobs wrote when they started."""
    text = self.started.read_text() if self.started.exists() else ''
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith('\n')]

  def wait_for_jobs(self, number):
    until(lambda: len(self.jobs()) >= number)
    return self.jobs()

  def files(self):
    return sorted(str(p.relative_to(self.root)) for p in self.root.rglob('*')
                  if '__pycache__' not in p.parts)


def _hearing(hang_up):
  # Tests that run in the background are deaf to some signals, and would pass that on.
  signal.signal(signal.SIGINT, signal.SIG_DFL)
  signal.signal(signal.SIGHUP, signal.SIG_DFL if hang_up else signal.SIG_IGN)


def until(true, seconds=20):
  """Waits for a condition."""
  deadline = time.monotonic() + seconds
  while not true():
    assert time.monotonic() < deadline, 'it has not happened'
    time.sleep(0.02)


def alive(pid):
  with contextlib.suppress(OSError):
    return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] != 'Z'
  with contextlib.suppress(ProcessLookupError):
    if not Path('/proc').is_dir():
      os.kill(pid, 0)
      return True
  return False


def group_is_gone(pid):
  """No process is left of the group that the process led."""
  try:
    os.killpg(pid, 0)
  except ProcessLookupError:
    return True
  return False


