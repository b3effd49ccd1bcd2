"""The launchers of clouds and clusters, with stand-ins for the programs they call."""

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import yaml

from tests.launchers.stand_ins import PROGRAMS, ROOT, Launchers, until

pytestmark = pytest.mark.skipif(
    sys.platform == 'win32' or not shutil.which('bash'), reason='needs bash')

SETTINGS = '''
NAME=first CONFIG=configs/base.py WORKDIR=gs://bucket/first
ARGUMENTS=('--a=a b' "--b=it's" '--c=$(x)')
RESTARTS=7 GRACE=90 PROJECT=mine ZONE=here TPU_NAME=pod TPU_TYPE=v6e-16 TPU_RUNTIME=v2-alpha-tpuv6e
IMAGE=registry/sink-jax:tpu ACCELERATOR=tpu-v6e-slice TOPOLOGY=4x4 HOSTS=4 CLUSTER=ours
SKY_ACCELERATORS=tpu-v6e-8
'''
PARTS = SETTINGS + 'JOB=sweep SHARDS=2 DATA=gs://bucket/tokens\n'
JOB = ['train', '--config=configs/base.py', '--workdir=gs://bucket/first', '--a=a b', "--b=it's",
       '--c=$(x)']
PART = ['sweep', *JOB[1:3], "--set=data.source=PackedDataset(path='gs://bucket/tokens')", *JOB[3:]]
# Of every script that has some; `render` prints YAML, no commands.
ACTIONS = {
    path.name: [action for action in choices.split() if action != 'render']
    for path in sorted((ROOT / 'launch').glob('*.sh'))
    for choices in re.findall(r"^read_action '(.*?)'", path.read_text(), re.MULTILINE)}


@pytest.fixture
def launchers(tmp_path):
  made = Launchers(tmp_path)
  made.settings(SETTINGS)
  return made


def words(command):
  return shlex.split(command, posix=True)


@pytest.mark.parametrize('script', ACTIONS)
def test_dry_runs_change_nothing_and_print_commands(launchers, script):
  before, known = launchers.files(), ('bash', 'git', 'mkdir', 'rm', *PROGRAMS)
  for action in ACTIONS[script]:
    code, output, errors = launchers(script, action, '--dry_run')
    assert code == 0 and output, errors
    for line in output.splitlines():
      assert line.startswith('#') or words(line)[0] in known, line
  assert launchers.called() == [] and launchers.files() == before


@pytest.mark.parametrize('script', ACTIONS)
def test_what_is_missing_is_named_before_anything_is_done(launchers, script):
  (launchers.root / 'launch' / 'settings.sh').unlink()
  code, output, _ = launchers(script, '--help')
  assert code == 0 and f'bash launch/{script}' in output and '--dry_run' in output
  action = ACTIONS[script][0]
  code, _, errors = launchers(script, action)
  assert code == 1 and 'cp launch/settings.example.sh launch/settings.sh' in errors
  launchers.settings('')
  code, _, errors = launchers(script, action)
  missing = {'tpu_vm.sh': 'PROJECT: Google Cloud project', 'xpk.sh': 'CLUSTER: name of the cluster',
             'gke.sh': 'IMAGE: built from launch/Dockerfile'}
  assert code == 1 and missing.get(script, 'WORKDIR: a folder that all hosts see') in errors
  code, _, errors = launchers(script, 'begin')
  assert code == 2 and 'unexpected argument begin' in errors
  assert launchers.called() == []


@pytest.mark.parametrize('script', ['gke.sh', 'sky.sh', 'tpu_vm.sh', 'xpk.sh'])
def test_a_workdir_that_others_do_not_see_is_refused(launchers, script):
  action = 'run' if script == 'tpu_vm.sh' else ACTIONS[script][0]
  launchers.settings(SETTINGS + 'WORKDIR=runs/first\n')
  code, _, errors = launchers(script, action)
  assert code == 1 and 'WORKDIR=runs/first' in errors and launchers.called() == []
  launchers.settings(SETTINGS + 'WORKDIR=/disk/first\n')
  code, _, errors = launchers(script, action, '--dry_run')
  assert (code == 0) if script == 'tpu_vm.sh' else 'lost with the machine' in errors


@pytest.mark.parametrize('text, message', [
    ('JOB=walk', 'JOB=walk: train or sweep'), ('SHARDS=2', 'only a sweep has parts'),
    ('NAME=A_run', 'NAME=A_run: at most 40'), ('HOSTS=four', 'HOSTS=four: a whole number'),
    ('DATA="/disk/it\'s"', 'no quotes'), ('PROVISIONING=cheap', 'PROVISIONING=cheap')])
