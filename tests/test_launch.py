"""The launch scripts, run with stand-ins for Python: nothing is installed here."""

import os
import shutil
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.launch_clone import ROOT, Clone, kinds, pinned

SCRIPTS = [p for ending in ('sh', 'sbatch') for p in sorted((ROOT / 'launch').glob(f'*.{ending}'))
           if p.name != 'settings.sh'] + [ROOT / '.ci' / 'run']

pytestmark = pytest.mark.skipif(
    sys.platform == 'win32' or not shutil.which('bash'), reason='needs bash')


@pytest.fixture
def clone(tmp_path):
  return Clone(tmp_path)


@pytest.mark.parametrize('script', ['launch/test.sh', 'launch/quickstart.sh'])
def test_help_needs_no_python(clone, script):
  code, output, log = clone('--help', script=script)
  assert code == 0 and not log and not clone.venv.exists()
  for word in (f'bash {script}', 'PYTHON=', 'VENV='):
    assert word in output


def test_help_of_the_quick_start_makes_nothing(clone):
  clone.python('python3', '3.12.1')
  code, output, log = clone('--help', script='launch/quickstart.sh')
  assert code == 0 and not log and 'DIR/index.html' in output and not clone.venv.exists()
  code, output, log = clone('--steps=3', script='launch/quickstart.sh')
  assert code == 1 and not log and 'unknown option --steps=3' in output


@pytest.mark.parametrize('version', ['2.7.18', '3.10.13', '3.14.0'])
def test_a_python_out_of_range_is_named(clone, version):
  code, output, log = clone(PYTHON=str(clone.python('mine', version)))
  assert code == 1 and not log and not clone.venv.exists()
  assert f'is Python {version}; needed: Python 3.11, 3.12 or 3.13' in output


def test_a_python_that_does_not_start(clone):
  code, output, _ = clone(PYTHON='no-such-python')
  assert code == 1
  assert 'PYTHON=no-such-python does not start' in output and '3.11, 3.12 or 3.13' in output


def test_a_python_without_venv(clone):
  code, output, log = clone(PYTHON=str(clone.python('mine', '3.12.4', incomplete=True)))
  assert code == 1 and not log and not clone.venv.exists()
  assert 'apt-get install python3.12-venv' in output


def test_installs_once(clone):
  clone.python('python3', '3.12.1')
  code, output, log = clone('-k', 'a b')
  assert code == 0, output
  assert log == [
      'venv 3.12.1',
      'pip 0 install --disable-pip-version-check --no-input --no-compile --quiet'
      f' --requirement {clone.requirements}',
      'run 3.12.1 pytest [-q] [--durations=10] [-n] [2] [-k] [a b]'
      f' in {clone.root} with {clone.root}']
  code, output, log = clone()
  assert code == 0 and kinds(log) == ['run'] and not output


def test_what_no_process_may_keep_is_compiled_at_once(clone):
  clone.python('python3', '3.12.1')
  code, output, log = clone(PYTHONDONTWRITEBYTECODE='1')
  assert code == 0 and kinds(log) == ['venv', 'pip', 'run'] and '--no-compile' not in log[1], output


def test_changed_requirements_are_installed(clone):
  clone.python('python3', '3.12.1')
  clone()
  clone.requirements.write_text('jax==2\n')
  code, output, log = clone()
  assert code == 0 and kinds(log) == ['pip', 'run']
  assert 'requirements.txt has changed' in output
  assert kinds(clone()[2]) == ['run']


def test_an_interrupted_installation_is_repeated(clone):
  clone.python('python3', '3.12.1')
  code, output, log = clone(FAILING_PIP='1')
  assert code == 1 and kinds(log) == ['venv', 'pip'] and 'the installation failed' in output
  (clone.venv / 'half a package').touch()
  code, output, log = clone()
  assert code == 0 and kinds(log) == ['venv', 'pip', 'run'] and 'interrupted' in output
  assert not (clone.venv / 'half a package').exists()


