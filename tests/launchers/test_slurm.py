"""A job in a real SLURM of one node: stopped, queued again, resumed; with SLURM_TEST=yes."""

import contextlib
import json
import os
import pwd
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.train.runs import SMALL

ROOT = Path(__file__).parents[2]
NEEDED = ('munged', 'slurmctld', 'slurmd', 'sbatch', 'srun', 'scontrol')
CONFIGURATION = '''
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={munge}/socket,cred_expire=5
CryptoType=crypto/munge
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerParameters=bf_interval=1,sched_interval=1
MailProg=/bin/true
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
'''

pytestmark = pytest.mark.skipif(not os.environ.get('SLURM_TEST'), reason='set SLURM_TEST=yes')


@contextlib.contextmanager
def slurm(folder):
  """SLURM's daemons, which end with the context; yields the environment of its clients."""
  missing = [name for name in NEEDED if not shutil.which(name)]
  assert not missing and os.geteuid() == 0, (
      'as root, and first: apt-get install slurmd slurmctld slurm-client munge')
  for name in ('state', 'spool'):
    (folder / name).mkdir()
  munge, owner = Path(tempfile.mkdtemp(prefix='munge-')), pwd.getpwnam('munge')
  with socket.socket() as one, socket.socket() as two:
    one.bind(('127.0.0.1', 0))
    two.bind(('127.0.0.1', 0))
    ports = one.getsockname()[1], two.getsockname()[1]
  (folder / 'slurm.conf').write_text(CONFIGURATION.format(
      host=socket.gethostname().partition('.')[0], ports=ports, folder=folder, munge=munge,
      cpus=max(2, os.cpu_count())))
  environment = dict(os.environ, SLURM_CONF=str(folder / 'slurm.conf'))
  (munge / 'key').write_bytes(os.urandom(128))
  for path, mode in ((munge, 0o755), (munge / 'key', 0o400)):
    os.chown(path, owner.pw_uid, owner.pw_gid)
    path.chmod(mode)
  started = []

  def start(*command, user=None):
    started.append(subprocess.Popen(
        command, env=environment, user=user, group=user, extra_groups=[] if user else None,
        stdout=(folder / 'daemons.log').open('a'), stderr=subprocess.STDOUT))

  try:
    start('munged', '--foreground', '--force',
          *(f'--{option}={munge}/{file}' for option, file in (
              ('key-file', 'key'), ('socket', 'socket'), ('pid-file', 'pid'),
              ('log-file', 'log'), ('seed-file', 'seed'))), user='munge')
    until(lambda: (munge / 'socket').exists(), 10, folder)
    start('slurmctld', '-D', '-f', str(folder / 'slurm.conf'))
    start('slurmd', '-D', '-f', str(folder / 'slurm.conf'))
    until(lambda: 'idle' in said(environment, 'sinfo', '--noheader', '--format=%t'), 30, folder)
    yield environment
  finally:
    for process in reversed(started):
      process.terminate()
    for process in reversed(started):
      with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
      process.kill()
      process.wait()
    shutil.rmtree(munge)


def said(environment, *command):
  done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
  return done.stdout


def until(true, seconds, folder):
  deadline = time.monotonic() + seconds
  while not true():
    if time.monotonic() > deadline:
      logs = [p for p in folder.rglob('*.log')]
      told = '\n'.join(f'{p.name}:\n' + p.read_text(errors='replace')[-3000:] for p in logs)
      raise AssertionError('it has not happened\n' + told)
    time.sleep(0.2)


@pytest.fixture
def clone(tmp_path):
  """The repository, with settings of its own."""
  root = tmp_path / 'clone'
  root.mkdir()
  for name in ('launch', 'sink_jax', 'configs', 'requirements.txt'):
    copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
    copy(ROOT / name, root / name)
  return root


def steps_of(workdir):
  path = workdir / 'metrics.jsonl'
  lines = path.read_text().splitlines(keepends=True) if path.exists() else []
  rows = [json.loads(line) for line in lines if line.endswith('\n')]
  return [row['step'] for row in rows if row['kind'] == 'train']


def test_a_job_is_stopped_queued_again_and_resumed(tmp_path, clone):
  workdir = tmp_path / 'run'
  small = SMALL | {'steps': 6000, 'checkpoint_every': 3000, 'probe.every': 3000,
                   'validation.every': 3000}
  arguments = ' '.join(f'"--config.{key}={value}"' for key, value in small.items())
  (clone / 'launch' / 'settings.sh').write_text(
      f'NAME=real CONFIG=configs/base.py WORKDIR={workdir} ARGUMENTS=({arguments})\n'
      f'SLURM_TIME=10 SLURM_TASKS={os.environ.get("SLURM_TASKS", 1)} RESTARTS=3 GRACE=60\n')
  with slurm(tmp_path) as environment:
    environment |= {
        'VENV': 'none', 'PYTHON': sys.executable, 'JAX_PLATFORMS': 'cpu',
        'XLA_FLAGS': '--xla_force_host_platform_device_count=4'}
    launch = lambda *words: subprocess.run(
        ['bash', 'launch/slurm.sh', *words], cwd=clone, env=environment, check=True,
        capture_output=True, text=True).stdout
    job = launch('submit').split()[-1]
    state = lambda: dict(
        item.split('=', 1) for item in said(environment, 'scontrol', 'show', 'job', job).split()
        if '=' in item)
    log = lambda: ''.join(p.read_text() for p in (clone / 'runs' / 'slurm').glob('real-*.log'))
    for attempt in range(2):
      before = len(steps_of(workdir))
      until(lambda: len(steps_of(workdir)) > before + 5, 120, tmp_path)
      if attempt == 0:
        said(environment, 'scancel', '--signal=TERM', job)
        until(lambda: state()['Restarts'] == '1' and state()['JobState'] == 'PENDING', 60, tmp_path)
        stopped = max(steps_of(workdir))
        assert 'Exit code 42: back to the queue.' in log()
        # For two minutes as a rule; cred_expire makes it seconds.
        until(lambda: state()['JobState'] == 'RUNNING', 60, tmp_path)
    assert f'resuming from step {stopped}' in log() and stopped < small['steps']
    launch('cancel')  # saves as well, and stays off the queue
    until(lambda: state()['JobState'] not in ('RUNNING', 'COMPLETING'), 60, tmp_path)
    assert state()['JobState'] == 'FAILED' and state()['ExitCode'] == '42:0', log()
    assert 'It was cancelled' in log()
  rows = steps_of(workdir)
  assert rows == sorted(set(rows)) and rows[0] == 1  # nothing twice, nothing left out
  assert rows == list(range(1, rows[-1] + 1))