def test_settings_that_make_no_sense(launchers, text, message):
  launchers.settings(SETTINGS + text)
  code, _, errors = launchers('xpk.sh', 'create')
  assert code == 1 and message in errors and launchers.called() == []


@pytest.mark.parametrize('provisioning, alpha, expected', [
    ('on-demand', False, []), ('spot', False, ['--spot']), ('reserved', False, ['--reserved']),
    ('reserved RESERVATION=ours', True, ['--reserved', '--reservation=ours']),
    ('flex-start MAX_RUN=4h', True, ['--provisioning-model=flex-start', '--max-run-duration=4h'])])
def test_a_tpu_is_asked_for_and_waited_for(launchers, tmp_path, provisioning, alpha, expected):
  launchers.settings(SETTINGS + f'PROVISIONING={provisioning}')
  states = tmp_path / 'states'
  states.write_text('UNKNOWN WAITING_FOR_RESOURCES PROVISIONING UNKNOWN ACTIVE')
  code, _, errors = launchers('tpu_vm.sh', 'create', STATES=str(states))
  assert code == 0 and 'pod is WAITING_FOR_RESOURCES' in errors and 'pod is ACTIVE' in errors
  describe, create = launchers.called()[:2]
  group = ['compute', 'tpus', 'queued-resources']
  assert describe[1:6] == [*group, 'describe', 'pod'] and not states.read_text()
  assert create == ['gcloud', *['alpha'] * alpha, *group, 'create', 'pod', '--node-id=pod',
                    '--project=mine', '--zone=here', '--accelerator-type=v6e-16',
                    '--runtime-version=v2-alpha-tpuv6e', *expected]


def test_a_tpu_that_was_taken_away(launchers, tmp_path):
  (tmp_path / 'states').write_text('SUSPENDED SUSPENDED')
  code, _, errors = launchers('tpu_vm.sh', 'create', STATES=str(tmp_path / 'states'))
  assert code == 1 and 'tpu_vm.sh delete' in errors
  assert not any('create' in call for call in launchers.called())


def test_a_tpu_host_runs_stops_and_says_so(launchers, tmp_path):
  """What is sent through ssh, run in a folder that is the home of a host."""
  launchers.settings(SETTINGS + 'CONFIG=0 WORKDIR=/disk/a')
  host = tmp_path / 'host'
  host.mkdir()
  shutil.copytree(launchers.root, host / 'sink_jax')
  job = host / 'sink_jax' / 'sink_jax' / 'train.py'
  job.write_text('import sys\nhere = sys.argv\nsys.argv = ["", "0", "60"]\n'
                 + job.read_text().replace('sys.argv[1:],', 'here[1:],'))
  code, _, errors = launchers('tpu_vm.sh', 'run', HOST=str(host))
  assert code == 0, errors
  started, = launchers.wait_for_jobs(1)
  assert started['arguments'] == ['--config=0', '--workdir=/disk/a', '--a=a b', "--b=it's",
                                  '--c=$(x)']
  call, = launchers.called()
  assert call[:8] == ['gcloud', 'compute', 'tpus', 'tpu-vm', 'ssh', 'pod', '--project=mine',
                      '--zone=here'] and '--worker=all' in call
  code, _, errors = launchers('tpu_vm.sh', 'run', HOST=str(host))
  assert code == 1 and 'a job runs here' in errors
  code, _, errors = launchers('tpu_vm.sh', 'stop', HOST=str(host))
  assert code == 0 and 'has ended' in errors and len(launchers.jobs()) == 1
  until(lambda: not os.path.exists(f'/proc/{started["pid"]}'))
  assert 'nothing runs' in launchers('tpu_vm.sh', 'stop', HOST=str(host))[2]


def test_setup_sends_the_commits_and_installs(launchers):
  _, output, _ = launchers('tpu_vm.sh', 'setup', '--dry_run')
  assert 'archive --format=tar.gz' in output and 'tpu_host.sh\\ setup\\ python3.12' in output
  text = (ROOT / 'launch' / 'tpu_host.sh').read_text()
  assert "'jax[tpu]' 'etils[epath-gcs]'" in text and '"jax[tpu]" "etils[epath-gcs]"' in (
      ROOT / 'BUILD.md').read_text()