@pytest.mark.skipif(not shutil.which('flock'), reason='needs flock')
def test_two_at_a_time_install_once(clone):
  clone.python('python3', '3.12.1')
  both = [clone.start('launch/test.sh', SLOW_PIP='1') for _ in range(2)]
  output = ''.join(''.join(process.communicate(timeout=30)) for process in both)
  assert [process.returncode for process in both] == [0, 0]
  assert sorted(kinds(clone.log.read_text().splitlines())) == ['pip', 'run', 'run', 'venv']
  assert 'waiting for it' in output


def test_another_python_rebuilds(clone):
  clone.python('python3', '3.11.7')
  clone.python('python3.12', '3.12.1')
  clone()
  code, output, log = clone(PYTHON='python3.12')
  assert code == 0 and kinds(log) == ['venv', 'pip', 'run'] and log[0] == 'venv 3.12.1'
  assert 'it has Python 3.11.7' in output
  # Without PYTHON what is there stays, although python3 would be found first.
  assert kinds(clone()[2]) == ['run']


def test_an_environment_whose_python_is_gone_is_rebuilt(clone):
  clone.python('python3', '3.12.1')
  clone()
  (clone.venv / 'bin' / 'python').unlink()
  code, output, log = clone()
  assert code == 0 and kinds(log) == ['venv', 'pip', 'run'] and 'no longer starts' in output


@pytest.mark.parametrize('pythons, expected', [
    ({'python3': '3.13.0', 'python3.12': '3.12.1'}, '3.13.0'),
    ({'python3': '3.14.0', 'python3.11': '3.11.7', 'python3.12': '3.12.1'}, '3.12.1'),
    ({'python3': '3.9.2', 'python3.13': '3.13.0', 'python3.11': '3.11.7'}, '3.11.7'),
    ({'python3.13': '3.13.0'}, '3.13.0'),
])
def test_search(clone, pythons, expected):
  for name, version in pythons.items():
    clone.python(name, version)
  code, output, log = clone()
  assert code == 0, output
  assert log[0] == f'venv {expected}'


def test_search_passes_over_a_python_without_venv(clone):
  clone.python('python3', '3.11.2', incomplete=True)
  code, output, _ = clone()
  assert code == 1 and 'apt-get install python3.11-venv' in output
  clone.python('python3.13', '3.13.0')
  assert clone()[2][0] == 'venv 3.13.0'


def pyenv(clone, *versions):
  """pyenv, and its commands that start only where their version is selected."""
  root = clone.root.parent / 'pyenv root'
  (clone.bin / 'pyenv').write_text(f'#!/usr/bin/env bash\necho "{root}"\n')
  (clone.bin / 'pyenv').chmod(0o755)
  for version in versions:
    name = 'python' + version.rpartition('.')[0]
    (clone.bin / name).write_text('#!/usr/bin/env bash\nexit 127\n')
    (clone.bin / name).chmod(0o755)
    for command in ('python3', name):
      clone.python(command, version, directory=root / 'versions' / version / 'bin')


def test_search_in_pyenv(clone):
  clone.python('python3', '3.9.2')
  pyenv(clone, '3.10.13', '3.11.7', '3.12.1')
  assert clone()[2][0] == 'venv 3.12.1'
  assert clone(PYTHON='python3.11')[2][0] == 'venv 3.11.7'


def test_search_finds_nothing(clone):
  assert 'no Python at all' in clone()[1]
  clone.python('python3', '3.9.2')
  code, output, _ = clone()
  assert code == 1 and 'python3 is 3.9.2' in output and 'PYTHON=/path/to/python3' in output


def test_a_directory_of_somebody_else_is_left_alone(clone):
  clone.python('python3', '3.12.1')
  (clone.venv / 'bin').mkdir(parents=True)
  (clone.venv / 'mine').touch()
  code, output, log = clone()
  assert code == 1 and not log and (clone.venv / 'mine').exists()
  assert 'did not make it' in output


