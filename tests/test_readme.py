"""The README's examples, run as they stand, on trials that are cut short."""

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.train.runs import ROOT

README = (ROOT / 'README.md').read_text()


def blocks(language):
  return re.findall(rf'```{language}\n(.*?)```', README, re.DOTALL)


@pytest.fixture(scope='module')
def project(tmp_path_factory):
  """A place with the configs where README commands run, after its `sink_jax` commands have run."""
  folder = tmp_path_factory.mktemp('project')
  shutil.copytree(ROOT / 'configs', folder / 'configs')
  trials = folder / 'configs' / 'quickstart.py'
  short, count = re.subn(r"'steps': \d+", "'steps': 12", trials.read_text())
  assert count == 2
  trials.write_text(short)
  environment = dict(os.environ, PYTHONPATH=f'{ROOT}:{folder}', JAX_PLATFORMS='cpu')
  outputs = {}
  for line in '\n'.join(blocks('bash')).splitlines():
    if line.startswith('python -m sink_jax.'):
      command = [sys.executable, *shlex.split(line, comments=True)[1:]]
      if 'synthetic' in line:
        command += ['--only=synthetic-default-seed-0', '--set=steps=12', '--processes=1']
      elif '--budget=smoke' in line and '--dry_run' not in line:
        command += ['--only=default,heads-1', '--set=steps=12', '--set=validation.batches=1']
      done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
      assert done.returncode == 0, f'{line}\n{done.stderr}'
      outputs[command[2]] = done.stdout
  return folder, outputs


def test_commands(project):
  folder, outputs = project
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


def test_snippets(project, monkeypatch):
  folder, _ = project
  monkeypatch.chdir(folder)
  names = {}
  for block in blocks('python'):
    exec(compile(block, 'README.md', 'exec'), names)
  assert 0 <= names['report'].sink_rate() <= 1 and (folder / 'importance.png').stat().st_size > 5000
  assert names['text'].shape == (8, 40) and (folder / 'lengths.png').exists()
  assert names['found']['lengths'] == [16, 48]
  assert names['out'].shape == (2, 256, 4, 32) and names['alpha'].raw.shape == (2, 4, 256)


def test_files_that_are_named_exist():
  for target in re.findall(r'\]\(([^)#:]+)\)', README):
    assert (ROOT / target).exists(), target
  for folder in re.findall(r'^\| `(sink_jax/\w+)`', README, re.MULTILINE):
    assert (ROOT / folder / '__init__.py').exists()


def test_slots_in_the_table_are_all_there_are():
  from sink_jax.attention.spec import SLOTS
  from sink_jax.slot import choices

  for slot, base in SLOTS.items():
    row = next(line for line in README.splitlines() if line.startswith(f'| `{slot}`'))
    for name in choices(base):
      assert re.search(rf'`{name}[`(]', row), f'{name} is missing from the row of {slot}'