def test_xpk(launchers):
  launchers.settings(PARTS + 'PROVISIONING=spot')
  assert launchers('xpk.sh', 'create')[0] == 0
  calls = launchers.called()
  for k, call in enumerate(calls, 1):
    assert call[:4] == ['xpk', 'workload', 'create', f'--workload=first-{k}']
    assert {'--spot', '--max-restarts=7', '--termination-grace-period-seconds=90',
            '--tpu-type=v6e-16', '--docker-image=registry/sink-jax:tpu'} <= set(call)
    command = call[-1].removeprefix('--command=')
    shown = subprocess.run(['bash', '-c', command.replace(
        'exec bash /sink_jax/launch/local.sh', 'printf "%s\\n"')], capture_output=True, text=True)
    assert shown.stdout.splitlines() == ['--', *PART, f'--shard={k}/2']
  assert len(calls) == 2


def test_slurm(launchers):
  launchers.settings(PARTS + 'SLURM_GPUS=8 SLURM_NODES=2 SLURM_PARTITION=fast '
                     'SLURM_OPTIONS=("--comment=a b")')
  code, _, errors = launchers('slurm.sh', 'submit')
  assert code == 0, errors
  call, = launchers.called()
  script = call.index(str(launchers.root / 'launch' / 'slurm.sbatch'))
  assert {'--array=1-2', '--nodes=2', '--gpus-per-node=8', '--ntasks-per-node=8', '--comment=a b',
          '--partition=fast', '--signal=TERM@90', f'--chdir={launchers.root}'} <= set(call[:script])
  assert call[script + 1:] == ['7', '2', *PART]
  assert launchers('slurm.sh', 'cancel')[0] == 0
  assert [call[:3] for call in launchers.called() if call[0] == 'scontrol'] == [
      ['scontrol', 'update', 'JobId=17'], ['scontrol', 'update', 'JobId=18_2']]


SRUN = '''#!/usr/bin/env bash
shift  # --kill-on-bad-exit=0: two tasks, of which srun returns the highest code
JAX_PROCESS_ID=0 "$@" & JAX_PROCESS_ID=1 "$@" & one=0 two=0
wait %1 || one=$?
wait %2 || two=$?
exit $((one > two ? one : two))
'''


@pytest.mark.parametrize('codes, before, expected, queued', [
    ('0,0', 0, 0, False), ('42,42', 0, 42, True), ('42,-9', 2, 42, True), ('-6,1', 0, 1, False),
    ('42,42', 3, 42, False)])
def test_a_slurm_job_queues_again_or_not(launchers, tmp_path, codes, before, expected, queued):
  srun = tmp_path / 'programs' / 'srun'
  srun.write_text(SRUN)
  srun.chmod(0o755)
  code, _, errors = launchers(
      'slurm.sbatch', '3', '1', 'train', codes, '0', SLURM_JOB_ID='17',
      SLURM_RESTART_COUNT=str(before))
  assert code == expected, errors
  assert launchers.called() == ([['scontrol', 'requeue', '17']] if queued else [])
  assert [job['arguments'] for job in launchers.jobs()] == [[codes, '0']] * 2


def test_sky(launchers):
  launchers.settings(PARTS + 'PROVISIONING=spot SKY_NODES=2')
  code, output, errors = launchers('sky.sh', 'render')
  assert code == 0, errors
  for k, task in enumerate(yaml.safe_load_all(output), 1):
    assert task['name'] == f'first-{k}' and task['num_nodes'] == 2
    assert task['resources'] == {
        'use_spot': True, 'accelerators': 'tpu-v6e-8',
        'job_recovery': {'max_restarts_on_errors': 0, 'recover_on_exit_codes': [42]}}
    shown = subprocess.run(
        ['bash', '-c', task['run'].replace('exec bash launch/local.sh', 'echo "$JAX_PROCESS_ID" '
                                           '"$JAX_COORDINATOR_ADDRESS"; printf "%s\\n"')],
        capture_output=True, text=True, env={**os.environ, 'SKYPILOT_NUM_NODES': '2',
                                             'SKYPILOT_NODE_RANK': '1',
                                             'SKYPILOT_NODE_IPS': '10.0.0.1\n10.0.0.2'})
    assert shown.stdout.splitlines() == [
        '1 10.0.0.1:8476', '--restarts=7', '--', *PART, f'--shard={k}/2']
  launchers.settings(SETTINGS + 'HARDWARE=gpu')
  assert 'set HARDWARE=tpu' in launchers('sky.sh', 'launch')[2] and not launchers.called()
  launchers.settings(SETTINGS)
  assert launchers('sky.sh', 'launch')[0] == 0
  assert launchers.called() == [['sky', 'jobs', 'launch', '--yes', '--detach-run', '--name=first',
                                 'runs/sky/first.yaml']]
  assert (launchers.root / 'runs' / 'sky' / 'first.yaml').exists()
