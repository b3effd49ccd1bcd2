"""The launch scripts on a machine with stand-ins for Python, and the pins they install."""

import pathlib
import re
import shutil
import subprocess

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = pathlib.Path(__file__).parents[1]
TOOLS = ('bash', 'env', 'cat', 'chmod', 'cp', 'dirname', 'flock', 'ls', 'mkdir', 'rm', 'sleep')

# Answers what the scripts ask of a Python and writes down what it was told to do.
PYTHON = '''#!/usr/bin/env bash
case "$*" in
  "-c import sys;"*) echo "{version} $0" ;;
  "-I -c import ensurepip"*) exit {incomplete:d} ;;
  "-c from importlib"*) echo "{missing}" ;;
  "-I -c import importlib.metadata"*) exit 1 ;;
  "-I -m venv "*)
    echo "venv {version}" >>"$LOG"
    mkdir -p "$4/bin"
    cp "$0" "$4/bin/python" ;;
  "-I -m pip "*)
    echo "pip $PIP_USER ${{*:4}}" >>"$LOG"
    if [[ -n ${{SLOW_PIP:-}} ]]; then sleep 0.3; fi
    exit ${{FAILING_PIP:-0}} ;;
  "-P -m "*)
    shift 2
    printf 'run {version} %s' "$1" >>"$LOG"
    shift
    printf ' [%s]' "$@" >>"$LOG"
    printf ' in %s with %s' "$PWD" "$PYTHONPATH" >>"$LOG"
    run=tests
    if [[ -n ${{COMPILE_TARGETS:-}} ]]; then
      run=compile
      printf ' on %s for %s by %s' "$JAX_PLATFORMS" "$COMPILE_TARGETS" "$COMPILERS" >>"$LOG"
    fi
    if [[ -n ${{PARITY_PACKAGES:-}} ]]; then printf ' beside %s' "$PARITY_PACKAGES" >>"$LOG"; fi
    echo >>"$LOG"
    [[ ${{FAILING_RUN:-}} != "$run" ]] ;;
  *) echo "unexpected: $*" >>"$LOG"; exit 9 ;;
esac
'''


class Clone:
  """A copy of the scripts on a machine that has only the Pythons given to it."""

  def __init__(self, directory):
    self.root = directory / 'a clone'
    self.bin = directory / 'bin'
    self.log = directory / 'log'
    self.venv = self.root / '.venv'
    self.requirements = self.root / 'requirements.txt'
    shutil.copytree(ROOT / 'launch', self.root / 'launch')
    shutil.copytree(ROOT / '.ci', self.root / '.ci')
    self.requirements.write_text('jax==1\n')
    self.bin.mkdir()
    for tool in TOOLS:
      if path := shutil.which(tool):
        (self.bin / tool).symlink_to(path)

  def python(self, name, version, incomplete=False, missing='', directory=None):
    path = (directory or self.bin) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(PYTHON.format(version=version, incomplete=incomplete, missing=missing))
    path.chmod(0o755)
    return path

  def start(self, script, *arguments, cwd=None, **variables):
    return subprocess.Popen(
        ['bash', self.root / script, *arguments], cwd=cwd or self.root, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={'PATH': str(self.bin), 'LOG': str(self.log), **variables})

  def __call__(self, *arguments, script='launch/test.sh', cwd=None, **variables):
    """Runs a script: (return code, what it wrote, what the Pythons were told)."""
    self.log.write_text('')
    process = self.start(script, *arguments, cwd=cwd, **variables)
    output, errors = process.communicate(timeout=30)
    return process.returncode, output + errors, self.log.read_text().splitlines()


def kinds(log):
  """What the Pythons were told to do: venv, pip, run."""
  return [line.split()[0] for line in log]


def pinned(path, python):
  """{package: version} of a file of exact versions, on Linux."""
  pins = {}
  for line in path.read_text().splitlines():
    if not line.partition('#')[0].strip():
      continue
    pin = Requirement(line)
    if pin.marker is None or pin.marker.evaluate(
        {'python_version': python, 'platform_machine': 'x86_64', 'platform_system': 'Linux'}):
      assert re.fullmatch(r'==[\w.]+', str(pin.specifier)), line
      assert canonicalize_name(pin.name) not in pins, f'{pin.name} is pinned twice'
      pins[canonicalize_name(pin.name)] = str(pin.specifier)[2:]
  return pins
