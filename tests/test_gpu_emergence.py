"""launch/gpu_emergence.sh on a model small enough for a CPU: stops in time, continues, reports."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SMALL = ['--only=emergence-default', '--set=model.size=tiny', '--set=data.context=64',
         '--set=batch_size=4', '--set=data.source=InstalledPackages(max_files=40)',
         '--set=data.tokenizer=Bytes()', '--set=probe.every=50', '--set=validation.every=0']


def run(folder, *arguments):
  return subprocess.run(
      ['bash', str(ROOT / 'launch/gpu_emergence.sh'), *arguments], cwd=folder, text=True,
      capture_output=True, timeout=300,
      env=dict(os.environ, PYTHON=sys.executable, JAX_PLATFORMS='cpu'))


def test_a_call_trains_and_reports(tmp_path):
  done = run(tmp_path, 'work', '--limit=120', '--out=report', '--set=steps=6', *SMALL)
  assert done.returncode == 0, done.stderr
  report = json.loads((tmp_path / 'report/report.json').read_text())
  (run_,) = report['runs'].values()
  assert run_['status'] == 'done' and run_['step'] == 6
  data = json.loads((tmp_path / 'work/emergence-default/data.json').read_text())
  assert run_['unique_tokens'] == data['unique_training_tokens']
  assert run_['epochs'] == pytest.approx(6 * 4 * 64 / data['tokens_per_epoch'])
  assert list((tmp_path / 'report').glob('curves-*.png'))


@pytest.mark.full
def test_a_call_ends_within_its_limit_and_the_next_goes_on(tmp_path):
  script = tmp_path / 'timeout'  # as if the limit were 12 seconds
  script.write_text('#!/bin/bash\nargs=("$@"); args[3]=12; exec /usr/bin/timeout "${args[@]}"\n')
  script.chmod(0o755)
  environment = dict(os.environ, PATH=f'{tmp_path}:{os.environ["PATH"]}', PYTHON=sys.executable,
                     JAX_PLATFORMS='cpu')
  command = ['bash', str(ROOT / 'launch/gpu_emergence.sh'), 'work', '--out=report',
             '--set=steps=200000', *SMALL]
  stopped = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True,
                           timeout=300)
  assert stopped.returncode == 42 and 'run the same command again' in stopped.stderr


@pytest.mark.parametrize('limit', ['10', 'long', ''])
def test_bad_limits_are_refused(tmp_path, limit):
  done = run(tmp_path, f'--limit={limit}')
  assert done.returncode == 2 and f'--limit={limit}' in done.stderr


def test_help_says_what_it_does(tmp_path):
  done = run(tmp_path, '--help')
  assert done.returncode == 0 and '--limit=SECONDS' in done.stdout
