"""launch/local.sh: exit codes, restarts, signals, and that nothing is left behind."""

import os
import re
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.launchers.stand_ins import Launchers, alive, group_is_gone, until

pytestmark = pytest.mark.skipif(
    sys.platform == 'win32' or not shutil.which('bash'), reason='needs bash')


@pytest.fixture
def launchers(tmp_path):
  return Launchers(tmp_path)


@pytest.mark.parametrize('codes, expected', [
    ('0,0', 0), ('0,42', 42), ('42,-9', 42), ('0,-9', 137), ('1,-6', 1), ('42,1', 1), ('2,0', 2)])
def test_exit_codes_of_two_processes_become_one(launchers, codes, expected):
  code, _, errors = launchers('local.sh', '--processes=2', '--', 'train', codes, '0')
  assert code == expected, errors
  first, second = launchers.jobs()
  addresses = {job['variables']['JAX_COORDINATOR_ADDRESS'] for job in (first, second)}
  assert len(addresses) == 1 and addresses.pop().startswith('127.0.0.1:')
  assert {job['variables']['JAX_PROCESS_ID'] for job in (first, second)} == {'0', '1'}
  assert first['variables']['JAX_NUM_PROCESSES'] == '2'


@pytest.mark.parametrize('code, starts', [('42', 3), ('-9', 3), ('1', 1), ('2', 1), ('0', 1)])
def test_restarts(launchers, code, starts):
  returned, _, errors = launchers('local.sh', '--restarts=2', '--', 'train', code, '0')
  assert returned == (137 if code == '-9' else int(code))
  assert len(launchers.jobs()) == starts
  assert errors.count('starting again') == starts - 1
  assert not any(name.startswith('JAX_') for name in launchers.jobs()[0]['variables'])


def test_restarts_of_the_settings(launchers):
  launchers.settings('CONFIG=42 WORKDIR=0 RESTARTS=2')
  assert launchers('local.sh')[0] == 42 and len(launchers.jobs()) == 3
  assert launchers('local.sh', '--restarts=0')[0] == 42 and len(launchers.jobs()) == 4


def test_the_others_are_killed_some_time_after_a_death(launchers):
  code, _, errors = launchers(
      'local.sh', '--processes=3', '--grace=1', '--', 'train', '0,-11,0', '60,1,60', CHILD='1')
  assert code == 139
  assert 'Process 1 died of signal 11' in errors and 'have not ended within 1 s' in errors
  jobs = launchers.jobs()
  assert len(jobs) == 3
  until(lambda: all(group_is_gone(job['pid']) for job in jobs))  # and what they had started


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_all_and_end_the_restarts(launchers, number):
  process = launchers.start('local.sh', '--processes=2', '--restarts=9', '--', 'train', '0', '60')
  jobs = launchers.wait_for_jobs(2)
  process.send_signal(number)
  process.communicate(timeout=20)
  assert process.returncode == 42 and len(launchers.jobs()) == 2
  assert not any(alive(job['pid']) for job in jobs)


def test_a_third_interrupt_ends_a_job_that_does_not_listen(launchers):
  job = launchers.root / 'sink_jax' / 'train.py'
  job.write_text(job.read_text().replace('lambda *_: sys.exit(42)', 'signal.SIG_IGN'))
  process = launchers.start('local.sh', '--', 'train', '0', '60')
  started, = launchers.wait_for_jobs(1)
  for _ in range(2):  # the second one may come while it is saving
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
  process.send_signal(signal.SIGINT)
  _, errors = process.communicate(timeout=20)
  assert process.returncode == 137 and not alive(started['pid'])
  assert errors.count('Once more Ctrl-C ends this at once') == 1


def test_a_kill_takes_the_processes_and_what_they_have_started_with_it(launchers):
  process = launchers.start('local.sh', '--processes=2', '--restarts=1', '--', 'train', '42,0',
                            '0.2,60', CHILD='1')
  jobs = launchers.wait_for_jobs(2)
  time.sleep(0.5)  # one has ended meanwhile
  process.kill()
  process.wait()
  until(lambda: all(group_is_gone(job['pid']) for job in jobs), seconds=5)
  assert len(launchers.jobs()) == 2


