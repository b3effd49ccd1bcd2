"""A command is the same however it is started: by `sink-jax`, by the package, by its older name."""

import dataclasses
import importlib.metadata
import importlib.util
import os
import runpy
import subprocess
import sys
import tomllib
import types

import pytest
import tyro

from sink_jax.cli import entry, options
from sink_jax.train import provenance
from sink_jax.train.checkpoint import CheckpointError
from tests.train.runs import ROOT

FORMS = ('script', 'package', 'older')
# What an installer writes for an entry of [project.scripts].
SCRIPT = """
import sys
from {module} import {function}
if __name__ == '__main__':
  sys.exit({function}())
"""


def console_script():
  """The entry point of `sink-jax`, as an installed package has it."""
  scripts = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']['scripts']
  assert set(scripts) == {'sink-jax'}
  return importlib.metadata.EntryPoint('sink-jax', scripts['sink-jax'], 'console_scripts')


def write_script(folder):
  path = folder / 'sink-jax'
  point = console_script()
  path.write_text(SCRIPT.format(module=point.module, function=point.attr))
  return path


def start(form, name):
  """Starts a command in this process with the options that `sys.argv` has."""
  if form == 'older':
    runpy.run_module(f'sink_jax.{name}', run_name='__main__')
    return
  sys.argv.insert(1, name)
  if form == 'package':
    runpy.run_module('sink_jax', run_name='__main__')
  else:
    sys.exit(console_script().load()())


@dataclasses.dataclass(frozen=True)
class Options:
  name: tyro.conf.Positional[str]
  steps: int


@pytest.fixture
def stub(monkeypatch):
  """Puts a function in the place of a command's `main`."""
  def put(name, function):
    module = types.ModuleType(f'sink_jax.cli.{name.replace(".", "_")}')
    module.main = function
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(options.COMMANDS, name, ('what it does', Options))

  return put


@pytest.mark.parametrize('form', FORMS)
def test_every_form_gives_a_command_its_options_and_ends_with_its_code(form, stub, monkeypatch):
  def ends(name, function):
    stub(name, function)
    monkeypatch.setattr(sys, 'argv', ['program', '--steps=3', 'more'])
    with pytest.raises(SystemExit) as end:
      start(form, name)
    return end.value.code

  found = []
  assert ends('train', found.append) is None and found == [Options(name='more', steps=3)]
  assert ends('benchmark', lambda options: 3) == 3
  assert ends('sweep', lambda options: sys.exit(42)) == 42

  def fails(options):
    raise CheckpointError('no\nrun')

  assert ends('export', fails) == 'error: no run'


@pytest.mark.parametrize('words, recorded', [
    (['/env/bin/sink-jax', 'train', '--workdir=a b'], "sink-jax train '--workdir=a b'"),
    (['-P', '-m', 'sink_jax', 'sweep', '--list'], 'python -m sink_jax sweep --list'),
    (['-m', 'sink_jax.train', '--bos'], 'python -m sink_jax.train --bos')])
def test_records_have_the_command_as_a_person_typed_it(words, recorded, monkeypatch):
  monkeypatch.setattr(sys, 'orig_argv', ['/usr/bin/python3', *words])
  monkeypatch.delenv('SINK_JAX_COMMAND', raising=False)
  assert provenance.command() == recorded
  # A process that this one starts has another command line, and names this one all the same.
  monkeypatch.setenv('SINK_JAX_COMMAND', '')  # restored when the test ends
  os.environ.pop('SINK_JAX_COMMAND')
  provenance.pass_on_command()
  monkeypatch.setattr(sys, 'orig_argv', ['python', '-c', 'spawn_main()'])
  assert provenance.command() == recorded


def test_processes_that_a_command_starts_do_not_start_it_again(monkeypatch, tmp_path):
  """multiprocessing's spawn runs the main module once more, under the name __mp_main__."""
  monkeypatch.setattr(entry, 'start', lambda name: pytest.fail(f'{name} was started'))
  monkeypatch.setattr(sys, 'argv', ['program', 'train'])
  runpy.run_path(str(write_script(tmp_path)), run_name='__mp_main__')
  for name in ('', *(f'.{name}' for name in options.COMMANDS if name != 'data_build')):
    spec = importlib.util.find_spec(f'sink_jax{name}')
    module = f'sink_jax{name}.__main__' if spec.submodule_search_locations else f'sink_jax{name}'
    runpy.run_module(module, run_name='__mp_main__')


# Starts a command, and ends where jax would be imported, with the name of what answers SIGTERM.
BEFORE_JAX = """
import runpy, signal, sys
class Finder:
  def find_spec(self, name, path=None, target=None):
    if name.split('.')[0] == 'jax':
      sys.exit(getattr(signal.getsignal(signal.SIGTERM), '__name__', 'nothing'))
sys.meta_path.insert(0, Finder())
name = sys.argv.pop(1)
run = runpy.run_path if name.startswith('/') else runpy.run_module
run(name, run_name='__main__')
"""


def test_train_and_sweep_answer_signals_before_jax_is_imported(tmp_path):
  words = [[*first, name] for name in ('train', 'sweep')
           for first in ([str(write_script(tmp_path))], ['sink_jax'])]
  words += [['sink_jax.train'], ['sink_jax.sweep']]
  options = [f'--config={ROOT}/configs/base.py', f'--workdir={tmp_path}']
  started = [subprocess.Popen([sys.executable, '-P', '-c', BEFORE_JAX, *line, *options], text=True,
                              stderr=subprocess.PIPE, env=dict(os.environ, PYTHONPATH=str(ROOT)))
             for line in words]
  for line, process in zip(words, started):
    _, err = process.communicate(timeout=120)
    assert err.strip() == '_exit_saved', (line, err)
