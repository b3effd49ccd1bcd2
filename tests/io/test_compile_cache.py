"""Programs on disk: second starts, entries that are damaged, several processes, folders."""

import json
import os
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import monitoring
from jax.experimental.compilation_cache import compilation_cache as of_jax

from sink_jax.io import compile_cache
from sink_jax.io.compile_cache import VARIABLE, Programs
from tests.train.runs import rows

ROOT = Path(__file__).parents[2]
SETTINGS = ('jax_compilation_cache_dir', 'jax_compilation_cache_max_size',
            'jax_persistent_cache_min_compile_time_secs',
            'jax_persistent_cache_min_entry_size_bytes', 'jax_enable_compilation_cache')
HIT = '/jax/compilation_cache/cache_hits'
MADE = '/jax/core/compile/backend_compile_duration'  # by the compiler, or read

COUNTED = f'''
import atexit, collections, sys
from jax import monitoring
from sink_jax.cli import command

seen = collections.Counter()
monitoring.register_event_listener(lambda event, **_: seen.update([event]))
monitoring.register_event_duration_secs_listener(lambda event, *_, **__: seen.update([event]))
atexit.register(lambda: print('counted', seen['{MADE}'], seen['{HIT}']))
command.run('sweep', sys.argv[1:])
'''

# The first trial of the quickstart, with fewer steps.
SHORT = '''
from configs import base, quickstart

name, changes = next(iter(quickstart.TRIALS.items()))
TRIALS = {{name: changes | {{
    'steps': 4, 'log_every': 1, 'validation.batches': 1, 'probe.sequences': 2,
    'data.source': "TextFolder(path='{text}')", 'data.cache_dir': '{data}'}}}}
get_config = lambda name: base.trial(TRIALS, name)
'''

SMALL_PROGRAMS = '''
import jax, jax.numpy as jnp
from sink_jax.io import compile_cache
compile_cache.enable()
for n in range(1, 9):
  assert float(jax.jit(lambda x: jnp.sin(x) @ x.T + n)(jnp.eye(3))[0, 0]) > n
'''

KILLED = '''
import os, signal
from sink_jax.io.compile_cache import Programs

def half(path, value):
  with open(path, 'wb') as file:
    file.write(value[:len(value) // 2])
  os.kill(os.getpid(), signal.SIGKILL)

programs = Programs('.')
type(programs.path).write_bytes = half
programs.put('key', bytes(1000))
'''


@pytest.fixture
def unset():
  """JAX as it is where nobody has configured a cache; afterwards as it was."""
  before = {name: getattr(jax.config, name) for name in SETTINGS}
  jax.config.update('jax_compilation_cache_dir', None)
  of_jax.reset_cache()
  yield
  for name, value in before.items():
    jax.config.update(name, value)
  of_jax.reset_cache()


@pytest.fixture
def enabled(unset, monkeypatch, tmp_path):
  """The folder of an enabled cache."""
  monkeypatch.setenv(VARIABLE, str(tmp_path / 'compiled'))
  compile_cache.enable()
  return tmp_path / 'compiled' / compile_cache.kind()