@pytest.mark.parametrize('ignored', [True, False])
def test_a_terminal_that_goes_away_saves_unless_nohup_was_asked_for(launchers, ignored):
  process = launchers.start('local.sh', '--', 'train', '0', '60' if not ignored else '1',
                            **({'NOHUP': '1'} if ignored else {}))
  job, = launchers.wait_for_jobs(1)
  os.kill(process.pid, signal.SIGHUP)
  if ignored:
    assert int(re.search(r'SigIgn:\s*(\w+)', Path(f'/proc/{job["pid"]}/status').read_text())[1],
               16) & 1, 'the process of the job hears it'
    os.kill(job['pid'], signal.SIGHUP)
  process.communicate(timeout=20)
  assert process.returncode == (0 if ignored else 42) and len(launchers.jobs()) == 1


def test_dry_run_prints_what_can_be_pasted(launchers):
  before = launchers.files()
  code, output, _ = launchers('local.sh', '--processes=2', '--devices=4', '--dry_run', '--',
                              'train', 'a b', "it's", '$(x)')
  assert code == 0 and launchers.files() == before and not launchers.jobs()
  for i, line in enumerate(output.splitlines()):
    words = shlex.split(line)
    assert words[-1] == '&' and words[-4:-1] == ['a b', "it's", '$(x)']
    assert f'JAX_PROCESS_ID={i}' in words and 'JAX_PLATFORMS=cpu' in words
    assert 'XLA_FLAGS=--xla_force_host_platform_device_count=4' in words
  assert i == 1


def test_gpus_are_divided(launchers):
  run = lambda n: launchers('local.sh', f'--processes={n}', '--dry_run', '--', 'train',
                            CUDA_VISIBLE_DEVICES='4,5,6,7')
  assert ['4,5' in line for line in run(2)[1].replace('\\', '').splitlines()] == [True, False]
  assert 'CUDA_VISIBLE_DEVICES=6,7' in run(2)[1].replace('\\', '')
  program = launchers.calls.with_name('programs') / 'nvidia-smi'
  program.write_text('#!/bin/sh\nprintf "0\\n1\\n"\n')
  program.chmod(0o755)
  output = launchers('local.sh', '--processes=2', '--dry_run', '--', 'train')[1]
  assert [f'CUDA_VISIBLE_DEVICES={i} ' in output for i in range(3)] == [True, True, False]
  code, _, errors = run(3)
  assert code == 1 and '--processes=3 cannot divide 4 GPUs' in errors


def test_arguments_that_are_wrong(launchers):
  for arguments, message in ((['--processes=0', '--', 'train'], '--processes=0'),
                             (['train'], 'unexpected argument train'),
                             (['--restarts=08', '--', 'train'], '--restarts=08: a number'),
                             (['--', 'trian'], 'there is no command trian'),
                             (['--'], 'after -- comes train or sweep')):
    code, _, errors = launchers('local.sh', *arguments)
    assert code == 2 and message in errors and '--help' in errors
  code, _, errors = launchers('local.sh')
  assert code == 1 and 'cp launch/settings.example.sh launch/settings.sh' in errors


def test_settings_say_what_runs(launchers):
  launchers.settings('CONFIG=0 WORKDIR=0 DATA=/disk/tokens PROCESSES=2 DEVICES=3\n'
                     'ARGUMENTS=("--x=a b" "--y=it\'s")\n')
  code, output, errors = launchers('local.sh', '--dry_run')
  words = shlex.split(output.splitlines()[0])
  assert code == 0 and words[-7:-1] == [
      'sink_jax.train', '--config=0', '--workdir=0',
      "--config.data.source=PackedDataset(path='/disk/tokens')", '--x=a b', "--y=it's"]
  launchers.settings('CONFIG=0 WORKDIR=0 JOB=sweep SHARDS=2')
  code, _, errors = launchers('local.sh', '--dry_run')
  assert code == 1 and 'SHARDS=2: this script runs a whole sweep' in errors
  launchers.settings('WORKDIR= CONFIG=a PROCESSES=two')
  assert 'PROCESSES=two: a whole number' in launchers('local.sh')[2]
  launchers.settings('WORKDIR= CONFIG=a')
  assert 'WORKDIR: a folder that all hosts see' in launchers('local.sh')[2]
