"""bash launch/test.sh --compile and --parity: what they install; nothing is installed here."""

import importlib.metadata
import shutil
import sys

import pytest
from packaging.requirements import Requirement

from tests.compile import targets
from tests.launch_clone import ROOT, Clone, kinds, pinned

pytestmark = pytest.mark.skipif(
    sys.platform == 'win32' or not shutil.which('bash'), reason='needs bash')


@pytest.fixture
def clone(tmp_path):
  return Clone(tmp_path)


def test_compiling_installs_what_the_targets_need_once(clone):
  clone.python('python3', '3.12.1')
  (clone.root / 'launch' / 'compilers' / 'tpu.txt').write_text('libtpu==1\n')
  compilers = clone.venv / 'compilers'
  code, output, log = clone('--compile=v5e,v6e', '-k', 'a b', JAX_PLATFORMS='cuda')
  assert code == 0, output
  assert kinds(log) == ['venv', 'pip', 'pip', 'run']
  assert log[2:] == [
      f'pip 0 install --disable-pip-version-check --no-input --no-compile --quiet --no-deps'
      f' --target {compilers}/tpu --requirement {clone.root}/launch/compilers/tpu.txt',
      f'run 3.12.1 pytest [-q] [--durations=10] [-n] [2] [tests/compile] [-k] [a b] in {clone.root}'
      f' with {clone.root} on cpu for v5e,v6e by {compilers}']
  code, output, log = clone('--full', '--compile', 'tests/compile/test_controls.py')
  assert kinds(log) == ['pip', 'run'] and f'--target {compilers}/cuda' in log[0]
  assert '[2] [--full] [tests/compile/test_controls.py] in' in log[1]
  assert f' for {",".join(targets.TARGETS)} by ' in log[1]
  assert kinds(clone('--compile')[2]) == ['run'] and ' for ' not in clone()[2][0]
  (clone.root / 'launch' / 'compilers' / 'tpu.txt').write_text('libtpu==2\n')
  (compilers / 'tpu' / 'of 1').touch()
  assert kinds(clone('--compile=h200')[2]) == ['run']
  assert kinds(clone('--compile=v5p')[2]) == ['pip', 'run']
  assert not (compilers / 'tpu' / 'of 1').exists()


def test_an_interrupted_installation_of_a_compiler_is_repeated(clone):
  clone.python('python3', '3.12.1')
  clone()
  code, output, log = clone('--compile=h200', FAILING_PIP='1')
  assert code == 1 and kinds(log) == ['pip'] and 'the installation failed' in output
  (clone.venv / 'compilers' / 'cuda' / 'half a package').touch()
  assert kinds(clone('--compile=h200')[2]) == ['pip', 'run']
  assert not (clone.venv / 'compilers' / 'cuda' / 'half a package').exists()


def test_compilers_elsewhere(clone, tmp_path):
  clone.python('python3', '3.12.1')
  elsewhere = tmp_path / 'else where'
  (elsewhere / 'cuda').mkdir(parents=True)
  (elsewhere / 'cuda' / 'mine').touch()
  code, output, log = clone('--compile=h200', cwd=elsewhere, COMPILERS=str(elsewhere))
  assert code == 1 and 'did not make it' in output and (elsewhere / 'cuda' / 'mine').exists()
  code, output, log = clone('--compile=v5e', cwd=elsewhere, VENV='none', COMPILERS='there')
  assert code == 0 and kinds(log) == ['pip', 'run'], output
  assert log[1].endswith(f' for v5e by {elsewhere}/there')
  code, output, log = clone('--compile', VENV='none')
  assert code == 1 and not log and 'COMPILERS=DIR' in output


def test_parity_installs_transformers_beside_the_environment(clone, tmp_path):
  clone.python('python3', '3.12.1')
  code, output, log = clone('--parity', '-k', 'llama')
  assert code == 0, output
  assert kinds(log) == ['venv', 'pip', 'pip', 'run']
  assert log[2].endswith(f' --quiet --target {clone.venv}/parity '
                         f'--requirement {clone.root}/launch/parity.txt')
  assert '[tests/pretrained/test_parity.py] [-k] [llama] in' in log[3]
  assert log[3].endswith(f' beside {clone.venv}/parity')
  code, output, log = clone('--parity', 'tests/test_x.py')
  assert kinds(log) == ['run'] and 'test_parity.py' not in log[0]
  assert ' beside ' not in clone()[2][0]
  assert ' beside ' not in clone(PARITY_PACKAGES='stale')[2][0]
  code, output, log = clone('--parity', VENV='none')
  assert code == 1 and not log and 'PARITY=DIR' in output
  log = clone('--parity', VENV='none', PARITY='there', cwd=tmp_path)[2]
  assert log[1].endswith(f' beside {tmp_path}/there')


@pytest.mark.parametrize('given', ['v9', 'v5e,h100', 'v5', '', ','])
def test_an_unknown_target_is_refused(clone, given):
  code, output, log = clone(f'--compile={given}')
  assert code == 1 and not log and f'choices: {", ".join(targets.TARGETS)}.' in output


@pytest.mark.parametrize('python', ['3.11', '3.12', '3.13'])
def test_compilers_fit_the_pinned_jax(python):
  jax = pinned(ROOT / 'requirements.txt', python)['jax']
  cuda = pinned(ROOT / 'launch' / 'compilers' / 'cuda.txt', python)
  plugins = {name: version for name, version in cuda.items() if name.startswith('jax-')}
  assert len(plugins) == 2 and set(plugins.values()) == {jax}


def test_libtpu_is_the_one_that_jax_asks_for():
  python = '.'.join(map(str, sys.version_info[:2]))
  if importlib.metadata.version('jax') != pinned(ROOT / 'requirements.txt', python)['jax']:
    pytest.skip('another jax than the pinned one is installed')
  [wanted] = [r for r in map(Requirement, importlib.metadata.requires('jax'))
              if r.name == 'libtpu']
  libtpu = pinned(ROOT / 'launch' / 'compilers' / 'tpu.txt', python)['libtpu']
  assert libtpu in wanted.specifier
