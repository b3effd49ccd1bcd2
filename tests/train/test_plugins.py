"""Files of components: a training records those that it used; a stored run imports no others."""

import json
import os
import sys

import pytest

from sink_jax.io.paths import cache_root, import_file
from sink_jax.train import plugins
from sink_jax.train.config import as_dict
from sink_jax.train.workdir import check_workdir
from tests.train import runs

VARIANT = '''
import jax
from configs import base
from sink_jax.attention.similarity import Similarity
from tests.train.runs import SMALL

class OwnPlus(Similarity):
  """f(s) = log(1 + exp(s))."""

  def __call__(self, s):
    return jax.nn.softplus(s)

OWN = SMALL | {'attention.similarity': 'OwnPlus()', 'attention.kv_bias': 'KVBias()'}
TRIALS = {'one': OWN, 'two': OWN | {'steps': 4}}
get_config = lambda name='': base.trial(TRIALS, name, 'own')
'''


@pytest.fixture
def file(tmp_path, monkeypatch):
  """A file that this process has imported, and its importing again appends a line to `imports`."""
  monkeypatch.setenv('SINK_JAX_CACHE', str(tmp_path / 'cache'))
  path = tmp_path / 'own.py'
  path.write_text(f'open({str(tmp_path / "imports")!r}, "a").write("imported\\n")\n')
  import_file(path)
  yield path
  forget(path)


def forget(path):
  for name, module in list(sys.modules.items()):
    if getattr(module, '__file__', None) == str(path):
      del sys.modules[name]


def imported_again(path):
  """Whether a stored config that names the file has it imported, if it was not before."""
  forget(path)
  marks = path.with_name('imports')
  before = marks.read_text()
  plugins.import_recorded({'plugins': f'{path.parent}/missing.py, {path}'})
  return marks.read_text() != before


def test_a_recorded_file_is_imported_while_it_is_unchanged(file):
  assert not imported_again(file)
  import_file(file)
  plugins.record_plugins(str(file))
  assert imported_again(file)
  content = file.read_text()
  file.write_text(content + '#')
  assert not imported_again(file)
  file.write_text(content)
  assert imported_again(file)
  file.rename(file.with_name('moved.py'))
  assert not imported_again(file) and not imported_again(file.with_name('moved.py'))


def test_a_file_that_this_process_has_not_imported_is_not_recorded(file):
  forget(file)
  plugins.record_plugins(str(file))
  assert not cache_root().exists()


def test_the_record_of_another_person_counts_for_nobody_else(file, monkeypatch):
  monkeypatch.setattr(plugins, '_record', lambda path: path.with_name('record'))  # of all people
  plugins.record_plugins(str(file))
  assert imported_again(file)
  me = os.getuid()
  monkeypatch.setattr(os, 'getuid', lambda: me + 1)
  assert not imported_again(file)


def test_a_training_does_not_need_a_place_for_records(file, monkeypatch):
  file.with_name('taken').write_text('')
  monkeypatch.setenv('SINK_JAX_CACHE', str(file.with_name('taken')))
  plugins.record_plugins(str(file))
  assert not imported_again(file)


# A process that begins without the component.
READERS = """
import sys
from pathlib import Path
import sink_jax as sj
from tests.commands import run_here

def run(name, *options):
  code, _, error = run_here(name, *options)
  assert code == 0, error

one, out, file = map(Path, sys.argv[1:])
recorded = file.read_text()
file.write_text(recorded + '# a change')
run('report', f'--runs={one.parent}', f'--out={out}')  # needs no component
try:
  sj.load_run(one)
except ValueError as error:
  print(error)
file.write_text(recorded)
run('evaluate', f'--workdir={one}', '--sequences=2')
print(sj.load_run(one).config.attention.similarity)
"""


def test_runs_with_a_component_of_ones_own_are_resumed_swept_and_read(tmp_path):
  """Each step is a process of its own, which begins without the component."""
  file, root = tmp_path / 'own.py', tmp_path / 'runs'
  file.write_text(VARIANT)
  one, two = root / 'one', root / 'two'
  python = lambda *words: runs.run_python(*words, SINK_JAX_CACHE=str(tmp_path / 'cache'))
  sweep = lambda processes: python(
    '-m', 'sink_jax', 'sweep', f'--config={file}', f'--workdir={root}', f'--processes={processes}'
  )
  assert sweep(2) == 'one: done\ntwo: done\n'
  rows, written = runs.rows(one), (two / 'status.json').stat().st_mtime_ns
  # As if killed after step 4 of a trial, which is resumed; the other one is not trained again.
  for name in ('checkpoints/8', 'checksums/8.0.json', 'status.json'):
    (one / name).rename(tmp_path / name.replace('/', '-'))
  assert sweep(1) == 'one: done\ntwo: done\n'
  assert runs.rows(one) == rows and (one / 'checkpoints/8').exists()
  assert (two / 'status.json').stat().st_mtime_ns == written
  refused, loaded = python('-c', READERS, one, tmp_path / 'report', file).splitlines()
  assert str(file) in refused and '--plugins' in refused and 'attention.similarity' in refused
  assert loaded == 'OwnPlus()' and (one / 'evaluation/index.html').exists()
  assert 'OwnPlus()' in (tmp_path / 'report/report.md').read_text()


def test_a_run_of_another_config_is_refused_without_its_component(tmp_path):
  config = as_dict(runs.config())
  config['attention'] |= {'mask': 'NoMaskOfOurs()'}
  (tmp_path / 'config.json').write_text(json.dumps(config))
  with pytest.raises(ValueError, match='another config:\n  attention.mask: .*NoMaskOfOurs'):
    check_workdir(tmp_path, runs.config())