def test_from_another_directory(clone, tmp_path):
  clone.python('python3', '3.12.1')
  elsewhere = tmp_path / 'else where'
  elsewhere.mkdir()
  code, output, log = clone('a b', script='launch/quickstart.sh', cwd=elsewhere,
                            VENV='my env', PYTHONPATH='/old')
  assert code == 0, output
  assert (elsewhere / 'my env' / 'bin' / 'python').exists() and not clone.venv.exists()
  # The quick start writes where it is called, and packages from outside stay out.
  where = f'in {elsewhere} with {clone.root}'
  assert log[-3:] == [
      'run 3.12.1 sink_jax.evaluate [--checkpoint=SmolLM2-135M-Instruct] [--sequences=16] '
      f'[--out=a b] {where}',
      f'run 3.12.1 sink_jax.sweep [--config={clone.root}/configs/quickstart.py] '
      f'[--workdir=a b/runs] {where}',
      f'run 3.12.1 sink_jax.report [--runs=a b/runs] [--out=a b] [--kind=runs] '
      f'[--evaluation=a b] {where}']
  # Without the model the rest goes on.
  code, output, log = clone('c', script='launch/quickstart.sh', cwd=elsewhere, VENV='my env',
                            FAILING_PIP='1')
  assert code == 0 and 'could not be fetched' in output
  assert [line.split()[2] for line in log if line.startswith('run')] == [
      'sink_jax.sweep', 'sink_jax.report'] and 'evaluation' not in log[-1]
  log = clone(cwd=elsewhere, VENV='my env')[2]
  assert kinds(log) == ['run'] and f' in {clone.root} ' in log[0]


def test_without_an_environment(clone):
  code, output, log = clone(
      VENV='none', PYTHON=str(clone.python('mine', '3.12.1')), PYTHONPATH='/site', WORKERS='0')
  assert code == 0, output
  assert log == [
      f'run 3.12.1 pytest [-q] [--durations=10] in {clone.root} with {clone.root}:/site']
  clone.python('python3', '3.12.1', incomplete=True, missing='flax grain')
  code, output, log = clone(VENV='none')
  assert code == 1 and not log and 'has no flax, grain' in output


def test_slurm_is_a_test_of_its_own(clone):
  clone.python('python3', '3.12.1')
  assert '[tests/launchers/test_slurm.py] in' in clone('--slurm')[2][-1]
  assert 'launchers/test_slurm.py' not in clone('-k', 'x')[2][-1]


@pytest.mark.parametrize('failing, code', [('', 0), ('tests', 1), ('compile', 1)])
def test_continuous_integration_runs_the_tests(clone, tmp_path, failing, code):
  clone.python('python3', '3.12.1')
  returned, output, log = clone(script='.ci/run', cwd=tmp_path, FAILING_RUN=failing)
  assert returned == code and kinds(log)[:2] == ['venv', 'pip'], output
  # Packages of the environment; a published model; then compilers beside the tests.
  assert sorted(kinds(log)[2:]) == ['pip', 'pip', 'run', 'run'], output
  runs = [line for kind, line in zip(kinds(log), log) if kind == 'run']
  assert sorted(' for v5e by ' in line for line in runs) == [False, True]


@pytest.mark.parametrize('script', SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_sound(script):
  subprocess.run(['bash', '-n', script], check=True)
  assert os.access(script, os.X_OK)
  shellcheck = shutil.which('shellcheck', path=os.pathsep.join(
      [os.path.dirname(sys.executable), os.environ['PATH']]))
  if not shellcheck:  # a platform without the package
    pytest.skip('shellcheck is not installed; bash -n found nothing')
  checked = subprocess.run(
      [shellcheck, '-x', script], cwd=ROOT, capture_output=True, text=True)
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