def start(folder, *arguments):
  environment = {name: value for name, value in os.environ.items()
                 if name != 'JAX_COMPILATION_CACHE_DIR'}
  environment |= {VARIABLE: str(folder), 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT)}
  folder.mkdir(exist_ok=True)
  return subprocess.Popen([sys.executable, '-P', '-c', *arguments], text=True, env=environment,
                          cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(*processes):
  for process in processes:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    yield out, err


def entries(folder):
  return {path.name: path.read_bytes() for path in folder.rglob('*-cache')}


def compiled(call):
  """How many programs the compiler makes during a call."""
  jax.clear_caches()
  seen = {MADE: 0, HIT: 0}
  def duration(event, *_, **__):
    if event == MADE:
      seen[MADE] += 1
  def event(event, **_):
    if event == HIT:
      seen[HIT] += 1
  monitoring.register_event_duration_secs_listener(duration)
  monitoring.register_event_listener(event)
  try:
    with warnings.catch_warnings():
      warnings.simplefilter('error')
      call()
  finally:
    monitoring.unregister_event_listener(event)
    monitoring.unregister_event_duration_listener(duration)
  return seen[MADE] - seen[HIT]


@pytest.mark.full
def test_the_second_start_of_the_quickstart_compiles_nothing_and_has_the_same_bits(tmp_path):
  (tmp_path / 'text').mkdir()
  for i in range(40):
    (tmp_path / 'text' / f'{i}.txt').write_text(f'{i} is a number, and {i + 1} another. ' * 20)
  (tmp_path / 'short.py').write_text(SHORT.format(text=tmp_path / 'text', data=tmp_path / 'data'))
  counts, stored, found = [], [], []
  for place in 'cold', 'warm':
    [(out, err)] = finish(start(tmp_path / 'compiled', COUNTED, f'--workdir={tmp_path / place}',
                                f'--config={tmp_path / "short.py"}'))
    assert 'not kept' not in err
    counts.append([int(count) for count in re.findall(r'counted (\d+) (\d+)', out)[0]])
    stored.append(entries(tmp_path / 'compiled'))
    [run] = (tmp_path / place).glob('*/')
    found.append((rows(run), json.loads((run / 'analyses.json').read_text())))
  (cold, cold_read), (warm, warm_read) = counts
  assert cold - cold_read > 10
  assert warm == warm_read == cold
  assert stored[0] == stored[1]  # nor did the process that measures the device compile
  assert found[0] == found[1]


def test_two_processes_share_a_folder_from_the_first_program_on(tmp_path):
  list(finish(*[start(tmp_path, SMALL_PROGRAMS) for _ in range(2)]))
  made = entries(tmp_path)
  assert len(made) >= 8
  [folder] = tmp_path.iterdir()
  for name in made:
    assert Programs(folder).get(name.removesuffix('-cache'))  # whole
  list(finish(start(tmp_path, SMALL_PROGRAMS)))
  assert entries(tmp_path) == made


def test_what_a_killed_writer_left_is_removed_and_stored_again(tmp_path):
  process = start(tmp_path, KILLED)
  process.communicate(timeout=60)
  assert process.returncode == -signal.SIGKILL
  [half] = entries(tmp_path).values()
  assert len(half) == 516
  programs = Programs(tmp_path)  # whose lock is free
  programs.put('other', b'another')  # with JAX 0.10 its look at all entries fails at such a one
  assert programs.get('other') == b'another'
  assert programs.get('key') is None and 'key-cache' not in entries(tmp_path)
  programs.put('key', bytes(1000))
  assert programs.get('key') == bytes(1000)


@pytest.mark.parametrize('damage', [
    lambda entry: b'', lambda entry: entry[:-1], lambda entry: entry[:10],
    lambda entry: entry[:len(entry) // 2] + bytes(len(entry) - len(entry) // 2),
    lambda entry: entry + b'.'], ids=['empty', 'a byte', 'cut', 'zeros', 'longer'])
def test_a_damaged_entry_is_compiled_again_without_a_word(enabled, damage):
  function = lambda x: jnp.cos(x) @ x.T
  x = jnp.arange(12.0).reshape(3, 4)
  first = np.asarray(jax.jit(function)(x))
  assert compiled(lambda: jax.jit(function)(x)) == 0
  whole = entries(enabled)
  for name in whole:
    (enabled / name).write_bytes(damage(whole[name]))
  results = []
  assert compiled(lambda: results.append(np.asarray(jax.jit(function)(x)))) > 0
  np.testing.assert_array_equal(results[0], first)
  assert compiled(lambda: jax.jit(function)(x)) == 0


def test_programs_beyond_the_size_make_room_by_their_last_use(tmp_path):
  programs = Programs(tmp_path, max_size=64_000)
  for i in range(40):
    programs.put(f'{i}', bytes(1968))
    assert programs.get('0')  # which is used all the time
  (tmp_path / '39-atime').unlink()  # as by a process that was killed between the two files
  programs = Programs(tmp_path, max_size=64_000)
  for i in range(40, 100):
    programs.put(f'{i}', bytes(1968))
    assert programs.get('0')
    assert sum(map(len, entries(tmp_path).values())) <= 64_000
  assert {'0-cache', '99-cache'} <= set(entries(tmp_path)) and '1-cache' not in entries(tmp_path)


def test_a_folder_is_not_searched_for_every_program(tmp_path, monkeypatch):
  looked, look = [], type(Programs(tmp_path).path).glob
  monkeypatch.setattr(type(Programs(tmp_path).path), 'glob',
                      lambda *x: looked.append(x) or look(*x))
  programs = Programs(tmp_path)
  for i in range(20):
    programs.put(f'{i}', bytes(1000))
  assert len(looked) == 2  # by us and by JAX, before the first


@pytest.mark.parametrize('folder, reason', [
    ('file/below', 'file'), ('gs://bucket/compiled', 'gs://bucket/compiled is no folder')])
def test_a_folder_that_cannot_be_written_costs_one_line(unset, monkeypatch, tmp_path, caplog,
                                                        folder, reason):
  (tmp_path / 'file').write_text('')
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv(VARIABLE, folder)
  compile_cache.enable()
  [record] = caplog.records
  text = record.getMessage()
  assert reason in text and f'{VARIABLE}=/FOLDER' in text and '\n' not in text
  assert jax.config.jax_compilation_cache_dir is None
  assert compiled(lambda: jax.jit(jnp.sin)(1.0)) > 0


def test_a_folder_that_fails_later_costs_one_line(tmp_path, monkeypatch, caplog):
  programs = compile_cache.Programs(tmp_path)
  programs.put('a', b'1')
  monkeypatch.setattr(programs, 'lock_timeout_secs', 0.05)
  with compile_cache.Programs(tmp_path).locked():  # as by a process that was stopped
    assert programs.get('a') is None
    programs.put('b', b'2')
  assert programs.get('a') is None  # it does not try again
  [record] = caplog.records
  assert VARIABLE in record.getMessage()
  assert compile_cache.Programs(tmp_path).get('a') == b'1'

  def full(*_):
    raise OSError(28, 'No space left on device')

  others = compile_cache.Programs(tmp_path)
  monkeypatch.setattr(compile_cache.LRUCache, 'put', full)
  others.put('c', b'3')
  others.put('d', b'4')
  assert 'No space left' in caplog.records[1].getMessage() and len(caplog.records) == 2


def test_a_user_without_a_home_costs_one_line(unset, monkeypatch, caplog):
  def nobody(*_):
    raise KeyError('no such user')

  for name in ('HOME', 'SINK_JAX_CACHE', VARIABLE):
    monkeypatch.delenv(name, raising=False)
  monkeypatch.setattr('pwd.getpwuid', nobody)
  compile_cache.enable()
  assert 'no such home directory' in caplog.records[0].getMessage()


def test_the_folder_is_below_that_of_all_caches(unset, monkeypatch, tmp_path):
  monkeypatch.delenv(VARIABLE, raising=False)
  monkeypatch.setenv('SINK_JAX_CACHE', str(tmp_path))
  compile_cache.enable()
  assert jax.config.jax_compilation_cache_dir == str(tmp_path / 'compiled' / compile_cache.kind())
  assert jax.config.jax_compilation_cache_max_size == 4 << 30
  assert not jax.config.jax_raise_persistent_cache_errors
  compile_cache.enable()  # once more changes nothing


def test_an_empty_value_stores_nothing_and_settings_of_jax_stay(unset, monkeypatch, tmp_path):
  monkeypatch.setenv(VARIABLE, '')
  compile_cache.enable()
  assert jax.config.jax_compilation_cache_dir is None
  monkeypatch.setenv(VARIABLE, str(tmp_path / 'ours'))
  for theirs in (str(tmp_path / 'theirs'), ''):  # an empty one is none
    jax.config.update('jax_compilation_cache_dir', theirs)
    compile_cache.enable()
    assert jax.config.jax_compilation_cache_dir == theirs
  jax.config.update('jax_compilation_cache_dir', None)
  jax.config.update('jax_enable_compilation_cache', False)
  compile_cache.enable()
  assert not list(tmp_path.iterdir())


def test_programs_of_other_machines_lie_apart(monkeypatch):
  here = compile_cache.kind()
  assert re.fullmatch(rf'{re.escape(jax.lib.__version__)}-cpu-[0-9a-f]{{16}}', here)
  assert compile_cache.kind() == here
  for name, value in (('usable_cores', 1000), ('_cpu_features', 'others')):
    with monkeypatch.context() as changed:
      changed.setattr(compile_cache, name, lambda: value)
      assert compile_cache.kind() != here
  assert compile_cache._cpu_features()
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  assert compile_cache.kind() == f'{jax.lib.__version__}-gpu'


@pytest.mark.parametrize('command', [
    'cli/train', 'cli/sweep', 'sweep/pool', 'sweep/estimate', 'cli/evaluate', 'cli/analyses',
    'cli/generate', 'cli/benchmark'])
def test_commands_that_compile_enable_it(command):
  assert 'compile_cache.enable()' in (ROOT / 'sink_jax' / f'{command}.py').read_text()
